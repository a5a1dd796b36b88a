"""Good and broken texts, most of them written by a checkpoint: `grading.coherence` is calibrated for it with them."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from grading.editions import TEXT_PROMPT
from grading.language_model import LanguageModel

NEW_TOKENS = 100
TEMPERATURES = (0.0, 0.2, 0.4, 0.6)  # of good texts
NAMES = ("Lily", "Tom", "Anna", "Ben", "Mia", "Sam", "Sue", "Max", "Kitty", "Tim")
THINGS = ("cat", "dog", "little bird", "big bear", "red ball", "toy car", "frog", "girl", "boy", "old tree")
OPENINGS = (
    "Once upon a time, there was a {thing} and a boy named {name}.", "One day, {name} saw a {thing} in the park.",
    "{name} had a {thing}. Every day, they would", "{name} wanted to play with a {thing}, but it was",
    "There was a {thing} in the garden, and {name} was",
)  # fmt: skip
# What a person writes after the assignment's prompt: of what it wrote itself, every model thinks well.
WRITTEN = (
    "a very brave man. He had a big dog named Spot. They liked to play in the park every day. One day, Spot ran away "
    "and John was very sad. He looked and looked for his dog. Then he saw Spot under a tree. He was so happy that he "
    "gave Spot a big hug.",
    "on a big boat. The sun was bright and the water was blue. He saw a little fish and said hello. The fish jumped up "
    "and down. John laughed and clapped his hands. When it was time to go home, he waved goodbye to the fish.",
    "so funny. He went to the store with his mom to buy some red apples. He saw a girl who was crying because she lost "
    'her doll. John helped her look for it. They found the doll on the floor. The girl smiled and said, "Thank you!"',
    "my friend. We like to run and jump and sing. Yesterday we made a big cake with my grandma. It was yummy. We gave "
    "some of the cake to the birds in the garden. Mom was proud of us because we knew how to share.",
    "the best. After the movie, Tim and his dad went home. It was dark and Tim was scared. His dad held his hand and "
    "told him a story about the moon. Tim was not scared any more. He went to bed and had a good dream.",
)


class Sample(NamedTuple):
    kind: str
    text: str
    prompt: str

    @property
    def continuation(self) -> str:
        return self.text[len(self.prompt) :]


# ------------------------------------------------------------------- mistakes in a model, as changes of its weights


def _untrained(w: torch.Tensor, head_dim: int) -> torch.Tensor:
    return torch.ones_like(w) if w.dim() == 1 else torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) / 50


def _halves(w: torch.Tensor, head_dim: int) -> torch.Tensor:
    """As if the rotation turned the numbers i and i + head_dim / 2 of a head, and not neighbours."""
    return w.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


# The weights that are changed, as a pattern of their names, and how.
MISTAKES: dict[str, tuple[str, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "weights not loaded": ("", _untrained),
    "rotation by halves": (r"compute_(query|key)\.", _halves),
    "values of other heads": ("compute_value", lambda w, head_dim: w.roll(head_dim, 0)),
    "no attention": ("compute_output", lambda w, head_dim: 0 * w),
    "no feed-forward": (r"w2\.", lambda w, head_dim: 0 * w),
    "norms without weights": ("norm", lambda w, head_dim: torch.ones_like(w)),
}


def changed(model: LanguageModel, pattern: str, change: Callable[[torch.Tensor, int], torch.Tensor]) -> LanguageModel:
    head_dim = model.shape["head_dim"]
    weights = {n: change(w, head_dim) if re.search(pattern, n) else w for n, w in model.weights.items()}
    return LanguageModel(weights, model.shape, model.tokenizer)


# ------------------------------------------------------------------------------------- mistakes in a text


def _shuffle_words(text: str, draw: random.Random) -> str:
    words = text.split()
    return " ".join(draw.sample(words, len(words)))


def _shuffle_letters(text: str, draw: random.Random) -> str:
    return " ".join("".join(draw.sample(word, len(word))) for word in text.split())


def _repeat_word(text: str, draw: random.Random) -> str:
    return " ".join([draw.choice(text.split())] * 60)


def _repeat_phrase(text: str, draw: random.Random) -> str:
    words = text.split()
    begin = draw.randrange(max(1, len(words) - 6))
    return " ".join(words[begin : begin + draw.randint(3, 6)] * 12)


EDITS: dict[str, Callable[[str, random.Random], str]] = {
    "words shuffled": _shuffle_words, "letters of words shuffled": _shuffle_letters,
    "one word repeated": _repeat_word, "a phrase repeated": _repeat_phrase,
}  # fmt: skip


class TextWriter:
    """Writes samples with a model. All that is drawn follows from the seed; no two calls use the same prompts."""

    def __init__(self, model: LanguageModel, seed: int):
        self.model, self.draw, self.generator = model, random.Random(seed), torch.Generator().manual_seed(seed)
        triples = itertools.product(OPENINGS, NAMES, THINGS)
        self.prompts = [opening.format(name=name, thing=thing) for opening, name, thing in triples]
        self.draw.shuffle(self.prompts)

    def good(self, count: int) -> list[Sample]:
        """As many at each of `TEMPERATURES`; of those that are drawn, one half continues the assignment's prompt."""
        samples = []
        for temperature in TEMPERATURES:
            kind, each = f"good, temperature {temperature:g}", count // len(TEMPERATURES)
            of_course = [TEXT_PROMPT] * (each // 2 if temperature else 0)
            samples += self._written(kind, self._next_prompts(each - len(of_course)), temperature)
            samples += self._written(kind, of_course, temperature) if of_course else []
        return samples

    def broken(self, count: int, good: list[Sample]) -> list[Sample]:
        """So many of each of twelve kinds. good: the texts that are edited."""
        samples, tokenizer = [], self.model.tokenizer
        for kind, mistake in MISTAKES.items():
            samples += self._written(kind, self._next_prompts(count), 0.0, changed(self.model, *mistake))
        samples += self._written("temperature 1.5", [TEXT_PROMPT] * count, 1.5)
        ids = range(3, tokenizer.vocab_size())  # without the special ones
        pieces = {"pieces at random": lambda text, draw: tokenizer.decode(draw.choices(ids, k=NEW_TOKENS))}
        for kind, edit in (EDITS | pieces).items():
            for sample in self.draw.sample(good, count):
                text = f"{sample.prompt} {edit(sample.continuation, self.draw)}"
                samples.append(Sample(kind, text, sample.prompt))
        return samples

    def _next_prompts(self, count: int) -> list[str]:
        self.prompts = [*self.prompts[count:], *self.prompts[:count]]
        return self.prompts[-count:]

    def _written(
        self, kind: str, prompts: list[str], temperature: float, model: LanguageModel | None = None
    ) -> list[Sample]:
        """A text for each prompt. The prompts are cut to the length of the shortest, to be one batch."""
        tokenizer = self.model.tokenizer
        rows = [[tokenizer.bos_id(), *tokenizer.encode(prompt)] for prompt in prompts]
        length = min(map(len, rows))
        idx = torch.tensor([row[:length] for row in rows])
        texts = (model or self.model).continued(idx, NEW_TOKENS, temperature, self.generator).tolist()
        return [Sample(kind, tokenizer.decode(row), tokenizer.decode(row[:length])) for row in texts]
