"""Files that are damaged, locked or in the way: nothing is lost, and nothing wrong is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT, random_llama

import utils
from engine.locks import NameLock
from engine.storage import load_tensors, save_tensors
from engine.weights import load_pretrained
from utils import UserError, atomic_write, host_name

CONTENT = {"model": {"a": torch.arange(3000.0), "b": torch.ones(7)}, "empty": torch.ones(0), "epoch": 3}


def numbers(path: Path) -> list[torch.Tensor]:
    content = load_tensors(path)
    return [content["model"]["a"], content["model"]["b"]]


def test_no_flipped_bit_changes_what_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "x.pt"
    save_tensors(path, CONTENT)
    whole, expected = path.read_bytes(), numbers(path)
    refused = 0
    for position in range(0, len(whole), 37):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :])
        try:
            found = numbers(path)
        except (UserError, KeyError, TypeError):  # the same names are not promised, only the same numbers
            refused += 1
            continue
        assert all(map(torch.equal, found, expected))
    assert refused > 0.8 * len(whole) / 37  # the rest fall on padding, dates and the like
    assert capsys.readouterr().err == ""


def test_an_error_while_saving_is_raised_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("for a reason of its own")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="of its own"):
        save_tensors(tmp_path / "x.pt", CONTENT)
    assert not list(tmp_path.iterdir())


def archive_without(path: Path, names: str) -> None:
    """Write 0 for the checksum of some records, as `torch.serialization.set_crc32_options(False)` has it."""
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if names in record.filename]
    for record in records:
        checksum = record.CRC.to_bytes(4, "little")
        for _ in range(raw.count(checksum)):
            position = raw.index(checksum)
            raw[position : position + 4] = bytes(4)
    path.write_bytes(raw)


def test_without_checksums_a_file_loads_with_a_warning_and_a_mixture_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    path, legacy = tmp_path / "x.pt", tmp_path / "legacy.pt"
    save_tensors(path, CONTENT)
    archive_without(path, "")
    torch.save(CONTENT, legacy, _use_new_zipfile_serialization=False)
    for file in (path, legacy):
        assert torch.equal(numbers(file)[0], CONTENT["model"]["a"])
        assert "holds no checksums" in capsys.readouterr().err
    save_tensors(path, CONTENT)
    archive_without(path, "data/0")
    with pytest.raises(UserError, match="checksum of archive/data/0"):
        load_tensors(path)


@pytest.mark.parametrize("size", [1000, 400_000_000])
def test_an_archive_that_was_zipped_again_is_refused_as_that(tmp_path: Path, size: int):
    save_tensors(tmp_path / "x.pt", CONTENT)
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as archive,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as again,
    ):
        for name in archive.namelist():
            again.writestr(name, archive.read(name))
        with again.open("x/data.pkl2", "w", force_zip64=True) as file:  # which is never unpacked
            for _ in range(0, size, 1_000_000):
                file.write(bytes(min(size, 1_000_000)))
    start = time.perf_counter()
    with pytest.raises(UserError, match="zipped again"):
        load_tensors(tmp_path / "y.pt")
    assert time.perf_counter() - start < 1.0


def nested(depth: int = 40) -> list:
    value: list = []
    for _ in range(depth):
        value = [value, value]
    return value


LARGE = {"lists": nested(), "number": 10**5000, "text": "x" * 10**6, "dict": {"a": nested()}}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("field", ["dim", "rope_theta", "attention", "no such field", "model_args"])
def test_values_of_any_size_are_quoted_briefly(tmp_path: Path, value: object, field: str):
    model = random_llama()
    arguments = value if field == "model_args" else {**vars(model.config), field: value}
    torch.save({"model": model.state_dict(), "model_args": arguments}, tmp_path / "x.pt")
    start = time.perf_counter()
    with pytest.raises(UserError) as caught:
        load_pretrained(tmp_path / "x.pt")
    assert len(str(caught.value)) < 500 and time.perf_counter() - start < 2.0


def test_what_a_message_quotes_is_short_and_does_nothing_to_a_terminal():
    assert utils.printable("a film") == "a film" and utils.printable(Path("é/ü")) == "é/ü"
    for text in ("\x1b[31m", "a\nb", "\ud800", "\0" * 10**6, "x" * 10**6, "\u202e" * 200):
        assert utils.printable(text).isprintable() and len(utils.printable(text)) <= 100
    names = ["b", "\x1b[2J", *"cdefghijklmn"]
    assert utils.join_names(names) == "b, '\\x1b[2J', c, d, e, f, g, h, i, j and 4 more"
    assert utils.join_names(iter(names), 1) == "b and 13 more" and utils.join_names([]) == ""


# ------------------------------------------------------------------------------------------ temporary files, locks


def a_dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def lock_of_a_dead_process() -> dict[str, object]:
    return {"host": host_name(), "process": a_dead_process(), "started": None}


def test_leftovers_of_dead_processes_alone_are_removed(tmp_path: Path):
    kept = [f".minllama-{host_name()}-{os.getppid()}-abc.tmp", ".minllama-elsewhere-1-abc.tmp", ".minllama-abc.tmp"]
    for name in (*kept, f".minllama-{host_name()}-{a_dead_process()}-abc.tmp"):
        (tmp_path / name).write_text("half")
    with atomic_write(tmp_path / "out.txt") as file:
        file.write("whole")
        mine = [path for path in tmp_path.iterdir() if f"-{os.getpid()}-" in path.name]
        assert len(mine) == 1  # beside the file, because a rename works within one disk only
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "out.txt"}


def test_a_lock_is_held_by_one_and_taken_from_the_dead(tmp_path: Path):
    path = tmp_path / "run.lock"
    first, second = NameLock(path), NameLock(path)
    assert first.acquire() is None
    assert f"process {os.getpid()} on this machine" in second.acquire()
    first.release()
    assert not path.exists() and second.acquire() is None
    dead = lock_of_a_dead_process()
    for content, holder in (
        (json.dumps(dead), None),
        (json.dumps({**dead, "process": os.getpid(), "started": "1"}), None),  # the number was given again
        (json.dumps({**dead, "host": "elsewhere"}), "elsewhere"),
        ("", "just starting"),
    ):
        path.write_text(content)
        taken = NameLock(path).acquire()
        assert taken is None if holder is None else holder in taken
    os.utime(path, (0, 0))
    assert NameLock(path).acquire() is None


def test_of_many_that_take_a_dead_ones_lock_one_has_it(tmp_path: Path):
    path = tmp_path / "run.lock"
    dead = json.dumps(lock_of_a_dead_process())
    for _ in range(50):
        path.write_text(dead)
        with ThreadPoolExecutor(4) as pool:
            holders = list(pool.map(lambda _: NameLock(path).acquire(), range(4)))
        assert holders.count(None) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_that_was_taken_while_one_looked_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = NameLock(tmp_path / "run.lock"), NameLock(tmp_path / "run.lock")
    first.path.write_text(json.dumps(lock_of_a_dead_process()))
    look = second._holder

    def look_slowly(content: str) -> str | None:
        monkeypatch.setattr(second, "_holder", look)
        holder = look(content)
        assert holder is None and first.acquire() is None
        return holder

    monkeypatch.setattr(second, "_holder", look_slowly)
    assert f"process {os.getpid()} on this machine" in second.acquire()


def test_a_dead_ones_lock_is_removed_by_one_at_a_time(tmp_path: Path):
    lock, turn = NameLock(tmp_path / "run.lock"), tmp_path / "run.turn.lock"
    dead = json.dumps(lock_of_a_dead_process())
    lock.path.write_text(dead)
    turn.touch()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock.acquire)
        time.sleep(0.2)
        assert not waiting.done()
        turn.unlink()
        assert waiting.result() is None
    lock.path.write_text(dead)
    turn.touch()
    os.utime(turn, (0, 0))  # its process has died
    assert lock.acquire() is None and list(tmp_path.iterdir()) == [lock.path]


def test_no_module_needs_the_kernels_locks():
    code = "import sys; sys.modules['fcntl'] = None; import engine.locks, engine.storage, engine.training, run_llama"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ------------------------------------------------------------------------------------------------ numbers in text


@pytest.mark.parametrize("text", ["1_0", "١", "1.0", " 1", "", "0x1", "１"])
def test_only_plain_digits_are_whole_numbers(text: str):
    with pytest.raises(ValueError):
        utils.whole_number(text)
    assert utils.whole_number("-12") == -12
