"""The graders' own copies of the course's formats say what the package's functions say; no other module is imported.

`grading.programs` has its own reader of data lines, label mappings and the prompt: a student may replace the others.
"""

import ast
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

import utils
from engine import data, flags
from grading import editions, programs
from grading.sandbox import BoxLimits

LABELS = (
    "0", "1", "4", "-1", "+2", " 3 ", "\t1", "01", "", "x", "1.0", "1_0", "١", "९", "0x1", "1e3", "9" * 1001, "--1",
)  # fmt: skip
SEPARATORS = (" ||| ", "|||", " |||", "||| ", " || ", "  |||  ", " ||| ||| ", "\t|||\t")
SENTENCES = (
    "a film", "", " ", "a ||| b", "|||", "naïve", "\u00a0", "\x0b", "a\x00b", "\ufeffa", "ﬁlm 🎬", "a\u2028b",
    "1 ||| x",
)  # fmt: skip
ENDS = ("", "\n", "\r\n", "\r", "\n\n")


def told(read: Callable, *arguments: object, **named: object) -> object:
    """What a function returns, or the error that it raises."""
    try:
        found = read(*arguments, **named)
    except ValueError as error:  # GradingError and UserError are ones
        return str(error)
    return [one if isinstance(one, str) else tuple(one) for one in found] if isinstance(found, list) else found


def test_a_line_says_the_same():
    for label, separator, sentence in itertools.product(LABELS, SEPARATORS, SENTENCES):
        line = label + separator + sentence
        assert told(programs.parse_line, line) == told(data.parse_line, line), line


FILES = [
    *("0 ||| a film" + end + "1 ||| b" + end for end in ENDS),
    *("-1 ||| a" + end + "-1 ||| b" + end for end in ENDS),
    *(f"{label} ||| a\n{other} ||| b\n" for label, other in itertools.product(LABELS, ("0", "-1", "7"))),
    "", "\n", " ", "\ufeff0 ||| a", "0 ||| a\n \n", "0 ||| a\x0c\n1 ||| b", "0 ||| a\u2028 1 ||| b\n",
]  # fmt: skip
BYTES = [*(text.encode() for text in (*FILES, "0 ||| a\0\n")), b"0 ||| \xff\n", b"\xff\xfe0", b"0 ||| \xe4\n"]


@pytest.mark.parametrize("is_test", [False, True])
@pytest.mark.parametrize("num_labels", [None, 2, 5])
def test_a_data_file_says_the_same(tmp_path: Path, num_labels: int | None, is_test: bool):
    path = tmp_path / "data.txt"
    for content in BYTES:
        path.write_bytes(content)
        both = programs.create_data, data.create_data
        ours, theirs = (told(read, path, num_labels, is_test=is_test) for read in both)
        assert ours == theirs, content
    for path in (tmp_path / "absent.txt", tmp_path):
        assert told(programs.create_data, path) == told(data.create_data, path)


MAPPINGS = (
    '["bad", "good"]', '["a", "a"]', '["a"]', "[]", "{}", '["a", 1]', '["a", " "]', '["a", "\\n"]', "[", "1", "",
)  # fmt: skip
MAPPINGS += ('["ä", "b", "c"]', "[" * 100_000, '["bad", "good"] x', '{"a": 0}', "null", '["\\u202e", "b"]')


def test_a_label_mapping_says_the_same(tmp_path: Path):
    path = tmp_path / "mapping.json"
    for text in MAPPINGS:
        path.write_text(text, encoding="utf-8")
        assert told(programs.read_label_names, path) == told(data.read_label_names, path), text[:40]


def test_the_prompt_and_the_figures_say_the_same():
    for names in (
        ["bad", "good"],
        ["a", "b", "c"],
        ["awful", "bad", "average", "good", "excellent"],
        ["{labels}", "x"],
    ):
        assert programs.prompt_suffix(names) == utils.prompt_suffix(names)
        assert programs.prompt_suffix(names, "One of {labels}?") == utils.prompt_suffix(names, "One of {labels}?")
    for labels in ([0, 1, 1], [0], [-1, -1], [2, 2, 2, 1], [0, 1]):
        assert programs.has_gold_labels(labels) == data.has_gold_labels(labels)
        assert programs.majority_accuracy(labels) == data.majority_accuracy(labels)


def test_messages_numbers_and_files_say_the_same(tmp_path: Path):
    for text in (*LABELS, *SENTENCES, "word " * 900, "w" * 900, "inf", "nan", "1e400", "-.5", "1,5", "\x1b[2J"):
        for name in ("whole_number", "one_line", "shorten", "printable"):
            assert told(getattr(programs, name), text) == told(getattr(utils, name), text), text
        assert str(told(programs.decimal_number, text)) == str(told(utils.decimal_number, text))  # nan is not nan
    for number, content in enumerate(BYTES):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(content)
        assert told(programs.read_text, path) == told(utils.read_text, path)
    assert told(programs.read_text, os.devnull) == told(utils.read_text, os.devnull)


# ---------------------------------------------------------------------------------------------------- imports

CHECKER = {"addition", "archive", "editions", "findings", "needs", "outputs", "prepare_submit", "programs", "rules",
           "submission", "settings", "uploads", "judge", "batch", "__main__"}  # fmt: skip
LAZY = {"similar": {"copydetect"}}  # imported inside of functions
SCRIPTS = ("sanity_check.py", "rope_test.py", "optimizer_test.py", "prepare_submit.py")
GRADERS = [*(ROOT / script for script in SCRIPTS), *sorted((ROOT / "grading").rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """The top names of all modules that a file imports, at its top or in a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", GRADERS, ids=lambda path: path.name)
def test_graders_import_no_module_that_a_student_may_replace(path: Path):
    """And the modules that check a submission import no PyTorch: they answer at once."""
    assert imported(path) - {*sys.stdlib_module_names, "grading"} <= (
        set() if path.stem in CHECKER else {"torch", "numpy"} | LAZY.get(path.stem, set())
    )


def test_the_process_is_started_before_pytorch_is_imported():
    """The imports at the top of a script, and of the modules that it imports, import none of the large libraries."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import sanity_check, rope_test, optimizer_test; "
    code += "import prepare_submit, grading.child; print({'torch', 'numpy', 'sklearn', 'tqdm'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.stdout == "set()\n", done.stderr


def test_no_expected_value_is_imported_by_the_process_of_the_students_code():
    reached, left = set(), ["child", "questions"]
    while left:
        name = left.pop()
        reached.add(name)
        tree = ast.parse((ROOT / "grading" / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grading"):
                inner = node.module.partition(".")[2]
                left += [inner] if inner else [alias.name for alias in node.names]
        left = [name for name in left if name not in reached]
    assert reached == {"answers", "child", "editions", "questions", "wire"}


def test_the_prompt_of_the_texts_and_the_bands_are_the_same():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert editions.TEXT_PROMPT == flags.PREFIX
    rows = {
        "prompting": "{} zero-shot, `--option prompt` | {:.3f} ",
        "finetuning": "{} fine-tuned, `--option finetune`, 5 epochs, ",
    }
    for (name, kind), (dev, test) in editions.REFERENCE_ACCURACIES.items():
        (row,) = (line for line in readme.splitlines() if line.startswith(f"| {rows[kind].format(name.upper(), dev)}"))
        assert f"| {dev:.3f} (" in row and (f"| {test:.3f} (" if test else "no gold labels") in row
    within = "within {sst:g} (SST) and {cfimdb:g} (CFIMDB) of the reference"
    assert within.format(**editions.ACCURACY_BANDS) in readme


def test_the_page_has_the_limits_of_the_box():
    page, limits = (ROOT / "docs/grading.md").read_text(encoding="utf-8"), BoxLimits()
    assert f"for a part: {limits.seconds:g} by default; all parts together have {limits.total:g} |" in page
    assert f"{limits.disk} MiB each in `/tmp` and `/dev/shm`, and {limits.files:,} files in both" in page
    assert f"| {limits.processes} processes and threads |" in page
    assert f"| {limits.memory / 1024:g} GiB of memory, {limits.printed} MiB of output |" in page
