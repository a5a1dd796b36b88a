"""Checks llama.py against numbers that others computed: `python sanity_check.py`. Exit status 0 if right, 1 if not.

With stories42M.pt and the course's sanity_check.data it checks the logits and hidden states of the two sequences that
the assignment publishes. Without them it checks the bundled checkpoint against tensors that Hugging Face transformers
computed from it. `--published` runs generation and the four zero-shot files on the real stories42M.pt and compares them
with what independently finished public repositories of the assignment have in common.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from llama import load_pretrained
from storage import load_tensors
from utils import ROOT, ArgumentParser, Default, UserError, choose_device, find_asset, read_text, run_main

ATOL, RTOL = 1e-5, 1e-3
COURSE_CHECKPOINT, COURSE_REFERENCE = "stories42M.pt", "sanity_check.data"
BUNDLED_CHECKPOINT, BUNDLED_REFERENCE = "checkpoints/minllama1M.pt", "checkpoints/minllama1M-reference.pt"
# the two sequences behind the course's sanity_check.data (github.com/neubig/minllama-assignment, commit 2951cdd)
COURSE_TOKENS = ((101, 7592, 2088, 102, 0, 0, 0, 0), (101, 7592, 15756, 2897, 2005, 17953, 2361, 102))


# -------------------------------------------------------------------------------------- logits, hidden states


@dataclass
class Reference:
    """What a checkpoint should compute from `tokens` under one attention semantics."""

    tokens: torch.Tensor
    logits: torch.Tensor
    hidden_states: torch.Tensor
    attention: str


def course_reference(path: Path) -> Reference:
    data = load_tensors(path)
    try:
        logits, hidden_states = data["logits"], data["hidden_states"]
    except (TypeError, KeyError, IndexError):
        logits = hidden_states = None
    if not isinstance(logits, torch.Tensor) or not isinstance(hidden_states, torch.Tensor):
        raise UserError(f"{path} does not hold the tensors 'logits' and 'hidden_states'")
    return Reference(torch.tensor(COURSE_TOKENS), logits, hidden_states, "bidirectional")


def bundled_references(path: Path) -> list[Reference]:
    data = load_tensors(path)
    return [Reference(data["tokens"], **data[kind], attention=kind) for kind in ("bidirectional", "causal")]


def agrees(checkpoint: Path, reference: Reference, attention: str, device: str = "cpu", verbose: bool = True) -> bool:
    """Whether the model computes the reference within atol + rtol * |reference|; prints the largest errors."""
    model = load_pretrained(checkpoint, attention=attention).to(choose_device(device))
    if reference.tokens.max() >= model.config.vocab_size:
        raise UserError(
            f"{checkpoint} has a vocabulary of {model.config.vocab_size}, too small for the reference's token ids"
        )
    with torch.inference_mode():
        logits, hidden_states = (tensor.cpu() for tensor in model(reference.tokens.to(choose_device(device))))
    verdicts = []
    for name, actual, expected in (
        ("hidden states", hidden_states, reference.hidden_states),
        ("logits", logits, reference.logits),
    ):
        if actual.shape != expected.shape:
            raise UserError(f"{name} are {list(actual.shape)}, but the reference's are {list(expected.shape)}")
        difference = (actual - expected).abs()
        passed = bool((difference <= ATOL + RTOL * expected.abs()).all())  # False for NaN as well
        verdicts.append(passed)
        if verbose:
            relative = (difference / expected.abs().clamp(min=ATOL)).max()
            print(
                f"  {name:13s}  largest absolute error {difference.max():.1e}, largest relative error "
                f"{relative:.1e}: {'ok' if passed else 'WRONG'}"
            )
    return all(verdicts)


def check_model(checkpoint: Path, references: list[Reference], device: str = "cpu") -> bool:
    """Check every reference; where one fails, say whether the attention mask is the cause."""
    passed = True
    for reference in references:
        print(f"{checkpoint} with {reference.attention} attention (atol {ATOL:g}, rtol {RTOL:g}):")
        if agrees(checkpoint, reference, reference.attention, device):
            continue
        passed = False
        other = "causal" if reference.attention == "bidirectional" else "bidirectional"
        if agrees(checkpoint, reference, other, device, verbose=False):
            print(f"  The causal mask is the cause: with {other} attention the model gives exactly this reference.")
        else:
            print(f"  The causal mask is not the cause: with {other} attention the reference is missed as well.")
    return passed


def check_sanity(args: Namespace) -> bool:
    """The course's reference if both of its files are here, the bundled one if not; says which."""
    checkpoint, reference = find_asset(args.pretrained_model_path), find_asset(args.data)
    if checkpoint and reference:
        print(f"Checking against the course's reference tensors ({reference}).")
        return check_model(checkpoint, [course_reference(reference)], args.device)
    wanted = {args.pretrained_model_path: checkpoint, args.data: reference}
    missing = ", ".join(name for name, found in wanted.items() if not found)
    if not (isinstance(args.pretrained_model_path, Default) and isinstance(args.data, Default)):
        raise UserError(f"{missing} does not exist; a checkpoint that you name is checked against the course's tensors")
    checkpoint, reference = find_asset(BUNDLED_CHECKPOINT), find_asset(BUNDLED_REFERENCE)
    if not checkpoint or not reference:
        raise UserError(f"not here: {missing}, nor the bundled checkpoint; setup.sh fetches the course's files")
    print(f"Not here: {missing}. So checking the bundled checkpoint against Hugging Face transformers' numbers.")
    return check_model(checkpoint, bundled_references(reference), args.device)


# --------------------------------------------------------------------------------- published text and labels

# What independently finished repositories of the 2024 / UCSC edition have in common. sha256: of a generated file's
# bytes, or of the labels column (one label a line, each ended by a newline). Two accepted hashes are two ways in which
# floating-point ties fall on different machines.
PUBLISHED_TEXTS = {
    "bidirectional": "51616a471e3cfe14eb8d2e224d06b04559e984062ebf4216226a23bafc5f23ec",
    "causal": "da0b634a0bcf04e6dc712214dfaae7904e16544561006c2282e1ed0188656e2f",
}


@dataclass(frozen=True)
class PublishedLabels:
    """One accepted zero-shot label file: its hash, how often each label occurs, and its accuracy."""

    sha256: str
    counts: tuple[int, ...]
    accuracy: float | None


PUBLISHED_LABELS = {
    "sst-dev": (
        PublishedLabels(
            "f0200a774dc8d5eaba133a4a8a295a79a96427ae9fa2fa7b2a6acf7b7b046d64", (405, 493, 83, 89, 31), 0.2134
        ),
    ),
    "sst-test": (
        PublishedLabels(
            "30ac3cfd8f617719be22657adae21a04d231784d1aff3ba6351b16889ebd1670", (732, 990, 220, 194, 74), 0.2244
        ),
        PublishedLabels(
            "7cb2c41bc2e0b9dfea72fc821c909c31fea2e3ebbcc5a19f67aa68ed730b3da7", (734, 982, 226, 194, 74), 0.2244
        ),
    ),
    "cfimdb-dev": (
        PublishedLabels("0b6c0e486b15e056d6c1e647fab32086a92d1dae9e79dffda3ef282850762bd8", (59, 186), 0.502),
        PublishedLabels("9d32c2ead2379b299b42c5f4e64161e037e6070a451363a1f2285939fac3ff4d", (60, 185), 0.498),
    ),
    "cfimdb-test": (
        PublishedLabels("c9b6390227cc044520b727e55cfa9c92bfaee6f08207fd6ea0958e9e4ed5e76c", (104, 384), None),
        PublishedLabels("25608bacba8fcf0fa09cf8e307ffaec6c6d862860213865182646de1bbed77bf", (103, 385), None),
    ),
}


def check_published(args: Namespace, texts: dict[str, str], labels: dict[str, tuple[PublishedLabels, ...]]) -> bool:
    """Run the driver as a student would, in a scratch folder, and print item, expected, got and verdict."""
    checkpoint = find_asset(args.pretrained_model_path)
    if checkpoint is None:
        raise UserError(f"--published needs {args.pretrained_model_path}, which is not here; run setup.sh to fetch it")
    gold = {name: find_asset(f"{args.data_dir}/{name}.txt") for name in labels}
    if None in gold.values():
        raise UserError(f"--published needs the course's data in {args.data_dir}/; run setup.sh to fetch it")
    flags = ["--pretrained-model-path", str(checkpoint.resolve())]
    if args.tokenizer:
        flags += ["--tokenizer", str(Path(args.tokenizer).resolve())]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for attention, expected in texts.items():
            run_driver(["--option", "generate", "--attention", attention, *flags], folder)
            got = hashlib.sha256((Path(folder) / "generated-sentence-temp-0.txt").read_bytes()).hexdigest()
            rows.append((f"text, temperature 0, {attention}", expected[:12], got[:12], _verdict(expected == got)))
        for dataset in sorted({name.rsplit("-", 1)[0] for name in labels}):
            run_driver([*_zero_shot_flags(dataset, gold[f"{dataset}-dev"].parent), *flags], folder)
            for split in ("dev", "test"):
                name = f"{dataset}-{split}"
                output = Path(folder) / f"{name}-prompting-output.txt"
                rows.append(label_row(name, output, gold[name], labels[name]))
    print_table(("item", "expected", "got", "verdict"), rows)
    return all(row[-1] != "DIFFERS" for row in rows)


def _verdict(equal: bool) -> str:
    return "equal" if equal else "DIFFERS"


def _zero_shot_flags(dataset: str, data_dir: Path) -> list[str]:
    """The assignment's zero-shot command for one data set, attention left to its reference semantics."""
    flags = ["--option", "prompt", "--batch_size", "10", "--attention", "bidirectional"]
    for split in ("train", "dev", "test"):
        flags += [f"--{split}", str((data_dir / f"{dataset}-{split}.txt").resolve())]
    for split in ("dev", "test"):
        flags += [f"--{split}_out", f"{dataset}-{split}-prompting-output.txt"]
    return [*flags, "--label-names", str((data_dir / f"{dataset}-label-mapping.json").resolve())]


def run_driver(flags: list[str], folder: str) -> None:
    """Run run_llama.py in `folder`. Raises `UserError` with its last line if it fails."""
    print(f"running run_llama.py {' '.join(flags[:2])} ...", file=sys.stderr)
    command = [sys.executable, str(ROOT / "run_llama.py"), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    if done.returncode != 0:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise UserError(f"run_llama.py failed (status {done.returncode}): {last_line}")


def label_row(name: str, output: Path, gold: Path, accepted: tuple[PublishedLabels, ...]) -> tuple[str, str, str, str]:
    """Compare a prediction file with the accepted ones.

    "close": no accepted hash, but counts within 1 % of the lines and accuracy within 0.01 of an accepted one, which is
    what ties that fall differently on another machine look like.
    """
    predictions, labels = (
        [int(line.partition(" ||| ")[0]) for line in read_text(path).removesuffix("\n").split("\n")]
        for path in (output, gold)
    )
    digest = hashlib.sha256("".join(f"{label}\n" for label in predictions).encode()).hexdigest()
    counts = tuple(Counter(predictions)[label] for label in range(len(accepted[0].counts)))
    accuracy = sum(map(int.__eq__, predictions, labels)) / len(labels)

    def is_close(one: PublishedLabels) -> bool:
        moved = sum(abs(a - b) for a, b in zip(counts, one.counts, strict=True)) / 2
        near = one.accuracy is None or abs(accuracy - one.accuracy) <= 0.01
        return moved <= 0.01 * len(labels) and near

    if any(one.sha256 == digest for one in accepted):
        verdict = "equal"
    else:
        verdict = "close" if any(map(is_close, accepted)) else "DIFFERS"
    expected = " or ".join(_describe(one.sha256, one.counts, one.accuracy) for one in accepted)
    got = _describe(digest, counts, None if accepted[0].accuracy is None else accuracy)
    return f"zero-shot, {name}", expected, got, verdict


def _describe(digest: str, counts: tuple[int, ...], accuracy: float | None) -> str:
    acc = "no gold labels" if accuracy is None else f"acc {accuracy:.3f}"
    return f"{digest[:8]} {'/'.join(map(str, counts))} {acc}"


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def get_args() -> Namespace:
    parser = ArgumentParser(description="Check llama.py against numbers that others computed.")
    parser.add_argument("--pretrained-model-path", default=Default(COURSE_CHECKPOINT), help="the checkpoint to check")
    parser.add_argument("--data", default=Default(COURSE_REFERENCE), help="the course's reference tensors")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    parser.add_argument("--published", action="store_true", help="compare text and zero-shot labels with public ones")
    parser.add_argument("--data_dir", default="data", help="where --published finds sst-*.txt and cfimdb-*.txt")
    parser.add_argument("--tokenizer", help="SentencePiece model for --published (default: as run_llama.py chooses)")
    return parser.parse_args()


def main() -> int:
    args = get_args()
    if args.published:
        passed = check_published(args, PUBLISHED_TEXTS, PUBLISHED_LABELS)
    else:
        passed = check_sanity(args)
    print("Your Llama implementation is correct!" if passed else "Sanity check FAILED: see the lines above.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
