"""The page of a text equals what the model computes in another way, and an edit of the model changes it."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import random_llama
from torch import nn

import rope
from classifier import LlamaEmbeddingClassifier
from explore.decision import decide, gradient_by_input, occluded, occlusion_starts
from explore.inspected import InspectedModel, InspectedText, lengths, page_of_model, page_of_rope, to_bytes
from explore.look import lenses, match_at_distance, read, read_both, rotated
from llama import Attention, Llama
from tokenizer import Tokenizer
from utils import UserError

IDS = [1, 270, 281, 265, 290, 281, 299]
BOTH = ("bidirectional", "causal")


@pytest.fixture(scope="module", params=BOTH)
def llama(request: pytest.FixtureRequest) -> Llama:
    return random_llama(attention=request.param)


def other(llama: Llama, attention: str) -> Llama:
    """The same weights in a model with that kind of attention."""
    model = Llama(replace(llama.config, attention=attention)).eval()
    model.load_state_dict(llama.state_dict())
    return model


def weights_by_hand(llama: Llama, states: torch.Tensor, layer: int, is_causal: bool) -> torch.Tensor:
    """The formula, written out: one layer's weights from the residual stream before it. states: s D -> h s t"""
    part = llama.layers[layer].attention
    x, config, length = llama.layers[layer].attention_norm(states), llama.config, len(states)
    angles = torch.arange(length)[:, None] * config.rope_theta ** -(torch.arange(0, part.head_dim, 2) / part.head_dim)
    heads = []
    for head in range(config.n_heads):
        both = []
        for linear, place in ((part.compute_query, head), (part.compute_key, head // part.n_rep)):
            of_head = linear(x)[:, place * part.head_dim : (place + 1) * part.head_dim]
            even, odd = of_head[:, 0::2], of_head[:, 1::2]
            pairs = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
            both.append(torch.stack(pairs, -1).flatten(-2))
        scores = both[0] @ both[1].T / math.sqrt(part.head_dim)
        if is_causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1))
    return torch.stack(heads)


# --------------------------------------------------------------------------------------------------- the record


@pytest.mark.parametrize("attention", BOTH)
def test_a_record_is_that_of_a_model_with_this_attention(llama: Llama, attention: str):
    record, model = read(llama, IDS, attention), other(llama, attention)
    tokens = torch.tensor([IDS])
    logits, hidden = model(tokens, targets=tokens)
    assert torch.allclose(record.logits, logits[0], atol=1e-5)
    assert torch.allclose(model.norm(record.states[-1]), hidden[0], atol=1e-5)
    assert torch.equal(record.states[0], model.tok_embeddings(tokens)[0])
    with torch.inference_mode():
        for layer in range(model.config.n_layers):
            expected = weights_by_hand(model, record.states[layer], layer, attention == "causal")
            assert torch.allclose(record.attention[layer], expected, atol=1e-5)


def test_the_model_is_left_as_it_was(llama: Llama):
    before = [set(vars(layer.attention)) for layer in llama.layers]
    tokens = torch.tensor([IDS])
    expected = llama(tokens)[0]
    read_both(llama, IDS)
    assert [set(vars(layer.attention)) for layer in llama.layers] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())
    assert torch.equal(llama(tokens)[0], expected)


def test_an_edit_of_the_scores_is_seen(llama: Llama, monkeypatch: pytest.MonkeyPatch):
    plain, compute = read(llama, IDS, "causal"), Attention.compute_query_key_value_scores
    doubled = lambda self, query, key, value, mask=None: compute(self, 2 * query, key, value, mask)  # noqa: E731
    monkeypatch.setattr(Attention, "compute_query_key_value_scores", doubled)
    edited = read(llama, IDS, "causal")
    assert not torch.allclose(plain.attention[0], edited.attention[0], atol=1e-3)
    sharper = plain.attention[0].clamp(min=1e-30) ** 2
    assert torch.allclose(edited.attention[0], sharper / sharper.sum(-1, keepdim=True), atol=1e-5)


def test_an_edit_on_an_instance_is_seen_and_kept(llama: Llama):
    part = llama.layers[0].attention
    compute = part.compute_query_key_value_scores

    def shifted(*args: torch.Tensor) -> torch.Tensor:
        return compute(*args) / 2

    part.compute_query_key_value_scores = shifted
    try:
        record = read(llama, IDS, llama.config.attention)
        assert torch.allclose(record.attention[0].sum(-1), torch.tensor(0.5))
        assert part.compute_query_key_value_scores is shifted
    finally:
        del part.compute_query_key_value_scores


def test_an_edit_of_rope_is_seen(llama: Llama, monkeypatch: pytest.MonkeyPatch):
    plain = rotated(llama.config, 5)
    table = rope.rope_table
    monkeypatch.setattr(rope, "rope_table", lambda *settings: (table(*settings)[0], -table(*settings)[1]))
    assert torch.allclose(rotated(llama.config, 5)[..., 1], -plain[..., 1])
    before, after = read(llama, IDS, "causal").queries[0]
    angle = torch.atan2(after[..., 1], after[..., 0]) - torch.atan2(before[..., 1], before[..., 0])
    assert torch.allclose(angle[:, 1].sin(), torch.tensor(-1.0).sin(), atol=1e-4)  # the first pair turns by 1 a token


def test_queries_are_turned_by_the_angles_of_the_paper(llama: Llama):
    before, after = (each.unflatten(-1, (-1, 2)) for each in read(llama, IDS, "causal").queries[0])  # h s d/2 2
    pairs = torch.view_as_complex(before.contiguous())
    angles = torch.arange(len(IDS))[:, None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
    assert torch.allclose(after, expected, atol=1e-4)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_angles_and_matches_are_those_of_the_paper(factor: float):
    config = random_llama(rope_scaling=("linear", factor) if factor > 1 else None).config
    angles = torch.arange(20)[:, None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8) / factor
    assert torch.allclose(rotated(config, 20), torch.stack((angles.cos(), angles.sin()), -1), atol=1e-5)
    assert torch.allclose(match_at_distance(config, 20), angles.cos().mean(-1), atol=1e-5)


def test_the_page_holds_the_angles_of_slow_pairs():
    """Of Llama 3.2 1B, whose last pair makes a turn in 67 million tokens."""
    scaling = ("llama3", 32.0, 1.0, 4.0, 8192.0)
    config = random_llama(dim=256, n_heads=4, rope_theta=5e5, rope_scaling=scaling, max_seq_len=128).config
    turned = torch.tensor(page_of_rope(SimpleNamespace(config=config))["turned"]).view(128, 32, 2).double()  # s d/2 2
    found = torch.atan2(turned[64, 20:, 1], turned[64, 20:, 0]) / 64
    plain = 5e5 ** -(torch.arange(0, 64, 2)[20:].double() / 64)
    turns = 8192 * plain / (2 * math.pi)
    share = ((turns - 1) / 3).clamp(0, 1)
    torch.testing.assert_close(found, plain * (share + (1 - share) / 32), rtol=1e-4, atol=0)


def test_code_whose_attention_takes_no_mask_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def three(self: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)).softmax(-1) @ value

    llama = random_llama(attention="bidirectional")
    plain = read(llama, IDS, "bidirectional").attention[1]
    monkeypatch.setattr(Attention, "compute_query_key_value_scores", three)
    found = read_both(llama, IDS)
    assert found["causal"] is None and torch.allclose(found["bidirectional"].attention[1], plain, atol=1e-6)


def test_positions_that_a_method_adds_are_refused(llama: Llama, monkeypatch: pytest.MonkeyPatch):
    embed = llama.tok_embeddings.forward
    monkeypatch.setattr(llama.tok_embeddings, "forward", lambda tokens: embed(torch.cat([tokens[:, :1], tokens], 1)))
    with pytest.raises(UserError, match="adds positions"):
        read(llama, IDS, llama.config.attention)


# ----------------------------------------------------------------------------------------------------- the lens


def test_a_lens_is_the_head_on_the_state_after_a_layer(llama: Llama):
    record, tokens = read(llama, IDS, llama.config.attention), torch.tensor([IDS])
    layers = lenses(llama, record, IDS, 4)
    assert len(layers) == llama.config.n_layers + 1
    with torch.inference_mode():
        early = llama.norm(llama.layers[0](llama.tok_embeddings(tokens)))[0] @ llama.output.weight.T
        expected = early.softmax(-1).topk(4)
        last = llama(tokens, targets=tokens)[0][0].softmax(-1)
    assert torch.allclose(layers[1].probabilities, expected.values, atol=1e-6)
    assert torch.equal(layers[1].ids, expected.indices)
    for place, following in enumerate(IDS[1:]):
        assert layers[-1].next_probability[place] == pytest.approx(float(last[place, following]), rel=1e-5)
        rank = sorted(last[place].tolist(), reverse=True).index(float(last[place, following])) + 1
        assert layers[-1].next_rank[place] == rank
    assert layers[-1].ids[:, 0].tolist() == last.argmax(-1).tolist()


# ------------------------------------------------------------------------------------------------- the decision


@pytest.fixture(scope="module")
def classifier(llama: Llama) -> nn.Module:
    torch.manual_seed(1)
    config = SimpleNamespace(num_labels=3, hidden_dropout_prob=0.1, option="finetune")
    model = LlamaEmbeddingClassifier(config, llama=other(llama, llama.config.attention))
    nn.init.normal_(model.classifier_head.weight, std=1.0)
    return model.requires_grad_(False).eval()


def test_occlusion_is_the_text_without_the_token(classifier: nn.Module):
    found = decide(classifier, classifier.llama.tok_embeddings, IDS)
    whole = classifier(torch.tensor([IDS]))[0]
    assert torch.allclose(found.log_probabilities, whole, atol=1e-6) and found.together == 1
    assert found.occlusion[0].isnan().all()
    for place in range(1, len(IDS)):
        rest = classifier(torch.tensor([IDS[:place] + IDS[place + 1 :]]))[0]
        assert torch.allclose(found.occlusion[place], whole.exp() - rest.exp(), atol=1e-5)
    assert decide(classifier, classifier.llama.tok_embeddings, [1, 270]).occlusion.isnan().all()  # nothing to leave out


def test_scores_of_label_words_are_compared_with_one_another():
    """A zero-shot classifier's scores are no log-probabilities; what is lost without a token is, and adds up to 0."""
    table = torch.randn(300, 3, generator=torch.Generator().manual_seed(2))
    model = nn.Embedding(300, 3, _weight=table)
    scores = nn.Sequential(model, Last())
    found = decide(scores, model, IDS)
    without = torch.stack([scores(torch.tensor([IDS[:place] + IDS[place + 1 :]]))[0] for place in range(1, len(IDS))])
    shares = torch.stack([each.exp() / each.exp().sum() for each in (found.log_probabilities, *without.detach())])
    assert torch.allclose(found.occlusion[1:], shares[0] - shares[1:], atol=1e-6)
    assert torch.allclose(found.occlusion[1:].sum(-1), torch.zeros(len(IDS) - 1), atol=1e-6)


class Last(nn.Module):
    """Each text is judged by its last token, and a little by its length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s c -> b c"""
        return x[:, -1] * (1 + x.shape[1] / 10)


def test_in_a_long_text_neighbours_are_left_out_together(classifier: nn.Module):
    tokens = torch.tensor([IDS])
    whole = classifier(tokens)[0]
    found = occluded(classifier, tokens, whole, 4, occlusion_starts(len(IDS), 4))
    rest = classifier(torch.tensor([IDS[:1] + IDS[5:]]))[0]
    assert torch.allclose(found[1], whole.exp() - rest.exp(), atol=1e-5) and torch.equal(found[1], found[2])
    assert not found[1:].isnan().any()
    assert decide(classifier, classifier.llama.tok_embeddings, [1, *[270] * 299]).together == 3


def test_gradient_by_input_is_the_change_with_the_embedding_s_length(classifier: nn.Module):
    tokens, embedding, change = torch.tensor([IDS]), classifier.llama.tok_embeddings, 1e-3
    found = gradient_by_input(classifier, embedding, tokens)
    assert not embedding._forward_hooks

    def scaled(place: int, factor: float) -> torch.Tensor:
        factors = torch.ones(len(IDS), 1)
        factors[place] = factor
        hook = embedding.register_forward_hook(lambda module, inputs, output: output * factors)
        result = classifier(tokens)[0]
        hook.remove()
        return result

    for place in (0, 3, len(IDS) - 1):
        difference = scaled(place, 1 + change) - scaled(place, 1 - change)
        assert torch.allclose(found[place], difference / (2 * change), atol=2e-2, rtol=2e-2)


# ------------------------------------------------------------------------------------------ what the page stores


def test_the_page_stores_what_was_read(llama: Llama, tokenizer: Tokenizer):
    inspected = InspectedModel("tiny.pt", llama, tokenizer)
    content = page_of_model(inspected, [InspectedText("A thin joke"), InspectedText("the rain")])
    of_layer = 32 * (32 + 2 * 16 + 32) + 3 * 32 * len(llama.layers[0].feed_forward.w1.weight) + 2 * 32
    assert content["model"]["parameters"] == 300 * 32 + 2 * of_layer + 32  # the output matrix is the embedding
    for text in content["texts"]:
        ids, config = text["ids"], llama.config
        assert ids == tokenizer.encode(text["text"], bos=True, eos=False) and text["shown"] == len(ids)
        assert [content["pieces"][id] for id in ids] == [tokenizer.sp_model.id_to_piece(id) for id in ids]
        for attention in BOTH:
            record, stored = read(llama, ids, attention), text["semantics"][attention]
            raw = np.frombuffer(zlib.decompress(base64.b64decode(stored["attention"])), np.uint8)
            shape = config.n_layers, config.n_heads, len(ids), len(ids)
            weights = torch.tensor((raw.reshape(shape) / 255.0) ** 2)
            assert (weights - torch.stack(record.attention)).abs().max() < 0.004
            for number, layer in enumerate(lenses(llama, record, ids, 5)):
                assert stored["lens"][number] == {
                    "ids": layer.ids.flatten().tolist(),
                    "p": pytest.approx(layer.probabilities.flatten().tolist(), rel=1e-3),
                    "next": pytest.approx(layer.next_probability.tolist(), rel=1e-3),
                    "rank": layer.next_rank.tolist(),
                }
        raw = np.frombuffer(zlib.decompress(base64.b64decode(text["queries"]["data"])), np.int16)
        both = torch.tensor(raw.reshape(2, config.n_heads, len(ids), config.head_dim) * text["queries"]["unit"])
        expected = torch.stack(read(llama, ids, config.attention).queries[0])
        assert torch.allclose(both.float(), expected, atol=2 * text["queries"]["unit"])


def test_attention_is_cut_to_the_first_tokens_and_several_texts_share_the_room(
    llama: Llama, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("explore.inspected.ATTENTION_BYTES", 12_000)
    asked = [InspectedText("slow rain " * 12), InspectedText("a thin joke")]
    long, short = page_of_model(InspectedModel("tiny.pt", llama, tokenizer), asked)["texts"]
    assert 8 <= long["shown"] < len(long["ids"]) and short["shown"] == len(short["ids"])
    assert sum(len(each["attention"]) for each in long["semantics"].values()) <= 6_000
    assert len(long["semantics"]["causal"]["lens"][0]["rank"]) == len(long["ids"]) - 1
    assert [*lengths(10)] == [10, 9, 8] and [*lengths(3)] == [3]
    weights = torch.linspace(0, 1, 10_001)
    assert ((to_bytes(weights) / 255.0) ** 2 - weights).abs().max() < 0.004


def test_a_text_beyond_the_model_s_positions_is_named(
    llama: Llama, tokenizer: Tokenizer, capsys: pytest.CaptureFixture
):
    inspected = InspectedModel("tiny.pt", llama, tokenizer)
    fits = next(text for text in ("a" * n for n in range(1, 99)) if len(inspected.encode(text)) == 64)
    page_of_model(inspected, [InspectedText(fits)])
    assert capsys.readouterr().err == ""
    page_of_model(inspected, [InspectedText(f"{fits}a")])
    assert "has 65 tokens, and the model was made for 64" in capsys.readouterr().err


def test_without_a_tokenizer_texts_are_ids(llama: Llama):
    inspected = InspectedModel("tiny.pt", llama, None)
    (text,) = page_of_model(inspected, [InspectedText("1 270 281")])["texts"]
    assert text["ids"] == [1, 270, 281] and inspected.piece(270) == "270"
    for words in ("hello", "1 300", "1 -2", "1 ²", "9" * 5000):
        with pytest.raises(UserError, match="from 0 to 299"):
            inspected.encode(words)
