"""The parts of a student's code that write text: `generate` at temperature 0, and what it draws above it."""

from __future__ import annotations

from functools import partial

import torch

from grading import mistakes
from grading import small_model as small
from grading.alone import generate_alone
from grading.asking import ChildAnswer, ChildQuestion
from grading.checked import CheckedPart, small_config, with_mistakes
from grading.editions import EPSILON, SAMPLINGS, TOP_P
from grading.small_model import small_weights

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
    drawn = torch.stack([text.flatten()[-1] for text in answer.tensors[1:] if text.numel()]).long()
    if len(drawn) != DRAWS or not ((drawn >= 0) & (drawn < len(probs))).all():
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
