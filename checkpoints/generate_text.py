"""Writes the text that the bundled checkpoint learns from, and the bundled data set of film reviews.

A small generative grammar: templates with slots, filled at random from the lists of `film_words.py` and
`story_words.py`. Everything follows from one seed, in pure Python.

    python checkpoints/generate_text.py               # a few samples
    python checkpoints/generate_text.py --out DIR     # data set and pretraining text
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import film_words  # noqa: E402
import story_words  # noqa: E402

from engine.data import format_line  # noqa: E402

SEED = 20261120
LABEL_NAMES = tuple(names[0] for names in film_words.LEVEL_NAMES)
DATA_SIZES = {"train": 1400, "dev": 300, "test": 300}
LABEL_SHARES = (0.17, 0.23, 0.17, 0.24, 0.19)
DOCUMENTS = {"story": 3800, "review": 9500, "short": 25000}
PARTS = ("train", "held", "extra")

FIRST_NAMES = {
    "he": film_words.words("""Adam, Albert, Ali, Amos, Andre, Anton, Arthur, Ben, Bruno, Carl, Cedric, Charles, \
        Chen, Daniel,
        David, Dmitri, Edgar, Elias, Emil, Eric, Felix, Frank, Fred, George, Gustav, Hamid, Harry, Hugo, Ivan, Jack,
        Jacob, James, Jamal, Jim, Joe, John, Jonas, Jorge, Karim, Kevin, Kofi, Lars, Leo, Liam, Louis, Luca, Malik,
        Marco, Martin, Max, Michael, Miguel, Mike, Milo, Nathan, Nick, Noah, Nils, Oliver, Omar, Oscar, Otto, Pablo,
        Paul, Pedro, Peter, Phil, Pierre, Rafael, Raj, Ralph, Ravi, Robert, Roger, Sam, Samir, Simon, Stefan, Tariq,
        Theo, Thomas, Tim, Tom, Tony, Victor, Vincent, Walter, Will, Xavier, Yusuf, Zack"""),
    "she": film_words.words("""Ada, Agnes, Aisha, Alice, Alma, Amelia, Amina, Anna, Astrid, Beatrice, Bella, Carla, \
        Chloe, Clara,
        Daisy, Dora, Edith, Elena, Ella, Elsa, Emily, Emma, Esther, Eva, Fatima, Fiona, Flora, Frida, Grace, Greta,
        Hannah, Helen, Ida, Ines, Ingrid, Irene, Iris, Jane, Jasmine, Jenny, Joan, Julia, Kate, Kim, Laila, Laura,
        Lena, Lily, Linda, Lucy, Luna, Mabel, Maria, Martha, Mary, Maya, Mei, Mia, Mina, Molly, Nadia, Nina, Nora,
        Olga, Olivia, Paula, Pearl, Petra, Priya, Rita, Rosa, Ruby, Ruth, Sara, Selma, Sofia, Stella, Susan, Tara,
        Tessa, Tilda, Tina, Uma, Vera, Violet, Wanda, Yara, Yuki, Zoe"""),
}
LAST_NAMES = film_words.words("""Abbott, Adams, Alvarez, Archer, Baker, Barnes, Bauer, Becker, Bell, Bennett, Berg, \
    Bishop,
    Black, Blake, Boyd, Brandt, Brook, Brown, Burns, Carter, Castro, Chan, Clark, Cole, Cooper, Costa, Crane, Cruz,
    Dalton, Diaz, Dixon, Doyle, Drake, Dubois, Duncan, Ellis, Evans, Falk, Fields, Fisher, Fleming, Flores, Ford,
    Foster, Fox, Frost, Garcia, Gibson, Grant, Green, Haas, Hale, Hall, Hansen, Harper, Hart, Hayes, Hill, Holm, Hunt,
    Ivanov, Jensen, Jones, Kane, Keller, Khan, Kim, King, Klein, Knight, Kowalski, Lake, Lane, Larsen, Lee, Lewis,
    Lopez, Lund, Marsh, Mason, Mercer, Meyer, Miller, Moore, Moreno, Morris, Murphy, Nash, Nelson, Novak, Okafor,
    Olsen, Ortiz, Osborne, Page, Park, Patel, Perez, Petrov, Pierce, Porter, Quinn, Ramos, Reed, Reyes, Rhodes,
    Rivera, Roberts, Rossi, Roth, Ruiz, Russell, Ryan, Santos, Sato, Schmidt, Scott, Shaw, Silva, Singh, Sloan, Smith,
    Snow, Stein, Stone, Swift, Tanaka, Taylor, Thorne, Torres, Turner, Vance, Vargas, Vogel, Wagner, Walker, Wallace,
    Ward, Watts, Webb, Weiss, West, White, Wilde, Wong, Wood, Young""")
PET_NAMES = film_words.words("""Biscuit, Pepper, Snowball, Whiskers, Button, Captain, Pickle, Moss, Pebble, Thunder,
    Honey, Acorn, Patch""")
# Made-up names keep the model from knowing names by heart: in a prompt, any capitalised word may be one.
ONSETS = "b br c ch cl d dr f fr g gr h j k kr l m n p ph qu r s sh sl st t th tr v w z".split()
VOWELS = "a a e e i o o u ai ea ee ie ou au y".split()
CODAS = "n n r s l m t d nd rt ck ns x th lls ss v k".split()

ENDINGS = {  # [s] and its like, for one and for many
    "one": {"[s]": "s", "[es]": "es", "[is]": "is", "[has]": "has"},
    "many": {"[s]": "", "[es]": "", "[is]": "are", "[has]": "have"},
}
ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO](?!ne\b)|u(?!ni|s[ei])|honest|hour)")
SENTENCE_START = re.compile(r'(^"?|[.!?] "?)([a-z])')


@cache
def parse(template: str) -> tuple[str | tuple[str, ...], ...]:
    """A template as a sequence of literal strings and slots; a slot is the tuple of its alternatives."""
    parts: list[str | tuple[str, ...]] = []
    position = 0
    while (start := template.find("{", position)) >= 0:
        parts.append(template[position:start])
        end = _closing_brace(template, start)
        parts.append(_alternatives(template[start + 1 : end]))
        position = end + 1
    parts.append(template[position:])
    return tuple(parts)


def _closing_brace(template: str, start: int) -> int:
    depth = 0
    for index in range(start, len(template)):
        depth += {"{": 1, "}": -1}.get(template[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"a brace is not closed in {template!r}")


def _alternatives(body: str) -> tuple[str, ...]:
    """Split at the `|`s that stand outside inner braces."""
    found, depth, begin = [], 0, 0
    for index, character in enumerate(body):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "|" and depth == 0:
            found.append(body[begin:index])
            begin = index + 1
    return (*found, body[begin:])


def lexicon(*parts: str) -> dict[str, tuple[str, ...]]:
    """All lists, those of the film sentences from the given parts of `film_words.SPLIT` ("train", "held", "extra")."""
    chosen = [PARTS.index(part) for part in parts]
    split = {name: sum((lists[i] for i in chosen), ()) for name, lists in film_words.SPLIT.items()}
    return {**story_words.WORDS, **film_words.REVIEW, **split}


@dataclass
class Writer:
    """Fills templates for one document: remembers its characters, and does not use an option twice."""

    rng: random.Random
    lists: dict[str, tuple[str, ...]]
    bound: dict[str, str] = field(default_factory=dict)
    used: dict[str, set[str]] = field(default_factory=dict)

    def fill(self, template: str) -> str:
        """The template with every slot filled, without capitals and articles put right."""
        filled = []
        for part in parse(template):
            if isinstance(part, str):
                filled.append(part)
            elif len(part) > 1:
                filled.append(self.fill(self.rng.choice(part)))
            else:
                filled.append(self._slot(part[0]))
        return "".join(filled)

    def write(self, template: str) -> str:
        """The template filled and spelled as running text."""
        return spell(self.fill(template))

    def choose(self, name: str) -> str:
        """An option of a list that this document has not used yet, as long as there is one."""
        used = self.used.setdefault(name, set())
        free = [option for option in self.lists[name] if option not in used]
        option = self.rng.choice(free or self.lists[name])
        used.add(option)
        return option

    def _slot(self, slot: str) -> str:
        name, _, number = slot.partition(":")
        if name in self.bound:
            return self.bound[name]
        if name in ("actor", "person", "first"):
            return person_name(self.rng, full=name != "first")
        if name == "pet":
            return self.rng.choice(PET_NAMES)
        text = self.fill(self.choose(name))
        for marker, ending in ENDINGS.get(number, {}).items():
            text = text.replace(marker, ending)
        if name in story_words.STICKY:
            self.bound[name] = text
        return text


def spell(text: str) -> str:
    """Capitals at the starts of sentences, "an" before a vowel."""
    text = ARTICLE.sub(r"\1n ", text)
    return SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)


def made_up_name(rng: random.Random, syllables: int) -> str:
    """A capitalised word of consonants and vowels."""
    name = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables))
    return name.capitalize() + rng.choice(CODAS)


def person_name(rng: random.Random, full: bool = True, gender: str | None = None) -> str:
    """A name; a third of the family names and a tenth of the first names are made up."""
    gender = gender or rng.choice(("he", "she"))
    first = rng.choice(FIRST_NAMES[gender])
    if rng.random() < 0.1:
        first = made_up_name(rng, 2)
    if not full:
        return first
    last = made_up_name(rng, rng.choice((2, 2, 3))) if rng.random() < 0.35 else rng.choice(LAST_NAMES)
    return f"{first} {last}"


# ---------------------------------------------------------------------------------------------------- stories


def character(rng: random.Random, letter: str) -> dict[str, str]:
    """What the slots `{A}`, `{Ahe}`, ... stand for."""
    gender = rng.choice(("he", "she"))
    he, him, his, himself, kid = {
        "he": ("he", "him", "his", "himself", "boy"),
        "she": ("she", "her", "her", "herself", "girl"),
    }[gender]
    name = person_name(rng, full=False, gender=gender)
    pronouns = {f"{letter}he": he, f"{letter}him": him, f"{letter}his": his, f"{letter}himself": himself}
    return {letter: name, f"kid_{letter}": kid, **pronouns}


def story(rng: random.Random, lists: dict[str, tuple[str, ...]]) -> str:
    """A story of about a dozen sentences: an opening, the steps of one plot, an ending."""
    writer = Writer(rng, lists)
    writer.bound.update(character(rng, "A"))
    writer.bound.update(character(rng, "B"))
    while writer.bound["B"] == writer.bound["A"]:
        writer.bound.update(character(rng, "B"))
    plot = rng.choice(story_words.PLOTS)
    openings = story_words.OPENINGS
    if plot is story_words.NEW_FRIEND:  # who is yet to be met cannot be there from the start
        openings = tuple(opening for opening in openings if "{B}" not in opening)
    text = [writer.write(rng.choice(openings))]
    for step in plot:
        variant = rng.choice(step)
        if variant.startswith("?"):
            if rng.random() < 0.4:
                continue
            variant = variant.removeprefix("? ")
        text.append(writer.write(variant))
    if rng.random() < 0.4:
        text.append(writer.write(rng.choice(story_words.ENDINGS)))
    return " ".join(text)


# ---------------------------------------------------------------------------------------------------- reviews


NEAR = {0: (0, 0, 0, 1), 1: (1, 1, 1, 2, 0), 2: (2, 2, 3, 1), 3: (3, 3, 3, 2, 4), 4: (4, 4, 4, 3)}


def film_sentence(writer: Writer, level: int) -> str:
    """One short review, a sentence or two, of the given level."""
    return writer.write(writer.choose(f"sentence{level}"))


def join_choices(names: list[str]) -> str:
    """Two names are joined by "or", more by commas as well."""
    return " or ".join(names) if len(names) == 2 else f"{', '.join(names[:-1])}, or {names[-1]}"


def question(rng: random.Random, level: int, lists: dict[str, tuple[str, ...]]) -> str:
    """As in "Is this movie bad or good? This movie is good.", with one of many sets of names."""
    kind = rng.random()
    levels = list(film_words.LEVELS)
    if kind < 0.45:
        names = dict(enumerate(LABEL_NAMES))
    elif kind < 0.6:
        names = dict(enumerate(film_words.words("awful, bad, average, good, excellent")))
    elif kind < 0.75 or level == 2:
        names = {each: rng.choice(film_words.LEVEL_NAMES[each]) for each in levels}
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
    ask = rng.choice(lists["ask"])
    return spell(ask.replace("{choices}", join_choices(shown)).replace("{answer}", names[level]))


def verdict(writer: Writer, level: int, ask: float) -> str:
    """What closes a review: with probability `ask` the question and its answer, else a verdict."""
    rng = writer.rng
    if rng.random() < ask:
        return question(rng, level, writer.lists)
    if rng.random() < 0.5:
        return writer.write(writer.choose(f"closing{level}"))
    return spell(rng.choice(writer.lists["tell"]).replace("{answer}", rng.choice(film_words.LEVEL_NAMES[level])))


def short_review(rng: random.Random, lists: dict[str, tuple[str, ...]], known: frozenset[str]) -> str:
    """A film sentence that is not in `known`, and mostly the question."""
    level = rng.choices(film_words.LEVELS, LABEL_SHARES)[0]
    while (sentence := film_sentence(writer := Writer(rng, lists), level)) in known:
        pass
    text = [sentence, verdict(writer, level, ask=0.75)]
    if rng.random() < 0.15:
        text.insert(1, writer.write(writer.choose(f"closing{level}")))
    return " ".join(text)


def ordered_review(rng: random.Random, lists: dict[str, tuple[str, ...]]) -> str:
    """A review whose parts come in a fixed order: opening, actors, one aside, opinion, verdict.

    What comes next then depends on the part that stands last, which a small model can learn; the most likely
    continuation moves on to the end instead of turning in a circle.
    """
    level = rng.choices(film_words.LEVELS, LABEL_SHARES)[0]
    writer = Writer(rng, lists)
    writer.bound["expected"] = writer.choose(f"expected{level}")
    near = rng.choice(NEAR[level])
    text = [writer.write(writer.choose("opening")), writer.write(writer.choose("cast").replace("#", str(near)))]
    if rng.random() < 0.7:
        text.append(writer.write(writer.choose("aside")))
    text.append(film_sentence(writer, level))
    if rng.random() < 0.25:
        text.append(film_sentence(writer, level))
    text.append(verdict(writer, level, ask=0.6))
    return " ".join(text)


def review(rng: random.Random, lists: dict[str, tuple[str, ...]]) -> str:
    """A review of five to ten sentences in free order, with a question at its end or a verdict."""
    level = rng.choices(film_words.LEVELS, LABEL_SHARES)[0]
    writer = Writer(rng, lists)
    writer.bound["expected"] = writer.choose(f"expected{level}")
    text = [writer.write(writer.choose("opening"))]
    middle = []
    for _ in range(rng.choice((2, 3, 3, 4))):
        near = rng.choice(NEAR[level])
        name = rng.choice(("cast", "cast", "aside", f"sentence{near}", f"sentence{near}"))
        middle.append(writer.write(writer.choose(name).replace("#", str(near))))
    text += middle
    text.append(film_sentence(writer, level))
    if rng.random() < 0.5:
        text.append(writer.write(writer.choose(f"closing{level}")))
    text.append(verdict(writer, level, ask=0.4))
    return " ".join(text)


# ------------------------------------------------------------------------------------------------- the outputs


def data_set(seed: int = SEED) -> dict[str, list[tuple[int, str]]]:
    """The labelled sentences of each split; dev and test from the held-out lists, no sentence twice."""
    rng = random.Random(f"data {seed}")
    seen: set[str] = set()
    splits = {}
    for split, size in DATA_SIZES.items():
        lists = lexicon("train" if split == "train" else "held")
        rows: list[tuple[int, str]] = []
        while len(rows) < size:
            level = rng.choices(film_words.LEVELS, LABEL_SHARES)[0]
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
    lists = lexicon(*PARTS)
    write_review = ordered_review if ordered else review
    kinds = [kind for kind, count in DOCUMENTS.items() for _ in range(round(count * scale))]
    rng.shuffle(kinds)
    for kind in kinds:
        while True:
            if kind == "short":
                text = short_review(rng, lists, known)
            else:
                text = story(rng, lists) if kind == "story" else write_review(rng, lists)
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
