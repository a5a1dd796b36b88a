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
from typing import Any

from convert.directory import CONFIG, TOKENIZER_CONFIG, TOKENIZER_JSON, read_settings, require_file
from tokenizer import NO_PIECE
from utils import UserError

MOST_JSON_BYTES = 2**27  # of a file; the largest known ones have 35 MB
# A special token is named by its text in `tokenizer_config.json`, by its id in `config.json`.
ID_SETTINGS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}


class JsonTokenizer:
    """The interface of `tokenizer.Tokenizer`. max_len: the most tokens that `encode` keeps, special ones not counted.

    `bos` stands before a text where Hugging Face's tokenizer puts it there, and before a text of no tokens, which a
    model could not read. A vocabulary with one of bos and eos alone uses it as both.
    """

    pad_id = NO_PIECE

    def __init__(self, content: str, special: dict[str, Any], max_len: int | None = None, path: str = TOKENIZER_JSON):
        self.content, self.special, self.max_len, self.model_path = content, special, max_len, path
        with self._naming_the_file("it is not a tokenizer, or it is damaged"):
            self.tokenizer = _library(path).Tokenizer.from_str(content)
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            ids = set(self.tokenizer.get_vocab(with_added_tokens=True).values())
            begins = self.tokenizer.encode("").ids
        self.n_words = max(ids, default=-1) + 1
        bos, eos = (self._id_of(special.get(name)) for name in ID_SETTINGS)
        if bos is None and eos is None:
            raise UserError(f"{path}: neither {TOKENIZER_CONFIG} nor {CONFIG} beside it names a bos or an eos token")
        self.bos_id, self.eos_id = (eos if bos is None else bos), (bos if eos is None else eos)
        adds_bos = special.get("add_bos_token")
        self.adds_bos = adds_bos if isinstance(adds_bos, bool) else begins[:1] == [self.bos_id]

    @classmethod
    def from_file(cls, path: str | os.PathLike, max_len: int | None = None) -> JsonTokenizer:
        """The tokenizer of a file, with the special tokens that the files beside it name. Raises `UserError`."""
        require_file(Path(path), MOST_JSON_BYTES)
        try:
            content = Path(path).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(f"cannot load {path}: it is not UTF-8 text") from None
        return cls(content, _special_tokens(Path(path).parent), max_len, str(path))

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
        name = self._token(number)
        if name is None or "\u2581" in name or (name.startswith("<") and name.endswith(">")):
            return str(number) if name is None else name
        with self._naming_the_file("it cannot decode every token"):
            text = self.tokenizer.decode([number], skip_special_tokens=False)
        return text.replace(" ", "\u2581") if text and "\ufffd" not in text else name

    def files(self) -> dict[str, bytes]:
        """The files of the tokenizer in a directory: content by name."""
        special = {name: self._token(getattr(self, name.removesuffix("_token") + "_id")) for name in ID_SETTINGS}
        if "add_bos_token" in self.special:
            special["add_bos_token"] = self.special["add_bos_token"]
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False}
        return {
            TOKENIZER_JSON: self.content.encode(),
            TOKENIZER_CONFIG: (json.dumps(settings, indent=2) + "\n").encode(),
        }

    def _frame(self, ids: list[int], bos: bool, eos: bool) -> list[int]:
        ids = ids[: self.max_len]
        return [self.bos_id] * (bos and (self.adds_bos or not ids)) + ids + [self.eos_id] * eos

    def _token(self, number: int) -> str | None:
        return self.tokenizer.id_to_token(number)

    def _id_of(self, token: Any) -> int | None:
        """The id of a special token, or None. token: its text, an object that has the text, or its id."""
        token = token.get("content") if isinstance(token, dict) else token
        number = self.tokenizer.token_to_id(token) if isinstance(token, str) else token
        return number if type(number) is int and 0 <= number < self.n_words else None

    @contextmanager
    def _naming_the_file(self, reason: str) -> Iterator[None]:
        """Turns the library's errors into `UserError`. Damage makes its Rust code panic, which is no `Exception`."""
        try:
            yield
        except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
            raise
        except BaseException:
            raise UserError(f"cannot use {self.model_path}: {reason}") from None


def _special_tokens(folder: Path) -> dict[str, Any]:
    """From the files beside a tokenizer: texts or ids of bos and eos, and whether bos stands before a text."""
    beside, config = folder / TOKENIZER_CONFIG, folder / CONFIG
    said = read_settings(beside) if os.path.lexists(beside) else {}
    ids = read_settings(config) if os.path.lexists(config) else {}
    found = {name: said.get(name) for name in (*ID_SETTINGS, "add_bos_token")}
    for name, number in ID_SETTINGS.items():
        if found[name] is None:
            listed = ids.get(number)
            found[name] = listed[0] if isinstance(listed, list) and listed else listed
    return {name: value for name, value in found.items() if isinstance(value, (str, int, dict))}


def _library(path: str) -> ModuleType:
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{path} needs the package tokenizers: pip install tokenizers") from None
    return tokenizers
