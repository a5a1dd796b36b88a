"""Damaged and hostile files: a reader returns something whole or raises `UserError`, and never runs what it reads."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import random_llama
from error_helpers import MarkerWriter, PickledEval, executes_when_unpickled
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from classifier import LlamaEmbeddingClassifier
from engine.checkpointer import Checkpointer, identity_of
from engine.data import create_data, read_label_names
from engine.methods import EpochResult
from engine.runs import load_classifier, record_of
from engine.storage import save_tensors
from engine.weights import load_llama_model
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError, prompt_suffix


def fuzz(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),  # shrinking reads thousands of files before it says what failed
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Refuses to let a test need 4 GiB more address space than the process has: a damaged size must not be believed."""
    resource = pytest.importorskip("resource")
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    if pages is None:
        yield
        return
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**32, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


# --------------------------------------------------------------------------------------------------- mutations

MUTATION = st.tuples(
    st.sampled_from(("flip", "flip", "flip", "set", "set", "insert", "delete", "cut", "repeat")),
    st.integers(0, 2**32 - 1),  # where
    st.integers(0, 255),  # what, or how much
)


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    return draw(st.lists(MUTATION, min_size=1, max_size=3))


def mutate(content: bytes, changes: list[tuple[str, int, int]], spans: list[tuple[int, int]]) -> bytes:
    """Apply `changes`, most of them within `spans`, the parts of a file that say how to read the rest."""
    data = bytearray(content)
    for kind, where, value in changes:
        start, end = spans[where % len(spans)]
        end = min(end, len(data))
        if start >= end:
            continue
        at = start + where // len(spans) % (end - start)
        if kind == "flip":
            data[at] ^= 1 << value % 8
        elif kind == "set":
            data[at] = value
        elif kind == "insert":
            data[at:at] = bytes([value]) * (1 + value % 9)
        elif kind == "delete":
            del data[at : at + 1 + value % 9]
        elif kind == "cut":
            del data[at:]
        else:
            data[at:at] = data[start : start + 1 + value]
    return bytes(data)


def zip_spans(content: bytes) -> list[tuple[int, int]]:
    """Where a file of torch.save keeps its pickle, its small records, its directory; and the whole of it."""
    archive = zipfile.ZipFile(io.BytesIO(content))
    spans = []
    for info in archive.infolist():
        size = info.file_size if info.file_size < 20_000 and "/data/" not in info.filename else 0
        spans.append((info.header_offset, info.header_offset + 80 + len(info.filename) + size))
    pickled = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
    pickle_span = (pickled.header_offset, pickled.header_offset + 100 + pickled.file_size)
    return [*spans[:4], pickle_span, pickle_span, pickle_span, (archive.start_dir, len(content)), (0, len(content))]


def legacy_spans(content: bytes) -> list[tuple[int, int]]:
    """The pickles of the format before PyTorch 1.6 come first, then the storages."""
    return [(0, 200), (0, 8_000), (0, 8_000), (len(content) - 500, len(content)), (0, len(content))]


def refusals(path: Path, whole: bytes, spans: list, examples: int, read: Callable[[Path], object]) -> list[bool]:
    """Read mutants of a file; whether each was refused, by a `UserError` that names the file."""
    refused = []

    @fuzz(examples)
    @given(changes=mutations())
    def check(changes: list) -> None:
        path.unlink(missing_ok=True)  # a new file: the old one may still be mapped into memory
        path.write_bytes(mutate(whole, changes, spans))
        try:
            read(path)
            refused.append(False)
        except UserError as error:
            assert str(path) in str(error)
            refused.append(True)

    check()
    return refused


# --------------------------------------------------------------------------------------------- data and mapping


@fuzz(300)
@given(content=st.binary(max_size=200), num_labels=st.sampled_from((None, 2, 5)), is_test=st.booleans())
@example(content=b"\x00 ||| \x00", num_labels=2, is_test=False)
@example(content="٣ ||| three".encode(), num_labels=5, is_test=False)
@example(content="0 ||| a\u2028b\x85c\x0cd\n".encode(), num_labels=2, is_test=False)
def test_random_data(tmp_path: Path, content: bytes, num_labels: int | None, is_test: bool) -> None:
    check_data(tmp_path, content, num_labels, is_test)


def check_data(folder: Path, content: bytes, num_labels: int | None, is_test: bool) -> bool:
    """Read `content` as a data file; what is accepted must say what the bytes say. Returns whether it was."""
    path = folder / "data.txt"
    path.write_bytes(content)
    try:
        examples = create_data(path, num_labels, is_test=is_test)
    except UserError as error:
        assert str(path) in str(error)
        return False
    text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    lines = text.removesuffix("\n").split("\n")
    assert len(examples) == len(lines) > 0
    for found, line in zip(examples, lines, strict=True):
        label, sentence = line.split(" ||| ", maxsplit=1)
        assert (found.label, found.sentence) == (int(label), sentence.strip())
        assert found.sentence
        assert (is_test and found.label == -1) or 0 <= found.label
        assert num_labels is None or found.label < num_labels
    return True


@fuzz(300)
@given(changes=mutations(), is_test=st.booleans())
def test_mutated_data(films: dict[str, Path], tmp_path: Path, changes: list, is_test: bool) -> None:
    whole = films["train"].read_bytes()
    check_data(tmp_path, mutate(whole, changes, [(0, len(whole))]), 2, is_test)


def test_unmutated_data_is_accepted(films: dict[str, Path], tmp_path: Path) -> None:
    assert check_data(tmp_path, films["train"].read_bytes(), 2, False)


def check_mapping(folder: Path, content: bytes) -> None:
    path = folder / "names.json"
    path.write_bytes(content)
    try:
        names = read_label_names(path)
    except UserError as error:
        assert str(path) in str(error)
        return
    assert names == json.loads(content.decode("utf-8-sig"))
    assert all(isinstance(name, str) and name.strip() for name in names)
    assert len(set(names)) == len(names) >= 2
    prompt_suffix(names).encode("utf-8")  # what the tokenizer will be asked to do


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@fuzz(200)
@given(content=st.binary(max_size=80))
@example(content=b'["\\ud800", "b"]')
@example(content=b"[" + b"7" * 5000 + b"]")
@example(content=b"[" * 50_000)
@example(content=b"NaN")
def test_random_mapping(tmp_path: Path, content: bytes) -> None:
    check_mapping(tmp_path, content)


@fuzz(200)
@given(value=JSON_VALUES | st.lists(st.text(max_size=4), max_size=5))
def test_any_json_as_mapping(tmp_path: Path, value: object) -> None:
    check_mapping(tmp_path, json.dumps(value).encode())


@fuzz(200)
@given(changes=mutations())
def test_mutated_mapping(tmp_path: Path, changes: list) -> None:
    whole = b'["bad", "so-so", "caf\\u00e9", "good"]'
    check_mapping(tmp_path, mutate(whole, changes, [(0, len(whole))]))


# --------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def checkpoint_bytes(tiny_checkpoint: Path) -> dict[str, bytes]:
    """The tiny checkpoint in today's zip format and in the one before it."""
    legacy = io.BytesIO()
    content = torch.load(tiny_checkpoint, weights_only=True)
    torch.save(content, legacy, _use_new_zipfile_serialization=False)
    return {"zip": tiny_checkpoint.read_bytes(), "legacy": legacy.getvalue()}


def load_whole(path: Path) -> None:
    """Asserts that a Llama that loads has the shapes that its config says, and runs."""
    model = load_llama_model(path)
    config = model.config
    state = model.state_dict()
    assert state["tok_embeddings.weight"].shape == (config.vocab_size, config.dim)
    assert len(state) == 3 + 9 * config.n_layers
    assert all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in state.values())
    with torch.inference_mode():
        logits, _ = model(torch.tensor([[1 % config.vocab_size, 2 % config.vocab_size]]))
    assert logits.shape == (1, 1, config.vocab_size)


def is_accepted(path: Path) -> bool:
    try:
        load_whole(path)
    except UserError as error:
        assert str(path) in str(error)
        return False
    return True


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_unmutated_checkpoint_loads(checkpoint_bytes: dict[str, bytes], tmp_path: Path, form: str) -> None:
    (tmp_path / "model.pt").write_bytes(checkpoint_bytes[form])
    assert is_accepted(tmp_path / "model.pt")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form, spans", [("zip", zip_spans), ("legacy", legacy_spans)])
def test_mutated_checkpoint(
    checkpoint_bytes: dict[str, bytes], tmp_path: Path, form: str, spans: Callable[[bytes], list[tuple[int, int]]]
) -> None:
    """`filterwarnings`: a remark of torch.load would stand on standard error beside the one line."""
    whole = checkpoint_bytes[form]
    refused = refusals(tmp_path / "model.pt", whole, spans(whole), 400, load_whole)
    assert 20 < sum(refused) < len(refused) - 20  # damage of both kinds: seen, and in the weights


@pytest.mark.parametrize("form", ["zip", "legacy"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_truncated_checkpoint(checkpoint_bytes: dict[str, bytes], tmp_path: Path, form: str, share: float) -> None:
    whole = checkpoint_bytes[form]
    (tmp_path / "model.pt").write_bytes(whole[: int(share * len(whole))])
    assert not is_accepted(tmp_path / "model.pt")


@fuzz(150)
@given(content=st.binary(max_size=300), start=st.sampled_from((b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04\x95")))
@pytest.mark.filterwarnings("error")
def test_random_bytes_as_checkpoint(tmp_path: Path, content: bytes, start: bytes) -> None:
    path = tmp_path / "model.pt"
    path.unlink(missing_ok=True)
    path.write_bytes(start + content)
    assert not is_accepted(path)


ODD_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from((0, 1, 2, 3, 16, 10**400))
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.integers(), max_size=2)
    | st.just(torch.ones(2))
)
TINY = random_llama()
FIELDS = (*vars(TINY.config), "unknown")


@pytest.mark.slow
@fuzz(250)
@given(changes=st.dictionaries(st.sampled_from(FIELDS) | st.integers(), ODD_VALUES, min_size=1, max_size=3))
def test_any_model_args(tmp_path: Path, changes: dict) -> None:
    path = tmp_path / "model.pt"
    path.unlink(missing_ok=True)
    torch.save({"model": TINY.state_dict(), "model_args": {**vars(TINY.config), **changes}}, path)
    is_accepted(path)


# ------------------------------------------------------------------------------------------------ hostile pickles


def place(payload: object, where: str, state: dict, model_args: dict) -> object:
    """`payload` somewhere in what a checkpoint holds."""
    return {
        "alone": payload,
        "beside": {"model": state, "model_args": model_args, "optimizer": payload},
        "in model_args": {"model": state, "model_args": {**model_args, "dim": payload}},
        "as a key": {"model": state, "model_args": {**model_args, payload: 1}},
        "in the state": {"model": {**state, "norm.weight": payload}, "model_args": model_args},
        "deep": {"model": state, "model_args": model_args, "notes": [[{"a": (payload,)}]]},
    }[where]


WRITERS = {
    "pickle": lambda content, path: path.write_bytes(pickle.dumps(content)),
    "pickle protocol 0": lambda content, path: path.write_bytes(pickle.dumps(content, protocol=0)),
    "zip": lambda content, path: torch.save(content, path),
    "legacy": lambda content, path: torch.save(content, path, _use_new_zipfile_serialization=False),
}
READERS = {
    "load_llama_model": load_llama_model,
    "load_classifier": load_classifier,
    "load_resume_point": lambda path: resume(path, *classifier_and_optimizer()),
    "the owner of a model file": identity_of,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", [MarkerWriter, PickledEval])
@pytest.mark.parametrize("where", ["alone", "beside", "in model_args", "as a key", "in the state", "deep"])
@pytest.mark.parametrize("form", WRITERS)
def test_code_in_a_file_is_never_run(tmp_path: Path, form: str, where: str, kind: type, reader: str) -> None:
    marker, path, model = tmp_path / "marker", tmp_path / "model.pt", random_llama()
    WRITERS[form](place(kind(marker), where, dict(model.state_dict()), vars(model.config)), path)
    assert not marker.exists()
    if reader == "the owner of a model file":
        assert READERS[reader](path) == {}
    else:
        with pytest.raises(UserError, match="model.pt"):
            READERS[reader](path)
    assert not marker.exists()


@pytest.mark.parametrize("kind", [MarkerWriter, PickledEval])
def test_the_bait_is_live(tmp_path: Path, kind: type) -> None:
    """The test above would pass on code that does nothing."""
    assert executes_when_unpickled(kind(tmp_path / "marker"), tmp_path / "marker")


# ------------------------------------------------------------------------------ saved classifiers, resume points


class Settings:
    num_labels, hidden_dropout_prob, option, pad_id = 2, 0.1, "finetune", 3


UNTRAINED = LlamaEmbeddingClassifier(Settings, llama=random_llama())


def classifier_and_optimizer() -> tuple[LlamaEmbeddingClassifier, AdamW]:
    model = copy.deepcopy(UNTRAINED)  # a third of the time of making one
    return model, AdamW(model.parameters(), lr=0.001)


def saver_at(folder: Path, tokenizer_model: Path | None = None) -> Checkpointer:
    record = {}
    if tokenizer_model is not None:
        tokenizer = Tokenizer(tokenizer_model=tokenizer_model)
        record = record_of(classifier_and_optimizer()[0], tokenizer, ["bad", "good"], 8)
    return Checkpointer(folder / "saved.pt", folder / "model.pt", record, {"seed": 1})


def resume(path: Path, model: LlamaEmbeddingClassifier, optimizer: AdamW) -> list[EpochResult]:
    return saver_at(path.parent).load_resume_point(model, optimizer)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A folder with what one epoch leaves behind: the best model and the resume point."""
    folder = tmp_path_factory.mktemp("run")
    model, optimizer = classifier_and_optimizer()
    model(torch.tensor([[1, 5, 6]])).sum().backward()
    optimizer.step()
    result = EpochResult(0, 0.7, 0.5, 0.5, 1.0, True)
    checkpointer = saver_at(folder, tiny_tokenizer)
    checkpointer.save_model(model, result)
    checkpointer.save_resume_point(model, optimizer, [result])
    return folder


@pytest.mark.filterwarnings("error")
def test_mutated_resume_point(saved_run: Path, tmp_path: Path) -> None:
    whole, path = (saved_run / "model.pt").read_bytes(), tmp_path / "model.pt"
    model, optimizer = classifier_and_optimizer()
    path.write_bytes(whole)
    (tmp_path / "saved.pt").write_bytes((saved_run / "saved.pt").read_bytes())
    assert [asdict(result) for result in resume(path, model, optimizer)] == [
        asdict(EpochResult(0, 0.7, 0.5, 0.5, 1.0, True))
    ]

    def read(path: Path) -> None:
        assert all(isinstance(result, EpochResult) for result in resume(path, *classifier_and_optimizer()))

    random_state = torch.get_rng_state()
    refused = refusals(path, whole, zip_spans(whole), 250, read)
    torch.set_rng_state(random_state)
    assert sum(refused) > 20


@pytest.mark.filterwarnings("error")
def test_mutated_classifier(saved_run: Path, tmp_path: Path) -> None:
    whole, path = (saved_run / "saved.pt").read_bytes(), tmp_path / "saved.pt"
    shutil.copy(saved_run / "saved.pt", path)
    load_classifier(path)
    refused = refusals(path, whole, zip_spans(whole), 250, load_classifier)
    assert 20 < sum(refused) < len(refused) - 20


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.builds(lambda size: torch.zeros(size), st.integers(0, 3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("identity", "model", "optimizer", "rng", "history", "cpu", "w")), inner)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def resume_point(saved_run: Path) -> dict:
    return torch.load(saved_run / "model.pt", weights_only=True)


@pytest.mark.slow
@fuzz(150)
@given(junk=JUNK, part=st.sampled_from(("identity", "model", "optimizer", "rng", "history")))
def test_resume_point_with_a_foreign_part(resume_point: dict, tmp_path: Path, junk: object, part: str) -> None:
    save_tensors(tmp_path / "model.pt", {**resume_point, part: junk})
    try:
        history = resume(tmp_path / "model.pt", *classifier_and_optimizer())
    except UserError as error:
        assert "model.pt" in str(error)
    else:
        assert all(isinstance(result, EpochResult) for result in history)


# ------------------------------------------------------------------------------------------------------ tokenizers


def test_mutated_tokenizer(tiny_tokenizer: Path, tmp_path: Path) -> None:
    whole = tiny_tokenizer.read_bytes()
    pieces = (0, 5_000)  # before the long table of character normalisation
    spans = [pieces, pieces, (0, len(whole)), (len(whole) - 2_000, len(whole))]

    def read(path: Path) -> None:
        tokenizer = Tokenizer(tokenizer_model=path)
        ids = tokenizer.encode("A warm film, un café", bos=True, eos=True)
        assert all(0 <= token_id < tokenizer.n_words for token_id in ids)
        assert 0 <= tokenizer.pad_id < tokenizer.n_words

    refused = refusals(tmp_path / "mutated.model", whole, spans, 500, read)
    assert 20 < sum(refused) < len(refused) - 20


@fuzz(200)
@given(content=st.binary(max_size=300))
def test_random_bytes_as_tokenizer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "random.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match="random.model"):
        Tokenizer(tokenizer_model=path)
