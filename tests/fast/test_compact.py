"""Large models: weights in memory once, in the bits of the precision, and the same results as from float32 weights."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_llama, save_checkpoint
from torch import nn

import fast.compact
import fast.layers
from classifier import LlamaEmbeddingClassifier
from convert import gguf, hugging_face
from convert.vocabulary import read_vocabulary
from engine import runs, storage, weights
from engine.context import embed
from engine.plan import ComputeSettings
from engine.weights import load_llama_model
from fast import accelerate, decoder
from fast.compact import CompactWeight, compacted, quantise, quantise_4
from llama import Llama
from tokenizer import Tokenizer
from utils import ROOT, UserError

IDS = torch.tensor([[1, 45, 299, 7, 120, 33, 8]])
FORMATS = ("hf", "pt", "gguf")


@pytest.fixture(autouse=True)
def one_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with a gate round once where others round three times, and are only for small models."""
    monkeypatch.setattr(fast.layers, "has_gated_products", lambda: False)


@pytest.fixture
def written(tmp_path: Path, tiny_tokenizer: Path):
    """Writes a tiny model, whose numbers bfloat16 has, as a directory, as a checkpoint or as a GGUF file."""

    def write(format: str, tied: bool = True) -> Path:
        model = random_llama(attention="causal", n_kv_heads=2, tied=tied)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        if format == "hf":
            hugging_face.write(tmp_path / "model", model.state_dict(), model.config, dtype="bf16", stop_ids=())
            return tmp_path / "model"
        if format == "pt":
            save_checkpoint(tmp_path / "model.pt", model)
            return tmp_path / "model.pt"
        pytest.importorskip("gguf", reason="the package gguf is not installed")
        vocabulary = read_vocabulary(Tokenizer(tokenizer_model=tiny_tokenizer).sp_model, tiny_tokenizer)
        gguf.write(tmp_path / "m.gguf", model.state_dict(), model.config, vocabulary, "f32")
        return tmp_path / "m.gguf"

    return write


def small_and_large(path: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> list[Llama]:
    """The model as a small one and as a large one is kept."""
    models = [load_llama_model(path, "causal", precision=precision)]
    monkeypatch.setattr(weights, "LARGE", 1)
    return [*models, load_llama_model(path, "causal", precision=precision)]


def bytes_of(model: nn.Module) -> int:
    parts = [getattr(weight, "stored", weight) for weight in model.parameters()]
    parts += [weight.scale for weight in model.parameters() if getattr(weight, "scale", None) is not None]
    return sum(part.numel() * part.element_size() for part in parts)


def size_of(name: str, weight: torch.Tensor, precision: str) -> float:
    """The bytes of a kept weight, with its scales."""
    if weight.dim() == 1 or precision in ("fp32", "bf16"):
        return weight.numel() * (2 if weight.dim() == 2 and precision == "bf16" else 4)
    return weight.numel() * 4.5 / 8 if precision == "int4" and "layers" in name else weight.numel() + 4 * len(weight)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("generates", [True, False])
def test_a_large_model_computes_what_a_small_one_does(
    format: str, precision: str, generates: bool, written, monkeypatch: pytest.MonkeyPatch
):
    small, large = small_and_large(written(format), precision, monkeypatch)
    size = sum(size_of(name, weight, precision) for name, weight in small.named_parameters())
    assert bytes_of(large) == size
    assert [*large.state_dict()] == [*small.state_dict()]
    assert large.output.weight is large.tok_embeddings.weight
    for model in (small, large):
        monkeypatch.setattr(weights, "LARGE", 1 if model is large else 2**40)
        accelerate(model, precision, generates=generates, trains=False)
    assert bytes_of(large) == size
    with torch.inference_mode():
        expected, actual = (model(IDS, targets=IDS)[0] for model in (small, large))
        torch.testing.assert_close(actual, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
        if generates:
            texts = [decoder(model, precision).generate(IDS, 12, 0.0) for model in (small, large)]
            assert torch.equal(*texts)


def test_untied_embeddings_stay_in_bfloat16_in_8_bits(written, monkeypatch: pytest.MonkeyPatch):
    small, large = small_and_large(written("hf", tied=False), "int8", monkeypatch)
    assert large.tok_embeddings.weight.scale is None and large.output.weight.scale is not None
    assert torch.equal(embed(small, IDS), embed(large, IDS))


def test_training_and_plain_kernels_get_float32_that_can_be_written_to(written, monkeypatch: pytest.MonkeyPatch):
    small, large = small_and_large(written("hf"), None, monkeypatch)
    for name, weight in large.named_parameters():
        assert type(weight) is nn.Parameter and weight.requires_grad and weight.dtype == torch.float32
        assert torch.equal(weight, small.state_dict()[name])
    compute = ComputeSettings(torch.device("cpu"), precision="bf16")
    assert compute.kept_precision == "bf16" and compute._replace(kernels="plain").kept_precision is None
    assert compute._replace(shard=True).kept_precision is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_a_large_saved_classifier_predicts_what_a_small_one_does(
    precision: str, tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = Tokenizer(tokenizer_model=tiny_tokenizer)
    llama = random_llama(attention="causal", vocab_size=tokenizer.n_words)
    settings = SimpleNamespace(num_labels=3, hidden_dropout_prob=0.0, option="finetune", pad_id=tokenizer.pad_id)
    classifier = LlamaEmbeddingClassifier(settings, llama=llama)
    record = runs.record_of(classifier, tokenizer, ["a", "b", "c"], 8, precision)
    runs.save_classifier(tmp_path / "model.pt", classifier, record)
    models = []
    for numbers in (2**40, 1):
        monkeypatch.setattr(weights, "LARGE", numbers)
        model, about = runs.load_classifier(tmp_path / "model.pt", kept_precision=lambda of_run: of_run)
        assert about.precision == precision and not any(weight.is_meta for weight in model.parameters())
        accelerate(model, precision, generates=False, trains=False)
        models.append(model)
    size = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.7}[precision]
    assert bytes_of(models[1].llama) < 1.2 * bytes_of(models[0].llama) * size / 4
    with torch.inference_mode():
        torch.testing.assert_close(*(model(IDS % llama.config.vocab_size) for model in models), atol=1e-2, rtol=0)


def test_a_damaged_number_is_found_in_every_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "LARGE", 1)
    for damage in (float("nan"), float("inf")):
        model = random_llama(attention="causal")
        model.layers[1].feed_forward.w2.weight.data[3, 2] = damage
        save_checkpoint(tmp_path / "model.pt", model)
        for precision in (None, "fp32", "bf16", "int8", "int4"):
            with pytest.raises(UserError, match=r"not all numbers are finite in layers\.1\.feed_forward\.w2\.weight"):
                load_llama_model(tmp_path / "model.pt", precision=precision)


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_larger_than_the_memory_is_refused_with_the_numbers(
    format: str, written, monkeypatch: pytest.MonkeyPatch
):
    path = written(format)
    monkeypatch.setattr(weights, "LARGE", 1)
    numbers = sum(weight.numel() for weight in load_llama_model(path).parameters())
    monkeypatch.setattr(storage, "free_memory", lambda: 2 * numbers)
    load_llama_model(path, precision="bf16")
    for precision in ("fp32", None):
        with pytest.raises(UserError, match=r"needs 0\.00 GB of memory in fp32, and 0\.00 GB are free; use"):
            load_llama_model(path, precision=precision)


def test_limits_of_control_groups_count_and_pages_of_files_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if storage.free_memory() is None:
        pytest.skip("this system says nothing of its memory")
    monkeypatch.setattr(storage, "CONTROL_GROUPS", tmp_path)
    for names, stat in ((storage.LIMITS[""], ""), (storage.LIMITS["memory"], "memory")):
        folder = tmp_path / stat
        folder.mkdir(exist_ok=True)
        (folder / "memory.stat").write_text("anon 7\nactive_file 100\ninactive_file 20\n")
        (folder / names[0]).write_text("max\n")
        assert storage._free_in(folder, *names) == float("inf")
        for name, number in zip(names, (1000, 900), strict=True):
            (folder / name).write_text(f"{number}\n")
        assert storage._free_in(folder, *names) == 220
    assert storage.free_memory() == 220  # of the machine and the folders above its own group, the least


# ------------------------------------------------------------------------------------------------------ compact weights


@pytest.fixture(params=["bfloat16", "8 bits", "4 bits"])
def weight(request: pytest.FixtureRequest) -> nn.Parameter:
    numbers = torch.randn(600, 64, generator=torch.Generator().manual_seed(0))
    made = {"8 bits": quantise, "4 bits": quantise_4, "bfloat16": lambda x: (x.bfloat16(),)}[request.param](numbers)
    made = CompactWeight(*made)
    return nn.Parameter(made, requires_grad=False)


def test_a_compact_weight_is_a_float32_tensor_to_all_code(weight: nn.Parameter):
    plain = weight.widened()
    assert isinstance(weight, nn.Parameter) and weight.dtype == torch.float32 and weight.shape == plain.shape
    x = torch.randn(3, 64, requires_grad=True)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            assert torch.equal(F.linear(x, weight), F.linear(x, plain))
            assert torch.equal(weight @ x.T, plain @ x.T) and torch.equal(weight.detach() + 1, plain + 1)
            ids = torch.tensor([[3, 599], [0, 3]])
            assert torch.equal(F.embedding(ids, weight), plain[ids]) and torch.equal(weight[5], plain[5])
            assert torch.equal(torch.embedding(weight, ids), plain[ids])
            assert torch.equal(weight[torch.tensor(-2)], plain[-2])
            assert not weight.detach().is_inference()
            torch.testing.assert_close(weight.linear(x), F.linear(x, plain))
    gradient, expected = (torch.autograd.grad(F.linear(x, each).square().sum(), x)[0] for each in (weight, plain))
    assert torch.equal(gradient, expected)
    assert torch.equal(copy.deepcopy(weight).widened(), plain)


def test_a_gradient_reaches_the_rows_that_are_read(weight: nn.Parameter):
    trained = nn.Parameter(weight.detach())  # as a model that is not frozen has them
    ids = torch.tensor([2, 5, 2])
    (F.embedding(ids, trained).sum() + trained[7].sum()).backward()
    expected = torch.zeros(600).index_add(0, torch.tensor([2, 5, 2, 7]), torch.ones(4))
    assert torch.equal(trained.grad, expected[:, None].expand(600, 64))


def test_bad_arguments_of_embeddings_are_errors(weight: nn.Parameter):
    with pytest.raises(AssertionError, match="num_embeddings"):
        F.embedding(torch.tensor([3]), weight, padding_idx=900)
    with pytest.raises(TypeError):
        F.embedding([1, 2], weight)
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([600]), weight)


def test_only_rows_that_are_asked_for_are_widened(weight: nn.Parameter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CompactWeight, "widened", lambda _: pytest.fail("all rows were widened"))
    with torch.no_grad():
        for read in (weight[3], weight[3, :], weight.select(0, 3), weight[torch.tensor(3)], weight[np.int64(3)]):
            assert read.shape == (64,)
        assert torch.embedding(weight, torch.tensor([3])).shape == (1, 64)


def test_writing_to_a_compact_weight_is_an_error(weight: nn.Parameter):
    with torch.no_grad(), pytest.raises(RuntimeError, match="read only"):
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="read only"):
        nn.init.normal_(weight)
    with torch.no_grad(), pytest.raises(RuntimeError, match="read only"):
        F.embedding(torch.tensor([3]), weight, max_norm=1.0)


@pytest.mark.parametrize(("precision", "of_whole"), [("int8", quantise), ("int4", quantise_4)])
@pytest.mark.parametrize("rows", [0, 1, 1300])
def test_few_bits_in_pieces_are_those_of_the_whole(precision: str, of_whole: Callable, rows: int):
    numbers = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    whole, scale = of_whole(numbers.bfloat16().float())
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            piecewise = compacted("layers.0.w", nn.Parameter(numbers.bfloat16()), precision)
        assert torch.equal(piecewise.stored, whole) and torch.equal(piecewise.scale, scale)
        assert not piecewise.scale.requires_grad and not piecewise.scale.is_inference()


def test_numbers_at_the_edges_of_4_bits():
    """A tie, zeros, a scale that bfloat16 rounds by a third, one that it rounds to zero, large numbers."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(3)).clamp(-1.4, 1.4)
    x[0, 3], x[0, 7], x[1] = 1.5, -1.5, 0.0
    for row, size in ((2, 1.4 * 8 * 2.0**-133), (3, 2.0**-137), (4, 3e38)):
        x[row] *= size / x[row].abs().max()
    packed, scale = quantise_4(x)
    q = np.concatenate([packed.numpy() & 15, packed.numpy() >> 4], axis=1).astype(int) - 8
    for row, numbers, step in zip(q, x.double().tolist(), scale[:, 0].double().tolist(), strict=True):
        furthest = max(numbers, key=lambda number: (abs(number), -number))
        assert step == torch.tensor(furthest / -8).bfloat16().item()
        wanted = [min(7, max(-8, math.floor(number / step + 0.5))) if step else 0 for number in numbers]
        assert row.tolist() == wanted


def test_rows_in_4_bits_have_a_multiple_of_32_numbers():
    with pytest.raises(UserError, match="int4 takes 32 numbers"):
        compacted("layers.0.w", torch.ones(700, 16), "int4")


@pytest.mark.parametrize("rows_of_product", [1, 250, 600, 10**6])
def test_products_in_bfloat16_are_of_rounded_numbers(rows_of_product: int, weight: nn.Parameter, monkeypatch):
    if weight.scale is None:
        pytest.skip("its products are not computed in pieces")
    monkeypatch.setattr(fast.compact, "BYTES_OF_PRODUCT", 2 * 64 * rows_of_product)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = x.double() @ weight.widened().bfloat16().double().T
    torch.testing.assert_close(weight.linear(x).double(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.slow
def test_a_large_model_imports_no_modules_for_its_first_dispatch(written):
    """PyTorch 2.13 imports torch.distributed.tensor, which takes half a second."""
    code = f"""import sys, torch
from engine import weights
from fast import accelerate, decoder
weights.LARGE = 1
for precision in ("bf16", "int8", "int4"):
    for generates in (False, True):
        model = weights.load_llama_model({str(written("hf"))!r}, "causal", precision=precision)
        accelerate(model, precision, generates=generates, trains=False)
        with torch.inference_mode():
            model(torch.tensor([[1, 2, 3]]))
            decoder(model, precision).generate(torch.tensor([[1, 2, 3]]), 4, 0.0)
model.tok_embeddings.weight[3]
assert type(model.tok_embeddings.weight).__name__ == "CompactWeight"
assert not any(name in sys.modules for name in ("torch.distributed.tensor", "sympy"))
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
