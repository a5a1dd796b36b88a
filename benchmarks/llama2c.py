"""llama2.c (github.com/karpathy/llama2.c) as a contender: its program, its answer.

Nothing of it is here; its compiled `run` program is named by `--llama2c`. Its files are those of `convert/llama2c.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import torch

from config import LlamaConfig
from convert.llama2c import content_of, content_of_tokenizer
from utils import UserError, atomic_write

SPECIAL_PIECES = (b"<unk>", b"<s>", b"</s>")
FIRST_BYTE_ID = len(SPECIAL_PIECES)
SPACE_ID = FIRST_BYTE_ID + 256  # llama2.c puts a space before every prompt
LETTERS = (range(0x4E00, 0xA000), range(0xAC00, 0xD7A4), range(0x20000, 0x2A6E0))  # Chinese and Korean characters
BOS_ID, EOS_ID = 1, 2
SPEED = re.compile(r"achieved tok/s: *(\S+)")


def find_program(path: str | os.PathLike) -> Path:
    """The `run` program: `path` itself, or in the folder `path`. Raises `UserError` where it is not."""
    program = Path(path) / "run" if Path(path).is_dir() else Path(path)
    if not program.is_file() or not os.access(program, os.X_OK):
        raise UserError(f"--llama2c {path}: {program} is not a program; compile llama2.c's run.c and name the result")
    return program.resolve()


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

    def __init__(self, program: Path, folder: Path, state: dict[str, torch.Tensor], config: LlamaConfig, threads: int):
        self.program, self.threads = program, threads
        self.model_path, self.tokenizer_path = folder / "model.bin", folder / "tokenizer.bin"
        self.pieces = make_pieces(config.vocab_size)
        self.text = b""
        with atomic_write(self.model_path, "wb") as file:
            file.writelines(content_of(state, config))
        with atomic_write(self.tokenizer_path, "wb") as file:
            file.writelines(content_of_tokenizer(self.pieces, [0.0] * len(self.pieces)))

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
