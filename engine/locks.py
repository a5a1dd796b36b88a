"""The lock on the name of a run: only one process at a time writes files under a name."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout


class NameLock:
    """A lock file on a name. The operating system releases the lock when its process ends, even after a crash.

    It uses the library filelock, which PyTorch installs: flock, LockFileEx or, on a disk with neither, the file itself.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._lock = FileLock(path, thread_local=False)

    def acquire(self) -> bool:
        """Try to take the lock. Returns whether this object has it now; False: another process has it."""
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
