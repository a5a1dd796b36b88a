"""The lock on the name of a run: a file that says which process uses it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from utils import host_name, is_running, shorten

STALE_SECONDS = 60.0  # a lock without an owner that is older was left by a process that died while making it
RETRY_SECONDS = 0.01  # while another process looks at a lock that a dead one left


class NameLock:
    """A file that says which process uses a name, for as long as that process lives.

    Not the kernel's locks: those say nothing of whose they are, and are no good on many network file systems.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.mine = json.dumps({"host": host_name(), "process": os.getpid(), "started": _start_of(os.getpid())})

    def acquire(self) -> str | None:
        """Take the lock; returns None, or in words who has it.

        Only that of a process of this machine that has ended is taken over.
        """
        while True:
            try:
                handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                content = self._read()
                if content is not None and (holder := self._holder(content)):
                    return holder
                if content is not None:
                    self._clear(content)
                continue
            with open(handle, "w", encoding="utf-8") as file:
                file.write(self.mine)
            return None

    def release(self) -> None:
        if self._read() == self.mine:
            self.path.unlink(missing_ok=True)

    def _read(self) -> str | None:
        """None where there is no such file, or no more."""
        with suppress(FileNotFoundError):
            return self.path.read_text(encoding="utf-8", errors="replace")
        return None

    def _holder(self, content: str) -> str | None:
        try:
            owner = json.loads(content)
            host, process, started = owner["host"], int(owner["process"]), owner["started"]
        except (ValueError, TypeError, KeyError):  # not written yet, or cut short by a full disk
            return "a process that is just starting" if _age(self.path) < STALE_SECONDS else None
        if host != host_name():
            return f"process {process} on {shorten(str(host))}; remove {self.path} if that run is over"
        is_same = is_running(process) and started in (None, _start_of(process))
        return f"process {process} on this machine" if is_same else None

    def _clear(self, content: str) -> None:
        """Remove the lock of a process that is gone.

        One process at a time looks and removes: between the two, another one might have taken the name.
        """
        turn = self.path.with_suffix(".turn.lock")
        try:
            os.close(os.open(turn, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            if _age(turn) > STALE_SECONDS:  # its process died in its turn
                turn.unlink(missing_ok=True)
            time.sleep(RETRY_SECONDS)
            return
        try:
            if self._read() == content:
                self.path.unlink()
        finally:
            turn.unlink()


def _age(path: Path) -> float:
    """Seconds since a file was written; none for one that is not there."""
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _start_of(process: int) -> str | None:
    """When a process began, since numbers are given again; None where Linux's /proc does not tell."""
    try:
        # the name, which stands in brackets, may hold spaces
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
