"""LoRA adapters in the format of Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`.

An adapter is the update of a model that lies elsewhere, its base, under the names and in the order of rows that the
base has in its directory. Reading merges it into the base's tensors, before these become a model:

    W <- W + s B A          s = alpha / r, or alpha / sqrt(r) with use_rslora
    W <- m (W + s B A) / |W + s B A|, row by row      with use_dora

Which matrices are updated, and with which rank, is what the file of the weights holds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from convert import directory
from convert.directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS, State, bare_name, read_settings
from convert.formats import require_causal, whole
from convert.patterns import first_matches
from engine.programs import import_part
from utils import UserError, join_names, short_repr, shorten, warn

if TYPE_CHECKING:
    import torch
    from torch import nn

    from engine.methods import Method

READ_HERE = {"r": 8, "lora_alpha": 8, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "use_dora": False}
WITHOUT_EFFECT = (  # on what is computed from the weights of the file
    *("peft_type", "peft_version", "task_type", "inference_mode", "base_model_name_or_path", "revision"),
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "auto_mapping", "megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
)
HARMLESS = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}  # others change the base
FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_(A\.weight|B\.weight|magnitude_vector)(?:\.weight)?")
MOST = 1e6  # of a rank, or an alpha


# ------------------------------------------------------------------------------------------------------ reading


def read_tensors(folder: Path, base: Path) -> tuple[Path, State]:
    """`directory.read_tensors`; of an adapter (its folder is not its base's) the base's tensors with the update."""
    file, tensors = directory.read_tensors(base)
    if folder == base or not os.path.lexists(folder / ADAPTER_CONFIG):
        return file, tensors
    settings = read_adapter_config(folder / ADAPTER_CONFIG)
    file = directory.adapter_weights(folder)
    updates, others = _sorted_out(file)
    alphas = settings["alpha_pattern"]  # ranks are those of the factors, whatever rank_pattern says
    patterns = first_matches([*alphas], updates, f"{settings['file']}: alpha_pattern")
    places = {bare_name(name): name for name in tensors}
    for module, factors in updates.items():
        if (name := places.get(bare_name(f"{module}.weight"))) is None:
            raise UserError(f"{file} updates {shorten(module)}, which {base} does not have")
        scale = _scale(module, factors, settings, alphas.get(patterns[module], settings["lora_alpha"]))
        tensors[name] = _updated(f"{file}: {shorten(module)}", tensors[name], factors, scale)
    for name, tensor in directory.without_heads(file, others, places).items():
        if (place := places.get(bare_name(name))) is None:
            raise UserError(f"{file} holds {shorten(name)}, which {base} does not have")
        if bare_name(place) == "embed_tokens.weight" and "lm_head.weight" not in places:  # PEFT unties them
            raise UserError(f"{file} holds {shorten(name)}, which in {base} is the output matrix as well")
        tensors[place] = tensor
    return file, tensors


def read_adapter_config(file: Path) -> dict[str, Any]:
    """The settings by which an update is merged. Raises `UserError` for those that ask for something else."""
    said = read_settings(file)
    if (kind := said.get("peft_type")) != "LORA":
        raise UserError(f"{file} describes an adapter of the kind {short_repr(kind)}; LORA is known here")
    for name, value in said.items():
        is_empty = value is None or value is False or value in ("", [], {})
        if not (is_empty or name in READ_HERE or name in WITHOUT_EFFECT or value in HARMLESS.get(name, ())):
            raise UserError(f"{file}: {shorten(name)}={short_repr(value)} is nothing that is known here")
    settings = {name: said.get(name, default) for name, default in READ_HERE.items()}
    patterns = [settings.get("alpha_pattern") or {}, settings.get("rank_pattern") or {}]
    numbers = [settings["r"], settings["lora_alpha"]]
    for pattern in patterns:
        numbers += pattern.values() if isinstance(pattern, dict) else [None]
    if not all(type(number) in (int, float) and abs(number) <= MOST for number in numbers):
        raise UserError(f"{file}: r, lora_alpha, rank_pattern and alpha_pattern must be numbers up to {MOST:g}")
    if any(type(settings[name]) is not bool for name in ("use_rslora", "use_dora")):
        raise UserError(f"{file}: use_rslora and use_dora must be true or false")
    return {**settings, "alpha_pattern": patterns[0], "rank_pattern": patterns[1], "file": file}


def _sorted_out(file: Path) -> tuple[dict[str, State], State]:
    """The factors of each module, and whole tensors under their names in the model. Raises `UserError`."""
    from engine.weights import tensor_errors

    tensors = directory.read_file(file)
    updates: dict[str, State] = {}
    others: State = {}
    foreign = tensor_errors(tensors)
    for name, tensor in tensors.items():
        if found := FACTOR.fullmatch(str(name)):
            updates.setdefault(found[1], {})[found[2]] = tensor
        elif str(name).startswith("base_model.model.") and ".lora_" not in name:
            others[name.removeprefix("base_model.model.")] = tensor
        else:
            foreign.append(f"{shorten(str(name))}, which no LoRA of matrices has")
    if foreign:
        raise UserError(f"{file} does not fit: {join_names(foreign)}")
    return updates, others


def _scale(module: str, factors: State, settings: dict[str, Any], alpha: float) -> float:
    """s. Raises `UserError` where a factor has another rank than the config says."""
    rank = len(factors.get("A.weight", ()))
    if settings["use_dora"] != ("magnitude_vector" in factors):
        raise UserError(f"{settings['file']}: use_dora={settings['use_dora']} does not fit {shorten(module)}")
    if rank < 1 or not settings["rank_pattern"] and rank != settings["r"]:
        raise UserError(f"{settings['file']}: r={settings['r']}, but {shorten(module)} has factors of rank {rank}")
    return alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)


def _updated(what: str, weight: torch.Tensor, factors: State, scale: float) -> torch.Tensor:
    """The matrix with its update: o i. Raises `UserError` for factors that do not fit it."""
    import torch

    shape, rank = [*getattr(weight, "shape", ())], len(factors.get("A.weight", ()))
    wanted = {"A.weight": [rank, *shape[1:]], "B.weight": [*shape[:1], rank]}
    wanted |= {"magnitude_vector": shape[:1]} if "magnitude_vector" in factors else {}
    found = {name: [*factor.shape] for name, factor in factors.items()}
    if len(shape) != 2 or not weight.is_floating_point() or found != wanted:
        raise UserError(f"{what} is {shape}, which its factors do not fit: {short_repr(found)}")
    updated = weight.float() + scale * (factors["B.weight"].float() @ factors["A.weight"].float())
    if "magnitude_vector" not in factors:
        return updated
    sizes = torch.linalg.vector_norm(updated, dim=1)  # o
    return (factors["magnitude_vector"].float() / sizes)[:, None] * updated


# ------------------------------------------------------------------------------------------------------ writing


class TheirModel(NamedTuple):
    """The model of transformers that an adapter is for.

    task: its kind for PEFT. theirs: from our name of a module of the pretrained model to its name there. heads: how
    many heads a module's rows are, if they have another order there, else None. head: what is trained of its head.
    """

    task: str
    theirs: Callable[[str], str]
    heads: Callable[[str], int | None]
    head: State


def write(out: str | os.PathLike, path: str, base: str, attention: str | None = None) -> None:
    """Write what LoRA has learned in a saved classifier as an adapter of its base, whole or not at all.

    path: of the saved classifier. base: the directory of the model that it was trained from; the adapter names it so.
    attention: "causal" takes a bidirectional Llama for a causal one. The head is a part of the adapter if transformers
    has the same head.

    Raises `UserError` if nothing was kept of LoRA, if PEFT cannot say the model, or if the base is another one.
    """
    from engine.methods import pretrained_of

    model, lora, factors = _trained(path)
    pretrained = pretrained_of(model)
    if hasattr(model, "llama") and attention is None:
        require_causal(pretrained.config, "a Llama in transformers")
    theirs = _model_of_llama(pretrained) if hasattr(model, "llama") else _model_of_bert(model)
    _move_to_base(model, lora, factors, path, base)
    settings, tensors = _content(pretrained, lora, theirs)
    settings |= {"base_model_name_or_path": base, "task_type": theirs.task}
    settings["modules_to_save"] = sorted({name.partition(".")[0] for name in theirs.head}) or None
    tensors |= {f"base_model.model.{name}": tensor for name, tensor in theirs.head.items()}
    if not theirs.head and hasattr(model, "classifier_head"):
        warn(f"the head of {path} is left out: transformers has none that computes the same")
    with whole(out) as folder:
        directory.write_model(folder, settings, tensors, names=(ADAPTER_CONFIG, ADAPTER_WEIGHTS[0]))


def _trained(path: str) -> tuple[nn.Module, Method, State]:
    """A saved classifier, the method that trained it, and its factors."""
    from engine.families import create_methods
    from engine.runs import load_classifier
    from engine.storage import load_tensors

    model, _ = load_classifier(path)
    saved: Any = load_tensors(path)
    if others := [*saved["methods"]]:
        raise UserError(f"{path} needs {join_names(others)} as well, which PEFT's format cannot say")
    kept = saved.get("kept")
    kept = kept.get("lora") if isinstance(kept, dict) else None
    if not isinstance(kept, dict):
        why = "it was trained without --method lora, or by an older version"
        raise UserError(f"{path} keeps no factors of LoRA: {why}")
    settings, factors = kept.get("settings"), kept.get("tensors")
    if not isinstance(settings, dict) or not isinstance(factors, dict):
        raise UserError(f"{path} is damaged in what it keeps of LoRA")
    (lora,) = create_methods([("lora", settings)])
    return model, lora, factors


def _move_to_base(model: nn.Module, lora: Method, factors: State, path: str, base: str) -> None:
    """Give the model the weights of the base, and the factors beside them. Raises `UserError` if these do not fit."""
    from engine.methods import pretrained_of
    from engine.weights import load_llama_model, state_dict_errors

    pretrained = pretrained_of(model)
    own = {name: tensor.clone() for name, tensor in pretrained.state_dict().items()}
    is_llama = hasattr(model, "llama")
    load = partial(load_llama_model, needs_output=False) if is_llama else import_part("bert.load", "a BERT").load_bert
    weights = load(base).state_dict()
    if not (differing := state_dict_errors(weights, own)):
        pretrained.load_state_dict(weights)
        lora.prepare(model)
        added = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
        if found := state_dict_errors(factors, added):
            raise UserError(f"{path} is damaged in what it keeps of LoRA: {join_names(found)}")
        model.load_state_dict(factors, strict=False)
        with lora.evaluation_weights(model):
            merged = pretrained.state_dict()
            differing = [name for name in own if not _is_near(merged[name], own[name])]
    if differing:
        raise UserError(f"{base} with LoRA's update is not the model of {path}; name its base. Other is {differing[0]}")


def _is_near(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """Up to the rounding of a base in bfloat16."""
    return bool((tensor - own).abs().max() <= 0.01 * own.abs().max())


def _model_of_llama(llama: nn.Module) -> TheirModel:
    from convert.names import all_names, rotated_heads

    names = {names.ours: names.hugging_face.removesuffix(".weight") for names in all_names(llama.config)}

    def heads(name: str) -> int | None:
        return rotated_heads(f"{name}.weight", llama.config)

    return TheirModel("CAUSAL_LM", lambda name: names[f"{name}.weight"], heads, {})


def _model_of_bert(model: nn.Module) -> TheirModel:
    config = model.encoder.config
    layout = import_part("bert.names", "a BERT").layout_of(config)
    if layout.name == "textbook-bert":
        raise UserError("transformers has no model for a BERT of this shape")
    head = {}
    if layout.name == "distilbert" or config.has_pooler:
        own = ("classifier.", "transform.")
        head = {layout.theirs(name): each for name, each in model.state_dict().items() if name.startswith(own)}
    before = f"{layout.name}." if head else ""  # that of a model with a head
    return TheirModel(
        "SEQ_CLS" if head else "FEATURE_EXTRACTION",
        lambda name: before + layout.theirs(f"{name}.weight").removesuffix(".weight"), lambda name: None, head,
    )  # fmt: skip


def _content(pretrained: nn.Module, lora: Method, model: TheirModel) -> tuple[dict[str, Any], State]:
    """Settings and tensors. What pissa has learned beside its first factors is an update of twice the rank."""
    import torch

    from convert.names import half_rotation_rows

    tensors, updated, every = {}, [], []
    for name, layer in pretrained.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        every.append(model.theirs(name))
        if not hasattr(layer, "lora_A"):
            continue
        updated.append(every[-1])
        a, b = layer.lora_A.detach(), layer.lora_B.detach()
        if hasattr(layer, "lora_A0"):
            a, b = torch.cat((a, layer.lora_A0)), torch.cat((b, -layer.lora_B0), dim=1)
        factors = {"lora_A.weight": a, "lora_B.weight": b}
        if hasattr(layer, "lora_magnitude"):
            factors["lora_magnitude_vector"] = layer.lora_magnitude.detach()
        for kind, factor in factors.items():
            if kind != "lora_A.weight" and (heads := model.heads(name)):
                factor = half_rotation_rows(factor, heads)
            tensors[f"base_model.model.{updated[-1]}.{kind}"] = factor.contiguous()
    rank, alpha = len(a), lora.settings["alpha"] * len(a) / lora.rank
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.settings["variant"] == "rslora",
        "use_dora": lora.settings["variant"] == "dora",
        "target_modules": _targets(updated, every),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return settings, tensors


def _targets(updated: list[str], every: list[str]) -> list[str]:
    """The last parts of the modules' names if these name no others, else the whole names."""
    last = {name.rpartition(".")[2] for name in updated}
    named = [name for name in every if name.rpartition(".")[2] in last]
    return sorted(last) if named == updated else updated
