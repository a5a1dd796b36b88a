"""llama.cpp (github.com/ggml-org/llama.cpp) as a contender, through llama-cpp-python, which is imported when needed."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch

from benchmarks.llama2c import FIRST_BYTE_ID, SPACE_ID, make_pieces
from config import LlamaConfig
from convert import gguf


def made_up_vocabulary(size: int) -> gguf.Vocabulary:
    """Pieces for a model of random weights, which speaks no language: those that llama2.c is given."""
    pieces = [piece.decode().replace(" ", "\u2581") for piece in make_pieces(size)]
    types = [gguf.UNKNOWN, gguf.CONTROL, gguf.CONTROL, *[gguf.BYTE] * (SPACE_ID - FIRST_BYTE_ID)]
    types += [gguf.NORMAL] * (size - len(types))
    return gguf.Vocabulary(pieces, [0.0] * size, types, unk_id=0, bos_id=1, eos_id=2, adds_space=True)


class LlamaCpp:
    """llama.cpp with the model in a file of `dtype`. Keys and values are float32, as ours."""

    def __init__(self, folder: Path, state: dict[str, torch.Tensor], config: LlamaConfig, threads: int, dtype: str):
        import llama_cpp

        path = folder / f"{dtype}.gguf"
        gguf.write(path, state, config, made_up_vocabulary(config.vocab_size), dtype)
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=config.max_seq_len,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            verbose=False,
        )

    def generate(self, prompt: torch.Tensor, new: int) -> torch.Tensor:
        """The most likely continuation; no token ends it. prompt: 1 s -> 1 (s + new)"""
        self.model.reset()  # or the prompt of the round before would be taken for read
        continued = islice(self.model.generate(prompt[0].tolist(), temp=0.0), new)
        return torch.cat((prompt, torch.tensor([list(continued)])), dim=1)
