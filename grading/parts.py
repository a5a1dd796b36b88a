"""The parts of a student's llama.py, rope.py and classifier.py: how each is asked, judged and explained."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from grading import mistakes, rotation
from grading import small_model as small
from grading.asking import ChildAnswer, ChildQuestion, Student, has_context, takes_attention
from grading.checked import DROPOUT, IMPORT, CheckedPart, PartVerdict, small_config, with_mistakes
from grading.compare import Tensors, alike
from grading.editions import ATTENTION_KINDS, BUNDLED_NORM, EDITIONS, NORMS
from grading.generating import generate_part, sampling_part
from grading.programs import PARTS_FILE, GradingError, find_own, read_text
from grading.small_model import SMALL_SHAPE, below, in_double, small_weights

LATER_NORM = ", LayerNorm"
TRAINED = ("norm_or_feed_forward", "rotate", "scores", "attention", "layer")  # asked for gradients, too


def kinds_to_check(student: Student, args: Namespace) -> tuple[str, ...]:
    """The kinds of attention that the student's model should know."""
    edition = EDITIONS[args.edition]
    if args.attention or edition.norm != BUNDLED_NORM:
        return (args.attention or edition.attention,)
    return ATTENTION_KINDS if takes_attention(student) else ("bidirectional",)


# -------------------------------------------------------------------------------------------------- the parts


def ask_module(name: str, weights: dict, *arguments: float) -> ChildQuestion:
    """The question about a part of llama.py that is made from numbers alone."""
    tensors = {"weights": weights, "x": small.states()}
    return ChildQuestion("norm_or_feed_forward", "llama", {"name": name, "arguments": arguments}, tensors)


def import_part() -> CheckedPart:
    return CheckedPart(IMPORT, "llama.py", ChildQuestion("import_module", "llama", {"module": "llama"}), {})


def norm_part() -> CheckedPart:
    weights = below(small_weights(), "norm.")
    inputs, name = (small.states().double(), *in_double(weights).values(), small.NORM_EPS), NORMS[small.NORM.get()]
    table = mistakes.LAYER_NORM_MISTAKES if "bias" in weights else mistakes.NORM_MISTAKES
    wrong = {said: partial(norm, *inputs) for said, norm in table.items()}
    where = "class LayerNorm in llama.py or base_llama.py" if "bias" in weights else "class RMSNorm in llama.py"
    return CheckedPart(name, where, ask_module(name, weights, small.DIM, small.NORM_EPS), wrong, (IMPORT,))


def rotary_part(in_context: bool) -> CheckedPart:
    query, key = small.rotary_inputs()
    wrong = with_mistakes(rotation.rotate_both, rotation.ROTATION_MISTAKES, query, key, small.THETA)
    wrong |= {said: partial(small.turned_later, query, key, at) for said, at in mistakes.TURNED_MISTAKES.items()}
    question = rotation.ask_rotation(query, key, SMALL_SHAPE["max_seq_len"])
    if in_context:
        question.settings["start_pos"], question.tensors["query_start"] = small.KEY_START, small.QUERY_STARTS
    where, judged = "apply_rotary_emb in rope.py", None if in_context else 2
    return CheckedPart("rotary embedding", where, question, wrong, judged=judged)


def scores_part(in_context: bool, kind: str) -> CheckedPart:
    heads = dict(zip(("query", "key", "value"), small.score_inputs(), strict=True))
    question = ChildQuestion("scores", "llama", {"config": small_config(kind)}, heads)
    inputs = (*in_double(heads).values(), kind == "causal")
    wrong = with_mistakes(small.attend, mistakes.ATTEND_MISTAKES, *inputs)
    if in_context and kind == "causal":
        question.tensors["mask"] = small.MASK
        wrong |= with_mistakes(small.masked, mistakes.MASKED_MISTAKES, *inputs)
    where, judged = "Attention.compute_query_key_value_scores in llama.py", None if in_context else 1
    return CheckedPart(f"scores and softmax, {kind}", where, question, wrong, (IMPORT,), judged=judged)


def attention_part(kind: str) -> CheckedPart:
    x, weights = small.states(), below(small_weights(), "layers.0.attention.")
    question = ChildQuestion("attention", "llama", {"config": small_config(kind)}, {"weights": weights, "x": x})
    inputs = (x.double(), in_double(weights), kind == "causal")
    wrong = with_mistakes(small.attention, mistakes.ATTENTION_MISTAKES, *inputs)
    needs = ("rotary embedding", f"scores and softmax, {kind}")
    return CheckedPart(f"grouped queries, {kind}", "Attention.forward in llama.py", question, wrong, needs)


def feed_forward_part() -> CheckedPart:
    x, weights = small.states().double(), below(small_weights(), "layers.0.feed_forward.")
    wrong = {said: partial(small.feed_forward, x, in_double(weights), gate) for said, gate in mistakes.GATES.items()}
    question = ask_module("FeedForward", weights, small.DIM, small.HIDDEN_DIM, SMALL_SHAPE["multiple_of"], DROPOUT)
    return CheckedPart("feed-forward", "class FeedForward in llama.py", question, wrong, (IMPORT,))


def layer_part(in_context: bool, kind: str) -> CheckedPart:
    x, weights = small.states(), below(small_weights(), "layers.0.")
    question = ChildQuestion("layer", "llama", {"config": small_config(kind)}, {"weights": weights, "x": x})
    inputs = (x.double(), in_double(weights), kind == "causal")
    wrong = with_mistakes(small.layer, mistakes.LAYER_MISTAKES, *inputs)
    if in_context:
        question.tensors["at"] = small.AT
        wrong |= with_mistakes(small.layer_in_context, mistakes.CONTEXT_MISTAKES, *inputs)
    own = (NORMS[small.NORM.get()], "feed-forward", "rotary embedding")
    needs = (*own, f"scores and softmax, {kind}", f"grouped queries, {kind}")
    judged = None if in_context else 1
    return CheckedPart(f"layer, {kind}", "LlamaLayer.forward in llama.py", question, wrong, needs, judged=judged)


def model_part(kind: str) -> CheckedPart:
    tensors = {"weights": small_weights(), "tokens": small.TOKENS}
    question = ChildQuestion("llama", "llama", {"config": small_config(kind)}, tensors)
    wrong = with_mistakes(small.llama, mistakes.LLAMA_MISTAKES, small.TOKENS, kind == "causal")
    needs = (NORMS[small.NORM.get()], f"layer, {kind}")
    return CheckedPart(f"embedding and head, {kind}", "Llama.forward in llama.py", question, wrong, needs)


def loading_part(kind: str) -> CheckedPart:
    question = ChildQuestion("loading", "llama", {"config": small_config(kind)}, {"weights": small_weights()})
    return CheckedPart(f"loading, {kind}", "load_pretrained in llama.py", question, {}, (IMPORT,), loaded_weights)


def loaded_weights(answer: ChildAnswer) -> ChildAnswer:
    """No numbers if the weights after loading are those of the checkpoint; else the first name that differs."""
    loaded = dict(zip(answer.names, answer.tensors, strict=True))
    for name, tensor in () if answer.trouble else small_weights().items():
        if name not in loaded or not torch.equal(loaded[name], tensor.double()):
            return ChildAnswer(trouble=f"{name} is not what the checkpoint holds")
    return answer if answer.trouble else ChildAnswer()


def classifier_settings(kind: str) -> dict[str, Any]:
    given = {"num_labels": len(small.LABELS), "hidden_dropout_prob": small.NEARLY_ALL, "option": "finetune"}
    return {"config": {**small_config(kind), "dropout": 0.0}, "settings": {**given, "pad_id": small.PAD}}


def zero_shot_part(kind: str) -> CheckedPart:
    settings = {**classifier_settings(kind), "labels": [" ".join(map(str, ids)) for ids in small.LABELS]}
    tensors = {"weights": small_weights(), "tokens": small.PADDED}
    question = ChildQuestion("zero_shot", "classifier", settings, tensors)
    wrong = with_mistakes(small.zero_shot, mistakes.ZERO_SHOT_MISTAKES, kind == "causal")
    needs = (f"layer, {kind}", f"embedding and head, {kind}", f"loading, {kind}")
    where = "class LlamaZeroShotClassifier in classifier.py"
    return CheckedPart(f"zero-shot classifier, {kind}", where, question, wrong, needs)


def embedding_part(kind: str) -> CheckedPart:
    tensors = {"weights": small_weights(), "tokens": small.PADDED, "head": small.head_weights()}
    question = ChildQuestion("embedding", "classifier", classifier_settings(kind), tensors)
    wrong = with_mistakes(small.embedding, mistakes.EMBEDDING_MISTAKES, kind == "causal")
    needs = (NORMS[small.NORM.get()], f"layer, {kind}", f"embedding and head, {kind}", f"loading, {kind}")
    where = "class LlamaEmbeddingClassifier in classifier.py"
    return CheckedPart(f"embedding classifier, {kind}", where, question, wrong, needs)


def all_parts(
    kinds: tuple[str, ...], has_classifiers: bool = True, in_context: bool = True, sampling: str = "plain"
) -> list[CheckedPart]:
    """Every part, in the order in which one writes them.

    has_classifiers: False leaves out the classifiers of a causal model. How an edition with one causal kind reads a
    text is not known. in_context: False asks parts for what the hand-out's model gives them, without context and mask.
    sampling: a key of `editions.SAMPLINGS`.
    """
    classifying = [kind for kind in kinds if has_classifiers or kind == "bidirectional"]
    ask_scores, ask_layer = partial(scores_part, in_context), partial(layer_part, in_context)
    ask_texts, ask_draws = partial(generate_part, sampling=sampling), partial(sampling_part, sampling=sampling)
    return [
        import_part(), norm_part(), rotary_part(in_context), *map(ask_scores, kinds), *map(attention_part, kinds),
        feed_forward_part(), *map(ask_layer, kinds), *map(model_part, kinds), *map(ask_texts, kinds),
        *map(ask_draws, kinds), *map(loading_part, kinds), *map(zero_shot_part, classifying),
        *map(embedding_part, classifying),
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------- the verdicts


def stored_numbers(norm: str = BUNDLED_NORM) -> dict[str, Tensors] | None:
    """The right numbers of every part by its name, for a model with this norm; None where the file is not here.

    In the file the names of parts with a LayerNorm end in its name, where there is a part with an RMSNorm as well.
    """
    path = find_own(PARTS_FILE)
    if path is None:
        return None
    try:
        numbers = {name: tuple(map(torch.tensor, each)) for name, each in json.loads(read_text(path)).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise GradingError(f"{path} is damaged ({error}); get it again") from None
    others = {name.removesuffix(LATER_NORM): numbers.pop(name) for name in [*numbers] if name.endswith(LATER_NORM)}
    return numbers | others if norm == "layer" else numbers


def judge(
    student: Student, parts: list[CheckedPart], expected: dict[str, Tensors], tolerance: float = 1e-5
) -> Iterator[PartVerdict]:
    """The verdicts on the parts, one by one. A part is not judged where one that it needs is wrong or missing."""
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
        right = expected.get(part.name, ())[: part.judged]
        if not answer.trouble and alike(answer.tensors, right, tolerance):
            answer = training_trouble(student, part.question)
            if not answer.trouble:
                yield PartVerdict(part, "ok")
                continue
        if not answer.is_written and answer.trouble not in blanks:
            blanks.add(answer.trouble)
            needed = []  # the part itself is missing
        to_mend[part.name] = needed or [part.name]
        if needed:
            yield PartVerdict(part, "not judged", f"it needs {'; '.join(needed)}")
        elif answer.trouble:
            yield PartVerdict(part, "WRONG" if answer.is_written else "not written yet", answer.trouble)
        else:
            yield PartVerdict(part, "WRONG", explanation(student, part, answer.tensors, right))


def training_trouble(student: Student, question: ChildQuestion) -> ChildAnswer:
    """The trouble with the gradients of a part whose numbers are right."""
    if question.name not in TRAINED:
        return ChildAnswer()
    settings = {**question.settings, "question": question.name}
    return student.ask(question._replace(name="gradients", settings=settings))


def explanation(student: Student, part: CheckedPart, actual: Tensors, expected: Tensors) -> str:
    """The usual mistake that gives these numbers, or how far off they are."""
    for sentence, mistake in part.mistakes.items():
        wrong = mistake()
        wrong = wrong if isinstance(wrong, tuple) else (wrong,)
        if alike(actual[: len(wrong)], wrong, tolerance=5e-4) and not alike(wrong, expected[: len(wrong)]):
            return sentence
    if len(actual) != len(expected):
        return f"it returns {len(actual)} tensors, not {len(expected)}"
    for a, e in zip(actual, expected, strict=True):
        if a.shape != e.shape:
            return f"it returns {list(a.shape)} numbers, not {list(e.shape)}"
    if not alike(part.read(student.ask(part.question)).tensors, actual):
        return part.drawn
    error = max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))
    return f"off by up to {error:.1e}, and no usual mistake gives these numbers"


def check_parts(
    student: Student,
    expected: dict[str, Tensors] | None,
    args: Namespace,
    whole_is_right: bool,
    told: dict[str, Any] | None = None,
) -> bool:
    """Whether every part is right. Prints a line for each, unless the whole is right and `--parts` was not given.

    expected: `stored_numbers()`, read before the student's code first ran, as that code can write to any file.
    told: gets the verdicts as plain values, under "parts".
    """
    if expected is None:
        if args.parts:
            raise GradingError(f"--parts needs {PARTS_FILE}, which is not here")
        print(f"note: {PARTS_FILE} is not here, so neither the parts nor classifier.py were checked", file=sys.stderr)
        return True
    kinds = kinds_to_check(student, args)
    has_classifiers = "causal" not in kinds or takes_attention(student)
    parts = all_parts(kinds, has_classifiers, has_context(student), EDITIONS[args.edition].sampling)
    findings = [*judge(student, parts, expected)]
    if told is not None:
        keys = ("name", "where", "verdict", "sentence")
        rows = [(one.part.name, one.part.where, one.verdict, one.sentence) for one in findings]
        told["parts"] = [dict(zip(keys, row, strict=True)) for row in rows]
    if whole_is_right and not args.parts and all(one.verdict == "ok" for one in findings):
        return True
    print(f"Part by part, on a small model ({PARTS_FILE} holds what others computed):")
    for one in findings:
        print(f"  {one.part.name + ':':36s} {one.verdict}{f': {one.sentence}' if one.sentence else ''}")
    wrong = [one.part for one in findings if one.verdict != "ok"]
    if wrong:
        print(f"Begin with: {wrong[0].name} ({wrong[0].where}).")
    elif not whole_is_right:
        print("Every part is right by itself. Look at what depends on sizes, and at the checkpoint and the device.")
    return not wrong
