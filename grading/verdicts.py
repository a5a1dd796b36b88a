"""The verdict on each part of a student's code, and the mistake that explains a wrong one."""

from __future__ import annotations

from collections.abc import Iterator

from grading.asking import ChildAnswer, ChildQuestion, Student
from grading.checked import CheckedPart, Mistakes, PartVerdict, as_tensors, singles_then_pairs
from grading.compare import Tensors, alike

TRAINED = ("norm_or_feed_forward", "rotate", "scores", "attention", "layer")  # asked for gradients, too
NEAR = 5e-4  # how far numbers in float32 may be from those of a mistake


def judge(
    student: Student, parts: list[CheckedPart], expected: dict[str, Tensors], tolerance: float = 1e-5
) -> Iterator[PartVerdict]:
    """The verdicts on the parts, one by one.

    A part that needs a wrong or missing one is not judged, unless its numbers are right all the same, or it has a
    mistake of its own, which shows when it is asked alone.
    """
    to_mend: dict[str, list[str]] = {}  # why a part is not right: itself, or parts that it needs
    troubles: set[str] = set()  # of the parts so far: exceptions, and functions that are not written
    lost: set[str] = set()  # parts that ended the process, and those that need them: not asked, as each costs its time
    for part in parts:
        needed = [*dict.fromkeys(cause for need in part.needs for cause in to_mend.get(need, ()))]
        if needed and lost & {*part.needs}:
            answer = ChildAnswer(trouble="not asked", is_lost=True)
        else:
            answer = part.read(student.ask(part.question))
        if answer.is_lost:
            lost.add(part.name)
        right = expected.get(part.name, ())[: part.judged]
        if is_right(part, answer, right, tolerance):
            answer = training_trouble(student, part.question)
            if not answer.trouble:
                yield PartVerdict(part, "ok")
                continue
        if not answer.is_written and answer.trouble not in troubles:
            needed = []  # the part itself is missing
        own = own_mistake(student, part, answer, troubles) if needed else ""
        troubles |= {answer.trouble} - {""}
        to_mend[part.name] = [*needed, part.name] if own else needed or [part.name]
        if needed and not own:
            yield PartVerdict(part, "not judged", f"it needs {'; '.join(needed)}")
        elif own or answer.trouble:
            yield PartVerdict(part, "WRONG" if answer.is_written else "not written yet", own or answer.trouble)
        else:
            yield PartVerdict(part, "WRONG", explanation(student, part, answer.tensors, right))


def is_right(part: CheckedPart, answer: ChildAnswer, right: Tensors, tolerance: float) -> bool:
    """Whether the numbers are the stored ones, or others that are right, too."""
    if answer.trouble:
        return False
    return alike(answer.tensors, right, tolerance) or any(
        alike(answer.tensors, as_tensors(other()), tolerance) for other in part.also
    )


def training_trouble(student: Student, question: ChildQuestion) -> ChildAnswer:
    """The trouble with the gradients of a part whose numbers are right."""
    if question.name not in TRAINED:
        return ChildAnswer()
    settings = {**question.settings, "question": question.name}
    return student.ask(question._replace(name="gradients", settings=settings))


def own_mistake(student: Student, part: CheckedPart, answer: ChildAnswer, troubles: set[str]) -> str:
    """What is wrong in a part that needs a wrong one, asked with stand-ins; "" if nothing is, or nothing is known.

    troubles: of earlier parts; the same exception in this one is theirs.
    """
    if part.alone is None or answer.is_lost or not answer.is_written:
        return ""
    alone = part.read(student.ask(part.alone.question))
    if alone.trouble:
        return answer.trouble if alone.trouble == answer.trouble and answer.trouble not in troubles else ""
    return usual_mistake(part.alone.mistakes, alone.tensors, as_tensors(part.alone.right()), part.judged)


def usual_mistake(mistakes: Mistakes, actual: Tensors, right: Tensors, judged: int | None = None) -> str:
    """The sentence about the usual mistake that gives these numbers, or about two together; "" if none does."""
    if alike(actual, right[:judged], NEAR):
        return ""
    for sentence, mistake in singles_then_pairs(mistakes):
        try:
            wrong = as_tensors(mistake())[:judged]
        except (RuntimeError, IndexError):  # two mistakes whose shapes do not fit together
            continue
        if alike(actual, wrong, NEAR) and not alike(wrong, right[:judged]):
            return sentence
    return ""


def explanation(student: Student, part: CheckedPart, actual: Tensors, expected: Tensors) -> str:
    """The usual mistakes that give these numbers, or how far off they are."""
    if said := usual_mistake(part.mistakes, actual, expected, part.judged):
        return said
    if len(actual) != len(expected):
        return f"it returns {len(actual)} tensors, not {len(expected)}"
    for a, e in zip(actual, expected, strict=True):
        if a.shape != e.shape:
            return f"it returns {list(a.shape)} numbers, not {list(e.shape)}"
    if not alike(part.read(student.ask(part.question)).tensors, actual):
        return part.drawn
    error = max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))
    return f"off by up to {error:.1e}, and no usual mistake gives these numbers"
