"""Loading checkpoints into models; a file's content is checked before a model is made."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from config import ATTENTION_KINDS, Checks, LlamaConfig
from engine.programs import import_part, is_gguf
from engine.storage import forget_pages, load_tensors, require_memory
from llama import Attention, Llama, own_name
from utils import UserError, join_names, shorten

Model = TypeVar("Model", bound=nn.Module)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # 8-bit numbers need scales


def load_llama_model(
    path: str | os.PathLike,
    attention: str | None = None,
    norm: str | None = None,
    precision: str | None = None,
    needs_output: bool = True,
) -> Llama:
    """Load a Llama from a checkpoint `{'model': state_dict, 'model_args': {...}, ...}`, in float32 on the CPU.

    Names may be the assignment's or the original TinyLlamas', with or without the prefix `_orig_mod.` that
    `torch.compile` adds. attention: replaces the checkpoint's own setting; without both, the model is bidirectional.
    norm: replaces the checkpoint's own; a LayerNorm whose biases the file does not hold has biases of 0.
    precision: the one in which a model is computed that will not be trained; a large one is then kept in memory as that
    precision needs it, see `fast/compact.py`. None: float32 that can be trained.
    needs_output: False: the output matrix is not read, so that a Hugging Face directory may have none.
    Raises `UserError` if the file is missing, is not a checkpoint, or has tensors of other shapes; it names every
    missing, unexpected or misshapen key.

    From a Hugging Face directory or a GGUF file the model is causal, unless `attention` is given: see
    `convert/hugging_face.py` and `convert/gguf_model.py`.
    """
    if norm == "layer" and (os.path.isdir(path) or is_gguf(path)):
        raise UserError(f"{path} is a model with RMSNorm; the editions with LayerNorm are for checkpoints (.pt)")
    if os.path.isdir(path):
        hugging_face = import_part("convert.hugging_face", "a Hugging Face directory")
        return hugging_face.load_directory(path, attention, precision=precision, needs_output=needs_output)
    if is_gguf(path):
        return import_part("convert.gguf_model", "a GGUF file").load_gguf(path, attention, precision)
    checkpoint = load_tensors(path)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        raise UserError(f"{path} is not a checkpoint: it has no state dict under the key 'model'")
    if "optimizer" in checkpoint and "history" in checkpoint:
        raise UserError(f"{path} is the resume point of a fine-tuning, not a pretrained model")
    if "model_config" in checkpoint:
        what = f"a fine-tuned classifier{_methods_of(checkpoint)}, not a pretrained model"
        raise UserError(f"{path} is {what}; use it with --option predict --model {path}, or engine.load_classifier")
    try:
        changes = {name: value for name, value in (("attention", attention), ("norm", norm)) if value is not None}
        config = LlamaConfig.from_checkpoint(checkpoint.get("model_args"), **changes)
        state = with_norm_biases(canonical_state(checkpoint["model"], config.tied), config)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if found := shape_errors(state, config):
        raise UserError(f"{path} does not fit its model_args: {join_names(found)}")
    return filled(path, config, state, keeper(path, numbers_in(state), precision))


def takes_mask(attention: Attention | type[Attention]) -> bool:
    """Whether the scores can be masked. The functions of the assignment's first editions have no argument for it."""
    parameters = inspect.signature(attention.compute_query_key_value_scores).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return "mask" in parameters or bool(kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


def computable_kinds() -> tuple[str, ...]:
    """The kinds of attention that llama.py computes, as it stands: without an argument for a mask, none is causal."""
    return ATTENTION_KINDS if takes_mask(Attention) else tuple(kind for kind in ATTENTION_KINDS if kind != "causal")


def with_norm_biases(state: dict[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The state dict; if its norms have no biases and the config has LayerNorm, with biases of 0, as in the course."""
    weights = [name for name in state if config.norm == "layer" and name.endswith("norm.weight")]
    return {f"{name.removesuffix('weight')}bias": torch.zeros_like(state[name]) for name in weights} | state


Keep = Callable[[str, torch.Tensor], torch.Tensor]  # from a tensor of a file and its name to what is kept in memory


def filled(
    path: str | os.PathLike, config: LlamaConfig, state: dict[str, torch.Tensor], keep: Keep | None = None
) -> Llama:
    """A Llama with these weights, whose shapes fit. Raises `UserError` if a number is not finite. path: for errors.

    keep: of `keeper`; the weights of a large model are then taken out of `state`.
    """
    if keep is not None:
        model = blueprint(config, Llama)
        _require_finite(path, fill(model, model, state, keep))
        return model.eval()
    # Drawing weights that are replaced at once looks wasteful. It moves the random generator exactly as the
    # assignment's code does, so that a seed means the same head and the same shuffling here as there.
    model = Llama(config)
    model.load_state_dict(state)
    _require_finite(path, [name for name, tensor in model.named_parameters() if not is_finite(tensor)])
    return model.eval()


def _require_finite(path: str | os.PathLike, damaged: list[str]) -> None:
    if damaged:
        raise UserError(f"{path} is damaged: not all numbers are finite in {join_names(damaged)}")


def _methods_of(checkpoint: dict) -> str:
    """The methods of a saved classifier as words for an error message."""
    methods = checkpoint.get("methods")
    return f" with {join_names(map(str, methods))}" if isinstance(methods, dict) and methods else ""


def canonical_state(state: Mapping, tied: bool = True, name_of: Callable[[str], str] | None = None) -> dict:
    """The state dict with this package's names. tied: a shared matrix that is stored once is entered under both names.

    name_of: the name here of one there (None: `own_name`). Raises `ValueError` if two names belong to the same tensor.
    """
    renamed: dict[str, Any] = {}
    before: dict[str, str] = {}
    for name, tensor in state.items():
        full = str(name)
        name = (name_of or own_name)(full)
        if name in renamed:
            raise ValueError(f"{shorten(before[name])} and {shorten(full)} are names of the same tensor; keep one")
        renamed[name], before[name] = tensor, full
    for name, twin in (("output.weight", "tok_embeddings.weight"), ("tok_embeddings.weight", "output.weight")):
        if tied and name not in renamed and twin in renamed:
            renamed[name] = renamed[twin]
    return renamed


# -------------------------------------------------------------------------------------------------------- large models

LARGE = 2**27  # numbers: drawing them for nothing takes seconds, and a copy of them half a gigabyte
# Of a number in memory. In int8 and int4 embeddings and output matrix may take more.
BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 4.5 / 8}


def numbers_in(state: dict[str, torch.Tensor]) -> int:
    """How many numbers there are; a matrix that stands under two names is counted once."""
    return sum(tensor.numel() for tensor in {tensor.data_ptr(): tensor for tensor in state.values()}.values())


def is_large(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) >= LARGE


def keeper(path: str | os.PathLike, numbers: int, precision: str | None = None) -> Keep | None:
    """The function by which the tensors of a large model are kept in memory; None for a model with fewer numbers.

    precision: see `load_llama_model`. Raises `UserError` for a model that is larger than the free memory.
    """
    if numbers < LARGE:
        return None
    # None: it is trained, or the smallest
    smaller = {"fp32": "int8", "bf16": "int8", "int8": "int4"}.get(precision or "")
    remedy = f"use --precision {smaller}, or a smaller model" if smaller else "use a smaller model"
    require_memory(path, numbers * BYTES[precision or "fp32"], precision or "fp32", remedy)
    if precision is None:
        return lambda _, tensor: tensor.to(torch.float32, copy=True)  # not in the mapped file, which may change
    compacted = import_part("fast.compact", f"the precision {precision}").compacted
    return lambda name, tensor: compacted(name, tensor, precision)


def fill(model: nn.Module, llama: Llama, state: dict[str, torch.Tensor], keep: Keep) -> list[str]:
    """Give a model on device "meta" the tensors of `state`, one after another, so that none lies in memory twice.

    llama: the part of `model`, or the model itself, that has embeddings. Returns the names of damaged tensors.
    """
    twin = next(name for name, part in model.named_modules() if part is llama.tok_embeddings) + ".weight"
    if llama.config.tied:
        del state[twin]
    damaged = []
    for name in list(state):
        tensor = state.pop(name)
        kept = keep(name, tensor)
        if not is_finite(kept):
            damaged.append(name)
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, nn.Parameter(kept, requires_grad=type(kept) is torch.Tensor))
        if kept.data_ptr() != tensor.data_ptr():
            forget_pages(tensor)
    if llama.config.tied:
        llama.tok_embeddings.weight = llama.output.weight
    return damaged


# ------------------------------------------------------------------------------------------- checks of a file's content


def blueprint(config: Checks, make: Callable[[Any], Model]) -> Model:
    """A model of this config on device "meta": names, shapes and settings, no numbers. It draws no random numbers."""
    with undrawn():
        return make(config)


@contextmanager
def undrawn() -> Iterator[None]:
    """Inside it, models are made on device "meta", and no random numbers are drawn."""
    with torch.device("meta"), Unfilled():
        yield


class Unfilled(TorchFunctionMode):
    """Inside it, PyTorch's functions that draw or fill weights do nothing. (On "meta" they import large modules.)"""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in ("kaiming_uniform_", "normal_", "uniform_", "fill_", "zero_"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def shape_errors(state: dict, config: LlamaConfig) -> list[str]:
    """The reasons why `state` does not fit a Llama of this config, found without allocating a model."""
    found = shape_errors_of(state, config, Llama)
    if config.tied and not found and not are_equal(state["tok_embeddings.weight"], state["output.weight"]):
        found.append("tok_embeddings.weight and output.weight differ, but this model ties them")
    return found


def shape_errors_of(
    state: dict,
    config: Checks,
    make: Callable[[Any], nn.Module],
    sizes: Iterable[str] = ("vocab_size", "dim", "hidden_dim"),
) -> list[str]:
    """The reasons why `state` does not fit `make(config)`, found without allocating a model.

    sizes: fields of the config; each is the size of a dimension of some matrix.
    """
    most = max((tensor.numel() for tensor in state.values() if not _tensor_error(tensor)), default=0)
    if too_much := _asks_for_too_much(config, len(state), most, sizes):
        return [*tensor_errors(state), too_much]
    return state_dict_errors(state, blueprint(config, make).state_dict())


def state_dict_errors(state: dict, expected: dict[str, torch.Tensor]) -> list[str]:
    """All errors of a state dict: unusable tensors, then missing and unexpected names, then other shapes."""
    found = tensor_errors(state)
    found += [f"missing {name}" for name in expected if name not in state]
    found += [f"unexpected {name}" for name in state if name not in expected]
    for name, tensor in state.items():
        if name in expected and not _tensor_error(tensor) and tensor.shape != expected[name].shape:
            found.append(f"{name} is {list(tensor.shape)}, not {list(expected[name].shape)}")
    return found


def tensor_errors(state: dict) -> list[str]:
    """The entries that are not usable tensors, each with the reason."""
    return [f"{name} {fault}" for name, tensor in state.items() if (fault := _tensor_error(tensor))]


def _tensor_error(tensor: Any) -> str | None:
    """The reason why a value is not a usable tensor; None if it is."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
        return "is not a floating-point tensor of 16 bits or more"
    return None if _is_stored_in_full(tensor) else "does not hold the numbers that its shape promises"


def _asks_for_too_much(config: Checks, tensors: int, most: int, sizes: Iterable[str]) -> str | None:
    """The reason why a config is too large for a file, else None: a damaged config may ask for a million layers.

    tensors: the number of tensors in the file. most: the number of elements of the largest.
    """
    if config.n_layers > tensors:
        return f"n_layers={config.n_layers}, but there are only {tensors} tensors"
    too_large = [f"{name}={size}" for name in sizes if (size := getattr(config, name)) > most]
    return f"{too_large[0]}, but the largest tensor has only {most} numbers" if too_large else None


def _is_stored_in_full(tensor: torch.Tensor) -> bool:
    """False for a tensor that is sparse, has no data (device "meta"), or expands a few numbers to a large shape."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    if hasattr(tensor, "stored"):  # compact: this process has made it
        return True
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride()):
        return True
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def is_finite(tensor: torch.Tensor) -> bool:
    if (stored := getattr(tensor, "stored", None)) is not None:  # a compact one: a row's scale is as finite as the row
        scale = getattr(tensor, "scale", None)
        tensor = stored if scale is None else scale
    # a sum is not finite if one number is not, and takes a tenth of the time; finite numbers can have an infinite sum
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())
