"""Writing the folder: which files it holds, and what changes in them for its edition."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from grading.editions import DEFAULT_EDITION, EDITIONS, LABEL_NAMES, NORMS, SAMPLINGS, Edition, reference_accuracies
from grading.needs import NOT_HANDED_OUT
from handout.editions import replaced, text_of
from handout.holes import Hole, blank, holes_of, removed
from utils import ROOT, UserError

VERSION = "1.3"  # of the hand-out; pages/CHANGELOG.md says what changed
MODELS = "; the trained model adds all numbers of the test set, and two of five or more others do not"
BEYOND = "something of your own beyond the assignment that helps, described in a report of at most three pages"
SMALLEST = "one of the smallest models that add all numbers, found by ablations, with plots and logs of all runs"
RUNS = {  # the course's flags for each kind of output
    "prompting": "--option prompt --batch_size 10", "finetuning": "--option finetune --epochs 5 --lr 2e-5",
    "lora": "--option lora --epochs 5 --lr 2e-5 --lora_rank 4 --lora_alpha 1.0",
}  # fmt: skip
BATCH_SIZES = {"sst": 80, "cfimdb": 10}  # in training
COURSE_FILES = {
    "cmu2025": "`--option lora` needs `lora.py` of the course, and its `run_llama.py` in the place of ours.",
    "cmu2026": "The files `addition_*.py` and `data/addition_test.txt` are the course's. Each model is trained with "
    "`python addition_run.py train --capacity 5808844800000 --dim 16 --n_layers 6 --n_heads 4 --n_kv_heads 4 "
    "--epochs 10 --save_dir addition_models/best_model`, or other sizes and `addition_models/ablation_1`.",
}
# What setup.sh fetches, where editions differ: the repository and its commit, SHA-256 and size of sanity_check.data,
# SHA-256 of optimizer_test.npy.
FETCHED = ("neubig/minllama-assignment/2951cddba218b7ddfe69295b77ad51a05107d384",
           "34f7c763a3bb025940029bd970594e985bf69b7ed6e693a8f5cccbef0cee55b0", "289_851",
           "77b817e0dce16a9bc8d3a6bcb88035db68f7d783dc8a565737581fadd05db815")  # fmt: skip
LATER_OPTIMIZER = "5e66b55c2c6784e120e422e40bc2cd27ffdd00ac3fd9515035d846ddea1cb118"
FETCHED_LATER = {
    "cmu2025": ("cmu-l3/anlp-fall2025-hw1/36578d4c79d791b06ccd0fc6d0ade3d937d5f450",
                "94f5f19530f4bdffe7502d44004f3ac6334cf0f97059c82e1705196fea027a44", "290_294", LATER_OPTIMIZER),
    "cmu2026": ("ialdarmaki/anlp-spring2026-hw1/34e883563eecf292f51042250ee943de8c16523f",
                "2dcdc958f99d49830e52524f05cedb71f7a9a752c14fa4eae0d26643e6b058d4", "290_336", LATER_OPTIMIZER),
}  # fmt: skip
SHORTEST = 30  # characters of a line that gives an answer away
SCRIPTS = ("sanity_check.py", "rope_test.py", "optimizer_test.py", "prepare_submit.py")
MODEL_HALF = ("config.py", "utils.py", "rope.py", "tokenizer.py", "optimizer.py", "base_llama.py", "llama.py",
              "classifier.py")  # fmt: skip
PLAIN = ("run_llama.py", "setup.sh", "LICENSE", "requirements.txt", ".gitattributes",
         "checkpoints/parts.json", "checkpoints/minllama1M.pt", "checkpoints/minllama1M.model",
         "checkpoints/minllama1M-reference.pt")  # fmt: skip
DATA = (*(f"data/{name}-label-mapping.json" for name in (*LABEL_NAMES, "films")),
        *(f"data/films-{split}.txt" for split in ("train", "dev", "test")))  # fmt: skip
IN_CHILD = ("grading.child", "grading.questions")  # started, not imported, by the scripts
PAGES = Path(__file__).resolve().parent / "pages"
TESTS = Path(__file__).resolve().parent / "tests"


def write_handout(out: Path, name: str, holes: list[Hole] | None = None) -> list[Hole]:
    """Write the hand-out of an edition to `out`, a folder that does not exist or is empty. Returns its holes.

    holes: None takes all; the others are then filled with this package's own functions. Raises `UserError` for another
    folder. What was written is removed if something fails.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; name another one")
    edition, was_there = EDITIONS[name], out.exists()
    holes = holes_of(edition.norm) if holes is None else holes
    (out / "tests").mkdir(parents=True)  # an error where another process has begun; its files are not removed
    try:
        for file in files():
            path = out / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.endswith((".py", ".sh")):
                text = (ROOT / file).read_text(encoding="utf-8")
                text = blank(text_of(file, name), file, holes) if file in MODEL_HALF else text
                path.write_bytes(with_defaults(text, file, name).encode())
            else:
                shutil.copyfile(ROOT / file, path)
            path.chmod((ROOT / file).stat().st_mode & 0o777)
        for page in sorted(PAGES.glob("*.md")):
            text = page.read_text(encoding="utf-8")
            (out / page.name).write_bytes(filled_in(text, name, edition, holes).encode())
        shutil.copytree(TESTS, out / "tests", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        if was_there:
            out.mkdir()
        raise
    return holes


def files() -> list[str]:
    """The files of this package that a hand-out holds, by their names in it.

    Of grading/ those that the four scripts reach; what is for instructors alone is not handed out.
    """
    found = [*sorted((ROOT / "engine").rglob("*.py")), *sorted((ROOT / "requirements").glob("*.txt"))]
    engine = [name for path in found if (name := path.relative_to(ROOT).as_posix()) not in NOT_HANDED_OUT]
    return [
        *MODEL_HALF,
        *SCRIPTS,
        *PLAIN,
        *DATA,
        *engine,
        *reached((*(s.removesuffix(".py") for s in SCRIPTS), *IN_CHILD)),
    ]


def reached(modules: tuple[str, ...]) -> list[str]:
    """The files of grading/ that some modules import, directly or through one another."""
    waiting, found = list(modules), {"grading/__init__.py"}
    for module in waiting:
        path = ROOT / f"{module.replace('.', '/')}.py"
        if not path.is_file() or (name := path.relative_to(ROOT).as_posix()) in found:
            continue
        found |= {name} if name.startswith("grading/") else set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            base = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            whole = [*base, *(".".join([*base, each]) for each in names)]
            waiting += [each for each in whole if each.startswith("grading.") and each not in waiting]
    return sorted(found)


def with_defaults(text: str, file: str, name: str) -> str:
    """A file that is not of the root, or setup.sh, with the defaults of an edition."""
    if file == "grading/editions.py":
        return replaced(text, f'DEFAULT_EDITION = "{DEFAULT_EDITION}"', f'DEFAULT_EDITION = "{name}"')
    for old, new in zip(FETCHED, FETCHED_LATER.get(name, FETCHED), strict=True) if file == "setup.sh" else ():
        text = replaced(text, old, new)
    return text


def filled_in(page: str, name: str, edition: Edition, holes: list[Hole]) -> str:
    """A page with the words of an edition in the place of those in double braces."""
    rows = [f"| `{hole.file}` | `{hole.name}` | `{hole.check}`{_part(hole, edition)} |" for hole in holes]
    words = {
        "edition": name, "version": VERSION, "id": edition.id_name, "norm": NORMS[edition.norm],
        "attention": edition.attention, "sampling": SAMPLINGS[edition.sampling], "size": f"{edition.size_limit:g}",
        "clipping": "`AdamW` clips gradients to `max_grad_norm`, if that is not None." if edition.clips else "",
        "runs": "\n".join(_runs(name)), "course": COURSE_FILES.get(name, ""),
        "beyond": SMALLEST if edition.folders else BEYOND, "models": MODELS if edition.folders else "",
        "holes": "\n".join(["| file | function | checked by |", "|---|---|---|", *rows]),
        "boxes": "\n".join(f"- [ ] `{hole.name}` in `{hole.file}`" for hole in holes),
        "required": "\n".join(f"- `{file}`" for file in (*edition.required, *(f"{each}/" for each in edition.folders))),
    }  # fmt: skip
    return re.sub(r"\{\{(\w+)\}\}", lambda match: words[match[1]], page)


def _runs(name: str) -> Iterator[str]:
    """A row of the README for each data set and kind of output: the course's accuracies and its command."""
    for (data, kind), means in reference_accuracies(name).items():
        flags = RUNS[kind] + ("" if kind == "prompting" else f" --batch_size {BATCH_SIZES[data]}")
        files = " ".join(f"--{split} data/{data}-{split}.txt" for split in ("train", "dev", "test"))
        outputs = " ".join(f"--{split}_out {data}-{split}-{kind}-output.txt" for split in ("dev", "test"))
        known = ", ".join(f"{mean:.3f}" for mean in means if mean is not None)
        names = f"--label-names data/{data}-label-mapping.json"
        yield f"| {kind}, {data.upper()}: {known} | `python run_llama.py {flags} {files} {names} {outputs}` |"


def _part(hole: Hole, edition: Edition) -> str:
    return f": {hole.part.format(edition.attention)}" if hole.part else ""


def leaks(out: Path, name: str, holes: list[Hole]) -> list[str]:
    """The places in an edition's folder with a line of an answer: `file: line`. Short lines say nothing."""
    texts = {hole.file: text_of(hole.file, name) for hole in holes}
    lines = {" ".join(line.split()) for file, text in texts.items() for line in removed(text, file, holes)}
    lines = {line for line in lines if len(line) >= SHORTEST and not line.startswith(("def ", "class ", '"""'))}
    found = []
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.suffix not in (".pt", ".model"):
            text = " ".join(path.read_text(encoding="utf-8").split())
            found += [f"{path.relative_to(out).as_posix()}: {line}" for line in sorted(lines) if line in text]
    return found
