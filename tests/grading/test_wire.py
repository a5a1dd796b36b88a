"""Messages of a student's process are bytes that anybody may have written: they are read whole or refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grading import wire
from grading.answers import slopes_of
from grading.student_process import short_repr

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "none": torch.empty(0, 4),
    "ids": torch.tensor([[1, 2]]),
    "b": torch.ones(3),
}
TENSORS |= {"turned": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T, "number": torch.tensor(2.5)}


@pytest.fixture
def read_back(tmp_path: Path) -> Callable[[bytes], tuple[dict, bytes] | None]:
    """What `wire.read` makes of bytes; they come from a file, as a pipe holds some of them at a time."""

    def read(message: bytes) -> tuple[dict, bytes] | None:
        (tmp_path / "message").write_bytes(message)
        with open(tmp_path / "message", "rb") as file:
            return wire.read(file.fileno())

    return read


def test_a_message_comes_out_as_it_went_in(read_back: Callable):
    header, data = read_back(wire.pack({"token": "x", "settings": {"n": [1, 2.5, None]}}, TENSORS))
    assert header["token"] == "x" and header["settings"] == {"n": [1, 2.5, None]}
    found = wire.unpack(header, data)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    assert read_back(b"") is None and read_back(wire.pack({"token": "x"})[:-1]) is None


def test_damaged_messages_are_refused(read_back: Callable):
    generator = random.Random(0)
    message = wire.pack({"token": "x"}, TENSORS)
    for _ in range(2000):
        damaged = bytearray(message)
        for _ in range(generator.choice((1, 1, 3, 20))):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        damaged = damaged[: generator.choice((len(damaged), generator.randrange(len(damaged))))]
        try:
            found = read_back(bytes(damaged))
            tensors = {} if found is None else wire.unpack(*found)
        except wire.Malformed:
            continue
        assert sum(tensor.numel() for tensor in tensors.values()) <= len(message)


def by_hand(text: bytes, data: bytes = b"", sizes: tuple[int, int] | None = None) -> bytes:
    return wire.HEAD.pack(wire.MARK, *(sizes or (len(text), len(data)))) + text + data


@pytest.mark.parametrize("message", [
    by_hand(b"[]"), by_hand(b"{"), by_hand(b"[" * 100_000), by_hand(b"\xff"),
    by_hand(b"{}", sizes=(wire.MAX_TEXT + 1, 0)), by_hand(b"{}", sizes=(2, wire.MAX_BYTES + 1)),
    b"Rotary embedding test passed!\n",
])  # fmt: skip
def test_what_is_no_message_is_refused(read_back: Callable, message: bytes):
    with pytest.raises(wire.Malformed):
        read_back(message)


@pytest.mark.parametrize(
    "table",
    [
        None, {}, [1], [["a", "float64"]], [[1, "float64", [1]]], [["a", "object", [1]]], [["a", 3, [1]]],
        [["a", "float64", [-1]]], [["a", "float64", [True]]], [["a", "float64", [2]]], [["a", "float64", "1"]],
        [["a", "float64", [1 << 40, 1 << 40]]], [["a", "float64", [1] * 17]], [["a", ["float64"], [1]]], [],
        [["a", "float64", [0, *[1 << 22] * 3]]],
    ],
)  # fmt: skip
def test_a_wrong_table_of_tensors_is_refused(table: object):
    with pytest.raises(wire.Malformed):
        wire.unpack(json.loads(json.dumps({"tensors": table})), bytes(8))


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(wire.Malformed, match="too many"):
        wire.pack({"text": "x" * wire.MAX_TEXT})
    with pytest.raises(wire.Malformed, match="too many"):
        wire.pack({}, {"a": torch.zeros(1).expand(wire.MAX_NUMBERS + 1).double()})


def test_text_of_the_process_is_one_short_line_without_verdicts():
    assert short_repr("a\n b\t c") == "a b c"
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    assert short_repr(nested) == "(list)"
    assert len(short_repr("word " * 1000)) == 200 and short_repr("x" * 300).endswith("...")
    assert short_repr("\x1b[2K ok") == "\\x1b[2K ok"
    assert "passed" not in short_repr("Rotary embedding test passed!") and "correct" not in short_repr("is Correct !")
    assert (
        short_repr("4 arguments were passed to a correct function") == "4 arguments were passed to a correct function"
    )


def test_slopes_of_two_outputs_that_share_a_step():
    x = torch.tensor([0.5, -1.0], dtype=torch.float64)
    weighted = torch.cos(torch.arange(2)) * x.exp()  # the gradient of exp(x), weighted as the answers are
    found = slopes_of(lambda x: ((y := x.exp()), 2 * y), [x])
    torch.testing.assert_close(found, [weighted, 2 * weighted], check_dtype=False, atol=1e-6, rtol=1e-6)
