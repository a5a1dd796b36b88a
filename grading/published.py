"""Text and zero-shot labels of the real stories42M.pt against what public repositories of the assignment share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from grading.programs import GradingError, create_data, find_asset, find_course_file
from grading.student_process import short_repr

DRIVER_LIMIT = 4 * 3600.0  # seconds for one run of run_llama.py: a slow processor takes some minutes for SST

# What independently finished repositories of the 2024 / UCSC edition have in common. sha256: of a generated file's
# bytes, or of the labels column (one label a line, each ended by a newline). Two accepted hashes are two ways in which
# floating-point ties fall on different machines.
PUBLISHED_TEXTS = {
    "bidirectional": "51616a471e3cfe14eb8d2e224d06b04559e984062ebf4216226a23bafc5f23ec",
    "causal": "da0b634a0bcf04e6dc712214dfaae7904e16544561006c2282e1ed0188656e2f",
}


class PublishedLabels(NamedTuple):
    """One accepted zero-shot label file: its hash, how often each label occurs, and its accuracy."""

    sha256: str
    counts: tuple[int, ...]
    accuracy: float | None


PUBLISHED_LABELS = {
    "sst-dev": (PublishedLabels(
        "f0200a774dc8d5eaba133a4a8a295a79a96427ae9fa2fa7b2a6acf7b7b046d64", (405, 493, 83, 89, 31), 0.2134
    ),),
    "sst-test": (PublishedLabels(
        "30ac3cfd8f617719be22657adae21a04d231784d1aff3ba6351b16889ebd1670", (732, 990, 220, 194, 74), 0.2244
    ), PublishedLabels(
        "7cb2c41bc2e0b9dfea72fc821c909c31fea2e3ebbcc5a19f67aa68ed730b3da7", (734, 982, 226, 194, 74), 0.2244
    )),
    "cfimdb-dev": (
        PublishedLabels("0b6c0e486b15e056d6c1e647fab32086a92d1dae9e79dffda3ef282850762bd8", (59, 186), 0.502),
        PublishedLabels("9d32c2ead2379b299b42c5f4e64161e037e6070a451363a1f2285939fac3ff4d", (60, 185), 0.498),
    ),
    "cfimdb-test": (
        PublishedLabels("c9b6390227cc044520b727e55cfa9c92bfaee6f08207fd6ea0958e9e4ed5e76c", (104, 384), None),
        PublishedLabels("25608bacba8fcf0fa09cf8e307ffaec6c6d862860213865182646de1bbed77bf", (103, 385), None),
    ),
}  # fmt: skip


def labels_digest(labels: Iterable[int]) -> str:
    """SHA-256 of a column of labels, one a line, each ended by a newline."""
    return hashlib.sha256("".join(f"{label}\n" for label in labels).encode()).hexdigest()


def check_published(
    code: Path,
    args: Namespace,
    texts: dict[str, str] = PUBLISHED_TEXTS,
    labels: dict[str, tuple[PublishedLabels, ...]] = PUBLISHED_LABELS,
) -> bool:
    """Run the driver in the folder `code` as a student would, from a scratch folder; print a table with verdicts."""
    name = args.pretrained_model_path
    checkpoint = find_course_file(name, code.resolve())
    if checkpoint is None:
        raise GradingError(f"--published needs {name}, which is not here; run setup.sh to fetch it")
    gold = {name: find_asset(f"{args.data_dir}/{name}.txt") for name in labels}
    if None in gold.values():
        raise GradingError(f"--published needs the course's data in {args.data_dir}/; run setup.sh to fetch it")
    flags = ["--pretrained-model-path", str(checkpoint.resolve())]
    if args.tokenizer:
        flags += ["--tokenizer", str(Path(args.tokenizer).resolve())]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for attention, expected in texts.items():
            run_driver(code, ["--option", "generate", "--attention", attention, *flags], folder)
            got = hashlib.sha256(read_output(folder, "generated-sentence-temp-0.txt")).hexdigest()
            verdict = "equal" if expected == got else "DIFFERS"
            rows.append((f"text, temperature 0, {attention}", expected[:12], got[:12], verdict))
        for dataset in sorted({name.rsplit("-", 1)[0] for name in labels}):
            run_driver(code, [*_zero_shot_flags(dataset, gold[f"{dataset}-dev"].parent), *flags], folder)
            for split in ("dev", "test"):
                name = f"{dataset}-{split}"
                output = Path(folder) / f"{name}-prompting-output.txt"
                read_output(folder, output.name)
                rows.append(label_row(name, output, gold[name], labels[name]))
    print_table(("item", "expected", "got", "verdict"), rows)
    return all(row[-1] != "DIFFERS" for row in rows)


def _zero_shot_flags(dataset: str, data_dir: Path) -> list[str]:
    """The flags of the assignment's zero-shot command for one data set."""
    files = {f"--{split}": f"{dataset}-{split}.txt" for split in ("train", "dev", "test")}
    files["--label-names"] = f"{dataset}-label-mapping.json"
    flags = ["--option", "prompt", "--batch_size", "10", "--attention", "bidirectional"]
    for flag, name in files.items():
        flags += [flag, str((data_dir / name).resolve())]
    for split in ("dev", "test"):
        flags += [f"--{split}_out", f"{dataset}-{split}-prompting-output.txt"]
    return flags


def run_driver(code: Path, flags: list[str], folder: str, limit: float = DRIVER_LIMIT) -> None:
    """Run run_llama.py of the folder `code` in `folder`. Raises `GradingError` with its last line if it fails.

    limit: seconds until it and all its processes are ended.
    """
    print(f"running run_llama.py {' '.join(flags[:2])} ...", file=sys.stderr)
    command, nothing = [sys.executable, str(code / "run_llama.py"), *flags], subprocess.DEVNULL
    with tempfile.TemporaryFile() as errors:  # not a pipe, which a process that outlives the driver could hold open
        driver = subprocess.Popen(
            command, cwd=folder, stdin=nothing, stdout=nothing, stderr=errors, start_new_session=True
        )
        try:
            status = driver.wait(limit)
        except subprocess.TimeoutExpired:
            raise GradingError(f"run_llama.py {' '.join(flags[:2])} did not end within {limit:g} s") from None
        finally:
            with contextlib.suppress(OSError, AttributeError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.kill()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 10_000))
        last_line = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
    if status != 0:
        raise GradingError(f"run_llama.py failed (status {status}): {short_repr(last_line)}")


def read_output(folder: str, name: str) -> bytes:
    """The bytes of an output file of the driver. Raises `GradingError` if the driver has not written it."""
    path = Path(folder) / name
    if not path.is_file():
        raise GradingError(f"run_llama.py ended without an error, but it has not written {name}")
    return path.read_bytes()


def label_row(name: str, output: Path, gold: Path, accepted: tuple[PublishedLabels, ...]) -> tuple[str, str, str, str]:
    """A row of the table: a prediction file compared with the accepted ones.

    The verdict "close": no accepted hash, but counts within 1 % of the lines and accuracy within 0.01 of an accepted
    file. So look ties that fall differently on another machine.
    """
    predictions, labels = ([one.label for one in create_data(path, is_test=True)] for path in (output, gold))
    digest = labels_digest(predictions)
    counts = tuple(Counter(predictions)[label] for label in range(len(accepted[0].counts)))
    accuracy = sum(map(int.__eq__, predictions, labels)) / len(labels)

    def is_close(one: PublishedLabels) -> bool:
        moved = sum(abs(a - b) for a, b in zip(counts, one.counts, strict=True)) / 2
        near = one.accuracy is None or abs(accuracy - one.accuracy) <= 0.01
        return moved <= 0.01 * len(labels) and near

    is_equal = any(one.sha256 == digest for one in accepted)
    verdict = "equal" if is_equal else "close" if any(map(is_close, accepted)) else "DIFFERS"
    expected = " or ".join(_describe(*one) for one in accepted)
    got = _describe(digest, counts, None if accepted[0].accuracy is None else accuracy)
    return f"zero-shot, {name}", expected, got, verdict


def _describe(digest: str, counts: tuple[int, ...], accuracy: float | None) -> str:
    acc = "no gold labels" if accuracy is None else f"acc {accuracy:.3f}"
    return f"{digest[:8]} {'/'.join(map(str, counts))} {acc}"


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
