"""llama2.c's files (github.com/karpathy/llama2.c), as its `run.c` reads and its `export.py` writes them.

- A model of version 0 is seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len) and
  float32 matrices in the order of `_names`; a vocab_size below zero says that the output matrix is not tied.
- Version 1 has a magic number and a header of 256 bytes, another order, and no tables of angles.
- A tokenizer is an int32, the longest piece's length, and for every id a float32 score, an int32 length and the bytes
  of the piece. Its size is that of the model's vocabulary.

The rest is fixed in `run.c`: causal attention, neighbours rotated with theta 10000, an epsilon of 1e-5, bos 1, and byte
b as the token b + 3. So a model of other settings is refused.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from config import LlamaConfig
from convert.formats import require_causal
from convert.vocabulary import BYTE, SPACE_PIECE, Vocabulary
from utils import UserError, atomic_write, join_names

if TYPE_CHECKING:
    import torch

    from llama import Llama

SHAPE_NUMBERS = struct.Struct("<7i")
MAGIC, HEADER_BYTES = struct.pack("<I", 0x616B3432), 256  # of versions 1 and later
FIXED_THETA, FIXED_EPSILON, FIXED_BOS, FIRST_BYTE = 10000.0, 1e-5, 1, 3
ANGLES = "a table of angles"  # in a file of version 0; no program reads it
MOST_POSITIONS = 2**20  # of a file that is written: its table would have gigabytes
TOKENIZER_BIN = "tokenizer.bin"  # the name that run.c reads by default


# ------------------------------------------------------------------------------------------------------ layout


def _names(config: LlamaConfig, version: int) -> Iterator[str]:
    """Our names of the tensors, in the order of a file."""
    attention = [f"attention.compute_{name}" for name in ("query", "key", "value", "output")]
    feed_forward = [f"feed_forward.{name}" for name in ("w1", "w2", "w3")]
    orders = {
        0: ("tok_embeddings", ["attention_norm", *attention, "ffn_norm", *feed_forward], "norm", ANGLES, ANGLES),
        1: (["attention_norm", "ffn_norm"], "norm", "tok_embeddings", [*attention, *feed_forward]),
    }
    for part in orders[version]:
        if isinstance(part, list):  # one kind of tensor after another, each over all layers
            yield from (f"layers.{layer}.{name}.weight" for name in part for layer in range(config.n_layers))
        else:
            yield part if part is ANGLES else f"{part}.weight"
    if not config.tied:
        yield "output.weight"


def _count(config: LlamaConfig, version: int) -> int:
    """How many numbers a file holds. Makes no list of them: a damaged header may name any size."""
    of_keys = config.n_kv_heads * config.head_dim
    layer = 2 * config.dim**2 + 2 * config.dim * of_keys + 3 * config.dim * config.hidden_dim + 2 * config.dim
    matrices = 1 if config.tied else 2
    tables = config.max_seq_len * config.head_dim if version == 0 else 0
    return matrices * config.vocab_size * config.dim + config.n_layers * layer + config.dim + tables


# ----------------------------------------------------------------------------------------------------- reading


class Llama2cHeader(NamedTuple):
    config: LlamaConfig
    version: int
    length: int  # bytes


def load_llama2c(path: str | os.PathLike, attention: str | None = None) -> Llama:
    """The Llama of a `.bin` file, in float32 on the CPU; causal unless `attention` says otherwise.

    Raises `UserError` where the file is missing, of another size than its header says, or of 8-bit numbers.
    """
    import torch

    from engine.weights import blueprint, filled
    from llama import Llama

    try:
        size = Path(path).stat().st_size
        with open(path, "rb") as file:
            config, version, start = read_header(file.read(HEADER_BYTES), attention or "causal")
        if (wanted := start + 4 * _count(config, version)) != size:
            raise ValueError(f"its header describes {wanted} bytes, but it has {size}")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except ValueError as error:
        raise UserError(f"{path} is not a model of llama2.c, or it is damaged: {error}") from None
    numbers = np.memmap(path, dtype="<f4", mode="c", offset=start)
    shapes = {name: tensor.shape for name, tensor in blueprint(config, Llama).state_dict().items()}
    state, at = {}, 0
    for name in _names(config, version):
        shape = (config.max_seq_len, config.head_dim // 2) if name is ANGLES else shapes[name]
        taken = numbers[at : (at := at + math.prod(shape))]
        if name is not ANGLES:
            state[name] = torch.from_numpy(taken).view(*shape)
    if config.tied:
        state["output.weight"] = state["tok_embeddings.weight"]
    return filled(path, config, state)


def read_header(start: bytes, attention: str) -> Llama2cHeader:
    """The header in the first bytes of a file. Raises `ValueError`."""
    if len(start) < SHAPE_NUMBERS.size:
        raise ValueError(f"it has only {len(start)} bytes")
    version, shape, length = 0, SHAPE_NUMBERS.unpack_from(start), SHAPE_NUMBERS.size
    tied = shape[5] > 0
    if start.startswith(MAGIC):
        if len(start) < HEADER_BYTES:
            raise ValueError(f"it has only {len(start)} bytes")
        (version,) = struct.unpack_from("<i", start, 4)
        if version != 1:
            reason = "8-bit numbers" if version == 2 else "numbers"
            raise ValueError(f"it holds {reason} of version {version}; versions 0 and 1 are read here")
        shape, length, tied = SHAPE_NUMBERS.unpack_from(start, 8), HEADER_BYTES, bool(start[8 + SHAPE_NUMBERS.size])
    names = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
    fields = dict(zip(names, shape, strict=True))
    fields["vocab_size"] = abs(fields["vocab_size"])
    config = LlamaConfig(**fields, rope_theta=FIXED_THETA, layer_norm_eps=FIXED_EPSILON, tied=tied, attention=attention)
    return Llama2cHeader(config, version, length)


# ----------------------------------------------------------------------------------------------------- writing


def write(
    path: str | os.PathLike, state: Mapping[str, torch.Tensor], config: LlamaConfig, vocabulary: Vocabulary
) -> None:
    """Write a model and, beside it, its `tokenizer.bin`: both or none.

    Raises `UserError` for a model or a vocabulary that `run.c` would read as another one.
    """
    pieces = pieces_of(vocabulary)
    with atomic_write(Path(path).with_name(TOKENIZER_BIN), "wb") as tokenizer, atomic_write(path, "wb") as model:
        model.writelines(content_of(state, config))
        tokenizer.writelines(content_of_tokenizer(pieces, vocabulary.scores))


def content_of(state: Mapping[str, torch.Tensor], config: LlamaConfig) -> Iterator[bytes]:
    """A model file of version 0, piece by piece. Raises `UserError` for a model that llama2.c cannot compute."""
    from rope import rope_table

    require_causal(config, "a model of llama2.c")
    if (config.rope_theta, config.layer_norm_eps, config.rope_scaling) != (FIXED_THETA, FIXED_EPSILON, None):
        settings = f"rope_theta={config.rope_theta:g}, layer_norm_eps={config.layer_norm_eps:g}"
        settings += "" if config.rope_scaling is None else f", rope_scaling={config.rope_scaling[0]}"
        raise UserError(f"llama2.c computes with rope_theta=10000, layer_norm_eps=1e-05 alone; this has {settings}")
    if config.max_seq_len > MOST_POSITIONS:
        raise UserError(f"llama2c: a file holds the angles of all positions; {config.max_seq_len} are too many")
    shape = (config.dim, config.hidden_dim, config.n_layers, config.n_heads, config.n_kv_heads)
    yield SHAPE_NUMBERS.pack(*shape, config.vocab_size if config.tied else -config.vocab_size, config.max_seq_len)
    tables = iter(rope_table(config.head_dim, config.max_seq_len))
    for name in _names(config, version=0):
        tensor = next(tables) if name is ANGLES else state[name]
        yield tensor.detach().float().contiguous().numpy().astype("<f4", copy=False).tobytes()


def pieces_of(vocabulary: Vocabulary) -> list[bytes]:
    """Every piece as llama2.c stores it. Raises `UserError` if `run.c` would read this vocabulary as another one."""
    bytes_stand = [token for token, kind in enumerate(vocabulary.types) if kind == BYTE]
    if bytes_stand != [*range(FIRST_BYTE, FIRST_BYTE + 256)] or vocabulary.bos_id != FIXED_BOS:
        raise UserError(
            f"llama2.c takes bos for the token {FIXED_BOS} and byte b for the token b + 3; this is another order"
        )
    if not vocabulary.adds_bos:
        raise UserError("llama2c puts bos before every text; this tokenizer does not")
    if vocabulary.added:
        raise UserError(f"llama2c finds no added tokens in a text; this tokenizer has {join_names(vocabulary.added)}")
    if not vocabulary.adds_space or SPACE_PIECE not in vocabulary.pieces:
        raise UserError("llama2.c puts a space before every text; this tokenizer does not")
    pieces = [piece.replace(SPACE_PIECE, " ").encode() for piece in vocabulary.pieces]
    for token in (vocabulary.bos_id, vocabulary.eos_id):  # no text that is typed at a prompt may be these
        pieces[token] = b"\n" + pieces[token] + b"\n"
    return pieces


def content_of_tokenizer(pieces: Sequence[bytes], scores: Sequence[float]) -> Iterator[bytes]:
    yield struct.pack("<i", max(map(len, pieces)))
    for piece, score in zip(pieces, scores, strict=True):
        yield struct.pack("<fi", score, len(piece)) + piece
