"""What BERT is pre-trained on: pairs of segments, masked tokens, and how often each of them is drawn."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice, pairwise
from random import Random

import pytest
import torch
from error_helpers import refused

from bert.examples import Noise, PretrainingData, sentences_of
from bert.pairs import Document, pairs_of
from bert.wordpiece import SPECIAL, WordPiece
from engine.tasks import NO_TARGET

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def tokenizer() -> WordPiece:
    return WordPiece([*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "."])


def documents_of(count: int = 40, seed: int = 0) -> list[Document]:
    """Every token of a document names it and stands once in it: document * 1000 + place."""
    drawing = Random(seed)
    documents = []
    for number in range(1, count + 1):
        numbers = iter(range(number * 1000, number * 1000 + 999))
        documents.append([[*islice(numbers, drawing.randint(3, 12))] for _ in range(drawing.randint(2, 25))])
    return documents


def documents_in(tokenizer: WordPiece) -> list[Document]:
    """Of pieces of the tokenizer."""
    first = len(SPECIAL)
    return [[[first + id % 50 for id in line] for line in document] for document in documents_of(12)]


def near(count: int, total: int, share: float) -> bool:
    """Within four standard errors of a share."""
    return abs(count / total - share) < 4 * math.sqrt(share * (1 - share) / total)


# ------------------------------------------------------------------------------------------------------ pairs


def test_a_next_segment_goes_on_where_the_first_ends_and_another_one_is_of_another_document():
    documents = documents_of()
    pairs = pairs_of(documents, 64, True, Random(1))
    ends = {sentence[-1] for document in documents for sentence in document}
    for a, b, is_next in pairs:
        assert a and b and len(a) + len(b) <= 61
        assert a == [*range(a[0], a[-1] + 1)] and b == [*range(b[0], b[-1] + 1)]  # without a gap
        assert a[-1] in ends  # whole sentences where they meet
        if is_next:
            assert b[0] == a[-1] + 1
        else:
            assert b[0] // 1000 != a[0] // 1000
    assert any(b[0] - 1 in ends for _, b, is_next in pairs if not is_next)  # a sentence of the other document begins it


def test_half_of_the_segments_are_random_and_every_document_is_used():
    documents = documents_of(300)
    pairs = pairs_of(documents, 64, True, Random(2))
    assert near(sum(pair.is_next for pair in pairs), len(pairs), 0.5)
    assert {pair.a[0] // 1000 for pair in pairs} == set(range(1, 301))
    others = Counter(pair.b[0] // 1000 for pair in pairs if not pair.is_next)
    assert len(others) > 180  # not always the same one, nor the neighbours alone
    covered = {token for pair in pairs for token in (pair.a + pair.b if pair.is_next else pair.a)}
    assert len(covered) > 0.8 * sum(len(sentence) for document in documents for sentence in document)


def test_most_pairs_fill_their_row_and_a_tenth_is_short_on_purpose():
    long = [[[number * 1000 + place * 5 + token for token in range(5)] for place in range(190)] for number in range(60)]
    pairs = pairs_of(long, 64, True, Random(3))
    inner = [pair for pair in pairs if pair.is_next and pair.b[-1] % 1000 < 880]  # not at a document's end
    short = sum(len(a) + len(b) < 56 for a, b, _ in inner)
    assert 0.04 < short / len(inner) < 0.15 and sum(len(a) + len(b) == 61 for a, b, _ in inner) / len(inner) > 0.8
    others = [len(pair.a) for pair in pairs if not pair.is_next]
    assert sum(size > 35 for size in others) / len(others) > 0.25  # a random segment takes the room that is left


def test_what_does_not_fit_is_cut_where_the_two_do_not_meet():
    documents = [[[*range(1000, 1040)], [*range(1040, 1090)]], [[2000], [2001]]]
    seen = set()
    for seed in range(40):
        for a, b, is_next in pairs_of(documents, 33, True, Random(seed)):
            if is_next and a[-1] == 1039 and len(a) + len(b) == 30:
                assert b[0] == 1040
                seen.add((len(a), len(b)))
    assert seen == {(15, 15)}


def test_a_single_sentence_makes_no_pair_but_can_be_a_random_segment():
    documents = [[[1000, 1001]], [[2000], [2001], [2002]]]
    pairs = [pair for seed in range(20) for pair in pairs_of(documents, 16, True, Random(seed))]
    assert {pair.a[0] // 1000 for pair in pairs} == {2}
    assert {tuple(pair.b) for pair in pairs if not pair.is_next} == {(1000, 1001)}


@pytest.mark.parametrize("length", [3, 16, 200])
def test_without_next_sentences_a_row_is_one_stretch_and_nothing_is_left_out(length: int):
    documents = documents_of(50)
    pairs = pairs_of(documents, length, False, Random(4))
    assert not any(pair.b for pair in pairs) and all(0 < len(pair.a) <= length - 2 for pair in pairs)
    assert all(len({token // 1000 for token in pair.a}) == 1 for pair in pairs)
    text = [token for document in documents for sentence in document for token in sentence]
    assert [token for pair in pairs for token in pair.a] == text


def test_without_next_sentences_a_row_begins_with_a_sentence_and_has_all_that_fit():
    documents = documents_of(300)
    starts = {sentence[0]: len(sentence) for document in documents for sentence in document}
    pairs = pairs_of(documents, 40, False, Random(5))
    cut = [pair for pair in pairs if pair.a[0] not in starts]
    assert len(cut) < 0.04 * len(pairs)  # a row that is short on purpose may be shorter than a sentence
    within = [(before.a, after.a[0]) for before, after in pairwise(pairs) if before.a[0] // 1000 == after.a[0] // 1000]
    full = sum(len(row) + starts[first] > 38 for row, first in within if first in starts)
    assert 0.86 < full / len(within) < 0.97
    long = [[[*range(100)], [*range(100, 104)]]]
    assert [token for pair in pairs_of(long, 16, False, Random(0)) for token in pair.a] == [*range(104)]
    rows = pairs_of([[[*range(5)]] * 4], 100, False, Random(0))
    assert [pair.a for pair in rows] == [[*range(5)] * 4]


def test_sentences_without_tokens_and_special_tokens_that_a_text_writes_out_are_left_out(tokenizer: WordPiece):
    texts = ["a [MASK] b\n[SEP]\n[CLS] c [PAD] ?", "[SEP]"]
    letters = [tokenizer.ids[letter] for letter in "abc"]
    unknown = tokenizer.ids["[UNK]"]
    assert [*sentences_of(texts, tokenizer)] == [[letters[:2], [letters[2], unknown]]]
    assert [*sentences_of(["a\n\u200b\nb", "\u200b"], tokenizer)] == [[letters[:1], letters[1:2]]]


# ------------------------------------------------------------------------------------------------------ noise


def noisy(noise: Noise, tokenizer: WordPiece, ids: list[int], rounds: int) -> Counter:
    """How often a token of a row became what."""
    counts: Counter = Counter()
    for round in range(rounds):
        after, targets = noise.apply(ids, tokenizer, Random(round))
        for before, now, target in zip(ids, after, targets, strict=True):
            if target == NO_TARGET:
                assert now == before
                counts["not asked"] += 1
                continue
            assert target == before and before not in (tokenizer.cls_id, tokenizer.sep_id)
            kind = "mask" if now == tokenizer.mask_id else "kept" if now == before else "random"
            counts[kind] += 1
    return counts


@pytest.mark.parametrize(
    ("mask", "random", "expected"),
    [
        (0.8, 0.1, {"mask": 0.8, "random": 0.1, "kept": 0.1}),
        (1.0, 0.0, {"mask": 1.0}),
        (0.0, 0.5, {"random": 0.5, "kept": 0.5}),
    ],
)
def test_the_noise_has_the_rates_of_the_paper(tokenizer: WordPiece, mask: float, random: float, expected: dict):
    letters = [tokenizer.ids[letter] for letter in LETTERS] * 4
    ids = [tokenizer.cls_id, *letters[:60], tokenizer.sep_id, *letters[60:], tokenizer.sep_id]
    counts = noisy(Noise(mask=mask, random=random), tokenizer, ids, 600)
    asked = sum(counts[kind] for kind in ("mask", "random", "kept"))
    assert asked == 600 * round(0.15 * 104)
    twin = 1 / len(tokenizer)  # a random token can be the true one, or [MASK]
    for kind in ("mask", "random", "kept"):
        share = expected.get(kind, 0.0)
        if kind == "random":
            share *= 1 - 2 * twin
        elif random:
            share += random * twin
        assert near(counts[kind], asked, share) if 0 < share < 1 else counts[kind] == share * asked, kind


def test_every_place_is_drawn_alike_and_random_tokens_are_of_the_whole_vocabulary(tokenizer: WordPiece):
    ids = [tokenizer.cls_id, *(tokenizer.ids[letter] for letter in LETTERS[:20]), tokenizer.sep_id]
    places, tokens = Counter(), Counter()
    for seed in range(3000):
        after, targets = Noise(mask=0.0, random=1.0).apply(ids, tokenizer, Random(seed))
        chosen = [place for place, target in enumerate(targets) if target != NO_TARGET]
        places.update(chosen)
        tokens.update(after[place] for place in chosen)
    assert set(places) == set(range(1, 21)) and all(near(count, 3000, 3 / 20) for count in places.values())
    assert set(tokens) == set(range(len(tokenizer)))


def test_whole_words_are_masked_together_and_no_more_than_wanted(tokenizer: WordPiece):
    word = [tokenizer.ids["a"], tokenizer.ids["##b"], tokenizer.ids["##c"]]
    ids = [tokenizer.cls_id, *word * 10, *[tokenizer.ids["x"]] * 10, tokenizer.sep_id]
    whole = Noise(whole_words=True)
    words, singles = 0, 0
    for seed in range(200):
        _, targets = whole.apply(ids, tokenizer, Random(seed))
        asked = [target != NO_TARGET for target in targets]
        groups = [asked[1 + 3 * number : 4 + 3 * number] for number in range(10)]
        assert all(len(set(group)) == 1 for group in groups) and 1 <= sum(asked) <= 6
        words, singles = words + sum(group[0] for group in groups), singles + sum(asked[31:41])
    assert words > 150 and singles > 150
    one = [tokenizer.cls_id, *word, tokenizer.sep_id]
    assert sum(target != NO_TARGET for target in whole.apply(one, tokenizer, Random(0))[1]) == 1
    apart = [target for seed in range(50) for target in Noise().apply(ids, tokenizer, Random(seed))[1][1:4]]
    assert len({tuple(each != NO_TARGET for each in apart[i : i + 3]) for i in range(0, 150, 3)}) > 2


# ---------------------------------------------------------------------------------------------------- batches


def data_of(tokenizer: WordPiece, **settings) -> PretrainingData:
    texts = ["ab cd .\nef gh .\nij kl mn .\no p q .", "rs tu .\nvw xy z .\nab cd ef .", "a b c .\nd e f .\ng h i ."] * 4
    return PretrainingData([*sentences_of(texts, tokenizer)], tokenizer, **{"length": 24, "seed": 5, **settings})


def rows_of(loader) -> list[tuple]:
    names = "token_ids", "segment_ids", "targets"
    batches = ([batch[name].tolist() for name in names] for batch in loader)
    return [tuple(map(tuple, row)) for batch in batches for row in zip(*batch, strict=True)]


def test_a_batch_is_padded_and_says_what_is_asked(tokenizer: WordPiece):
    data = data_of(tokenizer)
    (batch, *_) = data.batches(8)
    ids, segments, targets = batch["token_ids"], batch["segment_ids"], batch["targets"]
    assert ids.shape == segments.shape == targets.shape == batch["weights"].shape and ids.shape[1] <= 24
    rows = zip(ids.tolist(), segments.tolist(), targets.tolist(), batch["next"].tolist(), strict=True)
    for (a, b, is_next), (row, segment, target, answer) in zip(data.pairs(0), rows, strict=False):
        whole = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        padding = len(row) - len(whole)
        before = [token if asked == NO_TARGET else asked for token, asked in zip(row, target, strict=True)]
        assert before == whole + [tokenizer.pad_id] * padding
        assert segment == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * padding
        assert set(target[len(whole) - 1 :]) == {NO_TARGET} and answer == (0 if is_next else 1)
    assert batch["weights"].sum().item() == pytest.approx(1.0) and {*batch["next"].tolist()} == {0, 1}
    assert torch.equal(batch["weights"] > 0, targets != NO_TARGET)


def test_without_next_sentences_there_is_one_segment(tokenizer: WordPiece):
    (batch, *_) = data_of(tokenizer, has_next=False).batches(4)
    assert "next" not in batch and not batch["segment_ids"].any()
    assert bool(((batch["token_ids"] == tokenizer.sep_id).sum(1) == 1).all())


def test_dynamic_examples_change_from_pass_to_pass_and_static_ones_do_not(tokenizer: WordPiece):
    for is_dynamic in (True, False):
        data = data_of(tokenizer, is_dynamic=is_dynamic)
        loader = data.training_batches(data.count, 1)
        seen = []
        for epoch in (0, 1):
            loader.batch_sampler.set_epoch(epoch)
            seen.append(Counter(ids for ids, _, _ in rows_of(loader)))
        assert (seen[0] == seen[1]) != is_dynamic
        loader.batch_sampler.set_epoch(0)
        again = Counter(ids for ids, _, _ in rows_of(loader))
        assert again == seen[0]


def test_a_run_that_was_stopped_sees_what_it_would_have_seen(tokenizer: WordPiece):
    whole = data_of(tokenizer).training_batches(3, 4)
    rows = []
    for epoch in range(5):
        whole.batch_sampler.set_epoch(epoch)
        rows += rows_of(whole)
    later = data_of(tokenizer).training_batches(3, 4)
    later.batch_sampler.set_epoch(3)
    assert rows_of(later) == rows[3 * 12 : 4 * 12]
    assert data_of(tokenizer, seed=6).pairs(0) != data_of(tokenizer).pairs(0)


@pytest.mark.parametrize(
    ("texts", "settings", "words"),
    [
        (["a b\nc d", "e"], {"length": 4}, "a row of 4 tokens has no room for text; it needs 5"),
        (["a b\nc d", "e"], {"length": 2, "has_next": False}, "it needs 3"),
        (["a b\nc d"], {}, "of another document, and there is only one"),
        (["a b", "c d", "e f"], {}, "no document of the text has two sentences"),
    ],
)
def test_a_text_or_a_row_that_is_too_small_is_refused(tokenizer: WordPiece, texts: list, settings: dict, words: str):
    refused(words, PretrainingData, [*sentences_of(texts, tokenizer)], tokenizer, **{"length": 24, **settings})
    least = {"length": 5} if settings.get("has_next", True) else {"length": 3, "has_next": False}
    assert PretrainingData([*sentences_of(["a b\nc d", "e"], tokenizer)], tokenizer, **least)[0, 0]["token_ids"]


def test_a_random_piece_that_is_pad_is_no_padding(tokenizer: WordPiece):
    """With `is_real` a model is told so; its own rule would hide it."""
    data = PretrainingData(documents_in(tokenizer), tokenizer, 32, Noise(0.9, 0.0, 1.0), seed=2)
    (batch,) = data.batches(data.count)
    lengths = [len(data[0, place]["token_ids"]) for place in range(data.count)]
    assert batch["is_real"].sum(-1).tolist() == lengths
    assert (batch["token_ids"][batch["is_real"]] == tokenizer.pad_id).any()


def test_every_pass_reaches_the_last_document(tokenizer: WordPiece):
    """Later passes can have more pairs than the first one, by which they are counted."""
    documents = documents_in(tokenizer)
    data = PretrainingData(documents, tokenizer, 16, seed=1)
    longer = [number for number in range(1, 30) if len(data.pairs(number)) > data.count]
    assert longer
    for number in longer:
        seen = [place * len(data.pairs(number)) // data.count for place in range(data.count)]
        assert seen[-1] >= len(data.pairs(number)) - 2 and len({*seen}) == data.count
        assert data[number, data.count - 1]["token_ids"].count(tokenizer.sep_id) <= 3
