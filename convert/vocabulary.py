"""A SentencePiece vocabulary as other programs want it: pieces with scores, or Hugging Face's `tokenizer.json`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from convert.directory import TOKENIZER_CONFIG, TOKENIZER_JSON, TOKENIZER_MODEL
from convert.merges import equal_scores, merges
from tokenizer import Tokenizer
from utils import UserError, join_names, short_repr, warn

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces, SentencePiece's numbers too
SPACE_PIECE = "\u2581"
NEVER_MERGED = -1e11  # the score of a piece that no pair becomes: llama2.c merges to scores above -1e10
CHANGES = {"Precompiled": "rewrites letters", "Replace": "joins runs of spaces"}  # by normalizers of a `tokenizer.json`


class Vocabulary(NamedTuple):
    """Pieces in the order of their ids.

    adds_space: whether a text is read as if a space stood before it. adds_bos: whether bos is put before it.
    added: tokens that are no pieces of the SentencePiece model.
    """

    pieces: list[str]
    scores: list[float]
    types: list[int]
    unk_id: int
    bos_id: int
    eos_id: int
    adds_space: bool
    adds_bos: bool = True
    added: tuple[str, ...] = ()

    def scored(self, of_type: int | None) -> dict[str, float]:
        """The scores of the pieces of one type; None: of every type."""
        every = zip(self.pieces, self.scores, self.types, strict=True)
        return {piece: score for piece, score, type_ in every if of_type in (None, type_)}

    def filled(self, size: int) -> Vocabulary:
        """The same with unused pieces, up to `size`, for the rows of a matrix beyond the last piece."""
        more = range(len(self.pieces), size)
        return self._replace(
            pieces=[*self.pieces, *(f"<unused {token}>" for token in more)],
            scores=[*self.scores, *(NEVER_MERGED for _ in more)],
            types=[*self.types, *(UNUSED for _ in more)],
        )


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a tokenizer of this package.

    Of a GGUF file it is the one that is written there, of a directory that of its SentencePiece model and the added
    tokens. Raises `UserError` for a `tokenizer.json` without such a model beside it, or of another one: it has other
    rules.
    """
    if hasattr(tokenizer, "sp_model"):
        vocabulary = read_vocabulary(tokenizer.sp_model, tokenizer.model_path)
        if changes := " and ".join(dict.fromkeys(CHANGES[step["type"]] for step in _normalizer(tokenizer.to_bytes()))):
            warn(f"{tokenizer.model_path} {changes} before it cuts a text; programs with this format do not")
        return vocabulary
    if tokenizer.vocabulary is not None:
        return tokenizer.vocabulary
    path = tokenizer.model_path
    beside = tokenizer.sentencepiece_file()
    try:
        model = beside and Tokenizer(tokenizer_model=beside).sp_model
    except UserError:  # it is of another kind, as Llama 3's
        model = None
    if model is None:
        need = "which this format is written with; --tokenizer names one"
        raise UserError(f"{path} is no SentencePiece model, {need}")
    plain = read_vocabulary(model, beside)
    count = len(plain.pieces)
    names = [tokenizer.piece_name(id) for id in range(tokenizer.n_words)]
    if names[:count] != plain.pieces or None in names:
        raise UserError(f"{path} has other pieces than {beside.name} beside it; --tokenizer names another")
    if tokenizer.begins not in ([], [tokenizer.bos_id]):
        raise UserError(f"{path} puts other tokens than bos before a text, which this format cannot say")
    types = [CONTROL if tokenizer.is_special(id) else USER_DEFINED for id in range(count, len(names))]
    vocabulary = plain._replace(
        pieces=names,
        scores=[*plain.scores, *(NEVER_MERGED for _ in types)],
        types=[*plain.types, *types],
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        adds_space=tokenizer.piece_name(tokenizer.encode_all("a")[0]).startswith(SPACE_PIECE),
        adds_bos=bool(tokenizer.begins),
        added=tuple(names[count:]),
    )
    if (text := _other_there(tokenizer, vocabulary)) is not None:
        shown = repr(text).replace("  ", " \\x20")  # a message has no two spaces
        warn(f"{path}: {shown}, for example, becomes other tokens there, where texts are cut as by {beside.name}")
    return vocabulary


def _other_there(tokenizer: Any, vocabulary: Vocabulary) -> str | None:
    """A text that programs with this vocabulary alone cut in another way than the tokenizer, if one is found.

    They rewrite no letters, put a space before every part between added tokens, and take none away around these.
    """
    import tokenizers

    there = tokenizers.Tokenizer.from_str(json.dumps(as_json(vocabulary, [])))
    types = zip(vocabulary.pieces, vocabulary.types, strict=True)
    plain = [tokenizers.AddedToken(piece, normalized=False) for piece, type_ in types if type_ == USER_DEFINED]
    there.add_tokens(plain)
    tokens = (vocabulary.pieces[vocabulary.eos_id], *vocabulary.added)
    texts = ("a b", "A  \u00c9\uff21 1", " a", "a ", *(f"a {token}\n{token} b{token}b" for token in tokens))
    others = (text for text in texts if there.encode(text, add_special_tokens=False).ids != tokenizer.encode_all(text))
    return next(others, None)


def read_vocabulary(model: SentencePieceProcessor, path: str | os.PathLike) -> Vocabulary:
    """The vocabulary of a SentencePiece model. Raises `UserError` for one that other programs would read otherwise."""
    pieces, types = pieces_and_types(model, path)
    scores = [model.get_score(token) for token in range(len(pieces))]
    if BYTE not in types:
        raise UserError(f"{path} has no pieces for single bytes, without which other programs load no vocabulary")
    if USER_DEFINED in types:
        never_cut = short_repr(pieces[types.index(USER_DEFINED)])
        raise UserError(f"{path} has pieces that are never cut, as {never_cut}; other programs find them otherwise")
    if not is_bpe(scores, types):
        raise UserError(f"{path} is no BPE model; other programs merge pairs of pieces by their rank alone")
    cut = "".join(model.encode("a b", out_type=str))
    adds_space = cut.startswith(SPACE_PIECE)
    if cut.count(SPACE_PIECE) != 1 + adds_space:  # behind words, or nowhere
        raise UserError(f"{path} does not write the space before a word as {SPACE_PIECE}; other programs do")
    return Vocabulary(pieces, scores, types, model.unk_id(), model.bos_id(), model.eos_id(), adds_space)


def is_bpe(scores: Iterable[float], types: Iterable[int]) -> bool:
    """Whether the scores of the pieces are ranks; those of other SentencePiece models are log-probabilities."""
    return all(score.is_integer() for score, type_ in zip(scores, types, strict=True) if type_ == NORMAL)


def pieces_and_types(model: SentencePieceProcessor, path: str | os.PathLike) -> tuple[list[str], list[int]]:
    """The pieces in the order of their ids, and their types. Raises `UserError` for pieces that are no text."""
    ids = range(model.vocab_size())
    try:
        pieces = [model.id_to_piece(token) for token in ids]
        return pieces, [kind for kind, _ in zip(_types(model.serialized_model_proto()), ids, strict=True)]
    except (ValueError, TypeError, IndexError):  # of bytes that are no text, and of fields that are no pieces
        raise UserError(f"{path} is damaged: it has pieces that are not UTF-8 text") from None


# ------------------------------------------------------------------------------------------------ tokenizer.json


def files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a SentencePiece model in a directory: itself, and the same as a `tokenizer.json`.

    The latter is what transformers reads. Raises `UserError` as `read_vocabulary`.
    """
    vocabulary = read_vocabulary(tokenizer.sp_model, tokenizer.model_path)
    names = {"unk_token": vocabulary.unk_id, "bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        **{name: vocabulary.pieces[number] for name, number in names.items()},
        "clean_up_tokenization_spaces": False,
    }
    content = as_json(vocabulary, _normalizer(tokenizer.to_bytes()))
    if tied := equal_scores(vocabulary.scored(NORMAL), content["model"]["merges"]):
        names = join_names(tied)
        raise UserError(f"{tokenizer.model_path}: the pieces {names} have the same score; a tokenizer.json ranks them")
    described = json.dumps(content, ensure_ascii=False)
    return {
        TOKENIZER_MODEL: tokenizer.to_bytes(),
        TOKENIZER_JSON: described.encode(),
        TOKENIZER_CONFIG: (json.dumps(settings, indent=2) + "\n").encode(),
    }


def as_json(vocabulary: Vocabulary, normalizers: list[dict], of_type: int | None = NORMAL) -> dict[str, Any]:
    """A `tokenizer.json` that encodes and decodes as the SentencePiece model does. normalizers: come first.

    of_type: of the pieces that pairs are merged to; None: of every type, as in llama.cpp.
    """
    bos, types = vocabulary.pieces[vocabulary.bos_id], vocabulary.types

    def framed(text: str, segment: int) -> list[dict]:
        return [{"SpecialToken": {"id": bos, "type_id": segment}}, {"Sequence": {"id": text, "type_id": segment}}]

    with_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_PIECE}
    prepended = [{"type": "Prepend", "prepend": SPACE_PIECE}] if vocabulary.adds_space else []
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if vocabulary.adds_space else []
    without = {"type": "Replace", "pattern": {"String": SPACE_PIECE}, "content": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(vocabulary, id) for id, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)],
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, *prepended, with_spaces]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": framed("A", 0),
            "pair": [*framed("A", 0), *framed("B", 1)],
            "special_tokens": {bos: {"id": bos, "ids": [vocabulary.bos_id], "tokens": [bos]}},
        },
        "decoder": {"type": "Sequence", "decoders": [without, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.pieces[vocabulary.unk_id],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: token for token, piece in enumerate(vocabulary.pieces)},
            "merges": [list(pair) for pair in merges(vocabulary.scored(of_type))],
        },
    }


def _added(vocabulary: Vocabulary, token: int) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": vocabulary.pieces[token], **plain, "special": True}


def reserved_tokens(pieces: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens that a text holds as a whole, as tokenizer.json describes them."""
    return [
        {"content": piece, "special": type_ == CONTROL, "normalized": False}
        for piece, type_ in zip(pieces, types, strict=True)
        if type_ in (CONTROL, USER_DEFINED)
    ]


# ----------------------------------------------------------------- pieces and normalizing in SentencePiece's own file

# Numbers of fields in SentencePiece's protocol buffer.
PIECE_FIELD, TYPE_FIELD, NORMALIZER_FIELD, RULES_FIELD, STRIPS_FIELD = 1, 3, 3, 2, 4


def _types(model: bytes) -> list[int]:
    """The type of every piece."""
    return [dict(_fields(piece)).get(TYPE_FIELD, NORMAL) for number, piece in _fields(model) if number == PIECE_FIELD]


def rewriting_rules(model: bytes) -> bytes:
    """The table by which letters are rewritten; empty for a model that rewrites none."""
    return _part(_part(model, NORMALIZER_FIELD), RULES_FIELD)


def _part(message: bytes, number: int) -> bytes:
    """The field of this number, else nothing; SentencePiece skips a whole number in its place, too."""
    found = [value for field, value in _fields(message) if field == number and isinstance(value, bytes)]
    return found[-1] if found else b""


def _normalizer(model: bytes) -> list[dict]:
    """The normalizers of a `tokenizer.json`, without those that mark spaces: changes of a text before it is cut."""
    spec = dict(_fields(_part(model, NORMALIZER_FIELD)))
    found = []
    if rules := rewriting_rules(model):
        found.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(rules).decode()})
    if spec.get(STRIPS_FIELD, 1):  # true by default
        # "Strip" would take away line breaks, too.
        found.append({"type": "Replace", "pattern": {"Regex": rf"\A +|[ {SPACE_PIECE}]+\z"}, "content": ""})
        found.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field of a protocol buffer (protobuf.dev, "Encoding"); SentencePiece has read it."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
            continue
        length = {1: 8, 5: 4}.get(kind) or number()
        yield key >> 3, message[at : at + length]
        at += length
