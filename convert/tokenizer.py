"""`tokenizer.json` as a tokenizer of the models here, through the library `tokenizers`.

It encodes as transformers does with the same files: what is a special token's text in a sentence becomes that token. So
no piece of its vocabulary is free to mean padding, which is `NO_PIECE` instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from convert.directory import CONFIG, TOKENIZER_CONFIG, TOKENIZER_JSON, TOKENIZER_MODEL
from convert.tokenizer_files import parsed, read
from convert.tokenizer_limits import require_bounded
from engine.programs import is_gguf
from tokenizer import NO_PIECE
from utils import UserError, short_repr, warn

if TYPE_CHECKING:
    from convert.vocabulary import Vocabulary

SPECIAL = ("bos_token", "eos_token")


class JsonTokenizer:
    """The interface of `tokenizer.Tokenizer`. max_len: the most tokens that `encode` keeps, special ones not counted.

    `bos` stands before a text where Hugging Face's tokenizer puts it there, and before a text of no tokens, which a
    model could not read. A vocabulary with one of bos and eos alone uses it as both.
    vocabulary: that of SentencePiece in a GGUF file, else None.
    """

    vocabulary: Vocabulary | None = None

    def __init__(self, content: str, special: dict[str, Any], max_len: int | None = None, path: str = TOKENIZER_JSON):
        self.content, self.special, self.max_len, self.model_path = content, special, max_len, path
        library, file = _library(path), parsed(content, path)
        require_bounded(file, path)
        with self._naming_the_file("it is not a tokenizer, or it is damaged"):
            self.tokenizer = library.Tokenizer.from_str(content)
            self.tokenizer.add_tokens([library.AddedToken(**token) for token in special.get("added_tokens", ())])
            self.tokenizer.encode_special_tokens = bool(special.get("split_special_tokens"))
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            ids = set(self.tokenizer.get_vocab(with_added_tokens=True).values())
        self.n_words = max(ids, default=-1) + 1
        null = self.tokenizer.token_to_id("<0x00>") if special.get("pads_with_byte_0") else None
        self.pad_id = NO_PIECE if null is None or not file["model"].get("byte_fallback") else null
        bos, eos = (self._id_of(special.get(name)) for name in SPECIAL)
        if bos is None and eos is None:
            raise UserError(f"{path}: neither {TOKENIZER_CONFIG} nor {CONFIG} beside it names a bos or an eos token")
        self.bos_id, self.eos_id = (eos if bos is None else bos), (bos if eos is None else eos)
        self.begins = self._beginning(special.get("add_bos_token"))

    @classmethod
    def from_file(cls, path: str | os.PathLike, max_len: int | None = None) -> JsonTokenizer:
        """The tokenizer of a file and of the files beside it, see `tokenizer_files`. Raises `UserError`."""
        content, special, numbered = read(path)
        made = cls(content, special, max_len, str(path))
        for id, token in numbered.items():
            if (here := made.tokenizer.token_to_id(token)) != id:
                warn(f"{path}: the token {short_repr(token)} is {here}, as in transformers 5, and not {id}")
                break
        return made

    @classmethod
    def from_bytes(cls, saved: bytes, max_len: int | None = None, path: str = TOKENIZER_JSON) -> JsonTokenizer:
        """The inverse of `to_bytes`. path: its name in errors."""
        try:
            content = json.loads(saved)
            return cls(content["tokenizer"], dict(content["special"]), max_len, path)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: its tokenizer is damaged") from None

    def to_bytes(self) -> bytes:
        return json.dumps({"tokenizer": self.content, "special": self.special}).encode()

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        """Token ids of `s`, cut to `max_len`, then framed by the special tokens asked for."""
        return self._frame(self.encode_all(s), bos, eos)

    def encode_batch(self, texts: list[str], bos: bool, eos: bool) -> list[list[int]]:
        """`encode` of many texts at once."""
        with self._naming_the_file("it cannot encode every text"):
            encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [self._frame(each.ids, bos, eos) for each in encoded]

    def encode_all(self, text: str) -> list[int]:
        """Token ids of a text, of any length; of special tokens those alone that the text spells out."""
        with self._naming_the_file("it cannot encode every text"):
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_next(self, text: str) -> list[int]:
        """The ids that a space and a text add to those of a text before them, if no piece crosses that space."""
        before, both = self.encode_all("a"), self.encode_all(f"a {text}")
        return both[len(before) :] if both[: len(before)] == before else self.encode_all(f" {text}")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special tokens and ids beyond the vocabulary become nothing."""
        with self._naming_the_file("it cannot decode every token"):
            return self.tokenizer.decode([number for number in ids if number < self.n_words], skip_special_tokens=True)

    def piece(self, number: int) -> str:
        """A token for display, with SentencePiece's \u2581 for a space; bytes that are no text keep their name."""
        name = self.piece_name(number)
        if name is None or "\u2581" in name or (name.startswith("<") and name.endswith(">")):
            return str(number) if name is None else name
        with self._naming_the_file("it cannot decode every token"):
            text = self.tokenizer.decode([number], skip_special_tokens=False)
        return text.replace(" ", "\u2581") if text and "\ufffd" not in text else name

    def files(self) -> dict[str, bytes]:
        """The files of the tokenizer in a directory: content by name."""
        ids = {name: getattr(self, name.removesuffix("_token") + "_id") for name in SPECIAL}
        special = {name: self.piece_name(id) for name, id in ids.items() if self.is_added(id)}
        if "split_special_tokens" in self.special:
            special["split_special_tokens"] = self.special["split_special_tokens"]
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False}
        content = self.content
        if self.special.get("added_tokens") or "add_bos_token" in self.special:
            file = json.loads(self.tokenizer.to_str())
            if "add_bos_token" in self.special:
                file["post_processor"] = template([self.piece_name(id) for id in self.begins], self.begins)
            content = json.dumps(file, ensure_ascii=False)
        found = {
            TOKENIZER_JSON: content.encode(),
            TOKENIZER_CONFIG: (json.dumps(settings, indent=2) + "\n").encode(),
        }
        beside = self.sentencepiece_file()
        return found | ({TOKENIZER_MODEL: beside.read_bytes()} if beside else {})

    def sentencepiece_file(self) -> Path | None:
        """The SentencePiece model of the same directory; None if there is none. A GGUF file stands for itself."""
        beside = Path(self.model_path).with_name(TOKENIZER_MODEL)
        return beside if beside.is_file() and not is_gguf(self.model_path) else None

    def _beginning(self, adds_bos: Any) -> list[int]:
        """The ids that are put before a text: bos, or what stands there by the template of the file."""
        if isinstance(adds_bos, bool):
            return [self.bos_id] * adds_bos
        with self._naming_the_file("it cannot encode every text"):
            framed = self.tokenizer.encode("a")
        of_text = [place for place, part in enumerate(framed.sequence_ids) if part is not None] or [len(framed.ids)]
        if after := framed.ids[of_text[-1] + 1 :]:
            warn(f"{self.model_path} puts {short_repr(self.piece_name(after[0]))} after a text, which is left out here")
        return framed.ids[: of_text[0]]

    def _frame(self, ids: list[int], bos: bool, eos: bool) -> list[int]:
        ids = ids[: self.max_len]
        return ((self.begins or [self.bos_id] * (not ids)) if bos else []) + ids + [self.eos_id] * eos

    def piece_name(self, number: int) -> str | None:
        """A token as the file names it; None for an id without one."""
        return self.tokenizer.id_to_token(number)

    def is_added(self, number: int) -> bool:
        """Whether a text's letters become this token as a whole, and not piece by piece."""
        return number in self.tokenizer.get_added_tokens_decoder()

    def is_special(self, number: int) -> bool:
        """Whether a token was added as a special one, which no text shows."""
        found = self.tokenizer.get_added_tokens_decoder().get(number)
        return found is not None and found.special

    def _id_of(self, token: Any) -> int | None:
        """The id of a special token, or None. token: its text, an object that has the text, or its id."""
        token = token.get("content") if isinstance(token, dict) else token
        number = self.tokenizer.token_to_id(token) if isinstance(token, str) else token
        return number if type(number) is int and 0 <= number < self.n_words else None

    @contextmanager
    def _naming_the_file(self, reason: str) -> Iterator[None]:
        """Turns the library's errors into `UserError`. Damage makes its Rust code panic, which is no `Exception`."""
        try:
            with _silent():
                yield
        except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
            raise
        except BaseException:
            raise UserError(f"cannot use {self.model_path}: {reason}") from None


def template(tokens: list[str], ids: list[int]) -> dict[str, Any]:
    """The post-processor that puts tokens before every text."""
    special = {token: {"id": token, "ids": [id], "tokens": [token]} for token, id in zip(tokens, ids, strict=True)}
    before = [[{"SpecialToken": {"id": token, "type_id": segment}} for token in tokens] for segment in (0, 1)]
    a, b = ([*before[segment], {"Sequence": {"id": "AB"[segment], "type_id": segment}}] for segment in (0, 1))
    return {"type": "TemplateProcessing", "single": a, "pair": a + b, "special_tokens": special}


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing is written to standard error: where Rust code panics, it first prints a trace."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _library(path: str) -> ModuleType:
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{path} needs the package tokenizers: pip install tokenizers") from None
    return tokenizers
