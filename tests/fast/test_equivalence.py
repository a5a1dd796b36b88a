"""No edit is ignored: kernels compute what the root modules say, as they stand in this process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, random_llama, slow_among
from test_fast import TOKENS, ShiftedLinear
from torch import nn

import base_llama
import engine.equivalence
import engine.inference
import llama
from engine.context import KVCache
from engine.equivalence import CallTrace, Case, Comparison, EquivalenceCheck, difference
from fast import accelerate, compiled, decoder
from fast.attention import FusedAttention, is_lower_triangle, scores_check
from fast.decode import OUTDATED, WatchedDecoder
from fast.layers import FEED_FORWARD_CHECK, RMS_NORM_CHECK
from llama import Attention, FeedForward, Llama, RMSNorm

MODEL_HALF = "llama rope base_llama classifier config utils tokenizer optimizer".split()
SCORES_NAME = "Attention.compute_query_key_value_scores"
LAST_STEP = "        return self.dropout(self.w2("  # of the feed-forward

# ---------------------------------------------------------------------------------------------- edits of the source

HALVES = "x.float().unflatten(-1, (-1, 2))", "x.float().unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()"
WINDOW = """        far = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2] - 30)
        scores = scores.masked_fill(far, -1e9)
        if mask is not None:
"""
MASK = "        mask = (causal_mask(x.shape[1], x.device),) if self.is_causal else ()"
LONG_TEXTS = f"        if x.shape[1] > 48:\n            value = 2 * value\n{MASK}"
SUM = "return h + self.feed_forward(self.ffn_norm(h))"
# file, what stands there, what an editor makes of it, what the line on standard error names
EDITS = {
    "GELU for SiLU": ("llama.py", "F.silu(", "F.gelu(", "FeedForward"),
    "mean instead of mean of squares": ("llama.py", "x.pow(2).mean(", "x.abs().mean(", "RMSNorm"),
    "no residual": ("llama.py", "h = x + self.attention(", "h = self.attention(", "LlamaLayer"),
    "half-vector rotation": ("rope.py", *HALVES, "rope.apply_rotary_emb"),
    "half as many positions": ("rope.py", "torch.arange(max_seq_len).float()", "torch.arange(max_seq_len) / 2", ""),
    "scores over d": ("llama.py", "/ math.sqrt(self.head_dim)", "/ self.head_dim", SCORES_NAME),
    "heads not repeated": ("llama.py", "if self.n_rep > 1:", "if False:", ""),
    "another base of the angles": (
        "llama.py", "self.max_seq_len, *self.rope)", "self.max_seq_len, 3 * self.rope[0])", "LlamaLayer",
    ),
    "logits are turned over": ("llama.py", "        return logits, h\n", "        return -logits, h\n", "Llama"),
    "embeddings are scaled": (
        "llama.py", "self.dropout(self.tok_embeddings(tokens.masked_fill(tokens == -1, 0)))",
        "2 * self.tok_embeddings(tokens)",
        "Llama",
    ),
    "one layer is left out": ("llama.py", SUM, f"{SUM} * (self.layer_id != 5)", "Llama"),
    "layers mix positions": ("llama.py", SUM, f"{SUM} - 0.9 * h.mean(1, keepdim=True)", "Llama.forward"),
    "the last layer mixes positions": (
        "llama.py", SUM, f"{SUM} - h.mean(1, keepdim=True) * (self.layer_id == 5)", "Llama.forward",
    ),
    "a window of 30 positions": (
        "llama.py", "        if mask is not None:  # only a causal model gives one\n", WINDOW, SCORES_NAME,
    ),
    "long texts are another case": ("llama.py", MASK, LONG_TEXTS, "Llama"),
    "training is another case": (
        "llama.py", LAST_STEP, "        if self.training:\n            x = 1.1 * x\n" + LAST_STEP, "FeedForward",
    ),
    "the second likeliest token": (
        "llama.py", "logits.argmax(dim=-1, keepdim=True)", "logits.topk(2).indices[:, 1:]", "Llama.generate",
    ),
    "no token twice": (
        "llama.py", "            logits = logits[:, -1, :]  # b v",
        "            logits = logits[:, -1, :].scatter_add(1, idx, -torch.ones(idx.shape))  # b v", "Llama.generate",
    ),
    "masks hide less": ("base_llama.py", "device=device).tril()", "device=device).tril(1)", ""),
    "another position is read": (
        "classifier.py", "token_ids.shape[1] - 1)", "token_ids.shape[1] // 2)", "classifier.read_last",
    ),
}  # fmt: skip
NOTHING_CHANGED = {
    "a comment": ("base_llama.py", "device=device).tril()\n", "device=device).tril()  # itself as well\n"),
    "a docstring": ("llama.py", '"""SwiGLU feed-forward', '"""The SwiGLU feed-forward'),
    "a renamed local": (
        "llama.py", f"        h = x + self.attention(self.attention_norm(x))\n        {SUM}",
        "        y = x + self.attention(self.attention_norm(x))\n"
        "        return y + self.feed_forward(self.ffn_norm(y))",
    ),
    "a print": ("llama.py", LAST_STEP, "        print(x.shape)\n" + LAST_STEP),
    "another spelling": ("llama.py", "x.pow(2).mean(-1, keepdim=True)", "(x * x).mean(dim=-1, keepdim=True)"),
    "another spelling of attention": (
        "llama.py", "self.compute_output(output.transpose(1, 2).flatten(-2))",
        "self.compute_output(output.permute(0, 2, 1, 3).reshape(*x.shape[:2], -1))",
    ),
    "another spelling of what is read": (
        "classifier.py", "hidden_states[torch.arange(len(at), device=at.device), at]",
        "torch.stack([h[i] for h, i in zip(hidden_states, at)])",
    ),
}  # fmt: skip


def after_edit(folder: Path, *edits: tuple[str, str, str]) -> tuple[dict, str]:
    """What edited root modules compute, and what was said on standard error."""
    for name in MODEL_HALF:
        shutil.copy(ROOT / f"{name}.py", folder)
    for name, before, after in edits:
        text = (folder / name).read_text(encoding="utf-8")
        assert before in text, f"{name} has no {before!r} any more"
        (folder / name).write_text(text.replace(before, after), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/fast/edit_worker.py"), str(folder)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def unedited(tmp_path_factory: pytest.TempPathFactory) -> dict:
    found, notes = after_edit(tmp_path_factory.mktemp("unedited"))
    assert notes == ""
    return found


def is_near(actual: list[float], expected: list[float]) -> bool:
    return len(actual) == len(expected) and actual == pytest.approx(expected, rel=2e-3, abs=2e-4)


RARELY = (
    "another base of the angles", "embeddings are scaled", "half as many positions", "logits are turned over",
    "scores over d", "one layer is left out", "heads not repeated", "a window of 30 positions",
    "no token twice", "a docstring", "a renamed local", "a print", "the last layer mixes positions",
    "half-vector rotation", "masks hide less", "another spelling of attention",
    "mean instead of mean of squares", "no residual", "long texts are another case", "another spelling",
    "GELU for SiLU", "another position is read", "layers mix positions", "another spelling of what is read",
    "training is another case", "the second likeliest token",
)  # fmt: skip


@pytest.mark.parametrize("edit", slow_among(EDITS, RARELY))
def test_what_is_edited_is_what_is_computed(tmp_path: Path, unedited: dict, edit: str):
    *change, named = EDITS[edit]
    found, notes = after_edit(tmp_path, tuple(change))
    lines = [line for line in notes.splitlines() if line.startswith("note: ")]
    assert lines == notes.splitlines()
    has_changed = False
    for attention, sides in found.items():
        plain, fast = sides["plain"], sides["fast"]
        assert plain.get("error") == fast.get("error")
        before = unedited[attention]["plain"]["numbers"]
        if "numbers" in plain:
            assert is_near(fast["numbers"], plain["numbers"])
        has_changed |= not is_near(plain.get("numbers", []), before)
    assert has_changed, "the edit does nothing, and tests nothing"
    if sides["compiled"] or named.startswith(("FeedForward", "RMSNorm", "Attention")):
        assert named == "" or any(named in line for line in lines), notes


OF_NORM, OF_GATE = (
    f'def forward(self, x: torch.Tensor) -> torch.Tensor:\n        """x: {shape}' for shape in ("... D", "b s D")
)
MORE_ARGUMENTS = (
    ("llama.py", "h + self.feed_forward(self.ffn_norm(h))", "h + self.feed_forward(self.ffn_norm(h, 2.0), gain=3.0)"),
    ("llama.py", OF_NORM, OF_NORM.replace("x: torch.Tensor", "x: torch.Tensor, by: float = 1.0")),
    ("llama.py", "return self._norm(x.float())", "return by * self._norm(x.float())"),
    ("llama.py", OF_GATE, OF_GATE.replace("x: torch.Tensor", "x: torch.Tensor, gain: float = 1.0")),
    ("llama.py", "return self.dropout(self.w2(", "return gain * self.dropout(self.w2("),
    ("llama.py", "value, *mask)", "value, *mask, cap=0.1)"),
    ("llama.py", " mask: torch.Tensor | None = None\n", " mask: torch.Tensor | None = None, cap: float = 9.0\n"),
    ("llama.py", "weights = self.attn_dropout(scores.float()", "weights = self.attn_dropout((scores * cap).float()"),
)


@pytest.mark.slow
def test_methods_may_take_more_arguments(tmp_path: Path, unedited: dict):
    found, notes = after_edit(tmp_path, *MORE_ARGUMENTS)
    for attention, sides in found.items():
        assert is_near(sides["fast"]["numbers"], sides["plain"]["numbers"])
        assert not is_near(sides["plain"]["numbers"], unedited[attention]["plain"]["numbers"])


@pytest.mark.parametrize("edit", slow_among(NOTHING_CHANGED, RARELY))
def test_an_edit_that_changes_nothing_keeps_every_kernel(tmp_path: Path, unedited: dict, edit: str):
    found, notes = after_edit(tmp_path, NOTHING_CHANGED[edit])
    assert notes == ""
    for attention, sides in found.items():
        assert sides["fast"]["loops"] == unedited[attention]["fast"]["loops"]
        same = pytest.approx(unedited[attention]["fast"]["numbers"], rel=1e-5)  # x * x may round unlike a power
        assert sides["fast"]["numbers"] == same


# ------------------------------------------------------------------------------------------ changes in this process


def outputs(model: Llama) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, targets=TOKENS)[0]


def both(**changes: object) -> tuple[Llama, WatchedDecoder]:
    """A model plain, and the decoder of one that is the same with kernels."""
    plain, fast_model = (random_llama(attention="causal", gain=8.0, **changes) for _ in range(2))
    accelerate(fast_model)
    return plain, decoder(fast_model)


def check_equal(plain: Llama, ours: WatchedDecoder, unchanged: torch.Tensor) -> None:
    """Logits and a text of both, which are no longer those of the model as it was; also of a new decoder."""
    expected = outputs(plain)
    assert not torch.allclose(expected, unchanged, rtol=1e-3)
    assert (outputs(ours.llama) - expected).abs().max() <= 1e-4 * expected.abs().max()
    text = plain.generate(TOKENS[:1], 25, temperature=0.0)
    for each in (ours, decoder(ours.llama), ours.llama):
        assert torch.equal(each.generate(TOKENS[:1], 25, temperature=0.0), text)


def doubled(method: Callable) -> Callable:
    def instead(self, *args, **kwargs):
        return 2 * method(self, *args, **kwargs)

    return instead


METHODS = (
    (FeedForward, "forward"),
    (RMSNorm, "forward"),
    (RMSNorm, "_norm"),
    (Attention, "compute_query_key_value_scores"),
)


@pytest.mark.parametrize(("kind", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_a_replaced_method_counts_also_after_the_kernels_were_chosen(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, kind: type, name: str
):
    plain, ours = both()
    unchanged, text = outputs(plain), plain.generate(TOKENS[:1], 25, temperature=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, doubled(getattr(kind, name)))
        engine.equivalence.notice.cache_clear()
        check_equal(plain, ours, unchanged)
        assert kind.__name__ in capfd.readouterr().err
    assert torch.equal(ours.generate(TOKENS[:1], 25, temperature=0.0), text)  # and when it is taken back
    assert (outputs(ours.llama) - unchanged).abs().max() <= 1e-4 * unchanged.abs().max()


ROTATE, CAUSAL_MASK = llama.apply_rotary_emb, base_llama.causal_mask


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (F, "silu", F.gelu),
        (llama, "apply_rotary_emb", lambda *args, **named: [x.flip(-1) for x in ROTATE(*args, **named)]),
        (llama, "causal_mask", lambda *args: CAUSAL_MASK(*args) & ~CAUSAL_MASK(*args).tril(-3)),
    ],
)
def test_a_replaced_function_counts(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, instead: Callable):
    plain, ours = both()
    unchanged = outputs(plain)
    monkeypatch.setattr(place, name, instead)
    check_equal(plain, ours, unchanged)


def half(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return 0.5 * output


class Doubled(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def subclass(layers: nn.ModuleList) -> None:
    part = layers[0].feed_forward
    other = Doubled(32, part.w1.out_features, 16, 0.0)
    other.load_state_dict(part.state_dict())
    layers[0].feed_forward = other.eval()


CHANGES = {
    "a hook on a part": lambda layers: layers[1].feed_forward.register_forward_hook(half),
    "a hook on the weights of attention": lambda layers: layers[0].attention.attn_dropout.register_forward_hook(half),
    "a hook before a part": lambda layers: layers[0].attention.register_forward_pre_hook(
        lambda module, args: (2 * args[0], *args[1:])
    ),
    "a method of one norm": lambda layers: setattr(layers[1].ffn_norm, "_norm", lambda x: 0.3 * x),
    "a method of one attention": lambda layers: setattr(
        layers[1].attention, "compute_query_key_value_scores", lambda query, key, value, mask=None: query
    ),
    "a forward of one part": lambda layers: setattr(layers[0].feed_forward, "forward", torch.sin),
    "another setting": lambda layers: setattr(layers[0].attention, "rope", (100.0,)),
    "another epsilon": lambda layers: setattr(layers[1].attention_norm, "eps", 3.0),
    "a layer that shares its weight": lambda layers: ShiftedLinear.replace(layers[0], "attention.compute_query"),
    "a bias": lambda layers: setattr(layers[0].feed_forward.w2, "bias", nn.Parameter(torch.arange(32.0))),
    "a subclass": subclass,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_of_one_module_counts(name: str, when: str):
    plain, fast_model = (random_llama(attention="causal", gain=8.0) for _ in range(2))
    unchanged = outputs(plain)
    CHANGES[name](plain.layers)
    if when == "before":
        CHANGES[name](fast_model.layers)
    accelerate(fast_model)
    ours = decoder(fast_model)
    if when == "after":
        ours.generate(TOKENS[:1], 5, temperature=0.0)
        CHANGES[name](fast_model.layers)
    if when == "after" and name in ("a bias", "a subclass"):  # which have other weights
        with pytest.raises(RuntimeError, match=OUTDATED):
            ours.generate(TOKENS[:1], 5, temperature=0.0)
        ours = decoder(fast_model)
    check_equal(plain, ours, unchanged)


class Scores(Attention):
    """Methods for `Attention` that take more of their object than its own."""

    warmth = 1.0

    def of_setting(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask=None) -> torch.Tensor:
        return BEFORE(self, query * self.rope[0] / 1e4, key, value, mask)

    def of_class(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask=None) -> torch.Tensor:
        return BEFORE(self, query * self.warmth, key, value, mask)

    def of_helper(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask=None) -> torch.Tensor:
        return BEFORE(self, self.adjusted(query), key, value, mask)

    def adjusted(self, query: torch.Tensor) -> torch.Tensor:
        return query


BEFORE = Attention.compute_query_key_value_scores


def test_what_scores_take_of_a_module_is_not_that_of_a_fresh_one(monkeypatch: pytest.MonkeyPatch):
    """A setting of which only the product with 1 is compared, because every module that a check makes has 1e4."""
    monkeypatch.setattr(Attention, "compute_query_key_value_scores", Scores.of_setting)
    plain, ours = both()
    unchanged = outputs(plain)
    for model in (plain, ours.llama):
        model.layers[0].attention.rope = (5e4,)
    check_equal(plain, ours, unchanged)


@pytest.mark.parametrize("name", ["warmth", "adjusted"])
def test_a_member_that_scores_go_through_counts_when_it_is_replaced(monkeypatch: pytest.MonkeyPatch, name: str):
    for member in ("warmth", "adjusted"):
        monkeypatch.setattr(Attention, member, vars(Scores)[member], raising=False)
    method = {"warmth": Scores.of_class, "adjusted": Scores.of_helper}[name]
    monkeypatch.setattr(Attention, "compute_query_key_value_scores", method)
    plain, ours = both()
    unchanged = outputs(plain)
    assert scores_check("cpu").holds()  # so far nothing has changed
    monkeypatch.setattr(Attention, name, {"warmth": 5.0, "adjusted": lambda self, query: 5 * query}[name])
    check_equal(plain, ours, unchanged)


def test_dropout_in_another_place_is_found():
    def elsewhere(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.dropout(F.silu(self.w1(x)) * self.w3(x)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeedForward, "forward", elsewhere)
        assert "differ" in FEED_FORWARD_CHECK.difference()
    assert FEED_FORWARD_CHECK.holds()


def test_a_model_that_cannot_be_compared_with_its_config_generates_as_it_is_written():
    plain, ours = both()
    text = plain.generate(TOKENS[:1], 9, temperature=0.0)
    for change in (
        lambda model: object.__setattr__(model.config, "use_cache", True),
        lambda model: setattr(model.layers[0].attention, "slopes", torch.ones(4)),
        lambda model: setattr(model.layers[0].attention, "attn_dropout", nn.Identity()),
    ):
        change(ours.llama)
        for each in (ours, decoder(ours.llama)):
            assert torch.equal(each.generate(TOKENS[:1], 9, temperature=0.0), text)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_layers_of_another_shape_are_left_alone(precision: str):
    model = random_llama(attention="causal")
    model.layers[0].feed_forward = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    expected = outputs(model)
    accelerate(model, precision)
    assert (outputs(model) - expected).abs().max() <= 0.1 * expected.abs().max()


class Plain:
    """A class whose method is replaced."""

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)


def helper(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def check_of_method(kernel: Callable, made: list) -> EquivalenceCheck:
    def make() -> Comparison:
        made.append(1)
        return Comparison(Plain().method, kernel, [Case("a case", (torch.ones(2),))])

    return EquivalenceCheck("Plain.method", ((Plain, "method"),), make)


def test_threads_see_one_verdict(monkeypatch: pytest.MonkeyPatch):
    made, out = [], sys.stdout
    check = check_of_method(lambda x: x, made)
    monkeypatch.setitem(globals(), "helper", lambda x: time.sleep(0.05) or x + 1)
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda _: check.holds(), range(12)))
    assert len(made) == 1 and sys.stdout is out


def test_a_hook_on_all_modules_counts():
    plain, ours = both()
    unchanged = outputs(plain)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 0.7 * output if isinstance(module, llama.LlamaLayer) else None
    )
    try:
        check_equal(plain, ours, unchanged)
    finally:
        handle.remove()


def test_a_subclass_of_the_model_generates_in_its_own_way(capfd: pytest.CaptureFixture):
    class Shifted(Llama):
        def forward(self, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
            logits, h = super().forward(*args, **kwargs)
            return logits + torch.eye(300)[17] * 100, h

    model = random_llama(attention="causal")
    model.__class__ = Shifted
    engine.equivalence.notice.cache_clear()
    accelerate(model)
    assert decoder(model).generate(torch.tensor([[1]]), 2, temperature=0.0).tolist() == [[1, 17, 17]]
    if compiled.why_no_loops() is None and compiled.are_compiled("fp32"):
        assert "Shifted" in capfd.readouterr().err


def texts_of(model: Llama, prompts: torch.Tensor, new: int) -> list[list[int]]:
    """As the command gives them."""
    engine.equivalence.notice.cache_clear()
    settings = dict.fromkeys(engine.inference.SAMPLING)
    command = engine.inference.PromptDecoder(model, None, decoder(model), None, new, settings, ())
    return command.continued(prompts, 0.0)


def never_twice(self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
    """As a student may write a penalty for repetition into `generate`."""
    for _ in range(max_new_tokens):
        logits = self(idx[:, -self.config.max_seq_len :])[0][:, -1]
        logits = logits.scatter_add(1, idx[:, -1:], torch.full_like(idx[:, -1:], -3.0, dtype=torch.float32))
        idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
    return idx


def twice(self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
    return torch.cat((idx, idx), dim=1)


def for_one_text(self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
    """Several texts, and no others, get another."""
    if len(idx) > 1:
        idx = idx.flip(0)
    return GENERATE(self, idx, max_new_tokens, temperature)


GENERATE = Llama.generate


@pytest.mark.parametrize("edit", [never_twice, twice, for_one_text])
def test_an_edited_generate_is_what_the_command_asks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, edit: Callable
):
    model, prompts = both()[1].llama, TOKENS.expand(2, -1)
    before = texts_of(model, prompts, 7)
    assert before == model.generate(prompts, 7, 0.0).tolist() and "Llama.generate" not in capfd.readouterr().err
    monkeypatch.setattr(Llama, "generate", torch.inference_mode()(edit))
    text = texts_of(model, prompts, 7)
    assert text == edit(model, prompts, 7, 0.0).tolist() and text != before
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: text is generated by Llama.generate as it is written")


def test_an_edit_that_concerns_several_texts_only_is_what_they_get(monkeypatch: pytest.MonkeyPatch):
    def shifted(self: Llama, tokens: torch.Tensor, targets: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        logits, h = forward(self, tokens, targets)
        return logits + torch.linspace(0, 9 * (len(tokens) > 1), self.config.vocab_size), h

    (plain, ours), forward = both(), Llama.forward
    before = plain.generate(TOKENS, 20, temperature=0.0)
    monkeypatch.setattr(Llama, "forward", shifted)
    text = plain.generate(TOKENS, 20, temperature=0.0)
    assert torch.equal(ours.generate(TOKENS, 20, temperature=0.0), text) and not torch.equal(text, before)


# ------------------------------------------------------------------------------------------------ the check itself


def sides(plain: Callable, kernel: Callable) -> Callable[[], Comparison]:
    return lambda: Comparison(plain, kernel, [Case("a case", (torch.randn(3, 4).requires_grad_(),))])


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (lambda x: 2 * x, None),
        (lambda x: x + x, None),
        (lambda x: 2.001 * x, "results differ"),
        (lambda x: (2 * x).detach().add(0 * x), "gradients differ"),
        (lambda x: (2 * x).double(), "float64"),
        (lambda x: (2 * x)[:2], "not float32 [2, 4]"),
        (lambda x: (2 * x, x), "2 tensors, not 3"),
        (lambda x: x / 0, "differ"),
        (lambda x: torch.linalg.inv(x), "the kernel raises"),
    ],
)
def test_a_difference_is_found_and_named(kernel: Callable, words: str | None):
    found = difference(sides(lambda x: 2 * x, kernel))
    assert (found is None) == (words is None)
    assert words is None or words in found


def test_a_piece_that_raises_is_not_replaced():
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")

    assert "it raises RuntimeError: shapes do not fit" in difference(sides(broken, lambda x: x))

    def unmade() -> Comparison:
        raise TypeError("one argument too many")

    assert "one argument too many" in difference(unmade)


def test_a_line_that_no_case_reaches_is_a_difference():
    def piece(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 100:
            x = x + 1
        if len(x) > 200:
            raise ValueError("too many")
        return 2 * x

    lines = CallTrace((type("Plain", (), {"method": piece}), "method")).lines()
    assert "line" in difference(sides(piece, lambda x: 2 * x), lines)
    kernel, cases = (lambda x: 2 * (x + (len(x) > 100))), [Case(f"{n}", (torch.ones(n),)) for n in (2, 101)]
    assert difference(lambda: Comparison(piece, kernel, cases), lines) is None  # a line that only raises does not count


def test_a_check_leaves_no_trace(capfd: pytest.CaptureFixture):
    def loud(x: torch.Tensor) -> torch.Tensor:
        print("here")
        x.detach().zero_()
        return x + torch.rand(())

    before, threads, tracer = torch.get_rng_state(), torch.get_num_threads(), sys.gettrace()
    assert difference(sides(loud, loud)) is None
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert sys.gettrace() is tracer and capfd.readouterr() == ("", "")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert RMS_NORM_CHECK.difference() is None
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")


def test_a_verdict_is_kept_while_the_piece_stays_and_renewed_when_it_changes(monkeypatch: pytest.MonkeyPatch):
    made = []
    check = check_of_method(lambda x: 2 * x, made)
    assert check.holds() and check.holds() and len(made) == 1
    with monkeypatch.context() as patch:
        patch.setattr(helper, "__code__", (lambda x: 3 * x).__code__)
        assert not check.holds() and not check.holds() and len(made) == 2
    monkeypatch.setitem(globals(), "helper", lambda x: 3 * x)
    assert not check.holds() and not check.holds() and len(made) == 3
    monkeypatch.setattr(Plain, "method", lambda self, x: 2 * x)
    assert check.holds() and len(made) == 4


def test_every_function_that_a_piece_goes_through_belongs_to_it():
    names = {link.name for link in CallTrace(llama.LlamaLayer, Attention, FeedForward, RMSNorm).links}
    assert {"forward", "_norm", "silu", "rsqrt", "apply_rotary_emb", "rope_table", "frequencies", "complex"} <= names
    assert {"causal_mask", "sqrt", "compute_query_key_value_scores", "view_as_real"} <= names
    names = {link.name for link in CallTrace(KVCache).links}
    assert {"store", "extend", "causal_mask", "last_rows", "copy"} <= names


def test_the_kernels_agree_with_llama_py():
    assert [check.difference() for check in (RMS_NORM_CHECK, FEED_FORWARD_CHECK, scores_check("cpu"))] == [None] * 3


def test_a_lower_triangle_is_told_from_other_masks_also_when_it_is_written_to():
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    assert is_lower_triangle(mask) and is_lower_triangle(mask)
    mask[4, 0] = False
    assert not is_lower_triangle(mask)
    assert not is_lower_triangle(torch.ones(5, 5, dtype=torch.bool))
    assert not is_lower_triangle(torch.ones(3, 5, dtype=torch.bool).tril(2))
    with torch.inference_mode():
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        assert is_lower_triangle(mask)
        mask[3, 0] = False
        assert not is_lower_triangle(mask)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_a_method_with_the_three_arguments_of_the_assignment_works_where_nothing_is_masked(
    monkeypatch: pytest.MonkeyPatch, attention: str
):
    """It is what a student writes. In a causal model it would have to take the mask."""

    def three(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (query @ key.transpose(-2, -1) / self.head_dim**0.5).softmax(-1) @ value

    model = random_llama(attention=attention)
    expected = outputs(model)
    monkeypatch.setattr(Attention, "compute_query_key_value_scores", three)
    if attention == "bidirectional":
        assert torch.allclose(outputs(model), expected, atol=1e-4)
        accelerate(model)
        assert torch.allclose(outputs(model), expected, atol=1e-4)
    else:
        with pytest.raises(TypeError):
            outputs(model)


def test_attention_is_fused_by_default_and_drops_the_same_weights():
    model = random_llama(attention="causal", dropout=0.5)
    fused = random_llama(attention="causal", dropout=0.5)
    accelerate(fused)
    assert type(fused.layers[0].attention) is FusedAttention
    for each in (model, fused):
        each.layers[0].attention.train()
    x = torch.randn(2, 5, 32)
    results = []
    for each in (model, fused):
        torch.manual_seed(4)
        results.append(each.layers[0].attention(x))
    assert torch.allclose(*results, atol=1e-5) and not torch.allclose(results[0], model.eval().layers[0].attention(x))
