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
from bert.load import load_model, load_pretrained  # noqa: E402
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


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 17, 64])
def test_hidden_states_and_pooled_vectors_equal(tmp_path: Path, length: int, size: int, padding: bool):
    hf = hf_model("BertModel", seed=length)
    ids, segments, mask = batch(size, length, padding)
    with torch.inference_mode():
        hidden, pooled = load_pretrained(hf_directory(tmp_path, hf))(ids, segments, mask)
        theirs = hf(ids, attention_mask=mask, token_type_ids=segments)
    assert_equal(hidden, theirs.last_hidden_state)
    assert_equal(pooled, theirs.pooler_output)


@pytest.mark.parametrize(
    "changes",
    [
        dict(hidden_act="gelu_new"),
        dict(hidden_act="relu"),
        dict(layer_norm_eps=1e-2),
        dict(num_attention_heads=1),
        dict(num_attention_heads=8, intermediate_size=40, pad_token_id=7),
    ],
)
def test_other_shapes_and_settings_equal(tmp_path: Path, changes: dict):
    hf = hf_model("BertModel", type_vocab_size=3, **changes)
    ids, segments, mask = batch(3, 12)
    with torch.inference_mode():
        hidden, pooled = load_pretrained(hf_directory(tmp_path, hf))(ids, segments + 1, mask)
        theirs = hf(ids, attention_mask=mask, token_type_ids=segments + 1)
    assert_equal(hidden, theirs.last_hidden_state)
    assert_equal(pooled, theirs.pooler_output)


def test_without_a_mask_padding_is_hidden_and_without_segments_all_is_the_first(tmp_path: Path):
    model = load_pretrained(hf_directory(tmp_path, hf_model("BertModel", pad_token_id=7)))
    ids, _, mask = batch(3, 12)
    ids = torch.where(mask.bool(), ids.where(ids != 7, 8), 7)
    for hidden in (model(ids)[0], model(ids, torch.zeros_like(ids))[0]):
        torch.testing.assert_close(hidden, model(ids, torch.zeros_like(ids), mask.bool())[0])
    alone = model(ids[2:, :8])[0]
    torch.testing.assert_close(model(ids)[0][2:, :8], alone, atol=1e-5, rtol=0)
    assert not torch.allclose(model(ids, None, torch.ones_like(ids))[0], model(ids)[0], atol=1e-3)


def test_training_drops_what_transformers_drops(tmp_path: Path):
    changes = dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3, classifier_dropout=0.4)
    hf = hf_model("BertForSequenceClassification", num_labels=3, **changes).train()
    model = load_model(hf_directory(tmp_path, hf))[0].train()
    ids, segments, mask = batch(3, 12)
    torch.manual_seed(1)
    ours = model(ids, segments, mask)
    torch.manual_seed(1)
    theirs = hf(ids, attention_mask=mask, token_type_ids=segments).logits.log_softmax(-1)
    assert_equal(ours, theirs)
    assert not torch.allclose(ours, model.eval()(ids, segments, mask), atol=1e-2)


def test_token_classification_drops_what_transformers_drops(tmp_path: Path):
    hf = hf_model("BertForTokenClassification", num_labels=3, hidden_dropout_prob=0.3).train()
    model = load_model(hf_directory(tmp_path, hf))[0].train()
    ids, segments, mask = batch(3, 12)
    torch.manual_seed(1)
    ours = model(ids, segments, mask)
    torch.manual_seed(1)
    assert_equal(ours, hf(ids, attention_mask=mask, token_type_ids=segments).logits.log_softmax(-1))


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
    model = load_pretrained(hf_directory(tmp_path, hf))
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


def test_pre_training_equals_with_its_loss(tmp_path: Path):
    hf = hf_model("BertForPreTraining")
    model, new = load_model(hf_directory(tmp_path, hf))
    assert new == [] and isinstance(model, heads.BertForPreTraining)
    ids, segments, mask = batch(4, 17)
    labels = torch.where(torch.rand(4, 17) < 0.3, torch.randint(0, 300, (4, 17)), -100)
    follows = torch.tensor([0, 1, 1, 0])
    next_sentence, masked_lm = model(ids, segments, mask)
    theirs = hf(ids, attention_mask=mask, token_type_ids=segments, labels=labels, next_sentence_label=follows)
    assert_equal(masked_lm, theirs.prediction_logits.log_softmax(-1))
    assert_equal(next_sentence, theirs.seq_relationship_logits.log_softmax(-1))
    loss = F.nll_loss(masked_lm.flatten(0, 1), labels.flatten()) + F.nll_loss(next_sentence, follows)
    losses_equal(loss, theirs.loss, model, hf)
    chosen = labels != -100  # the head may be asked for some positions alone
    some = model.masked_lm(model.encoder(ids, segments, mask)[0][chosen]).log_softmax(-1)
    torch.testing.assert_close(some, masked_lm[chosen], atol=1e-5, rtol=0)


def test_next_sentences_alone_equal_with_their_loss(tmp_path: Path):
    hf = hf_model("BertForNextSentencePrediction")
    model, new = load_model(hf_directory(tmp_path, hf))
    assert new == [] and isinstance(model, heads.BertForNextSentencePrediction)
    ids, segments, mask = batch(3, 17)
    labels = torch.tensor([1, 0, 1])
    theirs = hf(ids, token_type_ids=segments, attention_mask=mask, labels=labels)
    ours = model(ids, segments, mask)
    assert_equal(ours, theirs.logits.log_softmax(-1))
    losses_equal(F.nll_loss(ours, labels), theirs.loss, model, hf)


@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_masked_lm_equals_with_its_loss(tmp_path: Path, family: str):
    hf = hf_model(f"{family}ForMaskedLM")
    model, new = load_model(hf_directory(tmp_path, hf))
    assert new == [] and isinstance(model, heads.BertForMaskedLM)
    ids, _, mask = batch(3, 17)
    labels = torch.where(mask.bool(), ids, -100)
    theirs = hf(ids, attention_mask=mask, labels=labels)
    ours = model(ids, None, mask)
    assert_equal(ours, theirs.logits.log_softmax(-1))
    losses_equal(F.nll_loss(ours.flatten(0, 1), labels.flatten()), theirs.loss, model, hf)
    assert model.masked_lm.decoder.weight is model.encoder.embeddings.tokens.weight


@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_classification_equals_with_its_loss(tmp_path: Path, family: str, kind: str):
    hf = hf_model(f"{family}For{kind}", num_labels=5)
    model, new = load_model(hf_directory(tmp_path, hf))
    assert new == [] and isinstance(model, getattr(heads, f"BertFor{kind}"))
    ids, segments, mask = batch(4, 9)
    segments = segments if family == "Bert" else None
    labels = torch.tensor([4, 0, 2, 1]) if kind == "SequenceClassification" else torch.randint(0, 5, (4, 9))
    extra = {} if segments is None else {"token_type_ids": segments}
    theirs = hf(ids, attention_mask=mask, labels=labels, **extra)
    ours = model(ids, segments, mask)
    assert_equal(ours, theirs.logits.log_softmax(-1))
    losses_equal(F.nll_loss(ours.flatten(0, -2), labels.flatten()), theirs.loss, model, hf)


@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_question_answering_equals_with_its_loss(tmp_path: Path, family: str):
    hf = hf_model(f"{family}ForQuestionAnswering")
    model, new = load_model(hf_directory(tmp_path, hf))
    assert new == []
    ids, segments, mask = batch(3, 17)
    extra = {"token_type_ids": segments} if family == "Bert" else {}
    first, last = torch.tensor([1, 5, 0]), torch.tensor([3, 5, 2])
    theirs = hf(ids, attention_mask=mask, start_positions=first, end_positions=last, **extra)
    start, end = model(ids, segments, mask)
    assert_equal(start, theirs.start_logits.log_softmax(-1))
    assert_equal(end, theirs.end_logits.log_softmax(-1))
    losses_equal((F.nll_loss(start, first) + F.nll_loss(end, last)) / 2, theirs.loss, model, hf)


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
    model = load_pretrained(folder)
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
