"""Decoding through CUDA graphs: whatever a graph repeats, texts must stay those of plain PyTorch.

Without a GPU a `Tape` stands for the graph. It repeats what it has recorded in the same way: the same operations with
the same numbers on the same tensors, and no Python in between.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterable
from unittest.mock import patch

import pytest
import test_fast
import torch
from conftest import choosing, random_llama
from test_cache import PROMPTS, left_padded
from test_fast import assert_near, assert_same_text
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fast.graphs
import fast.linear
from advanced.decoding import BeamSearch
from base_llama import KVCache
from fast import accelerate
from fast.base_decoder import OUTDATED
from fast.decode import choose_decoder
from fast.graphs import MIN_POSITIONS, MIN_STEPS, STEPS, GraphDecoder, GraphedStep, Text
from fast.linear import Bf16Linear
from llama import Llama
from utils import UserError

CUDA = torch.device("cuda")
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}  # of the largest number: another order of sums, or 8 bits through two layers
NEW = MIN_STEPS + 8  # tokens of a text that is worth a graph
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Tape(TorchDispatchMode):
    """What `fast.graphs.record` returns, without a GPU."""

    def __init__(self, run: Callable[[], None], device: torch.device):
        super().__init__()
        run()  # warms up, as the true one does
        self.calls: list[tuple] = []
        self.replays = 0
        with self:
            run()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output

    def __call__(self) -> None:
        self.replays += 1
        for func, args, kwargs, output in self.calls:
            for old, new in zip(tree_leaves(output), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # no view, not in place
                    old.copy_(new)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """Lets a CPU record, with the kernels that a GPU has; holds what was recorded."""
    recorded = []

    def record(run: Callable[[], None], device: torch.device) -> Tape:
        recorded.append(Tape(run, device))
        return recorded[-1]

    monkeypatch.setattr(fast.graphs, "can_record", lambda device: True)
    monkeypatch.setattr(fast.graphs, "record", record)
    monkeypatch.setattr(fast.linear, "has_onednn", lambda *_: False)
    return recorded


def causal(seed: int = 0, **changes) -> Llama:
    return random_llama(seed, gain=8.0, attention="causal", **changes)


def decoding(model: Llama) -> GraphDecoder:
    """As on a GPU, wherever the model lies."""
    return GraphDecoder(model, choose_decoder(CUDA, cuda_graphs=True))


def graphed(model: Llama, precision: str = "fp32") -> GraphDecoder:
    """Of a copy that is computed as on a GPU."""
    model = copy.deepcopy(model)
    accelerate(model, precision, CUDA)
    return decoding(model)


def graphed_for_texts(model: Llama, precision: str = "fp32") -> GraphDecoder:
    """With attention in float32: in bfloat16 a mask rounds otherwise than none, by enough to change texts."""
    ours = graphed(model, precision)
    for module in ours.llama.modules():
        if isinstance(module, Bf16Linear):
            module.out_dtype = torch.float32
    return ours


def prompts(rows: int, length: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


def check_text(ours: GraphDecoder, idx: torch.Tensor, new: int = NEW, **settings) -> torch.Tensor:
    """That the text is the one that the same model generates without graphs."""
    expected = ours.llama.generate(idx, new, temperature=0.0, **settings)
    text = ours.generate(idx, new, temperature=0.0, **settings)
    assert_same_text(ours.llama, text, expected, idx.shape[1])
    assert len(set(text[0].tolist())) > 5  # a model that repeats one token would prove nothing
    return text


# ------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(("n_kv_heads", "precision"), [(4, "fp32"), (2, "bf16"), (1, "int8")])
def test_texts_are_those_of_the_plain_model(tapes: list, n_kv_heads: int, precision: str):
    model = graphed_for_texts(causal(n_kv_heads=n_kv_heads, max_seq_len=128), precision)
    for rows in (1, 3):
        for seed in (0, 1):
            check_text(model, prompts(rows, seed=seed), 60)
    assert len(tapes) == 2  # one for each number of rows


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_logit_is_that_of_the_plain_model(tapes: list, precision: str):
    """In float32 to rounding; in bfloat16, where other sums round otherwise, to its digits."""
    ours = graphed(causal(n_kv_heads=2), precision)
    tokens, pad = left_padded([[*prompt, *prompts(1, NEW)[0].tolist()] for prompt in PROMPTS])
    texts = [(each, KVCache(ours.llama, len(tokens), NEW + 7, pad)) for each in (Text(ours), ours.llama)]
    seen = []  # kept to the end, as a caller may
    for end in range(tokens.shape[1] - NEW, tokens.shape[1] + 1):
        with torch.inference_mode():
            seen.append([each.next_logits(tokens[:, :end], cache) for each, cache in texts])
        assert texts[0][1].length == texts[1][1].length == end
    for logits, expected in seen:
        assert logits.dtype == expected.dtype == torch.float32
        assert_near(logits, expected, TOLERANCE[precision])
    assert len(tapes) == 1 and tapes[0].replays == NEW
    for name in ("keys", "values"):
        actual, expected = (getattr(cache, name) for _, cache in texts)
        assert_near(actual, expected, TOLERANCE[precision])


@pytest.mark.parametrize("max_seq_len", [64, 40])
def test_prompts_of_different_lengths_are_continued_as_if_alone(tapes: list, max_seq_len: int):
    """The shorter model's window slides over the last tokens, where nothing that is stored can be kept."""
    plain = causal(max_seq_len=max_seq_len)
    model = graphed(plain)
    for row_order in (PROMPTS, PROMPTS[::-1]):  # the second text has other padding, and the same graph
        idx, pad = left_padded(row_order)
        together = model.generate(idx, 50, temperature=0.0, pad=pad)
        for row, prompt in enumerate(row_order):
            alone = plain.generate(torch.tensor([prompt]), 50, temperature=0.0, use_cache=False)
            assert_same_text(plain, together[row : row + 1, pad[row] :], alone, len(prompt))
    check_text(model, idx, 50)  # of which none is padding
    assert len(tapes) == 1


def test_a_bidirectional_model_and_a_causal_one_without_a_cache_have_no_graph(tapes: list):
    ours = graphed(random_llama(gain=8.0))
    assert torch.equal(ours.generate(prompts(2), 40, 0.0), ours.llama.generate(prompts(2), 40, 0.0))
    check_text(graphed(causal()), prompts(2), use_cache=False)
    assert not tapes


def test_short_texts_are_not_worth_a_graph_but_use_one_that_is_there(tapes: list):
    model = graphed(causal())
    check_text(model, prompts(1), MIN_STEPS - 1)
    assert not tapes
    check_text(model, prompts(1), MIN_STEPS)
    assert [tape.replays for tape in tapes] == [MIN_STEPS - 1]  # the first token comes of reading the prompt
    check_text(model, prompts(1), 4)
    assert [tape.replays for tape in tapes] == [MIN_STEPS + 2]


def test_texts_of_like_length_share_a_graph_and_others_have_their_own(tapes: list):
    model = graphed(causal(max_seq_len=2 * MIN_POSITIONS))
    for length in (3, 20, MIN_POSITIONS - NEW):
        check_text(model, prompts(1, length))
    assert len(tapes) == 1
    check_text(model, prompts(1, MIN_POSITIONS - NEW + 1))
    assert len(tapes) == 2


def test_a_text_in_the_midst_of_another(tapes: list):
    """The one that began first must not find the other's keys and values, whoever has the graph."""
    model = graphed(causal())
    expected = [model.llama.generate(prompts(1, seed=seed), NEW, 0.0) for seed in range(3)]
    inner = []

    def interrupt(token: torch.Tensor) -> None:
        if len(inner) < 2:
            inner.append(model.generate(prompts(1, seed=1 + len(inner)), NEW, temperature=0.0))

    outer = model.generate(prompts(1, seed=0), NEW, temperature=0.0, on_token=interrupt)
    for text, wanted in zip((outer, *inner), expected, strict=True):
        assert torch.equal(text, wanted)


@pytest.mark.parametrize("padded", [False, True])
def test_beams_and_penalized_texts_are_those_of_the_plain_model(tapes: list, padded: bool):
    """A graph continues the rows that it was made for; where they are chosen anew, the model does."""
    model = graphed(causal())
    idx, pad = left_padded(PROMPTS) if padded else (prompts(2), None)
    texts = [BeamSearch(each, 3).generate(idx, NEW, pad=pad) for each in (model, model.llama)]
    assert torch.equal(*texts)
    check_text(model, idx, choose=choosing(0.0, pad=pad, repetition_penalty=1.5), pad=pad)
    assert len(tapes) == 1 and tapes[0].replays == NEW - 1


def test_a_full_cache_is_an_error_as_in_the_plain_model(tapes: list):
    ours = graphed(causal())
    idx, text = prompts(1), Text(ours)
    with torch.inference_mode():
        cache = KVCache(ours.llama, 1, idx.shape[1] + NEW)
        for _ in range(NEW + 1):
            logits = text.next_logits(idx, cache)
            idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
        assert tapes[0].replays == NEW
        with pytest.raises(RuntimeError, match="the cache is for"):
            text.next_logits(idx, cache)


# ------------------------------------------------------------------------------------- changes between two texts


def drop_one_copy(model: Llama) -> None:
    model.layers[0].eval()
    test_fast.halve(model)


def swap_layers(model: Llama) -> None:
    model.layers = nn.ModuleList(reversed(model.layers)).eval()
    for layer_id, layer in enumerate(model.layers):
        layer.layer_id = layer.attention.layer_id = layer_id


CHANGES = {
    **test_fast.CHANGES,
    "layers swapped": swap_layers,
    "a part in eval mode": drop_one_copy,
    "another precision": lambda model: accelerate(model, "int8", CUDA),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_weight_ends_a_decoder_and_is_seen_by_the_next_one(tapes: list, change: str):
    replaces_weights = change in ("assigned", "replaced", "layers swapped")
    ours = graphed_for_texts(causal(), "fp32" if replaces_weights else "bf16")  # which has copies of them
    texts = [ours.generate(prompts(2), NEW, temperature=0.0)]
    for _ in range(2 if change != "another precision" else 1):  # which rounds once
        CHANGES[change](ours.llama)
        gc.collect()  # what is no more must not be read
        with pytest.raises(RuntimeError, match=OUTDATED):
            ours.generate(prompts(2), NEW, temperature=0.0)
        ours = decoding(ours.llama)
        texts.append(ours.generate(prompts(2), NEW, temperature=0.0))
        expected = ours.llama.generate(prompts(2), NEW, temperature=0.0)
        assert_same_text(ours.llama, texts[-1], expected, 5)
    assert len(tapes) == len(texts) and not torch.equal(texts[1], texts[0])


def test_kernels_that_are_exchanged_leave_a_decoder_to_the_plain_model(tapes: list):
    ours = graphed_for_texts(causal(), "bf16")
    before = check_text(ours, prompts(1))
    ours.llama.layers[0].eval()  # which makes its kernels drop their copies
    assert torch.equal(check_text(ours, prompts(1)), before) and len(tapes) == 1
    accelerate(ours.llama, "fp32", CUDA)
    check_text(ours, prompts(1))
    assert [tape.replays for tape in tapes] == [2 * (NEW - 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_is_converted_afterwards_computes_in_the_new_format(tapes: list, dtype: torch.dtype):
    model = graphed(causal()).llama
    for convert in (lambda: model, lambda: model.to(dtype), model.float):
        check_text(decoding(convert()), prompts(1))
    assert len(tapes) == 3


UNKNOWN = {
    "replaced layer": lambda model: setattr(
        model.layers[0].attention.compute_query, "__class__", test_fast.ShiftedLinear
    ),
    "a layer that is trained": lambda model: model.layers[1].train(),
}


@pytest.mark.parametrize("change", UNKNOWN)
def test_what_a_graph_may_not_repeat_is_left_to_the_plain_model(tapes: list, change: str):
    ours = graphed(causal(dropout=0.5))
    before = check_text(ours, prompts(1))
    UNKNOWN[change](ours.llama)
    texts = []
    for each in (ours, ours.llama):
        torch.manual_seed(0)
        texts.append(each.generate(prompts(1), NEW, temperature=0.0))
    assert torch.equal(*texts) and len(tapes) == 1 and not torch.equal(texts[0], before)


def test_an_edited_cache_is_not_replaced(tapes: list, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    store = KVCache.store

    def halved(self: KVCache, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple:
        return store(self, layer_id, key, 0.5 * value)

    assert STEPS.difference() is None
    model = graphed(causal())
    before = check_text(model, prompts(1))
    monkeypatch.setattr(KVCache, "store", halved)
    assert not torch.equal(check_text(model, prompts(1)), before) and len(tapes) == 1
    assert "KVCache is computed as it is written" in capfd.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_used_model_can_be_copied_stored_and_trained(tapes: list, precision: str):
    ours = graphed_for_texts(causal(), precision)
    expected = check_text(ours, prompts(1))
    buffer = io.BytesIO()
    torch.save(ours.llama, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(ours.llama), torch.load(buffer, weights_only=False)):
        test_fast.halve(other)
        check_text(decoding(other), prompts(1))
        assert torch.equal(ours.generate(prompts(1), NEW, temperature=0.0), expected)
    test_fast.CHANGES["AdamW"](ours.llama)


def test_a_damaged_model_is_reported_and_what_it_leaves_behind_is_overwritten(tapes: list):
    """Not-a-numbers in the buffers would reach a later text even where they are masked."""
    plain = causal()
    ours = graphed(plain)
    check_text(ours, prompts(1))
    ours._idle.cache.values.fill_(float("nan"))
    check_text(ours, prompts(1))
    assert len(tapes) == 1
    with torch.no_grad():
        plain.layers[0].attention.compute_value.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        graphed(plain).generate(prompts(1, 20), NEW, temperature=0.0)


# ------------------------------------------------------------------------------------------ what can be recorded


class TrainingCallback(TorchDispatchMode):
    """Lists what is computed, and fails at a tensor that comes from nowhere: numbers of the CPU, copied to the GPU."""

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self.known = list(known)  # keeps all alive, or ids would be given twice
        self.ids = {id(tensor) for tensor in self.known}
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors, others = [], []
        for value in tree_leaves((args, kwargs or {})):
            (tensors if isinstance(value, torch.Tensor) else others).append(value)
        for tensor in tensors:
            assert id(tensor) in self.ids, f"{func} reads a tensor that was made from Python's numbers"
        asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
        assert not asks, f"{func} asks the GPU for numbers"
        self.calls.append(f"{func} {[(tuple(tensor.shape), tensor.dtype) for tensor in tensors]} {others}")
        output = func(*args, **(kwargs or {}))
        new = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
        self.known += new
        self.ids |= {id(tensor) for tensor in new}
        return output


def watched_step(precision: str, device: str, position: int, rows: int = 2) -> list[str]:
    """The operations of one step of a model on `device`."""
    model = graphed(causal(n_kv_heads=2), precision).llama.to(device)
    tokens = torch.ones(rows, 1, dtype=torch.int64, device=device)
    with torch.no_grad(), patch.object(fast.graphs, "record", lambda run, device: run):
        cache = KVCache(model, rows, 40)
        model(tokens, cache=cache)  # makes the copies of weights
        step = GraphedStep(model, cache)
        step.cache.position.fill_(position)
        held = [*model.parameters(), *step.copies, *vars(step).values(), *vars(step.cache).values()]
        with TrainingCallback(filter(torch.is_tensor, held)) as callback:
            step.replay()
    return callback.calls


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_nothing_in_a_step_waits_for_the_gpu_or_brings_numbers_to_it(precision: str):
    """Device "meta" takes a GPU's branches and holds no numbers: whoever asks it for one gets an error."""
    calls = watched_step(precision, "meta", 0)
    assert sum("index_copy_" in call for call in calls) == 4  # keys and values of two layers
    assert not any("cpu" in call for call in calls)  # the devices that tensors are made on


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_the_same_at_every_position(tapes: list, precision: str):
    first = watched_step(precision, "cpu", 1)
    assert first == watched_step(precision, "cpu", 37) and len(first) > 50


def test_where_recording_fails_texts_are_plain_and_it_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    tried = []

    def record(run: Callable[[], None], device: torch.device) -> None:
        run()
        tried.append(device)
        raise RuntimeError("CUDA error: operation not permitted")

    monkeypatch.setattr(fast.graphs, "can_record", lambda device: True)
    monkeypatch.setattr(fast.graphs, "record", record)
    model = graphed(causal())
    for rows in (1, 1, 2):
        check_text(model, prompts(rows))
    assert len(tried) == 1 and model._idle is None


def test_a_model_that_was_moved_to_the_cpu_decodes_there():
    ours = graphed(causal())
    check_text(ours, prompts(2))
    assert ours._idle is None and not ours._has_failed


# --------------------------------------------------------------------------------------------------- on a GPU


@needs_cuda
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_logits_are_those_of_the_plain_model(n_kv_heads: int, precision: str):
    ours = graphed(causal(n_kv_heads=n_kv_heads).to(CUDA), precision)
    tokens, pad = left_padded([[*prompt, *prompts(1, NEW)[0].tolist()] for prompt in PROMPTS])
    tokens, pad = tokens.to(CUDA), pad.to(CUDA)
    for _ in range(2):  # the second text finds the graph of the first
        texts = [(each, KVCache(ours.llama, len(tokens), NEW + 7, pad)) for each in (Text(ours), ours.llama)]
        for end in range(tokens.shape[1] - NEW, tokens.shape[1] + 1):
            with torch.inference_mode():
                logits, expected = (each.next_logits(tokens[:, :end], cache) for each, cache in texts)
            assert_near(logits, expected, 10 * TOLERANCE[precision])
        ours._idle = texts[0][0].step
        assert ours._idle is not None
        del texts


def run_without_waiting(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Stands for `record` on a GPU: the same step, launched anew for each token. PyTorch sees whether it waits."""
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return run


@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_a_graph_repeats_a_step_that_waits_for_nothing(precision: str):
    idx, pad = (tensor.to(CUDA) for tensor in left_padded(PROMPTS))
    with patch.object(fast.graphs, "record", run_without_waiting):
        stepping = graphed(causal().to(CUDA), precision)
        expected = stepping.generate(idx, NEW, temperature=0.0, pad=pad)
    model = graphed(causal().to(CUDA), precision)
    for _ in range(2):
        assert torch.equal(model.generate(idx, NEW, temperature=0.0, pad=pad), expected)
    assert stepping._idle is not None and model._idle is not None


@needs_cuda
def test_on_a_gpu_a_failed_recording_leaves_everything_usable(monkeypatch: pytest.MonkeyPatch):
    model = graphed(causal().to(CUDA))
    hidden_states = Llama.hidden_states

    def waiting(self: Llama, tokens: torch.Tensor, *settings) -> torch.Tensor:
        h = hidden_states(self, tokens, *settings)
        h.sum().item()  # no stream that is recorded may be waited for
        return h

    monkeypatch.setattr(Llama, "hidden_states", waiting)
    stream = torch.cuda.current_stream()
    check_text(model, prompts(1).to(CUDA))
    assert model._has_failed and torch.cuda.current_stream() == stream
    check_text(model, prompts(2).to(CUDA))
    torch.cuda.manual_seed(3)
    generator = torch.Generator(CUDA).manual_seed(3)
    texts = [model.generate(prompts(2).to(CUDA), NEW, generator=each) for each in (None, generator)]
    assert torch.equal(*texts)
