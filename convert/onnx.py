"""A fine-tuned classifier as an ONNX file: token ids b s -> log-probabilities b c, any batch and any length.

Both kinds of attention can be said in ONNX. Complex numbers cannot, so the rotation of `rope.py` is written here with
real ones; the rest is the modules of `llama.py`, called in its order. The exported model is first compared with the
classifier, so that an edit of llama.py that this file does not know of ends in an error, and not in another model.

Shapes:
    b batch   s position   h heads   g key/value heads   d head dim   D model dim   c classes
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from base_llama import sequence_lengths
from classifier import LlamaEmbeddingClassifier
from llama import Attention, LlamaLayer
from rope import frequencies
from utils import UserError, atomic_write

if TYPE_CHECKING:
    from engine.runs import SavedRun

OPSET = 18
MOST_ONNX_BYTES = 2**31  # of a protocol buffer
ONNX_TOLERANCE = 1e-4  # between log-probabilities: float32 sums in another order


# ------------------------------------------------------------------------------------------- what is written


class RealClassifier(nn.Module):
    """A `LlamaEmbeddingClassifier` in evaluation mode, without complex numbers."""

    def __init__(self, classifier: LlamaEmbeddingClassifier):
        super().__init__()
        self.classifier = classifier
        config = classifier.llama.config
        angles = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)  # d/2
        self.register_buffer("frequencies", angles, persistent=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: b s, padded as the classifier's batches are -> log-probabilities b c"""
        model, llama = self.classifier, self.classifier.llama
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)  # s
        angles = (positions[:, None].float() * self.frequencies)[:, None]  # s 1 d/2: one angle for all heads
        mask = positions[:, None] >= positions if llama.config.is_causal else None  # s s
        h = llama.tok_embeddings(token_ids.masked_fill(token_ids == -1, 0))  # b s D
        for layer in llama.layers:
            h = _layer(layer, h, angles, mask)
        if llama.config.is_causal:
            last = sequence_lengths(token_ids, model.pad_id) - 1  # b
        else:
            last = torch.full_like(token_ids[:, 0], 0) + positions[-1]  # b
        at = last[:, None, None].expand(-1, 1, h.shape[-1])  # b 1 D
        h = llama.norm(h.gather(1, at))[:, 0]  # b D
        return F.log_softmax(model.classifier_head(h), dim=-1)


def _layer(layer: LlamaLayer, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """As `LlamaLayer.forward`. x: b s D -> b s D"""
    h = x + _attention(layer.attention, layer.attention_norm(x), angles, mask)
    return h + layer.feed_forward(layer.ffn_norm(h))


def _attention(part: Attention, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """As `Attention.forward`. x: b s D -> b s D"""
    query = rotate(part.compute_query(x).unflatten(-1, (part.n_heads, part.head_dim)), angles).transpose(1, 2)
    key = rotate(part.compute_key(x).unflatten(-1, (part.n_kv_heads, part.head_dim)), angles).transpose(1, 2)
    value = part.compute_value(x).unflatten(-1, (part.n_kv_heads, part.head_dim)).transpose(1, 2)  # b g s d
    if part.n_rep > 1:  # `repeat_interleave`, in words that ONNX has
        repeated = (x[:, :, None].expand(-1, -1, part.n_rep, -1, -1).flatten(1, 2) for x in (key, value))
        key, value = repeated  # b h s d
    seen = () if mask is None else (mask,)
    output = part.compute_query_key_value_scores(query, key, value, *seen)  # b h s d
    return part.compute_output(output.transpose(1, 2).flatten(-2))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """rope.py's rotation in real numbers: (x1 + i x2)(cos a + i sin a), written out. x: b s h d, angles: s 1 d/2"""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)  # b s h d/2
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)


# -------------------------------------------------------------------------------------------------- writing it


def write(path: str | os.PathLike, classifier: nn.Module, about: SavedRun) -> None:
    """Write a classifier that `engine.load_classifier` has loaded. Raises `UserError` for other kinds."""
    _import_onnx()
    size = sum(4 * parameter.numel() for parameter in classifier.parameters())
    if size >= MOST_ONNX_BYTES:
        raise UserError(f"this classifier has {size} bytes of weights; one ONNX file holds less than {MOST_ONNX_BYTES}")
    if type(classifier) is not LlamaEmbeddingClassifier:
        raise UserError(f"a {type(classifier).__name__} is not written as ONNX; what --option finetune saves is")
    model = RealClassifier(classifier).eval()
    require_equal(model, classifier)
    with atomic_write(path, "wb") as file:
        file.write(_exported(model, about))


@torch.inference_mode()
def require_equal(model: RealClassifier, classifier: LlamaEmbeddingClassifier) -> None:
    """Raises `UserError` where the exported model and the classifier differ on a batch of random tokens."""
    config = classifier.llama.config
    generator = torch.Generator().manual_seed(0)
    length = min(config.max_seq_len, 24)
    token_ids = torch.randint(0, config.vocab_size, (3, length), generator=generator)  # b s
    for row in range(1, 3):
        token_ids[row, length * row // 3 :] = classifier.pad_id
    if not torch.allclose(model(token_ids), classifier(token_ids), rtol=0, atol=ONNX_TOLERANCE):
        reason = "methods that are part of it, or edits of llama.py or rope.py, have no place there"
        raise UserError(f"this classifier computes something else than what would be written as ONNX: {reason}")


def _exported(model: RealClassifier, about: SavedRun) -> bytes:
    token_ids = torch.ones(2, 7, dtype=torch.long)  # b s: any
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    with _quietly():
        program = torch.onnx.export(
            model, (token_ids,), input_names=["token_ids"], output_names=["log_probabilities"],
            dynamic_shapes=(sizes,), opset_version=OPSET, dynamo=True, optimize=True, verbose=False,
        )  # fmt: skip
    proto = program.model_proto
    for name, value in _metadata(model, about).items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = name, value
    return proto.SerializeToString()


def _metadata(model: RealClassifier, about: SavedRun) -> dict[str, str]:
    """Settings from which a program that runs the file makes its batches."""
    config = model.classifier.llama.config
    return {
        "labels": json.dumps(list(about.label_names)),
        "attention": config.attention,
        "pad_id": str(model.classifier.pad_id),
        "max_seq_len": str(config.max_seq_len),
    }


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's log and its warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _import_onnx() -> None:
    try:
        import onnx
        import onnxscript
    except ImportError:
        raise UserError("an ONNX file needs two packages: pip install onnx onnxscript") from None
    del onnx, onnxscript
