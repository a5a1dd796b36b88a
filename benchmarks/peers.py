"""The contenders' models, all with the same weights, and the training step that all of them take."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from base_llama import sequence_lengths
from benchmarks.decoders import BOS_ID, SPACE_ID
from benchmarks.table import HF, HF_BF16, NUM_LABELS, OURS, PLAIN_PATH
from classifier import PAD_ID, LlamaEmbeddingClassifier
from config import LlamaConfig
from engine.runs import update_fast
from llama import Llama
from optimizer import AdamW
from utils import ROOT

if TYPE_CHECKING:
    from engine.decoding import Decoder

SEED = 1337
DROPOUT = 0.3
LEARNING_RATE = 2e-5
LLAMA_GAIN = 90.5  # times 1 / sqrt(dim): 4 for stories42M


def random_llama(config: LlamaConfig, seed: int = SEED) -> Llama:
    """A Llama whose layers matter: fresh ones barely move the residual stream, and decoding repeats one token."""
    torch.manual_seed(seed)
    model = Llama(config)
    gain = LLAMA_GAIN / math.sqrt(config.dim)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layers") and parameter.dim() == 2:
                parameter.mul_(gain)
    return model.eval()


def load_to_hf() -> Callable[..., nn.Module]:
    """`to_hf` of checkpoints/reference.py, which lies in no package."""
    folder = str(ROOT / "checkpoints")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from reference import to_hf

    return to_hf


class Batch(NamedTuple):
    """inputs: what a classifier takes, b s each; labels: b"""

    inputs: tuple[torch.Tensor | None, ...]
    labels: torch.Tensor


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
    """Makes the contenders' models from one state dict. `kernels`: what was chosen for ours, by precision and use."""

    kind = "llama"
    tolerance = 1e-3  # between log-probabilities in float32; sums in another order differ by up to 2e-5 here

    def __init__(self, llama: Llama):
        self.config = llama.config
        self.state = {name: tensor.detach() for name, tensor in llama.state_dict().items()}
        self.kernels: dict[str, list[Any]] = {}

    def llama(self, name: str, attention: str = "causal", dtype: torch.dtype = torch.float32) -> nn.Module:
        """The language model of `name`, in evaluation mode: ours without kernels, and the course's way, are bare."""
        if name in (HF, HF_BF16):
            model = load_to_hf()(self.state, self._config("causal"))
            model.set_attn_implementation("sdpa")  # PyTorch's fused one, its default
        else:
            model = self._filled(attention)
        if name == PLAIN_PATH:
            from fast.attention import fuse_attention

            fuse_attention(model)
        return rounded(model, dtype).eval()

    def decoder(self, precision: str = "fp32", attention: str = "causal") -> Decoder:
        """What generates text with ours, whose kernels are chosen for that."""
        from fast import accelerate, decoder

        llama, use = self._filled(attention), f"{precision}, {attention}, inference"
        choices = accelerate(llama, precision, trains=False)
        ours = decoder(llama, precision)
        self.kernels[use] = [*choices, ours.choice]
        return ours

    def classifier(
        self, name: str, precision: str = "fp32", attention: str = "causal", *, trains: bool = False
    ) -> nn.Module:
        """The classifier of `name`, in evaluation mode.

        In bf16 the plain path and Hugging Face's second one get bfloat16 weights, and autocast where they are trained;
        the course's way and Hugging Face's first one stay float32.
        """
        llama = self.llama(name, attention)
        torch.manual_seed(SEED)  # all classifiers get the same head
        if name in (HF, HF_BF16):
            model = HFClassifier(llama.model, self.config.dim)
        else:
            settings = SimpleNamespace(num_labels=NUM_LABELS, hidden_dropout_prob=DROPOUT, option="finetune")
            model = LlamaEmbeddingClassifier(settings, llama=llama)
        model.eval()
        if name == OURS:
            from fast import accelerate

            use = f"{precision}, {attention}, {'training' if trains else 'classification'}"
            self.kernels[use] = accelerate(model, precision, generates=False, trains=trains)
        elif precision == "bf16" and name in (PLAIN_PATH, HF_BF16):
            model = Autocast(model) if trains else rounded(model, torch.bfloat16)
        return model

    def prompt(self, rows: int, length: int) -> torch.Tensor:
        """Random prompts, each beginning with bos and a space. rows s"""
        draw = torch.Generator().manual_seed(SEED)
        words = torch.randint(SPACE_ID + 1, self.config.vocab_size, (rows, length - 2), generator=draw)
        start = torch.tensor([[BOS_ID, SPACE_ID]]).expand(rows, -1)
        return torch.cat((start, words), dim=1)

    def batch(self, rows: int, length: int, *, is_padded: bool = False) -> Batch:
        """Random token ids and labels. No line of a Llama has padding."""
        draw = torch.Generator().manual_seed(SEED)
        token_ids = torch.randint(SPACE_ID, self.config.vocab_size, (rows, length), generator=draw)
        return Batch((token_ids,), torch.randint(0, NUM_LABELS, (rows,), generator=draw))

    def _config(self, attention: str) -> LlamaConfig:
        return replace(self.config, attention=attention)

    def _filled(self, attention: str) -> Llama:
        with torch.device("meta"):
            model = Llama(self._config(attention))
        model.load_state_dict({name: tensor.clone() for name, tensor in self.state.items()}, assign=True)
        model.tok_embeddings.weight = model.output.weight  # assigned one by one, the two are no longer tied
        return model.requires_grad_(True).eval()


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the weights. Buffers, such as the frequencies of rotations, stay float32, as where a file is loaded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `name`. PyTorch's fused AdamW, its fastest, decays no weights, as the others."""
    if name in (HF, HF_BF16):
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    plain = AdamW(model.parameters(), lr=LEARNING_RATE)
    return update_fast(plain) if name == OURS else plain


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One step of fine-tuning, the same for every contender.

    Raises `RuntimeError` for a loss that is not finite.
    """
    model.train()
    optimizer.zero_grad()
    loss = F.nll_loss(model(*batch.inputs), batch.labels, reduction="sum") / len(batch.labels)
    if not math.isfinite(loss.item()):  # which every loop reads
        raise RuntimeError(f"its loss is {loss.item()}")
    loss.backward()
    optimizer.step()


@torch.inference_mode()
def classify(model: nn.Module, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Log-probabilities of a model in evaluation mode. inputs: what it takes, b s each -> b c"""
    return model(*inputs)


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
