"""Fixtures of the tests of submissions; a test module names this one in `pytest_plugins`."""

import json

import pytest
from submissions import LABELS, NAMES, SENTENCES, fill, pack

import grading.needs
from grading.submission import check_zip, create_zip


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Data sets of a few lines, made here."""
    folder = tmp_path_factory.mktemp("data")
    for part, labels in LABELS.items():
        lines = [f"{label} ||| {text}\n" for label, text in zip(labels, SENTENCES[part], strict=True)]
        (folder / f"{part}.txt").write_text("".join(lines), encoding="utf-8")
    for dataset, names in NAMES.items():
        (folder / f"{dataset}-label-mapping.json").write_text(json.dumps(names))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A complete submission; the current folder is an empty one."""
    (tmp_path / "work").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("MINLLAMA_ASSETS", raising=False)
    return fill(tmp_path / "work")


@pytest.fixture
def create(folder, data_dir):
    return lambda **options: create_zip(folder, "alice", data_dir=data_dir, **options)


@pytest.fixture
def check(data_dir, tmp_path):
    """Check bytes, or the (name, content) entries of a zip."""

    def run(payload, **options):
        path = tmp_path / "given.zip"
        path.write_bytes(payload if isinstance(payload, bytes) else pack(payload))
        return check_zip(path, "alice", data_dir=data_dir, **options)

    return run


# A package in small: the files of the course, which every submission has, are left out.
MODULES = {
    "rope_test.py": "import grading.student_process",
    "engine/main.py": "import engine.plan, llama\ndef f():\n  import fast.apply, jax\n  import grading.editions",
    "engine/plan.py": "from engine.text import runs\nimport tokenizer", "engine/text/runs.py": "import numpy",
    "grading/student_process.py": "from grading import parts", "fast/__init__.py": "from fast.apply import x",
    "fast/apply.py": "import fast.linear", "fast/loops.py": "import numba", "advanced/lora.py": "import convert.gguf",
}  # fmt: skip
OTHER_FILES = {
    "engine/table.json": "[]", "advanced/results/best.json": "[]", "checkpoints/parts.json": "{}",
    "data/sst-label-mapping.json": "[]", "data/cfimdb-label-mapping.json": "[]", "data/films-dev.txt": "1 ||| x",
    "data/sst-train.txt": "1 ||| x", "requirements.txt": "torch", "requirements/fast.txt": "-c ../requirements.txt",
    "requirements/test.txt": "-r ../requirements.txt",
}  # fmt: skip
EMPTY = """
    training.py optimizer_test.py engine/__init__.py engine/text/__init__.py engine/unreached.py grading/__init__.py
    grading/editions.py grading/parts.py fast/decode.py fast/linear.py convert/gguf.py tests/test_it.py
    benchmarks/measure.py engine/README.md advanced/README.md advanced/results/best.png checkpoints/build.py
    checkpoints/figures.json docs/grading.md docs/picture.png notebooks/assignment.ipynb .ci/run
    .github/workflows/tests.yml pyproject.toml tokenizer.model README.zh-TW.md
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package that lies beside the grading scripts is a small one, made here."""
    root = tmp_path / "package"
    for name, text in (MODULES | OTHER_FILES | dict.fromkeys(EMPTY.split(), "")).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    monkeypatch.setattr(grading.needs, "ROOT", root)
    return root
