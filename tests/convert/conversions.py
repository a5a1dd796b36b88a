"""What the tests of formats share: the program in this process, the bundled model, llama.cpp, comparing weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sentencepiece
import torch
from conftest import SENTENCES
from error_helpers import ROOT
from torch import nn

from convert.__main__ import _convert_language_model, get_args
from convert.vocabulary import Vocabulary, read_vocabulary
from tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

BUNDLED = ROOT / "checkpoints/minllama1M.pt"


def run_convert(*flags: object) -> None:
    """`python -m convert`, in this process."""
    _convert_language_model(get_args(list(map(str, flags))))


def run_module(*flags: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """`python -m convert`, in a process of its own."""
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_module('convert', run_name='__main__')"
    command = [sys.executable, "-c", code, *map(str, flags)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=600)


def vocabulary_in(tokenizer: Path) -> Vocabulary:
    """The vocabulary of a SentencePiece model."""
    return read_vocabulary(Tokenizer(tokenizer_model=tokenizer).sp_model, tokenizer)


def trained_vocabulary(folder: Path, **changes: object) -> Tokenizer:
    """A SentencePiece vocabulary of the tests' sentences: BPE with a piece for each byte, unless `changes` differ."""
    how = dict(model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2, vocab_size=300) | changes
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3), model_prefix=str(folder / "own"), **how
    )
    return Tokenizer(tokenizer_model=folder / "own.model")


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def finish(writer: GGUFWriter) -> None:
    """Write the file of what was added, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_llama_cpp(path: Path, **how: object):
    """llama.cpp's model, with keys and values in float32 as ours are. Where it is absent, the test is skipped."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    float32 = llama_cpp.GGML_TYPE_F32
    return llama_cpp.Llama(str(path), n_threads=1, verbose=False, type_k=float32, type_v=float32, **how)
