"""The executor that does the runs of a grid on this machine: what a killed process costs, and how all of them end."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from advanced.experiments.processes import Processes


def waits(path: Path) -> None:
    """Name this process in a file, and compute for long."""
    path.write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(60)


def named_in(path: Path) -> int:
    """The process that such a file names, once it is there."""
    for _ in range(600):
        if path.exists() and (text := path.read_text(encoding="utf-8")):
            return int(text)
        time.sleep(0.1)
    raise AssertionError(f"{path} has not come")


def test_a_killed_process_costs_its_own_call_alone(tmp_path: Path):
    with Processes(2) as processes:
        lost = processes.submit(waits, tmp_path / "lost")
        os.kill(named_in(tmp_path / "lost"), signal.SIGKILL)
        others = [processes.submit(os.getpid).result() for _ in range(2)]
    assert others[0] != others[1] and isinstance(lost.exception(), BrokenProcessPool)


def test_the_processes_that_work_end_with_the_executor(tmp_path: Path):
    processes = Processes(1)
    working, waiting = (processes.submit(waits, tmp_path / name) for name in ("working", "waiting"))
    number = named_in(tmp_path / "working")
    processes.shutdown(cancel_futures=True)
    assert isinstance(working.exception(), BrokenProcessPool) and waiting.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
