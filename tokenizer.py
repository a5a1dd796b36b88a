"""Text to token ids and back, with SentencePiece."""

from __future__ import annotations

import os
from collections.abc import Iterable

from sentencepiece import SentencePieceProcessor

from utils import UserError, find_asset

TOKENIZER_MODEL = "tokenizer.model"
NO_PIECE = -1  # the padding id if every piece of the vocabulary may occur in text; models embed it as id 0


class Tokenizer:
    """A SentencePiece tokenizer with Llama's special ids.

    max_len: the most tokens that `encode` keeps, special tokens not counted; None keeps all.
    tokenizer_model: the `.model` file; by default `tokenizer.model` in the current folder or beside this code.
    Raises `UserError` if the file is missing or is not a SentencePiece model.
    """

    def __init__(self, max_len: int | None = None, tokenizer_model: str | os.PathLike | None = None):
        path = find_asset(tokenizer_model or TOKENIZER_MODEL)
        if path is None:
            raise UserError(f"tokenizer {tokenizer_model or TOKENIZER_MODEL} does not exist; run setup.sh to fetch it")
        self._load(path.read_bytes(), max_len, str(path))

    @classmethod
    def from_bytes(cls, model: bytes, max_len: int | None = None, path: str = "tokenizer") -> Tokenizer:
        """The tokenizer of a SentencePiece model, given as bytes. path: the name of the model in errors."""
        tokenizer = cls.__new__(cls)
        tokenizer._load(model, max_len, path)
        return tokenizer

    def _load(self, model: bytes, max_len: int | None, path: str) -> None:
        try:
            self.sp_model = SentencePieceProcessor(model_proto=model)
            self.n_words: int = self.sp_model.vocab_size() if model else 0  # without a model it would log an error
        except (RuntimeError, OSError, UnicodeDecodeError):  # SentencePiece quotes a damaged piece's bytes
            self.n_words = 0
        if self.n_words == 0:
            raise UserError(f"{path} is not a SentencePiece model, or it is damaged")
        self.model_path = path
        self.max_len = max_len
        self.bos_id: int = self.sp_model.bos_id()
        self.eos_id: int = self.sp_model.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise UserError(f"{path} has no bos or no eos token, so it is not a tokenizer of the Llama kind")
        null = self.sp_model.piece_to_id("<0x00>")  # the byte 0 never occurs in text
        self.pad_id: int = null if self.sp_model.is_byte(null) else NO_PIECE

    def to_bytes(self) -> bytes:
        """The SentencePiece model, which `from_bytes` reads."""
        return self.sp_model.serialized_model_proto()

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        """Token ids of `s`, cut to `max_len`; then bos is put before them and eos after them, if requested."""
        return self._frame(self.sp_model.encode(s), bos, eos)

    def encode_batch(self, texts: list[str], bos: bool, eos: bool) -> list[list[int]]:
        """`encode` of many texts at once."""
        return [self._frame(ids, bos, eos) for ids in self.sp_model.encode(texts)]

    def encode_all(self, text: str) -> list[int]:
        """Token ids of a text, not cut to `max_len`; no special tokens."""
        return self.sp_model.encode(text)

    def encode_next(self, text: str) -> list[int]:
        """The token ids that a space and this text add to those of an earlier text: no piece crosses a space."""
        return self.sp_model.encode(text)  # SentencePiece puts a space before every text

    def piece(self, number: int) -> str:
        """The piece of a token id, for display: the letter \u2581 at its start is the space before a word."""
        return self.sp_model.id_to_piece(number)

    def _frame(self, ids: list[int], bos: bool, eos: bool) -> list[int]:
        return [self.bos_id] * bos + ids[: self.max_len] + [self.eos_id] * eos

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special tokens and ids beyond the vocabulary are left out.

        Raises `UserError` if the bytes of a piece are not UTF-8 text.
        """
        try:
            return self.sp_model.decode([number for number in ids if number < self.n_words])
        except UnicodeDecodeError:
            raise UserError(f"{self.model_path} is damaged: it has pieces that are not UTF-8 text") from None
