"""Strangers' code in the box: what it tries, what is said of it, and that nothing of it is left.

Every hostile module is bounded by the box's limits, which `open_box` tries first; without a box all is skipped.
"""

import contextvars
import getpass
import json
import os
import pickle
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from classic_functions import CLASSIC, STEP, WITH_A_MASK, write_student
from conftest import ROOT, hear_interrupts, slow_among
from judging import add, student  # noqa: F401
from submissions import forge, pack
from test_hostile import HOSTILE, RIGHT, wait_for

import grading.box
from grading import parts, sandbox, small_model
from grading.box import ADAMW, ROPE, BoxedStudent, Executed, InBox, check_scripts, code_of, copy_code, run_checks
from grading.editions import NORMS
from grading.mistakes import GENERATE_MISTAKES
from grading.programs import GradingError
from grading.sandbox import Box, BoxLimits, add_python, open_box
from grading.small_model import SALT

SMALL = BoxLimits(seconds=20, total=90, memory=1024, processes=32, disk=16, files=1000, printed=8)
PYTHON = "/usr/bin/python3" if os.geteuid() == 0 and not os.stat("/root").st_mode & stat.S_IXOTH else sys.executable


@pytest.fixture(scope="session")
def box() -> Box:
    try:
        return open_box(PYTHON, SMALL)
    except GradingError as error:
        pytest.skip(f"no box on this machine: {error}")


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, which all users can enter; at the end it is empty, and no box is left."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        wait_for(lambda: not boxes(Path(folder)), 20)
        left = set(os.listdir(folder)) - {f"torchinductor_{getpass.getuser()}", "host"}  # PyTorch's, and a test's own
        assert not left


def boxes(folder: Path) -> list[int]:
    """The processes for which a folder below this one is mounted: those of boxes, whose code lies in one."""
    found = sandbox.every_process("mountinfo") if sys.platform == "linux" else ()
    return [number for number, mounts in found if f"{folder.name}/minllama-" in mounts]


def rope_and_adamw(folder: Path, box: Box) -> list[Executed]:
    with BoxedStudent(folder, box=box) as asked:
        return contextvars.copy_context().run(
            lambda: [*check_scripts(asked, random.Random(0), "ucsc")]
        )  # as `run_checks` does


class Tried(NamedTuple):
    """Code for the end of rope.py, and a pattern for what is said of it; "": it is right."""

    code: str
    said: str


def told(line: str) -> str:
    """Code that tries a line, and says whether it worked in an exception."""
    body = f"    {line}\nexcept OSError as error:\n    raise RuntimeError('refused') from None\n"
    return f"import glob, os, socket\ntry:\n{body}raise RuntimeError('worked')\n"


REFUSED = "RuntimeError in rope.py line [0-9]+: refused"
TRIED = {
    "a fork bomb": Tried(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
        "did not end within 20 s|used more than 1,024 MiB of memory"),
    "a daemon": Tried(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 256)\n"
        "        time.sleep(1000)\n    os._exit(0)\n", ""),
    "an endless loop": Tried("while True:\n    pass\n", "did not end within 20 s"),
    "gigabytes of output": Tried(
        "import os\nwhile True:\n    os.write(2, b'x' * 65536)\n", "printed more than 8 MiB"),
    "gigabytes in one file": Tried(
        "with open('/tmp/file', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))\n",
        "was ended by a signal|exit status 153|OSError in rope.py"),
    "gigabytes in many files": Tried(
        "for number in range(9999):\n    open(f'/tmp/{number}', 'wb').write(bytes(1 << 20))\n", "OSError in rope.py"),
    "gigabytes in shared memory": Tried(
        "for number in range(9999):\n    open(f'/dev/shm/{number}', 'wb').write(bytes(1 << 20))\n",
        "OSError in rope.py"),
    "many files": Tried(
        "import itertools\nfor number in itertools.count():\n    open(f'/tmp/{number}', 'wb').close()\n",
        "wrote more than 1,000 files"),
    "memory": Tried(
        "memory = [bytearray(1 << 26) for _ in range(1 << 20)]\n",
        "MemoryError in rope.py|used more than 1,024 MiB of memory"),
    "shared memory": Tried(
        "import mmap, time\nshared = mmap.mmap(-1, 2 << 30)\nfor at in range(0, 2 << 30, 4096):\n    shared[at] = 1\n"
        "time.sleep(60)\n", "used more than 1,024 MiB of memory"),
    "a file outside": Tried(told("open('{host}/file', 'w')"), REFUSED),
    "a file beside the code": Tried(told("open(os.path.join(os.path.dirname(__file__), 'llama.py'), 'a')"), REFUSED),
    "a file in Python": Tried(told("open(os.path.join(os.path.dirname(os.__file__), 'evil.py'), 'w')"), REFUSED),
    "a library of the grader": Tried(told("__import__('pytest')"), "rope.py imports pytest, which is not installed"),
    "a file among the libraries": Tried(
        told("open(os.path.join(os.path.dirname(__import__('torch').__path__[0]), 'evil.py'), 'w')"), REFUSED),
    "the gold labels": Tried(told("open('{host}/sst-test.txt').read()"), REFUSED),
    "the expected numbers": Tried(told("open('{root}/checkpoints/parts.json').read()"), REFUSED),
    "all environments": Tried(
        "import glob\nfound = b''.join(open(name, 'rb').read() for name in glob.glob('/proc/[0-9]*/environ'))\n"
        "raise RuntimeError('worked' if b'SECRET' in found else 'refused')\n", REFUSED),
    "the network": Tried(told("socket.create_connection(('127.0.0.1', {port}), 2)"), REFUSED),
    "the network beyond": Tried(told("socket.create_connection(('192.0.2.1', 80), 2)"), REFUSED),
    **{name: Tried(HOSTILE[name].code, re.escape(HOSTILE[name].said)) for name in (
        "PyTorch patched", "os._exit in a call", "an answer written in advance", "verdicts on every descriptor",
        "all descriptors closed", "the expected values' code")},
}  # fmt: skip
FILL = {"gigabytes in one file", "gigabytes in many files"}  # then PyTorch's optimizers cannot be imported, either
QUICK = {"the gold labels"}


@pytest.mark.parametrize("name", slow_among(TRIED, set(TRIED) - QUICK))
def test_hostile_code_does_no_harm(name: str, student: Path, box: Box, nothing_left: Path, monkeypatch, tmp_path: Path):
    """It fails with a sentence, or is right; AdamW, which does not need it, is right in any case."""
    host = nothing_left / "host"
    host.mkdir()
    (host / "sst-test.txt").write_text("3 ||| gold")
    host.chmod(0o777)
    monkeypatch.setenv("SECRET", "SECRET")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        code = TRIED[name].code
        for word, value in {"host": host, "root": ROOT, "port": server.getsockname()[1]}.items():
            code = code.replace(f"{{{word}}}", str(value))
        add(student / "rope.py", code)
        started = time.monotonic()
        rope, optimizer = rope_and_adamw(student, box)
        assert time.monotonic() - started < SMALL.total
        with pytest.raises(TimeoutError):
            server.accept()
    assert rope.passed is (not TRIED[name].said) and re.search(TRIED[name].said, rope.message), rope
    assert optimizer.passed or name in FILL, optimizer
    assert [path.name for path in host.iterdir()] == ["sst-test.txt"]


@pytest.mark.slow
def test_right_code_is_right_and_wrong_code_wrong(student: Path, box: Box, nothing_left: Path):
    for name in ("sitecustomize.py", "usercustomize.py"):
        (student / name).write_text("import os\nos._exit(0)\n")
    executed = run_checks(student, "ucsc", box)
    assert [one for one in executed if not one.passed] == [] and len(executed) == 16, executed
    add(student / "llama.py", "print('\\n'.join(map(str, range(99))))\nRMSNorm.forward = lambda self, x: x\n")
    wrong = {one.part: one for one in run_checks(student, "ucsc", box) if not one.passed}
    assert wrong["RMSNorm"].message.startswith("WRONG: ") and "rope_test.py" not in wrong, wrong
    assert wrong["generate, bidirectional"].message == "not judged: it needs RMSNorm"
    assert {name for name, one in wrong.items() if not one.is_right_alone} == {"RMSNorm", "sampling, bidirectional"}
    assert not any(one.tail for name, one in wrong.items() if name != "RMSNorm")
    add(student / "optimizer.py", f"print('\\n'.join(map(str, range(99))))\nRIGHT = 1\n{RIGHT_STEP}")
    broken = {one.part: one for one in run_checks(student, "ucsc", box)}
    assert broken[ROPE].passed and not broken[ADAMW].passed
    assert broken[ADAMW].tail.splitlines() == [str(number) for number in range(59, 99)]


@pytest.mark.slow
def test_a_right_classic_student_fails_nothing(tmp_path: Path, box: Box, nothing_left: Path):
    """Also one with another weight decay, which the course's own check takes, and one with a mask that is wrong."""
    decay = CLASSIC[STEP].replace('group["lr"] * group["weight_decay"]', 'alpha_t * group["weight_decay"]')
    mask = {place: text.replace("~mask", "mask") for place, text in WITH_A_MASK.items()}
    for name, changed in {"plain": {}, "decay": {STEP: decay}, "mask": mask}.items():
        executed = run_checks(write_student(tmp_path / name, changed=changed), "ucsc", box)
        assert [one for one in executed if not one.passed] == [] and len(executed) == 16, executed
        said = {one.part: one.message for one in executed if one.message}
        assert {*said} == ({ADAMW} if name == "decay" else set()), said
        for verdict in ("this package's limit: failed", "the course's own check: passed") if said else ():
            assert verdict in said[ADAMW]


RIGHT_STEP = "AdamW.step = lambda self: None\n"


@pytest.mark.slow
def test_a_thread_that_never_ends_fails_at_the_end(student: Path, box: Box, nothing_left: Path):
    add(student / "rope.py", HOSTILE["a thread that never ends"].code)
    last = run_checks(student, "ucsc", box)[-1]
    assert not last.passed and "a thread still runs" in last.message, last


@pytest.mark.slow
def test_all_checks_together_have_a_limit(student: Path, box: Box, nothing_left: Path):
    slow = "def apply_rotary_emb(*given, **named):\n    time.sleep(3)\n    return right(*given, **named)\n"
    add(student / "rope.py", f"import time\n{RIGHT}{slow}")
    hurried = replace(box, limits=BoxLimits(seconds=6, total=9))
    started = time.monotonic()
    executed = run_checks(student, "ucsc", hurried)
    assert time.monotonic() - started < 30
    assert any("the 9 s of all checks are over" in one.message for one in executed), executed


def test_links_and_pipes_are_not_copied(student: Path, tmp_path: Path):
    (tmp_path / "gold").write_text("gold")
    (student / "linked.py").symlink_to(tmp_path / "gold")
    (student / "above").symlink_to("/")
    os.mkfifo(student / "pipe")
    (student / "inner").mkdir()
    (student / "inner/table.json").write_text("[]")
    (student / "stories42M.pt").write_bytes(b"weights")
    copy_code(student, tmp_path / "copy")
    found = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*")}
    assert found - {f"{path.stem}.py" for path in student.glob("*.py")} == {"inner", "inner/table.json"}
    with open(student / "huge.txt", "wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(GradingError, match="more than 100 MiB"):
        copy_code(student, tmp_path / "again")


def test_a_zip_is_unpacked_only_if_all_tools_read_it_alike(tmp_path: Path, nothing_left: Path):
    zips = {
        "right": pack([("alice/rope.py", "x"), ("alice/data/a.json", "[]")]),
        "bomb": pack([("alice/rope.py", bytes(200_000_000))]),
        "link": forge(("alice/rope.py", b"/etc/passwd", {"attributes": (stat.S_IFLNK | 0o777) << 16})),
        "above": forge(("../rope.py", b"x")),
        "broken": b"no zip",
    }
    said = {"bomb": "unpacked", "link": "link or special", "above": r"'\.\.'", "broken": "not a zip archive"}
    for name, payload in zips.items():
        (tmp_path / f"{name}.zip").write_bytes(payload)
        if name in said:
            with pytest.raises(GradingError, match=said[name]), code_of(tmp_path / f"{name}.zip"):
                pass
        else:
            with code_of(tmp_path / "right.zip") as folder:
                assert sorted(path.name for path in folder.rglob("*")) == ["a.json", "data", "rope.py"]
    os.truncate(tmp_path / "right.zip", 1 << 40)
    with pytest.raises(GradingError, match="100 MB are not read"), code_of(tmp_path / "right.zip"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_of_the_grader_is_the_end_of_the_box(number: int, student: Path, box: Box, nothing_left: Path):
    add(student / "rope.py", "open('/proc/self/comm', 'w').write('endless')\nwhile True:\n    pass\n")
    environment = {**os.environ, "TMPDIR": str(nothing_left)}
    command = [sys.executable, "-m", "grading.box", student, "--python", PYTHON]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    grader = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=hear_interrupts, **pipes)
    wait_for(lambda: "endless\n" in map(dict(sandbox.every_process("comm")).get, boxes(nothing_left)))
    grader.send_signal(number)
    out, err = grader.communicate(timeout=30)
    if number == signal.SIGINT:
        assert (grader.returncode, out, err) == (130, b"", b"error: interrupted\n")
    else:  # nobody is left to remove the copy of the code
        wait_for(lambda: not boxes(nothing_left), 20)
        subprocess.run(["rm", "-r", *nothing_left.iterdir()], check=True)


# ------------------------------------------------------------------------------------------------ opening a box


def test_a_limit_that_is_missing_is_a_refusal(box: Box, monkeypatch: pytest.MonkeyPatch):
    held = [name for name in sandbox.LIMITS if name not in ("net", "pids")]
    monkeypatch.setattr(sandbox, "probe", lambda box: (held, ""))
    with pytest.raises(
        GradingError, match=r"isolation from the network \(net\), a limit on the number of processes \(pids\)"
    ):
        open_box(PYTHON)
    assert open_box(PYTHON, allow_without=("net", "pids")).missing == ("net", "pids")
    with pytest.raises(GradingError, match="--allow-without outside: there are net,pids"):
        open_box(PYTHON, allow_without=("outside",))


def test_libraries_of_the_box_are_those_of_the_set_up_and_what_these_need(tmp_path: Path):
    def install(name: str, *modules: str, needs: str = "") -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}\n")
        (folder / "RECORD").write_text("".join(f"{one}/__init__.py,,\n" for one in (*modules, folder.name)))
        for one in modules:
            (tmp_path / one).mkdir()
            (tmp_path / one / "__init__.py").touch()

    install("torch", "torch", "torchgen", needs="Requires-Dist: Sym.Py >=1\nRequires-Dist: dev-tool ; extra == 'dev'")
    install("sym-py", "sympy_core", needs="Requires-Dist: deeper (>=2)")
    install("deeper", "deeper")
    install("dev_tool", "dev_tool")
    install("transformers", "transformers", needs="Requires-Dist: torch")
    (tmp_path / "~orch-2.0.dist-info").mkdir()  # what an interrupted pip leaves
    (tmp_path / "numpy").mkdir()  # without a record, as some systems install it
    code = "import sys; from grading.sandbox import of_set_up; print(*(path.name for path in of_set_up(sys.argv[1])))"
    for before in ("pass", "import importlib_metadata"):  # some libraries bring it, and it reads them in Python's place
        command = [sys.executable, "-c", f"{before}; {code}", tmp_path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if "No module named 'importlib_metadata'" not in done.stderr:
            found = {name for name in done.stdout.split() if not name.endswith("info")}
            assert found == {"torch", "torchgen", "sympy_core", "deeper", "numpy"}, done.stderr


LOST = ("pids", "net", "memory", "disk", "users", "outside")


@pytest.mark.parametrize("lost", slow_among(LOST, set(LOST) - {"net", "outside"}))
def test_the_probe_finds_what_is_missing(box: Box, lost: str, monkeypatch: pytest.MonkeyPatch):
    """Each limit is taken from the command, and the probe misses that one alone."""
    enter = Box.enter

    def weaker(self: Box, home: Path) -> sandbox.BoxCommand:
        entry = enter(self, home)
        gone = {"pids": "--nproc=", "memory": "--data=", "users": "--disable-userns"}.get(lost, "none")
        more = {"net": ["--share-net"], "outside": ["--ro-bind", "/etc", "/etc"]}.get(lost, [])
        size = str(SMALL.disk << 20)
        sizes = {size: str(SMALL.disk << 21)} if lost == "disk" else {}
        words = [sizes.get(word, word) for word in entry.words if not word.startswith(gone)]
        at = words.index("--unshare-user")
        return entry._replace(words=[*words[:at], *more, *words[at:]])

    monkeypatch.setattr(Box, "enter", weaker)
    held, said = sandbox.probe(box)
    assert set(sandbox.LIMITS) - set(held) == {lost}, (held, said)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the sentence names no package")
def test_where_there_is_no_box_the_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GradingError, match=r"only inside of bubblewrap \(apt install bubblewrap util-linux\)"):
        open_box()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's files can be such that the box's user cannot read them")
def test_a_python_that_the_box_cannot_read_is_named(box: Box, tmp_path: Path):
    hidden = tmp_path / "home"
    hidden.mkdir(mode=0o700)
    (hidden / "python3").symlink_to(PYTHON)
    with pytest.raises(GradingError, match="the box's user cannot read .*python3.*--python PATH"):
        open_box(str(hidden / "python3"))


def test_a_folder_of_libraries_is_hidden_before_those_inside_of_it(tmp_path: Path):
    """A Python that names many, in another order."""
    sites = [f"{tmp_path}{'/lib' * depth}" for depth in range(9, 0, -1)]
    told = {"version": [3, 11], "prefixes": [], "sites": sites, "libraries": [str(tmp_path)]}
    (tmp_path / "python3").write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    (tmp_path / "python3").chmod(0o755)
    found = add_python(Box(str(tmp_path / "python3"))).sites
    assert [site for site in found if site in sites] == sites[::-1]


# ------------------------------------------------------------------------------------------------ in a batch


def test_in_a_batch_the_same_files_have_the_same_inputs(student: Path, monkeypatch: pytest.MonkeyPatch):
    """And what the box lacks stands in every report."""
    seeds = []
    monkeypatch.setattr(grading.box, "run_checks", lambda folder, edition, box, seed: seeds.append(seed) or [])
    runner = pickle.loads(pickle.dumps(InBox(Box(PYTHON, missing=("net",)))))
    assert (
        runner(student, "ucsc")
        == runner(student, "ucsc")
        == [Executed("the box", True, "without isolation from the network (net)")]
    )
    add(student / "rope.py", "# answers\n")
    runner(student, "ucsc")
    assert len(seeds) == 3 and seeds[0] == seeds[1] != seeds[2]


@pytest.mark.slow
def test_the_batch_runs_code_only_if_asked_to(student: Path, box: Box, tmp_path: Path, nothing_left: Path):
    pytest.importorskip("pydantic")
    for name in ("in/alice", "gold"):
        (tmp_path / name).mkdir(parents=True)
    add(student / "rope.py", "open('/tmp/ran', 'w')\napply_rotary_emb = lambda query, key, *others: (query, key)\n")
    for path in student.iterdir():
        path.rename(tmp_path / "in/alice" / path.name)
    command = [
        sys.executable,
        "-m",
        "grading",
        tmp_path / "in",
        "--config",
        tmp_path / "g.toml",
        "--out",
        tmp_path / "out",
    ]
    subprocess.run([*command, "--init", tmp_path / "g.toml"], cwd=ROOT, check=True)
    config = (tmp_path / "g.toml").read_text()
    (tmp_path / "g.toml").write_text(re.sub("(?m)^gold = .*", f'gold = "{tmp_path}/gold"', config))
    for flags, said in (([], 0), (["--run-code", "--python", PYTHON], 1)):
        subprocess.run([*command, *flags], cwd=ROOT, env={**os.environ, "TMPDIR": str(nothing_left)})
        report = (tmp_path / "out/reports/alice.md").read_text()
        failed = [f"- {name}: FAILED: nothing is rotated" for name in (r"rope\_test.py", "rotary embedding")]
        assert [report.count(one) for one in ("## Executed checks", *failed)] == [said] * 3, report
    assert not Path("/tmp/ran").exists()


# ------------------------------------------------------------------------------------------------ drawn models


def test_the_right_numbers_are_those_that_others_computed():
    """Without a salt the drawn model is that of parts.json: its numbers are transformers' or published ones."""

    def check() -> None:
        for norm in NORMS:
            small_model.NORM.set(norm)
            numbers, stored = (
                parts.right_numbers(("bidirectional", "causal")),
                parts.stored_numbers(norm),
            )
            for name in numbers:
                assert not numbers[name] or parts.alike(numbers[name], stored[name]), (norm, name)

    contextvars.copy_context().run(check)


def test_another_salt_gives_other_numbers_to_every_part():
    token = SALT.set(1)
    try:
        first = parts.right_numbers(("causal",))
        asked = parts.all_parts(("causal",))
        SALT.set(2)
        second = parts.right_numbers(("causal",))
        again = parts.all_parts(("causal",))
    finally:
        SALT.reset(token)
    for name, numbers in first.items():
        assert not numbers or not parts.alike(numbers[:1], second[name][:1]), name
    assert all(
        one.question.tensors.keys() == other.question.tensors.keys() for one, other in zip(asked, again, strict=True)
    )


@pytest.mark.slow
def test_on_a_drawn_model_every_mistake_in_generate_shows():
    """Some weights would hide where a long text is cut. Of twelve models without that condition, three did."""

    def check() -> None:
        for seed in range(4):
            parts.draw_salt(("bidirectional",), random.Random(seed))
            right = small_model.generate(False)
            for said, wrong in GENERATE_MISTAKES.items():
                assert not parts.alike(small_model.generate(False, **wrong), right), said

    contextvars.copy_context().run(check)
