"""The signals that end a run early: Ctrl-C, and SIGTERM, which `kill` and batch systems such as Slurm send."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM has ended the run; everything that handles Ctrl-C handles it in the same way."""


def status_of(error: KeyboardInterrupt) -> int:
    """The usual exit status of a program that a signal has ended: 128 plus the number of the signal."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def and_kept(error: KeyboardInterrupt, kept: str) -> KeyboardInterrupt:
    """An interrupt of the same class whose message also says which files are kept."""
    return type(error)(f"{str(error) or 'interrupted'}; {kept}")


@contextmanager
def hears_termination() -> Iterator[None]:
    """Let the first SIGTERM raise `Terminated` inside the block, and ignore the next ones.

    Not if another handler is set, nor in a process of torchrun: there SIGTERM means that another process has failed,
    and that one prints the error.
    """
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1" and threading.current_thread() is threading.main_thread()
    if not is_alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated("terminated")

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
