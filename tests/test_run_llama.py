"""The three commands as a user runs them, on a tiny random model: output formats, printed lines, seeds, resuming."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from llama import load_pretrained
from storage import load_tensors
from tokenizer import Tokenizer

PREFIX = (
    "I have wanted to see this thriller for a while, and it didn't disappoint. "
    "Keanu Reeves, playing the hero John Wick, is"
)
ROOT_MODULES = sorted(path.name for path in ROOT.glob("*.py"))


def succeed(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


# ---------------------------------------------------------------------------------------------------- generate


def test_generate_continues_the_sentence_and_writes_two_files(tmp_path: Path, run: Callable, tiny_checkpoint: Path):
    flags = ["--option", "generate", "--pretrained-model-path", tiny_checkpoint, "--max_new_tokens", 20]
    out = succeed(run("run_llama.py", *flags, cwd=tmp_path))
    tokenizer = Tokenizer(tokenizer_model=tiny_checkpoint.with_suffix(".model"))
    ids = torch.tensor([tokenizer.encode(PREFIX, bos=True, eos=False)])
    greedy = tokenizer.decode(load_pretrained(tiny_checkpoint).generate(ids, 20, temperature=0.0)[0].tolist())
    texts = {name: (tmp_path / name).read_bytes().decode() for name in os.listdir(tmp_path)}
    assert set(texts) == {"generated-sentence-temp-0.txt", "generated-sentence-temp-1.txt"}
    assert texts["generated-sentence-temp-0.txt"] == greedy
    for temperature in (0, 1):
        text = texts[f"generated-sentence-temp-{temperature}.txt"]
        assert text.startswith(PREFIX) and not text.endswith("\n")
        assert f"Temperature is {temperature}.0\n{text}\n" in out
        assert f"Wrote generated sentence to generated-sentence-temp-{temperature}.txt.\n" in out


def test_a_seed_makes_the_sampled_file_reproducible(tmp_path: Path, run: Callable, tiny_checkpoint: Path):
    texts = []
    for folder, seed in (("a", 7), ("b", 7), ("c", 8)):
        (tmp_path / folder).mkdir()
        flags = ["--pretrained-model-path", tiny_checkpoint, "--prompt", "A film", "--max_new_tokens", 30]
        succeed(run("run_llama.py", *flags, "--seed", seed, cwd=tmp_path / folder))
        texts.append((tmp_path / folder / "generated-sentence-temp-1.txt").read_bytes())
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith(b"A film")


def test_samples_are_decoded_together_and_written_one_by_one(tmp_path: Path, run: Callable, tiny_checkpoint: Path):
    flags = ["--pretrained-model-path", tiny_checkpoint, "--max_new_tokens", 20, "--num_samples", 3]
    for attention in ("bidirectional", "causal"):
        out = succeed(run("run_llama.py", *flags, "--attention", attention, cwd=tmp_path))
        samples = [tmp_path / f"generated-sentence-temp-1{number}.txt" for number in ("", "-2", "-3")]
        texts = [path.read_bytes().decode() for path in samples]
        assert len(set(texts)) == 3 and all(text.startswith(PREFIX) for text in texts)
        assert "\n".join(["Temperature is 1.0", *texts, "---------------"]) in out


def test_the_text_appears_while_it_grows(tmp_path: Path, tiny_checkpoint: Path):
    flags = ["--pretrained-model-path", str(tiny_checkpoint), "--attention", "causal", "--max_new_tokens", "60"]
    command = [sys.executable, "-u", str(ROOT / "run_llama.py"), *flags]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        pieces = []
        while piece := os.read(process.stdout.fileno(), 4096):
            pieces.append(piece)
    text = (tmp_path / "generated-sentence-temp-0.txt").read_bytes()
    whole = b"".join(pieces)
    assert b"Temperature is 0.0\n" + text + b"\n---------------\n" in whole
    begin = whole.index(text)
    ends = [sum(map(len, pieces[: number + 1])) for number in range(len(pieces))]
    assert sum(begin < end < begin + len(text) for end in ends) >= 3  # it came in several pieces


def test_no_train_eval_leaves_out_one_figure(tmp_path: Path, run: Callable, classify_flags: Callable):
    out = succeed(run("run_llama.py", *classify_flags("finetune"), "--epochs", 1, "--no_train_eval", cwd=tmp_path))
    assert re.search(r"^epoch 0: train loss :: \d\.\d{3}, train acc :: nan, dev acc :: \d\.\d{3}$", out, re.MULTILINE)


def test_the_attention_flag_changes_the_model(tmp_path: Path, run: Callable, tiny_checkpoint: Path):
    texts = set()
    for attention in ("bidirectional", "causal"):
        flags = ["--pretrained-model-path", tiny_checkpoint, "--attention", attention, "--max_new_tokens", 30]
        assert f"attention: {attention}" in succeed(run("run_llama.py", *flags, cwd=tmp_path))
        texts.add((tmp_path / "generated-sentence-temp-0.txt").read_bytes())
    assert len(texts) == 2


# -------------------------------------------------------------------------------------------- prompt, finetune


def lines(path: Path) -> list[str]:
    text = path.read_bytes().decode()
    assert text.endswith("\n") and "\r" not in text
    return text.removesuffix("\n").split("\n")


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_prompt_writes_predictions_and_tables(
    tmp_path: Path, run: Callable, classify_flags: Callable, films: dict[str, Path], attention: str
):
    flags = [*classify_flags("prompt"), "--attention", attention]
    out = succeed(run("run_llama.py", *flags, cwd=tmp_path))
    for split in ("train", "dev", "test"):
        assert f"load {len(lines(films[split]))} data from {films[split]}\n" in out
    for split in ("dev", "test"):
        gold = [line.split(" ||| ") for line in lines(films[split])]
        written = [line.split(" ||| ") for line in lines(tmp_path / f"films-{split}-prompting-output.txt")]
        assert [sentence for _, sentence in written] == [
            f"{sentence} Is this movie bad or good? This movie is " for _, sentence in gold
        ]
        accuracy = sum(p[0] == g[0] for p, g in zip(written, gold, strict=True)) / len(gold)
        assert f"{split} acc :: {accuracy:.3f}\n" in out
        assert f"{split} majority-class acc :: 0.500" in out and f"{split} macro-F1 :: " in out
    assert re.search(r"precision +recall +f1-score +support\n+ +bad .*\n +good ", out)


def test_finetune_prints_the_contract_and_saves_plain_data(tmp_path: Path, run: Callable, classify_flags: Callable):
    flags = [*classify_flags("finetune"), "--epochs", 3, "--lr", "0.01"]
    out = succeed(run("run_llama.py", *flags, cwd=tmp_path))
    epochs = re.findall(
        r"^epoch (\d): train loss :: (\d\.\d{3}), train acc :: (\d\.\d{3}), dev acc :: (\d\.\d{3})$", out, re.MULTILINE
    )
    assert [epoch[0] for epoch in epochs] == ["0", "1", "2"]
    best = max(epoch[3] for epoch in epochs)
    assert re.findall(r"^dev acc :: (.*)$", out, re.MULTILINE) == [best]
    assert re.search(r"^test acc :: \d\.\d{3}$", out, re.MULTILINE)
    assert "save the model to finetune-3-0.01.pt\n" in out
    assert re.search(r"epoch +train loss +train acc +dev acc +seconds\n( +\d.*\n){3}", out)
    saved = load_tensors(tmp_path / "finetune-3-0.01.pt")
    assert saved["args"]["epochs"] == 3 and saved["model_config"]["model_args"]["dim"] == 32
    assert f"{saved['dev_acc']:.3f}" == best
    assert set(os.listdir(tmp_path)) == {
        "finetune-3-0.01.pt",
        "films-dev-finetuning-output.txt",
        "films-test-finetuning-output.txt",
    }


def test_a_test_file_without_gold_labels_gets_no_accuracy(
    tmp_path: Path, run: Callable, classify_flags: Callable, films: dict[str, Path]
):
    for placeholder in ("0", "-1"):
        unlabelled = tmp_path / "unlabelled.txt"
        unlabelled.write_text(re.sub(r"^\d", placeholder, films["test"].read_text(), flags=re.MULTILINE))
        flags = [*classify_flags("prompt"), "--test", unlabelled]
        out = succeed(run("run_llama.py", *flags, cwd=tmp_path))
        assert "test acc" not in out and f"no gold labels (every label is {placeholder})" in out
        assert len(lines(tmp_path / "films-test-prompting-output.txt")) == 10


def test_other_data_with_the_same_settings_keeps_the_first_model(
    tmp_path: Path, run: Callable, classify_flags: Callable, films: dict[str, Path]
):
    flags = [*classify_flags("finetune"), "--epochs", 1]
    succeed(run("run_llama.py", *flags, cwd=tmp_path))
    first = (tmp_path / "finetune-1-2e-05.pt").read_bytes()
    other = tmp_path / "other-train.txt"
    other.write_text(films["train"].read_text() + "1 ||| one more\n")
    out = succeed(run("run_llama.py", *flags, "--train", other, cwd=tmp_path))
    assert "save the model to finetune-1-2e-05-other-train.pt" in out and "is kept" in out
    assert (tmp_path / "finetune-1-2e-05.pt").read_bytes() == first
    out = succeed(run("run_llama.py", *flags, "--seed", 2, cwd=tmp_path))
    assert "will overwrite it" in out and "save the model to finetune-1-2e-05.pt" in out
    assert (tmp_path / "finetune-1-2e-05.pt").read_bytes() != first


def test_a_file_that_is_not_ours_is_not_overwritten(tmp_path: Path, run: Callable, classify_flags: Callable):
    (tmp_path / "finetune-1-2e-05.pt").write_text("my notes")
    out = succeed(run("run_llama.py", *classify_flags("finetune"), "--epochs", 1, cwd=tmp_path))
    assert "save the model to finetune-1-2e-05-films-train.pt" in out
    assert (tmp_path / "finetune-1-2e-05.pt").read_text() == "my notes"


def test_finetune_needs_no_label_names_as_in_the_course(tmp_path: Path, run: Callable, classify_flags: Callable):
    """The course takes the number of classes from the training data; a default mapping must not stand in the way."""
    five = tmp_path / "five.txt"
    five.write_text("".join(f"{label} ||| film {label}\n" for label in range(5)))
    flags = classify_flags("finetune")
    flags = flags[: flags.index("--label-names")] + flags[flags.index("--label-names") + 2 :]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/cfimdb-label-mapping.json").write_text(json.dumps(["bad", "good"]))
    out = succeed(run("run_llama.py", *flags, "--train", five, "--dev", five, "--test", five, cwd=tmp_path))
    assert "dev acc ::" in out
    assert load_tensors(tmp_path / "finetune-5-2e-05.pt")["model"]["classifier_head.weight"].shape[0] == 5


def test_two_runs_with_one_seed_give_identical_files(tmp_path: Path, run: Callable, classify_flags: Callable):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        succeed(run("run_llama.py", *classify_flags("finetune"), "--lr", "0.01", cwd=tmp_path / folder))
    for name in ("films-dev-finetuning-output.txt", "films-test-finetuning-output.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    one, other = (load_tensors(tmp_path / folder / "finetune-5-0.01.pt")["model"] for folder in ("a", "b"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("finished_epochs", "delay"), [(0, 0.0), (1, 0.0), (3, 0.03), (7, 0.01)])
def test_killed_and_resumed_ends_as_undisturbed(
    tmp_path: Path, run: Callable, undisturbed: tuple[list[str], dict[str, bytes]], flags: list, finished_epochs, delay
):
    """kill -9 after some finished epochs (0: in the first) and a while, wherever the run then is."""
    command = [sys.executable, str(ROOT / "run_llama.py"), *map(str, flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        awaited = "load model from" if finished_epochs == 0 else f"epoch {finished_epochs - 1}:"
        assert any(line.startswith(awaited) for line in process.stdout)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert not list(tmp_path.glob("*-output.txt"))

    resumed = succeed(run("run_llama.py", *flags, "--resume", cwd=tmp_path))
    said = "starting from the beginning" if finished_epochs == 0 else "resuming from finetune-12-0.01.resume"
    assert said in resumed
    figures, outputs = undisturbed
    assert FIGURES.findall(resumed) == figures
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*-output.txt")} == outputs
    assert not list(tmp_path.glob("*.resume"))


FIGURES = re.compile(r"^(epoch \d+:.*|(?:dev|test) acc :: .*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def flags(classify_flags: Callable) -> list:
    return [*classify_flags("finetune"), "--epochs", 12, "--lr", "0.01", "--batch_size", 2]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, run: Callable, flags: list
) -> tuple[list[str], dict[str, bytes]]:
    """Printed figures and output files of a run that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    figures = FIGURES.findall(succeed(run("run_llama.py", *flags, cwd=folder)))
    return figures, {path.name: path.read_bytes() for path in folder.glob("*-output.txt")}


def test_an_interrupted_run_is_not_overwritten_without_a_word(tmp_path: Path, run: Callable, classify_flags: Callable):
    shown = [*classify_flags("finetune"), "--epochs", 1]
    succeed(run("run_llama.py", *shown, cwd=tmp_path))
    (tmp_path / "finetune-1-2e-05.resume").write_bytes(b"of an interrupted run")
    out = succeed(run("run_llama.py", *shown, cwd=tmp_path))
    assert "finetune-1-2e-05.resume is the resume point of an interrupted run" in out and "--resume" in out


def test_outputs_have_the_permissions_of_any_new_file(tmp_path: Path, run: Callable, tiny_checkpoint: Path):
    succeed(run("run_llama.py", "--pretrained-model-path", tiny_checkpoint, "--max_new_tokens", 1, cwd=tmp_path))
    (tmp_path / "ordinary.txt").write_text("")
    written, ordinary = (tmp_path / name for name in ("generated-sentence-temp-0.txt", "ordinary.txt"))
    assert written.stat().st_mode == ordinary.stat().st_mode


# ---------------------------------------------------------------------------------------- on its own, at once


def test_the_root_modules_alone_run_the_three_commands(course_folder: Path, run: Callable):
    for name in ROOT_MODULES:
        shutil.copy(ROOT / name, course_folder)
    driver, base = course_folder / "run_llama.py", {"cwd": course_folder}
    succeed(run(driver, **base))
    succeed(run(driver, "--option", "prompt", **base))
    outputs = ["--dev_out", "cfimdb-dev-finetuning-output.txt", "--test_out", "cfimdb-test-finetuning-output.txt"]
    succeed(run(driver, "--option", "finetune", "--epochs", 1, *outputs, **base))
    for kind in ("prompting", "finetuning"):
        assert (course_folder / f"cfimdb-dev-{kind}-output.txt").is_file()


def test_help_names_every_flag_of_the_contract_without_importing_torch(run: Callable, tmp_path: Path):
    command = [sys.executable, "-X", "importtime", str(ROOT / "run_llama.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "config" in imported and not imported & {"torch", "sklearn", "numpy", "sentencepiece"}
    for flag in (
        "--train --dev --test --label-names --pretrained-model-path --max_sentence_len --seed --epochs --option "
        "--use_gpu --generated_sentence_low_temp_out --generated_sentence_high_temp_out --dev_out --test_out --lr "
        "--batch_size --hidden_dropout_prob --device --resume --tokenizer --prompt --max_new_tokens --attention"
    ).split():
        assert f"{flag} " in done.stdout or f"{flag}\n" in done.stdout or f"{flag}," in done.stdout
