"""The generated texts of a submission: prompt, repetition, known words; and, with a model that judges, coherence."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from grading.editions import EDITIONS, LABEL_NAMES, TEXT_PROMPT, TEXTS
from grading.findings import Message
from grading.lines import SEPARATOR
from grading.programs import read_text
from grading.published import PUBLISHED_TEXTS
from grading.settings import Settings

COHERENT, BROKEN, UNCLEAR, NOT_JUDGED = "coherent", "broken", "look at it", "not judged"
_WORD = re.compile(r"[^\W\d_]+")


class Verdict(NamedTuple):
    """What a model says of a text: one of the four words above, and the figures that it rests on."""

    word: str
    figures: Mapping[str, float] = {}


TextJudge = Callable[[str, str], Verdict]  # of a text and the prompt that it begins with


def continuation(text: str) -> str:
    """What follows the assignment's prompt, with single spaces; the whole text where it does not begin with that."""
    return " ".join(text.split()).removeprefix(TEXT_PROMPT).strip()


def distinct_trigrams(words: Sequence[str]) -> float:
    """The share of the trigrams of some words that are distinct; 0 where there is none."""
    trigrams = [*zip(words, words[1:], words[2:], strict=False)]
    return len({*trigrams}) / max(1, len(trigrams))


@cache
def known_words(folder: str) -> frozenset[str]:
    """The words of all data sets in a folder, in lower case."""
    words: set[str] = set()
    for dataset in LABEL_NAMES:
        for path in sorted(Path(folder).glob(f"{dataset}-*.txt")):
            for line in read_text(path).lower().split("\n"):
                words.update(_WORD.findall(line.partition(SEPARATOR)[2]))
    return frozenset(words)


def check_texts(texts: Mapping[str, str], settings: Settings, judge: TextJudge | None) -> tuple[list[Message], Verdict]:
    """The findings about both texts, and the model's verdict on the one at temperature 0."""
    messages, low, verdict = [], TEXTS[0], Verdict(NOT_JUDGED)
    if {*TEXTS} <= texts.keys() and continuation(texts[low]) == continuation(texts[TEXTS[1]]):
        messages.append(Message("both generated texts are equal", "E056-temperatures", TEXTS[1]))
    for name in TEXTS:
        if name in texts:
            messages += _check_words(name, continuation(texts[name]), name == low, settings)
    if low in texts:
        digest = hashlib.sha256(texts[low].strip().encode()).hexdigest()
        if digest == PUBLISHED_TEXTS["causal"] and EDITIONS[settings.edition].attention != "causal":
            messages.append(Message(f"{low}: the published text of the causal mask", "E058-causal", low))
        if judge:
            verdict = judge(texts[low], TEXT_PROMPT)
            figures = ", ".join(f"{name} {value:.3g}" for name, value in verdict.figures.items())
            code = {BROKEN: "E051-incoherent", UNCLEAR: "E052-unclear"}.get(verdict.word)
            if code:
                messages.append(Message(f"{low}: {verdict.word} ({figures})", code, low, 0, COHERENT, verdict.word))
    return messages, verdict


def _check_words(name: str, text: str, is_low: bool, settings: Settings) -> Iterator[Message]:
    """Too few words, repeated ones (temperature 0 alone), unknown ones: at temperature 1 only where it is no text."""
    words, limits = _WORD.findall(text.lower()), settings.thresholds
    if len(words) < limits.words:
        said = f"{name}: {len(words)} words after the prompt"
        yield Message(said, "E054-short", name, 0, f"{limits.words} or more", len(words))
        return
    if is_low and len(words) > 2 and (share := distinct_trigrams(words)) < limits.trigrams:
        said = f"{name}: of its trigrams of words, {share:.2f} are distinct"
        yield Message(said, "E053-repetitive", name, 0, f"{limits.trigrams:g} or more", f"{share:.2f}")
    known, least = known_words(settings.gold), limits.known_words * (1 if is_low else 0.5)
    if known and (share := sum(word in known for word in words) / len(words)) < least:
        said = f"{name}: of its words, {share:.2f} occur in the data sets"
        yield Message(said, "E055-words", name, 0, f"{least:g} or more", f"{share:.2f}")
