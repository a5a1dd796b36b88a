"""The box in which a stranger's code runs: bubblewrap, limits of the kernel, and a watch over what they do not count.

In the box there is no network, no other process and no file but Python, the code and a small folder in memory. The box
ends with the program that started it. `open_box` tries each limit before anything of a student's runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from grading.editions import EDITIONS, INSTALLED
from grading.programs import GradingError, printable
from grading.student_process import LOOK, ONE_THREAD, START, TIME_LIMIT, Process

MIB = 1 << 20
CODE, GRADER = "/code", "/grader"  # in the box
NOBODY = 65534  # the user of the box where root grades: no limit on the number of processes holds for root
TOOLS = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux"}  # programs and their packages
WORKER = ("__init__", "child", "wire", "editions", "questions", "answers", "box_probe")  # what the box has
KEPT = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")  # which kernels are right
PROBE_LIMIT = 120.0  # seconds
LIMITS = {
    "net": "isolation from the network",
    "pids": "a limit on the number of processes",
    "memory": "a limit on memory",
    "disk": "a limit on files",
    "outside": "isolation from the files of this machine",
    "others": "isolation from other processes",
    "users": "a ban on new user namespaces",
}
OPTIONAL = ("net", "pids", "memory", "users")  # --allow-without takes these; without the others there is no box
ASK_PYTHON = """import importlib.util, json, os, site, sys
found = [importlib.util.find_spec(name) for name in ("torch", "numpy")]
print(json.dumps({"version": sys.version_info[:2], "prefixes": [sys.prefix, sys.base_prefix],
                  "sites": list(filter(os.path.isdir, site.getsitepackages([sys.prefix, sys.base_prefix]))),
                  "libraries": [os.path.dirname(os.path.dirname(one.origin)) for one in found if one]}))"""


@dataclass(frozen=True)
class BoxLimits:
    """Of one submission. seconds: for a part. total: seconds for all. memory, disk, printed: MiB. files: their number.

    processes: threads count, too.
    """

    seconds: float = TIME_LIMIT
    total: float = 900.0
    memory: int = 2048
    processes: int = 64
    disk: int = 64
    files: int = 5000
    printed: int = 64


class BoxCommand(NamedTuple):
    """How a command is run in a box: its first words, its variables, the current folder; and the folders inside."""

    words: list[str]
    environment: dict[str, str]
    folder: Path
    code: str
    grader: str


@dataclass(frozen=True)
class Box:
    """How a command is started in the box. Made by `open_box`.

    user: the real user ID inside where root grades, else None. mounts: folders of Python. libraries: the folders of
    PyTorch and NumPy. sites: all folders of libraries; the code sees what a set-up of the course brings of them.
    missing: the names in `LIMITS` that this machine does not keep.
    """

    python: str
    limits: BoxLimits = BoxLimits()
    user: int | None = None
    mounts: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def become(self) -> list[str]:
        """The beginning of a command that runs as the box's user."""
        if self.user is None:
            return []
        return ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--no-new-privs", "--"]

    @property
    def limited(self) -> list[str]:
        """The beginning of a command whose use of the machine is limited. Each process has the limit on memory."""
        memory, sizes = self.limits.memory * MIB, {"core": 0, "nofile": 256, "fsize": self.limits.disk * MIB}
        sizes |= {"nproc": self.limits.processes, "data": memory, "as": 8 * memory}  # libraries are mapped, too
        return ["prlimit", *(f"--{name}={size}:{size}" for name, size in sizes.items()), "--"]

    def enter(self, home: Path) -> BoxCommand:
        """How to run a command in the box. home: the folder that `prepare` has filled."""
        words = ["bwrap", "--unshare-all", *["--share-net"] * ("net" in self.missing), "--unshare-user"]
        words += ["--disable-userns"] * ("users" not in self.missing)
        words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        for name, value in self.environment("/tmp").items():
            words += ["--setenv", name, value]
        for path in ("/usr", "/bin", "/lib", "/lib64", "/sbin"):
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                words += ["--ro-bind", path, path]
        for path in ("/etc/ld.so.cache", "/etc/alternatives", "/sys/devices/system/cpu"):
            words += ["--ro-bind-try", path, path]
        size = str(self.limits.disk * MIB)
        words += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/tmp", "--size", size]
        words += ["--tmpfs", "/dev/shm", "--ro-bind", str(home / "code"), CODE]
        for path in self.mounts:
            words += ["--ro-bind", path, path]
        for site in self.sites:
            words += ["--tmpfs", site]
            for path in map(str, of_set_up(site)):
                words += ["--ro-bind", path, path]
            words += ["--remount-ro", site]
        words += ["--ro-bind", str(home / "grader"), GRADER, "--remount-ro", "/dev", "--remount-ro", "/"]
        words = [*self.become, *words, "--chdir", CODE, "--", *self.limited]
        return BoxCommand(words, {"PATH": os.environ.get("PATH", os.defpath)}, Path("/"), CODE, GRADER)

    def environment(self, scratch: str) -> dict[str, str]:
        """All variables that the code sees. scratch: the folder that it may write to."""
        own = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **dict.fromkeys(("HOME", "TMPDIR"), scratch)}
        return {**{name: os.environ[name] for name in KEPT if name in os.environ}, **ONE_THREAD, **own}

    def prepare(self, home: Path) -> None:
        """Make the folders that `enter` needs in an empty folder that the box's user may read, and others may not."""
        for name in ("code", "grader/grading"):
            (home / name).mkdir(parents=True)
        for name in WORKER:
            shutil.copy(Path(__file__).with_name(f"{name}.py"), home / "grader/grading")
        open_to_all(home)
        if self.user is not None:
            os.chown(home, self.user, -1)

    def members(self, process: int) -> list[int]:
        """The numbers of all processes in the box whose outermost process is this one; it is the first."""
        children: dict[int, list[int]] = {}
        for number, stat in every_process("stat"):
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(number)
        found = [process]
        for number in found:  # which grows
            found += children.get(number, ())
        return found

    def excess(self, process: int) -> str:
        """What the processes of a box use beyond the limits that the kernel does not add up, or ""."""
        members, pages = self.members(process), dict(every_process("statm"))
        used = sum(int(pages[one].split()[1]) for one in members if one in pages) * os.sysconf("SC_PAGE_SIZE")
        if used > self.limits.memory * MIB:
            return f"used more than {self.limits.memory:,} MiB of memory"
        most = self.limits.files
        return f"wrote more than {most:,} files" if self.files(members) > most else ""

    def files(self, members: list[int]) -> int:
        """How many files lie in the folders that the code can write to."""
        count = 0
        with contextlib.suppress(OSError):  # it has ended
            for folder in ("/tmp", "/dev/shm") if len(members) > 2 else ():  # the third is the first inside
                there = os.statvfs(f"/proc/{members[-1]}/root{folder}")
                count += there.f_files - there.f_ffree
        return count

    def end(self, process: int) -> None:
        """End what outlives the outermost process: nothing, as the kernel ends the box with it."""


@cache
def of_set_up(site: str) -> list[Path]:
    """The entries of a folder of libraries that a submission may import, or that such libraries bring with them."""
    allowed = INSTALLED.union(*(edition.libraries for edition in EDITIONS.values()))
    entries, needs, wanted = {}, {}, []
    for each in distributions(path=[site]):
        if not (each.read_text("METADATA") or each.read_text("PKG-INFO")):
            continue  # what an interrupted pip leaves
        name = _plain(each.metadata["Name"])
        entries[name] = {file.parts[0] for file in each.files or ()}
        needs[name] = [_plain(one) for one in each.requires or () if "extra ==" not in one]
        wanted += [name] if allowed & {_module(entry) for entry in entries[name]} else []
    for name in wanted:  # which grows
        wanted += [one for one in needs[name] if one in needs and one not in wanted]
    kept = {entry for name in wanted for entry in entries[name]}
    return [path for path in sorted(Path(site).iterdir()) if path.name in kept or _module(path.name) in allowed]


def _plain(requirement: str) -> str:
    """The name of a distribution in one spelling, without versions and markers."""
    return re.split(r"[^\w.-]", requirement.strip())[0].lower().replace("_", "-").replace(".", "-")


def _module(entry: str) -> str:
    """The module that an entry of a folder of libraries is, or belongs to by its name."""
    return re.split("[-.]", entry)[0]


def open_to_all(folder: Path) -> None:
    """Let every user read what lies in a folder, whatever the umask is."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def every_process(file: str) -> Iterator[tuple[int, str]]:
    """The number of every process, and the text of one of its files in /proc."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            yield int(name), Path("/proc", name, file).read_text(errors="replace")


class BoxedProcess(Process):
    """A process of a student's code in a box."""

    def __init__(self, box: Box, home: Path):
        self.box, self.reason, entry = box, "", box.enter(home)
        words = [box.python, "-uB", "-c", START, entry.grader, entry.code, *box.libraries]
        self.start([*entry.words, *words], entry.environment, entry.folder)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End the box when it uses more than its limits."""
        most = self.box.limits.printed
        while self.process.poll() is None:
            printed = f"printed more than {most:,} MiB" if self.printed > most * MIB else ""
            if reason := printed or self.box.excess(self.process.pid):
                self.reason = reason
                return self.kill()
            time.sleep(LOOK)

    def tail(self, lines: int = 40) -> str:
        """The last lines that the process has printed."""
        return "\n".join(self.output.decode(errors="replace").splitlines()[-lines:])

    def how_it_ended(self) -> str:
        return self.reason or super().how_it_ended()

    def kill(self) -> None:
        super().kill()
        self.box.end(self.process.pid)


# ------------------------------------------------------------------------------------------------ opening a box


def open_box(python: str | None = None, limits: BoxLimits | None = None, allow_without: tuple[str, ...] = ()) -> Box:
    """A box that keeps what it promises. python: None takes the one that runs this program.

    allow_without: names in `OPTIONAL` that may be missing. Raises `GradingError` where the box cannot be made, where
    another limit is missing, and where the box's user cannot read Python.
    """
    if unknown := set(allow_without) - set(OPTIONAL):
        raise GradingError(f"--allow-without {printable(','.join(unknown))}: there are {','.join(OPTIONAL)}")
    absent = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if absent or not sys.platform.startswith("linux"):
        is_linux = sys.platform.startswith("linux")
        hint = f" (apt install {' '.join(sorted(absent))})" if is_linux else ", which is Linux's"
        raise GradingError(f"strangers' code runs only inside of bubblewrap{hint}; without it, leave out --run-code")
    python = shutil.which(python or sys.executable)
    if python is None:
        raise GradingError("--python: there is no such program")
    box = add_python(Box(python, limits or BoxLimits(), NOBODY if os.geteuid() == 0 else None))
    held, said = probe(box)
    if not held and {"net", "users"} & {*allow_without}:  # options that some containers and an old bwrap do not have
        box = replace(box, missing=tuple(name for name in ("net", "users") if name in allow_without))
        held, said = probe(box)
    if not held:
        raise GradingError(f"the box does not start: {said}")
    missing = tuple(name for name in LIMITS if name not in held)
    if refused := [f"{LIMITS[name]} ({name})" for name in missing if name not in allow_without]:
        raise GradingError(f"this machine does not keep the box's limits: {', '.join(refused)}; see --allow-without")
    return replace(box, missing=missing)


def add_python(box: Box) -> Box:
    """The box with the folders of its Python. Raises `GradingError` if the box's user cannot read them all."""
    done = subprocess.run([box.python, "-c", ASK_PYTHON], capture_output=True, text=True, cwd="/")
    try:
        told = json.loads(done.stdout)
    except ValueError:
        raise GradingError(f"--python {printable(box.python)} is not Python, or does not run") from None
    libraries = tuple(sorted({*(told["libraries"] or own_libraries())}))  # it may have them from PYTHONPATH
    if not told["libraries"] and told["version"] != [*sys.version_info[:2]]:
        raise GradingError(f"--python {printable(box.python)} has no PyTorch, and another version than this Python")
    real = os.path.realpath(box.python)
    folders = {*told["prefixes"], *libraries, os.path.dirname(real)}
    for path in (tempfile.gettempdir(), box.python, real, *sorted(folders)):
        if subprocess.run([*box.become, "test", "-x", path], capture_output=True).returncode:
            advice = "give --python PATH of one that all users can read, /usr/bin/python3 for example"
            raise GradingError(f"the box's user cannot read {printable(path)}, which Python needs; {advice}")
    mounts = tuple(path for path in sorted(folders) if not path.startswith("/usr/"))
    others = (str(path) for place in ("/usr", "/usr/local") for path in Path(place, "lib").glob("python3*/*-packages"))
    return replace(box, mounts=mounts, libraries=libraries, sites=tuple(sorted({*libraries, *told["sites"], *others})))


def own_libraries() -> list[str]:
    """The folders in which this Python finds PyTorch and NumPy."""
    from importlib.util import find_spec

    return [os.path.dirname(os.path.dirname(find_spec(name).origin)) for name in ("torch", "numpy")]


def probe(box: Box) -> tuple[list[str], str]:
    """The names of the limits that hold in the box, each tried; and the last line that was printed there."""
    with tempfile.TemporaryDirectory(prefix="minllama-") as home, socket.create_server(("127.0.0.1", 0)) as server:
        box.prepare(Path(home))
        told = {"port": server.getsockname()[1], "libraries": box.libraries, "hidden": [home, __file__, "/etc/passwd"]}
        told |= {"variables": [*box.environment("/tmp"), "PWD", "LC_CTYPE"], "processes": box.limits.processes}
        told |= {"memory": box.limits.memory * MIB, "disk": box.limits.disk * MIB}
        entry = box.enter(Path(home))
        command = [*entry.words, box.python, "-B", f"{entry.grader}/grading/box_probe.py", json.dumps(told)]
        try:
            done = subprocess.run(command, env=entry.environment, capture_output=True, text=True, timeout=PROBE_LIMIT)
            return json.loads(done.stdout), ""
        except subprocess.TimeoutExpired:
            return [], f"it does not end within {PROBE_LIMIT:g} s"
        except ValueError:
            return [], (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]


# --------------------------------------------------------------------------------------------------- without bubblewrap
# For a container that runs one submission and has no namespaces to give: another user. The code cannot read or change
# what is root's alone, its use of the machine is limited, and its processes are ended by their user. It sees the
# container's other files, its network and the list of its processes.

STUDENT = 61_234  # a user ID that nobody else has: all its processes are the code's
END_LIMIT = 10.0  # seconds


class UserBox(Box):
    """A box whose `user` is a real user ID. Only root can use it."""

    def enter(self, home: Path) -> BoxCommand:
        code, scratch = home / "code", home / "scratch"
        environment = self.environment(str(scratch))
        return BoxCommand([*self.become, *self.limited], environment, code, str(code), str(home / "grader"))

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
