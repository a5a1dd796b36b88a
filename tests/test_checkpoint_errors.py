"""Checkpoints and tokenizers that are damaged, foreign or absent: one line that names the file, status 2."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch
from conftest import SENTENCES, random_llama, save_checkpoint
from error_helpers import generate_flags

import utils
from engine import arguments as engine_files
from engine import runs as saved_runs
from engine import storage
from engine.weights import load_llama_model
from tokenizer import Tokenizer
from utils import UserError

OPTIONS = ["generate", "prompt", "finetune"]


def foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("essay.txt", "not a model")


NOT_CHECKPOINTS = {
    "empty": lambda path, whole: path.write_bytes(b""),
    "web page": lambda path, whole: path.write_bytes(b"<!DOCTYPE html>\n<html><body>404: Not Found</body></html>\n"),
    "text": lambda path, whole: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "first half": lambda path, whole: path.write_bytes(whole[: len(whole) // 2]),
    "first 100 bytes": lambda path, whole: path.write_bytes(whole[:100]),
    "last byte missing": lambda path, whole: path.write_bytes(whole[:-1]),
    "first byte missing": lambda path, whole: path.write_bytes(whole[1:]),
    "another zip": lambda path, whole: foreign_zip(path),
    "list": lambda path, whole: torch.save([1, 2, 3], path),
    "tensor": lambda path, whole: torch.save(torch.zeros(3), path),
    "bare state dict": lambda path, whole: torch.save(random_llama().state_dict(), path),
    "model is a tensor": lambda path, whole: torch.save({"model": torch.zeros(3), "model_args": {}}, path),
    "whole module": lambda path, whole: torch.save(random_llama(), path),
    "TorchScript": lambda path, whole: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("write", NOT_CHECKPOINTS.values(), ids=NOT_CHECKPOINTS)
def test_not_a_checkpoint(
    refused: Callable, tiny_checkpoint: Path, tiny_tokenizer: Path, tmp_path: Path, write: Callable
) -> None:
    path = tmp_path / "model.pt"
    write(path, tiny_checkpoint.read_bytes())
    refused(generate_flags(path, "--tokenizer", tiny_tokenizer), path)


@pytest.mark.parametrize("content", [b"", b"<html></html>", b"plain text\n" * 20], ids=["empty", "web page", "text"])
def test_foreign_files_are_not_called_python_objects(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(UserError, match="not a PyTorch checkpoint"):
        storage.load_tensors(tmp_path / "model.pt")


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_a_compressed_checkpoint_is_named_as_that(tmp_path: Path, tiny_checkpoint: Path, pack: Callable) -> None:
    path = tmp_path / "model.pt.packed"
    path.write_bytes(pack(tiny_checkpoint.read_bytes()))
    name = {gzip.compress: "gzip", lzma.compress: "xz", bz2.compress: "bzip2"}[pack]
    with pytest.raises(UserError, match=f"^{path} is compressed by {name}; unpack it$"):
        storage.load_tensors(path)


BAD_MODEL_ARGS = {
    "unknown key": ({"n_experts": 8}, "n_experts"),
    "word for a number": ({"dim": "32"}, "dim='32'"),
    "fraction": ({"n_layers": 2.0}, "n_layers=2.0"),
    "truth value": ({"n_heads": True}, "n_heads=True"),
    "tensor": ({"dim": torch.ones(1)}, "dim="),
    "negative": ({"vocab_size": -300}, "vocab_size=-300"),
    "zero heads": ({"n_heads": 0}, "n_heads=0"),
    "heads that do not divide": ({"n_heads": 3}, "n_heads=3"),
    "key/value heads that do not divide": ({"n_kv_heads": 3}, "n_kv_heads=3"),
    "dropout 1": ({"dropout": 1.0}, "dropout=1.0"),
    "epsilon not a number": ({"layer_norm_eps": float("nan")}, "layer_norm_eps=nan"),
    "epsilon without end": ({"layer_norm_eps": 10**400}, "layer_norm_eps"),
    "theta without end": ({"rope_theta": 10**400}, "rope_theta"),
    "unknown attention": ({"attention": "diagonal"}, "attention='diagonal'"),
    "attention is a list": ({"attention": ["causal"]}, "attention"),
    "another dim": ({"dim": 64}, "tok_embeddings.weight is [300, 32], not [300, 64]"),
    "another feed-forward": ({"hidden_dim": 128}, "layers.0.feed_forward.w1.weight is [96, 32], not [128, 32]"),
    "one layer more": ({"n_layers": 3}, "missing layers.2.attention.compute_query.weight"),
    "one layer less": ({"n_layers": 1}, "unexpected layers.1.attention.compute_query.weight"),
    "a million million layers": ({"n_layers": 10**12}, "n_layers=1000000000000"),
    "a million million pieces": ({"vocab_size": 10**12}, "vocab_size=1000000000000"),
    "a million million wide": ({"dim": 10**12}, "dim=1000000000000"),
    "a dim beyond floats": ({"dim": 10**400, "hidden_dim": None}, "dim"),
    "a million million positions": ({"max_seq_len": 10**12}, "max_seq_len=1000000000000"),
    "positions beyond 64 bits": ({"max_seq_len": 10**30}, "max_seq_len=1"),
}


def expanded(rows: int) -> torch.Tensor:
    """A matrix that is `rows` high and takes 4 bytes in the file."""
    return torch.zeros(1, 1).expand(rows, 32)


BAD_TENSORS = {  # changes of the state (None: left out), what model_args then declare, what the line says
    "missing": ({"norm.weight": None}, {}, "missing norm.weight"),
    "unexpected": ({"extra.weight": torch.zeros(2)}, {}, "unexpected extra.weight"),
    "not a tensor": ({"norm.weight": [1.0] * 32}, {}, "norm.weight is not"),
    "misshapen": ({"norm.weight": torch.ones(33)}, {}, "norm.weight is [33], not [32]"),
    "two embeddings": ({"output.weight": torch.zeros(300, 32)}, {}, "ties them"),
    "nan in the tied matrix": (
        dict.fromkeys(("tok_embeddings.weight", "output.weight"), torch.full((300, 32), float("nan"))),
        {},
        "not all numbers are finite in tok_embeddings.weight",
    ),
    "sparse": ({"norm.weight": torch.ones(32).to_sparse()}, {}, "norm.weight"),
    "sparse embedding": (
        {f"{name}.weight": torch.ones(300, 32).to_sparse() for name in ("tok_embeddings", "output")},
        {},
        "tok_embeddings.weight",
    ),
    "without data": ({"norm.weight": torch.ones(32, device="meta")}, {}, "norm.weight"),
    "4 bytes for 64 million numbers": (
        dict.fromkeys(("tok_embeddings.weight", "output.weight"), expanded(2_000_000)),
        {"vocab_size": 2_000_000},
        "tok_embeddings.weight",
    ),
}
for dtype in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "int64", "bool", "complex64"):
    if hasattr(torch, dtype):
        bits = torch.zeros(32, dtype=torch.uint8)
        numbers = bits.view(getattr(torch, dtype)) if "float" in dtype else bits.to(getattr(torch, dtype))
        BAD_TENSORS[dtype] = ({"norm.weight": numbers}, {}, "norm.weight is not a floating-point")
for one, other in (("norm.weight", "_orig_mod.norm.weight"), ("a.attention.wq.b", "a.attention.compute_query.b")):
    BAD_TENSORS[f"{one} twice"] = ({one: torch.ones(32), other: torch.ones(32)}, {}, f"{one} and {other}")
MISFITS = BAD_TENSORS | {name: ({}, declared, words) for name, (declared, words) in BAD_MODEL_ARGS.items()}


@pytest.mark.parametrize("changes, declared, words", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_together_is_named(
    refused: Callable, tiny_tokenizer: Path, tmp_path: Path, changes: dict, declared: dict, words: str
) -> None:
    model = random_llama()
    state = {name: tensor for name, tensor in {**model.state_dict(), **changes}.items() if tensor is not None}
    torch.save({"model": state, "model_args": {**vars(model.config), **declared}}, tmp_path / "model.pt")
    refused(generate_flags("model.pt", "--tokenizer", tiny_tokenizer), "model.pt", words)


def test_nested_tensors_are_refused(tmp_path: Path) -> None:
    model = random_llama()
    state = {**model.state_dict(), "norm.weight": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}
    torch.save({"model": state, "model_args": vars(model.config)}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="norm.weight|cannot load"):
        load_llama_model(tmp_path / "x.pt")


def test_no_model_args(refused: Callable, tiny_tokenizer: Path, tmp_path: Path) -> None:
    torch.save({"model": random_llama().state_dict()}, tmp_path / "model.pt")
    refused(generate_flags("model.pt", "--tokenizer", tiny_tokenizer), "model.pt", "model_args")


@pytest.mark.parametrize("option", OPTIONS)
def test_another_vocabulary_names_both_sizes(
    refused: Callable, flags_for: Callable, tiny_tokenizer: Path, tmp_path: Path, option: str
) -> None:
    save_checkpoint(tmp_path / "small.pt", random_llama(vocab_size=280))
    flags = [*flags_for(option), *generate_flags("small.pt", "--tokenizer", tiny_tokenizer)]
    refused(flags, "small.pt", "280", tiny_tokenizer, "300", "--tokenizer")


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.attention_norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("option", OPTIONS)
def test_weights_that_are_not_finite(
    refused: Callable, flags_for: Callable, tiny_tokenizer: Path, tmp_path: Path, option: str, value: float, name: str
) -> None:
    model = random_llama()
    model.get_parameter(name).data.fill_(value)
    save_checkpoint(tmp_path / "broken.pt", model)
    refused([*flags_for(option), *generate_flags("broken.pt", "--tokenizer", tiny_tokenizer)], "finite", name)


# ------------------------------------------------------------------------------------------------------ tokenizer


@pytest.mark.parametrize("content", [b"", b"not a model\n", b"<html></html>" * 500, bytes(range(256)) * 8])
def test_not_a_tokenizer(refused: Callable, tiny_checkpoint: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.model").write_bytes(content)
    refused(generate_flags(tiny_checkpoint, "--tokenizer", "broken.model"), "broken.model", "SentencePiece")


def test_tokenizer_error_with_bytes_that_are_not_text(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """SentencePiece quotes a damaged piece in its error, and those bytes need not be UTF-8."""
    whole = tiny_tokenizer.read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tiny_tokenizer))
    piece, other = processor.id_to_piece(260).encode(), processor.id_to_piece(261).encode()
    assert len(piece) == len(other)
    broken = whole.replace(other, b"\xff" * len(piece), 1).replace(piece, b"\xff" * len(piece), 1)
    (tmp_path / "broken.model").write_bytes(broken)
    with pytest.raises(UserError, match="SentencePiece"):
        Tokenizer(tokenizer_model=tmp_path / "broken.model")


@pytest.mark.parametrize("absent", ["bos_id", "eos_id"])
def test_tokenizer_without_special_tokens(tmp_path: Path, absent: str) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(tmp_path / "foreign"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        **{absent: -1},
    )
    with pytest.raises(UserError, match=f"foreign.model.*{absent[:3]}"):
        Tokenizer(tokenizer_model=tmp_path / "foreign.model")


# ------------------------------------------------------------------------------------- which checkpoint is loaded


@pytest.fixture
def without_course_files(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A repository that holds nothing but a bundled checkpoint (the tiny one)."""
    monkeypatch.setattr(utils, "ROOT", tmp_path)
    monkeypatch.setattr(engine_files, "BUNDLED_CHECKPOINT", str(tiny_checkpoint))


@pytest.mark.usefixtures("without_course_files")
def test_absent_default_checkpoint_is_replaced_with_a_loud_warning(
    call: Callable, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    status, out, err = call("--max_new_tokens", 2)
    assert status == 0, err
    assert "WARNING" in err and "stories42M.pt" in err and str(tiny_checkpoint) in err
    assert len(err.strip().splitlines()) >= 3
    assert f"load model from {tiny_checkpoint}" in out


@pytest.mark.usefixtures("without_course_files")
@pytest.mark.parametrize("name", ["stories110M.pt", "stories42M.pt", "./stories42M.pt", "checkpoints/stories42M.pt"])
def test_absent_named_checkpoint_is_an_error(refused: Callable, name: str) -> None:
    refused(["--pretrained-model-path", name, "--max_new_tokens", 2], "--pretrained-model-path", name, "setup.sh")


@pytest.mark.usefixtures("without_course_files")
def test_no_checkpoint_at_all(refused: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_files, "BUNDLED_CHECKPOINT", "checkpoints/none.pt")
    refused(["--max_new_tokens", 2], "stories42M.pt", "setup.sh")


# ---------------------------------------------------------------------------------------------- saved classifiers


@pytest.mark.parametrize(
    "content",
    [
        {"model": {}},
        {"kind": "fine-tuned classifier"},
        {"model": {3: torch.zeros(1)}},
        {"model": {"classifier_head.weight": torch.zeros(1)}},
        {"model": {"classifier_head.weight": "text"}},
        {"model": [1]},
        [1],
        {},
    ],
)
def test_saved_classifier_of_another_kind(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "saved.pt")
    with pytest.raises(UserError, match="saved.pt"):
        saved_runs.load_classifier(tmp_path / "saved.pt")
