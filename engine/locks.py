"""The lock on the name of a run: while one process writes under a name, no other one does."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout


class NameLock:
    """A lock file on a name. The operating system frees it when its process ends, however it ends.

    It is filelock's, which PyTorch brings: flock, LockFileEx, or the file's existence where a disk has neither.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._lock = FileLock(path, thread_local=False)

    def acquire(self) -> bool:
        """Take the lock, and return whether that went well: False while another process has it."""
        while not self._lock.is_locked:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                return False
            if not self.path.exists():  # its last owner has removed the file that is locked now: try the next one
                self._lock.release()
        return True

    def release(self) -> None:
        """Free the name and remove the file; nothing happens where this object has no lock."""
        if self._lock.is_locked:
            self.path.unlink(missing_ok=True)
            self._lock.release()
