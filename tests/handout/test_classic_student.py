"""A student of the hand-out who writes the holes with the course's arguments alone, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from classic_functions import CLASSIC, LATER, SCORES, replaced
from test_handout import ask

from handout.writing import write_handout

FILMS = [f"--{split}=data/films-{split}.txt" for split in ("train", "dev", "test")]
FILMS += ["--label-names=data/films-label-mapping.json"]
WRITTEN = ("generated-sentence-temp-0.txt", "generated-sentence-temp-1.txt")


@pytest.fixture
def student(tmp_path: Path, edition: str) -> Path:
    """The hand-out of an edition with its holes written."""
    folder, texts = tmp_path / "student", {**CLASSIC, **LATER[edition]}
    if edition == "cmu2026":  # the hand-out's function gets a mask, which it may do without, as it makes its own
        texts[SCORES] = texts[SCORES].replace("value):", "value, mask=None):")
    holes = write_handout(folder, edition)
    assert len(holes) == 7
    for hole in holes:
        path = folder / hole.file
        source = path.read_text(encoding="utf-8")
        path.write_text(replaced(source, hole.name, texts[f"{hole.file}:{hole.name}"]), encoding="utf-8")
    assert not any("not written yet" in path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    return folder


@pytest.mark.slow  # of the graders, tests/grading/test_classic.py says so in one process
@pytest.mark.parametrize("edition", ["ucsc", "cmu2024", "cmu2025", "cmu2026"])
def test_all_graders_say_right_and_the_commands_run(student: Path, edition: str):
    assert "Rotary embedding test passed!" in ask(student, "rope_test.py", status=0)
    assert "Optimizer test passed!" in ask(student, "optimizer_test.py", status=0)
    said = ask(student, "sanity_check.py", "--parts", status=0)
    assert "correct!" in said and "WRONG" not in said and "not judged" not in said
    if edition == "cmu2025":  # the course's bare rule leaves no token where all are rare: in one line
        said = ask(student, "run_llama.py", "--option", "generate", status=2)
        assert said.splitlines()[-1].endswith("a limit on probabilities must keep the likeliest token")
        llama, rule = student / "llama.py", "probs >= epsilon"
        text = llama.read_text(encoding="utf-8")
        assert text.count(rule) == 1
        llama.write_text(text.replace(rule, "probs >= probs.max().clamp(max=epsilon)"), encoding="utf-8")
    said = ask(student, "run_llama.py", "--option", "generate", "--max_new_tokens", "20", status=0)
    assert all(f"Wrote generated sentence to {name}." in said for name in WRITTEN)
    for name in WRITTEN:
        assert (student / name).read_text(encoding="utf-8").startswith("I have wanted to see this thriller")


@pytest.mark.slow
@pytest.mark.parametrize("edition", ["ucsc", "cmu2024", "cmu2025"])
def test_it_trains_and_asks(student: Path, edition: str):
    outputs = [f"--{split}_out=sst-{split}-finetuning-output.txt" for split in ("dev", "test")]
    command = ["run_llama.py", "--option", "finetune", "--epochs", "1", "--batch_size", "80", *FILMS, *outputs]
    assert "epoch 0: train loss :: " in ask(student, *command, status=0)
    outputs = [f"--{split}_out=sst-{split}-prompting-output.txt" for split in ("dev", "test")]
    assert "test acc :: " in ask(student, "run_llama.py", "--option", "prompt", *FILMS, *outputs, status=0)


@pytest.mark.parametrize("edition", ["ucsc"])
def test_what_it_cannot_do_is_one_line(student: Path, edition: str):
    """Scores without a mask and a causal model; flags that need what a hand-out leaves out."""
    said = ask(student, "run_llama.py", "--attention", "causal", status=2)
    assert said.splitlines()[-1].startswith("error: a causal model needs a mask: add the argument mask=None")
    said = ask(student, "run_llama.py", "--top_k", "3", status=2)
    assert said.splitlines()[-1] == "error: flags for sampling and searches need engine/decoding.py, which is not here"
    assert not any((student / name).exists() for name in WRITTEN)
