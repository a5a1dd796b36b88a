"""What a BERT says of a text on the command line: tokens for masks, next sentences, answers; beside transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from error_helpers import refused
from small import PIECES, call, our_directory, shake, write_vocabulary  # noqa: F401

from bert.config import BertConfig
from bert.heads import BertForPreTraining, BertForQuestionAnswering
from bert.load import load_bert, load_model, load_tokenizer
from bert.model import Bert
from bert.questions import FACTS, NOT_SAID, squad
from bert.save import save_pretrained
from bert.wordpiece import WordPiece
from engine.training import Trainer


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with both heads of pre-training."""
    folder = tmp_path_factory.mktemp("pretrained")
    model = BertForPreTraining(load_bert(our_directory(folder / "encoder")))
    shake(model)
    save_pretrained(folder / "whole", model, WordPiece(PIECES))
    return folder / "whole"


# --------------------------------------------------------------------------------------- masks, next sentences


def test_masks_are_filled_as_transformers_fills_them(call: Callable, pretrained: Path):
    text = "the [MASK] is very [MASK] !"
    printed = call("--option", "fill-mask", "--pretrained-model-path", pretrained, "--text", text, "--top", 3)
    found = [(float(score), piece) for score, piece in re.findall(r"^(0\.\d{4}|1\.0000)  (.*)$", printed, re.MULTILINE)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    model = transformers.BertForPreTraining.from_pretrained(pretrained).eval()
    encoded = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        chances = model(**encoded).prediction_logits[0].softmax(-1)
    expected = []
    for place in (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist():
        best = chances[place].topk(3)
        expected += zip(best.values.tolist(), tokenizer.convert_ids_to_tokens(best.indices.tolist()), strict=True)
    assert [piece for _, piece in found] == [piece for _, piece in expected] and len(found) == 6
    assert all(abs(score - other) < 1e-4 for (score, _), (other, _) in zip(found, expected, strict=True))
    assert "[MASK] 1 of 2" in printed and "[MASK] 2 of 2" in printed


def test_a_text_without_a_mask_is_refused(call: Callable, pretrained: Path):
    given = ["--option", "fill-mask", "--pretrained-model-path", pretrained, "--text"]
    refused(r"^--text has no \[MASK\] to be filled$", call, *given, "the film")
    refused("to be filled in the part that is read", call, *given, "very [MASK]", "--max_sentence_len", 1)


@pytest.mark.parametrize(("text", "other"), [("the film", "is good"), ("a play", "don't !"), ("very bad", "2 0")])
def test_next_sentences_are_those_of_transformers(call: Callable, pretrained: Path, text: str, other: str):
    printed = call("--option", "nsp", "--pretrained-model-path", pretrained, "--text", text, "--text_b", other)
    answer, probability = printed.splitlines()[-1].split()
    encoded = transformers.AutoTokenizer.from_pretrained(pretrained)(text, other, return_tensors="pt")
    with torch.no_grad():
        model = transformers.BertForPreTraining.from_pretrained(pretrained).eval()
        chances = model(**encoded).seq_relationship_logits[0].softmax(-1)
    assert answer == ("IsNext", "NotNext")[int(chances.argmax())]
    assert float(probability) == pytest.approx(float(chances.max()), abs=1e-4)


@pytest.mark.parametrize(("option", "what"), [("fill-mask", "masked tokens"), ("nsp", "next sentences")])
def test_a_model_without_the_head_does_not_answer_at_random(call: Callable, tmp_path: Path, option: str, what: str):
    directory = our_directory(tmp_path / "encoder")
    texts = ["--text", "a [MASK]"] + ["--text_b", "b"] * (option == "nsp")
    refused(f"has no head for {what}", call, "--option", option, "--pretrained-model-path", directory, *texts)


def test_a_model_of_one_segment_reads_no_pairs(call: Callable, tmp_path: Path):
    path = our_directory(tmp_path / "one", n_segments=1)
    head = BertForPreTraining(load_bert(path))
    save_pretrained(tmp_path / "whole", head, WordPiece(PIECES))
    save_pretrained(tmp_path / "answers", BertForQuestionAnswering(head.encoder), WordPiece(PIECES))
    pair = ["--text", "a film", "--text_b", "is good"]
    for option, folder in (("encode", "one"), ("nsp", "whole"), ("qa", "answers")):
        words = r"has one segment \(type_vocab_size is 1\), and a pair of texts needs two"
        refused(words, call, "--option", option, "--pretrained-model-path", folder, *pair)
    assert "4 tokens" in call("--option", "encode", "--pretrained-model-path", "one", "--text", "a film")


def test_pretraining_is_an_option_as_well(call: Callable, tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n\n".join(["the film is good\nit is not bad\nplay it"] * 8))
    write_vocabulary(tmp_path / "pieces.txt")
    small = ["--dim", 16, "--n_layers", 1, "--n_heads", 2, "--length", 24, "--epochs", 1, "--held_out", 0.3]
    files = ["--text", "text.txt", "--tokenizer", "pieces.txt", "--out", "new"]
    assert "save the model to new" in call("--option", "pretrain", *files, *small)
    given = ["--option", "fill-mask", "--pretrained-model-path", "new", "--text", "the [MASK]"]
    assert "[MASK] 1 of 1" in call(*given)


# ------------------------------------------------------------------------------------------------- questions


@pytest.fixture
def files(tmp_path: Path) -> list:
    for name, *given in (("train", "v2.0", 0, 120), ("dev", "v2.0", 120, 12), ("old", "1.1", 120, 12)):
        (tmp_path / f"{name}.json").write_text(json.dumps(squad(*given)))
    texts = f"{[*FACTS.items()]} {NOT_SAID}".lower()
    words = sorted({*re.findall("[a-z]+", texts)} - {*PIECES})
    torch.manual_seed(2)
    shape = dict(vocab_size=len(PIECES) + len(words), dropout=0.0, attention_dropout=0.0)
    save_pretrained(tmp_path / "bert", Bert(BertConfig.from_preset("mini", **shape)), WordPiece([*PIECES, *words]))
    given = ["--option", "qa", "--train", "train.json", "--dev", "dev.json", "--pretrained-model-path", "bert"]
    return [*given, "--length", 48, "--batch_size", 8, "--lr", 0.004]


@pytest.mark.slow
def test_questions_are_learned_answered_and_scored(call: Callable, files: list, tmp_path: Path):
    printed = call(*files, "--model_out", "qa", "--dev_out", "answers.json", "--epochs", 16)
    assert printed.count("epoch ") == 16 and "with a new head" in printed
    exact, f1 = map(float, re.search(r"dev exact match :: (\S+), dev F1 :: (\S+) \(", printed).groups())
    answers = json.loads((tmp_path / "answers.json").read_text())
    questions = {qa["id"]: qa for p in squad("v2.0", 120, 12)["data"][0]["paragraphs"] for qa in p["qas"]}
    right = [answers[id] == (qa["answers"][0]["text"] if qa["answers"] else "") for id, qa in questions.items()]
    assert answers.keys() == questions.keys() and exact == pytest.approx(100 * sum(right) / len(right), abs=0.01)
    best = max(float(value) for value in re.findall(r"^epoch .* dev F1 :: (\S+)$", printed, re.MULTILINE))
    # 2026-11-25, AMD EPYC, 2 cores: 99.7 (sd 2.3) in 72 runs of 25 seeds, AVX-512 and AVX2, one and two threads, this
    # rate and half of it: all 100 but one that stays at 80.8, as others did at 79.0. Who always says the same place, or
    # nothing, reaches 33; who reads of a question its length alone 61.
    assert f1 == pytest.approx(best, abs=0.01) and f1 > 61
    assert json.loads((tmp_path / "qa" / "scores.json").read_text())["f1"] == pytest.approx(f1, abs=0.01)

    again = call("--option", "qa", "--pretrained-model-path", "qa", "--dev", "dev.json", "--length", 48)
    assert f"dev exact match :: {exact:.2f}, dev F1 :: {f1:.2f}" in again and "without an answer" in again
    old = call("--option", "qa", "--pretrained-model-path", "qa", "--dev", "old.json", "--length", 48)
    assert "without an answer" not in old
    hf = transformers.BertForQuestionAnswering.from_pretrained(tmp_path / "qa").eval()
    assert torch.equal(hf.qa_outputs.weight, load_model(tmp_path / "qa")[0].span.weight)


def test_one_question_is_answered_from_its_paragraph(call: Callable, files: list, tmp_path: Path):
    """By a model whose weights the test chooses: its answer begins and ends at one token."""
    model, tokenizer = BertForQuestionAnswering(load_bert("bert")), load_tokenizer("bert")
    encoder = model.encoder
    with torch.no_grad():
        for parameter in (*encoder.layers.parameters(), *encoder.embeddings.segments.parameters()):
            parameter.zero_()
        for layer in encoder.layers:
            for norm in (layer.attention_norm, layer.ffn_norm):
                norm.weight.fill_(1.0)
        encoder.embeddings.positions.weight.zero_()
    for token, paragraph, said in (
        (tokenizer.ids["oslo"], "ben plays in oslo .", "answer: oslo\n"),
        (tokenizer.cls_id, "anna is in basel .", "the paragraph does not say it"),
    ):
        with torch.no_grad():
            model.span.weight.copy_(encoder(torch.tensor([[token]]))[0][0, 0].expand(2, -1))
        save_pretrained("chosen", model, tokenizer)
        given = ["--option", "qa", "--pretrained-model-path", "chosen", "--text", "where is ben ?"]
        assert said in call(*given, "--text_b", paragraph)


@pytest.mark.slow
def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    call: Callable, files: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    undisturbed = call(*files, "--model_out", "one", "--epochs", 3)
    plain = Trainer.fit

    def stopped(*args: object, **settings: object):
        yield next(plain(*args, **settings))
        raise KeyboardInterrupt("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", stopped)
        with pytest.raises(KeyboardInterrupt, match="interrupted; the best model so far stays in other, and --resume"):
            call(*files, "--model_out", "other", "--epochs", 3)
    other = [*files, "--model_out", "other", "--epochs", 3]
    refused("is of an interrupted run; go on with --resume, or name another --model_out", call, *other)
    words = "another stride; use the same arguments, or name another --model_out"
    refused(words, call, *other, "--resume", "--stride", 100)
    resumed = call(*other, "--resume")
    figures = re.compile(r"^epoch .*|^dev .*", re.MULTILINE)
    assert figures.findall(resumed) == figures.findall(undisturbed) and len(figures.findall(resumed)) == 4
    one, two = (load_bert(tmp_path / name).state_dict() for name in ("one", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    refused("model.safetensors is there already", call, *other)


def test_a_model_without_a_head_for_answers_is_refused(call: Callable, files: list):
    given = ["--option", "qa", "--pretrained-model-path", "bert"]
    for more in (["--dev", "dev.json"], ["--text", "where ?", "--text_b", "in basel"]):
        refused("has no head for answers; train one with --train and --model_out", call, *given, *more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model_out", "dev.json"], "--model_out: dev.json is also --dev"),
        (["--model_out", "qa", "--length", "5000"], "--length 5000: the model has"),
        (["--model_out", "text.txt"], "--model_out text.txt is a file; name a folder"),
        (["--model_out", "bert"], "is also an input"),
        (["--model_out", "qa", "--dev_out", "qa"], "qa is also --dev_out"),
        (["--model_out", "qa", "--dev_out", "train.json"], "--dev_out: train.json is also --train"),
        (["--model_out", "qa", "--train", "text.txt"], "text.txt is not JSON"),
        (["--model_out", "qa", "--dev_out", "qa/vocab.txt"], "the folder qa does not exist"),
        (["--model_out", ".", "--dev_out", "vocab.txt"], "name a file outside of --model_out"),
        (["--model_out", "absent/qa"], "the folder absent does not exist"),
    ],
)
def test_a_wrong_flag_is_one_line_and_nothing_is_lost(
    call: Callable, files: list, tmp_path: Path, more: list, words: str
):
    (tmp_path / "text.txt").write_text("no json")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused(re.escape(words), call, *files, *more)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
