"""The grading scripts beside a student's files, or on them with `--code`: none of these files reaches a script."""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT, slow_among
from judging import add, check_failed, run, student  # noqa: F401

from grading.child import Child

HAND_OUTS = {  # the beginning of what the course's own files hold under the same names
    "utils.py": "CONFIG_NAME = 'config.json'\ndef get_parameter_dtype(parameter):\n    return parameter.dtype\n",
    "config.py": "class PretrainedConfig:\n    pass\nclass LlamaConfig(PretrainedConfig):\n"
    "    def __init__(self, **kwargs):\n        self.__dict__.update(kwargs)\n",
    "run_llama.py": "raise SystemExit('the driver is no business of these scripts')\n",
    "tokenizer.py": "raise ImportError('nor is the tokenizer')\n",
    "llama.py": "def load_pretrained(checkpoint):\n    raise NotImplementedError\n",
    "rope.py": "def apply_rotary_emb(query, key, head_dim, max_seq_len):\n    raise NotImplementedError\n",
    "optimizer.py": "class AdamW:\n    def __init__(self, params, **settings):\n        raise NotImplementedError\n",
}


def copy_scripts(folder: Path) -> None:
    for script in ("rope_test.py", "optimizer_test.py", "sanity_check.py"):
        shutil.copy(ROOT / script, folder)
    shutil.copytree(ROOT / "grading", folder / "grading", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "checkpoints").mkdir()
    shutil.copy(ROOT / "checkpoints" / "parts.json", folder / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("is_copied", [True, False], ids=["copied into the folder", "with --code"])
def test_the_scripts_judge_the_hand_outs_files(tmp_path: Path, is_copied: bool):
    folder = tmp_path / "hand-out"
    folder.mkdir()
    for name, text in HAND_OUTS.items():
        (folder / name).write_text(text)
    if is_copied:
        copy_scripts(folder)
    flags = [] if is_copied else ["--code", folder]
    for script, said in (
        ("rope_test.py", "apply_rotary_emb: not written yet: NotImplementedError in rope.py line 2"),
        ("optimizer_test.py", "AdamW: not written yet: NotImplementedError in optimizer.py line 3"),
        (
            "sanity_check.py",
            "loading, bidirectional:              not written yet: NotImplementedError in llama.py line 2",
        ),
    ):
        place = folder if is_copied else ROOT
        done = run(folder.parent, place / script, *flags, *(["--parts"] if script == "sanity_check.py" else []))
        assert done.returncode == 1 and said in done.stdout, done
        assert "FAILED" in done.stdout.splitlines()[-1] and "Traceback" not in done.stderr


SHADOWS = ("random", "inspect", "json", "argparse", "__future__", "dataclasses", "tempfile", "numpy", "torch", "queue")
HIDE = {"numpy", "torch"}  # of the others, it depends on the version of Python and of PyTorch


@pytest.mark.parametrize("name", slow_among(SHADOWS, set(SHADOWS) - {"numpy"}))
def test_a_file_with_the_name_of_a_library_does_not_reach_the_script(student: Path, name: str):
    """In the student's process it may hide the library, as it would from run_llama.py: then that is said."""
    copy_scripts(student)
    (student / f"{name}.py").write_text("print('Rotary embedding test passed!')\nraise SystemExit(0)\n")
    done = run(student.parent, student / "rope_test.py")
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done
    if done.returncode == 1:
        check_failed(done.returncode, done.stdout, done.stderr, f"{name}.py hides")
    else:
        assert done.stdout.count("passed!") == 1 and done.stdout.count(": ok") == 6
    assert done.returncode == 1 or name not in HIDE


@pytest.mark.parametrize("present", [[], ["archive"], ["__init__", "programs"]], ids=str)
@pytest.mark.parametrize("script", ["rope_test.py", "optimizer_test.py", "sanity_check.py", "prepare_submit.py"])
def test_without_its_whole_folder_a_script_says_one_sentence(tmp_path: Path, script: str, present: list[str]):
    shutil.copy(ROOT / script, tmp_path)
    for name in present:
        (tmp_path / "grading").mkdir(exist_ok=True)
        shutil.copy(ROOT / "grading" / f"{name}.py", tmp_path / "grading")
    done = run(tmp_path.parent, tmp_path / script, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: the folder grading/ must lie beside {script}, whole; copy it there\n"


@pytest.mark.parametrize(("library", "remedy"), [
    ("importlib_metadata_of_nobody", "the course allows only what its setup.sh installs"),
    ("tokenizers", "it is one of those that the course's setup.sh installs: pip install tokenizers"),
    ("charset_normalizer", "pip install charset-normalizer"),
])  # fmt: skip
def test_a_library_that_is_absent_is_one_of_the_course_or_not(library: str, remedy: str):
    assert Child.remedy(library).endswith(remedy)


@pytest.mark.slow
def test_a_broken_rotation_is_seen_although_the_model_does_not_use_it(student: Path):
    """`llama.py` turns queries and keys one by one; `apply_rotary_emb` is what the student writes."""
    add(student / "rope.py", "def apply_rotary_emb(query, key, *others, **named):\n    return query, key\n")
    done = run(student, ROOT / "sanity_check.py", "--code", student)
    check_failed(done.returncode, done.stdout, done.stderr, "nothing is rotated")
