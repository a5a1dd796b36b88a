"""The assignment solved the plain way: what a correct student's model and loop compute, written by this project.

Nothing here is slow on purpose, and nothing is fast on purpose. Compared with the package:
- attention is spelled out over the full matrix of scores, and nothing is kept between two calls;
- the angles of RoPE are computed in every call of every layer;
- `generate` runs the whole sequence for every token;
- a classifier computes every position of every layer, and the next-token logits that come with them;
- AdamW walks over the parameters one by one;
- a batch is tokenised and padded every time it is needed, in random order whatever the lengths are;
- evaluation keeps what a backward pass would need, and runs over the training data as well.

Parameter names are the assignment's, so the package's state dicts load. Shapes: b batch, s query and t key position,
h query heads, g key/value heads, d head dim, D model dim, f feed-forward dim, v vocabulary, c classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from config import LlamaConfig
from engine.data import Example
from optimizer import AdamW
from tokenizer import Tokenizer


class NaiveRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ... D -> ... D"""
        mean_square = x.pow(2).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.eps) * self.weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Turn each pair of neighbours (x1, x2) at position m by the angle m * theta^(-2i/d). x: b s h d -> b s h d"""
    _, length, _, head_dim = x.shape
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)  # d/2
    angles = torch.arange(length).float()[:, None] * frequencies  # s d/2
    cos, sin = angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]  # 1 s 1 d/2
    first, second = x[..., 0::2], x[..., 1::2]  # b s h d/2
    rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return rotated.reshape(x.shape)


class NaiveAttention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        kv_dim = config.n_kv_heads * config.head_dim
        self.compute_query = nn.Linear(config.dim, config.dim, bias=False)
        self.compute_key = nn.Linear(config.dim, kv_dim, bias=False)
        self.compute_value = nn.Linear(config.dim, kv_dim, bias=False)
        self.compute_output = nn.Linear(config.dim, config.dim, bias=False)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s D -> b s D"""
        config = self.config
        rows, length, _ = x.shape
        query = self.compute_query(x).view(rows, length, config.n_heads, config.head_dim)
        key = self.compute_key(x).view(rows, length, config.n_kv_heads, config.head_dim)
        value = self.compute_value(x).view(rows, length, config.n_kv_heads, config.head_dim)
        query, key = rotate(query, config.rope_theta), rotate(key, config.rope_theta)
        repeats = config.n_heads // config.n_kv_heads
        key = torch.repeat_interleave(key, repeats, dim=2)
        value = torch.repeat_interleave(value, repeats, dim=2)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # b h s d
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(config.head_dim)  # b h s t
        if config.is_causal:
            hidden = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)  # s t
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = self.attn_dropout(torch.softmax(scores, dim=-1))
        output = torch.matmul(weights, value)  # b h s d
        output = output.transpose(1, 2).contiguous().view(rows, length, -1)  # b s D
        return self.resid_dropout(self.compute_output(output))


class NaiveFeedForward(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s D -> b s D, through b s f"""
        return self.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class NaiveLlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention = NaiveAttention(config)
        self.feed_forward = NaiveFeedForward(config)
        self.attention_norm = NaiveRMSNorm(config.dim, config.layer_norm_eps)
        self.ffn_norm = NaiveRMSNorm(config.dim, config.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s D -> b s D"""
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class NaiveLlama(nn.Module):
    """Token ids to the next token's logits and to hidden states."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(NaiveLlamaLayer(config) for _ in range(config.n_layers))
        self.norm = NaiveRMSNorm(config.dim, config.layer_norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tok_embeddings.weight = self.output.weight

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens: b s -> logits of the last position b 1 v, hidden states b s D"""
        h = self.dropout(self.tok_embeddings(tokens))
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h)
        return self.output(h[:, [-1], :]), h

    @torch.inference_mode()
    def generate(self, tokens: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
        """The most likely continuation, one token after another. tokens: b s -> b (s + max_new_tokens)"""
        for _ in range(max_new_tokens):
            logits, _ = self(tokens[:, -self.config.max_seq_len :])
            likeliest = torch.argmax(logits[:, -1, :], dim=-1, keepdim=True)  # b 1
            tokens = torch.cat((tokens, likeliest), dim=1)
        return tokens


class NaiveLlamaEmbeddingClassifier(nn.Module):
    """A linear head on the hidden state at the last position of the padded batch."""

    def __init__(self, llama: NaiveLlama, num_labels: int, dropout: float):
        super().__init__()
        self.llama = llama
        self.dropout = nn.Dropout(dropout)
        self.classifier_head = nn.Linear(llama.config.dim, num_labels)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: b s -> log-probabilities b c"""
        _, hidden_states = self.llama(tokens)
        return F.log_softmax(self.classifier_head(self.dropout(hidden_states[:, -1])), dim=-1)


class NaiveAdamW(AdamW):
    """AdamW as the assignment defines it, with the settings of `optimizer.AdamW`, one parameter after another."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["m"] = torch.zeros_like(parameter)
                    state["v"] = torch.zeros_like(parameter)
                state["step"] += 1
                m, v, t = state["m"], state["v"], state["step"]
                m.mul_(beta1).add_(gradient, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                alpha = group["lr"]
                if group["correct_bias"]:
                    alpha *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
                parameter.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-alpha)
                if group["weight_decay"] > 0.0:
                    parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])


def collate(tokenizer: Tokenizer, examples: list[Example]) -> dict[str, torch.Tensor]:
    """A batch, tokenised and padded when it is needed: token_ids b s, labels b"""
    encoded = [tokenizer.encode(example.sentence, bos=True, eos=False) for example in examples]
    longest = max(len(ids) for ids in encoded)
    padded = [ids + [tokenizer.pad_id] * (longest - len(ids)) for ids in encoded]
    return {"token_ids": torch.tensor(padded), "labels": torch.tensor([example.label for example in examples])}


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, batch_size: int) -> float:
    """One pass over the training data; returns the mean batch loss."""
    model.train()
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        log_probs = model(batch["token_ids"])
        loss = F.nll_loss(log_probs, batch["labels"], reduction="sum") / batch_size
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Accuracy and macro-F1. Dropout is off, but gradients are not: what a backward pass would need is kept."""
    from sklearn.metrics import accuracy_score, f1_score

    model.eval()
    gold, predicted = [], []
    for batch in loader:
        log_probs = model(batch["token_ids"])
        predicted.extend(log_probs.detach().numpy().argmax(axis=1))
        gold.extend(batch["labels"].tolist())
    return float(accuracy_score(gold, predicted)), float(f1_score(gold, predicted, average="macro"))
