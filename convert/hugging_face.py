"""Llamas as Hugging Face directories, read and written.

Their rotary embedding turns half-vectors where ours turns neighbours (see `rope.py`), so the rows of query and key
matrices are reordered, head by head, on the way in and on the way out; see docs/formats.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import ROPE_SCALINGS, LlamaConfig
from convert import directory, vocabulary
from convert.directory import CONFIG, State, base_folder, read_settings, require_base, stop_ids, write_model
from convert.formats import DTYPES, require_causal, require_finite, whole
from convert.peft import read_tensors
from utils import UserError, atomic_write, join_names, short_repr, shorten, warn

if TYPE_CHECKING:
    import torch

    from llama import Llama

LLAMA_SETTINGS = {  # our names: the names in `config.json`, and the values where it leaves them out
    "vocab_size": ("vocab_size", 32000),
    "dim": ("hidden_size", 4096),
    "hidden_dim": ("intermediate_size", 11008),
    "n_layers": ("num_hidden_layers", 32),
    "n_heads": ("num_attention_heads", 32),
    "n_kv_heads": ("num_key_value_heads", None),
    "max_seq_len": ("max_position_embeddings", 2048),
    "layer_norm_eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
}
HARMLESS = {  # settings that would change what is computed, each with the values that change nothing
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0,),
}
ANGLES_TABLE = re.compile(r"rotary_emb\.inv_freq$")  # older versions saved it beside the weights


def load_directory(
    path: str | os.PathLike,
    attention: str | None = None,
    base: str | os.PathLike | None = None,
    precision: str | None = None,
    needs_output: bool = True,
) -> Llama:
    """The Llama of a directory, on the CPU; causal unless `attention` says otherwise.

    The head of another task is left out, with a warning. Of an adapter it is the base with the update merged.
    base: the base's directory; None: the one that it names.
    precision, needs_output: see `engine.weights.load_llama_model`.
    Its attribute `stop_ids` has the tokens that end a text; a model of a checkpoint has no such attribute.
    Raises `UserError` if a file is missing or damaged, or describes another kind of model: every missing, unexpected
    or misshapen key is named.
    """
    from convert.names import interleaved_rows, rotated_heads
    from engine.weights import filled, keeper, numbers_in, shape_errors

    folder = base_folder(Path(path)) if base is None else require_base(Path(base))
    config = read_config(folder, attention)
    file, tensors = read_tensors(Path(path), folder)
    tensors = directory.without_heads(file, tensors)
    if not needs_output and "output.weight" not in map(our_name, map(str, tensors)):
        config = replace(config, tied=True)  # what it computes is not read
    state, foreign = _under_our_names(file, tensors, config.tied)
    if found := [*shape_errors(state, config), *(f"unexpected {shorten(name)}" for name in foreign)]:
        hint = "; --option finetune needs no head" if found == ["missing output.weight"] else ""
        raise UserError(f"{file} does not fit its {CONFIG}: {in_their_words(join_names(found))}{hint}")
    keep = keeper(file, numbers_in(state), precision)

    def turned(name: str, tensor: torch.Tensor) -> torch.Tensor:
        heads = rotated_heads(name, config)
        return tensor if heads is None else interleaved_rows(tensor, heads)

    if keep is None:
        state = {name: turned(name, tensor) for name, tensor in state.items()}
    model = filled(file, config, state, keep and (lambda name, tensor: keep(name, turned(name, tensor))))
    model.stop_ids = stop_ids(folder)
    return model


# ---------------------------------------------------------------------------------------------------- settings


def read_config(folder: Path, attention: str | None = None) -> LlamaConfig:
    """The config of a directory. Raises `UserError` that names a setting which no model here computes."""
    file = folder / CONFIG
    settings = read_settings(file)
    if (kind := settings.get("model_type")) != "llama":
        known = "llama is known here, and bert to bert.run"
        raise UserError(f"{file} describes a model of type {short_repr(kind)}; {known}")
    try:
        if attention is None and not settings.get("is_causal", True):
            raise ValueError("is_causal=false: every position sees all others; --attention bidirectional reads it so")
        return config_of(settings, attention or "causal")
    except ValueError as error:
        raise UserError(f"{file}: {in_their_words(str(error))}") from None


def config_of(settings: Mapping[str, Any], attention: str = "causal") -> LlamaConfig:
    """The config of a `config.json`. Raises `ValueError`."""
    for name, harmless in HARMLESS.items():
        if settings.get(name) is not None and settings[name] not in harmless:
            raise ValueError(f"{name}={short_repr(settings[name])}: no model here computes that")
    if dropout := settings.get("attention_dropout"):
        warn(f"attention_dropout={short_repr(dropout)} is for training alone, and is left out here")
    fields = {ours: settings.get(theirs, default) for ours, (theirs, default) in LLAMA_SETTINGS.items()}
    theta, scaling = _rope(settings)
    config = LlamaConfig(**fields, attention=attention, rope_theta=theta, rope_scaling=scaling)
    if settings.get("head_dim") not in (None, config.head_dim):
        which = f"hidden_size={config.dim} / num_attention_heads={config.n_heads}"
        raise ValueError(f"head_dim={short_repr(settings['head_dim'])} is not {which}: no model here computes that")
    return config


def _rope(settings: Mapping[str, Any]) -> tuple[Any, tuple | None]:
    """The base of the angles and their scaling, from the entries of old or of new files. Raises `ValueError`."""
    names = ("rope_scaling", "rope_parameters")  # transformers takes the older one alone where a file has both
    for name in names:
        if not isinstance(settings.get(name), dict | None):
            raise ValueError(f"{name}={short_repr(settings[name])} must be an object")
    said = next((settings[name] for name in names if settings.get(name)), {})
    theta = said.get("rope_theta", settings.get("rope_theta", 10000.0))
    if (factor := said.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"partial_rotary_factor={short_repr(factor)}: no model here computes that")
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        known = ", ".join(("default", *ROPE_SCALINGS))
        raise ValueError(f"rope_scaling of the kind {short_repr(kind)}: no model here computes that; known are {known}")
    if absent := [name for name in ROPE_SCALINGS[kind] if name not in said]:
        raise ValueError(f"rope_scaling of the kind {kind} has no {', '.join(absent)}")
    length = "original_max_position_embeddings"
    if length in ROPE_SCALINGS[kind] and settings.get(length, said[length]) != said[length]:
        raise ValueError(f"{length} is {short_repr(settings[length])} and, of the angles, {short_repr(said[length])}")
    return theta, (kind, *(said[name] for name in ROPE_SCALINGS[kind]))


def settings_of(config: LlamaConfig) -> dict[str, Any]:
    """The content of a `config.json`, for old versions of transformers and for new ones."""
    settings = {theirs: getattr(config, ours) for ours, (theirs, _) in LLAMA_SETTINGS.items()}
    rope = {"rope_type": "default"}
    if config.rope_scaling is not None:
        kind, *numbers = config.rope_scaling
        rope = {"rope_type": kind, **dict(zip(ROPE_SCALINGS[kind], numbers, strict=True))}
        if (length := "original_max_position_embeddings") in rope:
            rope[length] = int(rope[length])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **settings,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
    }


# ------------------------------------------------------------------------------------------------------- names


def _under_our_names(file: Path, tensors: Mapping[str, Any], tied: bool) -> tuple[State, list[str]]:
    """The state dict under our names, and names that no Llama has. Raises `UserError` for two names of one tensor."""
    from engine.weights import canonical_state

    known = {name: tensor for name, tensor in tensors.items() if our_name(str(name)) is not None}
    try:
        state = canonical_state(known, tied, our_name)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None
    return state, [str(name) for name in tensors if name not in known and not ANGLES_TABLE.search(str(name))]


def our_name(theirs: str) -> str | None:
    """Our name of a tensor, with or without what a model with a head puts in front: `model.`, `transformer.`."""
    from convert.names import LAYER_NAMES, MODEL_NAMES

    bare = re.sub(r"^(model|transformer)\.", "", theirs).removesuffix(".weight")
    body = f"model.{bare}".replace("model.lm_head", "lm_head")
    if not theirs.endswith(".weight"):
        return None
    if found := re.fullmatch(r"model\.layers\.([0-9]+)\.(.+)", body):
        parts = {names.hugging_face: names.ours for names in LAYER_NAMES}
        return f"layers.{found[1]}.{parts[found[2]]}.weight" if found[2] in parts else None
    whole = {names.hugging_face: names.ours for names in MODEL_NAMES}
    return f"{whole[body]}.weight" if body in whole else None


def in_their_words(message: str) -> str:
    """A message with their names of settings and tensors for ours: the reader can look them up in the file."""
    from convert.names import in_names_of

    message = re.sub(r"\b([a-z_]+)(?==)", lambda found: LLAMA_SETTINGS.get(found[1], (found[1],))[0], message)
    return in_names_of("hugging_face", message)


# ------------------------------------------------------------------------------------------------------ writing


def write(
    out: str | os.PathLike,
    state: Mapping[str, torch.Tensor],
    config: LlamaConfig,
    tokenizer: Any = None,
    dtype: str = DTYPES["hf"][0],
    stop_ids: Sequence[int] | None = None,
) -> None:
    """Write a directory, whole or not at all. dtype: of all tensors. tokenizer: of either kind that is read here.

    stop_ids: the tokens that end a text; None: eos of the tokenizer.
    Raises `UserError` for a bidirectional model, numbers that `dtype` cannot hold, and a tokenizer that transformers
    would read as another one.
    """
    require_causal(config, "a Hugging Face Llama")
    tensors, settings = tensors_of(state, config, dtype), settings_of(config)
    settings["dtype"] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype]
    beside = {}
    if tokenizer is not None:
        beside = tokenizer.files() if hasattr(tokenizer, "files") else vocabulary.files(tokenizer)
        settings |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    if stop_ids is not None:
        settings["eos_token_id"] = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids) or None
    with whole(out) as folder:
        write_model(folder, settings, tensors)
        for name, content in beside.items():
            with atomic_write(folder / name, "wb") as file:
                file.write(content)


def tensors_of(state: Mapping[str, torch.Tensor], config: LlamaConfig, dtype: str) -> State:
    """A state dict under their names, with one of two tied matrices. Raises `UserError` as `write`."""
    import torch

    from convert.names import hugging_face_state

    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    tensors = {}
    for name, tensor in hugging_face_state(dict(state), config).items():
        if name != "lm_head.weight" or not config.tied:
            tensors[name] = tensor.detach().to(kind).contiguous()
            require_finite(name, tensors[name], dtype)
    return tensors
