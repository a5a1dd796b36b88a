"""Whether generated texts are told from broken ones: the model by hand against `llama.py`, and every verdict."""

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, asset
from error_helpers import check_one_error

from grading import batch, calibration_texts, coherence
from grading.calibration_texts import EDITS, WRITTEN
from grading.coherence import BROKEN, COHERENT, NOT_JUDGED, UNCLEAR, CoherenceJudge, Limits, judge_text, known_words
from grading.editions import TEXT_PROMPT
from grading.language_model import LanguageModel
from grading.programs import GradingError, run_main
from grading.settings import Judge, Settings
from llama import load_pretrained
from tokenizer import Tokenizer

CHECKPOINT, TOKENIZER = ROOT / "checkpoints" / "minllama1M.pt", ROOT / "checkpoints" / "minllama1M.model"
GOOD = f"{TEXT_PROMPT} {WRITTEN[0]}"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel.load(CHECKPOINT, TOKENIZER)


# ----------------------------------------------------------------------------------------------- the model by hand


def test_bits_are_those_of_llama(model: LanguageModel):
    """One token after the other, each predicted by the project's own model from those before it."""
    llama, tokenizer = load_pretrained(CHECKPOINT, attention="causal"), Tokenizer(tokenizer_model=TOKENIZER)
    for prompt, rest in ((TEXT_PROMPT, " a dog ."), ("Once", " there was a cat named Tom."), ("He is", "hed")):
        ids, given = (tokenizer.encode(text, bos=True, eos=False) for text in (prompt + rest, prompt))
        first = next((n for n, (a, b) in enumerate(zip(ids, given, strict=False)) if a != b), len(given))
        bits = 0.0
        for place in range(first, len(ids)):
            probabilities = llama(torch.tensor([ids[:place]]))[0][0, -1].softmax(-1)
            bits -= math.log2(probabilities[ids[place]].item())
        assert model.bits(prompt + rest, len(prompt)) == pytest.approx(bits / len(rest), rel=1e-4)


def test_a_text_is_read_up_to_the_models_length(model: LanguageModel):
    """What lies beyond it changes nothing."""
    long = TEXT_PROMPT + " the dog and the cat" * 200
    assert model.bits(long, len(TEXT_PROMPT)) == model.bits(long + " zx" * 50, len(TEXT_PROMPT))
    assert 0 < model.bits(long, len(TEXT_PROMPT)) < 5


def test_texts_are_continued_as_llama_does(model: LanguageModel):
    idx = torch.tensor([[1, 300, 20, 77, 500], [1, 8, 9, 10, 11]])
    expected = load_pretrained(CHECKPOINT, attention="causal").generate(idx, 12, 0.0)
    assert torch.equal(model.continued(idx, 12, 0.0, torch.Generator()), expected)


@pytest.mark.parametrize("content", [{"model": {}}, {"model": {"w": torch.ones(2)}, "model_args": {"dim": 4}}, [1]])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: object):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(GradingError, match="x.pt is not a checkpoint of a Llama"):
        LanguageModel.load(tmp_path / "x.pt", TOKENIZER)


def test_absent_foreign_and_damaged_files_are_refused(tmp_path: Path, tiny_tokenizer: Path):
    with pytest.raises(GradingError, match="are not of one model"):
        LanguageModel.load(CHECKPOINT, tiny_tokenizer)
    (tmp_path / "x.model").write_bytes(b"no model")
    for tokenizer, said in ((tmp_path / "x.model", "is not a SentencePiece model"), ("absent.model", "does not exist")):
        with pytest.raises(GradingError, match=said):
            LanguageModel.load(CHECKPOINT, tokenizer)


# -------------------------------------------------------------------------------------------------------- verdicts


def judge_with(bits: float) -> CoherenceJudge:
    """A judge whose model gives every text this many bits; coherent up to 1.4, broken above 1.7."""
    return CoherenceJudge(known_words(), SimpleNamespace(bits=lambda text, start: bits), Limits("", 1.4, 1.7, 0))


@pytest.mark.parametrize(("bits", "verdict"), [(1.4, COHERENT), (1.41, UNCLEAR), (1.7, UNCLEAR), (1.71, BROKEN)])
def test_bits_decide(bits: float, verdict: str):
    found = judge_text(GOOD, TEXT_PROMPT, judge_with(bits))
    assert (found.verdict, found.bits, found.trigrams) == (verdict, bits, 1.0)
    assert found.known > 0.9 and (found.reason == "") == (verdict == COHERENT)
    assert judge_text(GOOD, TEXT_PROMPT, judge_with(bits), is_drawn=True).verdict == NOT_JUDGED


@pytest.mark.parametrize(
    ("text", "verdict", "reason"),
    [
        (GOOD, NOT_JUDGED, "no checkpoint judges it"),
        (" \n".join(GOOD.split()), NOT_JUDGED, "no checkpoint"),  # white space is not looked at
        (f"Once upon a time, {WRITTEN[0]}", UNCLEAR, "does not begin with the prompt"),
        (TEXT_PROMPT, BROKEN, "0 words after the prompt"),
        (f"{TEXT_PROMPT} bits", BROKEN, "1 words"),
        (f"{TEXT_PROMPT} a good old man who", NOT_JUDGED, "no checkpoint"),
        (f"{TEXT_PROMPT} a good zzq and the zzqw dog sat zzqx zzqy", UNCLEAR, "60% of its words are known"),
        (TEXT_PROMPT + " is" * 75, BROKEN, "1% of its trigrams"),
        (TEXT_PROMPT + " he was very happy and so was she." * 4 + WRITTEN[1][:50], UNCLEAR, "of its trigrams"),
        (TEXT_PROMPT + " Kay cripop dedu Phot circum sob neteABLE avril dost", BROKEN, "of its words are known"),
    ],
)
def test_words_decide_without_a_model(text: str, verdict: str, reason: str):
    found = judge_text(text, TEXT_PROMPT)
    assert (found.verdict, found.bits) == (verdict, None) and reason in found.reason
    if verdict != NOT_JUDGED:  # a low number of bits is no excuse
        assert judge_text(text, TEXT_PROMPT, judge_with(0.1)).verdict == verdict


def test_a_drawn_text_is_broken_only_where_it_is_no_text():
    draw = random.Random(0)
    for edit, verdict in (("words shuffled", NOT_JUDGED), ("letters of words shuffled", BROKEN)):
        text = f"{TEXT_PROMPT} {EDITS[edit](WRITTEN[0], draw)}"
        assert judge_text(text, TEXT_PROMPT, judge_with(9.0), is_drawn=True).verdict == verdict


def test_the_courses_data_are_known_words(tmp_path: Path):
    (tmp_path / "sst-train.txt").write_text("1 ||| A Quixoticness, naïvelike film’s end\n", encoding="utf-8")
    assert {"quixoticness", "naïvelike"} <= known_words(tmp_path) - known_words() and "film's" in known_words(tmp_path)
    assert len(known_words()) > 2000


def test_python_m_grading_gets_words_and_figures(tmp_path: Path, monkeypatch):
    """A verdict for each text; and what was judged with other limits is judged anew."""
    monkeypatch.setattr(CoherenceJudge, "load", lambda checkpoint, tokenizer: judge_with(1.5))
    found = coherence.make_judge("x.pt", "x.model")(GOOD, TEXT_PROMPT)
    assert found.word == UNCLEAR and found.figures["bits a character"] == 1.5 and len(found.figures) == 3
    with pytest.raises(GradingError, match="judge.tokenizer is needed"):
        coherence.make_judge("x.pt", "")
    keys, settings = [], Settings(gold=str(tmp_path), judge=Judge(str(tmp_path / "x.pt"), ""))
    for limits in (None, "1", "2"):
        if limits:
            (tmp_path / "x.pt.coherence.json").write_text(limits)
        keys.append(batch.surroundings(settings, coherence.make_judge, None))
    assert len({*keys}) == 3


# ----------------------------------------------------------------------------------------------------- calibration


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["coherence", *map(str, words)])
    return run_main(coherence.main)


def test_a_checkpoint_that_cannot_judge_is_refused(tmp_path, monkeypatch, capsys):
    """The bundled one knows its grammar and nothing else: it takes a person's stories for noise."""
    checkpoint = tmp_path / "x.pt"
    checkpoint.write_bytes(CHECKPOINT.read_bytes())
    for name, value in (("GOOD", 8), ("EACH_BROKEN", 2)):
        monkeypatch.setattr(coherence, name, value)
    monkeypatch.setattr(calibration_texts, "NEW_TOKENS", 40)
    given = ("--checkpoint", checkpoint, "--tokenizer", TOKENIZER)
    status = run(monkeypatch, "--calibrate", *given)
    check_one_error(status, capsys.readouterr().err, "cannot judge texts")
    text = tmp_path / "text.txt"
    text.write_text(GOOD, encoding="utf-8")
    path = tmp_path / "x.pt.coherence.json"
    limits = {"sha256": "0", "coherent": 1.0, "broken": 2.0, "seed": 1}
    for content, said in ((None, "does not exist"), ("{", "damaged"), ("{}", "damaged"),
                          (json.dumps({"limits": limits}), "is of another x.pt")):  # fmt: skip
        if content is not None:
            path.write_text(content)
        status = run(monkeypatch, *given, text)
        check_one_error(status, capsys.readouterr().err, said)
    assert run(monkeypatch, text) == 0 and "not judged" in capsys.readouterr().out
    check_one_error(run(monkeypatch, "--checkpoint", checkpoint, text), capsys.readouterr().err, "--tokenizer together")


@pytest.mark.parametrize(("good", "broken", "is_enough"), [
    ({COHERENT: 199, UNCLEAR: 1}, {BROKEN: 95, COHERENT: 5}, True), ({COHERENT: 199, BROKEN: 1}, {BROKEN: 100}, False),
    ({COHERENT: 200}, {BROKEN: 94, COHERENT: 6}, False),
])  # fmt: skip
def test_no_good_text_may_be_called_broken_and_few_broken_ones_coherent(good: dict, broken: dict, is_enough: bool):
    table = {"good, temperature 0": Counter(good), "letters shuffled": Counter(broken)}
    assert coherence.report(table) == is_enough


def test_all_samples_follow_from_the_seed(model: LanguageModel, monkeypatch):
    monkeypatch.setattr(calibration_texts, "NEW_TOKENS", 10)

    def samples(seed: int) -> list[calibration_texts.Sample]:
        writer = calibration_texts.TextWriter(model, seed)
        return writer.broken(2, writer.good(8))

    assert samples(1) == samples(1) != samples(2)
    assert len({one.kind for one in samples(1)}) == 12 and len(samples(1)) == 24


@pytest.mark.slow
def test_the_held_out_samples_are_told_apart(assets: Path, tmp_path, monkeypatch, capsys):
    """200 good texts, none called broken; of 240 broken ones 95 % not called coherent."""
    checkpoint, tokenizer = tmp_path / "x.pt", asset(assets, "tok512.model")
    checkpoint.write_bytes(asset(assets, "stories260K.pt").read_bytes())
    given, path = ("--checkpoint", checkpoint, "--tokenizer", tokenizer), Path(f"{checkpoint}.coherence.json")
    assert run(monkeypatch, "--calibrate", *given) == 0
    out = capsys.readouterr().out
    assert "good texts called broken: 0 of 200" in out and "of 240" in out
    assert 1 < json.loads(path.read_text())["limits"]["coherent"] < 2
    for text, status in ((GOOD, 0), (TEXT_PROMPT + " is" * 60, 1)):
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        assert run(monkeypatch, *given, tmp_path / "text.txt") == status
