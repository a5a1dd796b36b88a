"""The encoder and its heads against Hugging Face transformers, an independent implementation, on random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")
from small import batch, hf_directory, hf_model, minilm  # noqa: E402

from bert import heads  # noqa: E402
from bert.config import BertConfig  # noqa: E402
from bert.load import load_bert, load_model  # noqa: E402
from bert.model import Bert, sinusoids  # noqa: E402
from engine.weights import blueprint  # noqa: E402


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.05 or theirs.numel() < 10  # numbers that are all alike would agree whatever was computed
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def losses_equal(ours: torch.Tensor, theirs: torch.Tensor, model: nn.Module, hf: nn.Module) -> None:
    """The losses, and what they would change in the embeddings, which the decoder of masked tokens is tied to."""
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    ours.backward()
    theirs.backward()
    grad, expected = model.encoder.embeddings.tokens.weight.grad, hf.get_input_embeddings().weight.grad
    # of padding's vector, transformers computes no gradient unless it is also the decoder's
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(grad[1:], expected[1:], atol=1e-4, rtol=0)


# -------------------------------------------------------------------------------------------------- encoder


def assert_encoders_equal(folder: Path, hf: nn.Module, ids: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor):
    with torch.inference_mode():
        hidden, pooled = load_bert(hf_directory(folder, hf))(ids, segments, mask)
        theirs = hf(ids, attention_mask=mask, token_type_ids=segments)
    assert_equal(hidden, theirs.last_hidden_state)
    assert_equal(pooled, theirs.pooler_output)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 17, 64])
def test_hidden_states_and_pooled_vectors_equal(tmp_path: Path, length: int, size: int, padding: bool):
    assert_encoders_equal(tmp_path, hf_model("BertModel", seed=length), *batch(size, length, padding))


@pytest.mark.parametrize(
    "changes",
    [
        *(dict(hidden_act=activation) for activation in ("gelu_new", "relu")),
        *(dict(layer_norm_eps=1e-2), dict(num_attention_heads=1)),
        dict(num_attention_heads=8, intermediate_size=40, pad_token_id=7),
    ],
)
def test_other_shapes_and_settings_equal(tmp_path: Path, changes: dict):
    ids, segments, mask = batch(3, 12)
    assert_encoders_equal(tmp_path, hf_model("BertModel", type_vocab_size=3, **changes), ids, segments + 1, mask)


def test_without_a_mask_padding_is_hidden_and_without_segments_all_is_the_first(tmp_path: Path):
    model = load_bert(hf_directory(tmp_path, hf_model("BertModel", pad_token_id=7)))
    ids, _, mask = batch(3, 12)
    ids = torch.where(mask.bool(), ids.where(ids != 7, 8), 7)
    for hidden in (model(ids)[0], model(ids, torch.zeros_like(ids))[0]):
        torch.testing.assert_close(hidden, model(ids, torch.zeros_like(ids), mask.bool())[0])
    alone = model(ids[2:, :8])[0]
    torch.testing.assert_close(model(ids)[0][2:, :8], alone, atol=1e-5, rtol=0)
    assert not torch.allclose(model(ids, None, torch.ones_like(ids))[0], model(ids)[0], atol=1e-3)


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_training_drops_what_transformers_drops(tmp_path: Path, kind: str):
    changes = dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3, classifier_dropout=0.4)
    hf = hf_model(f"BertFor{kind}", num_labels=3, **changes).train()
    model = load_model(hf_directory(tmp_path, hf))[0].train()
    ids, segments, mask = batch(3, 12)
    torch.manual_seed(1)
    ours = model(ids, segments, mask)
    torch.manual_seed(1)
    assert_equal(ours, hf(ids, attention_mask=mask, token_type_ids=segments).logits.log_softmax(-1))
    assert not torch.allclose(ours, model.eval()(ids, segments, mask), atol=1e-2)


def test_a_text_that_is_too_long_is_refused_and_one_of_padding_stays_finite():
    model = Bert(BertConfig.from_preset("mini")).eval()
    with pytest.raises(ValueError, match="65 tokens does not fit into 64 positions"):
        model(torch.ones(1, 65, dtype=torch.long))
    hidden, pooled = model(torch.tensor([[0, 0], [5, 0]]))
    assert hidden.isfinite().all() and pooled.isfinite().all()


def test_half_precision_softmax_is_that_of_single_precision():
    model = Bert(BertConfig.from_preset("mini", vocab_size=5)).eval().bfloat16()
    hidden, pooled = model(torch.tensor([[1, 2, 3, 0]]))
    assert hidden.dtype == pooled.dtype == torch.bfloat16 and hidden.isfinite().all()
    query, key, value = (torch.randn(1, 4, 9, 8, generator=torch.Generator().manual_seed(n)) * 3 for n in range(3))
    attention = model.layers[0].attention
    half = attention.compute_query_key_value_scores(query.bfloat16(), key.bfloat16(), value.bfloat16())
    scores = (query.bfloat16() @ key.bfloat16().transpose(-2, -1) / 8**0.5).float().softmax(-1).bfloat16()
    assert torch.equal(half, scores @ value.bfloat16())


def test_fresh_weights():
    torch.manual_seed(0)
    model = heads.BertForPreTraining(Bert(BertConfig.from_preset("mini", vocab_size=3000, dim=64)))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert 0.8 * 0.02 < parameter.std() < 1.2 * 0.02 and abs(parameter.mean()) < 0.005, name


@pytest.mark.parametrize(("preset", "millions"), [("base", 109.5), ("large", 335.1)])
def test_the_published_sizes_have_as_many_parameters_as_in_transformers(preset: str, millions: float):
    config = BertConfig.from_preset(preset)
    count = sum(parameter.numel() for parameter in blueprint(config, Bert).parameters())
    sizes = dict(hidden_size=config.dim, num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads)
    with torch.device("meta"):
        hf = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=4 * config.dim))
    assert count == hf.num_parameters() and round(count / 1e6, 1) == millions


# ------------------------------------------------------------------------------------- DistilBERT, sinusoids


@pytest.mark.parametrize("is_sinusoidal", [False, True])
@pytest.mark.parametrize("length", [1, 17, 64])
def test_distilbert_equals(tmp_path: Path, length: int, is_sinusoidal: bool):
    hf = hf_model("DistilBertModel", sinusoidal_pos_embds=is_sinusoidal)
    model = load_bert(hf_directory(tmp_path, hf))
    ids, segments, mask = batch(3, length)
    with torch.inference_mode():
        hidden, pooled = model(ids, segments, mask)  # the segments are not read
        assert_equal(hidden, hf(ids, attention_mask=mask).last_hidden_state)
    assert pooled is None
    assert model.embeddings.positions.weight.requires_grad is not is_sinusoidal


def test_sinusoidal_positions_are_the_formula_and_are_not_trained():
    table = sinusoids(50, 12)
    for position in (0, 1, 49):
        for pair in range(6):
            angle = torch.tensor(position / 10000 ** (2 * pair / 12), dtype=torch.float64)
            torch.testing.assert_close(table[position, 2 * pair], angle.sin().float())
            torch.testing.assert_close(table[position, 2 * pair + 1], angle.cos().float())
    model = Bert(BertConfig.from_preset("mini", positions="sinusoidal"))
    assert torch.equal(model.embeddings.positions.weight, sinusoids(64, 32))
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["embeddings.positions.weight"]
    assert all(p.requires_grad for p in Bert(BertConfig.from_preset("mini")).parameters())


# ---------------------------------------------------------------------------------------------------- heads


def labels_for(kind: str, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of transformers' models, in the order of our outputs. mask: b s, true at real tokens."""
    size = len(mask)
    words = torch.randint(0, 300, mask.shape).where(mask.bool() & (torch.rand(mask.shape) < 0.3), -100)
    return {
        "PreTraining": {"next_sentence_label": torch.randint(2, (size,)), "labels": words},
        "MaskedLM": {"labels": words},
        "NextSentencePrediction": {"labels": torch.randint(2, (size,))},
        "SequenceClassification": {"labels": torch.randint(5, (size,))},
        "TokenClassification": {"labels": torch.randint(5, mask.shape)},
        "QuestionAnswering": {"start_positions": torch.arange(size), "end_positions": torch.arange(size) + 2},
    }[kind]


KINDS_OF_HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")


@pytest.mark.parametrize(
    "name",
    [
        *("BertForPreTraining", "BertForNextSentencePrediction"),
        *(f"{family}For{kind}" for family in ("Bert", "DistilBert") for kind in KINDS_OF_HEADS),
    ],
)
def test_a_head_equals_with_its_loss(tmp_path: Path, name: str):
    kind = name.partition("For")[2]
    hf = hf_model(name, **({"num_labels": 5} if "Classification" in kind else {}))
    model, new = load_model(hf_directory(tmp_path, hf))
    assert new == [] and type(model) is getattr(heads, f"BertFor{kind}")
    ids, segments, mask = batch(4, 17)
    labels = labels_for(kind, mask)
    extra = {"token_type_ids": segments} if name.startswith("Bert") else {}
    theirs = hf(ids, attention_mask=mask, **labels, **extra)
    ours = model(ids, segments, mask)
    ours = ours if isinstance(ours, tuple) else (ours,)
    logits = [part for field, part in theirs.items() if field.endswith("logits")]
    for output, expected in zip(ours, logits[::-1] if kind == "PreTraining" else logits, strict=True):
        assert_equal(output, expected.log_softmax(-1))
    pairs = zip(ours, labels.values(), strict=True)
    losses = [F.nll_loss(output.flatten(0, -2), target.flatten()) for output, target in pairs]
    losses_equal(sum(losses) / (2 if kind == "QuestionAnswering" else 1), theirs.loss, model, hf)
    if hasattr(model, "masked_lm"):
        assert model.masked_lm.decoder.weight is model.encoder.embeddings.tokens.weight
        chosen = labels["labels"] != -100  # the head may be asked for some positions alone
        some = model.masked_lm(model.encoder(ids, segments, mask)[0][chosen]).log_softmax(-1)
        torch.testing.assert_close(some, ours[-1][chosen], atol=1e-5, rtol=0)


@pytest.mark.parametrize("has_pooler", [True, False])
def test_the_plain_head_is_one_matrix_of_its_own(has_pooler: bool):
    torch.manual_seed(0)
    encoder = Bert(BertConfig.from_preset("mini", has_pooler=has_pooler)).eval()
    ids, segments, mask = batch(2, 9)
    hidden, pooled = encoder(ids, segments, mask)
    for make in (heads.BertForPreTraining, heads.BertForMaskedLM):
        model = make(encoder, plain=True).eval()
        added = [name for name, _ in model.named_parameters() if name.startswith("masked_lm")]
        assert added == ["masked_lm.weight", "masked_lm.bias"]
        assert model.masked_lm.weight is not encoder.embeddings.tokens.weight
        expected = (hidden @ model.masked_lm.weight.T + model.masked_lm.bias).log_softmax(-1)
        result = model(ids, segments, mask)
        torch.testing.assert_close(result[1] if isinstance(result, tuple) else result, expected)
    model = heads.BertForPreTraining(encoder, plain=True).eval()
    text = pooled if has_pooler else hidden[:, 0]
    torch.testing.assert_close(model(ids, segments, mask)[0], model.next_sentence(text).log_softmax(-1))


# ------------------------------------------------------------------------------------------------- real weights


@pytest.mark.parametrize("length", [1, 8, 64, 512])
def test_the_real_minilm_equals(length: int):
    folder = minilm()
    hf = transformers.BertModel.from_pretrained(folder).eval()
    model = load_bert(folder)
    rng = torch.Generator().manual_seed(length)
    ids = torch.randint(1000, model.config.vocab_size, (3, length), generator=rng)
    ids[1, length // 2 + 1 :] = 0
    ids[2, (length + 2) // 3 :] = 0
    segments = (torch.arange(length) > length // 4).long().expand(3, -1) * (ids != 0)
    with torch.inference_mode():
        hidden, pooled = model(ids, segments)
        theirs = hf(ids, attention_mask=(ids != 0).long(), token_type_ids=segments)
    assert_equal(hidden[ids != 0], theirs.last_hidden_state[ids != 0])  # where a text is
    assert_equal(pooled, theirs.pooler_output)
