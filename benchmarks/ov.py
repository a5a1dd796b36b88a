"""OpenVINO (github.com/openvinotoolkit/openvino) as a contender; the package openvino is imported when needed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.targets import NUM_LABELS
from bert.heads import BertForSequenceClassification
from bert.model import Bert
from classifier import LlamaEmbeddingClassifier
from config import LlamaConfig
from convert.onnx import RealClassifier
from fast.attention import fuse_attention
from llama import Llama

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.apart import LibraryModel


class MaskedBert(nn.Module):
    """A BERT's classifier, without segments."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        """b s, b s -> b c"""
        return self.model(input_ids, None, padding_mask)


class OpenVino:
    """A classifier that OpenVINO's `convert_model` has traced. `model.dtype`: "f32" or "bf16", of its products.

    All positions of all layers are computed, by OpenVINO's own attention.
    """

    def __init__(self, model: LibraryModel):
        import openvino

        make = llama_module if isinstance(model.config, LlamaConfig) else bert_module
        with warnings.catch_warnings(), torch.no_grad():  # a trace in inference mode crashes
            warnings.simplefilter("ignore")  # of what a trace fixes: the same for every batch here
            module, example = make(model)
            module(*example)  # fused attention is compared with llama.py's before its first use, not in the trace
            converted = openvino.convert_model(module, example_input=example)
        settings = {"INFERENCE_PRECISION_HINT": model.dtype, "INFERENCE_NUM_THREADS": model.threads}
        self.compiled = openvino.Core().compile_model(converted, "CPU", {**settings, "PERFORMANCE_HINT": "LATENCY"})

    def classify(self, *inputs: np.ndarray) -> np.ndarray:
        """inputs: token ids, and BERT's padding mask, b s -> log-probabilities b c"""
        return self.compiled(list(inputs))[0]


def llama_module(model: LibraryModel) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The classifier with a rotation in real numbers, and an example of its input."""
    classifier = our_classifier(model)
    fuse_attention(classifier.llama)
    return RealClassifier(classifier).eval(), (torch.ones(2, 9, dtype=torch.long),)


def our_classifier(model: LibraryModel) -> LlamaEmbeddingClassifier:
    """Ours as the root modules have it."""
    settings = SimpleNamespace(num_labels=NUM_LABELS, hidden_dropout_prob=0.0, option="finetune")
    classifier = LlamaEmbeddingClassifier(settings, llama=Llama(model.config)).eval()
    classifier.load_state_dict(model.state)
    return classifier


def bert_module(model: LibraryModel) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The classifier, and an example of its two inputs."""
    classifier = BertForSequenceClassification(Bert(model.config), NUM_LABELS).eval()
    classifier.load_state_dict(model.state)
    ids = torch.ones(2, 9, dtype=torch.long)
    return MaskedBert(classifier), (ids, ids)
