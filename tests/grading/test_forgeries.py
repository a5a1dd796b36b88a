"""What a student's folder could put in the place of the scripts' files; what the scripts make of a process."""

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, slow_among
from judging import VERDICTS, add, check_failed, run, student  # noqa: F401

import sanity_check
from grading import parts, reference, student_process
from grading.child import StudentImports
from grading.programs import DefaultText, GradingError, find_course_file, find_own, run_main
from grading.student_process import MOST_LOST, ChildQuestion, Student

WRONG_NORM = "RMSNorm.forward = lambda self, x: x\n"


# ------------------------------------------------------------------------------------------------ files


def test_the_students_expected_values_do_not_count(student: Path):
    """They are what a wrong RMSNorm gives: with them in use, the scripts would find it right."""
    add(student / "llama.py", WRONG_NORM)
    (student / "checkpoints").mkdir()
    shutil.copy(ROOT / "checkpoints/minllama1M.pt", student / "checkpoints")
    (student / "checkpoints/parts.json").write_text("{}")
    (student / "checkpoints/minllama1M-reference.pt").write_bytes(b"forged")
    done = run(student, ROOT / "sanity_check.py", "--parts", "--code", ".")
    check_failed(done.returncode, done.stdout, done.stderr, "Begin with: RMSNorm")
    assert done.stdout.count(" ok\n") >= 4  # with the project's own numbers


LENIENT = """
import sys

for name, module in list(sys.modules.items()):
    for place in (vars(module), getattr(module, "QUESTIONS", {})) if name.startswith("grading") else ():
        for key in [*place]:
            if "slope" in key or "gradients" in key:
                place[key] = lambda *_, **__: [torch.zeros(0)] * 3
"""


def test_a_process_that_judges_itself_gets_no_verdict(student: Path):
    """What computes gradients in the student's process is replaced; a part of the scores is detached."""
    path = student / "llama.py"
    path.write_text(path.read_text().replace("key.transpose(-2, -1)", "key.detach().transpose(-2, -1)"))
    add(path, LENIENT)
    done = run(student, ROOT / "sanity_check.py", "--parts", "--code", ".")
    check_failed(done.returncode, done.stdout, done.stderr, "Begin with: RMSNorm")
    assert "scores and softmax, bidirectional:   WRONG: no gradient goes back to query" in done.stdout


def test_the_text_is_judged_and_no_compiled_file_beside_it(tmp_path: Path):
    source, compiled = tmp_path / "mine.py", importlib.util.cache_from_source(tmp_path / "mine.py")
    source.write_text("x = 2\n")
    py_compile.compile(str(source), compiled, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.write_text("x = 1\n")
    spec = StudentImports(str(tmp_path), lambda what, name: None).find_spec("mine")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.x == 1


def test_where_the_scripts_look_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("judged/inner", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "no-such.pt").touch()
        (tmp_path / folder / "rope.py").touch()
    (tmp_path / "judged" / "no-such.pt").touch()
    for folder, counts in (("judged", False), ("judged/inner", False), ("elsewhere", True)):
        monkeypatch.chdir(tmp_path / folder)
        assert (find_course_file(DefaultText("no-such.pt"), tmp_path / "judged") is not None) is counts
        assert find_course_file("no-such.pt", tmp_path / "judged") == Path("no-such.pt")  # the user has named it
        assert find_course_file(DefaultText("no-such.pt"), ROOT) == Path("no-such.pt")
        assert find_own("no-such.pt") is None and find_own("rope.py") == ROOT / "rope.py"
        beside = Path("rope.py") if counts else ROOT / "rope.py"
        assert find_course_file(DefaultText("rope.py"), tmp_path / "judged") == beside
    monkeypatch.chdir(ROOT)
    assert find_own("rope.py") == Path("rope.py")


def test_what_is_expected_is_read_before_the_student_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also into memory of its own: a file that is mapped would change with what is written to it."""

    class Asked(Exception):
        pass

    class Curious(Student):
        def ask(self, question: ChildQuestion) -> None:
            raise Asked

    read = []
    stored, find = parts.stored_numbers, reference.find_given
    monkeypatch.setattr(parts, "stored_numbers", lambda norm: read.append("parts") or stored(norm))
    monkeypatch.setattr(reference, "find_given", lambda *given: read.append("model") or find(*given))
    monkeypatch.setattr(sys, "argv", ["sanity_check.py"])
    with pytest.raises(Asked):
        sanity_check.check(Curious(tmp_path), sanity_check.get_args(), {})
    assert sorted(read) == ["model", "parts"]
    path = tmp_path / "reference.pt"
    shutil.copy(ROOT / reference.BUNDLED_REFERENCE, path)
    references = reference.bundled_references(path)
    before = [one.logits.clone() for one in references]
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(one.logits, logits) for one, logits in zip(references, before, strict=True))


# ------------------------------------------------------------------------------------------------ modules


@pytest.mark.parametrize("named", slow_among(("absolute", ".", ""), {".", ""}))
def test_a_grading_folder_on_the_path_is_not_the_scripts(student: Path, named: str):
    add(student / "rope.py", "apply_rotary_emb = lambda query, key, *others: (query, key)\n")
    (student / "grading").mkdir()
    for name in ("json", *(f"grading/{name}" for name in ("__init__", "student_process", "child", "programs", "wire"))):
        (student / f"{name}.py").write_text(f"print({VERDICTS[0]!r})\nraise SystemExit(0)\n")
    path = {"absolute": str(student), ".": ".", "": f"{os.pathsep}{student.parent}"}[named]
    done = run(student, ROOT / "rope_test.py", "--code", student, PYTHONPATH=path)
    check_failed(done.returncode, done.stdout, done.stderr, "nothing is rotated")
    done = run(student, ROOT / "prepare_submit.py", "--help", PYTHONPATH=path)
    assert done.returncode == 0 and done.stdout.startswith("usage: prepare_submit.py"), done


@pytest.mark.slow
def test_the_scripts_run_where_python_does_not_add_their_folder(student: Path):
    done = run(student, ROOT / "rope_test.py", "--code", student, PYTHONSAFEPATH="1")
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, VERDICTS[0], "")


# ------------------------------------------------------------------------------------------------ messages


class Pretended(student_process.Process):
    """No process is started. status: its exit status, None while it runs. messages: a queue of what it has sent."""

    def __init__(self, status: int | None, messages: object) -> None:
        self.process, self.messages = SimpleNamespace(poll=lambda: status), messages


def test_the_deadline_holds_for_a_process_that_never_stops_sending():
    endless = Pretended(None, SimpleNamespace(get=lambda timeout: ({}, b"")))
    deadline = time.monotonic() + 0.2
    with pytest.raises(TimeoutError):
        while time.monotonic() < deadline + 10:
            endless.receive(deadline)
    assert time.monotonic() < deadline + 5
    with pytest.raises(TimeoutError):
        Pretended(None, Queue()).receive(time.monotonic() + 0.01)


@pytest.mark.slow
def test_an_answer_that_a_busy_machine_reads_late_counts():
    """The process has ended two seconds before its last message is read."""
    messages = Queue()
    late = threading.Timer(2.0, messages.put, [({"goodbye": True}, b"")])
    late.start()
    assert Pretended(0, messages).receive(time.monotonic() + 60) == ({"goodbye": True}, b"")
    late.join()


class Told(Student):
    """A student whose process has sent these messages."""

    def hear(self, *headers: dict) -> object:
        waiting = iter([({"token": "t", **header}, b"") for header in headers])
        self.process = SimpleNamespace(receive=lambda deadline: next(waiting), how_it_ended=str)
        self.importing: list[str] = []
        return self.listen("t", 0.0, self.importing)


def test_odd_messages_are_no_answer(tmp_path: Path):
    told = Told(tmp_path)
    for odd in ([], {}, None, 1, "rope"):
        assert told.hear({"blocked": odd, "tensors": None}) == student_process.SPOILT
    assert told.hear({"importing": "x" * 1000}, {"blocked": []}) == student_process.SPOILT
    assert told.importing == ["x" * 100]
    assert "more than 1,000" in told.hear(*[{"importing": str(number)} for number in range(5000)])


def test_few_names_of_a_lost_process_are_kept(student: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Student, "_make_ready", lambda self: None)
    lost = Student(student)
    lost.process = SimpleNamespace(send=len, kill=str)
    monkeypatch.setattr(Student, "listen", lambda *given: given[-1].extend(map(str, range(99))) or "x")
    assert lost.ask(ChildQuestion("rotate", "rope")).is_lost
    assert len(lost.lost_imports) == MOST_LOST and "98" in lost.lost_imports


@pytest.mark.parametrize(("start", "said"), [
    ("raise ImportError('no room' + chr(27))", "ended (exit status 1): ImportError: no room\\x1b"),
    ("import os; os._exit(7)", "is to run the code ended (exit status 7)"),
])  # fmt: skip
def test_a_process_that_cannot_start_is_not_the_students_fault(student: Path, monkeypatch, start: str, said: str):
    monkeypatch.setattr(student_process, "START", start)
    with Student(student) as asked, pytest.raises(GradingError) as refused:
        asked.ask(ChildQuestion("rotate", "rope"))
    assert said in str(refused.value), refused.value


# ------------------------------------------------------------------------------------------------ streams, flags

STREAMS = {"no output": ">&-", "no error": "2>&-", "neither": ">&- 2>&-", "a reader that goes": "| true"}


@pytest.mark.parametrize("stream", slow_among(STREAMS, set(STREAMS) - {"neither"}))
def test_the_status_is_the_same_where_nobody_listens(student: Path, tmp_path: Path, stream: str):
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    for words, status in ((("rope_test.py", "--code", student), 0), (("prepare_submit.py", "bad.zip", "alice"), 1)):
        script, *flags = words
        line = " ".join(f"'{word}'" for word in (sys.executable, ROOT / script, *flags))
        command = ["bash", "-c", f"set -o pipefail; {line} {STREAMS[stream]}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == status and "rror" not in done.stderr, done


NO_TORCH = ModuleNotFoundError("No module named 'torch'", name="torch")
NO_ROOM = OSError(28, "No space left on device", "from.pt", None, "to.pt")  # as `shutil.copy` raises it


@pytest.mark.parametrize(
    ("error", "said"), [(MemoryError(), "memory"), (NO_TORCH, "package torch"), (NO_ROOM, "write to.pt: No")]
)
def test_what_is_lacking_is_said_in_one_line(error: Exception, said: str, capfd: pytest.CaptureFixture):
    def main() -> None:
        raise error

    assert run_main(main) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


def test_no_process_is_started_that_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("grading.student_process.Process", refuse)
    monkeypatch.setattr("grading.published.check_published", lambda *_: True)
    monkeypatch.setattr(sys, "argv", ["sanity_check.py", "--published"])
    assert sanity_check.main() == 0
    monkeypatch.setattr(sys, "argv", ["sanity_check.py", "--published", "--edition", "cmu2025"])
    with pytest.raises(GradingError, match="--published knows"):
        sanity_check.main()
