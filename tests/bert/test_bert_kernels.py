"""The kernels that `fast` gives a BERT, against bert/model.py and transformers; and that they ignore no edit."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small import hf_directory, hf_model, our_directory, shake
from torch import nn

import bert.kernels
from bert import model
from bert.config import BertConfig
from bert.heads import BertForSequenceClassification
from bert.kernels import FusedBertAttention, scores_check
from bert.load import load_model
from engine import equivalence, runs
from engine.data import read_label_names
from engine.plan import ComputeSettings, InputFile, Plan
from fast import accelerate
from fast.linear import OneDNNLinear, has_onednn

LENGTHS = {  # of the texts of a batch
    "some padding": [40, 7, 33, 1, 12, 40, 21],
    "no padding": [30] * 9,
    "a long text": [64, 2, 2, 2, 2],
}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(autouse=True)
def notices_anew() -> None:
    equivalence.notice.cache_clear()  # a line is printed once


def classifier(**changes) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_seq_len": 64}
    config = BertConfig(**{**sizes, "dropout": 0.0, "attention_dropout": 0.0, **changes})
    made = BertForSequenceClassification(model.Bert(config), 3)
    shake(made)
    return made.eval()


def accelerated(plain: nn.Module) -> nn.Module:
    twin = copy.deepcopy(plain)
    accelerate(twin)
    return twin


def texts(lengths: list[int], pad_id: int = 0) -> tuple[torch.Tensor, ...]:
    """Ids, segments and the padding mask, b s each."""
    draw = torch.Generator().manual_seed(0)
    is_real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(10, 300, is_real.shape, generator=draw).where(is_real, pad_id)
    return ids, torch.randint(0, 2, is_real.shape, generator=draw), is_real


def gradients(made: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Those of a loss, but for keys' biases, which are added to all scores of a query alike: theirs are rounding."""
    made.train().zero_grad()
    F.nll_loss(made(ids), torch.arange(len(ids)) % 3).backward()
    return {name: p.grad for name, p in made.named_parameters() if not name.endswith("compute_key.bias")}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def assert_computes_as(made: nn.Module, plain: nn.Module) -> None:
    """Padded batch or not, in training or not; dropout draws the same."""
    for name in ("some padding", "no padding"):
        for training in (False, True):
            answers = []
            for each in (made, plain):
                torch.manual_seed(2)
                answers.append(each.train(training)(texts(LENGTHS[name])[0]))
            torch.testing.assert_close(*answers, **TOLERANCE)


# ----------------------------------------------------------------------------------------------------- equal results


@pytest.mark.parametrize(("lengths", "threads"), [*((name, 1) for name in LENGTHS), ("some padding", 2)])
def test_hidden_states_pooled_vectors_and_gradients_are_the_plain_ones(lengths: str, threads: int):
    plain = classifier()
    made = accelerated(plain)
    ids, segments, is_real = texts(LENGTHS[lengths])
    torch.set_num_threads(threads)
    try:
        for others in ((), (segments,), (segments, is_real), (None, is_real.long())):
            hidden, pooled = made.encoder(ids, *others)
            expected, its_pooled = plain.encoder(ids, *others)
            assert expected[is_real].std() > 0.05
            assert_close(hidden, expected)
            assert_close(pooled, its_pooled)
        expected = gradients(plain, ids)
        for name, gradient in gradients(made, ids).items():
            atol = 1e-4 * max(1e-3, expected[name].abs().max())
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=atol)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("changes", [{}, {"pad_token_id": 7}, {"act": "gelu_new"}, {"act": "relu"}])
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "DistilBertForSequenceClassification"])
def test_classes_are_those_of_transformers(tmp_path: Path, name: str, changes: dict):
    if "act" in changes:
        changes = {"activation" if name.startswith("Distil") else "hidden_act": changes["act"]}
    hf = hf_model(name, num_labels=3, **changes)
    made, _ = load_model(hf_directory(tmp_path, hf))
    accelerate(made)
    ids, _, is_real = texts(LENGTHS["some padding"], changes.get("pad_token_id", 0))
    with torch.inference_mode():
        theirs = hf(ids, attention_mask=is_real.long()).logits.log_softmax(-1)
        assert theirs.std() > 0.05
        torch.testing.assert_close(made(ids), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_padding_may_stand_anywhere_and_a_text_may_be_nothing_else(p: float):
    plain = classifier(attention_dropout=p).train(p > 0)
    made = accelerated(plain)
    ids, _, is_real = texts([40, 7, 33, 30, 12, 40, 21, 1])
    gaps = torch.rand(is_real.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    empty, left = is_real.clone(), is_real & (torch.arange(40) >= torch.arange(8)[:, None] * 4)
    empty[3] = False
    for mask in (gaps, empty, left, is_real[1:2], is_real[1:2].expand(8, -1)):
        answers = []
        for each in (made, plain):
            torch.manual_seed(3)
            answers.append(each.encoder(ids, None, mask))
        for actual, expected in zip(*answers, strict=True):
            assert_close(actual, expected)


@pytest.mark.skipif(not has_onednn(), reason="oneDNN is not here")
@pytest.mark.parametrize("trained", ["x", "weight", "bias", "all", "none"])
def test_linear_layers_with_a_bias_are_equal_on_onednn(trained: str):
    torch.manual_seed(0)
    plain, x = nn.Linear(96, 160), torch.randn(3, 50, 96)
    for name, tensor in (("x", x), ("weight", plain.weight), ("bias", plain.bias)):
        tensor.requires_grad_(trained in (name, "all"))
    kernel = OneDNNLinear.from_linear(plain)
    torch.testing.assert_close(kernel(x), plain(x), **TOLERANCE)
    wanted = [tensor for tensor in (x, plain.weight, plain.bias) if tensor.requires_grad]
    if wanted:
        pairs = (torch.autograd.grad(layer(x).square().sum(), wanted) for layer in (kernel, plain))
        for ours, expected in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)
    else:
        with torch.no_grad():
            plain.bias.add_(1.0)  # of which no copy is kept
        torch.testing.assert_close(kernel(x), plain(x), **TOLERANCE)


def test_dropout_draws_what_the_plain_one_draws():
    plain = classifier(dropout=0.3, attention_dropout=0.4)
    made = accelerated(plain)
    assert_computes_as(made, plain)
    ids = texts(LENGTHS["no padding"])[0]
    assert not torch.allclose(made.train()(ids), made(ids), **TOLERANCE)


# ---------------------------------------------------------------------------------------------- no edit is ignored

SCORES = model.BertAttention.compute_query_key_value_scores


def sharper(self, query, key, value, mask=None):
    return SCORES(self, 2 * query, key, value, mask)


def dropped_early(self, query, key, value, mask=None):
    """Equal to the plain one but where weights are dropped in training."""
    value = self.attn_dropout(value)
    weights = (query @ key.transpose(-2, -1) / self.head_dim**0.5).masked_fill(~mask, -1e9).softmax(-1)
    return weights @ value


def gained(self, query, key, value, mask=None, gain=1.0):
    return SCORES(self, gain * query, key, value, mask)


def with_more(self, x, mask=None):
    projections = (self.compute_query, self.compute_key, self.compute_value)
    heads = (compute(x).unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for compute in projections)
    return self.compute_output(self.compute_query_key_value_scores(*heads, mask, gain=3.0).transpose(1, 2).flatten(-2))


class Louder(model.BertAttention):
    """A user's own."""

    def compute_query_key_value_scores(self, *inputs: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().compute_query_key_value_scores(*inputs)


def subclass(made: nn.Module) -> None:
    layer = made.encoder.layers[1]
    own = Louder(made.encoder.config)
    own.load_state_dict(layer.attention.state_dict())
    layer.attention = own.train(made.training)


def hooked(part: str) -> Callable[[nn.Module], object]:
    def hook(made: nn.Module) -> object:
        return made.get_submodule(part).register_forward_hook(lambda module, inputs, x: x + x.mean(1, keepdim=True))

    return hook


def own_scores(made: nn.Module) -> None:
    part = made.encoder.layers[0].attention
    part.compute_query_key_value_scores = lambda *inputs: 3 * SCORES(part, *inputs)


EDITED_CODE = {
    "scores": {"compute_query_key_value_scores": sharper},
    "dropout of scores": {"compute_query_key_value_scores": dropped_early},
    "another argument": {"compute_query_key_value_scores": gained, "forward": with_more},
}
CHANGED_MODELS = {
    "a subclass": subclass,
    "a hook on attention": hooked("encoder.layers.1.attention"),
    "a hook on a linear layer": hooked("encoder.layers.0.feed_forward.w1"),
    "a hook on dropout of weights": hooked("encoder.layers.0.attention.attn_dropout"),
    "a method of one attention": own_scores,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("edit", EDITED_CODE)
def test_edited_code_is_computed_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, edit: str, when: str
):
    plain = classifier(attention_dropout=0.4)
    made = accelerated(plain)
    before = plain(texts(LENGTHS["some padding"])[0])
    for name, method in EDITED_CODE[edit].items():
        monkeypatch.setattr(model.BertAttention, name, method)
    equivalence.notice.cache_clear()
    if when == "before":  # what was found when kernels were chosen is printed then
        made = copy.deepcopy(plain)
        choices = accelerate(made)
        is_plain = edit != "another argument"  # which alone changes nothing
        assert choices[1].kernel == ("plain" if is_plain else "fused")
    assert_computes_as(made, plain)
    assert edit == "dropout of scores" or not torch.allclose(plain.eval()(texts(LENGTHS["some padding"])[0]), before)
    told = "is computed as it is written, without its kernel" in capsys.readouterr().err
    assert told == (edit != "another argument")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGED_MODELS)
def test_a_changed_module_is_computed(capsys: pytest.CaptureFixture, change: str, when: str):
    edit, plain = CHANGED_MODELS[change], classifier(attention_dropout=0.4)
    made, unchanged = copy.deepcopy(plain), plain(texts(LENGTHS["some padding"])[0])
    edit(plain)
    if when == "before":
        edit(made)
    accelerate(made)
    if when == "after":
        edit(made)
    assert_computes_as(made, plain)
    assert not torch.allclose(plain.eval()(texts(LENGTHS["some padding"])[0]), unchanged)
    told = "Louder is computed as it is written: it is not BertAttention itself" in capsys.readouterr().err
    assert told == (change == "a subclass" and when == "before")


# ------------------------------------------------------------------------------------------- into a model, and out


def test_weights_names_and_copies_stay_what_they_are():
    made = classifier()
    before = {name: (id(p), p.clone()) for name, p in made.named_parameters()}
    choices = accelerate(made)
    assert [choice.part for choice in choices] == ["linear layers", "BERT's attention"]
    assert choices[1].kernel == "fused"
    kinds = {type(part) for part in made.modules()}
    assert FusedBertAttention in kinds and (OneDNNLinear in kinds) == has_onednn()
    assert {name: id(p) for name, p in made.named_parameters()} == {name: key for name, (key, _) in before.items()}
    assert all(torch.equal(p, before[name][1]) for name, p in made.named_parameters())
    assert accelerate(made) == choices and {type(part) for part in made.modules()} == kinds
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    ids = texts(LENGTHS["some padding"])[0]
    for twin in (copy.deepcopy(made), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(made))):
        torch.testing.assert_close(twin(ids), made(ids), **TOLERANCE)


def test_an_encoder_by_itself_has_its_attention_fused():
    encoder = classifier().encoder
    assert accelerate(encoder)[1].kernel == "fused"
    attention = encoder.layers[0].attention
    assert type(attention) is FusedBertAttention and attention._keeps_weights()  # else it multiplies step by step


def test_other_devices_have_fused_attention_alone():
    made = classifier()
    attended = "fused" if scores_check("cuda").holds() else "plain"  # without such a device nothing can be compared
    assert [c.kernel for c in accelerate(made, device=torch.device("cuda"))] == ["plain", attended]
    assert OneDNNLinear not in {type(part) for part in made.modules()}


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_a_bert_is_computed_in_float32(capsys: pytest.CaptureFixture, precision: str):
    plain = classifier()
    made = copy.deepcopy(plain)
    runs.compute_fast(made, ComputeSettings(torch.device("cpu"), precision=precision), trains=False)
    told = capsys.readouterr().err
    assert "a Bert is computed in fp32, whatever the precision" in told and "int8 loses less" not in told
    ids = texts(LENGTHS["some padding"])[0]
    torch.testing.assert_close(made(ids), plain(ids), **TOLERANCE)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_run_computes_with_them_unless_it_is_told_not_to(tmp_path: Path, films: dict[str, Path], kernels: str):
    directory = our_directory(tmp_path / "bert")
    plan = Plan(
        checkpoint=InputFile.of(directory, ("config.json", "model.safetensors", "vocab.txt")),
        tokenizer=InputFile.of(directory / "vocab.txt"),
        train=InputFile.of(films["train"]),
        dev=InputFile.of(films["dev"]),
        label_names=tuple(read_label_names(films["label_names"])),
        family="bert",
        epochs=1,
    )
    run = runs.assemble(plan, ComputeSettings(torch.device("cpu"), kernels))
    kinds = {type(part) for part in run.model.modules()}
    mine = {FusedBertAttention} | ({OneDNNLinear} if has_onednn() else set())
    assert mine & kinds == (mine if kernels == "auto" else set())


def test_without_kernels_nothing_of_fast_is_imported():
    """A program that computes with `bert/` alone does not need `fast/`."""
    code = "import sys, bert.run, bert.family, bert.heads; assert not {'fast', 'bert.kernels'} & set(sys.modules)"
    root = Path(bert.kernels.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


@pytest.mark.parametrize("name", ["compute_query", "compute_key"])
@pytest.mark.parametrize("length", [1, 7, 15, 16])
def test_attention_shows_a_damaged_weight_in_texts_of_every_length(length: int, name: str):
    """PyTorch's fused kernel gives zeros where all scores of a short text are NaN."""
    plain, ids = classifier(), torch.randint(5, 300, (2, length))
    weight = next(weight for key, weight in plain.named_parameters() if key.endswith(f"{name}.weight"))
    nn.init.constant_(weight, float("nan"))
    with torch.no_grad():
        for made in (plain, accelerated(plain)):
            assert not made(ids, None, torch.ones_like(ids)).isfinite().any()
