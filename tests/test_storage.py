"""Files that are damaged, locked or in the way: nothing is lost, and nothing wrong is loaded."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest
import torch
from conftest import ROOT, random_llama

import utils
from convert.directory import read_file
from convert.formats import whole
from engine.storage import NameLock, _is_in_file, forget_pages, load_tensors, save_tensors
from engine.weights import load_llama_model
from explore.page import write_page
from grading import programs
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


def test_a_file_whose_name_is_no_text_is_read_and_written_as_any_other(tmp_path: Path):
    """As a Latin-1 name is, and where the locale is C every name with other letters."""
    path = Path(f"{tmp_path}/m\udcf6.pt")
    save_tensors(path, CONTENT)
    assert all(map(torch.equal, numbers(path), CONTENT["model"].values()))
    safetensors = pytest.importorskip("safetensors.torch")
    path.with_suffix(".safetensors").write_bytes(safetensors.save(CONTENT["model"]))
    found = read_file(path.with_suffix(".safetensors"))
    assert all(torch.equal(found[name], tensor) for name, tensor in CONTENT["model"].items())
    write_page(str(path.with_suffix(".html")), {"model": {"name": path.name}})
    assert "m?.pt" in path.with_suffix(".html").read_text("utf-8")


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


def test_a_record_of_several_pieces_has_one_checksum(tmp_path: Path):
    path, content = tmp_path / "x.pt", {"a": torch.arange(2.0**20), "b": torch.ones(3)}  # 4 MiB
    save_tensors(path, content)
    assert torch.equal(load_tensors(path)["a"], content["a"])
    raw = bytearray(path.read_bytes())
    raw[3 << 20] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="checksum of archive/data/0"):
        load_tensors(path)


@pytest.mark.parametrize("place", [2**62, 2**63, 2**64 - 1, 10**6])
def test_an_archive_that_lies_about_where_its_records_are_is_refused_as_damaged(tmp_path: Path, place: int):
    path = tmp_path / "x.pt"
    save_tensors(path, CONTENT)
    raw = bytearray(path.read_bytes())
    end = raw.rindex(b"PK\x06\x06")  # zip64's, whose last field is the place of the directory
    raw[end + 48 : end + 56] = place.to_bytes(8, "little")
    path.write_bytes(raw)
    with pytest.raises(UserError, match=f"cannot load {path}: it is not a PyTorch checkpoint, or it is truncated"):
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
    start = time.process_time()
    with pytest.raises(UserError, match="zipped again"):
        load_tensors(tmp_path / "y.pt")
    assert time.process_time() - start < 1.0


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
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        load_llama_model(tmp_path / "x.pt")
    assert len(str(caught.value)) < 500 and time.process_time() - start < 2.0


def test_what_a_message_quotes_is_short_and_does_nothing_to_a_terminal():
    assert utils.printable("a film") == "a film" and utils.printable(Path("é/ü")) == "é/ü"
    for text in ("\x1b[31m", "a\nb", "\ud800", "\0" * 10**6, "x" * 10**6, "\u202e" * 200):
        assert utils.printable(text).isprintable() and len(utils.printable(text)) <= 100
    assert utils.printable("x" * 100) == "x" * 100 != utils.printable("x" * 101)
    assert utils.short_repr(2**127) == str(2**127) and utils.short_repr(2**128) == "a number of 129 bits"
    assert utils.one_line("--out é\x1b[2J\n\u202e: wrong") == "--out é\\x1b[2J \\u202e: wrong"
    names = ["b", "\x1b[2J", *"cdefghijklmn"]
    assert utils.join_names(names) == "b, '\\x1b[2J', c, d, e, f, g, h, i, j and 4 more"
    assert utils.join_names(iter(names), 1) == "b and 13 more" and utils.join_names([]) == ""


def test_pages_of_a_file_are_forgotten_and_other_memory_is_not(tmp_path: Path):
    torch.save({"a": torch.arange(10**6)}, tmp_path / "a.pt")
    mapped = torch.load(tmp_path / "a.pt", mmap=True)["a"]
    for tensor in (mapped, torch.arange(10**6)):
        assert int(tensor.sum()) == 499999500000
        forget_pages(tensor)
        assert int(tensor.sum()) == 499999500000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what lies at an address")
def test_a_file_that_is_mapped_to_its_end_is_known(tmp_path: Path):
    size = 4 * mmap.PAGESIZE
    (tmp_path / "numbers").write_bytes(bytes(size))
    mapped = torch.from_file(str(tmp_path / "numbers"), shared=False, size=size // 4)
    first = mapped.data_ptr()
    assert _is_in_file(first, first + size) and not _is_in_file(first, first + size + 1)


# ------------------------------------------------------------------------------------------ temporary files, locks


def a_dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_leftovers_of_dead_processes_alone_are_removed(tmp_path: Path):
    here, dead = host_name(), a_dead_process()
    kept = [f".minllama-{here}-{os.getppid()}-abc.tmp", f".minllama-elsewhere-{dead}-abc.tmp", ".minllama-abc.tmp"]
    for name in (*kept, f".minllama-{here}-{dead}-abc.tmp"):
        (tmp_path / name).write_text("half")
    with atomic_write(tmp_path / "out.txt") as file:
        file.write("whole")
        mine = [path for path in tmp_path.iterdir() if f"-{os.getpid()}-" in path.name]
        assert len(mine) == 1  # beside the file, because a rename works within one disk only
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "out.txt"}


@pytest.mark.parametrize("write", [atomic_write, programs.atomic_write], ids=["utils", "grading"])
def test_nothing_is_left_where_an_interrupt_comes_as_soon_as_the_temporary_file_is_there(
    tmp_path: Path, write: Callable
):
    def interrupt(frame: FrameType, event: str, called: object) -> None:
        if event == "c_return" and called.__name__ == "open" and list(tmp_path.iterdir()):
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), write(tmp_path / "out.txt"):
            pytest.fail("the interrupt did not come")
    finally:
        sys.setprofile(None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [atomic_write, programs.atomic_write, whole])
def test_an_error_without_a_number_keeps_its_words(tmp_path: Path, write: Callable):
    """NumPy says so of a disk that is full."""
    with pytest.raises(OSError) as found, write(tmp_path / "out.txt"):
        raise OSError("9 requested and 0 written")
    assert (found.value.strerror, found.value.filename) == ("9 requested and 0 written", str(tmp_path / "out.txt"))


def test_a_lock_is_held_by_one_and_its_file_goes_with_it(tmp_path: Path):
    path = tmp_path / "run.lock"
    first, second = NameLock(path), NameLock(path)
    assert first.acquire() and first.acquire() and not second.acquire()
    second.release()  # it has none, so it frees none
    assert path.exists() and not second.acquire()
    first.release()
    assert not path.exists() and second.acquire() and not first.acquire()
    second.release()
    path.write_text("left by a process that died")
    assert first.acquire()


def test_a_process_that_dies_frees_its_lock(tmp_path: Path):
    path = tmp_path / "run.lock"
    code = (
        "import sys, engine.storage as l; k = l.NameLock(sys.argv[1]); print(k.acquire(), flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout.readline() == "True\n" and not NameLock(path).acquire()
    owner.kill()
    owner.wait()
    assert NameLock(path).acquire()


def test_of_many_threads_one_has_the_lock(tmp_path: Path):
    path = tmp_path / "run.lock"
    for _ in range(50):
        locks = [NameLock(path) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(NameLock.acquire, locks)].count(True) == 1
        for lock in locks:
            lock.release()
    assert not list(tmp_path.iterdir())


def test_a_file_that_its_owner_removed_meanwhile_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else a third process would lock the next file of that name, and two would have it."""
    lock, paths = NameLock(tmp_path / "run.lock"), []
    acquire = lock._lock.acquire

    def acquire_late(**how: float) -> None:
        acquire(**how)
        paths.append(lock.path.stat().st_ino)
        if len(paths) == 1:
            lock.path.unlink()

    monkeypatch.setattr(lock._lock, "acquire", acquire_late)
    assert lock.acquire() and len(paths) == 2 and not NameLock(lock.path).acquire()
    lock.path.unlink()
    lock.release()  # the file may be gone


def test_a_lock_on_a_removed_file_is_none_though_another_process_has_made_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As filelock 3.20 does it: the second one has opened the file when the first one removes it."""
    first, second, third = (NameLock(tmp_path / "run.lock") for _ in range(3))
    assert first.acquire()
    acquire = second._lock.acquire

    def acquire_removed(**how: float) -> None:
        monkeypatch.setattr(second._lock, "acquire", acquire)
        opened = os.open(second.path, os.O_RDWR)
        first.release()
        assert third.acquire()
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        second._lock._context.lock_file_fd, second._lock._context.lock_counter = opened, 1

    monkeypatch.setattr(second._lock, "acquire", acquire_removed)
    assert not second.acquire() and third.path.exists()
    third.release()
    assert second.acquire()
    second.release()


# ------------------------------------------------------------------------------------------------ numbers in text


@pytest.mark.parametrize("text", ["1_0", "١", "1.0", " 1", "", "0x1", "１"])
def test_only_plain_digits_are_whole_numbers(text: str):
    with pytest.raises(ValueError):
        utils.whole_number(text)
    assert utils.whole_number("-12") == -12
