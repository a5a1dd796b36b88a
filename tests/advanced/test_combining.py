"""Saved models combined: the mean of their probabilities, the mean of their weights, and which of them greedy keeps."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import SENTENCES, drive_in
from test_methods import ADVANCED

from advanced import choose
from advanced.soup import mean_of, soup
from advanced.vote import vote
from bert.config import BertConfig
from bert.heads import BertForSequenceClassification
from bert.model import Bert
from bert.wordpiece import WordPiece
from engine.data import create_data
from engine.runs import load_classifier, predict, record_of, save_classifier
from engine.storage import load_tensors
from utils import UserError


class Saved(NamedTuple):
    folder: Path
    flags: list[str]  # of a fine-tuning on the tiny data, with methods

    def models(self, names: str) -> str:
        return "models=" + ",".join(str(self.folder / f"{name}.pt") for name in names)

    def states(self, names: str) -> list[dict[str, torch.Tensor]]:
        return [load_classifier(self.folder / f"{name}.pt")[0].state_dict() for name in names]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, classify_flags: Callable) -> Saved:
    """Three Llamas a, b, c of one shape and batches of 4, two with adapters d, e, a BERT f, one with other labels g."""
    folder, flags = tmp_path_factory.mktemp("saved"), [*classify_flags("finetune"), *ADVANCED]
    plain = [*classify_flags("finetune"), "--epochs", 1, "--batch_size", 4, "--no_train_eval"]
    for name, lr in (("a", 0.01), ("b", 0.02), ("c", 0.03)):
        drive_in(folder, *plain, "--lr", lr, "--model_out", f"{name}.pt", "--hold_out", 0.25)
    for name, lr in (("d", 0.02), ("e", 0.03)):
        drive_in(folder, *plain, *ADVANCED, "--lr", lr, "--model_out", f"{name}.pt", "--method", "adapter")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*" ".join(SENTENCES).lower().split()})]
    config = BertConfig(vocab_size=len(pieces), dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_seq_len=64)
    torch.manual_seed(0)
    bert, tokenizer = BertForSequenceClassification(Bert(config), 2), WordPiece(pieces)
    for name, labels in (("f", ("bad", "good")), ("g", ("good", "bad"))):
        save_classifier(folder / f"{name}.pt", bert, record_of(bert, tokenizer, labels, 4))
    return Saved(folder, flags)


def lines_of(path: Path) -> list[int]:
    return [int(line.partition(" ||| ")[0]) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("option", ["finetune", "prompt"])
@pytest.mark.parametrize("names", ["abc", "af"])
def test_a_vote_is_for_the_largest_mean_of_what_predict_says(
    saved: Saved, drive: Callable, tmp_path: Path, films: dict[str, Path], names: str, option: str
):
    given = ["--option", option, "--method", "vote", "--method-args", saved.models(names)]
    printed = drive(*saved.flags, *given, "--pretrained-model-path", "needed by nobody")
    for split in ("dev", "test"):
        examples, sums = create_data(films[split]), 0
        for name in names:
            model, about = load_classifier(saved.folder / f"{name}.pt")
            rows = predict(model, about, [example.sentence for example in examples])
            sums = sums + np.array([row.probabilities for row in rows])
        labels = sums.argmax(axis=1).tolist()
        assert lines_of(tmp_path / f"films-{split}-advanced-output.txt") == labels
        right = np.mean([example.label == label for example, label in zip(examples, labels, strict=True)])
        assert f"\n{split} acc :: {right:.3f}\n" in printed
    assert "--option predict takes one of its models at a time" in printed and not [*tmp_path.glob("*.pt")]


def test_a_vote_counts_probabilities_not_labels():
    sure, unsure = [[0.95, 0.05]], [[0.4, 0.6]]
    assert vote([unsure, sure, unsure]) == [0] and vote([unsure, unsure]) == [1]
    assert vote([[[0.5, 0.5]], [[0.5, 0.5]]]) == [0]


@pytest.mark.parametrize("names", ["abc", "de"])
def test_a_soup_is_the_mean_of_the_weights_and_its_file_predicts_what_the_run_wrote(
    saved: Saved, drive: Callable, tmp_path: Path, films: dict[str, Path], names: str
):
    """Also of weights that a method keeps beside the model."""
    printed = drive(*saved.flags, "--method", "soup", "--method-args", saved.models(names), "--model_out", "soup.pt")
    states = saved.states(names)
    model, about = load_classifier(tmp_path / "soup.pt")
    assert model.state_dict().keys() == states[0].keys() and about.batch_size == 4
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, sum(state[name] for state in states) / len(states))
    assert not torch.equal(model.classifier_head.weight, states[0]["classifier_head.weight"])
    by_hand, _ = load_classifier(saved.folder / f"{names[0]}.pt")
    by_hand.load_state_dict({name: sum(state[name] for state in states) / len(states) for name in states[0]})
    sentences = [example.sentence for example in create_data(films["dev"])]
    for each in (model, by_hand):
        labels = [row.label for row in predict(each, about, sentences)]
        assert lines_of(tmp_path / "films-dev-advanced-output.txt") == labels
    assert "save the model to soup.pt" in printed and "\ndev acc :: " in printed and "\ntest acc :: " in printed
    content = load_tensors(tmp_path / "soup.pt")
    assert len(content["identity"]["methods"]["soup"]["models"]) == len(names)
    assert content["methods"].keys() == ({"adapter"} if names == "de" else set())


def test_prompt_writes_what_finetune_does_and_saves_nothing(saved: Saved, drive: Callable, tmp_path: Path):
    given = ["--method", "soup", "--method-args", saved.models("abc")]
    drive(*saved.flags, *given)
    (path,) = tmp_path.glob("finetune-5-2e-05-soup-*.pt")
    written = {each.name: each.read_bytes() for each in tmp_path.glob("*.txt")}
    path.unlink()
    drive(*saved.flags, "--option", "prompt", *given)
    assert written == {each.name: each.read_bytes() for each in tmp_path.glob("*.txt")}
    assert len(written) == 2 and not [*tmp_path.glob("*.pt")]


@pytest.mark.parametrize("seed", range(8))
def test_greedy_keeps_what_the_recipe_keeps(seed: int):
    """Against the loop of recipe 1, with scores of few values, so that many are equal."""
    drawn = random.Random(seed)
    states = [{"w": torch.tensor([drawn.uniform(-1, 1)])} for _ in range(6)]

    def score(state: dict[str, torch.Tensor]) -> float:
        return round(1 - abs(state["w"].item() - 0.1), 1)

    kept, scores = soup(states, "greedy", score)
    ranked = sorted(enumerate(states), key=lambda each: (-score(each[1]), each[0]))
    ingredients = [ranked[0]]
    for each in ranked[1:]:
        if score(mean_of([s for _, s in [*ingredients, each]])) >= score(mean_of([s for _, s in ingredients])):
            ingredients.append(each)
    assert kept == [number for number, _ in ingredients] and scores == [score(state) for state in states]
    assert score(mean_of([states[number] for number in kept])) >= max(scores)
    assert soup(states, "uniform", score) == ([*range(6)], [])


@pytest.mark.parametrize(("share", "data"), [(0.25, "held-out"), (0.5, "held-out"), (0, "dev")])
def test_greedy_says_which_data_it_chose_on(
    saved: Saved, drive: Callable, tmp_path: Path, capsys: pytest.CaptureFixture, share: float, data: str
):
    given = ["--method", "soup", "--method-args", saved.models("abc"), "kind=greedy", "--model_out", "soup.pt"]
    printed = drive(*saved.flags, *given, "--hold_out", share)
    assert f"greedy: the models are sorted and kept by their accuracy on {data}" in printed
    kept = [
        name
        for name in "abc"
        if any(f"{name}.pt: {data} acc" in s and s.endswith(", kept") for s in printed.split("\n"))
    ]
    mean = mean_of(saved.states("".join(kept)))
    torch.testing.assert_close(load_classifier(tmp_path / "soup.pt")[0].state_dict(), mean)
    assert ("may have seen that part" in capsys.readouterr().err) == (share == 0.5)  # they held out a quarter


def test_a_bert_is_mixed_by_its_own_program(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from bert import run

    shutil.copy(saved.folder / "f.pt", tmp_path / "f2.pt")
    monkeypatch.chdir(tmp_path)
    flags = [*map(str, saved.flags), "--method", "soup", "--model_out", "s.pt"]
    at = flags.index("--pretrained-model-path")
    monkeypatch.setattr(
        "sys.argv", ["run", *flags[:at], *flags[at + 2 :], "--method-args", saved.models("f") + ",f2.pt"]
    )
    run.main()
    torch.testing.assert_close(load_classifier("s.pt")[0].state_dict(), saved.states("f")[0])


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        ("a", [], "must be at least 2 files that finetune has saved, joined by commas, each once"),
        ("aa", [], "each once"),
        ("ax", [], "x.pt does not exist"),
        ("af", [], "f.pt has another kind of model than"),
        ("ad", [], "d.pt has another method than"),
        ("ag", [], "g.pt has the labels good, bad, and the data have bad, good"),
        ("ab", ["--model_out", "{b}"], "b.pt of --method-args"),
        ("ab", ["--log_dir", "here"], "--log_dir is not for --method soup, which trains nothing"),
        ("ab", ["--resume"], "--resume is not for --method soup"),
        (
            "ab",
            ["--method", "vote", "--model_out", "v.pt"],
            "--model_out is not for --method vote, which saves no model",
        ),
        ("ab", ["--method", "vote,ema"], "vote cannot be combined with other methods"),
        ("ab", ["--method", "lora"], "no argument of that name"),
    ],
)
def test_what_cannot_be_combined_is_refused(saved: Saved, refused: Callable, names: str, given: list[str], words: str):
    flags = [*saved.flags, *([] if "--method" in given else ["--method", "soup"]), "--method-args", saved.models(names)]
    refused([*flags, *(each.replace("{b}", str(saved.folder / "b.pt")) for each in given)], words)


def test_one_file_under_two_names_and_no_file_at_all_are_refused(saved: Saved, refused: Callable, tmp_path: Path):
    (tmp_path / "link.pt").symlink_to(saved.folder / "a.pt")
    refused([*saved.flags, "--method", "soup", "--method-args", saved.models("a") + ",link.pt"], "are one file")
    with pytest.raises(UserError, match="vote: name the saved models"):
        choose("vote")
