"""Run in the box before any student's code: tries each limit and PyTorch; prints a JSON list of the limits that hold.

`sys.argv[1]`: JSON with what to try, from `sandbox.probe`. Imports nothing of this project.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import signal
import socket
import sys
import time

NEW_USERS = 0x10000000  # CLONE_NEWUSER
FEWEST = 8  # processes and threads that honest code may need


def net(told: dict) -> bool:
    """Whether the port on which the grader listens cannot be reached."""
    try:
        socket.create_connection(("127.0.0.1", told["port"]), 2).close()
    except OSError:
        return True
    return False


def pids(told: dict) -> bool:
    """Whether the number of processes is limited, and not to fewer than are needed."""
    copies: list[int] = []
    try:
        while len(copies) <= told["processes"]:
            copy = os.fork()
            if copy == 0:
                time.sleep(60)
                os._exit(0)
            copies.append(copy)
    except OSError:
        pass
    for copy in copies:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)
    return FEWEST <= len(copies) <= told["processes"]


def memory(told: dict) -> bool:
    try:
        mmap.mmap(-1, told["memory"] + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    return False


def disk(told: dict) -> bool:
    """Whether a file of the limit's size and one byte more cannot be written, and none at all elsewhere."""
    for folder in ("/", "/dev", os.getcwd(), os.path.dirname(__file__), "/usr"):
        try:
            os.close(os.open(os.path.join(folder, "minllama-probe"), os.O_CREAT | os.O_WRONLY))
            return False
        except OSError:
            pass
    for folder in (os.environ["TMPDIR"], "/dev/shm"):
        try:
            for name in "12":  # two files: not the limit on one of them alone
                with open(os.path.join(folder, name), "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, told["disk"] // 2 + mmap.PAGESIZE)
            return False
        except OSError:
            pass
        finally:
            for name in "12":
                if os.path.exists(os.path.join(folder, name)):
                    os.remove(os.path.join(folder, name))
    return True


def outside(told: dict) -> bool:
    return not any(map(os.path.exists, told["hidden"]))


def others(told: dict) -> bool:
    """Whether no process but those of the box can be seen, and no variable that is not the box's."""
    numbers = [name for name in os.listdir("/proc") if name.isdigit()]
    for number in numbers:
        try:
            with open(f"/proc/{number}/environ", "rb") as file:
                names = {text.partition("=")[0] for text in file.read().decode().split("\0") if text}
            if names - {*told["variables"]}:
                return False
        except OSError:
            pass
    return len(numbers) <= 3


def users(told: dict) -> bool:
    return ctypes.CDLL(None).unshare(NEW_USERS) != 0


def main() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    told = json.loads(sys.argv[1])
    held = [one.__name__ for one in (net, pids, memory, disk, outside, others, users) if one(told)]
    sys.path += told["libraries"]
    importlib.import_module("torch")  # under the same limits as a student's code: no box without it
    print(json.dumps(held))


if __name__ == "__main__":
    main()
