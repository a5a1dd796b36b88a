"""The parts of a student's llama.py, rope.py and classifier.py: how each is asked, and the lines about all of them.

Their right numbers are those of `checkpoints/parts.json`, which everybody can read, or of a model that is drawn anew
for every run.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from functools import partial
from typing import Any

import torch

from grading import mistakes, rotary
from grading import small_model as small
from grading.editions import ATTENTION_KINDS, BUNDLED_NORM, EDITIONS, NORMS
from grading.mistakes import GENERATE_MISTAKES
from grading.programs import PARTS_FILE, GradingError, find_own, read_text
from grading.rotary import Tensors, alike, rotate_both
from grading.small_model import SALT, SMALL_SHAPE, below, in_double, small_weights
from grading.student_process import ChildAnswer, ChildQuestion, Student, takes_attention
from grading.verdicts import (
    DROPOUT,
    IMPORT,
    NEAR,
    CheckedPart,
    PartVerdict,
    attention_alone,
    embedding_alone,
    generate_part,
    judge_parts,
    layer_alone,
    model_alone,
    sampling_part,
    slopes_of_embedding,
    slopes_of_inputs,
    small_config,
    with_mistakes,
    zero_shot_alone,
)

LATER_NORM = ", LayerNorm"


def ask_module(name: str, weights: dict, *arguments: float) -> ChildQuestion:
    """The question about a part of llama.py that is made from numbers alone."""
    tensors = {"weights": weights, "x": small.states()}
    return ChildQuestion("norm_or_feed_forward", "llama", {"name": name, "arguments": arguments}, tensors)


def import_part() -> CheckedPart:
    return CheckedPart(IMPORT, "llama.py", ChildQuestion("import_module", "llama", {"module": "llama"}), {})


def norm_part() -> CheckedPart:
    weights, name = below(small_weights(), "norm."), NORMS[small.NORM.get()]
    has_bias = "bias" in weights
    inputs = (small.states().double(), weights["weight"].double(), weights.get("bias", torch.zeros(1)).double())
    by_hand = mistakes.layer_norm_by_hand if has_bias else mistakes.norm_by_hand
    table = mistakes.LAYER_NORM_MISTAKES if has_bias else mistakes.NORM_MISTAKES
    wrong = with_mistakes(by_hand, table, *inputs, small.NORM_EPS)
    where = "class LayerNorm in llama.py or base_llama.py" if has_bias else "class RMSNorm in llama.py"
    question = ask_module(name, weights, small.DIM, small.NORM_EPS)
    slopes = slopes_of_inputs(question, by_hand, *inputs, small.NORM_EPS)
    return CheckedPart(name, where, question, wrong, (IMPORT,), slopes=slopes)


def rotary_part() -> CheckedPart:
    query, key = small.rotary_inputs()
    wrong = with_mistakes(rotary.rotate_both, rotary.ROTATION_MISTAKES, query, key, small.THETA)
    question = rotary.ask_rotation(query, key, SMALL_SHAPE["max_seq_len"])
    slopes = slopes_of_inputs(question, rotary.rotate_both, query, key, small.THETA)
    return CheckedPart("rotary embedding", "apply_rotary_emb in rope.py", question, wrong, slopes=slopes)


def scores_part(kind: str) -> CheckedPart:
    """In a causal model the function masks by itself, or by an argument `mask`, which is then given: both are right."""
    heads, is_causal = dict(zip(("query", "key", "value"), small.score_inputs(), strict=True)), kind == "causal"
    question = ChildQuestion("scores", "llama", {"config": small_config(kind)}, heads)
    inputs = (*in_double(heads).values(), is_causal)
    wrong = with_mistakes(small.attend, mistakes.ATTEND_MISTAKES, *inputs)
    where = "Attention.compute_query_key_value_scores in llama.py"
    if is_causal:
        question = question._replace(tensors={**heads, "mask": small.MASK})
    slopes = slopes_of_inputs(question, small.attend, *inputs)
    part = CheckedPart(f"scores and softmax, {kind}", where, question, wrong, (IMPORT,), slopes=slopes)
    return part._replace(read=partial(masked_scores, small.attend(*inputs))) if is_causal else part


def masked_scores(right: torch.Tensor, answer: ChildAnswer) -> ChildAnswer:
    """Of the outputs without and with the argument `mask`, the one that counts: the first if it is masked rightly."""
    if len(answer.tensors) < 2 or alike(answer.tensors[:1], (right,), NEAR):
        return answer._replace(tensors=answer.tensors[:1])
    return answer._replace(tensors=answer.tensors[1:])


def attention_part(kind: str) -> CheckedPart:
    x, weights = small.states(), below(small_weights(), "layers.0.attention.")
    question = ChildQuestion("attention", "llama", {"config": small_config(kind)}, {"weights": weights, "x": x})
    inputs = (x.double(), in_double(weights), kind == "causal")
    wrong = with_mistakes(small.attention, mistakes.ATTENTION_MISTAKES, *inputs)
    needs, where = ("rotary embedding", f"scores and softmax, {kind}"), "Attention.forward in llama.py"
    alone, slopes = attention_alone(question), slopes_of_inputs(question, small.attention, *inputs)
    return CheckedPart(f"grouped queries, {kind}", where, question, wrong, needs, alone=alone, slopes=slopes)


def feed_forward_part() -> CheckedPart:
    x, weights = small.states().double(), below(small_weights(), "layers.0.feed_forward.")
    wrong = {said: partial(small.feed_forward, x, in_double(weights), gate) for said, gate in mistakes.GATES.items()}
    question = ask_module("FeedForward", weights, small.DIM, small.HIDDEN_DIM, SMALL_SHAPE["multiple_of"], DROPOUT)
    slopes = slopes_of_inputs(question, small.feed_forward, x, in_double(weights))
    return CheckedPart("feed-forward", "class FeedForward in llama.py", question, wrong, (IMPORT,), slopes=slopes)


def layer_part(kind: str) -> CheckedPart:
    x, weights = small.states(), below(small_weights(), "layers.0.")
    question = ChildQuestion("layer", "llama", {"config": small_config(kind)}, {"weights": weights, "x": x})
    inputs = (x.double(), in_double(weights), kind == "causal")
    wrong = with_mistakes(small.layer, mistakes.LAYER_MISTAKES, *inputs)
    own = (NORMS[small.NORM.get()], "feed-forward", "rotary embedding")
    needs, where = (*own, f"scores and softmax, {kind}", f"grouped queries, {kind}"), "LlamaLayer.forward in llama.py"
    alone, slopes = layer_alone(question), slopes_of_inputs(question, small.layer, *inputs)
    return CheckedPart(f"layer, {kind}", where, question, wrong, needs, alone=alone, slopes=slopes)


def model_part(kind: str) -> CheckedPart:
    tensors = {"weights": small_weights(), "tokens": small.TOKENS}
    question = ChildQuestion("llama", "llama", {"config": small_config(kind)}, tensors)
    wrong = with_mistakes(small.llama, mistakes.LLAMA_MISTAKES, small.TOKENS, kind == "causal")
    needs, where = (NORMS[small.NORM.get()], f"layer, {kind}"), "Llama.forward in llama.py"
    alone = model_alone(question)
    return CheckedPart(f"embedding and head, {kind}", where, question, wrong, needs, tied_head, alone=alone)


def tied_head(answer: ChildAnswer) -> ChildAnswer:
    """Without the head's matrix, which comes last where code of the assignment's own structure is asked.

    1 was added to the matrix of the embeddings; the trouble if it is not in that of the head.
    """
    if answer.trouble or len(answer.tensors) < 4:
        return answer
    *numbers, head = answer.tensors
    if not alike((head,), (small_weights()["output.weight"].double() + 1,), NEAR):
        return ChildAnswer(trouble="the head is not tied: self.tok_embeddings.weight = self.output.weight")
    return ChildAnswer(tuple(numbers))


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
    """A causal model may read a text's last token, or the end of the padded batch, as the course's does: see `also`."""
    settings = {**classifier_settings(kind), "labels": [" ".join(map(str, ids)) for ids in small.LABELS]}
    tensors, is_causal = {"weights": small_weights(), "tokens": small.PADDED}, kind == "causal"
    question = ChildQuestion("zero_shot", "classifier", settings, tensors)
    wrong = with_mistakes(small.zero_shot, mistakes.ZERO_SHOT_MISTAKES, is_causal)
    needs = (f"layer, {kind}", f"embedding and head, {kind}", f"loading, {kind}")
    where, name = "class LlamaZeroShotClassifier in classifier.py", f"zero-shot classifier, {kind}"
    also = (partial(small.zero_shot, is_causal, pool=small.end_of_batch),)
    return CheckedPart(name, where, question, wrong, needs, also=also, alone=zero_shot_alone(question, is_causal))


def embedding_part(kind: str) -> CheckedPart:
    """Which token is read: as in `zero_shot_part`."""
    tensors = {"weights": small_weights(), "tokens": small.PADDED, "head": small.head_weights()}
    question, is_causal = ChildQuestion("embedding", "classifier", classifier_settings(kind), tensors), kind == "causal"
    wrong = with_mistakes(small.embedding, mistakes.EMBEDDING_MISTAKES, is_causal)
    needs = (NORMS[small.NORM.get()], f"layer, {kind}", f"embedding and head, {kind}", f"loading, {kind}")
    where, name = "class LlamaEmbeddingClassifier in classifier.py", f"embedding classifier, {kind}"
    also = (partial(small.embedding, is_causal, pool=small.end_of_batch),)
    alone, slopes = embedding_alone(question, is_causal), slopes_of_embedding(question, is_causal)
    return CheckedPart(name, where, question, wrong, needs, also=also, alone=alone, slopes=slopes)


def all_parts(kinds: tuple[str, ...], has_classifiers: bool = True, sampling: str = "plain") -> list[CheckedPart]:
    """Every part, in the order in which one writes them.

    has_classifiers: False leaves out the classifiers of a causal model, which a hand-out that has no other kind may not
    ask for. sampling: a key of `editions.SAMPLINGS`.
    """
    classifying = [kind for kind in kinds if has_classifiers or kind == "bidirectional"]
    ask_texts, ask_draws = partial(generate_part, sampling=sampling), partial(sampling_part, sampling=sampling)
    return [
        import_part(), norm_part(), rotary_part(), *map(scores_part, kinds), *map(attention_part, kinds),
        feed_forward_part(), *map(layer_part, kinds), *map(model_part, kinds), *map(ask_texts, kinds),
        *map(ask_draws, kinds), *map(loading_part, kinds), *map(zero_shot_part, classifying),
        *map(embedding_part, classifying),
    ]  # fmt: skip


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


# -------------------------------------------------------------------------------------- the lines about the parts


def kind_to_judge(args: Namespace) -> str:
    """The kind of attention that decides: the one that is asked for, else the edition's."""
    return args.attention or EDITIONS[args.edition].attention


def check_parts(
    student: Student,
    expected: dict[str, Tensors] | None,
    args: Namespace,
    whole_is_right: bool,
    told: dict[str, Any] | None = None,
) -> bool:
    """Whether every part is right. Prints a line for each, unless the whole is right and `--parts` was not given.

    expected: `stored_numbers()`, read before the student's code first ran, as that code can write to any file.
    told: gets the verdicts as plain values, under "parts", and what is said of the other kind, under "extra".
    """
    if expected is None:
        if args.parts:
            raise GradingError(f"--parts needs {PARTS_FILE}, which is not here")
        print(f"note: {PARTS_FILE} is not here, so neither the parts nor classifier.py were checked", file=sys.stderr)
        return True
    kind, told = kind_to_judge(args), {} if told is None else told
    has_classifiers = kind != "causal" or takes_attention(student)
    findings = [*judge_parts(student, all_parts((kind,), has_classifiers, EDITIONS[args.edition].sampling), expected)]
    keys = ("name", "where", "verdict", "sentence")
    rows = [(one.part.name, one.part.where, one.verdict, one.sentence) for one in findings]
    told["parts"] = [dict(zip(keys, row, strict=True)) for row in rows]
    wrong = [one.part for one in findings if one.verdict != "ok"]
    if whole_is_right and not args.parts and not wrong:
        return True
    print(f"Part by part, on a small model ({PARTS_FILE} holds what others computed):")
    for one in findings:
        print(f"  {one.part.name + ':':36s} {one.verdict}{f': {one.sentence}' if one.sentence else ''}")
    if extra := said_of_the_other_kind(student, expected, args, findings):
        told["extra"] = extra
        print(f"  extra: {extra}")
    if wrong:
        print(f"Begin with: {wrong[0].name} ({wrong[0].where}).")
    elif not whole_is_right:
        print("Every part is right by itself. Look at what depends on sizes, and at the checkpoint and the device.")
    return not wrong


def said_of_the_other_kind(
    student: Student, expected: dict[str, Tensors], args: Namespace, findings: list[PartVerdict]
) -> str:
    """What the student's code makes of a causal mask where the edition does not ask for one; no part of the verdict.

    "" where a kind was asked for, the edition has another norm, the code has one kind alone, or its scores are wrong
    without a mask, too. All parts of the other kind are asked only where those of the edition are right.
    """
    kind = EDITIONS[args.edition].attention
    scores_are_right = any(one.part.name == f"scores and softmax, {kind}" and one.verdict == "ok" for one in findings)
    if args.attention or EDITIONS[args.edition].norm != BUNDLED_NORM or not scores_are_right:
        return ""
    (other,) = {*ATTENTION_KINDS} - {kind}
    if not takes_attention(student):
        return ""
    parts, unasked = [scores_part(other)], "this edition does not ask for it"
    all_are_right = all(one.verdict == "ok" for one in findings)
    if all_are_right:
        parts = [part for part in all_parts((other,)) if part.name.endswith(f", {other}")]
    for one in judge_parts(student, parts, expected):
        if one.sentence == mistakes.MISSING_MASK and len(student.ask(one.part.question).tensors) == 1:
            return f"compute_query_key_value_scores takes no mask, so --attention {other} is not there ({unasked})"
        if one.verdict != "ok":
            return f"{one.part.name}: {one.sentence} ({unasked})"
    return f"with the {other} mask as well, --attention {other} works" if all_are_right else ""


# --------------------------------------------------------------------------------------- parts of a model that is drawn
# With a `SALT` of its own a run has other weights and inputs, so that no answer can be written in advance. The right
# numbers are computed here by hand.

# Of a continuation's likeliest token before the next one: a logit in float32 is far nearer to the right one than this,
# and at the temperature that `questions.generate` calls nearly 0 the other token is never drawn.
SMALLEST_LEAD = 0.05
MOST_SALTS = 1 << 30
# The model of parts.json is chosen; one that is drawn may enlarge what float32 rounds away. Of some hundreds of
# such models the largest error of right code was 4.4e-5.
TOLERANCE = 3e-4


def draw_salt(kinds: tuple[str, ...], drawer: random.Random) -> int:
    """Set `SALT` to a drawn number whose model is good for judging `generate` with these kinds. Returns it."""
    salt = 0
    while not salt or not all(tells_texts_apart(kind == "causal") for kind in kinds):
        salt = drawer.randint(1, MOST_SALTS)
        SALT.set(salt)
    return salt


def tells_texts_apart(causal: bool) -> bool:
    """Whether every next token is clear, and every usual mistake gives another text."""
    right = small.generate(causal)
    wrong = (small.generate(causal, **each) for each in GENERATE_MISTAKES.values())
    return smallest_lead(causal) >= SMALLEST_LEAD and not any(alike(each, right) for each in wrong)


def smallest_lead(causal: bool) -> float:
    """By how much the logit of the likeliest token exceeds the next one, at least, when `PROMPTS` are continued."""
    texts = small.likeliest_text(causal, small.last_tokens, small.NEW_TOKENS, small.NORM.get(), SALT.get())
    leads = []
    for length in range(small.PROMPTS.shape[1], texts.shape[1]):
        first, second = small.llama(small.last_tokens(texts[:, :length]), causal)[0].topk(2).values.unbind(-1)
        leads.append((first - second).min().item())
    return min(leads)


def right_numbers(kinds: tuple[str, ...]) -> dict[str, Tensors]:
    """The right numbers of every part that has some, by its name, for the model of the current `SALT`."""
    weights, x = in_double(small_weights()), small.states().double()
    numbers = {
        IMPORT: (),
        NORMS[small.NORM.get()]: (small.normed(x, small.final_norm(), small.NORM_EPS),),
        "rotary embedding": rotate_both(*small.rotary_inputs(), small.THETA),
        "feed-forward": (small.feed_forward(x, below(weights, "layers.0.feed_forward.")),),
    }  # fmt: skip
    return numbers | {name: tensors for kind in kinds for name, tensors in _of_kind(kind).items()}


def _of_kind(kind: str) -> dict[str, Tensors]:
    """The right numbers of the parts whose attention is of one kind."""
    causal, weights, x = kind == "causal", in_double(small_weights()), small.states().double()
    heads = tuple(one.double() for one in small.score_inputs())
    numbers = {
        "scores and softmax": (small.attend(*heads, causal),),
        "grouped queries": (small.attention(x, below(weights, "layers.0.attention."), causal),),
        "layer": (small.layer(x, below(weights, "layers.0."), causal),),
        "embedding and head": small.llama(small.TOKENS, causal),
        "generate": small.generate(causal),
        "sampling": (),
        "loading": (),
        "zero-shot classifier": (small.zero_shot(causal),),
        "embedding classifier": small.embedding(causal),
    }  # fmt: skip
    return {f"{name}, {kind}": tensors for name, tensors in numbers.items()}
