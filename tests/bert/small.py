"""Small random models and vocabularies, ours and those of transformers, and the real MiniLM where it is found."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from bert import run
from bert.config import BertConfig
from bert.model import Bert
from bert.package import installed
from bert.save import save_pretrained
from bert.wordpiece import WordPiece
from utils import UserError

WORDS = "the a film is not very good bad un ##aff ##able ##ing ##s play ##ed cafe naive 電 影 don t ' . , ! ? - 2 ##0"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *dict.fromkeys(
        (*WORDS.split(), *LETTERS, *(f"##{letter}" for letter in LETTERS), *LETTERS.upper(), "É", "σ", "##ς")
    ),
]
BERT_SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
DISTILBERT_SIZES = dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64)


def hf_model(name: str, seed: int = 0, **changes) -> nn.Module:
    """A random model of transformers: `hf_model("BertForMaskedLM")`. Its weights are large enough to matter."""
    torch.manual_seed(seed)
    is_distilled = name.startswith("Distil")
    sizes, make = (DISTILBERT_SIZES, "DistilBertConfig") if is_distilled else (BERT_SIZES, "BertConfig")
    common = {"vocab_size": 300, "max_position_embeddings": 64, "attn_implementation": "eager"}
    config = getattr(transformers, make)(**{**common, **sizes, **changes})
    model = getattr(transformers, name)(config)
    shake(model)
    return model.eval()


def shake(model: nn.Module) -> None:
    """Draws all weights anew: matrices wide, biases and LayerNorm away from 0 and 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
            if parameter.requires_grad and ("norm" in name.lower()) and name.endswith("weight"):
                parameter.add_(1.0)


def hf_directory(folder: Path, model: nn.Module) -> Path:
    model.save_pretrained(folder)
    return folder


def our_directory(folder: Path, **shape: int) -> Path:
    """A random encoder without dropout, whose vocabulary can spell everything."""
    torch.manual_seed(3)
    config = BertConfig.from_preset("mini", vocab_size=len(PIECES), dropout=0.0, attention_dropout=0.0, **shape)
    encoder = Bert(config)
    for layer in encoder.layers:  # as wide as those of a model that has learned something
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    torch.nn.init.normal_(encoder.embeddings.tokens.weight)
    save_pretrained(folder, encoder, WordPiece(PIECES))
    return folder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`our_directory`, one for a file of tests."""
    return our_directory(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run `python -m bert.run` in the test's own folder, in this process; returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run_it(*given: object) -> str:
        monkeypatch.setattr(sys, "argv", ["bert.run", *map(str, given)])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run.main()
        return printed.getvalue()

    return run_it


def write_vocabulary(path: Path, pieces: Iterable[str] = PIECES) -> Path:
    path.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return path


def rewrite_config(folder: Path, **settings: object) -> None:
    """Change what `config.json` says; None takes a setting out."""
    path = folder / "config.json"
    known = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({name: value for name, value in known.items() if value is not None}))


@contextlib.contextmanager
def edited_tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of `model.safetensors`; what becomes of them is written back at the end."""
    tensors = tensors_of(folder)
    yield tensors
    save_file(tensors, folder / "model.safetensors")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Copies of them, so that the file may be written anew."""
    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def batch(size: int, length: int, padding: bool = True, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Ids (padded with 0 on the right), segments and the padding mask, b s each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 300, (size, length), generator=generator)
    segments = (torch.arange(length) >= length // 2).long().expand(size, -1).clone()
    mask = torch.ones_like(ids)
    if padding:
        for row in range(size):
            mask[row, max(1, length - 2 * row) :] = 0
    return ids * mask, segments * mask, mask


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2; skips where it is not found."""
    if named := os.environ.get("MINLLAMA_BERT"):
        return Path(named)
    try:
        return installed()
    except UserError as error:
        pytest.skip(f"MINLLAMA_BERT names no folder, and {error}")
