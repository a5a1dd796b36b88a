"""The key/value cache: whatever it saves, the tokens must be those of the uncached forward pass."""

from __future__ import annotations

import pytest
import torch
from conftest import random_llama, slow_among

from base_llama import KVCache, causal_mask

PROMPTS = [[1, 45, 299, 7, 7, 120, 33], [1, 9], [1, 260, 14, 3, 88], [1]]


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    pad = torch.tensor([longest - len(prompt) for prompt in prompts])
    return torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]), pad


def causal(seed: int = 0, **changes):
    return random_llama(seed, attention="causal", **changes)


@pytest.mark.parametrize("seed", slow_among(range(4), range(1, 4)))
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_cached_ids_are_the_uncached_ids_for_thousands_of_tokens(seed: int, n_kv_heads: int):
    model = causal(seed, n_kv_heads=n_kv_heads, max_seq_len=128)
    prompts = torch.randint(4, 300, (8, 5), generator=torch.Generator().manual_seed(seed))
    cached = model.generate(prompts, 100, temperature=0.0)
    assert torch.equal(cached, model.generate(prompts, 100, temperature=0.0, use_cache=False))
    assert len(set(cached[0].tolist())) > 5  # a model that repeats one token would prove nothing


def test_a_text_that_outgrows_the_model_goes_on_as_without_a_cache():
    model = causal(max_seq_len=16)
    longer = torch.randint(4, 300, (2, 40))  # longer than the model before the first new token
    for prompt, new in ((torch.tensor(PROMPTS[:1]), 60), (longer, 5)):
        uncached = model.generate(prompt, new, temperature=0.0, use_cache=False)
        assert torch.equal(model.generate(prompt, new, temperature=0.0), uncached)


@pytest.mark.parametrize("max_seq_len", [64, 12])
def test_prompts_of_different_lengths_are_continued_as_if_alone(max_seq_len: int):
    model = causal(max_seq_len=max_seq_len)
    idx, pad = left_padded(PROMPTS)
    together = model.generate(idx, 30, temperature=0.0, pad=pad)
    for row, prompt in enumerate(PROMPTS):
        alone = model.generate(torch.tensor([prompt]), 30, temperature=0.0)[0]
        assert torch.equal(together[row, pad[row] :], alone)


def test_a_cache_filled_in_pieces_gives_the_logits_of_one_pass():
    model = causal()
    tokens = torch.randint(4, 300, (2, 20))
    whole, _ = model(tokens, targets=tokens)
    for pieces in ([20], [1] * 20, [7, 1, 12], [3, 3, 14]):
        cache = KVCache(model, 2, 20)
        parts = [model(part, targets=part, cache=cache)[0] for part in tokens.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_padding_before_a_text_changes_no_logits():
    model = causal()
    idx, pad = left_padded(PROMPTS)
    logits, _ = model(idx, targets=idx, cache=KVCache(model, len(PROMPTS), idx.shape[1], pad))
    assert logits.isfinite().all()
    for row, prompt in enumerate(PROMPTS):
        alone, _ = model(torch.tensor([prompt]), targets=idx)
        torch.testing.assert_close(logits[row, pad[row] :], alone[0], atol=1e-5, rtol=1e-5)


def test_one_position_may_ask_beside_a_cache():
    model = causal()
    idx, pad = left_padded(PROMPTS)
    for padding in (pad, None):
        whole, beside = (KVCache(model, len(idx), idx.shape[1], padding) for _ in range(2))
        expected = model.hidden_states(idx, whole)[:, 3:]  # b 4 D
        model.hidden_states(idx[:, :3], beside)
        at = torch.tensor([3, 0, 2, 3])
        found = model.hidden_states(idx[:, 3:], beside, at)
        torch.testing.assert_close(found[:, 0], expected[torch.arange(4), at], atol=1e-5, rtol=1e-5)


def test_rows_that_are_taken_are_continued_like_their_texts_and_leave_the_others_alone():
    model, (idx, pad) = causal(), left_padded(PROMPTS)
    cache, rows = KVCache(model, 4, 12, pad), torch.tensor([2, 0, 2, 3, 1, 1])
    assert cache.take(rows).keys is None and cache.take(rows).shape[1] == 6  # as a cache of nothing
    model(idx, cache=cache)
    taken, new = cache.take(rows), torch.tensor([[5], [6], [7], [8], [9], [10]])
    logits = model(new, cache=taken)[0][:, 0]
    model(new[:4], cache=cache)
    assert cache.length == taken.length == idx.shape[1] + 1
    for row, source in enumerate(rows.tolist()):
        alone = model(torch.tensor([[*PROMPTS[source], 5 + row]]))[0][0, -1]
        torch.testing.assert_close(logits[row], alone, atol=1e-5, rtol=1e-5)
    plain = KVCache(model, 2, 3)
    model(torch.tensor([[1, 4], [1, 5]]), cache=plain)
    assert plain.take(torch.tensor([1])).pad is None


def test_only_a_causal_model_can_have_one():
    model = random_llama()
    with pytest.raises(ValueError, match="causal"):
        KVCache(model, 1, 8)
    with pytest.raises(ValueError, match="causal"):
        model.generate(torch.tensor([[1, 2]]), 3, pad=torch.tensor([0]))


def test_every_new_token_is_announced():
    model, seen = causal(), []
    ids = model.generate(torch.tensor([[1, 5], [1, 9]]), 6, temperature=0.0, on_token=seen.append)
    assert torch.equal(torch.cat(seen, dim=1), ids[:, 2:])


def test_a_full_cache_is_an_error():
    model = random_llama(attention="causal")
    cache = KVCache(model, 1, 3)
    model(torch.tensor([[1, 2, 3]]), cache=cache)
    with pytest.raises(RuntimeError, match="the cache is for 3 tokens, not 4"):
        model(torch.tensor([[4]]), cache=cache)


def test_a_mask_and_the_buffers_are_made_where_they_are_asked_for():
    assert causal_mask(2, 3, torch.device("meta")).is_meta
    cache = KVCache(causal(), 1, 4)
    cache.extend(2)
    assert all(kept.is_meta for kept in cache.store(0, *torch.empty(2, *cache.shape[1:3], 2, 8, device="meta")))
