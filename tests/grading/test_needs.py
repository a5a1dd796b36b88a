"""What a submission needs to run and does not hold: modules, libraries, and files that are read."""

import pytest
from submissions import beside, entries_of, only_problem

from grading import editions, needs

pytest_plugins = ["submission_fixtures"]

PRESENT = {"mine.py": "import training", "fast/__init__.py": "from .apply import x", "fast/linear.py": "",
           "scratch.py": "import nothing, training, optimizer_test\nprint 1"}  # fmt: skip


@pytest.fixture
def check_files(check, folder, package):
    """Check the complete submission with some files more, or others."""

    def run(files):
        texts = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} | files
        return check([(f"alice/{name}", text) for name, text in texts.items() if text is not None])

    return run


@pytest.mark.parametrize("code, absent", [
    ("import training", "training.py (llama.py line 1)"), ("import os\nimport mine", "training.py (mine.py line 1)"),
    ("def f():\n  from training import fit", "training.py (llama.py line 2)"), ("import fast", "fast/apply.py (fast/_"),
    ("import fast.linear", "fast/apply.py"), ("from fast import decode", "fast/decode.py (llama.py"),
    ("import convert.gguf as g", "convert/ (llama.py line 1)"),
    ("try:\n  import os\nexcept ImportError:\n  import training", "training.py (llama.py line 4)"),
    ("try:\n  import training\nexcept ValueError:\n  pass", "training.py"),
    ("if TYPE_CHECKING:\n  pass\nelse:\n  import training", "training.py"),
    *((f"try:\n  import training\nexcept{error}:\n  pass", None) for error in (
        "", " ImportError", " (KeyError, ModuleNotFoundError)", " builtins.Exception as e")),
    *((f"try:\n  import training\nexcept ImportError:\n  print('absent')\n  {end}", "training.py (llama.py line 2)")
      for end in ("raise", "exit(2)", "sys.exit(2)", "raise SystemExit(2)")),
    ("def f():\n  try:\n    import training\n  except ImportError:\n    return 2", "training.py (llama.py line 3)"),
    ("def f():\n  try:\n    import training\n  except ImportError:\n    return None", None),
    ("with suppress(ImportError):\n  import training", None), ("import numpy, fast.linear.f", "fast/apply.py"),
    ("if typing.TYPE_CHECKING:\n  import training", None), ("from . import training", None), ("import llama", None),
    ("try:\n  import training\nexcept ImportError:\n  pass\ndef f():\n  from training import fit", None),
    ("try:\n  import fast.a\nexcept ImportError:\n  pass\nimport fast.decode", "fast/decode.py"),
    ("x = 1\nprint 2", "llama.py line 2: not Python"), ("a\0", "llama.py line 1: not Python"),
    ("a" + ".b" * 49_000, ""), ("a=" + "(" * 90_000, "llama.py line 1: not Python"), ("# coding: zip", "not Python"),
])  # fmt: skip
def test_imports_are_followed(check_files, code, absent):
    report = check_files(PRESENT | {"llama.py": code})
    assert not any(character in str(report) for character in "\0\x1b")
    if absent is None:
        assert report.wrong == []
    elif absent:
        only_problem(report, absent)
    assert any("scratch.py line 2: not Python" in warning for warning in beside(report))


def test_large_modules_are_not_parsed(check, folder):
    code = "import training\n".ljust(needs.MAX_MODULE, "#")
    (folder / "llama.py").write_text(code)
    only_problem(check(entries_of(folder)), "training (llama.py line 1)")
    (folder / "llama.py").write_text(code + "#")
    report = check(entries_of(folder))
    assert report.wrong == [] and "too large" in beside(report)[0] and "llama.py" in beside(report)[0]


# ---------------------------------------------------------------------------------------- all of it, in one list

RUN = "if True:\n  try:\n    from engine.main import main\n  except ModuleNotFoundError:\n    raise SystemExit(2)"
SETUP = 'wanted="requirements.txt"\n# requirements/old.txt\npip install -r "$wanted" -r requirements/fast.txt\n'
OURS = {"run_llama.py": RUN, "sanity_check.py": "from grading.student_process import ask", "setup.sh": SETUP}


def test_all_that_is_missing_is_named_at_once_by_folders(check_files):
    report = check_files(OURS | {"tokenizer.py": None})
    engine = "engine/ (run_llama.py line 3), grading/ (engine/main.py line 4)"
    files = "data/cfimdb-label-mapping.json (read by run_llama.py), data/sst-label-mapping.json (read by run_llama.py)"
    setup = "requirements.txt (setup.sh line 1), requirements/ (setup.sh line 3)"
    only_problem(report, f"cannot run without: {files}, {engine}, {setup}, tokenizer.py (engine/plan.py line 2)")
    assert [warning for warning in beside(report) if "list of files" not in warning] == [
        "imported or read by other scripts but not in the submission: checkpoints/parts.json (read by sanity_check.py)"
    ]


def test_of_a_folder_that_is_there_in_part_the_files_are_named(check_files):
    files = OURS | {"engine/main.py": "import engine.plan", "requirements/test.txt": "-r ../requirements.txt"}
    report = check_files(files)
    only_problem(report, "engine/plan.py (engine/main.py", "engine/text/ (engine/plan.py", "requirements/fast.txt (")
    assert "grading/" not in report.wrong[0] and any("grading/ (sanity_check.py" in each for each in beside(report))


def test_requirements_files_are_followed_to_those_that_they_include(check_files):
    script = {"setup.sh": "pip install -r requirements/fast.txt"}
    both = "requirements.txt (requirements/fast.txt), requirements/ (setup.sh line 1)"
    only_problem(check_files(script), f"without: {both}")
    files = {"requirements/fast.txt": "-c ../requirements.txt\n-r ../../outside.txt\n-r mine.txt"}
    report = check_files(script | files)
    only_problem(report, "without: requirements.txt (requirements/fast.txt)")
    assert check_files(script | files | {"requirements.txt": ""}).wrong == []


def test_the_courses_own_scripts_need_nothing_of_this_package(check_files):
    own = {"run_llama.py": "from llama import x\nimport tqdm, sklearn", "sanity_check.py": "import torch, llama"}
    report = check_files(own | {"setup.sh": "pip install tqdm\npip freeze > requirements.txt\n"})
    assert report.wrong == [] and beside(report) == []


def test_folders_that_the_engine_does_without_are_not_missed(check_files, package):
    """engine/main.py imports fast/ inside of a function; a student's own file that does so needs it."""
    files = {name: (package / name).read_text() for name in needed(package)}
    assert check_files(OURS | files).wrong == []
    only_problem(check_files(OURS | files | {"llama.py": "def f():\n  import fast.apply"}), "fast/ (llama.py line 2)")
    only_problem(check_files(OURS | files | {"engine/plan.py": "import fast.apply"}), "fast/ (engine/plan.py line 1)")


def needed(package):
    """What of the package our three scripts need."""
    folders = ("engine/", "grading/", "requirements", "data/sst-label", "data/cfimdb-label", "checkpoints/parts.json")
    files = (path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file())
    return [name for name in files if name.startswith(folders)]


# -------------------------------------------------------------------------------------------------- libraries


@pytest.mark.parametrize("code, named", [
    ("import transformers", "transformers (llama.py line 1)"), ("from peft.x import y", "peft (llama.py line 1)"),
    ("def f():\n  import nowhere", "nowhere (llama.py line 2)"), ("import mine", "pandas (mine.py line 1)"),
    ("try:\n  import numba\nexcept ImportError:\n  numba = None", None), ("if TYPE_CHECKING:\n  import peft", None),
    ("try:\n  import numba\nexcept ImportError:\n  raise", "numba (llama.py line 2)"),
    ("import torch.nn, numpy as np, sklearn.metrics, tqdm, sentencepiece, scipy, requests, tokenizers, tomllib", None),
    ("import importlib_metadata, filelock, __main__, os.path", None),
    ("import sys\nsys.path.append('src')\nimport own_module, own_folder", None),
    ("model = __import__('transformers.models.llama').models", "transformers (llama.py line 1)"),
    ("import importlib\ndef f():\n  return importlib.import_module('peft.x')", "peft (llama.py line 3)"),
    ("exec('from jax import numpy')", "jax (llama.py line 1)"),
    ("x = eval(\"__import__('jax')\")", "jax (llama.py line 1)"),
    ("f = lambda x: exec('import jax')", "jax (llama.py line 1)"), ("f = lambda x: x(1)\nf(print)(b'')", None),
    ("exec('\\ud800'); __import__('\\ud800'); import_module('.x')", "ud800 (llama.py line 1)"),
    ("if exec('import jax') is None: pass", "jax (llama.py line 1)"), ("exec('import'); eval('1 +'); exec(x)", None),
    *((code.format("__import__('jax')"), "jax (llama.py line 1)") for code in (
        "with {} as x: pass", "def f(x={}): pass", "def f(*, x: {}): pass", "class A(metaclass={}.B): pass")),
    ("import importlib\nimportlib.import_module(name='jax')", "jax (llama.py line 2)"),
    ("exec(b'import jax\\xff'); exec(b'import jax')", "jax (llama.py line 1)"), ("print(end=3, name=4)", None),
    ("try:\n  x = __import__('numba')\nexcept ImportError:\n  x = None", None), ("__import__('numpy')", None),
])  # fmt: skip
def test_libraries_that_the_course_does_not_install(check_files, code, named):
    own = {"src/own_module.py": "", "src/own_folder/x.py": "", "helper.py": "import mine, seaborn"}
    report = check_files({"llama.py": code, "mine.py": "import pandas"} | own)
    if named:
        only_problem(report, "nor among the libraries", named)
    else:
        assert report.wrong == []
    assert any("seaborn (helper.py" in warning and "other scripts" in warning for warning in beside(report))
    assert ("pandas" in str(beside(report))) == ("mine" not in code)


def test_what_the_packages_own_copy_imports_is_not_held_against_it(check_files, package):
    files = {name: (package / name).read_text() for name in needed(package)}
    ours = OURS | files | {f"fast/{name}.py": "" for name in ("__init__", "apply")}
    assert check_files(ours | {"llama.py": "import fast.loops", "fast/loops.py": "import numba"}).wrong == []
    report = check_files(ours | {"llama.py": "import fast.loops", "fast/loops.py": "import numba, jax"})
    only_problem(report, "jax (fast/loops.py line 1)")
    only_problem(check_files(ours | {"engine/plan.py": "import jax"}), "jax (engine/plan.py line 1)")


def test_names_of_hostile_scripts_are_bounded_and_copies_read_once(check_files, package, monkeypatch):
    code = "import " + ", ".join(f"nowhere{number}" for number in range(5000))
    setup = "\n".join(f"pip install -r requirements/mine{number}.txt" for number in range(2000))
    parsed, parse = [], needs.parse
    monkeypatch.setattr(needs, "parse", lambda *given: parsed.append(given) or parse(*given))
    files = {"llama.py": "import engine.plan\n" + code, "engine/plan.py": code, "requirements/a.txt": ""}
    report = check_files(files | {"setup.sh": setup})
    assert len(report.wrong) == 2 and all(len(problem) < 2000 for problem in report.wrong)
    assert len(parsed) < 50


def test_a_module_that_the_standard_library_has_is_no_part_of_the_package(check_files, package):
    (package / "random.py").write_text("")
    assert check_files({"llama.py": "import random"}).wrong == []
    assert "random" in editions.ALLOWED and needs.MAX_CODE >= needs.MAX_MODULE
