"""llama2.c (github.com/karpathy/llama2.c) as a contender: its file formats, its program, its answer.

Nothing of it is here; its compiled `run` program is named by `--llama2c`. The formats are those that its `run.c` reads:
- a model file ("version 0") is seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len)
  and float32 matrices in the order of `weights_in_order`;
- a tokenizer file is an int32, the longest piece's length, and for every id a float32 score, an int32 length and the
  piece's bytes.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import torch

from config import LlamaConfig
from rope import rope_table
from utils import UserError, atomic_write

SPECIAL_PIECES = (b"<unk>", b"<s>", b"</s>")
FIRST_BYTE_ID = len(SPECIAL_PIECES)
SPACE_ID = FIRST_BYTE_ID + 256  # llama2.c puts a space before every prompt
LETTERS = (range(0x4E00, 0xA000), range(0xAC00, 0xD7A4), range(0x20000, 0x2A6E0))  # Chinese and Korean characters
BOS_ID = 1
SPEED = re.compile(r"achieved tok/s: *(\S+)")


def find_program(path: str | os.PathLike) -> Path:
    """The `run` program: `path` itself, or in the folder `path`. Raises `UserError` where it is not."""
    program = Path(path) / "run" if Path(path).is_dir() else Path(path)
    if not program.is_file() or not os.access(program, os.X_OK):
        raise UserError(f"--llama2c {path}: {program} is not a program; compile llama2.c's run.c and name the result")
    return program.resolve()


def weights_in_order(state: dict[str, torch.Tensor], config: LlamaConfig) -> Iterator[torch.Tensor]:
    """All tensors of a model file: one kind of matrix after another, each over all layers. The output is tied."""
    yield state["tok_embeddings.weight"]
    names = ("attention_norm", "attention.compute_query", "attention.compute_key", "attention.compute_value")
    names += ("attention.compute_output", "ffn_norm", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    for name in names:
        yield from (state[f"layers.{layer}.{name}.weight"] for layer in range(config.n_layers))
    yield state["norm.weight"]
    yield from rope_table(config.head_dim, config.max_seq_len)


def export_model(path: str | os.PathLike, state: dict[str, torch.Tensor], config: LlamaConfig) -> None:
    """Write a model file. Raises `UserError` for a model that llama2.c, whose settings are fixed, cannot compute."""
    if config.rope_theta != 10000.0 or config.layer_norm_eps != 1e-5 or not config.is_causal:
        raise UserError("llama2.c runs causal models with rope_theta=10000 and layer_norm_eps=1e-5 only")
    header = (config.dim, config.hidden_dim, config.n_layers, config.n_heads, config.n_kv_heads)
    with atomic_write(path, "wb") as file:
        file.write(struct.pack("=7i", *header, config.vocab_size, config.max_seq_len))
        for tensor in weights_in_order(state, config):
            file.write(tensor.detach().float().contiguous().numpy().tobytes())


def make_pieces(vocab_size: int) -> list[bytes]:
    """A vocabulary in which a text is one sequence of ids: special ids, bytes, a space, then one letter per id.

    A model of random weights speaks no language, so that any vocabulary fits; with this one no two pieces merge, and
    equal texts mean equal ids (but for unprintable bytes, which llama2.c does not print).
    """
    letters = (chr(code).encode() for code in chain(*LETTERS))
    pieces = [*SPECIAL_PIECES, *(f"<0x{byte:02X}>".encode() for byte in range(256)), b" "]
    pieces += islice(letters, vocab_size - len(pieces))
    if len(pieces) != vocab_size:
        raise ValueError(f"no vocabulary of {vocab_size} pieces")
    return pieces


def export_tokenizer(path: str | os.PathLike, pieces: Sequence[bytes]) -> None:
    with atomic_write(path, "wb") as file:
        file.write(struct.pack("=i", max(map(len, pieces))))
        for piece in pieces:
            file.write(struct.pack("=fi", 0.0, len(piece)) + piece)


def printed_text(ids: Sequence[int], pieces: Sequence[bytes]) -> bytes:
    """What llama2.c prints for `ids`, whose first is bos and is not printed."""
    text = b""
    for before, now in zip(ids, ids[1:], strict=False):
        piece = pieces[now]
        if before == BOS_ID:
            piece = piece.removeprefix(b" ")
        if FIRST_BYTE_ID <= now < SPACE_ID:
            byte = now - FIRST_BYTE_ID
            piece = bytes([byte]) if 0x20 <= byte < 0x7F or byte in b"\t\n\v\f\r" else b""
        text += piece
    return text


class Llama2C:
    """The program with a model exported for it into `folder`."""

    def __init__(
        self, program: Path, folder: Path, state: dict[str, torch.Tensor], config: LlamaConfig, threads: int
    ):
        self.program, self.threads = program, threads
        self.model_path, self.tokenizer_path = folder / "model.bin", folder / "tokenizer.bin"
        self.pieces = make_pieces(config.vocab_size)
        self.text = b""
        export_model(self.model_path, state, config)
        export_tokenizer(self.tokenizer_path, self.pieces)

    def generate(self, prompt: Sequence[int], new: int) -> float:
        """Continue `prompt` by `new` tokens at temperature 0; returns the seconds that it says a token took.

        prompt: ids, bos and the space first. Its clock runs from after the first position to the end, counts the other
        positions of the prompt as tokens, and has milliseconds: a run that took less counts as one. Keeps `text`.
        Raises `UserError` if the program fails.
        """
        positions = len(prompt) + new - 1
        prompt_text = b"".join(self.pieces[token] for token in prompt[2:])
        command = [self.program, self.model_path, "-z", self.tokenizer_path, "-t", "0", "-n", str(positions)]
        env = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        done = subprocess.run([*command, "-i", prompt_text], capture_output=True, env=env)
        speed = SPEED.search(done.stderr.decode(errors="replace"))
        if done.returncode != 0 or speed is None:
            raise UserError(f"--llama2c: {self.program} failed: {done.stderr.decode(errors='replace')[-200:]}")
        self.text = done.stdout.removesuffix(b"\n")
        return max(1.0 / float(speed[1]), 0.001 / positions)

    def compare(self, ids: Sequence[int]) -> str:
        """Whether the text of the last run is that of `ids`, in words. The program stops before a bos token."""
        stopped = list(ids).index(BOS_ID, 1) if BOS_ID in ids[1:] else len(ids)
        expected = printed_text(ids[:stopped], self.pieces)
        if self.text == expected:
            return "identical text" if stopped == len(ids) else f"identical text up to bos, position {stopped}"
        same = len(os.path.commonprefix([self.text.decode(errors="replace"), expected.decode(errors="replace")]))
        return f"DIFFERENT text after {same} characters"
