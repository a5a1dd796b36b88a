"""The verdict on each part of a student's code, and the mistake that explains a wrong one.

A part that needs a wrong one is asked alone, with stand-ins: its own mistake is then found as well. The parts that
write text are `generate` at temperature 0, and what it draws above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, cycle
from typing import Any, NamedTuple

import torch

from grading import answers, mistakes
from grading import small_model as small
from grading.editions import BUNDLED_NORM, EPSILON, SAMPLINGS, TOP_P
from grading.rotary import Tensors, alike
from grading.small_model import DIM, SMALL_SHAPE, VOCAB_SIZE, closed_form, small_weights
from grading.student_process import ChildAnswer, ChildQuestion, Student

IMPORT = "import of llama.py"
DROPOUT = 0.5  # acts in training only
TWO_MISTAKES = "two mistakes together: {}; and: {}"

Mistakes = dict[str, Callable[[], "torch.Tensor | Tensors"]]  # the sentence about each, and the numbers that it gives


class Alone(NamedTuple):
    """A part asked with stand-ins in the place of those that it needs: what the other parts do has no effect.

    right: the right numbers. mistakes: as those of the part.
    """

    question: ChildQuestion
    right: Callable[[], torch.Tensor | Tensors]
    mistakes: Mistakes


class Slopes(NamedTuple):
    """The gradients of a part: the question about them, what they are of, and what is right.

    inputs: by their names in a sentence. right: of each output by each input, one after another, as
    `answers.slopes` has them; several where several are right.
    """

    question: ChildQuestion
    inputs: tuple[str, ...]
    right: tuple[Callable[[], Tensors], ...]


class CheckedPart(NamedTuple):
    """One thing that a student writes: the question about it, and what each usual mistake would answer.

    where: the class or function in the student's files. needs: the names of the parts that this one calls; it cannot
    be right while they are wrong. read: makes of the answer the numbers that are judged. judged: how many of the
    stored tensors; None: all. also: other numbers that are right, too. alone: how the part is asked where one that it
    needs is wrong. slopes: its gradients, if they are asked for. drawn: the explanation if the numbers differ from call
    to call.
    """

    name: str
    where: str
    question: ChildQuestion
    mistakes: Mistakes
    needs: tuple[str, ...] = ()
    read: Callable[[ChildAnswer], ChildAnswer] = lambda answer: answer
    judged: int | None = None
    also: tuple[Callable[[], torch.Tensor | Tensors], ...] = ()
    alone: Alone | None = None
    slopes: Slopes | None = None
    drawn: str = "it gives other numbers each time; is there dropout in evaluation?"


class PartVerdict(NamedTuple):
    """The verdict on a part: "ok", "WRONG", "not written yet" or "not judged"; and a sentence that explains it.

    is_right_alone: of one that is not judged, whether its numbers are right with stand-ins for the parts that it needs.
    """

    part: CheckedPart
    verdict: str
    sentence: str = ""
    is_right_alone: bool = False


def small_config(kind: str) -> dict[str, Any]:
    config = {**SMALL_SHAPE, "attention": kind, "dropout": DROPOUT}
    return config if small.NORM.get() == BUNDLED_NORM else {**config, "norm": small.NORM.get()}


def with_mistakes(by_hand: Callable, table: dict[str, dict], *arguments, **settings) -> Mistakes:
    """settings: keywords that all of them have beside their own."""
    return {sentence: partial(by_hand, *arguments, **settings, **wrong) for sentence, wrong in table.items()}


def as_tensors(numbers: torch.Tensor | Tensors) -> Tensors:
    return numbers if isinstance(numbers, tuple) else (numbers,)


def singles_then_pairs(mistakes: Mistakes) -> Iterator[tuple[str, Callable]]:
    """Every mistake; then every two that can be made together, as they change different things."""
    yield from mistakes.items()
    for (one, first), (other, second) in combinations(mistakes.items(), 2):
        together = joined(first, second)
        if together:
            yield TWO_MISTAKES.format(one, other), together


def joined(first: Callable, second: Callable) -> partial | None:
    """Two mistakes of `with_mistakes` made at once; None where both change the same thing, or are of other functions.

    Keywords with the same value in both are no change.
    """
    if not (isinstance(first, partial) and isinstance(second, partial)) or first.func is not second.func:
        return None
    common = {*first.keywords} & {*second.keywords}
    if any(first.keywords[name] is not second.keywords[name] for name in common):
        return None
    return partial(first.func, *first.args, **first.keywords, **{
        name: value for name, value in second.keywords.items() if name not in common
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ gradients

LARGEST_SLOPE_ERROR = 1e-3  # of its size; right code's in float32 is below 1e-4


def slopes_of_inputs(question: ChildQuestion, by_hand: Callable, *arguments) -> Slopes:
    """by_hand: the part in float64. arguments: its own, first of all the tensors of numbers of the question."""
    inputs = tuple(name for name, one in question.tensors.items() if answers.is_float(one))
    given, others = arguments[: len(inputs)], arguments[len(inputs) :]
    asked = question._replace(
        name="gradients", settings={**question.settings, "question": question.name, "inputs": inputs}
    )

    def right() -> Tensors:
        return tuple(answers.slopes_of(lambda *leaves: by_hand(*leaves, *others), [one.double() for one in given]))

    return Slopes(asked, inputs, (right,))


def slopes_of_embedding(question: ChildQuestion, causal: bool) -> Slopes:
    pools = small.last_state, small.end_of_batch
    asked = question._replace(name="embedding_gradients")
    return Slopes(
        asked, ("the Llama", "the linear head"), tuple(partial(_embedding_slopes, causal, one) for one in pools)
    )


def _embedding_slopes(causal: bool, pool: Callable) -> Tensors:
    matrices = small_weights()["tok_embeddings.weight"], small.head_weights()["weight"]
    table, head = leaves = [one.double().requires_grad_() for one in matrices]

    def states(tokens: torch.Tensor, causal: bool) -> torch.Tensor:
        return small.llama(tokens, causal, embed=lambda _: table[tokens])[1]

    return tuple(answers.slopes(small.embedding(causal, states=states, pool=pool, matrix=head)[0], leaves))


def training_trouble(student: Student, part: CheckedPart) -> ChildAnswer:
    """The trouble with the gradients of a part whose numbers are right."""
    if part.slopes is None:
        return ChildAnswer()
    answer = student.ask(part.slopes.question)
    if answer.trouble:
        return answer
    faults = [slope_fault(answer.tensors, right(), part.slopes.inputs) for right in part.slopes.right]
    return ChildAnswer(trouble="" if "" in faults else faults[0])


def slope_fault(found: Tensors, right: Tensors, inputs: tuple[str, ...]) -> str:
    """What is wrong with these gradients, "" if nothing is. Of outputs without a mask and with one the last count."""
    pairs = [*zip(cycle(inputs), found[-len(right) :], right)]
    for name, slope, wanted in pairs:
        if wanted.any() and not slope.numel():
            return f"no gradient goes back to {name}: is there a detach(), .data or torch.no_grad()?"
    if len(pairs) < len(right) or not all(is_slope(slope, wanted) for _, slope, wanted in pairs):
        said = f"gradients that go back to {', '.join(inputs)} do not say how what it returns changes"
        return f"{said}: is a part of it under detach(), .data or torch.no_grad()?"
    return ""


def is_slope(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a gradient is right. Empty: there is none, which is as 0 everywhere."""
    if not found.numel() or not right.numel():
        return not found.any() and not right.any()
    return found.shape == right.shape and bool((found - right).norm() <= LARGEST_SLOPE_ERROR * right.norm())


# ------------------------------------------------------------------------------------------- parts that are asked alone

LAYER_NAMES = ("attention", "feed_forward", "attention_norm", "ffn_norm")
MODEL_NAMES = ("layers.0", "layers.1", "norm")


def matrices(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """A matrix for each part that a `answers.Product` replaces."""
    return {name: closed_form(f"stand-in {name}", DIM, DIM, scale=0.5) for name in names}


def table() -> torch.Tensor:
    """What `answers.summed` reads. v D"""
    return closed_form("stand-in table", VOCAB_SIZE, DIM, scale=0.1)


def attention_alone(question: ChildQuestion) -> Alone:
    inputs = question.tensors["x"].double(), small.in_double(question.tensors["weights"])
    table = {said: wrong for said, wrong in mistakes.ATTENTION_MISTAKES.items()
             if {*wrong} <= {"split", "spread", "merge", "project"}}  # fmt: skip
    for said, give in mistakes.TURN_MISTAKES.items():
        table[said] = dict(turn=partial(give, turn=answers.turned))
    wrong = with_mistakes(_attention, table, *inputs)
    return Alone(question._replace(name="attention_alone"), partial(_attention, *inputs), wrong)


def _attention(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    turn: Callable = lambda q, k, v: (*answers.turned(q, k), v),
    **wrong: Callable,
) -> torch.Tensor:
    """`small.attention` with the stand-ins for rotation and scores."""
    return small.attention(x, weights, False, turn=turn, attend=_attended, **wrong)


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    return answers.attended(query, key, value)


def layer_alone(question: ChildQuestion) -> Alone:
    given = matrices(LAYER_NAMES)
    parts = (answers.Product(given[name].double()) for name in LAYER_NAMES)
    inputs = (question.tensors["x"].double(), *parts)
    asked = question._replace(tensors={**question.tensors, "replaced": given})
    wrong = with_mistakes(small.assembled, mistakes.LAYER_HALVES, *inputs)
    return Alone(asked, partial(small.assembled, *inputs), wrong)


def model_alone(question: ChildQuestion) -> Alone:
    given = matrices(MODEL_NAMES)
    parts = [answers.Product(given[name].double()) for name in MODEL_NAMES]
    replaced = dict(layer=lambda h, weights, index, causal: parts[index](h), norm=lambda h, weights, eps: parts[2](h))
    inputs = (question.tensors["tokens"], False)
    asked = question._replace(tensors={**question.tensors, "replaced": given})
    wrong = with_mistakes(small.llama, mistakes.LLAMA_MISTAKES, *inputs, **replaced)
    return Alone(asked, partial(small.llama, *inputs, **replaced), wrong)


def generate_alone(question: ChildQuestion, causal: bool) -> Alone:
    wrong = with_mistakes(small.generate, mistakes.GENERATE_MISTAKES, causal, logits=_summed_logits)
    return Alone(with_table(question), partial(small.generate, causal, logits=_summed_logits), wrong)


def _summed(tokens: torch.Tensor, causal: bool) -> torch.Tensor:
    return answers.summed(table().double(), tokens)


def _summed_logits(tokens: torch.Tensor, causal: bool) -> torch.Tensor:
    return _summed(tokens, causal)[:, [-1]] @ small.small_weights()["output.weight"].double().T


def zero_shot_alone(question: ChildQuestion, causal: bool) -> Alone:
    wrong = with_mistakes(small.zero_shot, mistakes.ZERO_SHOT_MISTAKES, causal, states=_summed)
    return Alone(with_table(question), partial(small.zero_shot, causal, states=_summed), wrong)


def embedding_alone(question: ChildQuestion, causal: bool) -> Alone:
    wrong = with_mistakes(small.embedding, mistakes.EMBEDDING_MISTAKES, causal, states=_summed)
    return Alone(with_table(question), partial(small.embedding, causal, states=_summed), wrong)


def with_table(question: ChildQuestion) -> ChildQuestion:
    return question._replace(tensors={**question.tensors, "table": table()})


# ------------------------------------------------------------------------------------------------ parts that write text

NEARLY_0 = 1e-3  # a temperature, as in grading.questions
DRAWS = 400
TEMPERATURES = {"plain": 4.0, "epsilon": 4.0, "top-p": 1.5}  # at which no token's probability is near the limit
SURE = 0.03  # a token that is as likely as this is drawn in DRAWS draws, but for one case in 100,000
FARTHEST = 6.0  # standard errors: right code is further off less than once in a million checks
FEWEST_EXPECTED = 5  # draws of a token; those of rarer ones are counted together
DRAWN_MISTAKES = {
    "tokens are drawn that the edition's sampling leaves out: {kept}": 1.0,
    "likely tokens are never drawn; the edition's rule: {kept}": 2.0,
    "tokens are drawn with other probabilities than those of softmax(logits / temperature), scaled to a sum of 1": 3.0,
}


def generate_part(kind: str, sampling: str = "plain") -> CheckedPart:
    settings, tensors = {"config": small_config(kind)}, {"weights": small_weights(), "tokens": small.PROMPTS}
    question = ChildQuestion("generate", "llama", {**settings, "new": small.NEW_TOKENS}, tensors)
    wrong = with_mistakes(small.generate, mistakes.GENERATE_MISTAKES, kind == "causal")
    needs, where = (f"layer, {kind}", f"embedding and head, {kind}"), "Llama.generate in llama.py"
    if sampling != "plain":
        question.settings["hot"] = [NEARLY_0]  # where all tokens are as likely, a limit may leave none of them
    alone, drawn = generate_alone(question, kind == "causal"), mistakes.ALWAYS_DRAWN
    part = CheckedPart(f"generate, {kind}", where, question, wrong, needs, has_drawn, alone=alone, drawn=drawn)
    if sampling == "plain":
        return part
    return part._replace(judged=len(small.PROMPTS) + 1, read=lambda answer: answer)


def has_drawn(answer: ChildAnswer) -> ChildAnswer:
    """In the place of the last text, which is drawn: 1 if it differs from the likeliest one, the first, else 0."""
    if answer.trouble:
        return answer
    *texts, hot = answer.tensors
    return ChildAnswer((*texts, torch.tensor(float(not torch.equal(hot, texts[0])))))


def sampling_part(kind: str, sampling: str) -> CheckedPart:
    """Whether `generate` draws from the tokens that the edition's sampling keeps, each as often as is right."""
    config = small_config(kind) | ({} if sampling == "plain" else {"sampling": sampling})
    settings = {"config": config, "new": 1, "hot": [TEMPERATURES[sampling]] * DRAWS}
    question = ChildQuestion("generate", "llama", settings, {"weights": small_weights(), "tokens": small.PROMPTS[:1]})
    wrong = {
        said.format(kept=SAMPLINGS[sampling]): partial(torch.tensor, each) for said, each in DRAWN_MISTAKES.items()
    }
    needs, read = (f"generate, {kind}",), partial(verdict_on_draws, kept_probabilities(kind == "causal", sampling))
    return CheckedPart(f"sampling, {kind}", "Llama.generate in llama.py", question, wrong, needs, read)


def kept_probabilities(causal: bool, sampling: str) -> torch.Tensor:
    """The probability of every token after the first of `PROMPTS`, 0 for those that are not kept. v"""
    logits = small.llama(small.last_tokens(small.PROMPTS[:1]), causal)[0][0, 0]
    probs = (logits / TEMPERATURES[sampling]).softmax(-1)
    order = probs.argsort(descending=True)
    keep = probs >= (EPSILON if sampling == "epsilon" else 0.0)
    if sampling == "top-p":
        before = torch.cat((torch.zeros(1), probs[order].cumsum(0)[:-1]))  # the sum of all likelier ones
        keep = torch.zeros_like(keep).scatter(0, order, before < TOP_P)
    return probs * keep / (probs * keep).sum()


def verdict_on_draws(probs: torch.Tensor, answer: ChildAnswer) -> ChildAnswer:
    """No number if the drawn tokens may come from these probabilities; else that of a mistake."""
    if answer.trouble:
        return answer
    texts, length = [text.flatten() for text in answer.tensors[1:]], small.PROMPTS.shape[1] + 1
    if len(texts) != DRAWS or any(len(text) != length for text in texts):
        return ChildAnswer(trouble="it does not always add max_new_tokens tokens: does it end a text at some token?")
    drawn = torch.stack([text[-1] for text in texts]).long()
    if not ((drawn >= 0) & (drawn < len(probs))).all():
        return ChildAnswer(trouble=f"one new token behind a text is not one of {len(probs)} ids")
    shares = torch.bincount(drawn, minlength=len(probs)) / DRAWS
    if shares[probs == 0].any():
        return ChildAnswer((torch.tensor(1.0),))
    if (shares[probs >= SURE] == 0).any():
        return ChildAnswer((torch.tensor(2.0),))
    return ChildAnswer((torch.tensor(3.0),) if distance(shares, probs) > FARTHEST else ())


def distance(shares: torch.Tensor, probs: torch.Tensor) -> float:
    """How far the shares of `DRAWS` draws are from these probabilities, in standard errors.

    Pearson's chi-square; Wilson and Hilferty's cube root of it is nearly normal.
    """
    is_rare = probs * DRAWS < FEWEST_EXPECTED
    right, drawn = (torch.cat((each[~is_rare], each[is_rare].sum()[None])) for each in (probs, shares.to(probs)))
    right, drawn = right[right > 0], drawn[right > 0]
    degrees = max(1, len(right) - 1)
    spread = 2 / (9 * degrees)
    total = (DRAWS * (drawn - right).square() / right).sum().item()
    return ((total / degrees) ** (1 / 3) - 1 + spread) / spread**0.5


# --------------------------------------------------------------------------------------------------- all parts together

NEAR = 5e-4  # how far numbers in float32 may be from those of a mistake
ROUNDED = 1e-2  # and how far half precision may be off


def judge_parts(
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
            answer = training_trouble(student, part)
            if not answer.trouble:
                yield PartVerdict(part, "ok")
                continue
        if not answer.is_written and answer.trouble not in troubles:
            needed = []  # the part itself is missing
        own, is_right_alone = own_mistake(student, part, answer, troubles) if needed else ("", False)
        troubles |= {answer.trouble} - {""}
        to_mend[part.name] = [*needed, part.name] if own else needed or [part.name]
        if needed and not own:
            yield PartVerdict(part, "not judged", f"it needs {'; '.join(needed)}", is_right_alone)
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


def own_mistake(student: Student, part: CheckedPart, answer: ChildAnswer, troubles: set[str]) -> tuple[str, bool]:
    """What is wrong in a part that needs a wrong one, asked with stand-ins; "" if nothing is, or nothing is known.

    Then whether its numbers are right. troubles: of earlier parts; the same exception in this one is theirs.
    """
    if part.alone is None or answer.is_lost or not answer.is_written:
        return "", False
    alone, right = part.read(student.ask(part.alone.question)), as_tensors(part.alone.right())[: part.judged]
    if alone.trouble:
        is_own = alone.trouble == answer.trouble and answer.trouble not in troubles
        return (answer.trouble if is_own else ""), False
    return usual_mistake(part.alone.mistakes, alone.tensors, right, part.judged), alike(alone.tensors, right, NEAR)


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
    if alike(actual, expected, ROUNDED):
        return f"right to two digits, off by up to {error:.1e}: is there half precision, or a number rounded?"
    return f"off by up to {error:.1e}, and no usual mistake gives these numbers"
