"""Likelihoods of labels and sentences, against loops over one sentence, one label and one token at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conftest import SENTENCES, asset, random_llama
from steps import passes_through, two_processes_as_one
from test_methods import ADVANCED
from test_prompt_finetune import NAMES, ids_of, nats, normalised, slowly
from torch import nn

from advanced import choose, create_head
from advanced.label_words import append, proper_prefixes
from advanced.smart import SMART
from advanced.zero_shot import CONTENT_FREE
from classifier import read_last
from engine import families, runs
from engine.data import Example
from engine.plan import ComputeSettings
from engine.programs import NeedsCausal
from engine.weights import load_llama_model
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError, prompt_suffix

HEADS = pytest.mark.parametrize("name", ["direct", "calibrated", "pmi", "channel"])
CPU = torch.device("cpu")
PLAIN = ComputeSettings(CPU, kernels="plain")


@pytest.fixture
def llama() -> Llama:
    return random_llama(attention="causal", max_seq_len=128)


def head(name: str, llama: Llama, tokenizer: Tokenizer, names: Sequence[str] = NAMES, **settings) -> nn.Module:
    chosen = [(each, {**dict(defaults), **settings}) for each, defaults in choose(name, option="prompt")]
    return runs.assemble_zero_shot(llama, tokenizer, list(names), chosen, texts=SENTENCES, compute=PLAIN).eval()


@torch.inference_mode()
def outputs_of(model: nn.Module, tokenizer: Tokenizer, sentences: Sequence[str], batch_size: int = 64) -> torch.Tensor:
    """Log-probabilities of sentences in batches. Returns n c, in the order of the sentences."""
    dataset = families.encode_for(model, tokenizer, [Example(text, 0) for text in sentences])
    outputs = torch.empty(len(sentences), model.num_labels)
    for batch in runs.loader_of(dataset, model.llama.config, batch_size, CPU):
        outputs[batch["indices"]] = model(batch["token_ids"])
    return outputs


def channel(
    llama: Llama, tokenizer: Tokenizer, names: Sequence[str], said: list[int], template: str = "This movie is {}."
) -> torch.Tensor:
    """log P(said | template with the name) for every name: c"""
    return torch.stack([nats(llama, ids_of(tokenizer, template.format(name)), said) for name in names])


def question_of(names: Sequence[str]) -> str:
    return prompt_suffix(names).removesuffix(" ")


# ------------------------------------------------------------------------------------------------------- the heads


@pytest.mark.parametrize("normalized", [False, True])
def test_direct_sums_all_tokens_of_a_label_where_they_stand(llama: Llama, tokenizer: Tokenizer, normalized: bool):
    model = head("direct", llama, tokenizer, normalized=normalized)
    assert min(map(len, model.word_ids)) < max(map(len, model.word_ids)) - 2
    assert model.prompt_suffix == "Is this movie bad, good, goodness, or a baker? This movie is"
    outputs = outputs_of(model, tokenizer, SENTENCES[:3])
    for row, text in zip(outputs, SENTENCES, strict=False):
        scores = slowly(llama, tokenizer, question_of(NAMES), NAMES, text)
        if normalized:
            scores = scores / torch.tensor([len(ids) for ids in model.word_ids])
        torch.testing.assert_close(row, normalised(scores), atol=2e-5, rtol=1e-5)


def test_the_two_ways_to_ask_for_longer_words_agree(llama: Llama, tokenizer: Tokenizer):
    model = head("direct", llama, tokenizer)
    once = outputs_of(model, tokenizer, SENTENCES)
    asked = []
    model.read = lambda *inputs: asked.append(1) or read_last(*inputs)  # another reader may do more for each prefix
    torch.testing.assert_close(outputs_of(model, tokenizer, SENTENCES), once, atol=2e-5, rtol=1e-5)
    assert len(asked) == 1 + len(proper_prefixes(model.word_ids))


@pytest.mark.parametrize("is_moved", [False, True])
def test_gradients_of_the_two_ways_agree(llama: Llama, tokenizer: Tokenizer, is_moved: bool):
    """Texts of several lengths in a batch; also while SMART moves them, and not the words behind them."""
    names = ["bad", "goodness me", "goodness"]
    found = []
    for read in (read_last, lambda *inputs: read_last(*inputs)):
        model = head("direct", llama, tokenizer, names)
        model.requires_grad_(True).zero_grad()
        model.read = read
        (batch,) = runs.loader_of(
            families.encode_for(model, tokenizer, [Example(text, 0) for text in SENTENCES[:3]]), llama.config, 3, CPU
        )
        smart = SMART()
        if is_moved:  # but for padding
            moves = torch.linspace(-1, 1, batch["token_ids"].numel()).view(3, -1)
            smart.perturbation = (moves * (batch["token_ids"] != tokenizer.pad_id))[..., None]
        hook = llama.tok_embeddings.register_forward_hook(smart.perturb)
        outputs = model(batch["token_ids"])
        (outputs * torch.tensor([1.0, -0.5, 0.25])).sum().backward()
        hook.remove()
        found.append([outputs.detach(), *(weight.grad.clone() for weight in llama.parameters())])
    assert all(tensor.abs().max() > 0 for tensor in found[0])
    for mine, slow in zip(*found, strict=True):
        torch.testing.assert_close(mine, slow, atol=5e-5, rtol=1e-4)


def test_a_causal_model_reads_a_text_once_however_many_words_there_are(llama: Llama, tokenizer: Tokenizer):
    passes = passes_through(llama)
    tokens = torch.tensor([ids_of(tokenizer, SENTENCES[0])]).repeat(2, 1)
    for names, words in ((["a", "the"], []), (["good", "goodness"], [2]), (["bad", "goodness"], [4])):
        model = head("direct", llama, tokenizer, names)
        passes.clear()
        model(tokens)
        text, *behind = passes
        assert text == (*tokens.shape, 0) and [rows for rows, _, _ in behind] == words, model.word_ids
        assert all(length == model.room and start == tokens.shape[1] for _, length, start in behind)


def test_words_share_their_beginnings():
    assert proper_prefixes([(1, 2, 3), (1, 2), (4,), (1, 5, 6)]) == [(1,), (1, 2), (1, 5)]
    tokens = torch.tensor([[1, 9, 8, 3, 3], [1, 3, 7, 6, 5]])  # padding is the 3s at the end alone
    assert append(tokens, (3, 4), 3).tolist() == [[1, 9, 8, 3, 4, 3, 3], [1, 3, 7, 6, 5, 3, 4]]


@HEADS
def test_a_sentence_is_classified_alike_in_every_batch(llama: Llama, tokenizer: Tokenizer, name: str):
    model = head(name, llama, tokenizer)
    together = outputs_of(model, tokenizer, SENTENCES)
    near = dict(atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(outputs_of(model, tokenizer, SENTENCES, 1), together, **near)
    torch.testing.assert_close(outputs_of(model, tokenizer, SENTENCES[::-1], 3).flip(0), together, **near)
    torch.testing.assert_close(together.exp().sum(1), torch.ones(len(SENTENCES)))
    assert together.argmax(1).unique().numel() > 1 or name == "direct"


def test_calibration_divides_by_what_is_answered_where_nothing_is_asked(llama: Llama, tokenizer: Tokenizer):
    model = head("calibrated", llama, tokenizer)
    question = question_of(NAMES)
    free = [normalised(slowly(llama, tokenizer, question, NAMES, text)).exp() for text in CONTENT_FREE]
    p_cf = (free[0] + free[1]) / 2
    outputs = outputs_of(model, tokenizer, [*SENTENCES[:2], *CONTENT_FREE])
    for row, text in zip(outputs, SENTENCES[:2], strict=False):
        weighed = normalised(slowly(llama, tokenizer, question, NAMES, text)).exp() / p_cf
        torch.testing.assert_close(row.exp(), weighed / weighed.sum(), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(free[0], free[1], atol=1e-4)
    # W p is 1 for each label, on average over the texts without content: their W p, before it is normalised
    weighed = torch.stack(free) / model.log_p_cf.exp()
    torch.testing.assert_close(weighed.mean(0), torch.ones(len(NAMES)), atol=1e-5, rtol=1e-4)


def test_one_text_without_content_becomes_uniform(llama: Llama, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("advanced.zero_shot.CONTENT_FREE", ("N/A",))
    (row,) = outputs_of(head("calibrated", llama, tokenizer), tokenizer, ["N/A"])
    torch.testing.assert_close(row.exp(), torch.full((len(NAMES),), 1 / len(NAMES)))


def test_calibration_to_the_domain_is_a_mean_over_training_sentences(llama: Llama, tokenizer: Tokenizer):
    model = head("calibrated", llama, tokenizer, source="train")
    assert "10 unlabelled training sentences" in model.remark
    question = question_of(NAMES)
    mean = sum(normalised(slowly(llama, tokenizer, question, NAMES, text)).exp() for text in SENTENCES) / len(SENTENCES)
    torch.testing.assert_close(model.log_p_cf.exp(), mean, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model.log_p_cf, head("calibrated", llama, tokenizer).log_p_cf, atol=1e-3)
    for texts in ((), None):
        with pytest.raises(UserError, match="source=train estimates from training sentences, and there are none"):
            model.estimate(texts)


def test_nothing_is_calibrated_in_silence_without_an_estimate(llama: Llama, tokenizer: Tokenizer):
    model = create_head("calibrated", {}, llama, tokenizer, NAMES)
    assert model(torch.tensor([[1, 5, 6]])).isnan().all()


def test_pmi_takes_away_what_the_question_alone_makes_likely(llama: Llama, tokenizer: Tokenizer):
    outputs = outputs_of(head("pmi", llama, tokenizer), tokenizer, SENTENCES[:2])
    other = outputs_of(head("pmi", llama, tokenizer, premise="It was"), tokenizer, SENTENCES[:2])
    for premise, rows in (("This movie is", outputs), ("It was", other)):
        alone = slowly(llama, tokenizer, premise, NAMES, "")
        for row, text in zip(rows, SENTENCES, strict=False):
            scores = slowly(llama, tokenizer, question_of(NAMES), NAMES, text)
            expected = normalised(scores - alone)
            torch.testing.assert_close(row, expected, atol=3e-5, rtol=1e-5)


def test_a_space_at_the_end_of_a_premise_or_a_channel_is_no_token(llama: Llama, tokenizer: Tokenizer):
    premises = [head("pmi", llama, tokenizer, premise=text).premise_ids() for text in ("It was ", "It was")]
    assert torch.equal(*premises)
    channels = [head("channel", llama, tokenizer, template=text).before for text in ("{label}: ", "{label}:")]
    assert channels[0] == channels[1]


def test_a_premise_must_fit_into_the_model(tokenizer: Tokenizer):
    llama = random_llama(attention="causal", max_seq_len=40)
    with pytest.raises(UserError, match="premise takes"):
        head("pmi", llama, tokenizer, template="It was", premise="word " * 60)
    fitting = head("pmi", llama, tokenizer, premise="It was")
    size = fitting.premise_ids().shape[1] + fitting.room
    head("pmi", random_llama(attention="causal", max_seq_len=size), tokenizer, premise="It was")
    with pytest.raises(UserError, match=f"which leaves no room in {size - 1}$"):
        head("pmi", random_llama(attention="causal", max_seq_len=size - 1), tokenizer, premise="It was")


@pytest.mark.parametrize(
    ("template", "premise"), [("It was", "It was"), ("Overall, was it so? In a word:", "In a word:")]
)
def test_the_premise_is_the_last_clause_of_the_question(
    llama: Llama, tokenizer: Tokenizer, template: str, premise: str
):
    model = head("pmi", llama, tokenizer, template=template)
    assert model.premise_ids().tolist() == [ids_of(tokenizer, premise)] and model.prompt_suffix == template


def test_the_premise_is_of_the_question_that_is_asked(llama: Llama, tokenizer: Tokenizer):
    """A question that is given apart from the method, and that of a saved run, come after the head was made."""
    question = "Do you like it, {labels}? In a word: it was "
    how = dict(question=question, compute=PLAIN)
    asked = runs.assemble_zero_shot(llama, tokenizer, NAMES, choose("pmi", option="prompt"), **how)
    worded = head("pmi", llama, tokenizer, template=asked.prompt_suffix)
    assert asked.premise_ids().tolist() == [ids_of(tokenizer, "In a word: it was")]
    assert torch.equal(*(outputs_of(model, tokenizer, SENTENCES) for model in (asked, worded)))


def test_the_channel_explains_every_token_of_the_sentence_and_no_padding(llama: Llama, tokenizer: Tokenizer):
    model = head("channel", llama, tokenizer)
    assert model.prompt_suffix is None
    outputs = outputs_of(model, tokenizer, SENTENCES[:3])
    for row, text in zip(outputs, SENTENCES, strict=False):
        scores = channel(llama, tokenizer, NAMES, tokenizer.sp_model.encode(text))
        torch.testing.assert_close(row, normalised(scores), atol=1e-4, rtol=1e-4)
    other = outputs_of(head("channel", llama, tokenizer, template="{label}:"), tokenizer, SENTENCES[:1])
    scores = channel(llama, tokenizer, NAMES, tokenizer.sp_model.encode(SENTENCES[0]), "{}:")
    torch.testing.assert_close(other[0], normalised(scores), atol=1e-4, rtol=1e-4)


def test_the_channel_computes_few_logits_at_a_time(llama: Llama, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    model = head("channel", llama, tokenizer)
    whole = outputs_of(model, tokenizer, SENTENCES)
    monkeypatch.setattr("advanced.zero_shot.LOGITS_AT_ONCE", 7)
    sizes = []
    llama.output.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    torch.testing.assert_close(outputs_of(model, tokenizer, SENTENCES), whole, atol=1e-5, rtol=1e-5)
    assert max(sizes) == 7


# ------------------------------------------------------------------------------------------- words, questions, room


def test_words_stand_for_the_labels_in_their_order(llama: Llama, tokenizer: Tokenizer):
    named, said = head("direct", llama, tokenizer, ["terrible", "great"]), head("direct", llama, tokenizer, ["0", "1"])
    worded = head("direct", llama, tokenizer, ["0", "1"], words="terrible+ great")
    assert worded.prompt_suffix == "Is this movie terrible or great? This movie is"
    outputs = [outputs_of(model, tokenizer, SENTENCES[:2]) for model in (named, worded, said)]
    assert torch.equal(outputs[0], outputs[1]) and not torch.allclose(outputs[0], outputs[2], atol=1e-3)
    for name in ("calibrated", "pmi", "channel"):
        models = [head(name, llama, tokenizer, names, **more) for names, more in (
            (["terrible", "great"], {}), (["0", "1"], {"words": "terrible+great"}))]  # fmt: skip
        outputs = [outputs_of(model, tokenizer, SENTENCES[:2]) for model in models]
        assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("good", "words=good: there are 2 labels, and each has one of 1 words"),
        ("a+b+c", "there are 2 labels, and each has one of 3 words"),
        ("good+good ", "'good' and 'good' of two labels are the same tokens"),
    ],
)
@HEADS
def test_other_words_are_refused(llama: Llama, tokenizer: Tokenizer, name: str, words: str, message: str):
    with pytest.raises(UserError) as error:
        head(name, llama, tokenizer, ["bad", "good"], words=words)
    if name == "channel":  # whose words stand in its question
        message = message.replace("'good'", "'This movie is good.'")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "assignment", "message"),
    [
        ("direct", "words=good+", "must be words joined by +"),
        ("channel", "template=This movie is", "must be a text with {label} in it"),
        ("calibrated", "source=dev", "one of content-free, train"),
        ("direct", "normalized=yes", "normalized=yes: must be true or false"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_before_anything_is_loaded(name: str, assignment: str, message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        choose(name, [assignment], "prompt")


def test_no_question_ends_in_a_space(llama: Llama, tokenizer: Tokenizer):
    for template in ("", "It was  ", "It was"):
        assert head("direct", llama, tokenizer, template=template).prompt_suffix[-1] != " "


@pytest.mark.parametrize("name", ["direct", "channel"])
def test_the_sentence_is_cut_and_never_the_question_and_nothing_is_beyond_the_model(tokenizer: Tokenizer, name: str):
    llama = random_llama(attention="causal", max_seq_len=60)
    names = ["bad", "goodness me"]
    model = head(name, llama, tokenizer, names)
    passes = passes_through(llama)
    text = " ".join(SENTENCES)
    (row,) = outputs_of(model, tokenizer, [text])
    assert max(length + start for _, length, start in passes) == 60 and model.room >= 5
    kept = ids_of(tokenizer, text)[: 60 - model.room - len(tokenizer.sp_model.encode(model.prompt_suffix or ""))]
    if name == "direct":
        passes.clear()
        head("calibrated", llama, tokenizer, names, source="train").estimate([text])
        assert max(length + start for _, length, start in passes) == 60  # nor is a text that is calibrated on
        given = kept + tokenizer.sp_model.encode(question_of(names))
        scores = torch.stack([nats(llama, given, tokenizer.sp_model.encode(each)) for each in names])
    else:
        scores = channel(llama, tokenizer, names, kept[1:])
    torch.testing.assert_close(row, normalised(scores), atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match="leaves no room in max_seq_len=20"):
        outputs_of(head(name, random_llama(attention="causal", max_seq_len=20), tokenizer, names), tokenizer, [text])


def test_short_sentences_are_cut_and_words_are_not(tiny_tokenizer: Path, llama: Llama):
    short = Tokenizer(2, tiny_tokenizer)
    model, whole = (head("direct", llama, each) for each in (short, Tokenizer(None, tiny_tokenizer)))
    assert model.word_ids == whole.word_ids and max(map(len, model.word_ids)) > 2
    text = short.decode(short.encode(SENTENCES[0], bos=False, eos=False))
    rows = outputs_of(model, short, SENTENCES[:1]), outputs_of(whole, Tokenizer(None, tiny_tokenizer), [text])
    torch.testing.assert_close(*rows)


@HEADS
def test_a_bidirectional_model_is_refused(tokenizer: Tokenizer, name: str):
    with pytest.raises(NeedsCausal, match=f"{name} reads likelihoods"):
        create_head(name, {}, random_llama(), tokenizer, NAMES)


# ----------------------------------------------------------------------------------------------------- saved, driven

CASES = [
    ("direct", {"normalized": True}),
    ("calibrated", {}),
    ("calibrated", {"source": "train"}),
    ("pmi", {"words": "thin+warm+slow+quiet"}),
    ("channel", {}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_saved_head_is_enough_by_itself(
    tmp_path: Path, llama: Llama, tokenizer: Tokenizer, name: str, settings: dict
):
    model = head(name, llama, tokenizer, **settings)
    runs.save_classifier(tmp_path / "head.pt", model, runs.record_of(model, tokenizer, NAMES, 4))
    opened, about = runs.load_classifier(tmp_path / "head.pt")
    assert about.prompt_suffix == model.prompt_suffix and opened.settings == model.settings
    expected = outputs_of(model, tokenizer, SENTENCES)
    assert torch.equal(outputs_of(opened, about.tokenizer, SENTENCES), expected)
    predicted = [each.label for each in runs.predict(opened, about, SENTENCES)]
    assert predicted == expected.argmax(1).tolist()


@HEADS
def test_the_driver_predicts_with_each(
    tmp_path: Path, drive: Callable, classify_flags: Callable, tiny_checkpoint: Path, tokenizer: Tokenizer, name: str
):
    out = drive(*classify_flags("prompt"), *ADVANCED, "--attention", "causal", "--method", name)
    assert re.search(r"^dev acc :: 0\.\d{3}$", out, re.MULTILINE) and "unlabelled" not in out
    lines = (tmp_path / "films-dev-advanced-output.txt").read_text().splitlines()
    sentences = [line.split(" ||| ")[1] for line in lines]
    llama = load_llama_model(tiny_checkpoint, attention="causal")
    model = head(name, llama, tokenizer, ["bad", "good"])
    if model.prompt_suffix:
        assert all(sentence.endswith(f" {model.prompt_suffix}") for sentence in sentences)
        sentences = [sentence.removesuffix(f" {model.prompt_suffix}") for sentence in sentences]
    predicted = outputs_of(model, tokenizer, sentences).argmax(1).tolist()
    assert [int(line[0]) for line in lines] == predicted


def test_the_driver_says_that_training_sentences_are_used_and_where_there_are_none(
    drive: Callable, classify_flags: Callable, tmp_path: Path
):
    flags = [*classify_flags("prompt"), *ADVANCED, "--attention", "causal", "--method", "calibrated"]
    flags += ["--method-args", "source=train"]
    out = drive(*flags)
    assert "domain calibration: estimated from 24 unlabelled training sentences" in out
    compute = flags.index("--train")
    with pytest.raises(UserError, match="there are none"):
        drive(*flags[:compute], *flags[compute + 2 :])
    with pytest.raises(UserError, match="calibrated reads likelihoods.*; add --attention causal"):
        drive(*[each for each in flags if each not in ("--attention", "causal")])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calibrated", "channel"])
def test_two_processes_that_share_the_model_predict_as_one(tmp_path: Path, classify_flags: Callable, name: str):
    flags = [*classify_flags("prompt"), *ADVANCED, "--attention", "causal", "--method", name]
    flags += ["--method-args", "source=train"] if name == "calibrated" else []
    done = two_processes_as_one(tmp_path, flags)
    assert done.stdout.count("unlabelled training sentences") == (name == "calibrated")


def test_the_real_checkpoint_and_its_words_of_many_tokens(assets: Path):
    tokenizer = Tokenizer(tokenizer_model=asset(assets, "tok512.model"))
    llama = load_llama_model(asset(assets, "stories260K.pt"), attention="causal")
    names = ["awful", "bad", "average", "good", "excellent"]
    texts = ["A little girl was very happy.", "The dog was sad and it was a bad day for him."]
    for name in ("direct", "channel"):
        outputs = outputs_of(head(name, llama, tokenizer, names), tokenizer, texts)
        for row, text in zip(outputs, texts, strict=True):
            scores = slowly(llama, tokenizer, question_of(names), names, text)
            if name == "channel":
                scores = channel(llama, tokenizer, names, tokenizer.sp_model.encode(text))
            torch.testing.assert_close(row, normalised(scores), atol=2e-4, rtol=1e-4)
