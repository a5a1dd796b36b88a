"""Writes the text that the bundled checkpoint learns from, and the bundled data set of film reviews.

A small generative grammar: templates with slots, filled at random. Everything follows from one seed, in pure Python.

    python checkpoints/generate_text.py               # a few samples
    python checkpoints/generate_text.py --out DIR     # data set and pretraining text

The words and templates are data: `film_words.json`, `story_words.json` and `names.json`, whose format README.md says.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from engine.data import format_line  # noqa: E402

FILM, STORY, NAMES = (
    json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in ("film_words", "story_words", "names")
)
SEED = 20261120
LEVELS = range(5)
LABEL_NAMES = tuple(names[0] for names in FILM["level_names"])
DATA_SIZES = {"train": 1400, "dev": 300, "test": 300}
LABEL_SHARES = (0.17, 0.23, 0.17, 0.24, 0.19)
DOCUMENTS = {"story": 3800, "review": 9500, "short": 25000}
LIST_PARTS = ("train", "held", "extra")

AGREEMENT = {
    "one": {"[s]": "s", "[es]": "es", "[is]": "is", "[has]": "has"},
    "many": {"[s]": "", "[es]": "", "[is]": "are", "[has]": "have"},
}
ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO](?!ne\b)|u(?!ni|s[ei])|honest|hour)")
SENTENCE_START = re.compile(r'(^"?|[.!?] "?)([a-z])')
SLOT = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\}")  # there may be slots in it
OR = re.compile(r"\|(?![^{}]*\})")  # a | outside of inner slots


def lexicon(*parts: str) -> dict[str, list[str]]:
    """All lists by name; those of the film sentences hold the options of the given parts: "train", "held", "extra"."""
    lists = {**STORY["words"], **FILM["review"]}
    for name, options in {**FILM["opinions"], **FILM["phrases"]}.items():
        chosen = [option for part in parts for option in options[part]]
        for level in LEVELS:  # a name without # is set five times, to the same list
            lists[name.replace("#", str(level))] = [option.replace("#", str(level)) for option in chosen]
    return lists


@dataclass
class Writer:
    """Fills templates for one document: remembers its characters, and does not use an option twice."""

    rng: random.Random
    lists: dict[str, list[str]]
    bound: dict[str, str] = field(default_factory=dict)
    used: dict[str, set[str]] = field(default_factory=dict)

    def fill(self, template: str) -> str:
        """The template with every slot filled, without capitals and articles put right."""
        return SLOT.sub(lambda slot: self._fill_slot(slot[1]), template)

    def write(self, template: str) -> str:
        """The template filled and spelled as running text."""
        return spell(self.fill(template))

    def draw(self, name: str, level: int | None = None) -> str:
        """An option of a list, as running text; # in it becomes the level."""
        return self.write(self.choose(name).replace("#", str(level)))

    def choose(self, name: str) -> str:
        """An option of a list that this document has not used yet, as long as there is one."""
        used = self.used.setdefault(name, set())
        free = [option for option in self.lists[name] if option not in used]
        option = self.rng.choice(free or self.lists[name])
        used.add(option)
        return option

    def _fill_slot(self, slot: str) -> str:
        alternatives = OR.split(slot)
        if len(alternatives) > 1:
            return self.fill(self.rng.choice(alternatives))
        name, _, number = slot.partition(":")
        if name in self.bound:
            return self.bound[name]
        if name in ("actor", "person", "first"):
            return person_name(self.rng, full=name != "first")
        if name == "pet":
            return self.rng.choice(NAMES["pet"])
        text = self.fill(self.choose(name))
        for marker, ending in AGREEMENT.get(number, {}).items():
            text = text.replace(marker, ending)
        if name in STORY["kept"]:
            self.bound[name] = text
        return text


def spell(text: str) -> str:
    """Capitals at the starts of sentences, "an" before a vowel."""
    text = ARTICLE.sub(r"\1n ", text)
    return SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)


def made_up_name(rng: random.Random, syllables: int) -> str:
    """A capitalised word of consonants and vowels, so that the model learns that any such word may be a name."""
    parts = NAMES["syllables"]
    name = "".join(rng.choice(parts["onset"]) + rng.choice(parts["vowel"]) for _ in range(syllables))
    return name.capitalize() + rng.choice(parts["coda"])


def person_name(rng: random.Random, full: bool = True, gender: str | None = None) -> str:
    """A name; a third of the family names and a tenth of the first names are made up."""
    gender = gender or rng.choice(("he", "she"))
    first = rng.choice(NAMES["first"][gender])
    if rng.random() < 0.1:
        first = made_up_name(rng, 2)
    if not full:
        return first
    last = made_up_name(rng, rng.choice((2, 2, 3))) if rng.random() < 0.35 else rng.choice(NAMES["last"])
    return f"{first} {last}"


def character(rng: random.Random, letter: str) -> dict[str, str]:
    """What the slots `{A}`, `{Ahe}`, ... stand for."""
    gender = rng.choice(("he", "she"))
    name = person_name(rng, full=False, gender=gender)
    return {letter: name, **{letter + slot: word for slot, word in NAMES["pronouns"][gender].items()}}


def story(rng: random.Random, lists: dict[str, list[str]]) -> str:
    """A story of about a dozen sentences: an opening, the steps of one plot, an ending."""
    writer = Writer(rng, lists)
    writer.bound.update(character(rng, "A"))
    writer.bound.update(character(rng, "B"))
    while writer.bound["B"] == writer.bound["A"]:
        writer.bound.update(character(rng, "B"))
    plot = rng.choice(list(STORY["plots"]))
    openings = STORY["openings"]
    if plot == "a new friend":  # A meets B only later
        openings = [opening for opening in openings if "{B}" not in opening]
    text = [writer.write(rng.choice(openings))]
    for step in STORY["plots"][plot]:
        variant = rng.choice(step)
        if variant.startswith("?"):
            if rng.random() < 0.4:
                continue
            variant = variant.removeprefix("? ")
        text.append(writer.write(variant))
    if rng.random() < 0.4:
        text.append(writer.write(rng.choice(STORY["endings"])))
    return " ".join(text)


NEAR = {0: (0, 0, 0, 1), 1: (1, 1, 1, 2, 0), 2: (2, 2, 3, 1), 3: (3, 3, 3, 2, 4), 4: (4, 4, 4, 3)}


def draw_level(rng: random.Random) -> int:
    """A level from 0 to 4, with the frequencies of the data set."""
    return rng.choices(LEVELS, LABEL_SHARES)[0]


def film_sentence(writer: Writer, level: int) -> str:
    """One short review, a sentence or two, of the given level."""
    return writer.draw(f"sentence{level}")


def question(rng: random.Random, level: int, lists: dict[str, list[str]]) -> str:
    """As in "Is this movie bad or good? This movie is good.", with one of many sets of names."""
    kind = rng.random()
    if kind < 0.45:
        names = dict(enumerate(LABEL_NAMES))
    elif kind < 0.6:
        names = dict(enumerate(("awful", "bad", "average", "good", "excellent")))
    elif kind < 0.75 or level == 2:
        names = {each: rng.choice(FILM["level_names"][each]) for each in LEVELS}
        names = {each: name for each, name in names.items() if each == level or rng.random() < 0.7}
    else:
        low, high = rng.choice((("bad", "good"), ("bad", "good"), ("negative", "positive"), ("terrible", "wonderful")))
        names = {1: low, 3: high}
        level = 1 if level < 2 else 3
    if len(names) < 2:
        names = dict(enumerate(LABEL_NAMES))
    shown = list(names.values())
    if rng.random() < 0.1:
        rng.shuffle(shown)
    choices = " or ".join(shown) if len(shown) == 2 else f"{', '.join(shown[:-1])}, or {shown[-1]}"
    ask = rng.choice(lists["ask"])
    return spell(ask.replace("{choices}", choices).replace("{answer}", names[level]))


def verdict(writer: Writer, level: int, ask: float) -> str:
    """What closes a review: with probability `ask` the question and its answer, else a verdict."""
    rng = writer.rng
    if rng.random() < ask:
        return question(rng, level, writer.lists)
    if rng.random() < 0.5:
        return writer.draw(f"closing{level}")
    return spell(rng.choice(writer.lists["tell"]).replace("{answer}", rng.choice(FILM["level_names"][level])))


def short_review(rng: random.Random, lists: dict[str, list[str]], known: frozenset[str]) -> str:
    """A film sentence that is not in `known`, and mostly the question."""
    level = draw_level(rng)
    while (sentence := film_sentence(writer := Writer(rng, lists), level)) in known:
        pass
    text = [sentence, verdict(writer, level, ask=0.75)]
    if rng.random() < 0.15:
        text.insert(1, writer.draw(f"closing{level}"))
    return " ".join(text)


def review(rng: random.Random, lists: dict[str, list[str]], ordered: bool) -> str:
    """A review of five to ten sentences: opening, middle, opinion, verdict.

    ordered: the middle is a sentence about an actor and perhaps one aside, instead of two to four sentences of any
    kind. What comes next then depends on the part that stands last, which a small model can learn; the most likely
    continuation moves on to the end instead of turning in a circle.
    """
    level = draw_level(rng)
    writer = Writer(rng, lists)
    writer.bound["expected"] = writer.choose(f"expected{level}")
    if ordered:
        near = rng.choice(NEAR[level])
        text = [writer.draw("opening"), writer.draw("cast", near)]
        if rng.random() < 0.7:
            text.append(writer.draw("aside"))
    else:
        text = [writer.draw("opening")]
        for _ in range(rng.choice((2, 3, 3, 4))):
            near = rng.choice(NEAR[level])
            name = rng.choice(("cast", "cast", "aside", f"sentence{near}", f"sentence{near}"))
            text.append(writer.draw(name, near))
    text.append(film_sentence(writer, level))
    if ordered and rng.random() < 0.25:
        text.append(film_sentence(writer, level))
    if not ordered and rng.random() < 0.5:
        text.append(writer.draw(f"closing{level}"))
    text.append(verdict(writer, level, ask=0.6 if ordered else 0.4))
    return " ".join(text)


def data_set(seed: int = SEED) -> dict[str, list[tuple[int, str]]]:
    """The labelled sentences of each split; dev and test from the held-out lists, no sentence twice."""
    rng = random.Random(f"data {seed}")
    seen: set[str] = set()
    splits = {}
    for split, size in DATA_SIZES.items():
        lists = lexicon("train" if split == "train" else "held")
        rows: list[tuple[int, str]] = []
        while len(rows) < size:
            level = draw_level(rng)
            sentence = film_sentence(Writer(rng, lists), level)
            if sentence not in seen:
                seen.add(sentence)
                rows.append((level, sentence))
        splits[split] = rows
    return splits


def documents(seed: int = SEED, scale: float = 1.0, ordered: bool = False) -> Iterator[str]:
    """The pretraining documents in random order, without any sentence of the data set.

    `scale` 0.01 gives a sample. `ordered` gives other documents, whose longer reviews keep to one order of parts.
    """
    known = frozenset(sentence for rows in data_set(seed).values() for _, sentence in rows)
    rng = random.Random(f"{'ordered ' * ordered}text {seed}")
    lists = lexicon(*LIST_PARTS)
    kinds = [kind for kind, count in DOCUMENTS.items() for _ in range(round(count * scale))]
    rng.shuffle(kinds)
    for kind in kinds:
        while True:
            if kind == "short":
                text = short_review(rng, lists, known)
            else:
                text = story(rng, lists) if kind == "story" else review(rng, lists, ordered)
            if not any(sentence in text for sentence in known):
                break
        yield text


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bundled data set and the pretraining text.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, help="folder for films-*.txt and text.txt; without it, samples are printed")
    args = parser.parse_args()
    if args.out is None:
        print("\n\n".join(documents(args.seed, scale=0.0007)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for split, rows in data_set(args.seed).items():
        text = "".join(f"{format_line(level, sentence)}\n" for level, sentence in rows)
        (args.out / f"films-{split}.txt").write_text(text, encoding="utf-8", newline="\n")
        print(split, dict(sorted(Counter(level for level, _ in rows).items())))
    text = "".join(f"{document}\n" for document in documents(args.seed))
    (args.out / "text.txt").write_text(text, encoding="utf-8", newline="\n")
    print(f"text: {len(text) / 1e6:.1f} million characters")


if __name__ == "__main__":
    main()
