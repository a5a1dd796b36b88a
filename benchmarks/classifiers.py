"""Other programs that classify and train, in processes of their own: OpenVINO, and what `torch.compile` makes.

OpenVINO (github.com/openvinotoolkit/openvino) is imported when it is needed.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks import peers
from benchmarks.table import HF, HF_BF16, NUM_LABELS
from bert.heads import BertForSequenceClassification
from bert.model import Bert
from classifier import LlamaEmbeddingClassifier
from config import LlamaConfig
from convert.onnx import RealClassifier
from fast.attention import fuse_attention
from fast.compact import keep_freed_memory
from llama import Llama

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.apart import LibraryModel

TRACED_BELOW = 128  # numbers of a hidden state


def our_classifier(model: LibraryModel) -> LlamaEmbeddingClassifier:
    """Ours as the root modules have it."""
    settings = SimpleNamespace(num_labels=NUM_LABELS, hidden_dropout_prob=0.0, option="finetune")
    classifier = LlamaEmbeddingClassifier(settings, llama=Llama(model.config)).eval()
    classifier.load_state_dict(model.state)
    return classifier


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


def bert_module(model: LibraryModel) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The classifier, and an example of its two inputs."""
    classifier = BertForSequenceClassification(Bert(model.config), NUM_LABELS).eval()
    classifier.load_state_dict(model.state)
    ids = torch.ones(2, 9, dtype=torch.long)
    return MaskedBert(classifier), (ids, ids)


class Compiled:
    """Hugging Face's classifier, compiled by PyTorch for the shape of a batch at its first call.

    `model.dtype`: "fp32", "bf16" (weights) or "autocast". A tiny model is traced only: compiling C++ takes a minute a
    batch.
    """

    def __init__(self, model: LibraryModel):
        torch.set_num_threads(model.threads)
        keep_freed_memory()  # as for all contenders in the process that measures
        name, precision = (HF, "fp32") if model.dtype == "fp32" else (HF_BF16, "bf16")
        contenders = peers.Peers(our_classifier(model).llama)
        theirs = contenders.classifier(name, precision, trains=model.dtype == "autocast")
        backend = "aot_eager" if model.config.dim < TRACED_BELOW else "inductor"
        self.model = torch.compile(theirs, backend=backend)
        self.optimizer = peers.optimizer(name, self.model)

    def classify(self, token_ids: np.ndarray) -> np.ndarray:
        """b s -> log-probabilities b c"""
        return peers.classify(self.model, torch.from_numpy(token_ids)).float().numpy()

    def train_step(self, token_ids: np.ndarray, labels: np.ndarray) -> None:
        """token_ids: b s, labels: b"""
        batch = peers.Batch((torch.from_numpy(token_ids),), torch.from_numpy(labels))
        peers.train_step(self.model, self.optimizer, batch)
