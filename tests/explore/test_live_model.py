"""What a live page computes, in node: the same as `llama.py`, the tokenizers and `engine.decoding`, broken or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch
from conftest import ROOT, asset, random_llama, slow_among
from thread import Thread, occlusion_in_parts, rounded, thread_of

from classifier import LlamaEmbeddingClassifier, LlamaZeroShotClassifier
from convert.tokenizer import JsonTokenizer
from engine.context import rotate
from engine.decoding import Sampling, truncate
from engine.training import perplexity
from explore.broken import BREAKS, Switches, broken, read_broken
from explore.decision import decide, probabilities
from explore.inspected import InspectedModel
from explore.look import read
from explore.served import PageAnswers
from grading import mistakes, small_model
from grading.rotary import halves, rotate_by_hand
from tokenizer import Tokenizer
from utils import UserError

TEXT = "A warm little film about a baker and her stubborn goat."
PROMPTS = [
    "Once upon a time", "The film was", "A goat and a baker", "In the town", "She said", "He was not", "The theater",
    "It rained, and", "Two friends", "Nobody knew", "The best part", "After the war", "\"Come here,\"", "A sad story",
    "What a waste", "My mother", "The director", "On the hill", "I liked", "Tom",
]  # fmt: skip
TEXTS = (
    TEXT, "", " ", "  two  spaces\tand\nlines \u2581 ", "\u00a0\u3000wide \u3000", "na\u00efve ﬁ ½ Ⅷ ① ㌔ ｱﾞ e\u0301 Å",
    "שלום مرحبا नमस्ते",
    "👩‍👩‍👧 🐐", "\u0000\u0007\u200b\ufeff end\ufffd", "日本語のテキスト 臺灣", "<s> </s> <unk> <0x41>",
    "aaaaaaaaaaaaaaaaaaaaa", "1234567 $%&",
)  # fmt: skip
PARTS = (
    {"off": ["2"]},
    {"off": ["2.1", "1.4"]},
    {"uniform": ["1.2", "2.4"]},
    {"breaks": ["scores", "gelu"], "off": ["1.1"]},
)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0, equal_nan=True)


def near(ours: list[float | None], theirs: torch.Tensor) -> None:
    values = torch.tensor([float("nan") if each is None else each for each in ours])
    close(values, theirs)


@pytest.fixture(scope="module")
def bundled() -> InspectedModel:
    return rounded(InspectedModel.open(str(ROOT / "checkpoints" / "minllama1M.pt")))


@pytest.fixture(scope="module")
def thread(bundled: InspectedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thread]:
    with thread_of(bundled, tmp_path_factory.mktemp("thread")) as found:
        yield found


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("breaks", [[], *([name] for name in BREAKS)], ids="".join)
def test_logits_are_those_of_the_python(thread: Thread, bundled: InspectedModel, breaks: list[str], attention: str):
    ids = bundled.encode(TEXT)
    switches = Switches(attention, breaks)
    expected = read_broken(bundled.llama, ids, switches).logits
    close(thread.logits(ids, attention=attention, breaks=breaks), expected)
    if breaks:
        assert not torch.allclose(expected, read(bundled.llama, ids, attention).logits, atol=0.1)


@pytest.mark.parametrize("switches", PARTS, ids=str)
def test_parts_that_are_off(thread: Thread, bundled: InspectedModel, switches: dict[str, list[str]]):
    ids = bundled.encode(TEXT)
    close(thread.logits(ids, **switches), read_broken(bundled.llama, ids, Switches(**switches)).logits)


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_one_head_in_numbers(thread: Thread, bundled: InspectedModel, attention: str):
    """The weight is the one that these scores have, and not that of a map, which is rounded to a byte."""
    weights = read(bundled.llama, bundled.encode(TEXT), attention).attention
    for layer, head, query, key in ((0, 0, 0, 0), (1, 2, 6, 2), (3, 1, 9, 9), (2, 3, 13, 1), (2, 0, 4, 5)):
        place = dict(layer=layer, head=head, query=query, key=key)
        for asked in (thread.ask, lambda kind, **given: PageAnswers(bundled).answer(kind, given)):
            answer = asked("numbers", text=TEXT, use="right", switches={"attention": attention}, **place)
            assert answer["weight"] == pytest.approx(float(weights[layer][head, query, key]), abs=1e-5)
            assert answer["isHidden"] == (attention == "causal" and key > query) and not answer["isOther"]
    for switches in ({"uniform": ["2.3"]}, {"off": ["2"]}):
        answer = thread.ask("numbers", text=TEXT, use="now", switches=switches, layer=1, head=2, query=6, key=2)
        assert answer["isOther"] and answer["weight"] == pytest.approx(1 / 7 if "uniform" in switches else 0)


def test_greedy_ids_of_prompts(thread: Thread, bundled: InspectedModel):
    for prompt in PROMPTS:
        added: list[int] = []
        for _ in range(12):
            given = dict(text=prompt, added=added, switches={}, sampling={"temperature": 0}, random=0)
            added.append(thread.ask("next", **given)["id"])
        start = torch.tensor([bundled.encode(prompt)])
        assert bundled.llama.generate(start, 12, 0.0)[0, start.shape[1] :].tolist() == added


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize(
    "changes",
    [
        dict(tied=False, n_kv_heads=1, hidden_dim=50, layer_norm_eps=0.1),
        dict(rope_scaling=("llama3", 8.0, 1.0, 4.0, 32)),
        dict(rope_scaling=("linear", 4.0)),
    ],
    ids=["untied", "llama3", "linear"],
)  # fmt: skip
def test_every_shape(changes: dict, attention: str, bits: int, tokenizer: Tokenizer, tmp_path: Path):
    inspected = InspectedModel("random", random_llama(attention=attention, **changes), tokenizer)
    ids = torch.arange(3, 67).tolist()  # max_seq_len tokens
    with thread_of(inspected, tmp_path, bits) as found:
        close(found.logits(ids), read(rounded(inspected, bits).llama, ids, attention).logits)


def test_a_text_longer_than_the_model_is_read_at_its_end(tokenizer: Tokenizer, tmp_path: Path):
    inspected = rounded(InspectedModel("random", random_llama(attention="causal"), tokenizer))
    text = "warm little film " * 9
    start = torch.tensor([inspected.encode(text)])
    assert start.shape[1] > inspected.llama.config.max_seq_len
    expected = inspected.llama.generate(start, 3, 0.0)[0, start.shape[1] :].tolist()
    with thread_of(inspected, tmp_path) as found:
        added: list[int] = []
        for _ in expected:
            answer = found.ask("next", text=text, added=added, switches={}, sampling={"temperature": 0}, random=0)
            added.append(answer["id"])
    assert added == expected


# ----------------------------------------------------------------------------------------- tokenizer and sampling


def test_texts_become_the_same_tokens_and_back(thread: Thread, bundled: InspectedModel):
    for text in TEXTS:
        ids = bundled.encode(text)
        assert thread.ask("encoded", text=text)["ids"] == ids, text
        assert thread.ask("decode", ids=ids)["text"] == bundled.tokenizer.decode(ids), text


def test_llama_s_own_tokenizer(assets: Path, tmp_path: Path):
    tokenizer = Tokenizer(tokenizer_model=asset(assets, "tokenizer.model"))
    inspected = InspectedModel("random", random_llama(vocab_size=32000), tokenizer)
    with thread_of(inspected, tmp_path) as found:
        for text in (*TEXTS, (ROOT / "docs" / "looking.md").read_text("utf-8")):
            ids = inspected.encode(text)
            assert found.ask("encoded", text=text)["ids"] == ids
            assert found.ask("decode", ids=ids)["text"] == tokenizer.decode(ids)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("]?\\p", "]?+\\p").replace("]+[", "]++[")
BYTE_LEVEL = {
    "gpt-2": lambda pre: [pre.ByteLevel(add_prefix_space=True)],
    "smollm": lambda pre: [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)],
    "llama3": lambda pre: [split(pre, LLAMA3), pre.ByteLevel(add_prefix_space=False, use_regex=False)],
    "whole": lambda pre: [pre.ByteLevel(add_prefix_space=False, use_regex=False)],  # pieces cross spaces
    "qwen": lambda pre: [split(pre, QWEN), pre.ByteLevel(add_prefix_space=False, use_regex=False)],
}


def split(pre: Any, pattern: str) -> Any:
    import tokenizers

    return pre.Split(tokenizers.Regex(pattern), behavior="isolated")


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("rule", BYTE_LEVEL)
def test_byte_level_tokenizers(rule: str, begins: bool, tmp_path: Path):
    """The library's own ids, for texts with digits, cases, spaces, added tokens and letters of four bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=begins))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(BYTE_LEVEL[rule](tokenizers.pre_tokenizers))
    made.decoder = tokenizers.decoders.ByteLevel()
    if begins:
        made.normalizer = tokenizers.normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|begin|>", "<|end|>>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([TEXT, "I'll WE'LL 12 1234 12345\n\n  two", *TEXTS] * 4, trainer)
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": begins}
    content = json.loads(made.to_str())
    content["model"]["vocab"]["zebra"] = made.get_vocab_size()  # which no merges make
    tokenizer = JsonTokenizer(json.dumps(content), special)
    inspected = InspectedModel("random", random_llama(vocab_size=401), tokenizer)
    with thread_of(inspected, tmp_path) as found:
        for text in (
            *TEXTS,
            "I'LL 12345 we've\r\n\r\n  x\x85\ufeffy\u3000 ",
            "a<|end|><|begin|> b<|en<|end|>>",
            "zebra",
        ):
            ids = tokenizer.encode(text, bos=True, eos=False)
            assert found.ask("encoded", text=text)["ids"] == ids, text
            assert found.ask("decode", ids=ids)["text"] == tokenizer.decode(ids), text
            assert found.ask("encodedNext", text=text)["ids"] == tokenizer.encode_next(text), text


def test_letters_without_a_piece(tmp_path: Path):
    """A vocabulary without pieces for bytes: unknown neighbours are one token."""
    shape = dict(vocab_size=120, model_type="bpe", hard_vocab_limit=False, minloglevel=2)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, *PROMPTS] * 3), model_prefix=str(tmp_path / "plain"), **shape
    )
    tokenizer = Tokenizer(tokenizer_model=tmp_path / "plain.model")
    inspected = InspectedModel("random", random_llama(vocab_size=tokenizer.n_words), tokenizer)
    with thread_of(inspected, tmp_path) as found:
        for text in (TEXT, "\u8a5e\u5143 a \u8a5e b\u5143\u5143c", "\u8a5e"):
            ids = inspected.encode(text)
            assert found.ask("encoded", text=text)["ids"] == ids, text
            assert found.ask("decode", ids=ids)["text"] == tokenizer.decode(ids), text


def test_small_parts(thread: Thread, bundled: InspectedModel):
    """Every float16; matrices of odd sizes; GELU; a position far away; of equal numbers the first; where top-p ends."""

    def called(name: str, *given: Any) -> torch.Tensor:
        return torch.tensor([float(value) for value in thread.ask("called", name=name, given=given)["value"]])

    every = torch.arange(65536).to(torch.uint16).view(torch.float16).float()
    torch.testing.assert_close(called("halves"), every, atol=0, rtol=0, equal_nan=True)
    padded = [1, -1, 300]  # -1 is embedded as 0
    close(thread.logits(padded), read(bundled.llama, padded, "causal").logits)
    weight, vectors = torch.randn(3, 7), torch.randn(5, 7)  # four vectors and four numbers at a time, and what is left
    product = called("linear", weight.flatten().tolist(), vectors.flatten().tolist(), 7, 3).view(5, 3)
    torch.testing.assert_close(product, vectors @ weight.T)
    x = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(called("gelu", x.tolist()), torch.nn.functional.gelu(x), atol=1e-6, rtol=0)
    config, q = bundled.llama.config, torch.randn(bundled.llama.config.head_dim)
    far = rotate(q[None, None, None], 30_000, config.head_dim, config.max_seq_len, config.rope_theta)[0, 0, 0]
    torch.testing.assert_close(called("turned", q.tolist(), 30_000), far, atol=1e-5, rtol=0)
    assert called("argmax", [1, 3, 3, 2]).tolist() == [1] and called("largest", [1, 3, 3, 2], 3).tolist() == [1, 2, 3]
    assert [int(called("drawn", [0.25, 0.25, 0, 0.5], at)) for at in (0, 0.25, 0.5, 0.999)] == [0, 1, 3, 3]
    for top_p, kept in ((0.5, 2), (0.51, 3)):  # of four quarters
        assert called("distribution", [0] * 4, dict(temperature=1, topP=top_p)).count_nonzero() == kept
        assert truncate(torch.full((1, 4), 0.25), top_p=top_p).count_nonzero() == kept


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=1.0), dict(temperature=0.5, top_k=5), dict(temperature=1.5, top_p=0.6), dict(min_p=0.1),
        dict(temperature=2.0, top_k=9, top_p=0.9, min_p=0.02), dict(temperature=0.0, top_k=3),
    ],
    ids=str,
)  # fmt: skip
def test_sampling(thread: Thread, bundled: InspectedModel, settings: dict[str, float]):
    sampling = Sampling(**settings)
    logits = bundled.llama(torch.tensor([bundled.encode(TEXT[:30])]))[0][0].detach()
    expected = (logits / sampling.temperature if sampling.temperature else logits * 1e6).softmax(-1)
    if sampling.temperature:
        expected = truncate(expected, *sampling.limits)
        expected /= expected.sum()
    names = {"temperature": "temperature", "topK": "top_k", "topP": "top_p", "minP": "min_p"}
    given = {ours: getattr(sampling, theirs) for ours, theirs in names.items()}
    answer = thread.ask("next", text=TEXT[:30], switches={}, sampling=given, random=0.999999)
    assert answer["kept"] == int((expected > 0).sum())
    for each in answer["top"]:
        assert each["p"] == pytest.approx(float(expected[0, each["id"]]), abs=1e-5)
    assert expected[0, answer["id"]] > 0


def test_perplexity(thread: Thread, bundled: InspectedModel):
    text = f"{TEXT} " * 20  # more than one window
    expected = perplexity(bundled.llama, bundled.tokenizer, text)
    answer = thread.ask("perplexity", text=text, bos=bundled.tokenizer.bos_id, switches={})
    assert (answer["tokens"], answer["value"]) == (expected.tokens, pytest.approx(expected.perplexity, rel=1e-4))


# ----------------------------------------------------------------------------------------------------- classifiers


def classifier_of(kind: str, attention: str, tokenizer: Tokenizer) -> InspectedModel:
    """A random classifier over five labels."""
    llama, names = random_llama(attention=attention, max_seq_len=96), ["terrible", "bad", "okay", "good", "wonderful"]
    about = SimpleNamespace(num_labels=5, hidden_dropout_prob=0.0, option="finetune", pad_id=tokenizer.pad_id)
    if kind == "linear":
        model = LlamaEmbeddingClassifier(about, llama=llama).eval()
    else:
        model = LlamaZeroShotClassifier(about, tokenizer, names, llama=llama).eval()
    return rounded(InspectedModel("classifier", llama, tokenizer, model, tuple(names)))


@pytest.mark.parametrize("attention", slow_among(("causal", "bidirectional"), {"bidirectional"}))
@pytest.mark.parametrize("kind", ["linear", "label words"])
def test_a_classifier_decides_alike(
    kind: str, attention: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in ("decision", "live"):
        monkeypatch.setattr(f"explore.{module}.OCCLUDED_POSITIONS", 2000)  # so that a short text has many neighbours
    inspected = classifier_of(kind, attention, tokenizer)
    with thread_of(inspected, tmp_path) as found:
        both = found.ask, lambda kind, **given: PageAnswers(inspected).answer(kind, given)
        for text in ("A warm little film.", "a film " * 32, "", "bad\u0000"):
            ids = inspected.encode(text)
            assert found.ask("encoded", text=text)["ids"] == ids
            expected = decide(inspected.classifier, inspected.llama.tok_embeddings, ids)
            for ask in both:
                answer = ask("read", text=text, use="right", switches={})
                assert (answer["ids"], answer["first"]) == (ids, 0)  # a bidirectional one reads a long text whole
                near(answer["probabilities"], probabilities(expected.log_probabilities))
            if text == "A warm little film." or (kind == "linear" and len(ids) > 96):
                for ask in both:
                    lost, together = occlusion_in_parts(ask, text=text, switches={})
                    assert together == expected.together == -(-(len(ids) ** 2) // 2000)
                    near(lost, expected.occlusion.flatten())
        if attention == "bidirectional":
            for ask in both:
                with pytest.raises((UserError, AssertionError), match="tokens; the page takes 2048 at most"):
                    ask("read", text="a film " * 2000, use="right", switches={})


# ------------------------------------------------------------------------------------- broken.py against grading/


def turned_late(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries one position too late."""
    return rotate_by_hand(query, small_model.THETA, start=1), rotate_by_hand(key, small_model.THETA), value


def turned_halves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *(rotate_by_hand(x, small_model.THETA, read=halves, write=halves) for x in (query, key)), value


def said(known: dict, words: str) -> dict:
    """The mistake whose sentence holds these words."""
    return next(wrong for sentence, wrong in known.items() if words in sentence)


ATTENTION = {
    "scores": said(mistakes.ATTEND_MISTAKES, "scores are not scaled"),
    "heads": said(mistakes.ATTENTION_MISTAKES, "all queries use the first"),
    "repeat": said(mistakes.ATTENTION_MISTAKES, "1 2 1 2"),
    "halves": dict(turn=turned_halves),
    "position": dict(turn=turned_late),
}


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", ATTENTION)
def test_switches_of_attention_are_grading_s_mistakes(name: str, kind: str):
    model = random_llama(**small_model.SMALL_SHAPE, attention=kind)
    model.load_state_dict(small_model.small_weights())
    x, attention = small_model.states(), model.layers[0].attention
    weights = small_model.in_double(small_model.below(small_model.small_weights(), "layers.0.attention."))
    right = small_model.attention(x.double(), weights, kind == "causal")
    wrong = small_model.attention(x.double(), weights, kind == "causal", **ATTENTION[name])
    assert not torch.allclose(right, wrong, atol=1e-2)
    with torch.no_grad():
        with broken(model, Switches(breaks=[name])):
            torch.testing.assert_close(attention(x).double(), wrong, atol=1e-4, rtol=0)
        torch.testing.assert_close(attention(x).double(), right, atol=1e-4, rtol=0)


LAYER = {
    "residual": said(mistakes.LAYER_MISTAKES, "both residuals are missing"),
    "norm": said(mistakes.NORM_MISTAKES, "the mean is of x"),
    "gelu": dict(gate=said(mistakes.GATES, "GELU, not SiLU")),
}


@pytest.mark.parametrize("name", LAYER)
def test_the_other_switches_are_grading_s_mistakes(name: str):
    model = random_llama(**small_model.SMALL_SHAPE, attention="causal")
    model.load_state_dict(small_model.small_weights())
    layer, x = model.layers[0], small_model.states() + 0.5
    weights = small_model.in_double(small_model.below(small_model.small_weights(), "layers.0."))
    with broken(model, Switches(breaks=[name])), torch.no_grad():
        if name == "gelu":
            found = layer.feed_forward(x)
            wrong = small_model.feed_forward(x.double(), small_model.below(weights, "feed_forward."), **LAYER[name])
        elif name == "norm":
            found, own = layer.attention_norm(x), weights["attention_norm.weight"]
            wrong = mistakes.norm_by_hand(x.double(), own, 0.0, small_model.EPS, **LAYER[name])
        else:
            found, wrong = layer(x), small_model.layer(x.double(), weights, True, **LAYER[name])
    assert torch.isfinite(wrong).any()
    torch.testing.assert_close(found.double(), wrong, atol=1e-4, rtol=0, equal_nan=True)
