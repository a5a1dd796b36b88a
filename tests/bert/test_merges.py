"""How pieces are learned, against counting on the plain text; the page that tells of it, against what makes it."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from conftest import asset
from error_helpers import refused

tokenizers = pytest.importorskip("tokenizers")
from bert import compare  # noqa: E402
from bert.merges import by_count, by_likelihood, continued, learn, read, with_end, with_space  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

SPELLINGS = (with_end, with_space, continued)


def drawn(seed: int) -> list[str]:
    """Words of few letters, so that pairs are frequent, and many equally so."""
    rng = random.Random(seed)
    return ["".join(rng.choices("aabcd", k=rng.randrange(1, 7))) for _ in range(40)]


def slow_scores(text: str, likelihood: bool) -> dict[tuple[str, str], Fraction]:
    """Of a text whose parts stand between single spaces, and words between lines."""
    lines = [line.split(" ") for line in text.split("\n")]
    singles = [part for line in lines for part in line]
    pairs = [pair for line in lines for pair in zip(line, line[1:], strict=False)]
    return {
        pair: Fraction(pairs.count(pair), singles.count(pair[0]) * singles.count(pair[1]) if likelihood else 1)
        for pair in {*pairs}
        if pairs.count(pair) > 1
    }


# ----------------------------------------------------------------------------------------------------- the steps


@pytest.mark.parametrize("spell", SPELLINGS)
@pytest.mark.parametrize("score", [by_count, by_likelihood])
@pytest.mark.parametrize("seed", range(3))
def test_each_step_merges_a_pair_of_the_highest_score(seed: int, score, spell):
    """The text is kept as a text, and pairs are merged by a regular expression, as in the paper of BPE."""
    found = drawn(seed)
    text = "\n".join(" ".join(spell(word)) for word in found)
    known = sorted({*text.split()}, key=lambda part: (part[:2] == "##", part))
    steps = [*learn(found, spell, score, 60)]
    for step in steps:
        scores = slow_scores(text, score is by_likelihood)
        highest = max(scores.values())
        ties = [pair for pair, value in scores.items() if value == highest]
        assert step[:2] == min(ties, key=lambda pair: [known.index(part) for part in pair])
        assert (step.seen, step.score) == (slow_scores(text, False)[step[:2]], float(highest))
        assert step.parts_seen == tuple(len(re.findall(rf"(?<!\S){re.escape(part)}(?!\S)", text)) for part in step[:2])
        assert step.piece == step.first + re.sub("^##", "", step.second)
        text = re.sub(rf"(?<!\S){re.escape(' '.join(step[:2]))}(?!\S)", step.piece, text)
        known += [step.piece] * (step.piece not in known)
    assert len(steps) == 60 or not slow_scores(text, False)
    assert [" ".join(read(word, spell, steps)) for word in found] == text.split("\n")


@pytest.mark.parametrize("seed", range(3))
def test_the_score_is_how_much_likelier_the_text_becomes_at_each_place(seed: int):
    """The logarithm of the ratio of the two likelihoods, where the counts of other parts are kept as they are."""
    found = drawn(seed)
    parts = Counter(part for word in found for part in continued(word))
    total = parts.total()
    step = next(learn(found, continued, by_likelihood, 1))
    as_two = math.log(parts[step.first] / total) + math.log(parts[step.second] / total)
    as_one = math.log(step.seen / total)
    assert math.isclose(as_one - as_two, math.log(total * step.score))


@pytest.mark.parametrize("seed", range(5, 8))
def test_sentencepiece_merges_by_count(seed: int):
    """Of pairs that are equally frequent, it takes the one that makes the shortest piece, then the first of these."""
    found = drawn(seed) * 2
    theirs = compare.trained_by_sentencepiece([" ".join(found)], 25)
    text = "\n".join(" ".join(with_space(word)) for word in found)
    for piece in theirs:
        scores = slow_scores(text, likelihood=False)
        best = ["".join(pair) for pair, count in scores.items() if count == max(scores.values())]
        assert piece == min(best, key=lambda piece: (len(piece), piece))
        pair = next(pair for pair in scores if "".join(pair) == piece)
        text = re.sub(rf"(?<!\S){re.escape(' '.join(pair))}(?!\S)", piece, text)


@pytest.mark.parametrize("words", [[], ["a", "a"], ["ab", "cd"]])
def test_where_no_pair_is_seen_twice_nothing_is_learned(words: list[str]):
    assert [*learn(words, continued, by_count, 5)] == []


# ------------------------------------------------------------------------------------------------------- the page


def test_the_page_is_what_the_program_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = compare.TOKENIZERS_PAGE.read_text(encoding="utf-8")
    copy = tmp_path / "page.md"
    copy.write_text(compare.TABLE_BLOCK.sub(r"\1old\n\4", page), encoding="utf-8")
    monkeypatch.setattr(compare, "TOKENIZERS_PAGE", copy)
    monkeypatch.setattr("sys.argv", ["compare.py"])
    compare.main()
    assert copy.read_text(encoding="utf-8") == page, "python -m bert.compare writes it anew"


@pytest.mark.parametrize("page", ["", "<!-- table a -->\n<!-- end -->\n" * 2, "<!-- table b -->\n<!-- end -->\n"])
def test_a_page_without_its_marks_is_refused(page: str):
    refused("must have the marks", compare.fill, page, {"a": []})


def test_llamas_own_tokenizer_gives_every_sentence_back(assets: Path):
    tokenizer = Tokenizer(tokenizer_model=asset(assets, "tokenizer.model"))
    for text in compare.SAMPLES.values():
        assert tokenizer.decode(tokenizer.encode(text, bos=True, eos=True)) == text
