"""A student's own llama.py under the commands: scores that take no mask, and a `generate` that does something else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT, outputs, slow_among
from error_helpers import TEXT_FLAGS, check_one_error, stderr_lines

from engine.families import NO_MASK
from engine.inference import OTHER_CHOICES, OWN_GENERATE
from engine.weights import load_llama_model
from llama import Llama
from tokenizer import Tokenizer

BUNDLED = ROOT / "checkpoints" / "minllama1M.pt"
LINKED = ("engine", "fast", "advanced", "data", "checkpoints")
SIGNATURE = "self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor"
WITHOUT_MASK = (  # as in the assignment's first editions
    (f"{SIGNATURE}, mask: torch.Tensor | None = None\n", f"{SIGNATURE}\n"),
    ("        if mask is not None:  # only a causal model gives one\n", ""),
    ('            scores = scores.masked_fill(~mask, float("-inf"))\n', ""),
)
SECOND = (("idx_next = logits.argmax(dim=-1, keepdim=True)", "idx_next = logits.topk(2).indices[:, 1:]"),)
PROMPT = "It was"
GENERATE = ("--prompt", PROMPT, "--max_new_tokens", 12, *TEXT_FLAGS)
PATH = ("--pretrained-model-path", BUNDLED)


@pytest.fixture(scope="module")
def finetune(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """The flags of a fine-tuning on some lines of the bundled data."""
    folder = tmp_path_factory.mktemp("data")
    flags = ["--option", "finetune", "--epochs", 1, "--lr", 0.001, *PATH]
    for split in ("train", "dev", "test"):
        lines = (ROOT / f"data/films-{split}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"films-{split}.txt").write_text("".join(lines[:24]), encoding="utf-8")
        flags += [f"--{split}", folder / f"films-{split}.txt"]
    flags += ["--label-names", ROOT / "data/films-label-mapping.json"]
    flags += ["--dev_out", "films-dev-finetuning-output.txt", "--test_out", "films-test-finetuning-output.txt"]
    return tuple(flags)


def driver_of(folder: Path, edits: tuple[tuple[str, str], ...] = ()) -> Callable[..., subprocess.CompletedProcess]:
    """The driver of a copy of the root files, in which llama.py is edited; the other folders are those of the root."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    text = (folder / "llama.py").read_text(encoding="utf-8")
    for before, after in edits:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "llama.py").write_text(text, encoding="utf-8")

    def run(*flags: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "run_llama.py", *map(str, flags)]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ}, timeout=300)

    return run


@pytest.fixture
def without_mask(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    return driver_of(tmp_path, WITHOUT_MASK)


@pytest.fixture
def second(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """The driver of a student whose `generate` takes the second likeliest token at temperature 0."""
    return driver_of(tmp_path, SECOND)


def slowly(attention: str, prompt: str, rank: int, new: int = 12) -> str:
    """The text of always the same rank among the next tokens, everything computed anew."""
    model, tokenizer = (
        load_llama_model(BUNDLED, attention=attention),
        Tokenizer(None, str(BUNDLED.with_suffix(".model"))),
    )
    ids = tokenizer.encode(prompt, bos=True, eos=False)
    with torch.no_grad():
        for _ in range(new):
            ids.append(model(torch.tensor([ids]))[0][0, -1].argsort(descending=True)[rank].item())
    return tokenizer.decode(ids)


def text_of(folder: Path, temperature: int = 0) -> str:
    return (folder / f"generated-sentence-temp-{temperature}.txt").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------- scores without a mask


@pytest.mark.slow
def test_scores_without_a_mask_generate_bidirectionally_and_one_line_says_so(without_mask: Callable, tmp_path: Path):
    done = without_mask(*GENERATE, *PATH)
    assert done.returncode == 0, done.stderr
    assert "(attention: bidirectional)" in done.stdout
    (line,) = stderr_lines(done.stderr)
    assert line == f"warning: {NO_MASK}; {BUNDLED} is read with --attention bidirectional"
    assert text_of(tmp_path) == slowly("bidirectional", PROMPT, 0) != slowly("causal", PROMPT, 0)
    named = without_mask(*GENERATE, *PATH, "--attention", "bidirectional")
    assert (named.returncode, stderr_lines(named.stderr)) == (0, [])
    assert text_of(tmp_path) == slowly("bidirectional", PROMPT, 0)


@pytest.mark.slow
def test_scores_without_a_mask_are_fine_tuned_bidirectionally_and_one_line_says_so(
    without_mask: Callable, finetune: tuple, tmp_path: Path, run: Callable
):
    done = without_mask(*finetune)
    assert done.returncode == 0, done.stderr
    (line,) = stderr_lines(done.stderr)
    assert line == f"warning: {NO_MASK}; {BUNDLED} is read with --attention bidirectional"
    (other := tmp_path / "other").mkdir()
    expected = run("run_llama.py", *finetune, "--attention", "bidirectional", cwd=other)
    assert expected.returncode == 0, expected.stderr
    assert outputs(tmp_path) == outputs(other) and len(outputs(other)) == 2
    (saved,) = tmp_path.glob("finetune-*.pt")
    predicted = without_mask(
        "--option", "predict", "--model", saved.name, "--input", finetune[finetune.index("--dev") + 1]
    )
    assert (predicted.returncode, stderr_lines(predicted.stderr)) == (0, [])
    labels = [line.partition(" ||| ")[0] for line in predicted.stdout.splitlines() if " ||| " in line]
    written = outputs(other)["films-dev-finetuning-output.txt"].decode().splitlines()
    assert labels == [line.partition(" ||| ")[0] for line in written]


ADVANCED = [word for each in ("dev", "test") for word in (f"--{each}_out", f"films-{each}-advanced-output.txt")]


@pytest.mark.slow
def test_a_method_that_hides_positions_needs_scores_with_a_mask(without_mask: Callable, finetune: tuple):
    flags = (*finetune, *ADVANCED, "--attention", "bidirectional", "--method")
    done = without_mask(*flags, "padding-mask")
    check_one_error(done.returncode, done.stderr, "this needs a mask, which", "compute_query_key_value_scores")
    done = without_mask(*flags, "prefix")
    assert (done.returncode, stderr_lines(done.stderr)) == (0, [])


def test_a_causal_model_of_scores_without_a_mask_is_an_error(without_mask: Callable, finetune: tuple, tmp_path: Path):
    before = sorted(path.name for path in tmp_path.iterdir())
    for flags in ((*GENERATE, *PATH), finetune):
        done = without_mask(*flags, "--attention", "causal")
        check_one_error(done.returncode, done.stderr, NO_MASK)
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before


@pytest.mark.slow
def test_a_causal_classifier_is_not_opened_by_scores_without_a_mask(
    without_mask: Callable, finetune: tuple, tmp_path: Path, run: Callable
):
    (other := tmp_path / "other").mkdir()
    assert run("run_llama.py", *finetune, cwd=other).returncode == 0  # causal, as the checkpoint says
    (saved,) = other.glob("finetune-*.pt")
    done = without_mask("--option", "predict", "--model", saved, "--input", ROOT / "data/films-dev.txt")
    check_one_error(done.returncode, done.stderr, NO_MASK)


# ------------------------------------------------------------------------------------------ a generate of one's own


# of a causal model in one process: test_an_edited_generate_is_what_the_command_asks in tests/fast/test_equivalence.py
@pytest.mark.parametrize("attention", slow_among(["causal", "bidirectional"], ["causal"]))
def test_an_edited_generate_is_what_is_printed_and_one_note_says_so(second: Callable, tmp_path: Path, attention: str):
    done = second(*GENERATE, *PATH, "--attention", attention)
    assert done.returncode == 0, done.stderr
    text = text_of(tmp_path)
    assert text == slowly(attention, PROMPT, 1) != slowly(attention, PROMPT, 0)
    assert f"Temperature is 0.0\n{text}\n---------------\n" in done.stdout
    (line,) = stderr_lines(done.stderr)
    assert line.startswith(f"note: {OWN_GENERATE}: ") and "temperature 0.0" in line
    plain = driver_of(make(tmp_path / "plain"))(*GENERATE, *PATH, "--attention", attention)
    assert stderr_lines(plain.stderr) == [] and text_of(tmp_path / "plain") == slowly(attention, PROMPT, 0)
    assert text_of(tmp_path, 1) == text_of(tmp_path / "plain", 1)  # where nothing was edited


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_an_edited_generate_continues_a_file_of_prompts(second: Callable, tmp_path: Path):
    prompts = [PROMPT, "A dog was", "The film was"]
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
    flags = ("--option", "generate", *PATH, "--prompt_file", "prompts.txt", "--output", "o.jsonl")
    done = second(*flags, "--max_new_tokens", 12)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows] == [slowly("causal", prompt, 1) for prompt in prompts]
    assert [line.startswith(f"note: {OWN_GENERATE}: ") for line in stderr_lines(done.stderr)] == [True]


@pytest.mark.slow
def test_flags_for_sampling_do_not_ask_an_edited_generate_and_one_note_says_so(second: Callable, tmp_path: Path):
    done = second(*GENERATE, *PATH, "--top_k", 1, "--temperature", 0.5)
    assert done.returncode == 0, done.stderr
    assert text_of(tmp_path) == slowly("causal", PROMPT, 1)  # at temperature 0 there is nothing to draw from
    assert text_of(tmp_path, 1) == slowly("causal", PROMPT, 0)  # of one token, drawn by the flag's own code
    found = [line for line in stderr_lines(done.stderr) if line.startswith(f"note: {OTHER_CHOICES}: ")]
    assert len(found) == 1 and len(stderr_lines(done.stderr)) == 2
    (tmp_path / "generated-sentence-temp-0.txt").unlink()
    penalized = second(*GENERATE, *PATH, "--repetition_penalty", 1.0)  # acts at temperature 0 as well
    (line,) = stderr_lines(penalized.stderr)
    assert line.startswith(f"note: {OTHER_CHOICES}: ")
    assert text_of(tmp_path) == slowly("causal", PROMPT, 0)


def test_a_model_with_a_generate_of_its_own_class_is_asked():
    """As a subclass has it, in one process."""
    from engine.decoding import why_own_generate

    class Other(Llama):
        def generate(self, idx: torch.Tensor, *settings: object) -> torch.Tensor:
            return idx

    model = load_llama_model(BUNDLED)
    assert why_own_generate(model) is None
    model.__class__ = Other
    assert why_own_generate(model) == "it has a generate of its own"
