"""A box without bubblewrap, for a container that runs one submission and has no namespaces to give: another user.

The code cannot read or change what is root's alone, its use of the machine is limited, and its processes are ended by
their user. It sees the container's other files, its network and the list of its processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from grading.programs import GradingError
from grading.sandbox import Box, Entry, every_process

STUDENT = 61_234  # a user ID that nobody else has: all its processes are the code's
END_LIMIT = 10.0  # seconds


class UserBox(Box):
    """A box whose `user` is a real user ID. Only root can use it."""

    def enter(self, home: Path) -> Entry:
        code, scratch = home / "code", home / "scratch"
        environment = self.environment(str(scratch))
        return Entry([*self.become, *self.limited], environment, code, str(code), str(home / "grader"))

    def prepare(self, home: Path) -> None:
        if os.geteuid() != 0 or not self.user:
            raise GradingError("only root can give the code a user of its own")
        super().prepare(home)
        os.chown(home, 0, 0)
        home.chmod(0o711)
        (home / "scratch").mkdir(mode=0o700)
        os.chown(home / "scratch", self.user, self.user)

    def members(self, process: int) -> list[int]:
        """The processes of the user, without those that have ended: in a container nobody may remove them."""
        alive = re.compile(rf"\nState:\t[^Z].*\nUid:\t{self.user}\t", re.DOTALL)
        return [number for number, status in every_process("status") if alive.search(status)]

    def files(self, members: list[int]) -> int:
        """Not counted: the disk is the container's."""
        return 0

    def end(self, process: int) -> None:
        """End all processes of the user; they are stopped first, so that none starts others."""
        deadline, number = time.monotonic() + END_LIMIT, signal.SIGSTOP
        while (members := self.members(process)) and time.monotonic() < deadline:
            for member in members:
                with contextlib.suppress(OSError):
                    os.kill(member, number)
            number = signal.SIGKILL
            time.sleep(0.01)
