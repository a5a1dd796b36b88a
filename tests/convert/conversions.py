"""What the tests of formats share: the program in this process, the bundled model, comparing weights."""

from __future__ import annotations

from pathlib import Path

import torch
from error_helpers import ROOT
from torch import nn

from convert.__main__ import _convert_language_model, get_args
from convert.vocabulary import Vocabulary, read_vocabulary
from tokenizer import Tokenizer

BUNDLED = ROOT / "checkpoints/minllama1M.pt"


def run_convert(*flags: object) -> None:
    """`python -m convert`, in this process."""
    _convert_language_model(get_args(list(map(str, flags))))


def vocabulary_in(tokenizer: Path) -> Vocabulary:
    """The vocabulary of a SentencePiece model."""
    return read_vocabulary(Tokenizer(tokenizer_model=tokenizer).sp_model, tokenizer)


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
