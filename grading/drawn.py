"""The parts on a model that is drawn anew for every run: its right numbers, computed here by hand.

`checkpoints/parts.json` holds the numbers of one model, which everybody can read. With a `SALT` of its own a run has
other weights and inputs, so that no answer can be written in advance.
"""

from __future__ import annotations

import random

from grading import small_model as small
from grading.compare import Tensors, alike
from grading.editions import NORMS
from grading.mistakes import GENERATE_MISTAKES
from grading.parts import IMPORT
from grading.rotation import rotate_both
from grading.small_model import SALT, below, in_double, small_weights

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
