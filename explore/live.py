"""A model as a page that computes: its weights, its tokenizer and the switches, as `page/live/*.js` read them."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from classifier import LlamaEmbeddingClassifier, LlamaZeroShotClassifier
from engine.families import reads_last
from engine.programs import import_part
from explore.broken import BREAKS, Break
from explore.decision import MOST_TOKENS, OCCLUDED_POSITIONS
from explore.inspected import InspectedModel, page_of_rope
from explore.page import MAX_LIVE_BYTES
from explore.unedited import check_unedited
from llama import Llama
from utils import UserError

ROOT = Path(__file__).resolve().parent.parent
CONFIG = (
    "attention", "n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "hidden_dim", "vocab_size", "max_seq_len",
    "layer_norm_eps", "rope_theta", "rope_scaling", "tied",
)  # fmt: skip


def live_page(inspected: InspectedModel, text: str, bits: int, out: str) -> tuple[dict[str, Any], bytes]:
    """The content of the page, and the weights. bits: 16 or 8 for each. out: the page's file, for its links.

    Raises `UserError` for a model that is too large, or that the page cannot compute: one of edited code, for example.
    """
    tensors = tensors_of(inspected)
    size = sum(tensor.numel() for tensor in tensors.values()) * bits // 8
    if size * 4 / 3 > MAX_LIVE_BYTES:  # base64 has four letters for three bytes
        smaller = ", or --bits 8" if bits == 16 and size * 2 / 3 < MAX_LIVE_BYTES else ""
        raise UserError(
            f"the page would have {size * 4 / 3e6:.0f} MB, and {MAX_LIVE_BYTES / 1e6:.0f} MB is the most; "
            f"use --serve, which leaves the weights here{smaller}"
        )
    check_unedited(inspected, tensors)
    listed, weights = packed_tensors(tensors, bits)
    live = live_of(inspected, text, out) | {"tensors": listed}
    live |= {"tokenizer": page_of_tokenizer(inspected.tokenizer), "classifier": page_of_classifier(inspected)}
    return {"model": inspected.facts(), "rope": page_of_rope(inspected.llama), "pieces": {}, "live": live}, weights


def live_of(inspected: InspectedModel, text: str, out: str | None) -> dict[str, Any]:
    """What the page knows of a model without its weights. out: None for a served page, which has no links."""
    config = inspected.llama.config
    tokenizer = inspected.tokenizer
    return {
        "config": {name: getattr(config, name) for name in CONFIG},
        "text": text,
        "bos": 0 if tokenizer is None else tokenizer.bos_id,
        "stops": [] if tokenizer is None else [tokenizer.eos_id],
        "breaks": [page_of_break(name, each, out) for name, each in BREAKS.items()],
    }


def page_of_break(name: str, each: Break, out: str | None) -> dict[str, Any]:
    """line: of the code that it changes, 0 where that code was edited. link: to the component's page."""
    lines = (ROOT / each.file).read_text(encoding="utf-8").splitlines()
    line, code = next(((at, line.strip()) for at, line in enumerate(lines, 1) if each.code in line), (0, each.code))
    page = ROOT / "docs" / "components" / each.page
    is_near = out is not None and Path(out).resolve().is_relative_to(ROOT)
    link = Path(os.path.relpath(page, Path(out).resolve().parent)) if is_near else page.relative_to(ROOT)
    return {"name": name, "file": each.file, "line": line, "code": code, "link": link.as_posix(), "is_link": is_near}


# ------------------------------------------------------------------------------------------------- weights


def tensors_of(inspected: InspectedModel) -> dict[str, torch.Tensor]:
    """The Llama's tensors by name, the shared matrix once; of a trained head "head.weight" and "head.bias"."""
    llama, model = inspected.llama, inspected.classifier
    if type(llama) is not Llama or any(hasattr(module, "parametrizations") for module in llama.modules()):
        raise UserError(f"{inspected.name} is changed by a method, which the page cannot compute; use --serve")
    if llama.config.norm != "rms":
        raise UserError(f"{inspected.name} has LayerNorm, which the page cannot compute; use --serve")
    tensors = dict(llama.state_dict())
    if llama.config.tied:
        tensors.pop("output.weight", None)
    if set(tensors) - {f"{name}.weight" for name in _names(llama)}:
        raise UserError(f"{inspected.name} has weights of a method, which the page cannot compute; use --serve")
    if isinstance(model, LlamaEmbeddingClassifier):
        tensors |= {f"head.{name}": tensor for name, tensor in model.classifier_head.state_dict().items()}
    return {name: tensor.detach().float().cpu() for name, tensor in tensors.items()}


def _names(llama: Llama) -> Iterator[str]:
    yield from ("tok_embeddings", "output", "norm")
    for layer in range(llama.config.n_layers):
        for part in ("attention_norm", "ffn_norm", *(f"feed_forward.w{number}" for number in (1, 2, 3))):
            yield f"layers.{layer}.{part}"
        yield from (f"layers.{layer}.attention.compute_{kind}" for kind in ("query", "key", "value", "output"))


def packed_tensors(tensors: dict[str, torch.Tensor], bits: int) -> tuple[list[dict[str, Any]], bytes]:
    """The tensors as bytes, and where each begins. Matrices have 16 or 8 bits for a number, vectors 32."""
    listed, parts, at = [], [], 0
    for name, tensor in tensors.items():
        kind = "f32" if tensor.dim() == 1 else "f16" if bits == 16 else "q8"
        rows, columns = (1, len(tensor)) if tensor.dim() == 1 else tensor.shape
        listed.append({"name": name, "kind": kind, "at": at, "rows": rows, "columns": columns})
        parts.append(to_bytes(tensor, kind))
        at += len(parts[-1])
    return listed, b"".join(parts)


def to_bytes(tensor: torch.Tensor, kind: str) -> bytes:
    """Little-endian. q8: whole numbers from -127 to 127, then the unit of each row as float32."""
    if kind != "q8":
        return tensor.to(torch.float32 if kind == "f32" else torch.float16).numpy().tobytes()
    whole, units = in_8_bits(tensor)
    return whole.numpy().tobytes() + units.numpy().tobytes()


def in_8_bits(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as whole numbers (int8) times a unit for each row. m n -> m n, m 1"""
    units = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (tensor / units).round().to(torch.int8), units


# ------------------------------------------------------------------------------------- tokenizer and classifier


def page_of_tokenizer(tokenizer: Any) -> dict[str, Any] | None:
    """See page/live/tokenizer.js. None: texts are token ids. Raises `UserError` for a kind that is not there."""
    if tokenizer is None:
        return None
    if not hasattr(tokenizer, "sp_model"):
        from explore.live_bpe import page_of_json_tokenizer

        return page_of_json_tokenizer(tokenizer)
    vocabulary = import_part("convert.vocabulary", "a live page")
    model = tokenizer.sp_model
    pieces, types = vocabulary.pieces_and_types(model, tokenizer.model_path)
    scores = [model.get_score(id) for id in range(len(pieces))]
    if vocabulary.USER_DEFINED in types or not vocabulary.is_bpe(scores, types):
        raise UserError(f"{tokenizer.model_path} is no plain BPE model, which the page reads alone; use --serve")
    return {
        "kind": "sentencepiece", "pieces": pieces, "scores": [int(score) for score in scores], "types": types,
        "rules": base64.b64encode(vocabulary.rewriting_rules(model.serialized_model_proto())).decode(),
        "addsSpace": model.encode("a", out_type=str)[0].startswith("\u2581"),
        "strips": model.encode("a  a") == model.encode("a a"),
        "begins": [tokenizer.bos_id],
        "special": [id for id, kind in enumerate(types) if kind == vocabulary.CONTROL],
    }  # fmt: skip


def page_of_classifier(inspected: InspectedModel) -> dict[str, Any] | None:
    """How the classifier reads a text and what it asks of the last state, see classifier.py. None: there is none."""
    model = inspected.classifier
    if model is None:
        return None
    if not isinstance(model, (LlamaEmbeddingClassifier, LlamaZeroShotClassifier)) or not reads_last(model):
        raise UserError(f"{inspected.name} has a head of advanced/, which the page cannot compute; use --serve")
    tokenizer = inspected.tokenizer
    return {
        "suffix": model.prompt_suffix,
        "maxLen": tokenizer.max_len,
        "bos": getattr(tokenizer, "begins", [tokenizer.bos_id]),
        "pad": tokenizer.pad_id,
        "labelIds": getattr(model, "label_name_ids", None),
        "mostTokens": max(MOST_TOKENS, inspected.llama.config.max_seq_len),
        "occludedPositions": OCCLUDED_POSITIONS,
    }
