"""The tables of `bert/tokenizers.md`, made anew: what three kinds of tokenizers learn, and what they make of sentences.

    python -m bert.compare

The program writes the tables between the marks of that file, and keeps all else. The tokenizers learn from the bundled
text, which `checkpoints/generate_text.py` wrote.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bert.basic import words
from bert.merges import WORD_END, MergeStep, by_count, by_likelihood, continued, learn, read, with_end, with_space
from bert.vocabulary import train_vocabulary
from bert.wordpiece import SPECIAL, WordPiece
from engine.programs import ArgumentParser, run_main
from engine.text.runs import read_documents, train_tokenizer
from tokenizer import Tokenizer
from utils import ROOT, UserError, atomic_write, read_text

TOKENIZERS_PAGE = Path(__file__).with_name("tokenizers.md")
TRAIN_TEXT, DEV_TEXT = "data/films-train.txt", "data/films-dev.txt"
TABLE_BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
UNK = SPECIAL[1]

HARBOR = {"rains": 8, "sails": 7, "tail": 9, "tar": 8, "yarn": 4, "quay": 3}  # the small text: words, how often
HARBOR_STEPS = 8  # on the small text
LEARNED = 400  # pieces that each tokenizer learns of the bundled text beyond its characters
OF_SENTENCEPIECE = 3 + 256 + 95  # unk, bos, eos; the bytes; the characters of ASCII, among them the space
SAMPLES = {
    "words that were in the text, and one that was not": "The story is beautiful, but unfilmable.",
    "capitals, and punctuation inside of words": "I DON'T like so-called twists!",
    "accents": "A naïve café scene",
    "numbers": "In 1984 it cost 7.50",
    "spaces": "two  spaces and\ta tab",
    "emoji": "What a film 🎬🙂",
    "scripts that were not in the text": "Фильм 電影",
    "letters that Unicode calls forms of others": "a ﬁne ＯＫ…",
}


class Reader(NamedTuple):
    """A tokenizer in the tables. pieces: of a text. text: encodes a text, and decodes it again."""

    name: str
    pieces: Callable[[str], list[str]]
    text: Callable[[str], str]


# ------------------------------------------------------------------------------------------------ the small text


def harbor() -> list[str]:
    return [word for word, count in HARBOR.items() for _ in range(count)]


def small_text() -> Iterator[str]:
    yield from header("word", "times", "BPE", "WordPiece", "SentencePiece")
    for word, count in HARBOR.items():
        yield row(f"`{word}`", count, *(code(spell(word)) for spell in (with_end, continued, with_space)))


def steps_by_count() -> Iterator[str]:
    yield from header("step", "most frequent pair", "count", "new piece", "words that it changes")
    done: list[MergeStep] = []
    for number, step in enumerate(learn(harbor(), with_end, by_count, HARBOR_STEPS), 1):
        before = {word: read(word, with_end, done) for word in HARBOR}
        done.append(step)
        changed = [now for word in HARBOR if (now := read(word, with_end, done)) != before[word]]
        yield row(number, code(step[:2]), step.seen, f"`{step.piece}`", ", ".join(map(code, changed)))


def steps_by_likelihood() -> Iterator[str]:
    yield from header("step", "pair a, b", "count(ab)", "count(a)", "count(b)", "score", "new piece")
    for number, step in enumerate(learn(harbor(), continued, by_likelihood, HARBOR_STEPS), 1):
        yield row(number, code(step[:2]), step.seen, *step.parts_seen, f"{step.score:.3f}", f"`{step.piece}`")


def first_pieces() -> Iterator[str]:
    """The first pieces beyond the characters: of both scores here, and of the two libraries."""
    ours = [learn(harbor(), *how, HARBOR_STEPS) for how in ((with_end, by_count), (continued, by_likelihood))]
    columns = [[step.piece for step in steps] for steps in ours]
    lines = [" ".join(harbor())]
    columns += [trained_by_the_library(lines, HARBOR_STEPS), trained_by_sentencepiece(lines, HARBOR_STEPS)]
    yield from header("step", "BPE", "WordPiece, by likelihood", "`WordPieceTrainer`", "SentencePiece")
    for number, pieces in enumerate(zip(*columns, strict=True), 1):
        yield row(number, *(f"`{piece}`" for piece in pieces))


def trained_by_the_library(lines: list[str], learned: int) -> list[str]:
    return train_vocabulary(lines, size_with(lines, learned)).pieces[-learned:]


def size_with(lines: Iterable[str], learned: int) -> int:
    """The size of an uncased vocabulary that has so many pieces beyond special tokens and characters."""
    found = [word.text for line in lines for word in words(line, lower_case=True)]
    inside = {letter for word in found for letter in word[1:]}
    return len(SPECIAL) + len({letter for word in found for letter in word}) + len(inside) + learned


def trained_by_sentencepiece(lines: list[str], learned: int) -> list[str]:
    model = Tokenizer.from_bytes(train_tokenizer(lines, OF_SENTENCEPIECE + learned)).sp_model
    return [model.id_to_piece(id) for id in range(3 + 256, 3 + 256 + learned)]  # then come the characters


# ---------------------------------------------------------------------------------------------- the bundled text


def agreement() -> Iterator[str]:
    """For each score, how many of the library's pieces it learns as well."""
    lines = read_documents(str(ROOT / TRAIN_TEXT))
    found = [word.text for line in lines for word in words(line, lower_case=True)]
    theirs = trained_by_the_library(lines, LEARNED)
    yield from header("score", f"of {LEARNED} pieces also `WordPieceTrainer`'s", "at the same step", "the first ones")
    for name, score in (("count(ab)", by_count), ("count(ab) / (count(a) count(b))", by_likelihood)):
        ours = [step.piece for step in learn(found, continued, score, LEARNED)]
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        yield row(name, len({*ours} & {*theirs}), same, code(ours[:8]))


def readers() -> list[Reader]:
    """The three, each with the same number of pieces beyond its characters."""
    lines = read_documents(str(ROOT / TRAIN_TEXT))
    wordpiece = train_vocabulary(lines, size_with(lines, LEARNED))
    model = train_tokenizer(lines, OF_SENTENCEPIECE + LEARNED)
    return [bpe_reader(lines), wordpiece_reader(wordpiece), sentencepiece_reader(Tokenizer.from_bytes(model))]


def bpe_reader(lines: list[str]) -> Reader:
    found = [word.text for line in lines for word in words(line, lower_case=False)]
    letters = {WORD_END, *(letter for word in found for letter in word)}
    steps = [*learn(found, with_end, by_count, LEARNED)]

    def spell(word: str) -> tuple[str, ...]:
        return tuple(part if part in letters else UNK for part in with_end(word))

    @cache
    def of_word(word: str) -> list[str]:
        return [*read(word, spell, steps)]

    def pieces(text: str) -> list[str]:
        return [piece for word in words(text, lower_case=False) for piece in of_word(word.text)]

    return Reader("BPE", pieces, lambda text: "".join(pieces(text)).replace(UNK, "").replace(WORD_END, " ").rstrip())


def wordpiece_reader(tokenizer: WordPiece) -> Reader:
    def ids(text: str) -> list[int]:
        return [token.id for token in tokenizer.tokenize(text)]

    return Reader("WordPiece", lambda t: [tokenizer.pieces[id] for id in ids(t)], lambda t: tokenizer.decode(ids(t)))


def sentencepiece_reader(tokenizer: Tokenizer) -> Reader:
    model = tokenizer.sp_model
    return Reader("SentencePiece", model.encode_as_pieces, lambda text: model.decode(model.encode(text)))


def sentences(three: list[Reader]) -> Iterator[str]:
    for number, (title, text) in enumerate(SAMPLES.items()):
        yield from ("",) * (number > 0)
        yield from (f"**{title[0].upper()}{title[1:]}**: `{text}`", "")
        yield from header("", "pieces", "comes back as", "exactly")
        for reader in three:
            back = reader.text(text)
            is_exact = "yes" if back == text else "no"
            yield row(reader.name, code(reader.pieces(text)), f"`{back}`" if back else "", is_exact)


def held_out(three: list[Reader]) -> Iterator[str]:
    lines = read_documents(str(ROOT / DEV_TEXT))
    total = sum(len(line.split()) for line in lines)
    yield from header("", "pieces a word", f"`{UNK}`", f"of {len(lines)} sentences, come back exactly")
    for reader in three:
        counts = Counter(piece == UNK for line in lines for piece in reader.pieces(line))
        exact = sum(reader.text(line) == line for line in lines)
        yield row(reader.name, f"{counts.total() / total:.2f}", counts[True], exact)


# ------------------------------------------------------------------------------------------------------ the page


def header(*names: str) -> tuple[str, str]:
    return row(*names), "|" + "---|" * len(names)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def code(parts: Iterable[str]) -> str:
    return f"`{' '.join(parts)}`"


def tables() -> dict[str, list[str]]:
    """The lines of each table, by its name."""
    made = (small_text, steps_by_count, steps_by_likelihood, first_pieces, agreement)
    three = readers()
    of_three = {make.__name__: [*make(three)] for make in (sentences, held_out)}
    return {make.__name__: [*make()] for make in made} | of_three


def fill(page: str, made: Mapping[str, list[str]]) -> str:
    """The page with these tables between its marks. Raises `UserError` if it has marks of other names."""
    if sorted(name for _, name, *_ in TABLE_BLOCK.findall(page)) != sorted(made):
        marks = f"<!-- table NAME --> ... <!-- end --> once for {', '.join(made)}"
        raise UserError(f"{TOKENIZERS_PAGE} must have the marks {marks}")
    return TABLE_BLOCK.sub(lambda block: block[1] + "\n".join(made[block[2]]) + "\n" + block[4], page)


def main() -> None:
    ArgumentParser(prog="python -m bert.compare", description=__doc__.split("\n\n")[0]).parse_args()
    page = fill(read_text(TOKENIZERS_PAGE), tables())
    with atomic_write(TOKENIZERS_PAGE) as file:
        file.write(page)
    print(f"wrote {TOKENIZERS_PAGE}")


if __name__ == "__main__":
    sys.exit(run_main(main))
