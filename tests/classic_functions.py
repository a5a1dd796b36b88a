"""The assignment's functions as a student writes them, with the course's arguments alone; and a folder that has them.

`CLASSIC`, `LATER` and `WITH_A_MASK` hold texts by `file:Class.name`.
"""

from __future__ import annotations

import ast
import shutil
import textwrap
from pathlib import Path

from conftest import ROOT

MODULES = ("base_llama", "classifier", "config", "llama", "optimizer", "rope", "tokenizer", "utils")
NORM, SCORES = "llama.py:RMSNorm._norm", "llama.py:Attention.compute_query_key_value_scores"
ATTENTION, LAYER, GENERATE = "llama.py:Attention.forward", "llama.py:LlamaLayer.forward", "llama.py:Llama.generate"
ROTATION, STEP = "rope.py:apply_rotary_emb", "optimizer.py:AdamW.step"
CLASSIFIER, LATER_NORM = "classifier.py:LlamaEmbeddingClassifier.forward", "base_llama.py:LayerNorm._norm"

GENERATE_TEXT = """
@torch.inference_mode()
def generate(self, idx, max_new_tokens, temperature=1.0{argument}):
    for _ in range(max_new_tokens):
        idx_cond = idx if idx.size(1) <= self.params.max_seq_len else idx[:, -self.params.max_seq_len:]
        logits, _ = self(idx_cond)
        logits = logits[:, -1, :]
        if temperature == 0.0:
            idx_next = torch.argmax(logits, dim=-1, keepdim=True)
        else:
            probs = F.softmax(logits / temperature, dim=-1)
            {limit}
            idx_next = torch.multinomial(probs, num_samples=1)
        idx = torch.cat((idx, idx_next), dim=1)
    return idx
"""
EPSILON = """probs = torch.where(probs >= epsilon, probs, torch.zeros_like(probs))
            probs = probs / probs.sum(dim=-1, keepdim=True)"""
TOP_P = """ordered, order = torch.sort(probs, descending=True)
            ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0.0
            probs = torch.zeros_like(probs).scatter(-1, order, ordered)"""

CLASSIC = {
    NORM: """
def _norm(self, x):
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
""",
    SCORES: """
def compute_query_key_value_scores(self, query, key, value):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.head_dim)
    weights = F.softmax(scores, dim=-1)
    weights = self.attn_dropout(weights)
    return torch.matmul(weights, value)
""",
    LAYER: """
def forward(self, x):
    h = x + self.attention(self.attention_norm(x))
    return h + self.feed_forward(self.ffn_norm(h))
""",
    GENERATE: GENERATE_TEXT.format(argument="", limit="pass"),
    ROTATION: """
def apply_rotary_emb(query, key, head_dim, max_seq_len, theta=10000.0):
    seqlen, device = query.shape[1], query.device
    query_real, query_imag = query.float().reshape(query.shape[:-1] + (-1, 2)).unbind(-1)
    key_real, key_imag = key.float().reshape(key.shape[:-1] + (-1, 2)).unbind(-1)
    freqs = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.outer(torch.arange(seqlen, device=device).float(), freqs)
    cos, sin = angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]
    query_out = torch.stack((query_real * cos - query_imag * sin, query_real * sin + query_imag * cos), dim=-1)
    key_out = torch.stack((key_real * cos - key_imag * sin, key_real * sin + key_imag * cos), dim=-1)
    return query_out.flatten(-2).type_as(query), key_out.flatten(-2).type_as(key)
""",
    STEP: """
def step(self, closure=None):
    loss = None
    if closure is not None:
        loss = closure()
    for group in self.param_groups:
        if group.get("max_grad_norm") is not None:
            torch.nn.utils.clip_grad_norm_(group["params"], group["max_grad_norm"])
        for p in group["params"]:
            if p.grad is None:
                continue
            grad, state = p.grad.data, self.state[p]
            if len(state) == 0:
                state["step"] = 0
                state["m"] = torch.zeros_like(p.data)
                state["v"] = torch.zeros_like(p.data)
            state["step"] += 1
            t, (beta1, beta2) = state["step"], group["betas"]
            state["m"] = beta1 * state["m"] + (1 - beta1) * grad
            state["v"] = beta2 * state["v"] + (1 - beta2) * grad * grad
            alpha_t = group["lr"]
            if group["correct_bias"]:
                alpha_t = alpha_t * math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t)
            p.data = p.data - alpha_t * state["m"] / (state["v"].sqrt() + group["eps"])
            p.data = p.data - group["lr"] * group["weight_decay"] * p.data
    return loss
""",
    CLASSIFIER: """
def forward(self, input_ids):
    _, hidden = self.llama(input_ids)
    last = self.dropout(hidden[:, -1])
    return F.log_softmax(self.classifier_head(last), dim=-1)
""",
}
CENTRED_NORM = """
def _norm(self, x):
    mean = x.mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(dim=-1, keepdim=True) + self.eps)
"""
MASKED_SCORES = """
def compute_query_key_value_scores(self, query, key, value):
    length = query.shape[2]
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.head_dim)
    causal_mask = torch.tril(torch.ones(length, length, device=query.device))
    scores = scores.masked_fill(causal_mask == 0, float("-inf"))
    weights = self.attn_dropout(F.softmax(scores, dim=-1))
    return torch.matmul(weights, value)
"""
SCORES_WITH_A_MASK = """
def compute_query_key_value_scores(self, query, key, value, mask=None):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.head_dim)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = self.attn_dropout(F.softmax(scores, dim=-1))
    return torch.matmul(weights, value)
"""
ATTENTION_FORWARD = """
def forward(self, x):
    b, s, _ = x.shape
    query = self.compute_query(x).view(b, s, self.n_heads, self.head_dim)
    key = self.compute_key(x).view(b, s, self.n_kv_heads, self.head_dim)
    value = self.compute_value(x).view(b, s, self.n_kv_heads, self.head_dim)
    query, key = apply_rotary_emb(query, key, self.head_dim, self.max_seq_len)
    key, value = (torch.repeat_interleave(x, self.n_rep, dim=2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output = self.compute_query_key_value_scores(query, key, value)
    return self.resid_dropout(self.compute_output(output.transpose(1, 2).reshape(b, s, -1)))
"""
LATER = {
    "ucsc": {},
    "cmu2024": {},
    "cmu2025": {
        LATER_NORM: CENTRED_NORM,
        GENERATE: GENERATE_TEXT.format(argument=", epsilon=0.05", limit=EPSILON),
    },
    "cmu2026": {
        LATER_NORM: CENTRED_NORM,
        SCORES: MASKED_SCORES,
        ATTENTION: ATTENTION_FORWARD,
        GENERATE: GENERATE_TEXT.format(argument=", top_p=0.95", limit=TOP_P),
    },
}

WITH_A_MASK = {SCORES: SCORES_WITH_A_MASK}


def write_student(folder: Path, edition: str = "ucsc", changed: dict[str, str | None] | None = None) -> Path:
    """The package's modules with these functions, and with those in `changed` in their place; None: the package's."""
    folder.mkdir()
    for name in MODULES:
        shutil.copy(ROOT / f"{name}.py", folder)
    for place, text in {**CLASSIC, **LATER[edition], **(changed or {})}.items():
        file, _, function = place.partition(":")
        path = folder / file
        if text is not None:
            path.write_text(replaced(path.read_text(encoding="utf-8"), function, text), encoding="utf-8")
    return folder


def replaced(source: str, function: str, text: str) -> str:
    """A module's source with another text of this function or method."""
    body = ast.parse(source).body
    for name in function.split("."):
        (found,) = (each for each in body if getattr(each, "name", "") == name)
        body = found.body
    lines = source.splitlines(keepends=True)
    first = min([found.lineno, *(each.lineno for each in found.decorator_list)])
    lines[first - 1 : found.end_lineno] = [textwrap.indent(text.strip("\n"), " " * found.col_offset) + "\n"]
    return "".join(lines)
