"""A user's mistake: one line on standard error that says what, where and what to do, status 2, no file touched."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch
from conftest import SENTENCES, random_llama, save_checkpoint
from error_helpers import ROOT, check_one_error, load_program, snapshot, stderr_lines

import classifier
import optimizer
import utils
from config import LlamaConfig
from engine import families, finetuning, locks, methods, programs, storage, training
from engine import files as engine_files
from engine import saved as saved_runs
from engine.batches import EncodingRules, LlamaDataset
from engine.data import Example
from engine.programs import run_main
from tokenizer import Tokenizer
from utils import UserError

driver = load_program("run_llama")

has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
CLASSIFY_OUTPUTS = {"prompt": "prompting", "finetune": "finetuning"}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable:
    """Runs the driver's `main` in `tmp_path` as `__main__` would; returns status, standard output and error.

    What libraries warn of goes to standard error too, as it does outside pytest.
    """
    monkeypatch.chdir(tmp_path)

    def run_driver(*argv: object, main: Callable = driver.main) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["run_llama.py", *map(str, argv)])
        capsys.readouterr()
        with warnings.catch_warnings(record=True) as caught:
            status = run_main(main)
        out, err = capsys.readouterr()
        return status, out, err + "".join(f"{w.message}\n" for w in caught if w.category is UserWarning)

    return run_driver


@pytest.fixture
def refused(call: Callable, tmp_path: Path) -> Callable[..., str]:
    """Asserts that the driver refuses the arguments in one line with all of `words`, and leaves the folder alone."""

    def check(argv: list, *words: object) -> str:
        (tmp_path / "cfimdb-dev-prompting-output.txt").write_text("earlier work")
        before = snapshot(tmp_path)
        status, _, err = call(*argv)
        line = check_one_error(status, err, *words)
        assert snapshot(tmp_path) == before
        return line

    return check


def generate_flags(checkpoint: Path, *more: object) -> list:
    return ["--pretrained-model-path", checkpoint, "--max_new_tokens", 3, *more]


def output_flags(option: str, stem: str = "films") -> list[str]:
    kind = CLASSIFY_OUTPUTS[option]
    return ["--dev_out", f"{stem}-dev-{kind}-output.txt", "--test_out", f"{stem}-test-{kind}-output.txt"]


# ------------------------------------------------------------------------------------------ files that are not there

INPUT_FLAGS = ("--train", "--dev", "--test", "--label-names", "--pretrained-model-path", "--tokenizer")


@pytest.mark.parametrize("option", ["prompt", "finetune"])
@pytest.mark.parametrize("flag", INPUT_FLAGS)
def test_missing_input(refused: Callable, classify_flags: Callable, option: str, flag: str) -> None:
    refused([*classify_flags(option), flag, "absent.file"], flag, "absent.file", "does not exist")


@pytest.mark.parametrize("flag", INPUT_FLAGS)
def test_folder_in_place_of_an_input(refused: Callable, classify_flags: Callable, tmp_path: Path, flag: str) -> None:
    (tmp_path / "inputs").mkdir()
    line = refused([*classify_flags("prompt"), flag, "inputs"], flag, "inputs", "folder")
    assert flag == "--pretrained-model-path" or "does not exist" not in line  # a folder without config.json is no model


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
@pytest.mark.parametrize("flag", INPUT_FLAGS)
def test_unreadable_input(
    refused: Callable, classify_flags: Callable, tmp_path_factory: pytest.TempPathFactory, flag: str
) -> None:
    locked = tmp_path_factory.mktemp("locked") / "file"
    locked.write_bytes(b"any")
    locked.chmod(0)
    refused([*classify_flags("prompt"), flag, locked], locked)


@pytest.mark.parametrize("flag", ["--train", "--dev", "--test", "--label-names"])
def test_permission_denied(
    refused: Callable, classify_flags: Callable, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    flags = classify_flags("prompt")
    locked = Path(flags[flags.index(flag) + 1])
    read_bytes = Path.read_bytes

    def deny(path: Path) -> bytes:
        if path == locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", deny)
    refused(flags, locked, "permission denied")


def test_checkpoint_permission_denied(
    refused: Callable, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(storage, "open", deny, raising=False)
    refused(generate_flags(tiny_checkpoint), tiny_checkpoint, "permission denied")


# ----------------------------------------------------------------------------------------------------- data lines

GOOD = b"0 ||| a film\n1 ||| another film\n"
BAD_DATA = {  # content, the line it must name, what it must say
    "no separator": (GOOD + b"1 the film\n", 3, "' ||| '"),
    "separator without spaces": (GOOD + b"1|||the film\n", 3, "' ||| '"),
    "tab": (GOOD + b"1\tthe film\n", 3, "' ||| '"),
    "label is a word": (b"good ||| a film\n" + GOOD, 1, "'good' is not a whole number"),
    "label is a fraction": (GOOD + b"1.0 ||| a film\n", 3, "'1.0' is not a whole number"),
    "label is missing": (GOOD + b" ||| a film\n", 3, "not a whole number"),
    "label of 5000 digits": (GOOD + b"1" * 5000 + b" ||| a film\n", 3, "not a whole number"),
    "sentence is missing": (GOOD + b"1 ||| \n" + GOOD, 3, "sentence is empty"),
    "sentence is blank": (GOOD + b"1 |||  \t \n", 3, "sentence is empty"),
    "blank line": (b"0 ||| a film\n\n1 ||| a film\n", 2, "' ||| '"),
    "blank last line": (GOOD + b"\n", 3, "' ||| '"),
    "only a line end": (b"\n", 1, "' ||| '"),
    "label beyond the mapping": (GOOD + b"2 ||| a film\n", 3, "2 is not from 0 to 1"),
    "huge label": (GOOD + b"9" * 30 + b" ||| a film\n", 3, "from 0 to 1"),
    "label -2": (GOOD + b"-2 ||| a film\n", 3, "-2 is not from 0 to 1"),
    "Latin-1": (GOOD + "1 ||| un café\n".encode("latin-1"), 3, "not UTF-8"),
    "UTF-16": ("0 ||| a film\n".encode("utf-16"), 1, "not UTF-8"),
    "cut in a character": (GOOD + "1 ||| un café".encode()[:-1], 3, "not UTF-8"),
}


@pytest.mark.parametrize("split", ["train", "dev", "test"])
@pytest.mark.parametrize("content, line, words", BAD_DATA.values(), ids=BAD_DATA)
def test_bad_data(
    refused: Callable, classify_flags: Callable, tmp_path: Path, split: str, content: bytes, line: int, words: str
) -> None:
    path = tmp_path / f"{split}.txt"
    path.write_bytes(content)
    refused([*classify_flags("prompt"), f"--{split}", path], f"{path} line {line}:", words)


def test_bad_data_in_finetune(refused: Callable, classify_flags: Callable, tmp_path: Path) -> None:
    (tmp_path / "dev.txt").write_bytes(GOOD + b"1 the film\n")
    refused([*classify_flags("finetune"), "--dev", "dev.txt"], "dev.txt line 3:", "' ||| '")


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"], ids=["nothing", "byte-order mark"])
def test_empty_data(refused: Callable, classify_flags: Callable, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.txt").write_bytes(content)
    refused([*classify_flags("prompt"), "--train", "train.txt"], "train.txt holds no data", "LABEL ||| sentence")


@pytest.mark.parametrize(
    "split, content, line",
    [
        ("test", b"-1 ||| a film\n" * 3, None),  # no gold labels
        ("test", GOOD + b"-1 ||| a film\n", 3),
        ("train", b"-1 ||| a film\n" * 3, 1),
        ("dev", b"-1 ||| a film\n" * 3, 1),
    ],
)
def test_minus_one_is_a_label_in_test_files_without_gold_labels(
    call: Callable, classify_flags: Callable, tmp_path: Path, split: str, content: bytes, line: int | None
) -> None:
    (tmp_path / "unlabelled.txt").write_bytes(content)
    status, out, err = call(*classify_flags("prompt"), f"--{split}", "unlabelled.txt")
    if line is None:
        assert status == 0, err
        assert "load 3 data from unlabelled.txt" in out
    else:
        check_one_error(status, err, f"unlabelled.txt line {line}:", "-1")
        assert sorted(snapshot(tmp_path)) == ["unlabelled.txt"]


def test_a_huge_label_under_the_default_mapping(refused: Callable, classify_flags: Callable, tmp_path: Path) -> None:
    """The number of classes follows the training data there, which must not mean three million classes."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cfimdb-label-mapping.json").write_text('["bad", "good"]')
    (tmp_path / "train.txt").write_bytes(GOOD + b"30000 ||| a film\n")
    flags = [*classify_flags("finetune"), "--train", "train.txt"]
    flags[flags.index("--label-names") + 1] = "data/cfimdb-label-mapping.json"
    refused(flags, "train.txt line 3", "30000")


# -------------------------------------------------------------------------------------------------- label mapping

BAD_MAPPINGS = {
    "not JSON": b"bad, good",
    "empty": b"",
    "cut": b'["bad", "go',
    "object": b'{"0": "bad", "1": "good"}',
    "string": b'"bad"',
    "number": b"3",
    "null": b"null",
    "empty list": b"[]",
    "one name": b'["bad"]',
    "duplicate": b'["bad", "bad"]',
    "number among names": b'["bad", 1]',
    "null among names": b'["bad", null]',
    "list among names": b'["bad", ["good"]]',
    "empty name": b'["bad", ""]',
    "blank name": b'["bad", " "]',
    "not UTF-8": '["café", "good"]'.encode("latin-1"),
    "number of 5000 digits": b"[" + b"1" * 5000 + b"]",
    "a hundred thousand brackets": b"[" * 100_000,
    "lone surrogate": b'["bad", "\\ud800"]',
    "line end in a name": b'["bad", "go\\nod"]',
}


@pytest.mark.parametrize("content", BAD_MAPPINGS.values(), ids=BAD_MAPPINGS)
def test_bad_mapping(refused: Callable, classify_flags: Callable, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "names.json").write_bytes(content)
    refused([*classify_flags("prompt"), "--label-names", "names.json"], "names.json")


# ---------------------------------------------------------------------------------------------------- checkpoints


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


@pytest.mark.parametrize("changes, words", BAD_MODEL_ARGS.values(), ids=BAD_MODEL_ARGS)
def test_bad_model_args(refused: Callable, tiny_tokenizer: Path, tmp_path: Path, changes: dict, words: str) -> None:
    model = random_llama()
    path = save_checkpoint(tmp_path / "model.pt", model, **{**vars(model.config), **changes})
    refused(generate_flags(path, "--tokenizer", tiny_tokenizer), path, words)


def test_no_model_args(refused: Callable, tiny_tokenizer: Path, tmp_path: Path) -> None:
    torch.save({"model": random_llama().state_dict()}, tmp_path / "model.pt")
    refused(generate_flags("model.pt", "--tokenizer", tiny_tokenizer), "model.pt", "model_args")


def expanded(rows: int) -> torch.Tensor:
    """A matrix that is `rows` high and takes 4 bytes in the file."""
    return torch.zeros(1, 1).expand(rows, 32)


BAD_TENSORS = {
    "missing": ({"norm.weight": ...}, {}, "missing norm.weight"),
    "unexpected": ({"extra.weight": torch.zeros(2)}, {}, "unexpected extra.weight"),
    "not a tensor": ({"norm.weight": [1.0] * 32}, {}, "norm.weight is not"),
    "integers": ({"norm.weight": torch.ones(32, dtype=torch.long)}, {}, "norm.weight is not"),
    "misshapen": ({"norm.weight": torch.ones(33)}, {}, "norm.weight is [33], not [32]"),
    "two embeddings": ({"output.weight": torch.zeros(300, 32)}, {}, "differ"),
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


@pytest.mark.parametrize("changes, declared, words", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors(
    refused: Callable, tiny_tokenizer: Path, tmp_path: Path, changes: dict, declared: dict, words: str
) -> None:
    model = random_llama()
    state = {**model.state_dict(), **changes}
    state = {name: tensor for name, tensor in state.items() if tensor is not ...}
    torch.save({"model": state, "model_args": {**vars(model.config), **declared}}, tmp_path / "model.pt")
    refused(generate_flags("model.pt", "--tokenizer", tiny_tokenizer), "model.pt", words)


@pytest.mark.parametrize("option", ["generate", "prompt", "finetune"])
def test_another_vocabulary_names_both_sizes(
    refused: Callable, classify_flags: Callable, tiny_tokenizer: Path, tmp_path: Path, option: str
) -> None:
    save_checkpoint(tmp_path / "small.pt", random_llama(vocab_size=280))
    base = [] if option == "generate" else classify_flags(option)
    flags = [*base, *generate_flags("small.pt", "--tokenizer", tiny_tokenizer)]
    refused(flags, "small.pt", "280", tiny_tokenizer, "300", "--tokenizer")


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.attention_norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("option", ["generate", "prompt", "finetune"])
def test_weights_that_are_not_finite(
    refused: Callable,
    classify_flags: Callable,
    tiny_tokenizer: Path,
    tmp_path: Path,
    option: str,
    value: float,
    name: str,
) -> None:
    model = random_llama()
    with torch.no_grad():
        model.get_parameter(name).fill_(value)
    save_checkpoint(tmp_path / "broken.pt", model)
    base = [] if option == "generate" else classify_flags(option)
    refused([*base, *generate_flags("broken.pt", "--tokenizer", tiny_tokenizer)], "finite", name)


# ------------------------------------------------------------------------------------------------------ tokenizer


@pytest.mark.parametrize("content", [b"", b"not a model\n", b"<html></html>", bytes(range(256)) * 8])
def test_not_a_tokenizer(refused: Callable, tiny_checkpoint: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.model").write_bytes(content)
    refused(generate_flags(tiny_checkpoint, "--tokenizer", "broken.model"), "broken.model", "SentencePiece")


def test_tokenizer_error_with_bytes_that_are_not_text(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """SentencePiece quotes a damaged piece in its error, and those bytes need not be UTF-8."""
    whole = tiny_tokenizer.read_bytes()
    piece = sentencepiece.SentencePieceProcessor(model_file=str(tiny_tokenizer)).id_to_piece(260).encode()
    other = sentencepiece.SentencePieceProcessor(model_file=str(tiny_tokenizer)).id_to_piece(261).encode()
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


# ------------------------------------------------------------------------------------------------- long sentences


@pytest.fixture
def long_dev(tmp_path: Path) -> Path:
    path = tmp_path / "long-dev.txt"
    path.write_text(f"0 ||| {'rain ' * 90}\n1 ||| short\n1 ||| {'storm ' * 90}\n")
    return path


@pytest.mark.parametrize("option", ["prompt", "finetune"])
@pytest.mark.parametrize("attention, what", [("bidirectional", "used whole"), ("causal", "cut")])
def test_long_sentences_warn_once(
    call: Callable, classify_flags: Callable, long_dev: Path, option: str, attention: str, what: str
) -> None:
    flags = [*classify_flags(option), "--dev", long_dev, "--attention", attention, "--epochs", 1]
    suffix_fits = {"--test": long_dev.with_name("short.txt"), "--label-names": long_dev.with_name("names.json")}
    suffix_fits["--test"].write_text("0 ||| a\n1 ||| b\n")
    suffix_fits["--label-names"].write_text('["b", "g"]')
    status, _, err = call(*flags, *(item for pair in suffix_fits.items() for item in pair))
    assert status == 0, err
    found = [line for line in stderr_lines(err) if line.startswith("warning: ")]
    mine = [line for line in found if str(long_dev) in line]
    assert len(mine) == 1
    assert "2 sentences" in mine[0] and "max_seq_len=64" in mine[0] and what in mine[0]


def test_what_happens_to_long_sentences(tiny_tokenizer: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tiny_tokenizer))
    tokenizer = Tokenizer(tokenizer_model=tiny_tokenizer)
    sentence, suffix = "rain " * 89 + "rain", "Is it a or b? It is "
    ids, suffix_ids = processor.encode(sentence), processor.encode(suffix)
    assert len(suffix_ids) < 40 < 64 < len(ids)
    examples = [Example(sentence, 0), Example("a", 1)]
    whole = LlamaDataset(examples, tokenizer, EncodingRules(suffix, 64, is_causal=False))
    assert whole.token_ids[0] == [1, *processor.encode(f"{sentence} {suffix}")]
    cut = LlamaDataset(examples, tokenizer, EncodingRules(suffix, 64, is_causal=True))
    assert cut.token_ids[0] == [1, *ids][: 64 - len(suffix_ids)] + suffix_ids
    assert len(cut.token_ids[0]) == 64
    assert whole.too_long == cut.too_long == 1
    assert whole.sentences == cut.sentences == [f"{sentence} {suffix}", f"a {suffix}"]


def test_prompt_longer_than_the_model(refused: Callable, classify_flags: Callable, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps(["bad" * 30, "good" * 30]))
    flags = [*classify_flags("prompt"), "--attention", "causal", "--label-names", "names.json"]
    refused(flags, "prompt", "max_seq_len=64")


# -------------------------------------------------------------------------------------------------------- devices


@pytest.mark.skipif(has_gpu, reason="there is an accelerator")
@pytest.mark.parametrize("option", ["generate", "prompt", "finetune"])
@pytest.mark.parametrize("flags", [["--use_gpu"], ["--device", "cuda"], ["--device", "mps"]], ids=" ".join)
def test_no_accelerator(
    refused: Callable, classify_flags: Callable, tiny_checkpoint: Path, option: str, flags: list[str]
) -> None:
    base = generate_flags(tiny_checkpoint) if option == "generate" else classify_flags(option)
    refused([*base, *flags], *flags, "CPU")


# ------------------------------------------------------------------------------------------------------ arguments

OUT_OF_RANGE = [
    ("--batch_size", "0"),
    ("--batch_size", "-1"),
    ("--batch_size", str(10**30)),
    ("--epochs", "0"),
    ("--lr", "nan"),
    ("--lr", "-1"),
    ("--lr", "0"),
    ("--lr", "inf"),
    ("--hidden_dropout_prob", "1"),
    ("--hidden_dropout_prob", "nan"),
    ("--seed", "-1"),
    ("--seed", str(2**32)),
    ("--max_sentence_len", "0"),
    ("--max_new_tokens", "0"),
    ("--top_k", "0"),
    ("--top_p", "0"),
    ("--top_p", "nan"),
    ("--top_p", "1.5"),
    ("--epsilon", "1"),
    ("--epsilon", "nan"),
    ("--min_p", "-0.1"),
    ("--min_p", "1.1"),
    ("--min_p", "nan"),
    ("--repetition_penalty", "0"),
    ("--repetition_penalty", "-1"),
    ("--repetition_penalty", "inf"),
    ("--repetition_penalty", "nan"),
    ("--beam", "0"),
    ("--beam", "1001"),
    ("--contrastive", "1.5,5"),
    ("--contrastive", "nan,5"),
    ("--contrastive", "0.6,0"),
]


@pytest.mark.parametrize("flag, value", OUT_OF_RANGE)
def test_value_out_of_range(refused: Callable, classify_flags: Callable, flag: str, value: str) -> None:
    refused([*classify_flags("prompt"), f"{flag}={value}"], flag, "must be")


def test_top_k_beyond_64_bits_keeps_every_token(call: Callable, tiny_checkpoint: Path, tmp_path: Path) -> None:
    texts = []
    for more in ([], ["--top_k", 10**30]):
        status, _, err = call(*generate_flags(tiny_checkpoint, *more))
        assert status == 0, err
        texts.append((tmp_path / "generated-sentence-temp-1.txt").read_bytes())
    assert texts[0] == texts[1]


MALFORMED = {
    "unknown flag": (["--batchsize", "8"], "--batchsize"),
    "abbreviated flag": (["--batch", "8"], "--batch"),
    "abbreviated file": (["--pretrained", "x.pt"], "--pretrained"),
    "stray word": (["finetune"], "finetune"),
    "not a number": (["--epochs", "five"], "--epochs"),
    "fraction": (["--batch_size", "8.5"], "--batch_size"),
    "unknown option": (["--option", "pretrain"], "--option"),
    "unknown device": (["--device", "tpu"], "--device"),
    "value missing": (["--lr"], "--lr"),
    "two hyphens": (["--seed=--"], "--seed"),
    "grouped digits": (["--epochs", "1_0"], "--epochs"),
    "another script's digits": (["--lr", "\u0661"], "--lr"),
    "one of two numbers": (["--contrastive", "0.6"], "--contrastive"),
    "three numbers": (["--contrastive", "0.6,5,1"], "--contrastive"),
    "two fractions": (["--contrastive", "0.6,5.0"], "--contrastive"),
    "a huge number": (["--seed", "9" * 5000], "--seed"),
}


@pytest.mark.parametrize("flags, word", MALFORMED.values(), ids=MALFORMED)
def test_malformed_command_line(refused: Callable, flags: list[str], word: str) -> None:
    assert len(refused(flags, word, "--help")) < 700


@pytest.mark.parametrize("option", ["prompt", "finetune"])
@pytest.mark.parametrize("flag", ["--dev_out", "--test_out"])
@pytest.mark.parametrize("name", ["answers.txt", "films-dev-output.txt", "films-train-prompting-output.txt"])
def test_output_name_for_another_option(
    refused: Callable, classify_flags: Callable, option: str, flag: str, name: str
) -> None:
    ending = f"{flag[2:].removesuffix('_out')}-{CLASSIFY_OUTPUTS[option]}-output.txt"
    refused([*classify_flags(option), flag, name], flag, name, ending)


def test_dev_and_test_output_names_swapped(refused: Callable, classify_flags: Callable) -> None:
    flags = output_flags("prompt")
    refused([*classify_flags("prompt"), "--dev_out", flags[3], "--test_out", flags[1]], "--dev_out")


OUTPUT_FLAGS = {
    "--dev_out": ("prompt", "x-dev-prompting-output.txt"),
    "--test_out": ("finetune", "x-test-finetuning-output.txt"),
    "--generated_sentence_low_temp_out": ("generate", "x.txt"),
    "--generated_sentence_high_temp_out": ("generate", "x.txt"),
}


@pytest.fixture
def flags_for(classify_flags: Callable, tiny_checkpoint: Path) -> Callable[[str], list]:
    return lambda option: generate_flags(tiny_checkpoint) if option == "generate" else classify_flags(option)


@pytest.mark.parametrize("flag", OUTPUT_FLAGS)
def test_output_folder_missing(refused: Callable, flags_for: Callable, flag: str) -> None:
    option, name = OUTPUT_FLAGS[flag]
    refused([*flags_for(option), flag, f"nowhere/{name}"], flag, "nowhere", "create")


@pytest.mark.parametrize("flag", OUTPUT_FLAGS)
def test_output_is_a_folder(refused: Callable, flags_for: Callable, tmp_path: Path, flag: str) -> None:
    option, name = OUTPUT_FLAGS[flag]
    (tmp_path / name).mkdir()
    refused([*flags_for(option), flag, name], flag, name, "folder")


@pytest.mark.parametrize("flag", OUTPUT_FLAGS)
def test_output_is_not_a_plain_file(refused: Callable, flags_for: Callable, tmp_path: Path, flag: str) -> None:
    """Renaming over a pipe or a device would remove it; `/dev/null` is what a person would try."""
    option, name = OUTPUT_FLAGS[flag]
    os.mkfifo(tmp_path / name)
    refused([*flags_for(option), flag, name], flag, name)
    assert (tmp_path / name).is_fifo()


def test_dev_null_is_not_replaced() -> None:
    with pytest.raises(UserError, match="--dev_out /dev/null"):
        programs.check_writable("/dev/null", "--dev_out")


@pytest.mark.parametrize("flag", OUTPUT_FLAGS)
@pytest.mark.parametrize("length", [300, 255])
def test_output_name_too_long(call: Callable, flags_for: Callable, tmp_path: Path, flag: str, length: int) -> None:
    """Found before anything is loaded if the name is too long for a file; used if it is not."""
    option, name = OUTPUT_FLAGS[flag]
    name = "x" * (length - len(name)) + name
    status, out, err = call(*flags_for(option), flag, name, "--epochs", 1)
    if length > 255:
        check_one_error(status, err, flag, "too long")
        assert "load" not in out
        assert snapshot(tmp_path) == {}
    else:
        assert status == 0, err
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize("taken", ["--train", "--dev", "--test", "--label-names", "--pretrained-model-path"])
def test_output_is_an_input(refused: Callable, classify_flags: Callable, tmp_path: Path, taken: str) -> None:
    flags = classify_flags("prompt")
    name = "my-dev-prompting-output.txt"
    shutil.copy(flags[flags.index(taken) + 1], tmp_path / name)
    tokenizer = Path(flags[flags.index("--pretrained-model-path") + 1]).with_suffix(".model")
    refused([*flags, taken, name, "--dev_out", f"./{name}", "--tokenizer", tokenizer], "--dev_out", taken[2:5])


def test_output_is_an_input_through_a_link(
    refused: Callable, classify_flags: Callable, films: dict, tmp_path: Path
) -> None:
    (tmp_path / "a-dev-prompting-output.txt").symlink_to(films["dev"])
    refused([*classify_flags("prompt"), "--dev_out", "a-dev-prompting-output.txt"], "--dev_out", "--dev")


OVERLAPS = {  # the name of a sample, and what has it already
    "the checkpoint": ("--pretrained-model-path", "m-2.pt", "m.pt"),
    "the tokenizer": ("--tokenizer", "k-2.model", "k.model"),
    "the other text": ("--generated_sentence_low_temp_out", "g-2.txt", "g.txt"),
}


@pytest.mark.parametrize("flag, name, out", OVERLAPS.values(), ids=OVERLAPS)
def test_a_sample_is_an_input_or_another_output(
    refused: Callable, tiny_checkpoint: Path, tmp_path: Path, flag: str, name: str, out: str
) -> None:
    flags = {"--pretrained-model-path": tiny_checkpoint, "--tokenizer": tiny_checkpoint.with_suffix(".model")}
    if flag in flags:
        shutil.copy(flags[flag], tmp_path / name)
    flags |= {flag: name, "--num_samples": 2, "--generated_sentence_high_temp_out": out}
    refused([word for pair in flags.items() for word in pair], name, "sample 2")


@pytest.mark.parametrize("ending", [".pt", ".resume", ".lock", "-films-dev.resume"])
def test_data_under_a_name_that_the_run_writes(
    refused: Callable, classify_flags: Callable, films: dict[str, Path], tmp_path: Path, ending: str
) -> None:
    name = f"finetune-5-2e-05{ending}"
    shutil.copy(films["dev"], tmp_path / "films-dev.txt")
    os.link(tmp_path / "films-dev.txt", tmp_path / name)  # the same file under two names is one file, too
    refused([*classify_flags("finetune"), "--train", tmp_path / "films-dev.txt", "--dev", name], name, "also --dev")


def test_both_generated_sentences_in_one_file(refused: Callable, tiny_checkpoint: Path) -> None:
    names = ["--generated_sentence_low_temp_out", "a.txt", "--generated_sentence_high_temp_out", "./a.txt"]
    refused(generate_flags(tiny_checkpoint, *names), names[0], names[2])


def test_prompt_with_bytes_that_are_not_text(refused: Callable, tiny_checkpoint: Path) -> None:
    refused(generate_flags(tiny_checkpoint, "--prompt", "a\udcff"), "--prompt", "UTF-8")


ANSWERED_AT_ONCE = {
    "help": (["--help"], 0),
    "bare finetune": (["--option", "finetune"], 2),
    "bad number": (["--lr", "nan"], 2),
    "missing checkpoint": (["--pretrained-model-path", "absent.pt"], 2),
}


@pytest.mark.parametrize("flags, status", ANSWERED_AT_ONCE.values(), ids=ANSWERED_AT_ONCE)
def test_answered_without_heavy_imports(tmp_path: Path, flags: list[str], status: int) -> None:
    watch = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    code = end.code\n"
        "heavy = sorted({'torch', 'sklearn', 'numpy', 'sentencepiece', 'tqdm'} & set(sys.modules))\n"
        "print('LOADED', heavy, 'STATUS', code)\n"
    )
    command = [sys.executable, "-c", f"import sys; sys.argv = {[str(ROOT / 'run_llama.py'), *flags]!r}\n{watch}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert f"LOADED [] STATUS {status}" in done.stdout, done.stderr
    if status:
        check_one_error(status, done.stderr)
    else:
        assert "--pretrained-model-path" in done.stdout and not done.stderr
    assert snapshot(tmp_path) == {}


def test_bare_finetune_names_the_flag(refused: Callable) -> None:
    refused(["--option", "finetune"], "--dev_out", "cfimdb-dev-prompting-output.txt", "dev-finetuning-output.txt")


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


# ------------------------------------------------------------------------------------------- a loss that diverges


def poison_weights(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    """AdamW that leaves NaN behind at one step, as a diverging run does."""
    step = optimizer.AdamW.step
    done = []

    def poisoned(self: optimizer.AdamW, *args: object, **kwargs: object) -> object:
        result = step(self, *args, **kwargs)
        done.append(1)
        if len(done) == at_step:
            self.param_groups[0]["params"][-1].data.fill_(float("nan"))
        return result

    monkeypatch.setattr(optimizer.AdamW, "step", poisoned)


def test_loss_not_finite_keeps_the_best_epoch(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 sentences in batches of 8: the fourth step is the first of the second epoch."""
    old = output_flags("finetune")[1]
    (tmp_path / old).write_text("earlier work")
    poison_weights(monkeypatch, at_step=4)
    status, out, err = call(*classify_flags("finetune"), "--epochs", 3)
    assert status == 2
    (line,) = [line for line in stderr_lines(err) if line.startswith("error: ")]
    assert line == stderr_lines(err)[-1]
    for words in ("epoch 1, batch 2", "nan", "--lr", "finetune-3-2e-05.pt", "finetune-3-2e-05.resume"):
        assert words in line
    assert "epoch 0:" in out and "epoch 1:" not in out
    own_files = ["finetune-3-2e-05.pt", "finetune-3-2e-05.resume"]
    saved = torch.load(tmp_path / own_files[0], weights_only=True)
    assert saved["epoch"] == 0
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())
    assert (tmp_path / old).read_text() == "earlier work"
    assert sorted(snapshot(tmp_path)) == ["films-dev-finetuning-output.txt", *own_files]


def test_weights_ruined_by_the_last_step_of_an_epoch_are_not_saved(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loss is computed after the last step; predictions made of NaN must not become the best model."""
    poison_weights(monkeypatch, at_step=3)
    status, _, err = call(*classify_flags("finetune"), "--epochs", 1)
    assert status == 2
    assert stderr_lines(err)[-1].startswith("error: ")
    assert "not finite" in err or "nan" in err
    assert snapshot(tmp_path) == {}


# ------------------------------------------------------------------------------------------------------ full disk


def limited(limit: int, script: str, *flags: object, cwd: Path) -> subprocess.CompletedProcess:
    """Run a program that may write no file beyond `limit` bytes, which fails as a full disk does."""
    return subprocess.run(
        [sys.executable, "-B", str(ROOT / script), *map(str, flags)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )


def test_full_disk_while_saving_the_model(tmp_path: Path, classify_flags: Callable) -> None:
    """The zip writer of torch.save fails a second time when it closes; that must not be what a person sees."""
    (tmp_path / output_flags("finetune")[1]).write_text("earlier work")
    before = snapshot(tmp_path)
    done = limited(20_000, "run_llama.py", *classify_flags("finetune"), "--epochs", 1, cwd=tmp_path)
    check_one_error(done.returncode, done.stderr, "finetune-1-2e-05.pt")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("size", [0, 1, 5_000, 50_000, 100_000])
def test_disk_fills_up_at_any_point_of_a_saved_model(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"earlier work")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    content = {"model": random_llama().state_dict()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(OSError) as caught:
            storage.save_tensors(path, content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert snapshot(tmp_path) == {"model.pt": b"earlier work"}


@pytest.mark.parametrize("option", ["generate", "prompt"])
def test_full_disk_while_writing_outputs(
    call: Callable, flags_for: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    flags = flags_for(option)
    name = "generated-sentence-temp-0.txt" if option == "generate" else output_flags("prompt")[1]
    (tmp_path / name).write_text("earlier work")
    before = snapshot(tmp_path)

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    status, _, err = call(*flags)
    check_one_error(status, err, name, "No space left on device", "free some space")
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_standard_output_on_a_full_disk(tmp_path: Path, flags_for: Callable) -> None:
    command = [sys.executable, str(ROOT / "run_llama.py"), *map(str, flags_for("generate"))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    check_one_error(done.returncode, done.stderr, "No space left on device", "standard output")


def test_text_that_standard_output_cannot_encode(tmp_path: Path, flags_for: Callable, run: Callable) -> None:
    done = run(
        "run_llama.py", *flags_for("generate"), "--prompt", "un café", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "generated-sentence-temp-0.txt").read_text(encoding="utf-8").startswith("un café")


# ------------------------------------------------------------------------------------------------------ interrupts


def test_interrupted_training_keeps_what_is_finished(tmp_path: Path, classify_flags: Callable) -> None:
    command = [sys.executable, str(ROOT / "run_llama.py"), *classify_flags("finetune"), "--epochs", "5000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            # a shell that runs the tests in the background has them, and so this process, ignore the signal
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):
        try:
            for line in process.stdout:
                if line.startswith("epoch 1:"):
                    break
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            status = process.wait(timeout=60)
        finally:
            process.kill()
    model, resume = tmp_path / "finetune-5000-2e-05.pt", tmp_path / "finetune-5000-2e-05.resume"
    words = ("interrupted", model.name, resume.name)
    line = check_one_error(status, (tmp_path / "stderr").read_text(), *words, expected=130)
    assert "--resume" in line
    assert sorted(snapshot(tmp_path)) == [model.name, resume.name, "stderr"]
    saved = torch.load(model, weights_only=True)
    history = torch.load(resume, weights_only=True)["history"]
    assert len(history) >= 2
    assert saved["dev_score"] == max(result["dev_score"] for result in history)


def test_interrupted_and_resumed_equals_uninterrupted(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*classify_flags("finetune"), "--epochs", 3, "--lr", 0.01]
    outputs = output_flags("finetune")[1::2]
    print_epoch = finetuning.print_epoch

    def interrupt(result: methods.EpochResult, *what: object) -> None:
        print_epoch(result, *what)
        if result.epoch == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "print_epoch", interrupt)
        status, _, err = call(*flags)
    assert status == 130
    assert stderr_lines(err)[-1].startswith("error: interrupted; the best of 2 finished epochs stays in ")
    status, resumed, _ = call(*flags, "--resume")
    assert status == 0
    files = {name: (tmp_path / name).read_bytes() for name in outputs}
    (tmp_path / "finetune-3-0.01.pt").unlink()
    status, straight, _ = call(*flags)
    assert status == 0
    assert files == {name: (tmp_path / name).read_bytes() for name in outputs}
    results = [[line for line in out.splitlines() if " :: " in line] for out in (resumed, straight)]
    assert results[0] == results[1] and len(results[0]) > 4


@pytest.mark.parametrize("option", ["generate", "prompt"])
def test_interrupt_before_anything_is_written(
    call: Callable, flags_for: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(families, "load_llama", interrupt)
    status, _, err = call(*flags_for(option))
    check_one_error(status, err, "interrupted", expected=130)
    assert snapshot(tmp_path) == {}


def test_interrupt_while_writing(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("earlier work")
    with pytest.raises(KeyboardInterrupt), utils.atomic_write(tmp_path / "out.txt") as file:
        file.write("half")
        raise KeyboardInterrupt
    assert snapshot(tmp_path) == {"out.txt": b"earlier work"}


# ------------------------------------------------------------------------------------- standard streams, and memory

STREAMS = {"no output": ">&-", "no error": "2>&-", "neither": ">&- 2>&-", "a reader that goes": "| head -c 9 >&2"}


@pytest.mark.parametrize(
    ("option", "stream"),
    [("finetune", "neither"), *(("generate", stream) for stream in STREAMS)]
    + [pytest.param("finetune", stream, marks=pytest.mark.slow) for stream in STREAMS if stream != "neither"],
)
def test_work_goes_on_where_nobody_listens(tmp_path: Path, flags_for: Callable, option: str, stream: str) -> None:
    flags = " ".join(f"'{flag}'" for flag in [*flags_for(option), *(["--epochs", 1] if option == "finetune" else [])])
    command = f"set -o pipefail; '{sys.executable}' '{ROOT / 'run_llama.py'}' {flags} {STREAMS[stream]}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Error" not in done.stderr and "error" not in done.stderr
    assert len(list(tmp_path.glob("*.txt"))) == 2


def out_of_memory() -> None:
    torch.empty(2**55)


def absent_module() -> None:
    import no_such_module  # noqa: F401


FAILURES = {
    out_of_memory: ["memory is used up"],
    absent_module: ["no_such_module.py is not here", f"imported by {__file__} line"],
}


@pytest.mark.parametrize("fails", FAILURES)
def test_what_is_not_there_is_named(call: Callable, fails: Callable) -> None:
    status, _, err = call(main=fails)
    check_one_error(status, err, *FAILURES[fails])


# --------------------------------------------------------------------------------------- inputs that are no plain files


@pytest.mark.parametrize("flag", INPUT_FLAGS)
@pytest.mark.parametrize("kind, word", [("pipe", "pipe"), ("loop", "leads nowhere"), ("device", "device")])
def test_an_input_that_is_no_plain_file_is_called_so(
    refused: Callable, classify_flags: Callable, tmp_path: Path, flag: str, kind: str, word: str
) -> None:
    name = "odd"
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "loop":
        (tmp_path / name).symlink_to("odd")
    else:
        name = os.devnull
    refused([*classify_flags("prompt"), flag, name], flag, word)


def test_prompt_needs_no_training_data(call: Callable, classify_flags: Callable, tmp_path: Path) -> None:
    flags = list(classify_flags("prompt"))
    at = flags.index("--train")
    expected = [call(*flags), snapshot(tmp_path)]
    status, out, _ = call(*flags[:at], *flags[at + 2 :])
    assert status == 0 and [out.count("load "), snapshot(tmp_path)] == [expected[0][1].count("load ") - 1, expected[1]]


def test_a_prompt_that_is_cut_or_changed_is_said_to_be(call: Callable, tiny_checkpoint: Path) -> None:
    flags = generate_flags(tiny_checkpoint)
    _, _, err = call(*flags, "--prompt", "a film " * 60)
    assert "of which the model sees the last 64" in err
    _, _, err = call(*flags, "--prompt", "a\tfilm\n\n")
    assert "the tokenizer changes --prompt" in err or "\t" in Path("generated-sentence-temp-0.txt").read_text()
    _, _, err = call(*flags, "--prompt", "a film")
    assert err == ""


def test_outputs_that_are_no_log_probabilities_stop_the_training(
    call: Callable, classify_flags: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier.F, "log_softmax", lambda scores, dim: scores * 50)
    status, _, err = call(*classify_flags("finetune"))
    check_one_error(status, err, "not log-probabilities")


def test_labels_in_other_digits_are_refused(refused: Callable, classify_flags: Callable, tmp_path: Path) -> None:
    for label in ("1_0", "\u0661", "\uff11"):
        (tmp_path / "odd.txt").write_text(f"0 ||| good\n{label} ||| bad\n", encoding="utf-8")
        refused([*classify_flags("prompt"), "--dev", "odd.txt"], "odd.txt line 2", "not a whole number")


# -------------------------------------------------------------------------------------------- resuming, overwriting


@pytest.fixture
def resume_point(call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The resume point of a run that was interrupted after its first epoch."""

    def interrupt(*what: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "print_epoch", interrupt)
        call(*classify_flags("finetune"), "--epochs", 2)
    return tmp_path / "finetune-2-2e-05.resume"


DAMAGES = {
    "cut": lambda path, point: path.write_bytes(path.read_bytes()[:-100]),
    "text": lambda path, point: path.write_text("hello"),
    "no model": lambda path, point: torch.save({k: v for k, v in point.items() if k != "model"}, path),
    "no optimizer": lambda path, point: torch.save({k: v for k, v in point.items() if k != "optimizer"}, path),
    "no random state": lambda path, point: torch.save({**point, "rng": {}}, path),
    "random state of another size": lambda path, point: torch.save(
        {**point, "rng": {"cpu": torch.zeros(3, dtype=torch.uint8)}}, path
    ),
    "random state is a word": lambda path, point: torch.save({**point, "rng": "cpu"}, path),
    "no history": lambda path, point: torch.save({k: v for k, v in point.items() if k != "history"}, path),
    "foreign history": lambda path, point: torch.save({**point, "history": [{"epoch": 0}]}, path),
    "another model": lambda path, point: torch.save({**point, "model": {"w": torch.ones(1)}}, path),
    "another optimizer": lambda path, point: torch.save(
        {**point, "optimizer": {"state": {}, "param_groups": []}}, path
    ),
    "identity of tensors": lambda path, point: torch.save(
        {**point, "identity": dict.fromkeys(point["identity"], torch.zeros(2))}, path
    ),
    "list": lambda path, point: torch.save([1], path),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_resume_point(
    refused: Callable, classify_flags: Callable, resume_point: Path, damage: Callable
) -> None:
    damage(resume_point, torch.load(resume_point, weights_only=True))
    refused([*classify_flags("finetune"), "--epochs", 2, "--resume"], resume_point.name, "--resume")


def test_resume_point_of_another_run(
    refused: Callable, classify_flags: Callable, resume_point: Path, tmp_path: Path
) -> None:
    flags = [*classify_flags("finetune"), "--epochs", 2, "--resume"]
    refused([*flags, "--seed", 7], resume_point.name, "--seed")
    (tmp_path / "finetune-2-2e-05.pt").unlink()
    refused(flags, resume_point.name, "finetune-2-2e-05.pt does not exist")


@pytest.mark.parametrize("content", [torch.zeros(3), [1], {"identity": torch.zeros(1)}, {"identity": None}, {}, "text"])
def test_a_foreign_file_under_the_model_name_is_kept(
    call: Callable, classify_flags: Callable, tmp_path: Path, content: object
) -> None:
    torch.save(content, tmp_path / "finetune-1-2e-05.pt")
    before = (tmp_path / "finetune-1-2e-05.pt").read_bytes()
    status, out, err = call(*classify_flags("finetune"), "--epochs", 1)
    assert status == 0, err
    assert (tmp_path / "finetune-1-2e-05.pt").read_bytes() == before
    assert "save the model to finetune-1-2e-05-films-train.pt" in out


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


# ---------------------------------------------------------------------------------------------------- defects


def test_a_programs_own_defect_keeps_its_traceback() -> None:
    def defect() -> None:
        raise IndexError("a bug")

    with pytest.raises(IndexError, match="a bug"):
        run_main(defect)
    assert LlamaConfig.from_preset("tiny").max_seq_len == 64


# ------------------------------------------------------------------------------------------- several runs, damaged runs


def test_two_runs_at_once_do_not_mix(call: Callable, classify_flags: Callable, tmp_path: Path) -> None:
    flags = [*classify_flags("finetune"), "--epochs", 1]
    _, alone, _ = call(*flags, "--seed", 7)
    for path in tmp_path.iterdir():
        path.unlink()
    other = locks.NameLock(tmp_path / "finetune-1-2e-05.lock")
    assert other.acquire()
    status, out, _ = call(*flags, "--seed", 7)
    other.release()
    assert status == 0 and "is in use by another process" in out
    assert "save the model to finetune-1-2e-05-films-train.pt" in out
    results = [[line for line in text.splitlines() if " :: " in line] for text in (out, alone)]
    assert results[0] == results[1]
    assert not list(tmp_path.glob("*.lock")) and not list(tmp_path.glob("*.resume"))


def test_a_model_that_another_run_replaced_is_not_predicted_with(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "finetune-1-2e-05.pt"
    load = saved_runs.load_classifier

    def replace(*inputs: object) -> object:
        content = storage.load_tensors(path, mmap=False)
        storage.save_tensors(path, {**content, "identity": {**content["identity"], "seed": 8}})
        return load(*inputs)

    monkeypatch.setattr(saved_runs, "load_classifier", replace)
    status, _, err = call(*classify_flags("finetune"), "--epochs", 1)
    check_one_error(status, err, path.name, "another process has replaced it")
    assert not list(tmp_path.glob("*output.txt"))


@pytest.fixture
def interrupted(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    """The flags of a run of three epochs that was stopped after the second."""
    flags = [*classify_flags("finetune"), "--epochs", 3, "--lr", 0.01]
    predict = training.evaluate
    with monkeypatch.context() as patch:

        def stop(*inputs: object, desc: str, **named: object) -> object:
            if desc == "dev acc 2":
                raise KeyboardInterrupt
            return predict(*inputs, desc=desc, **named)

        patch.setattr(training, "evaluate", stop)
        assert call(*flags)[0] == 130
    return flags


FIELDS = {
    "a step size": lambda point: point["optimizer"]["param_groups"][0].update(lr=5.0),
    "a moment's shape": lambda point: point["optimizer"]["state"][0].update(m=torch.zeros(3)),
    "a moment's type": lambda point: point["optimizer"]["state"][0].update(v=torch.zeros(300, 32).half()),
    "a count": lambda point: point["optimizer"]["state"][0].update(step=-4),
    "a figure's type": lambda point: point["history"][0].update(dev_score="0.5"),
    "a figure": lambda point: point["history"][0].update(dev_score=50.0),
    "an epoch": lambda point: point["history"][1].update(epoch=7),
    "a long history": lambda point: point.update(history=[*point["history"], *(worse(n) for n in (2, 3))]),
    "another best epoch": lambda point: point["history"][1].update(improved=not point["history"][1]["improved"]),
    "other methods": lambda point: point.update(methods={"ema": {"steps": 1, "average": {}}}),
    "no best epoch": lambda point: point["history"][0].update(improved=False),
}


def worse(epoch: int) -> dict[str, object]:
    """What a point says of an epoch that has learned nothing."""
    figures = dict(train_loss=9.0, train_score=0.0, dev_score=0.0, seconds=1.0)
    return dict(epoch=epoch, **figures, improved=False, is_finish=False)


@pytest.mark.parametrize("change", FIELDS.values(), ids=FIELDS)
def test_a_resume_point_with_a_wrong_field(call: Callable, interrupted: list, tmp_path: Path, change: Callable) -> None:
    path = tmp_path / "finetune-3-0.01.resume"
    point = storage.load_tensors(path, mmap=False)
    change(point)
    storage.save_tensors(path, point)
    before = snapshot(tmp_path)
    status, _, err = call(*interrupted, "--resume")
    check_one_error(status, err, path.name, "damaged")
    assert snapshot(tmp_path) == before


def test_a_damaged_best_model_is_named_and_the_resume_point_kept(
    call: Callable, interrupted: list, tmp_path: Path
) -> None:
    path = tmp_path / "finetune-3-0.01.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    before = snapshot(tmp_path)
    status, _, err = call(*interrupted, "--resume")
    check_one_error(status, err, path.name, "damaged", "without it")
    assert snapshot(tmp_path) == before


def test_resume_with_another_flag_names_the_run_that_lies_there(call: Callable, interrupted: list) -> None:
    status, out, _ = call(*interrupted, "--resume", "--lr", 0.02)
    assert status == 0 and "finetune-3-0.01.resume is of a run with another --lr" in out


@pytest.mark.parametrize("ending, word", [("pt", "fine-tuned classifier"), ("resume", "resume point")])
def test_what_a_run_saved_is_no_pretrained_model(
    call: Callable, tiny_tokenizer: Path, interrupted: list, ending: str, word: str
) -> None:
    status, _, err = call(*generate_flags(f"finetune-3-0.01.{ending}", "--tokenizer", tiny_tokenizer))
    check_one_error(status, err, word)
