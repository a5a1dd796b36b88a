"""The process of a student's code, seen from the script: its pipes, its end, and how the script ends it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from grading import wire
from grading.programs import ROOT

LOOK = 0.1  # seconds between two looks whether the process still lives
# Seconds for an answer on its way, once the process has ended. More than a busy machine keeps a thread waiting: a right
# answer that comes late would be called wrong.
LAST_WORDS = 5.0
SPOILT = "closed the pipe of its answers, or wrote to it"
LONGEST_OUTPUT = 8000  # bytes that are kept of what the process prints
# Small models judge: beside another busy program, threads that wait for one another took twenty times as long.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
START = """import sys; sys.path = [*filter(None, sys.path), sys.argv[1], *sys.argv[3:]]
from grading.child import main; main()"""


def libraries(folder: Path) -> list[str]:
    """The folders of PYTHONPATH, without the student's: no file there may hide grading/ or a library."""
    added = (os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
    return [path for path in added if folder not in (Path(path), *Path(path).parents)]


class Process:
    """A running process of the student's code, and what it sends."""

    def __init__(self, folder: Path, scratch: str):
        flags = ["-B"] * sys.dont_write_bytecode
        inherited = {name: os.environ[name] for name in os.environ if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        self.start(
            [sys.executable, *flags, "-c", START, str(ROOT), str(folder), *libraries(folder)],
            {**ONE_THREAD, **inherited, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch)},
            folder,
        )

    def start(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        """Run a command in a folder, and read what it sends and prints from now on."""
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True,  # no terminal, and a process group that can be ended as a whole
        )  # fmt: skip
        self.messages: queue.Queue = queue.Queue(maxsize=4)
        self.output, self.printed = b"", 0
        self.drain = threading.Thread(target=self._drop_output, daemon=True)
        for thread in (threading.Thread(target=self._read_messages, daemon=True), self.drain):
            thread.start()

    def _read_messages(self) -> None:
        """Put every message into the queue; None at the end of the pipe, or at bytes that are not a message."""
        message: tuple[dict, bytes] | None = ({}, b"")
        while message is not None:
            try:
                message = wire.read(self.process.stdout.fileno())
            except (wire.Malformed, OSError, ValueError):
                message = None
            self.messages.put(message)

    def _drop_output(self) -> None:
        """Read all that the process prints, so that it never waits; keep the end of it for `last_line`."""
        with contextlib.suppress(OSError, ValueError):
            while printed := os.read(self.process.stderr.fileno(), 1 << 16):
                self.output = (self.output + printed)[-LONGEST_OUTPUT:]
                self.printed += len(printed)

    def last_line(self) -> str:
        """The last line that an ended process printed, unchanged, or ""."""
        self.drain.join(LAST_WORDS)
        return self.output.decode(errors="replace").rstrip().rpartition("\n")[2]

    def send(self, message: bytes) -> None:
        """Write in a thread: a process that does not read must not stop the script."""

        def write() -> None:
            with contextlib.suppress(OSError, ValueError):  # the process has ended: `receive` finds that
                wire.write(self.process.stdin.fileno(), message)

        threading.Thread(target=write, daemon=True).start()

    def receive(self, deadline: float) -> tuple[dict, bytes] | None:
        """The next message; None if the process or its pipe has ended. Raises `TimeoutError` at the deadline.

        A copy of the process may hold the pipe open after its end, so the process itself is polled as well.
        """
        while (left := deadline - time.monotonic()) > 0:  # also of a process that never stops sending
            has_ended = self.process.poll() is not None
            try:
                return self.messages.get(timeout=min(LAST_WORDS if has_ended else LOOK, left))
            except queue.Empty:
                if has_ended:
                    return None
        raise TimeoutError

    def how_it_ended(self) -> str:
        """As text, after `receive` has returned None: an exit status, a signal, or a spoilt pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS)
        status = self.process.returncode
        if status is None or status == wire.CLOSED:
            return SPOILT
        if status >= 0:
            return f"ended the process (exit status {status})"
        name = signal.Signals(-status).name if -status in {*signal.Signals} else "unknown"
        return f"was ended by a signal ({name})"

    def kill(self) -> None:
        """End the process and its whole group."""
        with contextlib.suppress(OSError, AttributeError):  # Windows has no process groups
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS)
