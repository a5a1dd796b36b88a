"""Saving and loading tensors safely, and the lock on the name of a run.

A file is written whole or not at all; loading verifies checksums and runs no code. Only one process at a time
writes files under a name. Importing this module is fast; PyTorch is imported inside the function that needs it.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils import UserError, atomic_write, hub_hint, require_unpacked, shorten, warn

if TYPE_CHECKING:
    import torch


ZIP_START, PICKLE_START = b"PK\x03\x04", b"\x80"
LOCAL_HEADER = struct.Struct("<26xHH")  # of an entry of a zip file: the lengths of its name and of its extra field
THREAD_WORTH = 16_000_000  # bytes whose checksums take longer than starting a thread on a busy machine
SURROGATE = re.compile("[\ud800-\udfff]")  # a byte of a name that is not text in this locale
DAMAGED = "it is not a PyTorch checkpoint, or it is truncated or damaged"


class Damaged(ValueError):
    """A file cannot be loaded; the message is the reason."""


def save_tensors(path: str | os.PathLike, content: dict[str, Any]) -> None:
    """`torch.save`, whole or not at all. content: tensors and plain values, so that `weights_only=True` can load it."""
    import torch

    with atomic_write(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # PyTorch's zip writer fails again on closing a file that is not whole, which hides a full disk or Ctrl-C
            if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
                raise error.__context__ from None
            raise


def load_tensors(path: str | os.PathLike, *, mmap: bool = True, warns: bool = True) -> Any:
    """Load a file of `torch.save` to the CPU: tensors and plain Python values, nothing else.

    `weights_only=True` never runs code from the file, and every checksum in it is verified. mmap: map files in the zip
    format into memory, so that a tensor is read from disk when it is used; not for tensors that outlive the file.
    (PyTorch maps no file whose name is not UTF-8: it is read.)
    warns: warn if the file has no checksums. Raises `UserError` if the file is missing, damaged, or has other content.
    """
    import torch

    try:
        with open(path, "rb") as file:
            start = file.read(8)
            is_zip = start.startswith(ZIP_START)
            if not is_zip and not start.startswith(PICKLE_START):
                require_unpacked(path, start)
                raise Damaged(DAMAGED)  # a web page, for example
            has_checksums = is_zip and verify_archive(file)
        is_mapped = mmap and is_zip and not SURROGATE.search(str(path))
        with warnings.catch_warnings():  # torch.load's warnings about such files would appear beside our one line
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist{hub_hint(path)}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UserError:
        raise
    except Damaged as error:
        raise UserError(f"cannot load {path}: {error}") from None
    except Exception as error:  # a damaged or foreign file makes the unpickler raise errors of many classes
        if "weights_only" in str(error):
            reason = "it holds Python objects other than tensors and plain values, which are never unpickled here"
        else:
            reason = DAMAGED
        raise UserError(f"cannot load {path}: {reason}") from None
    if warns and not has_checksums:
        warn(f"{path} holds no checksums, so damage to its numbers would not be noticed")
    return content


def verify_archive(file: Any) -> bool:
    """Check the size and the CRC-32 of every record of a PyTorch archive; False if it was written without checksums.

    (PyTorch does not verify the checksums on reading.) 170 MB take less than 0.1 s. Raises `Damaged`.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except Exception:  # damaged bytes make zipfile raise errors of a dozen unrelated classes
        raise Damaged(DAMAGED) from None
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise Damaged("its records are compressed, as if it had been zipped again; save it anew with torch.save")
    size = file.seek(0, os.SEEK_END)
    lies = any(each.file_size != each.compress_size or each.header_offset < 0 for each in records)
    if lies or sum(record.file_size for record in records) > size:
        raise Damaged(DAMAGED)
    filled = [record for record in records if record.file_size]
    threads = max(1, min(os.cpu_count() or 1, size // THREAD_WORTH))
    with ThreadPoolExecutor(threads) as pool:
        sums = [*pool.map(partial(_checksum, file.fileno()), filled)]
    wrong = [record for record, found in zip(filled, sums, strict=True) if found != record.CRC]
    if not wrong:
        return True
    if any(record.CRC for record in filled):
        raise Damaged(f"it is damaged: the checksum of {shorten(wrong[0].filename)} is not that of its bytes")
    return False


def _checksum(file: int, record: zipfile.ZipInfo) -> int:
    """file: its descriptor, which several threads read at places of their own."""
    header = os.pread(file, LOCAL_HEADER.size, record.header_offset)
    if len(header) < LOCAL_HEADER.size:
        raise Damaged(DAMAGED)
    start = record.header_offset + LOCAL_HEADER.size + sum(LOCAL_HEADER.unpack(header))
    checksum, left = 0, record.file_size
    while left and (chunk := os.pread(file, min(left, 1 << 20), start + record.file_size - left)):
        checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
    if left:
        raise Damaged(DAMAGED)
    return checksum


# ------------------------------------------------------------------------------------------------------------ memory

CONTROL_GROUPS = Path("/sys/fs/cgroup")
LIMITS = {  # of a folder of control groups, version 2 and 1: the files of the limit, and of what is used
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
DONT_NEED = 4  # of Linux's mman.h


def require_memory(path: str | os.PathLike, needed: float, precision: str, remedy: str) -> None:
    """Raise `UserError` if a model needs more bytes in this precision than are free. path: its file, for the error."""
    free = free_memory()
    if free is not None and needed > free:
        sizes = f"{needed / 1e9:.2f} GB of memory in {precision}, and {free / 1e9:.2f} GB are free"
        raise UserError(f"{path} needs {sizes}; {remedy}")


def free_memory() -> float | None:
    """The bytes that this process can still get: of the machine, or of its control groups. None if unknown."""
    try:
        kilobytes = _numbers_in(Path("/proc/meminfo"))["MemAvailable:"]
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, KeyError, ValueError):  # not Linux
        return None
    free: float = kilobytes * 1024
    for group in groups:
        _, kinds, place = group.split(":", 2)
        if kinds in LIMITS:
            folder = CONTROL_GROUPS / kinds / place.lstrip("/")
            free = min([free, *(_free_in(each, *LIMITS[kinds]) for each in (folder, *folder.parents))])
    return free


def _free_in(folder: Path, limit: str, used: str) -> float:
    """The free bytes of a control group; infinite where there is no limit. Pages of files can be taken back."""
    try:
        files = _numbers_in(folder / "memory.stat")
        cached = sum(files.get(f"{name}_file", 0) for name in ("active", "inactive"))
        at_most, now = (int((folder / name).read_text(encoding="utf-8")) for name in (limit, used))
        return max(0, at_most - now + cached)
    except (OSError, ValueError):  # no such folder, or "max"
        return float("inf")


def _numbers_in(file: Path) -> dict[str, int]:
    """The first number after each name in a file of the system."""
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}


def forget_pages(tensor: torch.Tensor) -> None:
    """Let the system take back the memory of a tensor that lies in a mapped file, which nothing writes to.

    Its pages are read again when they are used. A tensor that lies elsewhere stays as it is.
    """
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    first = tensor.data_ptr() // page * page if page else 0
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    if page and _is_in_file(first, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), DONT_NEED)


def _is_in_file(first: int, end: int) -> bool:
    """Whether these addresses are those of a mapped file (whose number, unlike that of other memory, is not 0)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                addresses, _, _, _, number = line.split()[:5]
                start, stop = (int(address, 16) for address in addresses.split("-"))
                if start <= first < stop:
                    return end <= stop and number != "0"
    except OSError:  # not Linux
        pass
    return False


# --------------------------------------------------------------------------------------------------- the lock on a name


class NameLock:
    """A lock file on a name. The operating system releases the lock when its process ends, even after a crash.

    It uses the library filelock, which PyTorch installs: flock, LockFileEx or, on a disk with neither, the file itself.
    """

    def __init__(self, path: str | os.PathLike):
        from filelock import FileLock  # here: text is generated without a lock, and sooner without this import

        self.path = Path(path)
        self._lock = FileLock(path, thread_local=False)

    def acquire(self) -> bool:
        """Try to take the lock. Returns whether this object has it now; False: another process has it."""
        from filelock import Timeout

        while not self._lock.is_locked:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                return False
            if not self._has_named_file():  # the last owner has removed this file: lock the new one of this name
                self._lock.release()
        return True

    def _has_named_file(self) -> bool:
        """Whether the locked file is the one of this name; a third process may have made and locked a new one.

        Recent versions of filelock see to that themselves; version 3.20 does not, and PyTorch installs any. The file's
        descriptor is private there: without it, any file of this name counts.
        """
        descriptor = getattr(getattr(self._lock, "_context", None), "lock_file_fd", None)
        try:
            named = os.stat(self.path)
            return descriptor is None or os.path.samestat(os.fstat(descriptor), named)
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock and remove its file; does nothing if this object does not have the lock."""
        if self._lock.is_locked:
            self.path.unlink(missing_ok=True)
            self._lock.release()
