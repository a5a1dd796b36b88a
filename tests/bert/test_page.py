"""`bert/README.md`: its links lead somewhere, its commands are understood, its lines of Python run."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from advanced.experiments import __main__ as experiments
from advanced.table import METHODS
from bert import pretrain, questions, run
from bert.config import BertConfig
from bert.examples import Noise
from bert.package import PACKAGE, installed
from bert.pairs import SHORT_PAIRS
from engine import flags as engine_flags
from utils import UserError

BERT_FOLDER = ROOT / "bert"
EXPERIMENT_RESULTS = ROOT / "advanced" / "experiments" / "results"
README = (BERT_FOLDER / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
LINKS = [*dict.fromkeys(re.findall(r"\[([^]]+)\]\(([^)]+)\)", PROSE))]
PARSERS = {
    "bert.run": run.get_args,
    "bert.pretrain": pretrain.get_args,
    "bert.questions": questions.get_args,
    "run_llama.py": engine_flags.get_args,
    "advanced.experiments": experiments.get_args,
}


def defined_in(path: Path) -> set[str]:
    """The names of all classes and functions of a module."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def commands() -> list[list[str]]:
    """What the blocks say to the shell, as words."""
    blocks = re.findall(r"\n\n```\n(.*?)```", README, re.DOTALL)  # those without a language
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize(("words", "target"), LINKS)
def test_a_link_leads_to_a_file_and_to_the_name_that_it_shows(words: str, target: str):
    if target.startswith("https://"):
        return
    assert (BERT_FOLDER / target).is_file()
    if words.startswith("`"):
        assert words.strip("`") in defined_in(BERT_FOLDER / target)


def test_every_drawing_is_shown_and_described():
    shown = dict(re.findall(r"!\[([^]]+)\]\((drawings/[^)]+)\)", PROSE))
    assert {*shown.values()} == {f"drawings/{path.name}" for path in (BERT_FOLDER / "drawings").glob("*.svg")}
    assert all(len(words) > 20 for words in shown)


def test_the_commands_are_understood():
    asked = set()
    for words in commands():
        program, *flags = words[2:] if words[1] == "-m" else words[1:]
        args = PARSERS[program](flags)
        option = getattr(args, "option", None)
        asked.add((program, option))
        for name in ("train", "dev", "test", "label_names"):
            if option == "finetune":
                assert (ROOT / getattr(args, name)).is_file()
    of_bert = {("bert.run", option) for option in run.BERT_OPTIONS if option != "pretrain"}
    others = {(name, None) for name in ("bert.pretrain", "bert.questions", "advanced.experiments")}
    assert asked == {*of_bert, *others, ("run_llama.py", "predict")}


def test_a_file_that_a_command_reads_is_there_or_written_by_the_one_before():
    wrote = {words[words.index(flag) + 1] for words in commands() for flag in ("--model_out", "--out") if flag in words}
    read = "--model", "--pretrained-model-path", "--init"
    assert {words[words.index(flag) + 1] for words in commands() for flag in read if flag in words} - {PACKAGE} == wrote
    (qa,) = (words for words in commands() if "qa" in words and "--train" in words)
    assert [qa[qa.index(flag) + 1] for flag in ("--train", "--dev")] == ["questions-train.json", "questions-dev.json"]
    (predict,) = (words for words in commands() if "predict" in words)
    assert (ROOT / predict[predict.index("--input") + 1]).is_file()


def test_the_flags_that_the_text_names_are_there(capsys: pytest.CaptureFixture):
    for option in run.BERT_OPTIONS:
        with pytest.raises(SystemExit):
            args = run.get_args(["--option", option, "--help"])
            pretrain.get_args(args.rest)
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out)) | {"--bert", "--local-dir"}  # of setup.sh, of hf
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", PROSE))
    assert "--pretrained-model-path" in named and named <= known
    assert "--bert" in (ROOT / "setup.sh").read_text(encoding="utf-8")


def test_figures_of_the_text_are_those_of_the_code():
    noise, base, large = Noise(), BertConfig.from_preset("base"), BertConfig.from_preset("large")
    plain = " ".join(PROSE.split())
    assert f"chooses {noise.share:.0%} of the tokens" in plain
    assert f"{noise.mask:.0%} become [MASK], {noise.random:.0%} a token drawn" in plain
    assert f"Only {noise.share * noise.random:.1%} of all tokens" in plain
    assert SHORT_PAIRS == 0.1 and "One row in ten" in plain
    assert f"Base has {base.n_layers} layers of {base.dim} with {base.n_heads} heads" in plain
    assert f"large has {large.n_layers} of {large.dim} with {large.n_heads}" in plain
    assert f"the published uncased one {base.vocab_size:,}" in plain and f"table: {base.max_seq_len} in" in plain


@pytest.mark.slow
def test_the_lines_of_python_run(tmp_path: Path):
    try:
        installed()
    except UserError:
        pytest.skip("the package that the page begins with is not installed")
    (lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "['masked_lm', 'next_sentence']" in done.stdout and "[1, 15, 384]" in done.stdout


def test_the_methods_that_the_text_excepts_are_those_that_are_not_for_a_bert():
    said = re.search(r"need a part of a Llama: ([\w\s,-]+) \(", PROSE)[1].replace("\n", " ").split(", ")
    assert said == [name for name, entry in METHODS.items() if "bert" not in entry.families]


def test_what_was_learned_of_real_text_is_what_the_files_say():
    table = re.search(r"<!-- of the files -->\n(.*?)\n\n", README, re.DOTALL)[1].splitlines()[2:]
    for line in table:
        name, file = re.search(r"\[(.+)\]\((.+)\)", line).groups()
        cells = [cell.strip() for cell in line.split("|")[3:8]]
        record = json.loads((BERT_FOLDER / file).read_text(encoding="utf-8"))
        first, last = record["curve"][0], record["curve"][-1]
        shares = last["hidden_accuracy"], first["unigram_accuracy"], last.get("next_accuracy")
        found = [f"{last['hidden_perplexity']:.0f}", f"{first['unigram_perplexity']:.0f}"]
        found += ["" if share is None else f"{share:.3f}"[1:] for share in shares]
        assert cells == found and file.endswith(f"/{name}.json")
        assert ("--mask 1 --random 0" in line) == (record["settings"]["mask"] == 1)
        assert ("--no_nsp" in line) == record["settings"]["no_nsp"]
    assert len(table) > 4
    curve = json.loads((EXPERIMENT_RESULTS / "base3M-encoder.json").read_text(encoding="utf-8"))["curve"]
    steps, figure = re.search(r"2,322 and then (\d+), .* was at (\d+)\.", README).groups()
    assert [f"{row['hidden_perplexity']:.0f}" for row in curve if row["step"] == int(steps)] == [figure]


def test_what_the_small_bert_learned_is_what_its_file_says():
    record = json.loads((EXPERIMENT_RESULTS / "minilm-encoder-films.json").read_text(encoding="utf-8"))
    first, last = record["curve"][0], record["curve"][-1]
    shares = last["next_accuracy"], first["next_accuracy"]
    assert (
        f"{record['seconds'] / 60:.0f} minutes on one core:\n\n```\npython -m bert.pretrain --init {PACKAGE}" in README
    )
    text = " ".join(PROSE.split())
    assert f"a perplexity of {first['hidden_perplexity']:,.0f} at [MASK]; after {last['step']} steps" in text
    assert "hardly begun to learn: {}, {} before.".format(*(f"{share:.3f}"[1:] for share in shares)) in text


@pytest.mark.parametrize("name", ["base3M-encoder-short", "base3M-encoder", "minilm-encoder-films"])
def test_the_commands_of_real_text_are_those_of_the_files(name: str):
    (words,) = (words for words in commands() if words[-2:] == ["--out", name])
    said, path = vars(pretrain.get_args(words[3:])), EXPERIMENT_RESULTS / f"{name}.json"
    done = json.loads(path.read_text(encoding="utf-8"))["settings"]
    given = {flag: value for flag, value in said.items() if flag in done and value is not None}
    if given.get("init") == PACKAGE:
        given["init"] = "model"  # the folder in the package
    assert given == {flag: done[flag] for flag in given} and len(given) > 15
