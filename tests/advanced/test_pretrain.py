"""Training on text: documents, packing, the order of windows, going on after a stop, going on from a checkpoint."""

from __future__ import annotations

import json
import math
import re
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SENTENCES, random_llama
from torch import nn

from advanced.pretrain import DEFAULT_SHAPE as SIZES
from advanced.pretrain import check_args, get_args, main, outputs_of
from advanced.pretraining import SaverWithTokenizer, pretrain
from engine.plan import ComputeSettings, identity_of
from engine.tasks import NextToken
from engine.text.runs import (
    Passes,
    Rounds,
    hold_out,
    make_optimizer,
    pack,
    read_documents,
    train_and_held_out,
    train_tokenizer,
)
from engine.training import Diverged
from engine.weights import load_llama_model
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError, sha256_of

SHAPE = ["--dim", 32, "--n_layers", 2, "--n_heads", 4, "--n_kv_heads", 2, "--vocab_size", 380, "--max_seq_len", 32]
PUBLISHED = {  # how models of the tables of results were made, whose commands do not say it
    "epochs": 4.0, "lr": 3e-3, "warmup": 0.05, "batch_size": 16, "length": 256, "weight_decay": 0.1, "clip": 1.0,
    "held_out": 0.02, "every": 100, "seed": 1337,
}  # fmt: skip
PACE = ["--batch_size", 4, "--length", 16, "--every", 5, "--epochs", 6, "--held_out", 0.2]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Ten documents of two or three lines."""
    documents = [f"{SENTENCES[index]}\n{SENTENCES[index - 3]} .\nThe end" for index in range(10)]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return path


def test_a_command_without_flags_trains_as_it_always_has():
    found = vars(get_args(["--text", "text.txt", "--out", "new.pt"]))
    assert {name: found[name] for name in PUBLISHED} == PUBLISHED


def arguments(*flags: object) -> Namespace:
    args = get_args([str(flag) for flag in flags])
    check_args(args)
    return args


def rows_of(args: Namespace, most: int | None = None) -> list[dict]:
    """The figures of a run, or of its first rows: then it is stopped."""
    return [*islice(running(args), most)]


def running(args: Namespace) -> Iterator[dict]:
    compute = ComputeSettings(torch.device("cpu"), precision=str(args.precision))
    return pretrain(args, compute, outputs_of(args), SIZES)


# --------------------------------------------------------------------------------------------------------- text


def test_documents_are_what_stands_between_blank_lines(tmp_path: Path):
    (path := tmp_path / "text.txt").write_text("\n\none \n  two\n\n \nthree\n", encoding="utf-8")
    assert read_documents(path) == ["one\ntwo", "three"]


def test_of_a_data_file_the_labels_are_dropped(films: dict[str, Path]):
    documents = read_documents(films["train"])
    assert len(documents) == 24 and documents[0] == f"{SENTENCES[0]} , train 0"


def test_a_file_without_text_is_refused(tmp_path: Path):
    (path := tmp_path / "text.txt").write_text("\n \n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no text"):
        read_documents(path)


def test_a_text_that_mentions_the_separator_is_no_data_file(tmp_path: Path):
    (path := tmp_path / "text.txt").write_text("one ||| two\nthree\n", encoding="utf-8")
    assert read_documents(path) == ["one ||| two\nthree"]


def test_of_a_small_text_something_is_held_out_all_the_same():
    assert [len(part) for part in hold_out([f"document {index}" for index in range(10)], 0.02, 1)] == [9, 1]
    assert hold_out(["a\nb\nc"], 0.02, 0) == (["a\nb"], ["c"])
    assert [len(part) for part in hold_out(["a", "b", "c"], 0.99, 1)] == [1, 2]  # something is left to train on


def test_held_out_documents_are_drawn_once_and_not_trained_on():
    documents = [f"document {index}" for index in range(50)]
    train, held = hold_out(documents, 0.1, seed=3)
    assert len(held) == 5 and sorted(train + held) == sorted(documents)
    assert (train, held) == hold_out(documents, 0.1, seed=3) and held != hold_out(documents, 0.1, seed=4)[1]
    assert hold_out(["a\nb\nc\nd"], 0.25, seed=0) == (["a\nb\nc"], ["d"])
    with pytest.raises(UserError, match="one line"):
        hold_out(["alone"], 0.5, seed=0)


def test_packed_documents_have_their_boundaries(tokenizer: Tokenizer):
    ids = pack(["The plot\nwanders", "off"], tokenizer)
    first, second = tokenizer.sp_model.encode("The plot wanders"), tokenizer.sp_model.encode("off")
    assert ids == [tokenizer.bos_id, *first, tokenizer.eos_id, tokenizer.bos_id, *second, tokenizer.eos_id]


def test_every_pass_draws_each_window_once_in_its_own_order_wherever_the_run_begins():
    whole = Passes(windows=7, batch_size=2, steps=21, seed=5)
    drawn = [index for batch in whole for index in batch]
    passes = [drawn[start : start + 7] for start in range(0, 42, 7)]
    assert all(Counter(each) == Counter(range(7)) for each in passes) and len({*map(tuple, passes)}) > 3
    parts = Passes(windows=7, batch_size=2, steps=7, seed=5)
    again = []
    for epoch in (2, 1, 0):  # in any order: nothing is remembered from one to the next
        parts.set_epoch(epoch)
        again = [index for batch in parts for index in batch] + again
    assert again == drawn
    assert [*Passes(7, 2, 21, seed=6)] != [*whole]
    second, other = Passes(50, 50, 1, seed=5), Passes(50, 50, 1, seed=6)
    second.set_epoch(1)
    assert [*second] != [*other]  # a seed's second pass is not the next seed's first


def test_a_tokenizer_is_the_same_file_again_and_knows_every_byte():
    model = train_tokenizer(SENTENCES * 3, 380)
    assert train_tokenizer(SENTENCES * 3, 380) == model
    tokenizer = Tokenizer.from_bytes(model)
    assert tokenizer.n_words == 380 and tokenizer.pad_id == 3
    assert tokenizer.decode(tokenizer.encode("Ω 42 films", bos=True, eos=True)) == "Ω 42 films"
    rare = set(map(chr, range(33, 127))) - set("".join(SENTENCES))
    spelled = [tokenizer.sp_model.id_to_piece(each) for each in tokenizer.encode("".join(rare), bos=False, eos=False)]
    assert {"Q", "~"} < rare and not any(piece.startswith("<0x") for piece in spelled)
    years = Tokenizer.from_bytes(train_tokenizer([*SENTENCES, *["in 1999 and 1984"] * 50], 400))
    pieces = map(years.sp_model.id_to_piece, years.encode("in 1999", bos=False, eos=False))
    assert [piece for piece in pieces if re.search(r"\d", piece)] == ["1", "9", "9", "9"]
    with pytest.raises(UserError, match=r"^--vocab_size 9000 does not fit the text; it must be at most \d+$") as error:
        train_tokenizer(SENTENCES, 9000)
    train_tokenizer(SENTENCES, int(str(error.value).split()[-1]))
    with pytest.raises(UserError, match="^--vocab_size 260 does not fit the text; it must be larger"):
        train_tokenizer(SENTENCES, 260)


# ---------------------------------------------------------------------------------------------------------- runs


def test_a_model_is_trained_from_scratch_and_every_command_loads_it(tmp_path: Path, text: Path, drive: Callable):
    args = arguments("--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE, "--lr", 0.01, "--epochs", 40)
    rows = rows_of(args)
    assert rows[-1]["train"] < 0.5 * rows[0]["train"] and not args.out.with_suffix(".resume").exists()
    llama, tokenizer = load_llama_model(args.out), Tokenizer(tokenizer_model=args.out.with_suffix(".model"))
    assert llama.config.is_causal and llama.config.n_kv_heads == 2 and llama.config.vocab_size == tokenizer.n_words
    best = min(row["held_out"] for row in rows)
    assert loss_of(llama, held_out_ids(args, tokenizer), 16) == pytest.approx(best, abs=1e-5)
    (row,) = [row for row in rows if row["held_out"] == best][:1]
    assert row["perplexity"] == pytest.approx(math.exp(best))
    out = drive("--option", "perplexity", "--input", text, "--pretrained-model-path", args.out)
    assert "perplexity ::" in out
    assert "Temperature is 1.0" in drive("--option", "generate", "--pretrained-model-path", args.out, "--prompt", "The")


def held_out_ids(args: Namespace, tokenizer: Tokenizer) -> list[int]:
    return pack(hold_out(read_documents(args.text[0]), args.held_out, args.seed)[1], tokenizer)


def loss_of(llama: nn.Module, ids: list[int], length: int) -> float:
    """Nats a token, window by window and token by token."""
    losses = []
    for start in range(0, len(ids), length):
        window = [1, *ids[start : start + length]]
        for position in range(1, len(window)):
            logits = llama(torch.tensor([window[:position]]))[0][0, -1]
            losses.append(F.cross_entropy(logits, torch.tensor(window[position])).item())
    return sum(losses) / len(losses)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path, text: Path):
    def args_for(name: str, *flags: str) -> Namespace:
        return arguments("--text", text, "--out", tmp_path / f"{name}.pt", *SHAPE, *PACE, *flags)

    undisturbed = rows_of(args_for("one"))
    rows_of(args_for("other"), most=2)
    rows = rows_of(args_for("other", "--resume"))
    figures = [[(row["step"], row["train"], row["held_out"]) for row in each] for each in (undisturbed, rows)]
    assert figures[0] == figures[1] and len(rows) > 3
    one, other = (load_llama_model(tmp_path / f"{name}.pt").state_dict() for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_nobody_goes_on_without_the_best_model_so_far(tmp_path: Path, text: Path):
    """It was better than what is still to come may be, and would be missing in the end."""
    flags = "--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE
    rows_of(arguments(*flags), most=2)
    (tmp_path / "new.pt").unlink()
    with pytest.raises(UserError, match="new.pt does not exist; without it nobody can go on"):
        rows_of(arguments(*flags, "--resume"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.5), ("seed", 7), ("held_out", 0.3), ("precision", "bf16"), ("clip", 0.5), ("warmup", 0.2)]
    + [("weight_decay", 0.3), ("every", 4), ("epochs", 7), ("length", 15), ("batch_size", 5)],
)
def test_what_is_resumed_must_be_the_same_run(tmp_path: Path, text: Path, name: str, value: float | str):
    flags = "--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE, "--resume"
    rows_of(arguments(*flags), most=1)
    with pytest.raises(UserError, match=f"another (?:tokenizer, )?{name}"):
        rows_of(arguments(*flags, f"--{name}", value))


def test_what_is_resumed_must_read_the_same_text(tmp_path: Path, text: Path, tiny_checkpoint: Path):
    flags = "--text", text, "--out", tmp_path / "new.pt", "--init", tiny_checkpoint, *PACE, "--resume"
    rows_of(arguments(*flags), most=2)
    text.write_text(text.read_text(encoding="utf-8").replace("warm", "cold"), encoding="utf-8")
    with pytest.raises(UserError, match="another train"):
        rows_of(arguments(*flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("precision", "bf16"), ("warmup", 0.5), ("clip", 0.01), ("weight_decay", 5.0), ("lr", 0.1)]
)
def test_every_flag_of_the_pace_changes_what_is_learned(tmp_path: Path, text: Path, name: str, value: float | str):
    common = "--text", text, *SHAPE, *PACE
    one = rows_of(arguments(*common, "--out", tmp_path / "one.pt"))
    other = rows_of(arguments(*common, "--out", tmp_path / "other.pt", f"--{name}", value))
    assert one[-1]["held_out"] != other[-1]["held_out"]


def test_a_run_has_at_least_the_steps_that_its_passes_take():
    assert Rounds.of(Namespace(epochs=1, batch_size=4, every=3), rows=40) == (3, 4)  # ten are asked for
    assert Rounds.of(Namespace(epochs=1, batch_size=4, every=100), rows=2) == (1, 1)


def test_a_pass_is_over_whole_windows(tmp_path: Path, text: Path, tiny_checkpoint: Path):
    flags = "--text", text, "--init", tiny_checkpoint, *PACE, "--out", tmp_path / "new.pt", "--epochs", 1
    args = arguments(*flags)
    tokenizer = Tokenizer(tokenizer_model=tiny_checkpoint.with_suffix(".model"))
    whole, rest = divmod(len(pack(hold_out(read_documents(text), args.held_out, args.seed)[0], tokenizer)), 16)
    assert rest and rows_of(arguments(*flags, "--batch_size", whole))[-1]["step"] == 1


def test_of_each_text_other_places_are_held_out(tmp_path: Path):
    paths = [tmp_path / "one.txt", tmp_path / "other.txt"]
    for path in paths:
        path.write_text("\n\n".join(f"{path.stem} {compute}" for compute in range(50)), encoding="utf-8")
    flags = ("--text", *paths, "--out", tmp_path / "new.pt", "--held_out", 0.2, "--seed", 4)
    train, held = train_and_held_out(arguments(*flags))
    parts = [hold_out(read_documents(path), 0.2, 4 + number) for number, path in enumerate(paths)]
    assert (train, held) == tuple(one + other for one, other in zip(*parts, strict=True))
    places = [{each.split()[1] for each in held if each.startswith(path.stem)} for path in paths]
    assert len(places[0]) == len(places[1]) == 10 and places[0] != places[1]


def test_weight_decay_is_on_matrices_alone():
    groups = make_optimizer(random_llama(), 0.1, 0.3).param_groups
    assert {(each.dim(), group["weight_decay"]) for group in groups for each in group["params"]} == {(2, 0.3), (1, 0.0)}
    assert all((group["betas"], group["eps"]) == ((0.9, 0.95), 1e-8) for group in groups)


def test_the_rate_falls_to_nothing_at_the_end(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch):
    rates = []

    def watched(*how: object) -> AdamW:
        optimizer = make_optimizer(*how)
        step = optimizer.step
        monkeypatch.setattr(optimizer, "step", lambda: (rates.append(optimizer.param_groups[0]["lr"]), step()))
        return optimizer

    monkeypatch.setattr("engine.text.runs.make_optimizer", watched)
    rows_of(arguments("--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE, "--lr", 0.01))
    assert max(rates) == pytest.approx(0.01) and rates[-1] < 0.001 and rates[0] < 0.01


def test_the_figures_of_a_row_count_steps_and_bytes(tmp_path: Path, text: Path):
    text.write_text(text.read_text(encoding="utf-8").replace("a", "é"), encoding="utf-8")
    args = arguments("--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE)
    rows = rows_of(args)
    assert [row["step"] for row in rows] == [rows[0]["step"] * number for number in range(1, len(rows) + 1)]
    assert 4 <= rows[0]["step"] <= 6
    ids = held_out_ids(args, Tokenizer(tokenizer_model=tmp_path / "new.model"))
    size = sum(len(each.encode()) for each in hold_out(read_documents(text), args.held_out, args.seed)[1])
    bits = rows[0]["held_out"] * len(ids) / math.log(2)
    assert rows[0]["bits_per_byte"] == pytest.approx(bits / size)


def test_going_on_from_a_checkpoint_begins_with_what_that_predicts(tmp_path: Path, text: Path, tiny_checkpoint: Path):
    flags = "--text", text, "--out", tmp_path / "new.pt", "--init", tiny_checkpoint, *PACE
    args = arguments(*flags, "--lr", 0.003)
    rows = rows_of(args)
    tokenizer = Tokenizer(tokenizer_model=tiny_checkpoint.with_suffix(".model"))
    before = load_llama_model(tiny_checkpoint, attention="causal")
    ids = held_out_ids(args, tokenizer)
    assert rows[0]["step"] == 0 and rows[0]["held_out"] == pytest.approx(loss_of(before, ids, 16), abs=1e-5)
    assert rows[-1]["held_out"] < rows[0]["held_out"] - 0.3
    after = load_llama_model(args.out)
    assert after.config.is_causal and after.config.dim == before.config.dim
    assert args.out.with_suffix(".model").read_bytes() == tiny_checkpoint.with_suffix(".model").read_bytes()


def test_the_figures_are_written_without_text_or_folders(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    flags = "--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE
    run_main(monkeypatch, *flags)
    written = (tmp_path / "new.json").read_text(encoding="utf-8")
    figures = json.loads(written)
    config = load_llama_model(tmp_path / "new.pt").config
    assert {name: figures["settings"][name] for name in SIZES} == {name: getattr(config, name) for name in SIZES}
    assert str(tmp_path) not in written and figures["settings"]["text"] == ["text.txt"]
    printed = capsys.readouterr().out
    assert len(figures["curve"]) == printed.count("held-out loss ::") and "save the model to" in printed


@pytest.mark.slow
def test_a_model_that_is_made_again_counts_as_the_same_one(
    tmp_path: Path, text: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another processor rounds otherwise; what the command makes of the same texts is the same model all the same."""
    here, there = tmp_path / "new.pt", tmp_path / "there" / "else.pt"
    there.parent.mkdir()
    for out in (here, there):
        run_main(monkeypatch, "--text", text, "--out", out, *SHAPE, *PACE)
    record = json.loads(there.with_suffix(".json").read_text(encoding="utf-8"))
    assert record["weights"] == sha256_of(there)
    assert record["made_of"] == {
        "text": [sha256_of(text)], "tokenizer": sha256_of(there.with_suffix(".model")), "init": None
    }  # fmt: skip
    content = torch.load(there, weights_only=True)
    content["model"]["norm.weight"] += 1e-6
    torch.save(content, there)
    assert identity_of(there) == sha256_of(there) != identity_of(here)  # the record is not of these weights
    there.with_suffix(".json").write_text(json.dumps({**record, "weights": sha256_of(there)}), encoding="utf-8")
    assert identity_of(there) == identity_of(here) != sha256_of(here)

    other = tmp_path / "other.pt"
    run_main(monkeypatch, "--text", text, "--out", other, *SHAPE, *PACE, "--lr", 0.004)
    assert identity_of(other) != identity_of(here)
    first, second = (tmp_path / f"{name}.pt" for name in ("first", "second"))
    for init, out in ((here, first), (there, second)):  # what goes on from two makes of one model is one model, too
        run_main(monkeypatch, "--text", text, "--out", out, "--init", init, *PACE)
    assert sha256_of(first) != sha256_of(second) and identity_of(first) == identity_of(second)
    run_main(monkeypatch, "--text", text, "--out", tmp_path / "third.pt", "--init", other, *PACE)
    assert identity_of(tmp_path / "third.pt") != identity_of(first)


@pytest.mark.parametrize(
    "record", ["", "[1]", "null", '{"weights": 1}', '{"weights": "W"}', '{"weights": "W", "settings": 3}', "[" * 99_999]
)
def test_another_file_beside_a_checkpoint_says_nothing_of_it(tmp_path: Path, tiny_checkpoint: Path, record: str):
    copy = tmp_path / "copy.pt"
    shutil.copy(tiny_checkpoint, copy)
    copy.with_suffix(".json").write_text(record.replace("W", sha256_of(copy)), encoding="utf-8")
    assert identity_of(copy) == sha256_of(copy)


def run_main(monkeypatch: pytest.MonkeyPatch, *flags: object) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain", *map(str, flags)])
    main()


# 1e-30 moves no weight; 1e-12 moves a few, and 3 of 20 seeds (2026-11-25, AMD EPYC) then round to a loss that is lower.
@pytest.mark.parametrize(("lr", "warns"), [(1e-30, True), (0.003, False)])
def test_going_on_says_where_it_came_from_and_whether_it_has_helped(
    tmp_path: Path, text: Path, tiny_checkpoint: Path, lr: float, warns: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
):  # fmt: skip
    run_main(monkeypatch, "--text", text, "--out", tmp_path / "new.pt", "--init", tiny_checkpoint, *PACE, "--lr", lr)
    printed = capsys.readouterr()
    assert ("no better than" in printed.err) == warns and "(step 0," not in printed.out
    written = (tmp_path / "new.json").read_text(encoding="utf-8")
    assert str(tiny_checkpoint.parent) not in written and json.loads(written)["settings"]["init"] == "tiny.pt"


def test_the_row_that_is_said_to_be_the_best_is_that_of_the_held_out_text(
    tmp_path: Path, text: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    figures = [(0, 9.0, 2.5), (5, 3.0, 2.0), (10, 1.0, 4.0)]  # the loss on what is trained on goes on falling
    rows = [dict(step=n, train=loss, held_out=held, perplexity=held**2, bits_per_byte=1.0) for n, loss, held in figures]
    del rows[0]["train"]

    def told(args: Namespace, *where: Any) -> Iterator[dict]:
        shutil.copy(tiny_checkpoint, args.out)
        shutil.copy(tiny_checkpoint.with_suffix(".model"), args.out.with_suffix(".model"))
        yield from rows

    monkeypatch.setattr("advanced.pretraining.pretrain", told)
    run_main(monkeypatch, "--text", text, "--out", tmp_path / "new.pt", "--init", tiny_checkpoint, *PACE)
    printed = capsys.readouterr()
    assert "(step 5, held-out perplexity 4.00)" in printed.out and "no better" not in printed.err


def test_before_the_first_step_nothing_is_written(
    tmp_path: Path, text: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a checkpoint predicts before it is trained is no measurement of the new one."""

    def interrupted(*how: object, **settings: object) -> None:
        raise KeyboardInterrupt("interrupted")

    monkeypatch.setattr("engine.training.Trainer.fit", interrupted)
    with pytest.raises(KeyboardInterrupt, match="interrupted; nothing was saved"):
        run_main(monkeypatch, "--text", text, "--out", tmp_path / "new.pt", "--init", tiny_checkpoint, *PACE)
    assert files_beside(tmp_path / "new.pt") == {}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lr", 0], "--lr 0.0: must be above 0"),
        (["--held_out", 1], "--held_out"),
        (["--length", 64], "--length 64: the model has 32 positions"),
        (["--dim", 30], "no model has this shape"),
        (["--out", "new.bin"], "must end in .pt"),
        (["--out", "absent/new.pt"], "the folder absent does not exist"),
        (["--every", 0], "--every 0: must be at least 1"),
        (["--text", "absent.txt"], "absent.txt does not exist"),
        (["--text", "data"], "--text data is a folder"),
        (["--length", 16, "--batch_size", 0], "--batch_size 0"),
        (["--batch_size", 65537], "--batch_size 65537: must be at least 1 and at most 65536"),
        (["--epochs", "inf"], "--epochs inf: must be above 0 and finite"),
        (["--init", "checkpoints/minllama1M.pt"], "--dim: the shape is that of --init"),
        (["--tokenizer", "checkpoints/minllama1M.model"], "--vocab_size: the pieces are those of --tokenizer"),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path: Path, text: Path, flags: list, words: str):
    base = ["--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE]
    with pytest.raises(UserError, match=words) as error:
        rows_of(arguments(*base, *flags))
    assert "\n" not in str(error.value) and [*tmp_path.glob("new*")] == []


def test_a_text_that_is_named_twice_is_refused(tmp_path: Path, text: Path):
    with pytest.raises(UserError, match="text.txt twice"):
        arguments("--text", text, text.parent / "." / text.name, "--out", tmp_path / "new.pt")


@pytest.mark.parametrize(("name", "warns"), [("sst-dev", True), ("TEST_2", True), ("device", False), ("train", False)])
def test_sentences_of_dev_and_test_are_not_trained_on_unseen(
    tmp_path: Path, text: Path, name: str, warns: bool, capsys: pytest.CaptureFixture
):
    path = text.rename(tmp_path / f"{name}.txt")
    arguments("--text", path, "--out", tmp_path / "new.pt")
    assert ("scores there say nothing more" in capsys.readouterr().err) == warns


def files_beside(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.parent.glob(f"{out.stem}.*")}


def test_what_is_there_is_not_overwritten(tmp_path: Path, text: Path):
    """Neither a finished checkpoint, nor its tokenizer alone, nor an interrupted run."""
    out = tmp_path / "new.pt"
    flags = "--text", text, "--out", out, *SHAPE, *PACE
    rows_of(arguments(*flags), most=1)
    interrupted = files_beside(out)
    assert interrupted.keys() == {"new.pt", "new.model", "new.resume"}
    with pytest.raises(UserError, match="new.resume is of an interrupted run; go on with --resume"):
        arguments(*flags)
    rows_of(arguments(*flags, "--resume"))
    finished = files_beside(out)
    assert finished.keys() == {"new.pt", "new.model"}
    with pytest.raises(UserError, match="new.pt is there already; name another --out"):
        arguments(*flags)
    with pytest.raises(UserError, match="there already, and there is no .*new.resume to go on from"):
        arguments(*flags, "--resume")
    assert files_beside(out) == finished
    out.unlink()
    with pytest.raises(UserError, match="new.model is there already"):
        arguments(*flags)


def test_a_run_that_goes_on_writes_its_tokenizer_again(tmp_path: Path, text: Path):
    flags = "--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE
    rows_of(arguments(*flags), most=1)
    model = (tmp_path / "new.model").read_bytes()
    (tmp_path / "new.model").unlink()
    rows_of(arguments(*flags, "--resume"), most=1)
    assert (tmp_path / "new.model").read_bytes() == model


def test_two_runs_do_not_share_a_name(tmp_path: Path, text: Path):
    flags = "--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE
    first = running(arguments(*flags))
    next(first)
    with pytest.raises(UserError, match="in use by another process"):
        rows_of(arguments(*flags, "--resume"))
    first.close()
    assert not (tmp_path / "new.pt.lock").exists() and rows_of(arguments(*flags, "--resume"))


def test_what_somebody_else_makes_meanwhile_is_not_overwritten(tmp_path: Path, text: Path):
    """Before the run begins, before its first measurement, and a tokenizer beside a run that goes on."""
    out, model = tmp_path / "new.pt", tmp_path / "new.model"
    flags = "--text", text, "--out", out, *SHAPE, *PACE
    args = arguments(*flags)
    out.write_bytes(b"theirs")
    with pytest.raises(UserError, match="new.pt is there already"):
        rows_of(args)
    out.unlink()
    checkpointer = SaverWithTokenizer(out, tmp_path / "new.resume", tokenizer_file=b"ours")
    out.write_bytes(b"theirs")
    with pytest.raises(UserError, match="--out: .*new.pt is there already"):
        checkpointer.save_model(nn.Linear(1, 1), None)
    assert out.read_bytes() == b"theirs" and not model.exists()
    out.unlink()
    rows_of(args, most=1)
    model.write_bytes(b"theirs")
    with pytest.raises(UserError, match="new.model is another tokenizer than this run's"):
        rows_of(arguments(*flags, "--resume"))
    assert model.read_bytes() == b"theirs"


def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, text: Path, tiny_checkpoint: Path
):
    (other := tmp_path / "other.model").write_bytes(train_tokenizer(SENTENCES * 3, 380))
    flags = "--text", text, "--out", tmp_path / "new.pt", *PACE, "--init", tiny_checkpoint, "--tokenizer", other
    with pytest.raises(UserError, match="other.model has 380 pieces, and .* a vocabulary of"):
        rows_of(arguments(*flags))
    assert files_beside(tmp_path / "new.pt") == {}


@pytest.mark.parametrize(("after", "kept"), [(0, "nothing was saved"), (1, "the best model so far stays in .*new.pt")])
@pytest.mark.parametrize("error", [Diverged("the loss is nan"), KeyboardInterrupt("interrupted")])
def test_a_run_that_ends_early_says_what_is_kept(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int, kept: str
):
    """In the round after so many measurements."""
    steps = count()

    def stopped(self: NextToken, *args: object) -> object:
        if next(steps) == 5 * after + 3:
            raise error
        return plain(self, *args)

    plain = NextToken.loss
    monkeypatch.setattr(NextToken, "loss", stopped)
    flags = "--text", text, "--out", tmp_path / "new.pt", *SHAPE, *PACE
    with pytest.raises((UserError, KeyboardInterrupt), match=f"{error}; .*{kept}"):
        run_main(monkeypatch, *flags)
    names = {"new.pt", "new.model", "new.json", "new.resume"} if after else set()
    assert files_beside(tmp_path / "new.pt").keys() == names


def test_an_input_is_not_overwritten(tmp_path: Path, text: Path, tiny_checkpoint: Path):
    (tmp_path / "new.resume").touch()
    for suffix in (".model", ".resume", ".pt.lock"):  # a .json is refused as text
        text = text.rename(tmp_path / f"new{suffix}")
        with pytest.raises(UserError, match=f"new{suffix} is also an input"):
            arguments("--text", text, "--out", tmp_path / "new.pt", "--resume")
    with pytest.raises(UserError, match="is also an input"):
        arguments("--text", text, "--init", tiny_checkpoint, "--out", tiny_checkpoint)
