"""A Llama as a GGUF file, the format of llama.cpp (github.com/ggml-org/ggml, docs/gguf.md), with the package `gguf`.

llama.cpp's architecture "llama" rotates interleaved pairs as rope.py does, so no matrix is permuted (what converters of
Hugging Face's checkpoints do undoes that library's own order). A tied output matrix is left out: a file without one is
read as tied. Vectors are always float32; a matrix whose rows are no whole number of blocks stays float16 in q8_0.
Angles that are scaled as Llama 3's are declared as what each pair's are divided by, in a tensor of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from config import LlamaConfig
from convert.formats import DTYPES, require_causal, whole
from convert.vocabulary import Vocabulary
from utils import UserError

if TYPE_CHECKING:
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter


def renamed(state: dict[str, torch.Tensor], config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """llama.cpp's name of every tensor of a file, and the tensor."""
    from convert.names import all_names
    from rope import frequencies  # after the arguments are read: they import PyTorch

    for names in all_names(config):
        if names.ours != "output.weight" or not config.tied:
            yield names.llama_cpp, state[names.ours]
    if config.rope_scaling is not None and config.rope_scaling[0] == "llama3":
        shape = config.head_dim, config.rope_theta
        yield "rope_freqs.weight", frequencies(*shape) / frequencies(*shape, config.rope_scaling)


def write(
    path: str | os.PathLike,
    state: dict[str, torch.Tensor],
    config: LlamaConfig,
    vocabulary: Vocabulary,
    dtype: str = DTYPES["gguf"][0],
    name: str = "min-llama",
) -> None:
    """Write a model file, whole or not at all. dtype: of the matrices.

    Raises `UserError` for a bidirectional model, a vocabulary of another size, weights that float16 cannot hold, and
    where the package `gguf` is not installed.
    """
    gguf = import_gguf()
    require_causal(config, "a GGUF Llama")
    if (pieces := len(vocabulary.pieces)) != config.vocab_size:
        raise UserError(f"the tokenizer has {pieces} pieces and the model's vocabulary {config.vocab_size}")
    with whole(path) as temporary, closing(gguf.GGUFWriter(temporary, "llama")) as writer:
        _describe(writer, config, dtype, name)
        _describe_vocabulary(writer, vocabulary)
        for tensor_name, tensor in renamed(state, config):
            array, kind = _encoded(tensor_name, tensor, dtype)
            writer.add_tensor(tensor_name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def import_gguf() -> ModuleType:
    """The package `gguf`. Raises `UserError` where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError('a GGUF file needs the package gguf: pip install "gguf>=0.10"') from None
    return gguf


def _describe(writer: GGUFWriter, config: LlamaConfig, dtype: str, name: str) -> None:
    gguf = import_gguf()
    kinds = gguf.LlamaFileType
    described = {
        "name": name,
        "file_type": {"f32": kinds.ALL_F32, "f16": kinds.MOSTLY_F16, "q8_0": kinds.MOSTLY_Q8_0}[dtype],
        "quantization_version": gguf.GGML_QUANT_VERSION,
        "context_length": config.max_seq_len,
        "embedding_length": config.dim,
        "block_count": config.n_layers,
        "feed_forward_length": config.hidden_dim,
        "head_count": config.n_heads,
        "head_count_kv": config.n_kv_heads,
        "layer_norm_rms_eps": config.layer_norm_eps,
        "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_theta,
    }
    if config.rope_scaling is not None and config.rope_scaling[0] == "linear":
        described |= {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": config.rope_scaling[1]}
    _add(writer, described | {"vocab_size": config.vocab_size})


def _describe_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    described = {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_list": vocabulary.pieces,
        "token_scores": vocabulary.scores,
        "token_types": vocabulary.types,
        "unk_token_id": vocabulary.unk_id,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": False,
        "add_space_prefix": vocabulary.adds_space,
    }
    _add(writer, described)


def _add(writer: GGUFWriter, described: dict[str, Any]) -> None:
    """Add each entry with the writer's method of that name: `add_block_count` for "block_count"."""
    for name, value in described.items():
        getattr(writer, f"add_{name}")(value)


def _encoded(name: str, tensor: torch.Tensor, dtype: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    """The numbers in the file, and their declared type."""
    gguf = import_gguf()
    kinds = gguf.GGMLQuantizationType
    array = tensor.detach().float().contiguous().numpy()
    if dtype == "f32" or array.ndim == 1:
        return array, kinds.F32
    in_blocks = dtype == "q8_0" and array.shape[-1] % gguf.GGML_QUANT_SIZES[kinds.Q8_0][0] == 0
    largest = float(np.finfo(np.float16).max) * (127 if in_blocks else 1)  # a block's scale is a float16
    if np.abs(array).max() > largest:
        raise UserError(f"{name} has numbers that {'q8_0' if in_blocks else 'float16'} cannot hold; --dtype f32 does")
    return (gguf.quants.quantize(array, kinds.Q8_0), kinds.Q8_0) if in_blocks else (array.astype(np.float16), kinds.F16)
