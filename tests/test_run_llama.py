"""The three commands as a user runs them, on a tiny random model: output formats, printed lines, seeds, resuming."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIGURES, ROOT, drive_in, outputs, succeed
from error_helpers import TEXT_FLAGS, check_one_error

import classifier
import engine.decoding
import fast.apply
import fast.decode
import llama
import optimizer
import tokenizer
import utils
from advanced import decoding
from engine import checkpointer, data, processes, programs, reports, runs, tables, tasks, training, weights
from engine import torchrun as engine_torchrun
from engine.flags import get_args, shown_arguments
from engine.storage import load_tensors
from engine.tables import Columns

PREFIX = (
    "I have wanted to see this thriller for a while, and it didn't disappoint. "
    "Keanu Reeves, playing the hero John Wick, is"
)

# --------------------------------------------------------------------------------------------------- every flag

ADVANCED = ["--dev_out", "a-dev-advanced-output.txt", "--test_out", "a-test-advanced-output.txt"]
TO_FINETUNE = ["--dev_out", "a-dev-finetuning-output.txt", "--test_out", "a-test-finetuning-output.txt"]
COMMANDS = {
    "generate": ["--precision", "bf16"],  # in float32 no kernels are chosen for so short a text
    "prompt": ["--option", "prompt"],
    "finetune": ["--option", "finetune", "--epochs", 1, *TO_FINETUNE],
    "lora": ["--option", "lora", "--epochs", 1, *(flag.replace("finetuning", "lora") for flag in TO_FINETUNE)],
    "predict": ["--option", "predict", "--model", "finetune-1-2e-05.pt", "--input", "data/cfimdb-dev.txt"],
}


def name_of(argument: str, call: int = 0) -> Callable[[dict], str]:
    return lambda seen: Path(seen[argument][call]).name


def files(seen: dict) -> list[str]:
    return [name for name in seen["files"] if not name.startswith("cfimdb")]


def ahead(seen: dict) -> list[object]:
    return seen["generate.max_new_tokens"] + seen["decoder.tokens"]


def sizes(seen: dict) -> list[int]:
    return [len(seen[f"fit.{split}"][0].dataset) for split in ("train", "dev")]


def lora(name: str) -> Callable[[dict], float]:
    return lambda seen: seen["Trainer.methods"][0][0].settings[name]


def sampled(name: str) -> Callable[[dict], list]:
    return lambda seen: seen[f"Sampling.{name}"]


FLAGS: dict[str, tuple] = {  # a command, what the flag is given, where that arrives (calls of functions), and as what
    "--option": ("prompt", ["finetune", *TO_FINETUNE], "accelerate.trains", [True, True]),
    "--train": ("prompt", ["data/other.txt"], name_of("create_data.path", 0), "other.txt"),
    "--dev": ("prompt", ["data/other.txt"], name_of("create_data.path", 0), "other.txt"),  # and no default --train
    "--test": ("prompt", ["data/other.txt"], name_of("create_data.path", 2), "other.txt"),
    "--label-names": ("prompt", ["data/other.json"], "LlamaZeroShotClassifier.label_names", [["poor", "fine"]]),
    "--text-column": (
        "predict", ["review", "--input", "data/other.csv"], "read_rows.columns", [Columns("review")],
    ),
    "--label-column": (
        "prompt", ["stars", "--dev", "data/other.csv", "--text-column", "review"],
        "read_examples.columns", [Columns("review", "stars")] * 2,
    ),
    "--skip_empty": (
        "prompt", [], lambda seen: {each.skip_empty for each in seen["read_examples.columns"]}, {True},
    ),
    "--pretrained-model-path": ("generate", ["data/other.pt"], name_of("load_llama_model.path"), "other.pt"),
    "--tokenizer": ("generate", ["data/other.model"], name_of("Tokenizer.tokenizer_model"), "other.model"),
    "--attention": ("prompt", ["causal"], lambda seen: seen["accelerate.model"][0].llama.config.attention, "causal"),
    "--edition": ("generate", ["cmu2026"], "Sampling.top_p", [0.95, 0.95]),
    "--max_sentence_len": ("prompt", [5], "Tokenizer.max_len", [5]),
    "--seed": ("prompt", [7], "seed_everything.seed", [7]),
    "--device": ("prompt", ["mps"], "choose_device.name", ["mps"]),
    "--use_gpu": ("prompt", [], "choose_device.use_gpu", [True]),
    "--precision": ("prompt", ["int8"], "accelerate.precision", ["int8"]),
    "--kernels": ("prompt", ["plain"], "accelerate.precision", []),
    "--shard": ("prompt", [], lambda seen: seen["join.shard"] + seen["accelerate.keeps_copies"], [True, False]),
    "--list-methods": ("prompt", [], lambda seen: "arXiv:1909.11299" in seen["stdout"], True),
    "--question": (
        "prompt", ["Well, {labels}?"],
        lambda seen: seen["files"]["cfimdb-dev-prompting-output.txt"].splitlines()[0][-18:], "Well, bad or good?",
    ),
    "--prompt": (
        "generate", ["A film", *TEXT_FLAGS], lambda seen: seen["files"]["generated-sentence-temp-0.txt"], "A film",
    ),
    "--prompt_file": ("generate", ["data/other.txt", "--output", "texts.txt"], files, ["texts.txt"]),
    "--temperature": (
        "generate", [0.5], files, [f"generated-sentence-temp-{number}.txt" for number in ("0.5", "0", "1")],
    ),
    "--max_new_tokens": ("generate", [5], ahead, [5, 5, 10]),
    "--ignore_eos": ("generate", [], lambda seen: [each["stop_ids"] for each in seen["generate.settings"]], [(), ()]),
    "--num_samples": ("generate", [3], lambda seen: [len(idx) for idx in seen["generate.idx"]], [1, 3]),
    "--top_k": ("generate", [4], sampled("top_k"), [4, 4]),
    "--top_p": ("generate", [0.5], sampled("top_p"), [0.5, 0.5]),
    "--epsilon": ("generate", [0.25], sampled("epsilon"), [0.25, 0.25]),
    "--min_p": ("generate", [0.25], sampled("min_p"), [0.25, 0.25]),
    "--repetition_penalty": ("generate", [1.5], sampled("repetition_penalty"), [1.5, 1.5]),
    "--beam": ("generate", [3], "BeamSearch.beams", [3]),
    "--contrastive": (
        "generate", ["0.25,3", "--attention", "causal"],
        lambda seen: seen["ContrastiveSearch.alpha"] + seen["ContrastiveSearch.candidates"], [0.25, 3],
    ),
    "--generated_sentence_low_temp_out": ("generate", ["0.txt"], files, ["0.txt", "generated-sentence-temp-1.txt"]),
    "--generated_sentence_high_temp_out": ("generate", ["1.txt"], files, ["1.txt", "generated-sentence-temp-0.txt"]),
    "--dev_out": ("prompt", ["b-dev-prompting-output.txt"], files, ["b-dev-prompting-output.txt"]),
    "--test_out": ("prompt", ["b-test-prompting-output.txt"], files, ["b-test-prompting-output.txt"]),
    "--batch_size": ("finetune", [7], "loader.batch_size", [7] * 4),
    "--method": ("finetune", ["ema", *ADVANCED], lambda seen: [e.name for e in seen["Trainer.methods"][0]], ["ema"]),
    "--method-args": (
        "finetune", ["decay=0.5", "--method", "ema", *ADVANCED],
        lambda seen: [each.settings for each in seen["Trainer.methods"][0]], [{"decay": 0.5}],
    ),
    "--epochs": ("finetune", [2], "fit.epochs", [2]),
    "--lr": ("finetune", [0.25], "AdamW.lr", [0.25]),
    "--hidden_dropout_prob": ("finetune", [0.125], lambda seen: seen["Trainer.model"][0].dropout.p, 0.125),
    "--dropout": (
        "finetune", [0.25],
        lambda seen: {m.p for m in seen["Trainer.model"][0].llama.modules() if isinstance(m, torch.nn.Dropout)}, {0.25},
    ),
    "--weight_decay": ("finetune", [0.5], "AdamW.weight_decay", [0.5]),
    "--clip": ("finetune", [0.75], "Trainer.clip", [0.75]),
    "--model_out": ("finetune", ["best.pt"], lambda seen: seen["fine_tune.checkpointer"][0].model_path.name, "best.pt"),
    "--no_train_eval": ("finetune", [], "Trainer.train_eval", [False]),
    "--resume": ("finetune", [], lambda seen: len(seen["load_resume_point.self"]), 1),
    "--resume_every": ("finetune", [0.5], lambda seen: seen["fine_tune.checkpointer"][0].seconds, 30.0),
    "--shots": ("finetune", [4], sizes, [8, 10]),
    "--hold_out": ("finetune", [0.25], sizes, [18, 6]),
    "--log_dir": ("finetune", ["figures"], lambda seen: type(seen["fine_tune.callback"][0]).__name__, "MetricsLog"),
    "--html": ("finetune", ["run.html"], lambda seen: type(seen["fine_tune.callback"][0]).__name__, "MetricsLog"),
    "--lora_rank": ("lora", [2], lora("rank"), 2),
    "--lora_alpha": ("lora", [3], lora("alpha"), 3.0),
    "--model": ("predict", ["other-saved.pt"], name_of("load_classifier.path"), "other-saved.pt"),
    "--input": ("predict", ["data/other.txt"], name_of("read_sentences.path"), "other.txt"),
    "--output": ("predict", ["labels.txt"], files, ["labels.txt"]),
    "--names": (
        "predict", [],
        lambda seen: {line.split(" ")[0] for line in seen["stdout"].splitlines()} <= {"bad", "good"}, True,
    ),
    "--probabilities": ("predict", [], lambda seen: seen["stdout"].count("\t"), 30),
}  # fmt: skip


class Alone(processes.Distributed):
    """A group of one process."""

    def require_alike(self, facts: dict[str, Any]) -> None:
        pass


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`FUNCTION.ARGUMENT`: what it got in each call, defaults included. Kernels, devices and texts are left out."""
    noted: dict[str, Any] = defaultdict(list)
    importlib.import_module("run_llama")  # else its first import would keep what stands here for one test

    def note(owner: Any, name: str, instead: Callable | None = None) -> None:
        original = getattr(owner, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def noting(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for argument, value in bound.arguments.items():
                noted[f"{owner.__name__ if name == '__init__' else name}.{argument}"].append(value)
            return (instead or original)(*args, **kwargs)

        importers = [each for each in sys.modules.values() if getattr(each, "__dict__", {}).get(name) is original]
        for place in (owner, *importers):
            monkeypatch.setattr(place, name, noting)

    for owner, name in (
        (data, "create_data"), (training.Trainer, "fit"), (runs, "fine_tune"), (tasks.LlamaDataset, "loader"),
        (weights, "load_llama_model"),
        (tables, "read_examples"), (tables, "read_sentences"), (tables, "read_rows"), (runs, "load_classifier"),
        (utils, "seed_everything"),
        (optimizer.AdamW, "__init__"), (tokenizer.Tokenizer, "__init__"),
        (classifier.LlamaZeroShotClassifier, "__init__"),
    ):  # fmt: skip
        note(owner, name)
    for search in (decoding.BeamSearch, decoding.ContrastiveSearch):
        note(search, "__init__")
    note(engine.decoding.Sampling, "__init__")
    note(training.Trainer, "__init__")
    note(checkpointer.Checkpointer, "load_resume_point", lambda *args: [])
    note(utils, "choose_device", lambda *args: torch.device("cpu:0"))
    note(fast.apply, "accelerate", lambda *args, **purpose: [])
    note(fast.decode, "decoder", lambda model, *args, **purpose: engine.decoding.Decoder(model))
    note(engine.decoding.Decoder, "generate", lambda model, idx, *args, **settings: idx)
    note(engine_torchrun, "join", lambda *args, **settings: nullcontext(Alone()))
    return noted


@pytest.mark.slow
def test_every_flag_arrives_where_it_acts(
    seen: dict, drive: Callable, course_folder: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
):
    with pytest.raises(SystemExit):
        drive("--help", stdout=(shown := io.StringIO()))
    assert re.findall(r"^  (--[\w-]+)", shown.getvalue(), re.MULTILINE) == [*FLAGS]

    data = course_folder / "data"
    shutil.copy(data / "cfimdb-dev.txt", data / "other.txt")
    (data / "other.csv").write_text("review,stars\nA film,good\nA bore,bad\n")
    (data / "other.json").write_text('["poor", "fine"]')
    for suffix in (".pt", ".model"):
        shutil.copy(tiny_checkpoint.with_suffix(suffix), data / f"other{suffix}")

    def observe(*flags: object) -> dict:
        seen.clear()
        (course_folder / "finetune-1-2e-05.resume").touch()
        monkeypatch.setenv("WORLD_SIZE", "2" if "--shard" in flags else "1")
        with redirect_stderr(io.StringIO()) as told:
            seen["stdout"] = drive(*flags)
        seen["stderr"] = told.getvalue()
        seen["files"] = {path.name: path.read_text() for path in sorted(course_folder.glob("*.txt"))}
        for name in seen["files"]:
            (course_folder / name).unlink()
        assert all(device == torch.device("cpu:0") for device in seen["accelerate.device"])  # as `choose_device` said
        return dict(seen)

    monkeypatch.setattr(llama.Llama, "stop_ids", (7,), raising=False)  # as a directory's model has
    drive(*COMMANDS["finetune"])
    shutil.copy(course_folder / "finetune-1-2e-05.pt", course_folder / "other-saved.pt")
    usual = {command: observe(*flags) for command, flags in COMMANDS.items()}
    assert usual["generate"]["accelerate.generates"] == [True] and usual["prompt"]["accelerate.generates"] == [False]
    assert usual["prompt"]["accelerate.trains"] == [False] and usual["prompt"]["loader.bucket"] == [False, False]
    assert observe(*COMMANDS["prompt"], "--attention", "causal")["loader.bucket"] == [True, True]
    for flag, (command, given, where, expected) in FLAGS.items():
        arrives = where if callable(where) else lambda calls, where=where: calls.get(where, [])
        found = arrives(defaultdict(list, observe(*COMMANDS[command], flag, *given)))
        assert found == expected, flag
        assert arrives(defaultdict(list, usual[command])) != expected, f"{flag} is the default"


CONTRACT = {  # what must never change
    "--train": "data/cfimdb-train.txt", "--dev": "data/cfimdb-dev.txt", "--test": "data/cfimdb-test.txt",
    "--label-names": "data/cfimdb-label-mapping.json", "--pretrained-model-path": "stories42M.pt",
    "--max_sentence_len": None, "--generated_sentence_low_temp_out": "generated-sentence-temp-0.txt",
    "--generated_sentence_high_temp_out": "generated-sentence-temp-1.txt", "--seed": 1337, "--epochs": 5,
    "--option": "generate", "--batch_size": 8, "--hidden_dropout_prob": 0.3, "--lr": 2e-05, "--prompt": PREFIX,
    "--max_new_tokens": 75, "--dev_out": "cfimdb-dev-prompting-output.txt",
    "--test_out": "cfimdb-test-prompting-output.txt", "--use_gpu": False,
}  # fmt: skip


def test_help_gives_the_contracts_defaults_at_once(tmp_path: Path):
    command = [sys.executable, "-X", "importtime", str(ROOT / "run_llama.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "999"})
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "config" in imported and not imported & {"torch", "sklearn", "numpy", "sentencepiece", "numba", "fast"}
    unwrapped = re.sub(r"\n {9,}", " ", done.stdout)
    shown = dict(re.findall(r"^  (--\S+) .*\(default: (.*)\)$", unwrapped, re.MULTILINE))
    assert {flag: shown[flag] for flag in CONTRACT} == {flag: str(value) for flag, value in CONTRACT.items()}


# ---------------------------------------------------------------------------------------------------- generate


def test_generate_continues_the_sentence_and_writes_two_files(drive: Callable, tiny_checkpoint: Path, tmp_path: Path):
    out = drive("--option", "generate", "--pretrained-model-path", tiny_checkpoint, "--max_new_tokens", 20)
    its = tokenizer.Tokenizer(tokenizer_model=tiny_checkpoint.with_suffix(".model"))
    ids = torch.tensor([its.encode(PREFIX, bos=True, eos=False)])
    greedy = its.decode(weights.load_llama_model(tiny_checkpoint).generate(ids, 20, temperature=0.0)[0].tolist())
    texts = {path.name: path.read_bytes().decode() for path in tmp_path.iterdir()}
    assert set(texts) == {"generated-sentence-temp-0.txt", "generated-sentence-temp-1.txt"}
    assert texts["generated-sentence-temp-0.txt"] == greedy
    for temperature in (0, 1):
        text = texts[name := f"generated-sentence-temp-{temperature}.txt"]
        assert text.startswith(PREFIX) and not text.endswith("\n")
        assert f"Temperature is {temperature}.0\n{text}\n---------------\nWrote generated sentence to {name}.\n" in out
    (tmp_path / "ordinary.txt").touch()
    assert (tmp_path / name).stat().st_mode == (tmp_path / "ordinary.txt").stat().st_mode


OF_CLASSIFYING = "train dev test label_names dev_out test_out batch_size".split()
OF_TEXTS = ["generated_sentence_low_temp_out", "generated_sentence_high_temp_out"]


@pytest.mark.parametrize(
    ("flags", "used"),
    [
        (["generate"], ["max_sentence_len", *OF_TEXTS]),
        (["generate", "--prompt_file", "p", "--output", "o"], ["max_sentence_len", "batch_size", "prompt_file"]),
        (["prompt"], ["max_sentence_len", *OF_CLASSIFYING]),
        (["finetune"], ["max_sentence_len", *OF_CLASSIFYING, "epochs", "lr", "hidden_dropout_prob"]),
        (["perplexity", "--input", "p"], ["batch_size", "input"]),
    ],
)
def test_the_printed_arguments_are_those_that_the_option_uses(flags: list[str], used: list[str]):
    shown = shown_arguments(get_args(["--option", *flags]))
    ours = {"option", "pretrained_model_path", "seed", "use_gpu", *used}
    assert set(shown) - {"output"} == ours
    assert ("output" in shown) == ("--output" in flags)


def test_arguments_are_printed_after_the_warning_about_the_checkpoint(monkeypatch: pytest.MonkeyPatch):
    args = get_args([])
    args.is_bundled = True
    both = io.StringIO()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    importlib.import_module("run_llama").announce(args)
    assert 0 < both.getvalue().index("WARNING") < both.getvalue().index("args: {'option': 'generate'")


def test_a_seed_makes_the_samples_reproducible(drive: Callable, tiny_checkpoint: Path, tmp_path: Path):
    """Several are decoded together and written one by one."""
    flags = ["--pretrained-model-path", tiny_checkpoint, "--prompt", "A film", "--max_new_tokens", 20, *TEXT_FLAGS]
    for attention in ("bidirectional", "causal"):
        texts = {}
        for seed in (7, 7, 8):
            out = drive(*flags, "--seed", seed, "--num_samples", 3, "--attention", attention)
            paths = [tmp_path / f"generated-sentence-temp-1{number}.txt" for number in ("", "-2", "-3")]
            samples = [path.read_bytes().decode() for path in paths]
            assert texts.setdefault(seed, samples) == samples
            assert len(set(samples)) == 3 and all(text.startswith("A film") for text in samples)
            assert "\n".join(["Temperature is 1.0", *samples, "---------------"]) in out
            assert f"(attention: {attention})\n" in out
        assert texts[7] != texts[8]


def test_a_module_that_fast_lacks_is_no_absent_folder(drive: Callable, tiny_checkpoint: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fast.apply", None)
    monkeypatch.setattr(fast, "LITTLE", 0)  # or no kernel would be chosen
    with pytest.raises(ModuleNotFoundError, match="fast.apply"):
        drive("--pretrained-model-path", tiny_checkpoint, "--max_new_tokens", 1)


def test_a_folder_that_lacks_something_is_no_absent_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "folder_with_a_hole").mkdir()
    (tmp_path / "folder_with_a_hole" / "__init__.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        programs.import_folder("folder_with_a_hole")
    assert programs.import_folder("nowhere_to_be_found") is None


def test_training_data_alone_are_shuffled(seen: dict[str, Any], drive: Callable, classify_flags: Callable):
    drive(*classify_flags("finetune"), "--epochs", 1)
    assert seen["loader.shuffle"] == [True, False, False, False]  # train, dev; and the predictions on dev and test


class Screen(io.StringIO):
    """Notes what can be read on it, and when."""

    def flush(self) -> None:
        vars(self).setdefault("seen", []).append(self.getvalue())


def test_the_text_appears_while_it_grows(drive: Callable, tiny_checkpoint: Path, tmp_path: Path):
    flags = ["--pretrained-model-path", tiny_checkpoint, "--attention", "causal", "--max_new_tokens", 60]
    whole = drive(*flags, stdout=(screen := Screen()))
    text = (tmp_path / "generated-sentence-temp-0.txt").read_bytes().decode()
    begin = whole.index(f"Temperature is 0.0\n{text}\n---------------\n") + len("Temperature is 0.0\n")
    assert len({len(shown) for shown in screen.seen if begin < len(shown) < begin + len(text)}) >= 3
    assert all(whole.startswith(shown) for shown in screen.seen)


# -------------------------------------------------------------------------------------------- prompt, finetune


def lines(path: Path) -> list[str]:
    text = path.read_bytes().decode()
    assert text.endswith("\n") and "\r" not in text
    return text.removesuffix("\n").split("\n")


def macro_f1(predicted: list[str], gold: list[str]) -> float:
    """The mean over the classes of 2 * hits / (predicted + there)."""
    pairs = list(zip(predicted, gold, strict=True))
    of_class = [2 * pairs.count((c, c)) / max(1, predicted.count(c) + gold.count(c)) for c in sorted({*gold})]
    return sum(of_class) / len(of_class)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_prompt_writes_predictions_and_tables(
    tmp_path: Path, drive: Callable, classify_flags: Callable, films: dict[str, Path], attention: str
):
    out = drive(*classify_flags("prompt"), "--attention", attention)
    for split in ("train", "dev", "test"):
        assert f"load {len(lines(films[split]))} data from {films[split]}\n" in out
    for split in ("dev", "test"):
        gold, sentences = zip(*(line.split(" ||| ") for line in lines(films[split])), strict=True)
        written = [line.split(" ||| ") for line in lines(tmp_path / f"films-{split}-prompting-output.txt")]
        predicted = [prediction for prediction, _ in written]
        assert [text for _, text in written] == [
            f"{sentence} Is this movie bad or good? This movie is " for sentence in sentences
        ]
        accuracy = sum(map(str.__eq__, predicted, gold)) / len(gold)
        macro = macro_f1(predicted, [*gold])
        assert f"{split} acc :: {accuracy:.3f}\n" in out and f"{split} macro-F1 :: {macro:.3f}\n" in out
        assert f"{split} majority-class acc :: 0.500" in out and f"{macro:.3f}" != f"{accuracy:.3f}"
    assert re.search(r"precision +recall +f1-score +support\n+ +bad .*\n +good ", out)


def test_finetune_prints_the_contract_and_saves_plain_data(tmp_path: Path, drive: Callable, classify_flags: Callable):
    out = drive(*classify_flags("finetune"), "--epochs", 3, "--lr", "0.01")
    number = r"(\d\.\d{3})"
    of_epoch = rf"^epoch (\d): train loss :: {number}, train acc :: {number}, dev acc :: {number}$"
    epochs = re.findall(of_epoch, out, re.MULTILINE)
    assert [epoch[0] for epoch in epochs] == ["0", "1", "2"]
    best = max(epoch[3] for epoch in epochs)
    assert re.findall(r"^dev acc :: (.*)$", out, re.MULTILINE) == [best]
    assert re.search(rf"^test acc :: {number}$", out, re.MULTILINE)
    assert "save the model to finetune-3-0.01.pt\n" in out
    assert re.search(r"epoch +train loss +train acc +dev acc +seconds\n( +\d.*\n){3}", out)
    saved = load_tensors(tmp_path / "finetune-3-0.01.pt")
    assert saved["identity"]["epochs"] == 3 and saved["model_config"]["model_args"]["dim"] == 32
    assert f"{saved['dev_score']:.3f}" == best
    assert set(os.listdir(tmp_path)) == {"finetune-3-0.01.pt", *outputs(tmp_path)} and len(outputs(tmp_path)) == 2

    drive_in(tmp_path / "again", *classify_flags("finetune"), "--epochs", 3, "--lr", "0.01")
    assert outputs(tmp_path / "again") == outputs(tmp_path)
    same = load_tensors(tmp_path / "again/finetune-3-0.01.pt")["model"]
    assert all(torch.equal(tensor, same[name]) for name, tensor in saved["model"].items())
    assert "train acc :: nan, dev acc" in drive(*classify_flags("finetune"), "--epochs", 1, "--no_train_eval")


def test_a_test_file_without_gold_labels_gets_no_accuracy(
    tmp_path: Path, drive: Callable, classify_flags: Callable, films: dict[str, Path]
):
    for placeholder in ("-1", "0"):
        unlabelled = tmp_path / "unlabelled.txt"
        unlabelled.write_text(re.sub(r"^\d", placeholder, films["test"].read_text(), flags=re.MULTILINE))
        out = drive(*classify_flags("prompt"), "--test", unlabelled)
        assert "test acc" not in out and f"no gold labels (every label is {placeholder})" in out
        assert len(lines(tmp_path / "films-test-prompting-output.txt")) == 10


@pytest.mark.parametrize(("predictions", "said"), [
    ([1], ""), ([0, 1], ""), ([1, 1], "dev: all 2 predictions are 1; nothing is told apart\n"),
])  # fmt: skip
def test_predictions_that_are_all_equal_are_said_to_be(predictions: list[int], said: str, capsys):
    reports.print_accuracy("dev", "dev.txt", tasks.Evaluation(predictions, [0, 1][: len(predictions)]))
    assert capsys.readouterr().out.partition("\n")[2] == said


def test_other_data_with_the_same_settings_keeps_the_first_model(
    tmp_path: Path, drive: Callable, classify_flags: Callable, films: dict[str, Path]
):
    flags = [*classify_flags("finetune"), "--epochs", 1]
    drive(*flags)
    saved = tmp_path / "finetune-1-2e-05.pt"
    first = saved.read_bytes()
    other = tmp_path / "other-train.txt"
    other.write_text(films["train"].read_text() + "1 ||| one more\n")
    out = drive(*flags, "--train", other)
    assert "save the model to finetune-1-2e-05-other-train.pt" in out and "is kept" in out
    assert saved.read_bytes() == first
    saved.with_suffix(".resume").write_bytes(b"of an interrupted run")
    out = drive(*flags, "--seed", 2)
    assert "will overwrite it" in out and "save the model to finetune-1-2e-05.pt" in out
    assert "finetune-1-2e-05.resume is the resume point of an interrupted run" in out and "--resume" in out
    assert saved.read_bytes() != first
    saved.write_text("my notes")
    assert "save the model to finetune-1-2e-05-films-train.pt" in drive(*flags)
    assert saved.read_text() == "my notes"


def test_finetune_needs_no_label_names_as_in_the_course(drive: Callable, course_folder: Path):
    """The course takes the number of classes from the training data; a default mapping must not stand in the way."""
    five = course_folder / "five.txt"
    five.write_text("".join(f"{label} ||| film {label}\n" for label in range(5)))
    drive(*COMMANDS["finetune"], "--train", five, "--dev", five, "--test", five)
    saved = load_tensors(course_folder / "finetune-1-2e-05.pt")
    assert saved["model"]["classifier_head.weight"].shape[0] == 5


# ------------------------------------------------------------------------------------------ as processes of their own


@pytest.mark.slow
def test_killed_and_resumed_ends_as_undisturbed(tmp_path: Path, drive: Callable, classify_flags: Callable):
    """kill -9 in the first epoch, and a while after the third one, wherever the run then is."""
    flags = [*classify_flags("finetune"), "--epochs", 12, "--lr", "0.01", "--batch_size", 2, "--resume"]
    flags += ["--kernels", "plain"]  # which kernel is the fastest may be measured differently from run to run
    command = [sys.executable, str(ROOT / "run_llama.py"), *map(str, flags)]
    for awaited, delay in (("there is no resume point", 0.0), ("epoch 2:", 0.03)):
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            assert any(line.startswith(awaited) for line in process.stdout)
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert not list(tmp_path.glob("*-output.txt"))

    resumed = drive(*flags)
    assert "resuming from finetune-12-0.01.resume" in resumed
    undisturbed = drive_in(tmp_path / "undisturbed", *flags)
    assert FIGURES.findall(resumed) == FIGURES.findall(undisturbed)
    assert outputs(tmp_path) == outputs(tmp_path / "undisturbed") and len(outputs(tmp_path)) == 2
    assert not list(tmp_path.glob("*.resume"))


ALL_COMMANDS = """
import runpy, sys
for command in {commands}:
    sys.argv = ["run_llama.py", *command]
    try:
        runpy.run_path("run_llama.py", run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, command
"""


# the modules of the assignment's list
LISTED = "run_llama base_llama llama rope classifier config optimizer tokenizer utils".split()


@pytest.mark.parametrize("flags", [[], ["--help"], ["--list-methods"], ["--no-such-flag"], COMMANDS["prompt"]])
def test_without_the_engine_every_call_is_one_line(course_folder: Path, run: Callable, flags: list[str]):
    for name in LISTED:
        shutil.copy(ROOT / f"{name}.py", course_folder)
    before = sorted(course_folder.rglob("*"))
    done = run(course_folder / "run_llama.py", *flags, cwd=course_folder, env={"PYTHONDONTWRITEBYTECODE": "1"})
    check_one_error(done.returncode, done.stderr, "needs the folder engine/")
    assert done.stdout == "" and sorted(course_folder.rglob("*")) == before


@pytest.mark.parametrize("remains", ["engine/__pycache__", "engine/__init__.py"])
def test_remains_of_the_engine_are_no_engine(course_folder: Path, run: Callable, remains: str):
    for name in LISTED:
        shutil.copy(ROOT / f"{name}.py", course_folder)
    (course_folder / "engine").mkdir()
    (course_folder / remains).write_text("") if remains.endswith(".py") else (course_folder / remains).mkdir()
    done = run(course_folder / "run_llama.py", "--help", cwd=course_folder)
    check_one_error(done.returncode, done.stderr, "needs the folder engine/")


@pytest.mark.slow
def test_the_listed_modules_and_the_engine_run_the_three_commands(course_folder: Path, run: Callable):
    for name in LISTED:
        shutil.copy(ROOT / f"{name}.py", course_folder)
    shutil.copytree(ROOT / "engine", course_folder / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    commands = [[str(word) for word in flags] for flags in ([], COMMANDS["prompt"], COMMANDS["finetune"])]
    (course_folder / "all.py").write_text(ALL_COMMANDS.format(commands=commands))
    succeed(run(course_folder / "all.py", cwd=course_folder))
    assert len(list(course_folder.glob("*-output.txt"))) == 4
    (course_folder / "generated-sentence-temp-0.txt").unlink()

    refused = (["--precision", "bf16"], "fast/"), (["--beam", "2"], "advanced/"), (["--list-methods"], "advanced/")
    for flags, word in refused:
        done = run(course_folder / "run_llama.py", *flags, cwd=course_folder)
        check_one_error(done.returncode, done.stderr, word)
    assert not (course_folder / "generated-sentence-temp-0.txt").exists()
