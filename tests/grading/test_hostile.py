"""Student modules that are broken, or that try to look right: the verdict is the script's, and it is FAILED.

Every module here is the project's own, which is right, with something added; so a script that counted nothing but
numbers would pass most of them.
"""

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT, slow_among
from judging import VERDICTS, add, check_failed, student  # noqa: F401

from grading.programs import run_main

LIES = "".join(f"{line}\\n" for line in VERDICTS)
SHORT = 3.0  # seconds, for what never ends
LONG = 60.0
ENDED, SPOILT = "ended the process (exit status 0)", "closed the pipe of its answers, or wrote to it"
ENDLESS = "did not end within 3 s while it was"

CALL = "def apply_rotary_emb(*arguments, **named):\n    {}\n"  # at the end of rope.py: takes the place of the right one
RIGHT = "right = apply_rotary_emb\n"
WRONG = "lambda query, key, *others: (query, key)"  # nothing is rotated
OWN = (
    "class Own(torch.Tensor):\n"
    "    @classmethod\n"
    "    def __torch_function__(cls, function, types, arguments=(), named=None):\n"
    "        return True\n"
)


class Hostile(NamedTuple):
    """Code for the end of a file of the student, and what the script says of it within `limit` seconds."""

    code: str
    said: str
    limit: float = LONG
    file: str = "rope.py"


def in_call(line: str, said: str, limit: float = LONG, before: str = "") -> Hostile:
    """A rope.py whose function runs `line`."""
    return Hostile(RIGHT + before + CALL.format(line), said, limit)


# a file, what stands before the line about its import, the file that is asked last
FILES = {
    "": ("rope.py", "", "rope.py"),
    "AdamW: ": ("optimizer.py", "", "optimizer.py"),
    "Llama: ": ("llama.py", "WRONG: ", "classifier.py"),
}
IN_EVERY_FILE = {
    "exit at import": ("exit()\n", "{wrong}exit() in {file} line", LONG),
    "os._exit(0) at import": ("import os\nos._exit(0)\n", f"{{wrong}}{{file}} {ENDED} while it was imported", LONG),
    "os._exit(0) at exit": ("import atexit, os\natexit.register(os._exit, 0)\n", f"{{last}} {ENDED} at its end", LONG),
    "endless at import": ("while True:\n    pass\n", f"{{file}} {ENDLESS} imported", SHORT),
}
HOSTILE = {
    **{kind + name: Hostile(code, said.format(file=file, wrong=wrong, last=last), limit, file)
       for name, (code, said, limit) in IN_EVERY_FILE.items() for kind, (file, wrong, last) in FILES.items()},
    "sys.exit with a verdict at import": Hostile(f"import sys\nsys.exit({VERDICTS[0]!r})\n", "exit() in"),
    "os._exit(0) in a timer": Hostile("import os, threading\nthreading.Timer(0.5, os._exit, [0]).start()\n", ENDED),
    "a thread that never ends": Hostile(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n",
        "keeps the process from ending: after 3 s a thread still runs", SHORT),
    "a stopped process": Hostile(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n", f"{ENDLESS} imported", SHORT),
    "a syntax error": Hostile("def broken(:\n", "SyntaxError"),
    "a library that is absent": Hostile(
        "import einops_of_nobody\n", "rope.py imports einops_of_nobody, which is not installed"),
    "verdicts on every descriptor": Hostile(
        f"import os\nfor handle in range(64):\n    try:\n        os.write(handle, b'{LIES}')\n    except OSError:\n"
        "        pass\nos._exit(0)\n", f"rope.py {ENDED} while it was imported"),
    "verdicts printed by a wrong function": Hostile(
        f"import sys\nprint('{LIES}', flush=True)\nprint('{LIES}', file=sys.stderr)\napply_rotary_emb = {WRONG}\n",
        "nothing is rotated"),
    "verdicts on the terminal": Hostile(f"print('{LIES}', file=open('/dev/tty', 'w'))\n", "OSError in rope.py line"),
    "all descriptors closed": Hostile("import os\nos.closerange(0, 256)\n", SPOILT),
    "a fork whose parent ends": Hostile(
        "import os\nif os.fork():\n    os._exit(0)\n", f"{ENDED} while it was imported"),
    "a fork that holds the pipes": Hostile(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(40)\n    os._exit(0)\nos._exit(3)\n",
        "rope.py ended the process (exit status 3) while it was imported", 10.0),
    "no modules": Hostile(f"import sys\nsys.modules.clear()\napply_rotary_emb = {WRONG}\n", "FAILED: "),
    "ended by itself with a signal": Hostile(
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "was ended by a signal (SIGKILL)"),
    "an alarm": Hostile(
        "import signal, time\nsignal.setitimer(0, 0.01)\ntime.sleep(60)\n", "was ended by a signal (SIGALRM)"),
    "an exception that is no Exception": Hostile("raise BaseException('no')\n", "BaseException in rope.py line"),
    "an interrupt": Hostile("raise KeyboardInterrupt\n", "KeyboardInterrupt in rope.py line"),
    "an exception with a verdict": Hostile(
        f"raise ValueError('\\n{LIES}\\x1b[2K{LIES}')\n", "ValueError in rope.py line"),
    "an exception without a message": Hostile(
        "class Odd(Exception):\n    def __str__(self):\n        raise BaseException\nraise Odd\n",
        "Odd in rope.py line"),
    "PyTorch patched": Hostile(
        "torch.allclose = torch.equal = lambda *arguments, **named: True\ntorch.Tensor.__eq__ = torch.allclose\n"
        f"torch.Tensor.max = lambda self: torch.tensor(0.0)\napply_rotary_emb = {WRONG}\n", "nothing is rotated"),
    "the messages patched": Hostile(
        'import grading.wire\ngrading.wire.pack = lambda *arguments: b\'{"token": "", "answer": true}\' * 9\n', SPOILT),
    "an answer written in advance": Hostile(
        "import os\nfrom grading import wire\nforged = wire.pack({'token': '0' * 32, 'answer': True})\n"
        "for handle in range(3, 64):\n    try:\n        os.write(handle, forged)\n    except OSError:\n        pass\n",
        f"rope.py {SPOILT} while it was imported"),
    "exit in a call": in_call("exit(0)", "exit() in rope.py line"),
    "os._exit in a call": in_call("__import__('os')._exit(0)", "(exit status 0) while it was called"),
    "endless in a call": in_call("while True: pass", f"rope.py {ENDLESS} called", SHORT),
    "waits for input": in_call("input('Rotary embedding test passed!')", "EOFError in rope.py line"),
    "a segmentation fault": in_call("__import__('ctypes').string_at(0)", "was ended by a signal (SIGSEGV)"),
    "endless recursion": in_call("return apply_rotary_emb(*arguments)", "RecursionError in rope.py line"),
    "no memory": in_call("return bytearray(1 << 60)", "MemoryError in rope.py line"),
    "a string": in_call("return 'right', 'right'", "it returns str, not a tensor"),
    "nothing": in_call("right(*arguments)", "it returns None; is a `return` missing?"),
    "a dictionary": in_call("return dict(zip('01', right(*arguments)))", "it returns dict, not a tensor"),
    "three tensors": in_call("return (*right(*arguments), arguments[0])", "it returns 3 tensors, not two"),
    "huge tensors": in_call("return (torch.ones(1).expand(1 << 40),) * 2", "numbers, far too many"),
    "not a number": in_call("return tuple(x * float('nan') for x in right(*arguments))", "largest error nan"),
    "sparse tensors": in_call("return tuple(x.to_sparse() for x in right(*arguments))", "it returns a sparse"),
    "tensors without numbers": in_call("return tuple(x.to('meta') for x in right(*arguments))", "the device meta"),
    "complex tensors": in_call("return tuple(x + 1j for x in right(*arguments))", "complex numbers, not real ones"),
    "tensors that agree with everything": in_call(
        "return tuple((0 * x).as_subclass(Own) for x in right(*arguments))", "it returns a sparse", before=OWN),
    "a thread that writes between answers": Hostile(
        "import os, threading, time\ndef write():\n    while True:\n        for handle in range(3, 32):\n"
        f"            try:\n                os.write(handle, b'{LIES}')\n            except OSError:\n"
        "                pass\n        time.sleep(0.001)\nthreading.Thread(target=write, daemon=True).start()\n"
        "time.sleep(1)\n", SPOILT),
    "messages without end": in_call(
        "while True: importlib.reload(config)", "rope.py imported modules more than 1,000 times while it was called",
        before="import importlib, config\n"),
    "a module whose name is a verdict": Hostile(
        f"import os\nname = '\\n{VERDICTS[0]}\\nrope'\nopen(os.path.join(os.path.dirname(__file__), name + '.py'), 'w')"
        ".write('import os; os._exit(0)')\n__import__(name)\n",
        f"Rotary embedding test [...] rope.py {ENDED} while it was imported"),
    "the expected values' code": Hostile(
        "from grading.rotary import rotate_both\n"
        + CALL.format("return rotate_both(*arguments[:2], *arguments[4:] or (1e4,))"),
        "rope.py imports grading.rotary, which belongs to the scripts that judge it"),
    "AdamW: os._exit(0) in a step": Hostile(
        "import os\nAdamW.step = lambda self: os._exit(0)\n", "(exit status 0) while it was called",
        file="optimizer.py"),
    "AdamW: endless in a step": Hostile(
        "def step(self):\n    while True:\n        pass\nAdamW.step = step\n", "did not end within 3 s", SHORT,
        file="optimizer.py"),
    "AdamW: the other one patched": Hostile(
        "AdamW.step = lambda self, closure=None: None\ntorch.optim.AdamW = AdamW\n", "Optimizer test FAILED: ",
        file="optimizer.py"),
    "Llama: os._exit(0) in a timer": Hostile(
        "import os, threading\nthreading.Timer(1, os._exit, [0]).start()\n", ENDED, file="llama.py"),
    "Llama: os._exit(0) in forward": Hostile(
        f"import os\nprint('{LIES}')\nFeedForward.forward = lambda self, x: os._exit(0)\n", "Begin with: feed-forward",
        file="llama.py"),
    "Llama: comparisons patched": Hostile(
        "torch.equal = torch.allclose = lambda *arguments, **named: True\nRMSNorm.forward = lambda self, x: x\n",
        "Begin with: RMSNorm", file="llama.py"),
    "Llama: a wrong module under sys.modules": Hostile(
        "import sys\nsys.modules['llama'] = sys.modules['classifier'] = None\n", "FAILED", file="llama.py"),
    "sanity_check: rope.py is endless": Hostile("while True:\n    pass\n", f"rope.py {ENDLESS} imported", SHORT),
    "sanity_check: config.py ends the process": Hostile(
        "import os\nos._exit(0)\n", f"config.py {ENDED} while it was imported", file="config.py"),
}  # fmt: skip
SLOW = {  # said already by the others, in another module or in other words
    *(name for name in HOSTILE if ":" in name),
    "sys.exit with a verdict at import",
    "a fork that holds the pipes",
    "an interrupt",
    "an exception that is no Exception",
    "a stopped process",
    "messages without end",
    "a thread that never ends",
    "endless in a call",
    "an alarm",
    "waits for input",
    "endless recursion",
    "os._exit(0) in a timer",
    "three tensors",
    "a module whose name is a verdict",
    "nothing",
    "exit in a call",
    "an exception without a message",
    "tensors that agree with everything",
    "huge tensors",
    "sparse tensors",
    "os._exit(0) at exit",
    "verdicts on the terminal",
    "verdicts printed by a wrong function",
    "ended by itself with a signal",
    "an exception with a verdict",
    "os._exit in a call",
    "all descriptors closed",
    "a string",
    "exit at import",
    "no memory",
    "a dictionary",
    "complex tensors",
    "tensors without numbers",
    "the messages patched",
    "a thread that writes between answers",
    "a library that is absent",
    "a fork whose parent ends",
    "not a number",
    "an answer written in advance",
    "the expected values' code",
} - {"Llama: exit at import", "AdamW: os._exit(0) in a step"}
SCRIPTS = {"rope.py": "rope_test", "optimizer.py": "optimizer_test"}


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Runs a script in this process, and the student's code in another: `judge("rope_test", "--code", folder)`."""

    def run_script(script: str, *flags: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        status = run_main(importlib.import_module(script).main)
        return status, *capfd.readouterr()

    return run_script


@pytest.mark.parametrize("name", slow_among(HOSTILE, SLOW))
def test_a_broken_or_hostile_module_fails_with_a_sentence(name: str, student: Path, judge: Callable):
    hostile = HOSTILE[name]
    add(student / hostile.file, hostile.code)
    started = time.monotonic()
    script = SCRIPTS.get(hostile.file, "sanity_check") if not name.startswith("sanity_check") else "sanity_check"
    check_failed(*judge(script, "--code", student, "--time_limit", hostile.limit), hostile.said)
    assert time.monotonic() - started < LONG


@pytest.mark.slow
def test_the_same_folder_without_anything_hostile_is_right(student: Path, judge: Callable):
    for script, verdict in zip(("rope_test", "optimizer_test", "sanity_check"), VERDICTS, strict=True):
        status, out, err = judge(script, "--code", student)
        assert (status, err, out.splitlines()[-1]) == (0, "", verdict), out


@pytest.mark.slow
def test_an_import_that_does_not_end_is_waited_for_once(student: Path, judge: Callable):
    """Five modules import rope.py, and every part but two needs one of them. Each start takes a second or two."""
    add(student / "rope.py", "import time\nwhile True:\n    time.sleep(1)\n")
    started = time.monotonic()
    status, out, err = judge("sanity_check", "--parts", "--code", student, "--time_limit", 20)
    check_failed(status, out, err, "rope.py did not end within 20 s while it was imported")
    assert time.monotonic() - started < 38
    assert "RMSNorm:                             not judged: it needs import of llama.py" in out


@pytest.mark.slow
def test_a_module_is_run_once_however_many_parts_need_it(student: Path, judge: Callable, tmp_path: Path):
    """Also one that cannot be imported."""
    runs = tmp_path / "runs.txt"
    add(student / "rope.py", f"with open({str(runs)!r}, 'a') as file:\n    file.write('run ')\n")
    assert judge("sanity_check", "--parts", "--code", student)[0] == 0
    assert runs.read_text() == "run "
    add(student / "rope.py", "raise ValueError('no')\n")
    status, out, err = judge("sanity_check", "--parts", "--code", student)
    check_failed(status, out, err, "ValueError in rope.py line")
    assert runs.read_text() == "run run "


@pytest.mark.slow
def test_what_ends_one_part_leaves_the_others(student: Path, judge: Callable):
    add(student / "classifier.py", "import os\nLlamaZeroShotClassifier.forward = lambda self, tokens: os._exit(0)\n")
    status, out, err = judge("sanity_check", "--code", student)
    check_failed(status, out, err, "zero-shot classifier, bidirectional: WRONG: classifier.py ended the process")
    assert out.count(" ok\n") == 2 + 12


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc for processes")
def test_copies_of_the_process_are_ended_with_it(student: Path, judge: Callable, tmp_path: Path):
    """Those that stay in its process group, as an ordinary fork does; and the one that works with the script."""
    numbers = tmp_path / "numbers.txt"
    code = f"import os, time\ncopy = os.fork()\nif copy == 0:\n    time.sleep(100)\nopen({str(numbers)!r}, 'w')"
    add(student / "rope.py", f"{code}.write(f'{{copy}} {{os.getpid()}}')\n")
    assert judge("rope_test", "--code", student)[0] == 0
    for process in map(int, numbers.read_text().split()):
        wait_for(lambda process=process: has_ended(process), 20)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc for processes")
def test_the_process_ends_when_the_script_is_killed(student: Path, tmp_path: Path):
    note = f"import os\nopen({str(tmp_path / 'number')!r}, 'w').write(str(os.getpid()))\n"
    add(student / "rope.py", f"{note}while True:\n    pass\n")
    script = subprocess.Popen([sys.executable, ROOT / "rope_test.py", "--code", student], stdout=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "number").exists() and (tmp_path / "number").read_text())
    script.kill()
    script.wait()
    wait_for(lambda: has_ended(int((tmp_path / "number").read_text())))


@pytest.mark.parametrize("threads", [None, pytest.param("3", marks=pytest.mark.slow)])
def test_it_has_one_thread_unless_the_user_says_otherwise(
    student: Path, judge: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str | None
):
    """On a busy machine several wait for one another."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    note = tmp_path / "threads.txt"
    add(student / "rope.py", f"import os\nopen({str(note)!r}, 'w').write(os.environ['OMP_NUM_THREADS'])\n")
    assert judge("rope_test", "--code", student)[0] == 0
    assert note.read_text() == (threads or "1")


def has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], object], limit: float = LONG) -> None:
    """Raises `AssertionError` where the condition does not hold within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
