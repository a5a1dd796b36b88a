import math
from pathlib import Path

import pytest
import torch
from conftest import asset

from engine.context import rotate
from grading import rotary
from rope import apply_rotary_emb, frequencies, rope_table, table_rows


def rotate_as_complex(
    x: torch.Tensor, theta: float = 10000.0, start: int = 0, frequencies: torch.Tensor | None = None
) -> torch.Tensor:
    """The same rotation in other words: pairs are complex numbers, multiplied by e^(i * angle). x: b s h d"""
    _, length, _, head_dim = x.shape
    if frequencies is None:
        frequencies = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)  # d/2
    angle = torch.outer(torch.arange(start, start + length).double().clamp(min=0), frequencies)  # s d/2
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())  # b s h d/2
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None, :]
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("theta", [10000.0, 37.0])
@pytest.mark.parametrize("shape", [(2, 5, 4, 2, 8), (1, 64, 1, 1, 2), (3, 17, 6, 3, 10)])
def test_equals_multiplication_by_complex_numbers(shape: tuple[int, ...], theta: float):
    batch, length, heads, kv_heads, head_dim = shape
    query, key = torch.randn(batch, length, heads, head_dim), torch.randn(batch, length, kv_heads, head_dim)
    rotated_query, rotated_key = apply_rotary_emb(query, key, head_dim, 64, theta)
    torch.testing.assert_close(rotated_query.double(), rotate_as_complex(query, theta), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotated_key.double(), rotate_as_complex(key, theta), atol=1e-5, rtol=1e-5)


def test_scores_depend_on_the_distance_alone():
    query, key = torch.randn(1, 1, 1, 16).expand(1, 40, 1, 16), torch.randn(1, 1, 1, 16).expand(1, 40, 1, 16)
    rotated_query, rotated_key = apply_rotary_emb(query, key, 16, 40)
    scores = rotated_query[0, :, 0] @ rotated_key[0, :, 0].T  # s t
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)


def test_a_text_beyond_max_seq_len_is_rotated_all_the_same():
    query = torch.randn(1, 20, 2, 4)
    rotated, _ = apply_rotary_emb(query, query, 4, 8)
    torch.testing.assert_close(rotated.double(), rotate_as_complex(query, 10000.0), atol=1e-5, rtol=1e-5)


def test_scaled_angles_pair_by_pair():
    """Linear: all of them divided. Llama 3: each as Meta's rule says of its wavelength."""
    plain = [500.0 ** (-index / 16) for index in range(0, 16, 2)]
    torch.testing.assert_close(frequencies(16, 500.0), torch.tensor(plain))
    torch.testing.assert_close(frequencies(16, 500.0, ("linear", 4.0)), torch.tensor(plain) / 4)
    expected, kinds = [], set()
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < 200 / 4.0:
            expected.append(frequency)
        elif wavelength > 200 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (200 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
        kinds.add("same" if expected[-1] == frequency else "slowed" if expected[-1] == frequency / 8 else "mixed")
    scaling = ("llama3", 8.0, 1.0, 4.0, 200.0)
    torch.testing.assert_close(frequencies(16, 500.0, scaling), torch.tensor(expected))
    assert kinds == {"same", "slowed", "mixed"}
    x = torch.randn(2, 5, 3, 16)  # b s h d
    turned = apply_rotary_emb(x, x, 16, 32, 500.0, scaling)[1]
    expected = rotate_as_complex(x, frequencies=torch.tensor(expected).double())
    torch.testing.assert_close(turned.double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(turned, apply_rotary_emb(x, x, 16, 32, 500.0)[1])


def test_half_precision_is_rotated_in_float32():
    query = torch.randn(1, 300, 2, 8).bfloat16()
    rotated, _ = apply_rotary_emb(query, query, 8, 300)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rotary_emb(query.float(), query.float(), 8, 300)[0].bfloat16())


def test_the_table_is_computed_once_and_can_be_trained_through():
    with torch.inference_mode():
        table = rope_table(6, 11, 123.0)
    assert rope_table(6, 11, 123.0) is table
    query = torch.randn(1, 4, 2, 6, requires_grad=True)
    rotated, _ = apply_rotary_emb(query, query, 6, 11, 123.0)
    rotated.sum().backward()
    assert query.grad is not None


def test_the_published_numbers_are_those_of_the_course(assets: Path):
    published = torch.load(asset(assets, "rotary_embedding_actual.data"), weights_only=True)
    at_one = rotary.PUBLISHED_QUERY, rotary.PUBLISHED_KEY
    for tensor, unturned, numbers in zip(published, (2.0, 3.0), at_one, strict=True):
        rows = torch.tensor([[unturned] * 4, numbers])  # of positions 0 and 1, the same for both heads
        assert torch.equal(tensor, rows[None, :, None].expand(1, 2, 2, 4))


def test_a_table_reaches_only_as_far_as_the_texts_of_a_model_for_millions_of_positions():
    asked = ((5, 64), (70, 64), (5, 2**31 - 1), (2**15, 2**31 - 1), (2**15 + 1, 2**31 - 1), (2**15 + 1, 2**15 + 9))
    assert [table_rows(*each) for each in asked] == [64, 70, 2**15, 2**15, 2**16, 2**15 + 9]
    query, key = torch.randn(2, 1, 2**15 + 3, 1, 4)
    turned = [apply_rotary_emb(query, key, 4, positions) for positions in (1, 2**31 - 1)]
    torch.testing.assert_close(*turned, atol=1e-6, rtol=0)
    one = [rotate(query[:, :1], 2**15 + 2, 4, positions) for positions in (1, 2**31 - 1)]
    torch.testing.assert_close(*one, atol=1e-6, rtol=0)
