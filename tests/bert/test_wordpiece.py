"""WordPiece against the tokenizers library, on what people write and on what nobody would."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest
from conftest import asset
from error_helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
from small import PIECES, minilm, write_vocabulary  # noqa: E402
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy  # noqa: E402

from bert.basic import words  # noqa: E402
from bert.categories import CHANGED, plain_then  # noqa: E402
from bert.wordpiece import SPECIAL, WordPiece  # noqa: E402

# Letters of one alphabet and another, marks, white space, controls, punctuation, CJK, what is dropped or taken apart
POOLS = (
    "abcdefghinopstuvyz",
    "ABCXYZÉÅÖÑßİıǅΣσςΑάЖжй",
    " \t\n\r\v\f\x1c\x85\xa0\u2003\u2028\u3000",
    "\0\x01\xad\u200d\ufeff\ufffd",
    ".,!?'-$+<=>^`|~¿«»—…·;„",
    "電影一가각漢\uf900\u3400\U00020000\U0002b830\U0002ceb0",
    "\u0300\u0301\u0327\u0345\u302e\u302f",
    "\U0001d165\U0001d16d\U0001f600\U0001f468",
    "\u166d\u1734\u1885\u2e43\U000111c9\U0001171e\u0897\U00011f5a\U000110cd",
)
PHRASES = (*SPECIAL, *"[MASK mask] [mask] ##ing unaffable don't playing cafés".split(), "a" * 100, "a" * 101)
MISSED = "\U00011938"  # taken apart since Unicode 13, but not by the library


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[WordPiece, object]:
    """Our tokenizer and theirs, of one file."""
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab.txt")
    return WordPiece.from_file(path, request.param), fast(path, request.param)


def fast(path: Path, lower_case: bool) -> transformers.BertTokenizer:
    return transformers.BertTokenizer(vocab=str(path), do_lower_case=lower_case)


def odd_text(rng: random.Random) -> str:
    """A few letters from everywhere, most of them from where something happens to them."""

    def part() -> str:
        kind = rng.random()
        if kind < 0.1:
            return rng.choice(PHRASES)
        if kind < 0.2:
            return chr(rng.choice((rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x110000))))
        return rng.choice(rng.choice(POOLS))

    return "".join(part() for _ in range(rng.randrange(24))).replace(MISSED, "")


def assert_equal(ours: WordPiece, theirs: object, texts: list[str]) -> None:
    encoded = theirs(texts, return_offsets_mapping=True)
    for text, ids, offsets in zip(texts, encoded.input_ids, encoded.offset_mapping, strict=True):
        mine = ours.encode_pair(text)
        assert mine.ids == ids, ascii(text)
        assert mine.offsets == offsets or has_young_mark(text), ascii(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), ascii(text)


def has_young_mark(text: str) -> bool:
    """Marks on one letter are sorted, and which of them take part in that depends on the version of Unicode."""
    return any(unicodedata.combining(char) and ord(char) in plain_then() for char in text)


# ------------------------------------------------------------------------------------ equal to the fast tokenizer


def test_what_comes_out_is_what_the_paper_shows():
    tokenizer = WordPiece(PIECES)
    text = "The film is unaffable, don't play!"
    pieces = [tokenizer.pieces[id] for id in tokenizer.encode(text)]
    assert pieces == "[CLS] the film is un ##aff ##able , don ' t play ! [SEP]".split()
    assert tokenizer.decode(tokenizer.encode(text)) == "the film is unaffable, don ' t play!"


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_texts_equal(pair: tuple, seed: int):
    rng = random.Random(seed)
    assert_equal(*pair, [odd_text(rng) for _ in range(700)])


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def real_pair(request: pytest.FixtureRequest) -> tuple[WordPiece, object]:
    """Of a real vocabulary, whose pieces make a word of most things, so that fewer tokens hide behind [UNK]."""
    path = minilm() / "vocab.txt"
    return WordPiece.from_file(path, request.param), fast(path, request.param)


def assert_fuzzed_equal(pair: tuple, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        assert_equal(*pair, [odd_text(rng) for _ in range(1000)])


@pytest.mark.slow
def test_many_fuzzed_texts_equal(pair: tuple):
    assert_fuzzed_equal(pair, seed=99)


@pytest.mark.slow
def test_many_fuzzed_texts_equal_with_a_real_vocabulary(real_pair: tuple):
    assert_fuzzed_equal(real_pair, seed=7)


@pytest.mark.slow
def test_all_sentences_of_the_assignment_equal_with_a_real_vocabulary(assets: Path, real_pair: tuple):
    lines = sentences(assets)
    assert len(lines) > 13_000
    assert_equal(*real_pair, lines)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=MISSED), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_equals(pair: tuple, text: str):
    assert_equal(*pair, [text])


def same_words(pair: tuple, points: list[int]) -> None:
    """Each character between two letters: what becomes of it. A word for each, so that many go at once."""
    ours, theirs = pair
    backend = theirs.backend_tokenizer
    for start in range(0, len(points), 500):
        text = " ".join(f"a{chr(point)}b" for point in points[start : start + 500])
        expected = [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))]
        found = [word.text for word in words(text, ours.lower_case)]
        assert found == expected, [ascii(pair) for pair in zip(found, expected, strict=False) if len(set(pair)) > 1][:5]


def known(points: range) -> list[int]:
    """Without surrogates, which no text holds, and letters whose lower case this Python has not learned yet."""
    skip = {ord(MISSED), *range(0xD800, 0xE000)}
    skip |= {p for p in points if unicodedata.category(chr(p)) == "Cn"} - plain_then()
    return [point for point in points if point not in skip]


def test_characters_are_dropped_spaced_split_and_stripped_as_there(pair: tuple):
    same_words(pair, [*known(range(0x3100)), *sorted(plain_then()), *map(ord, CHANGED)])


@pytest.mark.slow
def test_all_characters_are_dropped_spaced_split_and_stripped_as_there(pair: tuple):
    same_words(pair, known(range(0x110000)))


def sentences(assets: Path) -> list[str]:
    return [
        line.partition(" ||| ")[2]
        for name in ("sst", "cfimdb")
        for split in ("train", "dev", "test")
        for line in asset(assets, f"data/{name}-{split}.txt").read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.slow
def test_sentences_of_the_assignment_equal(pair: tuple, assets: Path):
    assert_equal(*pair, sentences(assets)[::12])


def test_pairs_equal_however_they_are_cut(pair: tuple):
    ours, theirs = pair
    for a in range(8):
        for b in range(8):
            texts = " ".join("a" * a), " ".join("b" * b)
            for most in (4, 5, 6, 7, 8, 11, 16, None):
                how = dict(truncation=True, max_length=most) if most else {}
                expected = theirs(*texts, return_offsets_mapping=True, **how)
                mine = ours.encode_pair(*texts, max_len=most)
                assert mine == (expected.input_ids, expected.token_type_ids, expected.offset_mapping), (a, b, most)
            assert ours.encode(texts[0], max_len=4) == theirs(texts[0], truncation=True, max_length=4).input_ids


def test_a_limit_without_room_is_refused():
    tokenizer = WordPiece(PIECES)
    assert tokenizer.encode("a b", max_len=2) == [tokenizer.cls_id, tokenizer.sep_id]
    assert len(tokenizer.encode_pair("a b", "c", max_len=3).ids) == 3
    for texts, most in ((("a",), 1), (("a", "b"), 2)):
        with pytest.raises(ValueError, match=f"max_len={most} has no room for {most + 1} special tokens"):
            tokenizer.encode_pair(*texts, max_len=most)


# -------------------------------------------------------------------------------------------------------- offsets


def test_offsets_by_hand():
    tokenizer = WordPiece(PIECES)
    text = "\u200bÉ  un\xadaff?zé\u0301[SEP]影"
    spans = [(tokenizer.pieces[id], text[start:end]) for id, start, end in tokenizer.tokenize(text)]
    assert spans == [
        *(("e", "É"), ("un", "un"), ("##aff", "aff"), ("?", "?"), ("z", "z"), ("##e", "é")),
        *(("[SEP]", "[SEP]"), ("影", "影")),
    ]


# ------------------------------------------------------------------------- what the old, slow tokenizer does otherwise


BY_RULE = [
    ("aΣ", True, ["aσ"], ["aς"]),  # a sigma at the end of a word: Python's lower() knows, letter by letter nobody does
    ("e\u0301", False, ["e\u0301"], ["é"]),  # the slow one composes letters and marks (NFC), cased
    ("a\U0002b830b", True, ["a\U0002b830b"], ["a", "\U0002b830", "b"]),  # CJK extension E begins 256 characters later
    ("a\u0378b", True, ["a\u0378b"], ["ab"]),  # no character at all (Cn) is a control character there
]
BY_AGE = [  # Unicode 8.0 in the fast one, that of Python in the slow one
    ("a\u2e43b", True, ["a\u2e43b"], ["a", "\u2e43", "b"]),  # punctuation that is younger
    ("a\u166db", True, ["a", "\u166d", "b"], ["a\u166db"]),  # a symbol that was punctuation then
    ("a\u1885b", True, ["a\u1885b"], ["ab"]),  # a mark that was a letter then
    ("a\u1734b", True, ["ab"], ["a\u1734b"]),  # a letter that was a mark then
    ("a\u0890b", True, ["a\u0890b"], ["ab"]),  # a control character that is younger
]


@pytest.mark.parametrize(("text", "lower_case", "fast_pieces", "slow_pieces"), BY_RULE + BY_AGE)
def test_where_the_slow_tokenizer_differs(
    tmp_path: Path, text: str, lower_case: bool, fast_pieces: list[str], slow_pieces: list[str]
):
    path = write_vocabulary(tmp_path / "vocab.txt", dict.fromkeys((*SPECIAL, *fast_pieces, *slow_pieces)))
    ours, slow = WordPiece.from_file(path, lower_case), BertTokenizerLegacy(str(path), do_lower_case=lower_case)
    assert [ours.pieces[id] for id in ours.encode(text)[1:-1]] == fast_pieces
    assert fast(path, lower_case).tokenize(text) == fast_pieces
    found = slow.tokenize(text)
    is_of_age = (text, lower_case, fast_pieces, slow_pieces) in BY_AGE
    assert found == slow_pieces or is_of_age and found == fast_pieces  # an older Python may not know the character


# ------------------------------------------------------------------------------------------------ files, and decoding


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "it lacks .PAD., .UNK., .CLS., .SEP., .MASK."),
        ([*SPECIAL[:1], *SPECIAL[2:], "a"], r"it lacks \[UNK\]$"),
        (["x" * 10**6, "y" * 10**6], "it lacks .PAD."),
    ],
)
def test_a_bad_vocabulary_is_one_line(tmp_path: Path, lines: list[str], words: str):
    message = refused(words, WordPiece.from_file, write_vocabulary(tmp_path / "vocab.txt", lines))
    assert str(tmp_path / "vocab.txt") in message and len(message) < 400


@pytest.mark.parametrize(
    ("lines", "ids", "words"),
    [
        ([*SPECIAL, "a", "b", "a"], [7, 6], "1 of 8 lines are never used; line 6, because 'a' stands there again"),
        ([*SPECIAL, "", "a", "b", ""], [6, 7], "2 of 9 lines are never used; line 6, because it is empty"),
        ([*SPECIAL, "a", "b", "x" * 10**6, "x" * 10**6], [5, 6], "line 8, because 'xxx"),
    ],
)
def test_lines_of_a_vocabulary_that_are_never_used_are_said_to_be(
    tmp_path: Path, lines: list[str], ids: list[int], words: str, capsys: pytest.CaptureFixture
):
    path = write_vocabulary(tmp_path / "vocab.txt", lines)
    tokenizer = WordPiece.from_file(path)
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1 and len(printed) < 400
    assert tokenizer.encode("a b")[1:-1] == ids == fast(path, True)("a b").input_ids[1:-1]
    assert len(tokenizer) == len(lines)


def test_a_vocabulary_that_is_no_text_or_not_there(tmp_path: Path):
    refused("does not exist", WordPiece.from_file, tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff\xfe")
    refused("vocab.txt line 2: not UTF-8", WordPiece.from_file, tmp_path / "vocab.txt")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_line_ends_and_spaces_in_pieces(tmp_path: Path, end: str):
    path = tmp_path / "vocab.txt"
    path.write_bytes("\n".join([*SPECIAL, "a ", "\u2028", "\x1d"]).encode() + end.encode())
    tokenizer = WordPiece.from_file(path)
    assert tokenizer.lower_case and WordPiece(PIECES).lower_case  # unless told otherwise
    assert (tokenizer.pieces, len(tokenizer)) == ([*SPECIAL, "a ", "\u2028", "\x1d"], 8)


@pytest.mark.parametrize("ids", [[-1], [0, 10_000]])
def test_an_id_that_is_not_there_is_refused(ids: list[int]):
    with pytest.raises(ValueError, match=f"there is no token {ids[-1]} in a vocabulary of {len(PIECES)}"):
        WordPiece(PIECES).decode(ids)


def test_decoding_any_ids_equals(pair: tuple, tmp_path: Path):
    glued = (".com", "...", "n't", "'s", "'m", "'ve", "'re", "?", "!x", "##.", "'d", ";")
    path = write_vocabulary(tmp_path / "vocab.txt", dict.fromkeys((*PIECES, *glued)))
    ours, theirs, rng = WordPiece.from_file(path), fast(path, True), random.Random(0)
    for _ in range(1500):
        ids = [rng.randrange(len(ours)) for _ in range(rng.randrange(9))]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), [ours.pieces[id] for id in ids]
