"""The list of methods: all of them, with what each trains of the checkpoint at hand."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT, asset, drive_in, random_llama

from advanced import METHODS
from advanced.listing import count_trained, lines_of, trained_by
from classifier import LlamaEmbeddingClassifier
from config import LlamaConfig
from engine import flags as engine_flags
from tokenizer import Tokenizer
from utils import UserError

ALL_METHODS = [*METHODS]  # before those that are not at hand are taken out
NAMES = ["bad", "average", "good"]


@pytest.fixture(autouse=True)
def at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those whose file is here: some folders hold a part of the package."""
    for name, entry in [*METHODS.items()]:
        if importlib.util.find_spec(entry.class_path.rpartition(".")[0]) is None:
            monkeypatch.delitem(METHODS, name)


def rows_of(out: str) -> dict[str, list[str]]:
    """The cells of the table, by the method's name."""
    table = out[out.index("method  ") :].partition("\n\n")[0]
    rows = (line for line in table.splitlines()[1:] if not line.startswith(" "))
    return {line.split()[0]: re.split(r" {2,}", line) for line in rows}


def unwrapped(out: str) -> str:
    """A list in which each text is in one line."""
    return re.sub(r"(?<=\S)\n {4,}", " ", out)


def test_parameters_are_those_of_the_shape(tokenizer: Tokenizer):
    llama = random_llama()
    config, whole = llama.config, sum(parameter.numel() for parameter in llama.parameters())
    head = sum(p.numel() for n, p in LlamaEmbeddingClassifier(Settings, llama=llama).named_parameters() if "head" in n)
    trained = count_trained(config, tokenizer, NAMES)
    assert trained.keys() == METHODS.keys()
    assert {trained[name] for name in ("direct", "calibrated", "pmi", "channel")} == {0}
    assert trained["prompt-finetune"] == whole and trained["ema"] == whole + head
    queries_and_values = 8 * (32 + 32) + 8 * (32 + 16)  # r (i + o), two of four heads have values
    assert trained["lora"] == config.n_layers * queries_and_values + head


class Settings:
    num_labels, hidden_dropout_prob, option, pad_id = 3, 0.0, "finetune", 3


def test_counting_takes_no_memory_and_no_random_numbers(tokenizer: Tokenizer):
    huge = LlamaConfig(vocab_size=300, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672)
    assert trained_by("ema", huge, tokenizer, NAMES) > 6e10
    torch.manual_seed(3)
    before = torch.get_rng_state()
    count_trained(LlamaConfig.from_preset("tiny"), tokenizer, NAMES)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_method_and_argument_is_listed():
    lines = [*lines_of()]
    out = "\n".join(lines)
    whole = unwrapped(out)
    assert max(map(len, lines)) <= 100
    for name, entry in METHODS.items():
        row = rows_of(out)[name]
        assert row == [name, ", ".join(entry.options), "-", entry.paper]
        assert f"{entry.summary}; costs: {entry.cost}" in whole
        assert entry.holds_out == ("a tenth of train is held out" in entry.cost)
        for key, argument in entry.arguments.items():
            line = next(each for each in whole.splitlines() if argument.help in each and f"  {key}=" in each)
            assert str(argument.default).lower() in line.lower()
    assert "python -m advanced.pretrain --init CKPT --text FILE... --out NEW.pt" in out and "2004.10964" in out


def test_the_driver_lists_what_the_checkpoint_at_hand_has(tmp_path: Path, drive: Callable, tiny_checkpoint: Path):
    out = drive("--list-methods", "--pretrained-model-path", tiny_checkpoint, "--option", "finetune", "--dev_out", "x")
    whole = sum(parameter.numel() for parameter in random_llama().parameters())
    rows = rows_of(out)
    assert rows["prompt-finetune"][2] == f"{whole:,}" and rows["direct"][2] == "0" and rows.keys() == METHODS.keys()
    assert f"those of {tiny_checkpoint.name} with 2 labels." in out
    assert not [*tmp_path.iterdir()]


def test_one_method_can_be_listed_with_what_it_does_not_combine_with(drive: Callable):
    out = unwrapped(drive("--list-methods", "--pretrained-model-path", "absent.pt", "--method", "ema,reinit"))
    assert rows_of(out).keys() == {"ema", "reinit"} and "  rank=8" not in out
    assert "\n  not with swa: each says which average" in out
    assert "\n  not with mixout, mixconnect, wise-ft: what is drawn anew has no pretrained weights" in out
    assert ": what is drawn anew would never be trained" in out and out.count("not with") == 3
    out = unwrapped(drive("--list-methods", "--pretrained-model-path", "absent.pt", "--method", "direct"))
    assert "\n  for causal models alone\n" in out and "not with padding-mask: one is for causal models" in out
    assert "  not with calibrated, pmi, channel, in-context, prompt-finetune, auto-words: each says what" in out
    with pytest.raises(UserError, match="there is no method 'nope'; there are direct"):
        drive("--list-methods", "--method", "nope")


def test_without_a_checkpoint_the_counts_are_left_out(drive: Callable):
    out = drive("--list-methods", "--pretrained-model-path", "absent.pt")
    assert "left out: --pretrained-model-path absent.pt does not exist" in out
    assert {row[2] for row in rows_of(out).values()} == {"-"}


def test_another_tokenizer_is_an_error(tmp_path: Path, tiny_checkpoint: Path, assets: Path):
    flags = ["--list-methods", "--pretrained-model-path", tiny_checkpoint]
    with pytest.raises(UserError, match="name the right one with --tokenizer"):
        drive_in(tmp_path, *flags, "--tokenizer", asset(assets, "tok512.model"))


def test_the_flag_is_known():
    assert engine_flags.get_args(["--list-methods"]).list_methods and not engine_flags.get_args([]).list_methods


def test_the_page_sorts_every_method_into_one_of_the_seven_directions():
    page = (ROOT / "advanced" / "README.md").read_text(encoding="utf-8")
    table = page.partition("## The seven directions")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(cells) == 7
    named = [name for cell in cells for name in re.findall(r"`([a-z0-9-]+)`", cell)]
    assert sorted(named) == sorted(ALL_METHODS)


def test_the_first_table_of_the_readme_names_every_method():
    page = (ROOT / "advanced" / "README.md").read_text(encoding="utf-8")
    table = page.partition("| method | pooled |")[2].partition("\n\n")[0]
    assert {*ALL_METHODS} <= {*re.findall(r"`([a-z0-9-]+)`", table)}


def test_a_method_of_which_nothing_is_known_says_so():
    page = (ROOT / "advanced" / "README.md").read_text(encoding="utf-8")
    not_known = {*re.findall(r"^- whether `([a-z0-9-]+)` gains", page, flags=re.MULTILINE)}
    table = unwrapped("\n".join(lines_of())).partition("\n\n")[0].splitlines()[1:]
    assert {line.split()[0] for line in table if "is not known" in line} == not_known & METHODS.keys() != set()
