"""The contenders' models, all with the same weights, and the training step that all of them take."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from base_llama import sequence_lengths
from benchmarks import naive
from benchmarks.targets import NUM_LABELS
from classifier import PAD_ID, LlamaEmbeddingClassifier
from config import LlamaConfig
from engine.programs import import_part
from engine.runs import update_fast
from llama import Llama
from optimizer import AdamW
from utils import ROOT

if TYPE_CHECKING:
    from engine.decoding import Decoder

DROPOUT = 0.3
LEARNING_RATE = 2e-5
LLAMA_GAIN = 90.5  # times 1 / sqrt(dim): 4 for stories42M


def random_llama(config: LlamaConfig, seed: int) -> Llama:
    """A Llama whose layers matter: fresh ones barely move the residual stream, and decoding repeats one token."""
    torch.manual_seed(seed)
    model = Llama(config)
    gain = LLAMA_GAIN / math.sqrt(config.dim)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layers") and parameter.dim() == 2:
                parameter.mul_(gain)
    return model.eval()


def load_accelerate() -> Callable[..., list]:
    """`fast.accelerate`. Raises `UserError` if the folder fast/ is absent."""
    return import_part("fast", "python -m benchmarks").accelerate


def load_to_hf() -> Callable[..., nn.Module]:
    """`to_hf` of checkpoints/reference.py, which lies in no package."""
    folder = str(ROOT / "checkpoints")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from reference import to_hf

    return to_hf


class HFClassifier(nn.Module):
    """Hugging Face's Llama with the same head, read at the last real token.

    Every position of every layer is computed, as its sequence classification does; no next-token logits. Padding comes
    last and attention is causal, so that no padding mask is needed, and none is charged to it.
    """

    def __init__(self, llama: nn.Module, dim: int):
        super().__init__()
        self.llama = llama
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier_head = nn.Linear(dim, NUM_LABELS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: b s -> log-probabilities b c"""
        hidden_states = self.llama(input_ids, use_cache=False).last_hidden_state  # b s D
        last = sequence_lengths(input_ids, PAD_ID) - 1  # b
        read = hidden_states[torch.arange(len(last)), last]  # b D
        return F.log_softmax(self.classifier_head(self.dropout(read)), dim=-1)


class Autocast(nn.Module):
    """A model whose matrix products are bfloat16 while its weights stay float32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: b s -> b c, float32"""
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(input_ids).float()


class Peers:
    """Makes the contenders' models from one state dict. `kernels`: what was chosen, by precision and use."""

    def __init__(self, llama: Llama, seed: int = 0):
        self.config, self.seed = llama.config, seed
        self.state = {name: tensor.detach() for name, tensor in llama.state_dict().items()}
        self.kernels: dict[str, list[Any]] = {}

    def plain(self, attention: str = "causal", dtype: torch.dtype = torch.float32) -> Llama:
        """Ours as the root modules compute it, with PyTorch's fused attention and linear layers."""
        from fast.attention import fuse_attention

        llama = self._filled(Llama, attention)
        fuse_attention(llama)
        return llama.to(dtype)

    def ours(self, precision: str = "fp32", attention: str = "causal") -> Decoder:
        """What generates text with ours, whose kernels are chosen for that."""
        from fast import decoder

        llama, use = self._filled(Llama, attention), f"{precision}, {attention}, inference"
        choices = load_accelerate()(llama, precision, trains=False)
        ours = decoder(llama, precision)
        self.kernels[use] = [*choices, ours.choice]
        return ours

    def naive(self, attention: str = "causal") -> naive.NaiveLlama:
        return self._filled(naive.NaiveLlama, attention)

    def hf(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """transformers' LlamaForCausalLM with its default attention (PyTorch's fused one)."""
        model = load_to_hf()(self.state, self._config("causal"))
        model.set_attn_implementation("sdpa")
        return rounded(model, dtype).eval()

    def our_classifier(
        self, precision: str | None = "fp32", attention: str = "causal", *, training: bool = False
    ) -> LlamaEmbeddingClassifier:
        """precision: None for the plain path, in float32."""
        settings = SimpleNamespace(num_labels=NUM_LABELS, hidden_dropout_prob=DROPOUT, option="finetune")
        llama = self.plain(attention) if precision is None else self._filled(Llama, attention)
        model = self._with_head(lambda: LlamaEmbeddingClassifier(settings, llama=llama))
        if precision is not None:
            use = f"{precision}, {attention}, {'training' if training else 'classification'}"
            self.kernels[use] = load_accelerate()(model, precision, generates=False, trains=training)
        return model

    def naive_classifier(self, attention: str = "bidirectional") -> naive.NaiveLlamaEmbeddingClassifier:
        llama = self.naive(attention)
        return self._with_head(lambda: naive.NaiveLlamaEmbeddingClassifier(llama, NUM_LABELS, DROPOUT))

    def hf_classifier(self, dtype: torch.dtype = torch.float32) -> HFClassifier:
        base = self.hf().model
        return rounded(self._with_head(lambda: HFClassifier(base, self.config.dim)), dtype)

    def _config(self, attention: str) -> LlamaConfig:
        return replace(self.config, attention=attention)

    def _filled(self, kind: type, attention: str) -> Any:
        with torch.device("meta"):
            model = kind(self._config(attention))
        model.load_state_dict({name: tensor.clone() for name, tensor in self.state.items()}, assign=True)
        model.tok_embeddings.weight = model.output.weight  # assigned one by one, the two are no longer tied
        return model.requires_grad_(True).eval()

    def _with_head(self, make: Callable[[], Any]) -> Any:
        """All classifiers get the same head, drawn from one seed."""
        torch.manual_seed(self.seed)
        return make().eval()


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the weights. Buffers, such as the frequencies of rotations, stay float32, as where a file is loaded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def our_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return update_fast(plain_optimizer(model))


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=LEARNING_RATE)


def naive_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return naive.NaiveAdamW(model.parameters(), lr=LEARNING_RATE)


def hf_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's fused AdamW, its fastest. Without decay of weights, as the others."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, token_ids: torch.Tensor, labels: torch.Tensor
) -> None:
    """One step of fine-tuning, the same for every contender. token_ids: b s, labels: b

    Raises `RuntimeError` for a loss that is not finite.
    """
    model.train()
    optimizer.zero_grad()
    loss = F.nll_loss(model(token_ids), labels, reduction="sum") / len(labels)
    if not math.isfinite(loss.item()):  # which every loop reads
        raise RuntimeError(f"its loss is {loss.item()}")
    loss.backward()
    optimizer.step()


@torch.inference_mode()
def classify(model: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of a model in evaluation mode. b s -> b c"""
    return model(token_ids)


def finite(log_probs: torch.Tensor) -> torch.Tensor:
    """Raises `RuntimeError` if they are not finite."""
    if not log_probs.isfinite().all():
        raise RuntimeError("its log-probabilities are not finite")
    return log_probs


def generate_with_hf(model: nn.Module, prompt: torch.Tensor, new: int) -> torch.Tensor:
    """Greedy decoding with Hugging Face's key/value cache; no token ends it. prompt: b s -> b (s + new)"""
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
