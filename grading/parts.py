"""The parts of a student's llama.py, rope.py and classifier.py: how each is asked, judged and explained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from grading import mistakes, rotation, small_model
from grading.asking import ChildAnswer, ChildQuestion, Student
from grading.compare import Tensors, alike
from grading.editions import ATTENTION_KINDS
from grading.programs import GradingError, find_own, read_text
from grading.small_model import (
    DIM,
    HIDDEN,
    LABELS,
    NEARLY_ALL,
    NORM_EPS,
    PAD,
    PADDED,
    SHAPE,
    THETA,
    TOKENS,
    below,
    in_double,
    small_weights,
)

PARTS = "checkpoints/parts.json"  # what checkpoints/parts.py had others compute


@dataclass(frozen=True)
class CheckedPart:
    """One thing that a student writes: how it is asked, and what usual mistakes would answer.

    needs: the parts that it calls, so that it cannot be right while they are wrong.
    read: turns the answer into what is judged.
    """

    name: str
    where: str
    question: ChildQuestion
    mistakes: dict[str, Callable[[], torch.Tensor | Tensors]]
    needs: tuple[str, ...] = ()
    read: Callable[[ChildAnswer], ChildAnswer] = lambda answer: answer


@dataclass(frozen=True)
class Finding:
    """What became of a part: "ok", "WRONG", "not written yet" or "not judged", and a sentence on it."""

    part: CheckedPart
    verdict: str
    sentence: str = ""


def with_mistakes(by_hand: Callable, table: dict[str, dict], *arguments) -> dict[str, Callable]:
    return {sentence: partial(by_hand, *arguments, **wrong) for sentence, wrong in table.items()}


def takes_attention(student: Student) -> bool:
    """Whether the student's load_pretrained lets one choose between the two kinds; the hand-out's does not.

    False where it cannot be asked, which the questions that call it will say.
    """
    return not student.ask(ChildQuestion("names_attention", "llama")).trouble


def kinds_to_check(student: Student, wanted: str | None) -> tuple[str, ...]:
    """The kinds of attention that the student's model should know."""
    if wanted:
        return (wanted,)
    return ATTENTION_KINDS if takes_attention(student) else ("bidirectional",)


def small_config(kind: str) -> dict[str, Any]:
    return {**SHAPE, "attention": kind}


def ask_module(name: str, weights: dict, *arguments: float) -> ChildQuestion:
    """Of a part of llama.py that is made from numbers alone."""
    tensors = {"weights": weights, "x": small_model.states()}
    return ChildQuestion("norm_or_feed_forward", "llama", {"name": name, "arguments": arguments}, tensors)


def plain_parts() -> Iterator[CheckedPart]:
    """What is the same for both kinds of attention."""
    x, (query, key) = small_model.states().double(), small_model.rotary_inputs()
    norm_weights = below(small_weights(), "norm.")
    norm_weight = norm_weights["weight"].double()
    yield CheckedPart(IMPORT, "llama.py", ChildQuestion("import_module", "llama", {"module": "llama"}), {})
    yield CheckedPart(
        "RMSNorm",
        "class RMSNorm in llama.py",
        ask_module("RMSNorm", norm_weights, DIM, NORM_EPS),
        {said: partial(wrong, x, norm_weight, NORM_EPS) for said, wrong in mistakes.NORM_MISTAKES.items()},
        (IMPORT,),
    )
    yield CheckedPart(
        "rotary embedding",
        "apply_rotary_emb in rope.py",
        rotation.ask_rotation(query, key, SHAPE["max_seq_len"]),
        {said: partial(wrong, query, key, THETA) for said, wrong in rotation.MISTAKES.items()},
    )
    weights = below(small_weights(), "layers.0.feed_forward.")
    yield CheckedPart(
        "feed-forward",
        "class FeedForward in llama.py",
        ask_module("FeedForward", weights, DIM, HIDDEN, SHAPE["multiple_of"], 0.0),
        {said: partial(small_model.feed_forward, x, in_double(weights), gate) for said, gate in mistakes.GATES.items()},
        (IMPORT,),
    )


def attention_parts(kind: str) -> Iterator[CheckedPart]:
    """What depends on the kind of attention, in one layer."""
    causal, x, config = kind == "causal", small_model.states(), {"config": small_config(kind)}
    heads = dict(zip(("query", "key", "value"), small_model.score_inputs(), strict=True))
    weights = below(small_weights(), "layers.0.")
    of_attention, doubled = below(weights, "attention."), in_double(weights)
    yield CheckedPart(
        f"scores and softmax, {kind}",
        "Attention.compute_query_key_value_scores in llama.py",
        ChildQuestion("scores", "llama", config, heads),
        with_mistakes(small_model.attend, mistakes.ATTEND_MISTAKES, *in_double(heads).values(), causal),
        (IMPORT,),
    )
    yield CheckedPart(
        f"grouped queries, {kind}",
        "Attention.forward in llama.py",
        ChildQuestion("attention", "llama", config, {"weights": of_attention, "x": x}),
        with_mistakes(small_model.attention, mistakes.ATTENTION_MISTAKES, x.double(), in_double(of_attention), causal),
        ("rotary embedding", f"scores and softmax, {kind}"),
    )
    yield CheckedPart(
        f"layer, {kind}",
        "LlamaLayer.forward in llama.py",
        ChildQuestion("layer", "llama", config, {"weights": weights, "x": x}),
        with_mistakes(small_model.layer, mistakes.LAYER_MISTAKES, x.double(), doubled, causal),
        ("RMSNorm", "feed-forward", f"grouped queries, {kind}"),
    )


def model_parts(kind: str) -> Iterator[CheckedPart]:
    """The language model of one kind of attention, and loading it."""
    config = {"config": small_config(kind)}
    yield CheckedPart(
        f"embedding and head, {kind}",
        "Llama.forward in llama.py",
        ChildQuestion("llama", "llama", config, {"weights": small_weights(), "tokens": TOKENS}),
        with_mistakes(small_model.llama, mistakes.LLAMA_MISTAKES, TOKENS, kind == "causal"),
        ("RMSNorm", f"layer, {kind}"),
    )
    question = ChildQuestion("loading", "llama", config, {"weights": small_weights()})
    yield CheckedPart(f"loading, {kind}", "load_pretrained in llama.py", question, {}, (IMPORT,), loaded_weights)


def loaded_weights(answer: ChildAnswer) -> ChildAnswer:
    """No numbers where the weights after loading are those of the checkpoint, else the first that is not."""
    loaded = dict(zip(answer.names, answer.tensors, strict=True))
    for name, tensor in () if answer.trouble else small_weights().items():
        if name not in loaded or not torch.equal(loaded[name], tensor.double()):
            return ChildAnswer(trouble=f"{name} is not what the checkpoint holds")
    return ChildAnswer() if not answer.trouble else answer


def classifier_parts(kind: str) -> list[CheckedPart]:
    causal, needs = kind == "causal", (f"embedding and head, {kind}", f"loading, {kind}")
    settings = {"num_labels": len(LABELS), "hidden_dropout_prob": NEARLY_ALL, "option": "finetune", "pad_id": PAD}
    given = {"config": small_config(kind), "settings": settings}
    labels = [" ".join(map(str, ids)) for ids in LABELS]
    inputs = {"weights": small_weights(), "tokens": PADDED}
    head = {"head": small_model.head_weights()}
    return [
        CheckedPart(
            f"zero-shot classifier, {kind}",
            "class LlamaZeroShotClassifier in classifier.py",
            ChildQuestion("zero_shot", "classifier", {**given, "labels": labels}, inputs),
            with_mistakes(small_model.zero_shot, mistakes.ZERO_SHOT_MISTAKES, causal),
            needs,
        ),
        CheckedPart(
            f"embedding classifier, {kind}",
            "class LlamaEmbeddingClassifier in classifier.py",
            ChildQuestion("embedding", "classifier", given, {**inputs, **head}),
            with_mistakes(small_model.embedding, mistakes.EMBEDDING_MISTAKES, causal),
            needs,
        ),
    ]


IMPORT = "import of llama.py"
PART_ORDER = (
    IMPORT,
    "RMSNorm",
    "rotary embedding",
    "scores and softmax",
    "grouped queries",
    "feed-forward",
    "layer",
    "embedding and head",
    "loading",
    "zero-shot classifier",
    "embedding classifier",
)
# asked in any case; the model itself may rotate in another way than by `apply_rotary_emb`
WHOLES = ("rotary embedding", "embedding and head", "zero-shot classifier", "embedding classifier")


def all_parts(kinds: tuple[str, ...], has_classifiers: bool = True) -> list[CheckedPart]:
    """Every part, in the order in which one writes them.

    has_classifiers: False leaves out the classifiers of a causal model. How an edition with one causal kind reads a
    text is not known.
    """
    parts = [*plain_parts()]
    for kind in kinds:
        parts += [*attention_parts(kind), *model_parts(kind)]
        if kind == "bidirectional" or has_classifiers:
            parts += classifier_parts(kind)
    return sorted(parts, key=lambda part: PART_ORDER.index(part.name.partition(",")[0]))


def stored_numbers() -> dict[str, Tensors] | None:
    """What every part should answer, or None where the file is not here."""
    path = find_own(PARTS)
    if path is None:
        return None
    try:
        return {name: tuple(map(torch.tensor, numbers)) for name, numbers in json.loads(read_text(path)).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise GradingError(f"{path} is damaged ({error}); get it again") from None


def judge(student: Student, parts: list[CheckedPart], expected: dict[str, Tensors]) -> list[Finding]:
    """What becomes of every part. One that fails is not judged where a part that it needs is wrong or missing."""
    findings: list[Finding] = []
    to_mend: dict[str, list[str]] = {}  # why a part is not right: itself, or parts that it needs
    blanks: set[str] = set()  # where parts are not written
    lost: set[str] = set()  # parts that ended the process, and those that need them: not asked, as each costs its time
    for part in parts:
        needed = [*dict.fromkeys(cause for need in part.needs for cause in to_mend.get(need, ()))]
        if needed and lost & {*part.needs}:
            answer = ChildAnswer(trouble="not asked", is_lost=True)
        else:
            answer = part.read(student.ask(part.question))
        if answer.is_lost:
            lost.add(part.name)
        if not answer.trouble and alike(answer.tensors, expected.get(part.name, ())):
            findings.append(Finding(part, "ok"))
            continue
        if not answer.is_written and answer.trouble not in blanks:
            blanks.add(answer.trouble)
            needed = []  # it is itself what is missing
        to_mend[part.name] = needed or [part.name]
        if needed:
            findings.append(Finding(part, "not judged", f"it needs {'; '.join(needed)}"))
        elif answer.trouble:
            findings.append(Finding(part, "WRONG" if answer.is_written else "not written yet", answer.trouble))
        else:
            sentence = explanation(student, part, answer.tensors, expected.get(part.name, ()))
            findings.append(Finding(part, "WRONG", sentence))
    return findings


def explanation(student: Student, part: CheckedPart, actual: Tensors, expected: Tensors) -> str:
    """The usual mistake that gives these numbers, or how far off they are."""
    for sentence, mistake in part.mistakes.items():
        wrong = mistake()
        if alike(actual, wrong if isinstance(wrong, tuple) else (wrong,), tolerance=1e-4):
            return sentence
    if len(actual) != len(expected):
        return f"it returns {len(actual)} tensors, not {len(expected)}"
    for a, e in zip(actual, expected, strict=True):
        if a.shape != e.shape:
            return f"it returns {list(a.shape)} numbers, not {list(e.shape)}"
    if not alike(part.read(student.ask(part.question)).tensors, actual):
        return "it gives other numbers each time; is there dropout in evaluation?"
    error = max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))
    return f"off by up to {error:.1e}, and no usual mistake gives these numbers"


def check_parts(
    student: Student,
    expected: dict[str, Tensors] | None,
    attention: str | None,
    is_asked_for: bool,
    whole_is_right: bool,
) -> bool:
    """Whether every part is right. Prints a line for each, unless the whole is right and nobody asked for them.

    expected: `stored_numbers()`, read before the student's code was first asked, as that can write to any file.
    """
    if expected is None:
        if is_asked_for:
            raise GradingError(f"--parts needs {PARTS}, which is not here")
        print(f"note: {PARTS} is not here, so neither the parts nor classifier.py were checked", file=sys.stderr)
        return True
    kinds = kinds_to_check(student, attention)
    parts = all_parts(kinds, has_classifiers="causal" not in kinds or takes_attention(student))
    wholes = [part for part in parts if part.name.partition(",")[0] in WHOLES]
    if whole_is_right and not is_asked_for and all(one.verdict == "ok" for one in judge(student, wholes, expected)):
        return True
    print(f"Part by part, on a small model ({PARTS} holds what others computed):")
    findings = judge(student, parts, expected)
    for one in findings:
        print(f"  {one.part.name + ':':36s} {one.verdict}{f': {one.sentence}' if one.sentence else ''}")
    wrong = [one.part for one in findings if one.verdict != "ok"]
    if wrong:
        print(f"Begin with: {wrong[0].name} ({wrong[0].where}).")
    elif not whole_is_right:
        print("Every part is right by itself. Look at what depends on sizes, and at the checkpoint and the device.")
    return not wrong
