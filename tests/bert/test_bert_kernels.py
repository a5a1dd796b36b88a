"""What `fast` puts into a BERT, against the page and against transformers; and that nobody's edit is ignored by it."""

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
import bert.unpadded
from bert import attention, model
from bert.attention import FusedBertAttention
from bert.config import BertConfig
from bert.heads import BertForPreTraining, BertForQuestionAnswering, BertForSequenceClassification
from bert.kernels import UnpaddedBert
from bert.load import load_model
from bert.unpadded import Texts, put_back, take_out
from engine import runs
from engine.data import read_label_names
from engine.plan import ComputeSettings, InputFile, Plan
from fast import accelerate, equivalence
from fast.linear import OneDNNLinear, has_onednn

LENGTHS = {  # of the texts of a batch
    "some padding": [40, 7, 33, 1, 12, 40, 21],
    "no padding": [30] * 9,
    "a long text": [64, 2, 2, 2, 2],
    "equal lengths in pairs": [50, 20, 50, 20, 20, 20],
}
TOLERANCE = dict(atol=1e-5, rtol=1e-4)


@pytest.fixture(autouse=True)
def notes_anew_and_less_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    equivalence.notice.cache_clear()  # a line is said once
    monkeypatch.setattr(bert.kernels, "LEAST", 20 * 2 * (4 * 32**2 + 2 * 32 * 64))  # 20 positions of `classifier`


@pytest.fixture
def unpadded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The masks of all batches whose padding was left out."""
    seen: list[torch.Tensor] = []
    of = Texts.of
    monkeypatch.setattr(Texts, "of", lambda is_real: seen.append(is_real) or of(is_real))
    return seen


def classifier(**changes) -> BertForSequenceClassification:
    """A random one, large enough for batches of this file."""
    torch.manual_seed(0)
    settings = dict(vocab_size=300, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_seq_len=64)
    config = BertConfig(**{**settings, "dropout": 0.0, "attention_dropout": 0.0, **changes})
    made = BertForSequenceClassification(model.Bert(config), 3)
    shake(made)
    return made.eval()


def accelerated(plain: nn.Module, **purpose) -> nn.Module:
    twin = copy.deepcopy(plain)
    accelerate(twin, **purpose)
    return twin


def texts(lengths: list[int], pad_id: int = 0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Ids, segments and the padding mask, b s each."""
    draw = torch.Generator().manual_seed(seed)
    is_real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(10, 300, is_real.shape, generator=draw).where(is_real, pad_id)
    return ids, torch.randint(0, 2, is_real.shape, generator=draw), is_real


def gradients(made: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Those of a loss, but for keys' biases, which are added to all scores of a query alike: theirs are rounding."""
    made.train().zero_grad()
    F.nll_loss(made(ids), torch.arange(len(ids)) % 3).backward()
    return {name: p.grad for name, p in made.named_parameters() if not name.endswith("compute_key.bias")}


def assert_gradients_equal(made: nn.Module, plain: nn.Module, ids: torch.Tensor) -> None:
    expected = gradients(plain, ids)
    for name, gradient in gradients(made, ids).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-4 * max(1e-3, expected[name].abs().max()))


# ----------------------------------------------------------------------------------------------------- equal results


@pytest.mark.parametrize(
    ("lengths", "together", "threads"),
    [*((name, together, 1) for name in LENGTHS for together in (1, 64, 512)), ("some padding", 64, 2)],
)
def test_hidden_states_pooled_vectors_and_gradients_are_the_pages(
    monkeypatch: pytest.MonkeyPatch, unpadded: list, lengths: str, together: int, threads: int
):
    monkeypatch.setattr(bert.unpadded, "TOGETHER", together)
    plain = classifier()
    made = accelerated(plain)
    unpadded.clear()  # those of proofs
    ids, segments, is_real = texts(LENGTHS[lengths])
    torch.set_num_threads(threads)
    try:
        for others in ((), (segments,), (segments, is_real), (None, is_real.long())):
            hidden, pooled = made.encoder(ids, *others)
            expected, its_pooled = plain.encoder(ids, *others)
            assert expected[is_real].std() > 0.05 and torch.isfinite(hidden).all()
            torch.testing.assert_close(hidden[is_real], expected[is_real], **TOLERANCE)
            torch.testing.assert_close(pooled, its_pooled, **TOLERANCE)
        assert_gradients_equal(made, plain, ids)
    finally:
        torch.set_num_threads(1)
    assert len(unpadded) == (0 if is_real.all() else 5)


@pytest.mark.parametrize("changes", [{}, dict(pad_token_id=7), dict(act="gelu_new"), dict(act="relu")])
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "DistilBertForSequenceClassification"])
def test_classes_are_those_of_transformers(tmp_path: Path, unpadded: list, name: str, changes: dict):
    if "act" in changes:
        changes = {"activation" if name.startswith("Distil") else "hidden_act": changes["act"]}
    hf = hf_model(name, num_labels=3, **changes)
    made, _ = load_model(hf_directory(tmp_path, hf))
    accelerate(made)
    unpadded.clear()
    ids, _, is_real = texts(LENGTHS["some padding"], changes.get("pad_token_id", 0))
    with torch.inference_mode():
        theirs = hf(ids, attention_mask=is_real.long()).logits.log_softmax(-1)
        assert theirs.std() > 0.05
        torch.testing.assert_close(made(ids), theirs, atol=1e-4, rtol=0)
    assert len(unpadded) == 1 and type(made.encoder) is UnpaddedBert


def test_padding_may_stand_anywhere_but_where_the_pooled_vector_is_read(unpadded: list):
    plain = classifier()
    made = accelerated(plain)
    unpadded.clear()
    ids, _, is_real = texts([40] * 8)
    gaps = torch.rand(is_real.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    for first, times in ((True, 1), (False, 1)):  # the second batch is the page's
        gaps[:, 0] = first
        gaps[2, 1] = True
        hidden, expected = made.encoder(ids, None, gaps)[0], plain.encoder(ids, None, gaps)[0]
        torch.testing.assert_close(hidden[gaps], expected[gaps], **TOLERANCE)
        assert len(unpadded) == times
    left = is_real & (torch.arange(40) >= torch.arange(8)[:, None] * 4)
    torch.testing.assert_close(made.encoder(ids, None, left)[1], plain.encoder(ids, None, left)[1], **TOLERANCE)


@pytest.mark.parametrize("training", [False, True])
def test_a_text_of_nothing_but_padding_is_what_it_is_on_the_page(training: bool):
    plain = classifier(attention_dropout=0.5 if training else 0.0).train(training)
    made = accelerated(plain)
    ids, _, is_real = texts([40, 7, 33, 30, 12, 40, 21, 1, 1])
    is_real[3] = False
    answers = []
    for each in (made, plain):
        torch.manual_seed(3)
        answers.append(each.encoder(ids, None, is_real))
    for ours, pages in zip(*answers, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, pages, **TOLERANCE)


@pytest.mark.parametrize(
    ("lengths", "is_left_out"),
    [([32] * 7 + [1], True), ([32] * 7 + [8], False), ([30] * 9 + [1], False), ([21, 1], True), ([20, 1], False)],
    ids=["an eighth", "less than a tenth", "also less", "20 positions", "19 positions"],
)
def test_padding_is_left_out_where_it_pays(unpadded: list, lengths: list[int], is_left_out: bool):
    made = accelerated(classifier())
    unpadded.clear()
    made(texts(lengths)[0])
    assert bool(unpadded) == is_left_out


def test_layers_see_real_tokens_alone(monkeypatch: pytest.MonkeyPatch):
    made, seen = accelerated(classifier()), []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *others: seen.append(x.shape[:-1].numel()) or linear(x, *others))
    monkeypatch.setattr(OneDNNLinear, "forward", lambda self, x: F.linear(x, self.weight, self.bias))
    lengths = LENGTHS["some padding"]
    made(texts(lengths)[0])
    assert set(seen) == {sum(lengths), len(lengths)}  # and the pooler and the head see texts


def test_rows_that_are_taken_out_and_put_back_have_the_gradients_of_indexing():
    x, at = torch.randn(6, 2, dtype=torch.float64, requires_grad=True), torch.tensor([4, 0, 3])
    assert torch.equal(take_out(x, at), x[at])
    assert torch.equal(put_back(x[at], at, 6), x * torch.tensor([1, 0, 0, 1, 1, 0])[:, None])
    for function in (lambda x: take_out(x**2, at), lambda x: put_back(x[at] ** 2, at, 7)):
        assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)


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


# ---------------------------------------------------------------------------------------------------------- dropout


def test_without_padding_dropout_draws_what_the_pages_draws():
    plain = classifier(dropout=0.3, attention_dropout=0.4).train()
    made = accelerated(plain)
    ids = texts(LENGTHS["no padding"])[0]
    torch.manual_seed(5)
    expected = plain(ids)
    torch.manual_seed(5)
    torch.testing.assert_close(made(ids), expected, **TOLERANCE)
    assert not torch.allclose(made(ids), expected, **TOLERANCE)
    torch.testing.assert_close(made.eval()(ids), plain.eval()(ids), **TOLERANCE)


def test_where_padding_is_left_out_weights_are_dropped_as_often_and_in_training_alone():
    p, lengths = 0.25, [8, 6, 6, 5]
    kernel = FusedBertAttention.sharing(classifier(attention_dropout=p).encoder.layers[0].attention.train())
    mask = Texts.of(texts(lengths)[2])
    n = sum(lengths)
    heads = torch.zeros(1, 2000, n, 4), torch.zeros(1, 2000, n, 4), torch.ones(1, 2000, n, 4)  # 1 h n d, equal scores
    output = kernel.compute_query_key_value_scores(*heads, mask)
    assert output.mean().item() == pytest.approx(1.0, abs=0.01)
    for start, length in ((0, 8), (20, 5)):
        kept = output[0, :, start : start + length, 0] * (1 - p) * length  # of so many keys
        torch.testing.assert_close(kept, kept.round(), atol=1e-4, rtol=0)
        assert kept.mean().item() == pytest.approx(length * (1 - p), rel=0.02)
        assert kept.var().item() == pytest.approx(length * p * (1 - p), rel=0.1)
    kernel.eval()
    assert torch.equal(kernel.compute_query_key_value_scores(*heads, mask).round(decimals=4), heads[2])


# ------------------------------------------------------------------------------------------- nobody's edit is ignored

SCORES = model.BertAttention.compute_query_key_value_scores
LAYER, FEED_FORWARD, ENCODER = model.BertLayer.forward, model.BertFeedForward.forward, model.Bert.forward


def sharper(self, query, key, value, mask=None):
    return SCORES(self, 2 * query, key, value, mask)


def dropped_early(self, query, key, value, mask=None):
    """Equal to the page but where weights are dropped in training."""
    value = self.attn_dropout(value)
    weights = (query @ key.transpose(-2, -1) / self.head_dim**0.5).masked_fill(~mask, -1e9).softmax(-1)
    return weights @ value


def mixed(self, x, mask=None):
    return LAYER(self, x + x.mean(1, keepdim=True), mask)


def scaled(self, x):
    return 2 * FEED_FORWARD(self, x)


def doubled(self, *inputs):
    hidden, pooled = ENCODER(self, *inputs)
    return 2 * hidden, 2 * pooled


class Louder(model.BertFeedForward):
    """Somebody's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(x) + x.mean(1, keepdim=True)


def subclass(made: nn.Module) -> None:
    layer = made.encoder.layers[1]
    own = Louder(made.encoder.config)
    own.load_state_dict(layer.feed_forward.state_dict())
    layer.feed_forward = own.train(made.training)


def hooked(part: str) -> Callable[[nn.Module], object]:
    def hook(made: nn.Module) -> object:
        return made.get_submodule(part).register_forward_hook(lambda module, inputs, x: x + x.mean(1, keepdim=True))

    return hook


def own_method(made: nn.Module) -> None:
    layer = made.encoder.layers[0]
    layer.forward = lambda x, mask=None: LAYER(layer, x.flip(1), mask)


def own_scores(made: nn.Module) -> None:
    part = made.encoder.layers[0].attention
    part.compute_query_key_value_scores = lambda *inputs: 3 * SCORES(part, *inputs)


def own_activation(made: nn.Module) -> None:
    made.encoder.layers[0].feed_forward.activation = lambda x: x - x.mean(1, keepdim=True)


OF_THE_PAGE = {
    "scores": (model.BertAttention, "compute_query_key_value_scores", sharper),
    "dropout of scores": (model.BertAttention, "compute_query_key_value_scores", dropped_early),
    "a layer": (model.BertLayer, "forward", mixed),
    "the encoder": (model.Bert, "forward", doubled),
}
OF_A_MODEL = {
    "a subclass": subclass,
    "a hook on a layer": hooked("encoder.layers.1"),
    "a hook on a linear layer": hooked("encoder.layers.0.feed_forward.w1"),
    "a hook on dropout of weights": hooked("encoder.layers.0.attention.attn_dropout"),
    "a method of a layer's own": own_method,
    "a method of one's attention": own_scores,
    "another activation": own_activation,
}


def assert_computes_as(made: nn.Module, plain: nn.Module, unpadded: list) -> None:
    """Padded batch or not, in training or not; and no padding was left out."""
    unpadded.clear()
    for lengths in (LENGTHS["some padding"], LENGTHS["no padding"]):
        ids = texts(lengths)[0]
        for training in (False, True):
            answers = []
            for each in (made, plain):
                torch.manual_seed(2)
                answers.append(each.train(training)(ids))
            torch.testing.assert_close(*answers, **TOLERANCE)
    assert not [is_real for is_real in unpadded if is_real.shape != (5, 20)]  # which is that of a proof


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("edit", OF_THE_PAGE.values(), ids=OF_THE_PAGE)
def test_an_edited_page_is_computed_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, unpadded: list, edit: tuple, when: str
):
    plain = classifier(attention_dropout=0.4)
    made = accelerated(plain)
    made(texts(LENGTHS["some padding"])[0])
    assert unpadded
    monkeypatch.setattr(*edit)
    if when == "before":
        made = accelerated(plain)
    capsys.readouterr()
    equivalence.notice.cache_clear()
    if when == "before":  # what was found when kernels were chosen is said then
        assert next(c for c in accelerate(made) if c.part == "BERT's padding").kernel == "plain"
    assert_computes_as(made, plain, unpadded)
    if when == "after":
        assert "is computed as it is written, without its kernel" in capsys.readouterr().err


def test_an_edit_that_looks_at_each_token_alone_keeps_the_kernels(monkeypatch: pytest.MonkeyPatch, unpadded: list):
    plain = classifier()
    made = accelerated(plain)
    monkeypatch.setattr(model.BertFeedForward, "forward", scaled)
    unpadded.clear()
    ids = texts(LENGTHS["some padding"])[0]
    torch.testing.assert_close(made(ids), plain(ids), **TOLERANCE)
    assert [is_real.shape for is_real in unpadded][-1] == ids.shape


@pytest.mark.parametrize("factor", [1, 2])
def test_the_comparison_with_the_page_does_not_turn_on_its_random_numbers(monkeypatch: pytest.MonkeyPatch, factor: int):
    """Of other models and texts, too, what rounding leaves is a third of what is allowed."""
    monkeypatch.setattr(model.BertFeedForward, "forward", lambda self, x: factor * FEED_FORWARD(self, x))
    for seed in range(12):
        torch.manual_seed(seed)
        sides = bert.kernels.ENCODER.sides()
        for case in sides.cases:
            if case.name == "a mask with gaps" and not case.inputs[4].any(1).all():
                continue  # gradients of a text of nothing but padding mean nothing
            answers = [equivalence._answer(run, case) for run in (sides.stand_in, sides.piece)]
            assert equivalence._compare(*answers, equivalence.TOLERANCE / 3) is None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", OF_A_MODEL.values(), ids=OF_A_MODEL)
def test_what_somebody_has_put_into_a_model_is_computed(
    capsys: pytest.CaptureFixture, unpadded: list, change: Callable, when: str
):
    plain = classifier(attention_dropout=0.4)
    made = copy.deepcopy(plain)
    change(plain)
    if when == "before":
        change(made)
    accelerate(made)
    if when == "after":
        change(made)
    assert_computes_as(made, plain, unpadded)
    assert "padding is computed like text: " in capsys.readouterr().err


def test_a_hook_of_all_modules_sees_whole_batches(unpadded: list):
    made, shapes = accelerated(classifier()), []
    unpadded.clear()
    ids = texts(LENGTHS["some padding"])[0]

    def hook(module: nn.Module, inputs: tuple, output: object) -> None:
        if isinstance(module, model.BertLayer):
            shapes.append(output.shape[:2])

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        made(ids)
    finally:
        handle.remove()
    assert shapes == [ids.shape] * 2 and not unpadded
    made(ids)
    assert unpadded


# ------------------------------------------------------------------------------------------- into a model, and out


def test_weights_names_and_copies_stay_what_they_are(unpadded: list):
    made = classifier()
    before = {name: (id(p), p.clone()) for name, p in made.named_parameters()}
    choices = accelerate(made)
    assert [choice.part for choice in choices] == ["linear layers", "BERT's attention", "BERT's padding"]
    assert [choice.kernel for choice in choices[1:]] == ["fused", "left out"]
    kinds = {type(part) for part in made.modules()}
    assert {FusedBertAttention, UnpaddedBert} <= kinds and (OneDNNLinear in kinds) == has_onednn()
    assert {name: id(p) for name, p in made.named_parameters()} == {name: key for name, (key, _) in before.items()}
    assert all(torch.equal(p, before[name][1]) for name, p in made.named_parameters())
    assert accelerate(made) == choices and {type(part) for part in made.modules()} == kinds
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    ids = texts(LENGTHS["some padding"])[0]
    for twin in (copy.deepcopy(made), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(made))):
        unpadded.clear()
        torch.testing.assert_close(twin(ids), made(ids), **TOLERANCE)
        assert len(unpadded) == 2


def test_an_encoder_by_itself_has_its_attention_fused():
    encoder = classifier().encoder
    attended, padding = accelerate(encoder)[1:]
    assert (attended.kernel, padding.kernel) == ("fused", "plain") and "by itself" in padding.reason
    assert type(encoder.layers[0].attention) is FusedBertAttention


def test_other_devices_have_fused_attention_alone():
    made = classifier()
    found = attention.scores_check("cuda")
    attended = "fused" if found.holds() else "plain"  # where there is no such device, nothing can be compared
    assert [c.kernel for c in accelerate(made, device=torch.device("cuda"))] == ["plain", attended, "plain"]
    assert not {UnpaddedBert, OneDNNLinear} & {type(part) for part in made.modules()}


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_bert_is_computed_in_float32(capsys: pytest.CaptureFixture, precision: str):
    plain = classifier()
    made = copy.deepcopy(plain)
    accelerate(made, precision)
    assert "a Bert is computed in fp32, whatever the precision" in capsys.readouterr().err
    ids = texts(LENGTHS["some padding"])[0]
    torch.testing.assert_close(made(ids), plain(ids), **TOLERANCE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return our_directory(tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_run_computes_with_them_unless_it_is_told_not_to(directory: Path, films: dict[str, Path], kernels: str):
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
    mine = {FusedBertAttention, UnpaddedBert} | ({OneDNNLinear} if has_onednn() else set())
    assert mine & kinds == (mine if kernels == "auto" else set())


def test_without_kernels_nothing_of_fast_is_imported():
    """Who computes with `bert/` alone does not need `fast/`."""
    code = "import sys, bert.run, bert.family, bert.heads; assert not {'fast', 'bert.kernels'} & set(sys.modules)"
    root = Path(bert.kernels.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


# ------------------------------------------------------------------------------------------------ what reads padding


class Mean(nn.Module):
    """Somebody's head, which takes padding's states for text."""

    def __init__(self, encoder: model.Bert):
        super().__init__()
        self.encoder, self.classifier = encoder, nn.Linear(encoder.config.dim, 3)

    def forward(self, input_ids: torch.Tensor, segment_ids=None, padding_mask=None) -> torch.Tensor:
        return F.log_softmax(self.classifier(self.encoder(input_ids, segment_ids, padding_mask)[0].mean(1)), dim=-1)


@pytest.mark.parametrize("head", [BertForQuestionAnswering, Mean])
def test_a_head_that_reads_padding_gets_what_the_page_makes_of_it(unpadded: list, head: type):
    """Answers of QA are log-probabilities over all positions, padding among them."""
    torch.manual_seed(0)
    plain = head(classifier().encoder)
    ids, segments, is_real = texts(LENGTHS["some padding"])
    for training in (False, True):
        found, expected = (made.train(training)(ids, segments, is_real) for made in (accelerated(plain), plain))
        pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, **TOLERANCE)
    assert unpadded == []


def test_words_and_next_sentences_are_those_of_the_page(unpadded: list):
    torch.manual_seed(0)
    plain = BertForPreTraining(classifier().encoder).eval()
    ids, segments, is_real = texts(LENGTHS["some padding"])
    ids[0, 3] = 0  # a [PAD] that is none
    asked = is_real & (torch.arange(ids.shape[1]) % 3 == 0)
    for one, other in zip(*(made(ids, segments, is_real, asked) for made in (accelerated(plain), plain)), strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
    assert unpadded


def test_a_mask_of_one_row_is_for_all(unpadded: list):
    plain = classifier()
    ids, _, is_real = texts([40, 20, 20])
    for mask in (is_real[1:2], is_real[1:2].expand(3, -1)):
        torch.testing.assert_close(accelerated(plain)(ids, None, mask), plain(ids, None, mask), **TOLERANCE)
    assert len(unpadded) == 1
