"""The key/value cache: whatever it saves, the tokens must be those of the uncached forward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import random_llama, slow_among

from base_llama import causal_mask
from engine.context import ContextLlama, KVCache, last_rows
from engine.decoding import continue_texts
from llama import Llama

PROMPTS = torch.tensor([[1, 45, 299, 7, 7], [1, 9, 5, 120, 33], [1, 260, 14, 3, 88], [1, 1, 1, 2, 4]])


def causal(seed: int = 0, **changes):
    return random_llama(seed, attention="causal", **changes)


@pytest.mark.parametrize("seed", slow_among(range(4), range(1, 4)))
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_cached_ids_are_the_uncached_ids_for_thousands_of_tokens(seed: int, n_kv_heads: int):
    model = causal(seed, n_kv_heads=n_kv_heads, max_seq_len=128)
    prompts = torch.randint(4, 300, (8, 5), generator=torch.Generator().manual_seed(seed))
    cached = continue_texts(model, prompts, 100, temperature=0.0)
    assert torch.equal(cached, continue_texts(model, prompts, 100, temperature=0.0, use_cache=False))
    assert len(set(cached[0].tolist())) > 5  # a model that repeats one token would prove nothing


def test_a_text_that_outgrows_the_model_goes_on_as_without_a_cache():
    model = causal(max_seq_len=16)
    longer = torch.randint(4, 300, (2, 40))  # longer than the model before the first new token
    for prompt, new in ((PROMPTS[:1], 60), (longer, 5)):
        uncached = continue_texts(model, prompt, new, temperature=0.0, use_cache=False)
        assert torch.equal(continue_texts(model, prompt, new, temperature=0.0), uncached)


def test_a_cache_filled_in_pieces_gives_the_logits_of_one_pass():
    model = causal()
    tokens = torch.randint(4, 300, (2, 20))
    whole, _ = model(tokens, targets=tokens)
    for pieces in ([20], [1] * 20, [7, 1, 12], [3, 3, 14]):
        cache = KVCache(model, 2, 20)
        logits, states = zip(*(cache.read(part) for part in tokens.split(pieces, dim=1)), strict=True)
        torch.testing.assert_close(model.output(torch.cat(states, dim=1)), whole, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits[-1], whole[:, -1:], atol=1e-5, rtol=1e-5)


def of_last_attention(model: Llama, run: Callable[[], object]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last layer's attention reads, and what it gives, while a function runs."""
    seen = []
    attention = model.layers[-1].attention
    hook = attention.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    run()
    hook.remove()
    return seen[0]


def test_one_position_may_ask_beside_a_cache():
    model = causal()
    whole, beside = (KVCache(model, *PROMPTS.shape) for _ in range(2))
    read, expected = of_last_attention(model, lambda: whole.read(PROMPTS))
    beside.read(PROMPTS[:, :2])
    at = torch.tensor([2, 0, 1, 2])
    ask = beside.reader.attentions[-1]
    found = ask(read[:, 2:], beside.extend(3).queried_at(at))
    torch.testing.assert_close(found[:, 0], expected[:, 2:][torch.arange(4), at], atol=1e-5, rtol=1e-5)


def test_rows_that_are_taken_are_continued_like_their_texts_and_leave_the_others_alone():
    model = causal()
    cache, rows = KVCache(model, 4, 12), torch.tensor([2, 0, 2, 3, 1, 1])
    assert cache.take(rows).keys is None and cache.take(rows).shape[1] == 6  # as a cache of nothing
    cache.read(PROMPTS)
    taken, new = cache.take(rows), torch.tensor([[5], [6], [7], [8], [9], [10]])
    logits = taken.read(new)[0][:, 0]
    cache.read(new[:4])
    assert cache.length == taken.length == PROMPTS.shape[1] + 1
    for row, source in enumerate(rows.tolist()):
        alone = model(torch.tensor([[*PROMPTS[source], 5 + row]]))[0][0, -1]
        torch.testing.assert_close(logits[row], alone, atol=1e-5, rtol=1e-5)


def test_only_a_causal_model_can_have_one():
    model = random_llama()
    with pytest.raises(ValueError, match="causal"):
        KVCache(model, 1, 8)


def test_every_new_token_is_announced():
    model, seen = causal(), []
    ids = continue_texts(model, torch.tensor([[1, 5], [1, 9]]), 6, temperature=0.0, on_token=seen.append)
    assert torch.equal(torch.cat(seen, dim=1), ids[:, 2:])


def test_a_text_begins_at_position_0():
    """Where rotation tells distances alone, logits do not depend on it; but angles of far positions are less exact."""
    cache = KVCache(causal(), 3, 8)
    assert [cache.extend(new).start for new in (5, 1, 2)] == [0, 5, 6]


def test_a_full_cache_is_an_error():
    model = random_llama(attention="causal")
    cache = KVCache(model, 1, 3)
    cache.read(torch.tensor([[1, 2, 3]]))
    with pytest.raises(RuntimeError, match="the cache is for 3 tokens, not 4"):
        cache.read(torch.tensor([[4]]))


def test_a_mask_and_the_buffers_are_made_where_they_are_asked_for():
    assert last_rows(2, 3, torch.device("meta")).is_meta and causal_mask(3, torch.device("meta")).is_meta
    cache = KVCache(causal(), 1, 4)
    cache.extend(2)
    assert all(kept.is_meta for kept in cache.store(0, *torch.empty(2, *cache.shape[1:3], 2, 8, device="meta")))


def test_masks_show_what_stands_before_a_query():
    assert causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert last_rows(2, 3).tolist() == causal_mask(3)[1:].tolist() and torch.equal(last_rows(3, 3), causal_mask(3))


@pytest.mark.parametrize("scaling", [None, ("linear", 4.0), ("llama3", 8.0, 1.0, 4.0, 64.0)])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_cache_knows_the_angles_and_norms_of_its_model(scaling: tuple | None, norm: str):
    model = causal(rope_theta=500.0, rope_scaling=scaling, norm=norm, n_kv_heads=2)
    cache = KVCache(model, *PROMPTS.shape)
    cache.read(PROMPTS[:, :3])
    torch.testing.assert_close(cache.read(PROMPTS[:, 3:])[0], model(PROMPTS)[0], atol=1e-5, rtol=1e-5)


def test_a_cache_leaves_the_model_as_it_is():
    """The reader of a cache shares weights and modules with the model, and its attention knows the layer's number."""
    model = causal(n_layers=3)
    before = [*model.modules()]
    cache = KVCache(model, 1, 4)
    cache.read(torch.tensor([[1, 5]]))
    assert [*model.modules()] == before and not any(hasattr(layer.attention, "context") for layer in model.layers)
    assert [each.layer_id for each in cache.reader.attentions] == [0, 1, 2]
    for mine, its in zip(ContextLlama(model).llama.parameters(), model.parameters(), strict=True):
        assert mine is its
    with torch.no_grad():
        model.norm.weight.mul_(2.0)
    whole = model(torch.tensor([[1, 5, 9]]))[0]
    torch.testing.assert_close(cache.read(torch.tensor([[9]]))[0], whole, atol=1e-5, rtol=1e-5)
