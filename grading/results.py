"""The numbers of a submission's output files: accuracies against the references, copied and repeated labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from grading.editions import ADVANCED, BUNDLED_NORM, EDITIONS, reference_accuracy
from grading.findings import Message
from grading.outputs import OUTPUT
from grading.programs import few
from grading.published import PUBLISHED_LABELS, labels_digest
from grading.rules import Report
from grading.settings import Settings


def reference_of(dataset: str, split: str, kind: str, settings: Settings) -> float | None:
    """The reference's accuracy, by the config or else by the course; None where it names none."""
    usual = reference_accuracy(settings.edition, dataset, split, kind)
    return settings.references.get(f"{dataset}-{split}-{kind}", usual)


def check_results(report: Report, settings: Settings) -> Iterator[Message]:
    """The findings about accuracies and labels of one submission."""
    edition = EDITIONS[settings.edition]
    is_published = (edition.norm, edition.attention) == (BUNDLED_NORM, "bidirectional")
    for name, score in report.scores.items():
        dataset, split, kind = OUTPUT.fullmatch(name).groups()
        if score.accuracy is not None and score.lines >= settings.thresholds.lines:
            reference = reference_of(dataset, split, kind, settings)
            yield from _check_accuracy(name, dataset, score.accuracy, reference, settings)
        if kind == "prompting" and is_published:
            yield from _check_zero_shot(name, f"{dataset}-{split}", report.labels[name])
    advanced = [name for name in ADVANCED if name in report.labels]
    base = {kind: [name.replace("advanced", kind) for name in advanced] for kind in ("prompting", "finetuning")}
    for kind, names in base.items():
        if advanced and all(report.labels[a] == report.labels.get(b) for a, b in zip(advanced, names, strict=True)):
            said = f"the advanced outputs have the labels of the {kind} outputs"
            yield Message(said, "E047-advanced-equal", advanced[0])


def _check_accuracy(
    name: str, dataset: str, accuracy: float, reference: float | None, settings: Settings
) -> Iterator[Message]:
    limits = settings.thresholds
    band, copied = getattr(limits, dataset), getattr(limits, f"copied_{dataset}")
    if accuracy >= copied:
        said = f"{name}: accuracy {accuracy:.3f}"
        yield Message(said, "E042-gold", name, 0, f"less than {copied:g}", f"{accuracy:.3f}")
    elif reference is not None and round(abs(accuracy - reference), 3) > band:
        code = "E040-accuracy" if accuracy < reference else "E041-high"
        said = f"{name}: accuracy {accuracy:.3f}; the reference's is {reference:.3f}"
        yield Message(said, code, name, 0, f"{reference - band:.3f} or more", f"{accuracy:.3f}")


def _check_zero_shot(name: str, part: str, labels: Sequence[int]) -> Iterator[Message]:
    accepted = PUBLISHED_LABELS[part]
    if len(labels) == sum(accepted[0].counts) and labels_digest(labels) not in {one.sha256 for one in accepted}:
        yield Message(f"{name}: other labels than the published ones", "E046-zero-shot", name)


def fine_tuned_digests(labels: Mapping[str, Sequence[int]], least: int) -> dict[str, str]:
    """The digest of each fine-tuned output with at least so many lines, by its name."""
    return {
        name: labels_digest(column)
        for name, column in labels.items()
        if name.endswith("-finetuning-output.txt") and len(column) >= least
    }


def compare_students(digests: Mapping[str, Mapping[str, str]]) -> dict[str, list[Message]]:
    """Findings by student: the same fine-tuned labels as another's. digests: `fine_tuned_digests` by student."""
    holders, messages = defaultdict(list), defaultdict(list)
    for student, columns in digests.items():
        for name, digest in columns.items():
            holders[name, digest].append(student)
    for (name, _), students in sorted(holders.items()):
        code = "E048-same-labels" if name.startswith("sst") else "E049-same-cfimdb"
        for student in students if len(students) > 1 else []:
            others = few(set(students) - {student})
            messages[student].append(Message(f"{name}: the same labels as {others}", code, name, 0, "", others))
    return messages
