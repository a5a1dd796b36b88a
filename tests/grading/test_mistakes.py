"""Usual mistakes in the files that students write, and what the grading scripts say to them.

Run as a program, `test_mistakes.py SCRIPT FOLDER`, it makes every mistake of a script's table in a copy of the root
modules, asks them in its own process (`local_student`), and prints as JSON what the script says: one process for each
table. How a student's code is asked in a process of its own is the matter of test_hostile.py.
"""

import ast
import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from local_student import LocalStudent

from grading import adamw, questions
from optimizer import AdamW

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = {"sanity_check", "rope_test", "optimizer_test", "prepare_submit"}
MODULES = sorted(path.stem for path in ROOT.glob("*.py") if path.stem not in SCRIPTS)

NORM = "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
NORM_IN_PLACE = "(y := x.clone()).mul_(torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps))"
TURN = "apply_rotary_emb(query, key, self.head_dim, self.max_seq_len, *self.rope)"
TURN_LATE = TURN.replace("query, key", "x.transpose(1, 2), x.transpose(1, 2)")  # each by itself: heads may be fewer
GATE = "F.silu(self.w1(x)) * self.w3(x)"
FIRST = "h = x + self.attention(self.attention_norm(x))\n"
SECOND = "        return h + self.feed_forward(self.ffn_norm(h))"
POST = "h = self.attention_norm(x + self.attention(x))\n"
POST += "        return self.ffn_norm(h + self.feed_forward(h))"
LAST = "sequence_lengths(token_ids, pad_id) - 1"
SUM = "log_probabilities[:, ids].sum(dim=-1)"
HEAD = "F.log_softmax(self.classifier_head(self.dropout(last)), dim=-1)"
BLANK = "raise NotImplementedError"
WEIGHTED = "return weights @ value"
SCALE = "math.sqrt(self.head_dim)"
MASKS = "        if mask is not None:"
READ = "self(idx[:, -self.config.max_seq_len :])"
GREEDY = "            if temperature == 0.0:\n"
DRAWN = "F.softmax(logits / temperature, dim=-1)"
ENDS = "idx = torch.cat((idx, idx_next), dim=1)\n        return idx"

PAIRS = "x.float().unflatten(-1, (-1, 2))"
PRODUCT = "x * torch.complex(cos, sin)"
TURNED = f"torch.view_as_real({PRODUCT}).flatten(-2)"
CAST = "query_out, key_out = (x.type_as(query) for x in turned)"
HALVES = "halves = (x.float().chunk(2, -1) for x in (query, key))\n"
HALVES += "    turned = (torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1) for x1, x2 in halves)\n"
TURN_BOTH = "return query_out, key_out"
ANGLE = "1.0 / theta ** ("

LINE = f"\n{' ' * 16}"  # of what is done with one parameter in `AdamW.step`
MOMENTS = 'state["m"].lerp_(p.grad, 1 - beta1)' + LINE
MOMENTS += 'state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)'
EXCHANGED = MOMENTS.replace("beta1", "beta0").replace("beta2", "beta1").replace("beta0", "beta2")
IF_CORRECTED = 'if group["correct_bias"]:'
CORRECTION = 'math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])'
UPDATE = 'p.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-alpha)'
IF_DECAYS = 'if group["weight_decay"] > 0.0:  # not a product with 1 - 1e-7: float32 would lose most digits'
STEP = LINE.join((
    MOMENTS, 'alpha = group["lr"]', IF_CORRECTED, f"    alpha *= {CORRECTION}", UPDATE,
    IF_DECAYS, '    p.add_(p, alpha=-group["lr"] * group["weight_decay"])',
))  # fmt: skip
SKIP = f"if p.grad is None:{LINE}    continue"
NO_GRADIENT = "p.grad = torch.zeros_like(p)"
DECAY = "p -= lr * wd * p"
CLOSURE = "            with torch.enable_grad():\n                loss = closure()\n"


def signs(a: str, b: str, c: str, d: str) -> str:
    """The rotation written out, in place of `TURNED`, with these signs before x1 cos, x2 sin, x1 sin, x2 cos."""
    pairs = f"{a}x.real * cos {b} x.imag * sin, {c}x.real * sin {d} x.imag * cos"
    return f"torch.stack(({pairs}), -1).flatten(-2)"


def own_step(before: str = "pass", after: str = "pass", root: str = "v.sqrt() + eps") -> str:
    """An update as one writes it at first, in place of `STEP`. before and after it: what decays the weights."""
    lines = (
        "g, m, v, t = p.grad, state['m'], state['v'], state['step']",
        "(b1, b2), eps, lr, wd = (group[name] for name in ('betas', 'eps', 'lr', 'weight_decay'))",
        "c1, c2 = (1 - b1**t, 1 - b2**t) if group['correct_bias'] else (1.0, 1.0)",
        "alpha = lr * math.sqrt(c2) / c1",
        before,
        "m.copy_(b1 * m + (1 - b1) * g)",
        "v.copy_(b2 * v + (1 - b2) * g * g)",
        f"p -= alpha * m / ({root})",
        after,
    )
    return LINE.join(lines)


# script: {file: {what the script says: [(what it says further, what stands in the file, what is put there)]}}
MISTAKES = {
    "sanity_check": {
        "llama.py": {
            "import of llama.py: WRONG": [("SyntaxError", "class Attention(nn.Module):", "class Attention(nn.Module:")],
            "RMSNorm: WRONG": [
                ("the mean is of x, not of its squares", NORM, NORM.replace(".pow(2)", "")),
                ("the squares are summed, not averaged", NORM, NORM.replace("mean(", "sum(")),
                ("eps stands outside the root", NORM, "x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)"),
                ("eps is missing", NORM, NORM.replace(" + self.eps", "")),
                ("it multiplies by the weight twice", NORM, f"{NORM} * self.weight"),
                ("right to two digits, off by up to", NORM, f"({NORM}).bfloat16()"),
                ("it is twice as large", NORM, f"2 * {NORM}"),
                ("it returns the factor alone", NORM, NORM.removeprefix("x * ")),
                ("it changes its input x in place", NORM, f"x.mul_({NORM.removeprefix('x * ')})"),
                ("no gradient goes back to x", NORM, f"({NORM}).detach()"),
                ("gradients that go back to x do not say", NORM, f"x * ({NORM.removeprefix('x * ')}).detach()"),
                ("RuntimeError: one of the variables needed for gradient", NORM, NORM_IN_PLACE),
                ("the weight is missing", ".type_as(x) * self.weight", ".type_as(x)"),
                ("it returns None; is a `return` missing?", "return self._norm(x.float())", "self._norm(x.float())"),
                ("RuntimeError in llama.py line", NORM, NORM.replace("True", "False")),
                ("AttributeError: module 'llama' has no", "class Attention(", "del RMSNorm\n\n\nclass Attention("),
            ],
            "RMSNorm: not written yet": [("NotImplementedError in llama.py", f"return {NORM}", BLANK)],
            "scores and softmax, bidirectional: WRONG": [
                ("scores are divided by d, not by sqrt(d)", "math.sqrt(self.head_dim)", "self.head_dim"),
                ("scores are not scaled", " / math.sqrt(self.head_dim)", ""),
                ("the softmax runs over the queries", "softmax(dim=-1).type_as", "softmax(dim=-2).type_as"),
                ("the softmax runs over the heads", "softmax(dim=-1).type_as", "softmax(dim=1).type_as"),
                ("it is log_softmax, not softmax", "softmax(dim=-1).type_as", "log_softmax(dim=-1).type_as"),
                ("there is a causal mask", MASKS, f"        mask = causal_mask(query.shape[2])\n{MASKS}"),
                ("it gives other numbers each time", "self.attn_dropout(", "F.dropout(p=self.attn_dropout.p, input="),
                ("it returns float64 for inputs of float32", WEIGHTED, "return weights.double() @ value.double()"),
                ("no gradient goes back to query", WEIGHTED, "return weights.detach() @ value"),
            ],
            "scores and softmax, causal: WRONG": [
                ("the causal mask is missing", 'scores.masked_fill(~mask, float("-inf"))', "scores"),
                ("the causal mask sets scores to 0", 'float("-inf")', "0.0"),
                ("the causal mask is inverted", "masked_fill(~mask", "masked_fill(mask"),
                ("scores are not scaled", SCALE, f"(1 if self.is_causal else {SCALE})"),
            ],
            "grouped queries, bidirectional: WRONG": [
                ("key/value heads are repeated as 1 2 1 2", "part.repeat_interleave(self.n_rep, dim=1)",
                 "part.repeat(1, 2, 1, 1)"),
                ("key/value heads are not repeated", "if self.n_rep > 1:", "if False:"),
                ("heads are joined without", "output.transpose(1, 2).flatten(-2)", "output.reshape(x.shape)"),
                ("queries and keys are not rotated", TURN, "query, key"),
                ("the rotation takes heads for positions", TURN,
                 f"({TURN_LATE}[0].transpose(1, 2) for x in (query, key))"),
                ("heads are joined as (d, h)", "output.transpose(1, 2).flatten", "output.permute(0, 2, 3, 1).flatten"),
                ("there is a causal mask", "config.max_seq_len, config.is_causal\n", "config.max_seq_len, True\n"),
            ],
            "feed-forward: WRONG": [
                ("the activation is GELU, not SiLU", "F.silu(", "F.gelu("),
                ("the activation is ReLU", "F.silu(", "F.relu("),
                ("w1 and w3 are exchanged", GATE, "F.silu(self.w3(x)) * self.w1(x)"),
            ],
            "feed-forward: not written yet": [("Not", f"return self.dropout(self.w2({GATE}))", BLANK)],
            "layer, bidirectional: WRONG": [
                ("the residual around the attention is missing", FIRST, FIRST.replace("x + ", "")),
                ("the residual around the feed-forward is missing", SECOND, SECOND.replace("h + ", "")),
                ("both residuals are missing", FIRST + SECOND,
                 (FIRST + SECOND).replace("x + ", "").replace("h + ", "")),
                ("it is post-norm", FIRST + SECOND, POST),
                ("attention_norm is missing", FIRST, FIRST.replace("self.attention_norm(x)", "x")),
                ("ffn_norm is missing", SECOND, SECOND.replace("self.ffn_norm(h)", "h")),
                ("both norms are missing", FIRST + SECOND,
                 (FIRST + SECOND).replace("self.attention_norm(x)", "x").replace("self.ffn_norm(h)", "h")),
                ("attention_norm and ffn_norm are exchanged", FIRST + SECOND,
                 FIRST.replace("attention_norm", "ffn_norm") + SECOND.replace("ffn_norm", "attention_norm")),
                ("attention_norm stands before the feed-forward, too", SECOND, SECOND.replace("ffn_", "attention_")),
                ("the feed-forward reads x, not h", SECOND, SECOND.replace("norm(h)", "norm(x)")),
                ("the first residual is normalised", FIRST, FIRST.replace("x + ", "self.attention_norm(x) + ")),
                ("the second residual is normalised", SECOND, SECOND.replace("h + ", "self.ffn_norm(h) + ")),
                ("gradients that go back to x do not say", SECOND, SECOND.replace("h +", "h.detach() +")),
                ("gradients that go back to x do not say", FIRST, FIRST.replace("(x))", "(x)).detach()")),
                ("the second residual is x", SECOND, SECOND.replace("h +", "x +")),
                ("the layer's output is normalised, too", SECOND, f"{SECOND.replace('h +', 'self.ffn_norm(h +')})"),
                ("the eps of RMSNorm is not config.layer_norm_eps", "(config.dim, eps=config.layer_norm_eps)",
                 "(config.dim)"),
            ],
            "embedding and head, bidirectional: WRONG": [
                ("the final norm is missing", "h = self.norm(h)", "pass"),
                ("the head is not tied", "self.tok_embeddings.weight = self.output.weight", "pass"),
                ("the logits are the first position's", "h[:, [-1], :]", "h[:, [0], :]"),
                ("the last layer is left out", "for layer in self.layers:", "for layer in self.layers[:-1]:"),
            ],
            "generate, bidirectional: WRONG": [
                ("it gives another text each time: argmax", GREEDY,
                 f"            temperature = temperature or 1.0\n{GREEDY}"),
                ("it gives another text each time: argmax", DRAWN, DRAWN.replace("/", "*")),
                ("the temperature is ignored", GREEDY, "            if True:\n"),
                ("the text is never cut", READ, "self(idx)"),
                ("a long text is cut at its end", READ, "self(idx[:, : self.config.max_seq_len])"),
                ("a long text is cut to max_seq_len - 1", READ, READ.replace("-self", "1 - self")),
                ("it returns float32, not whole", ENDS, f"{ENDS}.float()"),
                ("there is one new token too few", "range(max_new_tokens)", "range(max_new_tokens - 1)"),
                ("what is returned are the new tokens alone", ENDS, f"{ENDS}[:, -max_new_tokens:]"),
            ],
            "generate, causal: WRONG": [
                ("the text is never cut", READ, "self(idx[:, 0:])"),
            ],
            "sampling, bidirectional: WRONG": [
                ("tokens are drawn with other probabilities", DRAWN, DRAWN.replace("logits", "logits.softmax(-1)")),
                ("tokens are drawn with other probabilities", DRAWN, DRAWN.replace("temperature", "temperature**2")),
                ("tokens are drawn with other probabilities", DRAWN,
                 f"{DRAWN} * (logits >= logits.topk(10).values[:, -1:])"),
                ("it does not always add max_new_tokens tokens", ENDS.split("\n")[0],
                 "if idx_next[0, 0] in (1, 2, 3):\n                break\n            " + ENDS.split("\n")[0]),
                ("likely tokens are never drawn", DRAWN, f"{DRAWN} * (logits >= logits.topk(2).values[:, -1:])"),
            ],
            "loading, bidirectional: WRONG": [
                ("tok_embeddings.weight is not what", "model.load_state_dict(state)", "pass"),
            ],
        },
        "base_llama.py": {
            "grouped queries, causal: WRONG": [
                ("the causal mask is shifted by one: a position sees the next", ".tril()", ".tril(1)"),
            ],
        },
        "rope.py": {
            "rotary embedding: WRONG": [
                ("the wrong sign", "torch.complex(cos, sin)", "torch.complex(cos, -sin)"),
            ],
            "rotary embedding: not written yet": [("NotImplementedError in rope.py", TURN_BOTH, BLANK)],
        },
        "classifier.py": {
            "zero-shot classifier, bidirectional: WRONG": [
                ("it reads the last token before the padding", "if llama.config.is_causal else", "if True else"),
                ("a label's tokens are averaged", SUM, SUM.replace("sum(", "mean(")),
                ("a label's first token alone", SUM, "log_probabilities[:, ids[0]]"),
                ("logits are summed", "F.log_softmax(self.llama.output(last), dim=-1)", "self.llama.output(last)"),
                ("it returns probabilities over the labels", "scores, dim=-1)", "scores, dim=-1).softmax(-1)"),
                ("it returns probabilities, not log-", "scores, dim=-1)", "scores, dim=-1).exp()"),
                ("labels stand in rows", "scores, dim=-1)", "scores)"),
                ("it returns the negative sums", "return torch.stack(", "return -torch.stack("),
            ],
            "zero-shot classifier, causal: WRONG": [
                ("it reads the last position but one", LAST, LAST.replace("1", "2")),
                ("it counts what is not padding", LAST, "(token_ids != pad_id).sum(-1) - 1"),
            ],
            "embedding classifier, bidirectional: WRONG": [
                ("it returns logits", HEAD, "self.classifier_head(self.dropout(last))"),
                ("it returns probabilities, not log-", HEAD, "self.classifier_head(self.dropout(last)).softmax(-1)"),
                ("it returns the negative log-probabilities", HEAD, f"-{HEAD}"),
                ("it reads the second position", "self.dropout(last)", "self.dropout(self.llama(input_ids)[1][:, 1])"),
                ("log_softmax runs over the batch", HEAD, HEAD.replace("-1", "0")),
                ("there is no dropout in training", "self.dropout(last)", "last"),
                ("no gradient goes back to the Llama", "self.dropout(last)", "self.dropout(last.detach())"),
                ("no gradient goes back to the linear head", "self.classifier_head(self.dropout(last))",
                 "F.linear(self.dropout(last), self.classifier_head.weight.detach(), self.classifier_head.bias)"),
                ("the hidden state is normalised once more", "out(last)", "out(self.llama.norm(last))"),
                ("log_softmax is taken of probabilities", HEAD, HEAD.replace("(last))", "(last)).softmax(-1)")),
                ("there is dropout in evaluation", "self.dropout(last)", "F.dropout(last, self.dropout.p)"),
                ("dropout acts on the logits", "classifier_head(self.dropout(last))",
                 "dropout(self.classifier_head(last))"),
            ],
            "embedding classifier, bidirectional: not written yet": [("NotImpl", f"return {HEAD}", BLANK)],
        },
    },
    "rope_test": {
        "rope.py": {
            "Rotary embedding test FAILED": [
                ("halves of a head are paired (x1 with", CAST, f"{HALVES}    {CAST}"),
                ("neighbours are paired, but the result is put together as two halves", ".flatten(-2)",
                 ".mT.flatten(-2)"),
                ("halves of a head are paired and then interleaved", PAIRS,
                 PAIRS.replace("(-1, 2))", "(2, -1)).mT.contiguous()")),
                ("the wrong sign: pairs turn backwards", "torch.complex(cos, sin)", "torch.complex(cos, -sin)"),
                ("the result is the complex conjugate", PRODUCT, f"({PRODUCT}).conj().resolve_conj()"),
                ("what is turned is the pair's complex conjugate", PRODUCT, PRODUCT.replace("x *", "x.conj() *")),
                ("sine and cosine are exchanged", "torch.complex(cos, sin)", "torch.complex(sin, cos)"),
                ("positions are counted from 1", "torch.arange(max_seq_len)", "torch.arange(1, max_seq_len + 1)"),
                ("theta is 500000 whatever is asked for", ANGLE, ANGLE.replace("theta", "500000.0")),
                ("the argument theta is ignored", ANGLE, ANGLE.replace("theta", "10000.0")),
                ("pair i turns by theta^(-i/d)", "torch.arange(0, head_dim, 2,", "torch.arange(0, head_dim // 2,"),
                ("pair i turns by theta^(2i/d)", ANGLE, ANGLE.removeprefix("1.0 / ")),
                ("one wrong sign: x1 cos is subtracted", TURNED, signs("-", "-", "", "+")),
                ("one wrong sign: x2 cos is subtracted", TURNED, signs("", "-", "", "-")),
                ("one wrong sign: the first number of a pair is x1 cos - x2 sin", TURNED, signs("", "+", "", "+")),
                ("one wrong sign: the second number of a pair is x1 sin + x2 cos", TURNED, signs("", "-", "-", "+")),
                ("the result is the complex conjugate: the second number of each pair has the wrong sign (of the key",
                 TURN_BOTH, f"{TURN_BOTH} * torch.tensor((1.0, -1.0)).repeat(head_dim // 2)"),
                ("nothing is rotated", TURN_BOTH, "return query, key"),
                ("the key is not rotated", TURN_BOTH, "return query_out, key"),
                ("apply_rotary_emb: not written yet", TURN_BOTH, BLANK),
                ("apply_rotary_emb: it returns None", TURN_BOTH, TURN_BOTH.removeprefix("return ")),
            ],
        },
    },
    "optimizer_test": {
        "optimizer.py": {
            "Optimizer test FAILED": [
                ("AdamW: not written yet", STEP, BLANK),
                ("the weight decay comes before the update; subtract", STEP, own_step(before=DECAY)),
                ("the weight decay is scaled by alpha_t", STEP, own_step(after=DECAY.replace("lr", "alpha"))),
                ("the weight decay comes before the update and is scaled", STEP,
                 own_step(before=DECAY.replace("lr", "alpha"))),
                ("the weight decay lacks lr", STEP, own_step(after=DECAY.replace("lr * ", ""))),
                ("the weight decay is added to the gradient", STEP, own_step(before="g = g + wd * p")),
                ("there is no weight decay", STEP, own_step()),
                ("eps stands inside the root; it is", STEP, own_step(after=DECAY, root="(v + eps).sqrt()")),
                ("eps stands inside the root of the bias-corrected v", STEP,
                 own_step(after=DECAY, root="(v / c2 + eps).sqrt() * c2**0.5")),
                ("eps is added after the bias correction", STEP,
                 own_step(after=DECAY, root="((v / c2).sqrt() + eps) * c2**0.5")),
                ("eps is scaled by 1 - beta2^t", STEP, own_step(after=DECAY, root="v.sqrt() + eps * c2")),
                ("eps is missing", STEP, own_step(after=DECAY, root="v.sqrt()")),
                ("the root of the second moment is missing", STEP, own_step(after=DECAY, root="v + eps")),
                ("there is no bias correction", IF_CORRECTED, "if False:"),
                ("the bias correction lacks sqrt(1 - beta2^t)", CORRECTION, f"1 / {CORRECTION.partition(' / ')[2]}"),
                ("the bias correction lacks the division by 1 - beta1^t", CORRECTION, CORRECTION.partition(" / ")[0]),
                ("correct_bias=False is ignored", IF_CORRECTED, "if True:"),
                ("the bias correction lacks the root", CORRECTION, CORRECTION.removeprefix("math.sqrt")),
                ("is the step counted from 0", "state.update(step=0,", "state.update(step=-1,"),
                ("the first step is counted as the second", "state.update(step=0,", "state.update(step=1,"),
                ("the step stays 1", 'state["step"] += 1', 'state["step"] = 1'),
                ("beta1 and beta2 are exchanged; beta1", "defaults = dict(lr=lr, betas=betas,",
                 "defaults = dict(lr=lr, betas=betas[::-1],"),
                ("beta1 and beta2 are exchanged; beta1", "beta1, beta2 =", "beta2, beta1 ="),
                ("beta1 and beta2 are exchanged in the moments", MOMENTS, EXCHANGED),
                ("the second moment lacks the square", "addcmul_(p.grad, p.grad, value=1 - beta2)",
                 "add_(p.grad, alpha=1 - beta2)"),
                ("the second moment lacks the factor 1 - beta2", "value=1 - beta2", "value=1"),
                ("AdamW: step(closure) returns no loss", CLOSURE, f"{CLOSURE}            loss = None\n"),
                ("AdamW: step(closure) returns no loss", CLOSURE, "            pass\n"),
                ("AdamW: step(closure) calls the closure without gradients", CLOSURE, "            loss = closure()\n"),
                ("AdamW: step(closure) does not return the", CLOSURE, CLOSURE.replace("closure()", "2 * closure()")),
                ("AdamW: step(closure) calls the closure 2", CLOSURE, CLOSURE.replace("= c", "= closure() and c")),
                ("AdamW: it changes its input gradient in place", UPDATE, f"{UPDATE}{LINE}p.grad.mul_(2)"),
                ("AdamW: a parameter without gradient (None) is", SKIP, SKIP.replace("continue", "break")),
                ("AdamW: a parameter without gradient (None) is", SKIP, SKIP.replace("continue", NO_GRADIENT)),
                ("AdamW: each group of self.param_groups has", 'alpha = group["lr"]', 'alpha = self.defaults["lr"]'),
                ("weights move up the gradient", "value=-alpha)", "value=alpha)"),
            ],
        },
    },
}  # fmt: skip


# (file, function) of every hole of structure.md's table: the script that judges it and what its lines begin with; a
# mistake there
HOLES = {
    ("llama.py", "RMSNorm._norm"): ("sanity_check", "RMSNorm", NORM, f"{NORM} * self.weight"),
    ("llama.py", "Attention.compute_query_key_value_scores"): ("sanity_check", "scores and softmax", SCALE, "1.0"),
    ("llama.py", "LlamaLayer.forward"): ("sanity_check", "layer", FIRST, FIRST.replace("x + ", "")),
    ("llama.py", "Llama.generate"): ("sanity_check", "generate", "range(max_new_tokens)", "range(max_new_tokens - 1)"),
    ("rope.py", "apply_rotary_emb"): ("rope_test", "rotary embedding", PRODUCT, PRODUCT.replace("sin", "-sin")),
    ("optimizer.py", "AdamW.step"): ("optimizer_test", None, CLOSURE, f"{CLOSURE}            loss = None\n"),
    ("classifier.py", "LlamaEmbeddingClassifier.forward"):
        ("sanity_check", "embedding classifier", HEAD, HEAD.replace("-1", "0")),
}  # fmt: skip


def without_body(source: str, function: str) -> str:
    """A module's source in which this function or method only raises `NotImplementedError`."""
    body = ast.parse(source).body
    for name in function.split("."):
        (found,) = (each for each in body if getattr(each, "name", "") == name)
        body = found.body
    lines = source.splitlines(keepends=True)
    first, last = body[0], body[-1]
    lines[first.lineno - 1 : last.end_lineno] = [f"{' ' * first.col_offset}{BLANK}\n"]
    return "".join(lines)


def rows() -> list:
    """(script, file, what the script says, what stands in the file, what is put there) of every mistake."""
    return [
        pytest.param(
            script, file, f"{said}: {more}", old, new, id=f"{script}-{said}: {more}",
            marks=[pytest.mark.slow] if script == "sanity_check" else [],  # half a minute for all of them
        )
        for script, files in MISTAKES.items()
        for file, table in files.items()
        for said, mistakes in table.items()
        for more, old, new in mistakes
    ]  # fmt: skip


# ------------------------------------------------------------------------------------- making them, one by one


def main(script: str, scratch: Path) -> None:
    """Print {script: [exit status, what was printed]} for every mistake of a script; or of every script for "holes"."""
    adamw.passes_elsewhere = lambda student: False  # the course's own check accepts many, and would decide
    if script != "holes":
        adamw.TOY_STEPS = 5  # the few steps by hand tell the mistakes apart
        settings = {"lr": 1e-3, "weight_decay": 1e-4, "optimizer": AdamW}
        adamw.PUBLISHED_WEIGHTS = questions.train(**adamw.toy_problem(), **settings).tolist()
    results = []
    for number, (file, text, *flags) in enumerate(changed_holes() if script == "holes" else changed_files(script)):
        folder = scratch / str(number)
        folder.mkdir()
        for name in MODULES:
            shutil.copy(ROOT / f"{name}.py", folder)
        (folder / file).write_text(text, encoding="utf-8")
        scripts = sorted(SCRIPTS - {"prepare_submit"}) if script == "holes" else [script]
        results.append({each: run(each, folder, flags) for each in scripts})
    print(json.dumps(results))


def changed_files(script: str) -> Iterator[tuple[str, ...]]:
    """For every mistake its file, changed, and the flags with which it is judged."""
    for name, file, said, old, new in (row.values for row in rows()):
        if name == script:
            flags = ("--attention", "causal") if ", causal: " in said else ()
            yield file, (ROOT / file).read_text(encoding="utf-8").replace(old, new), *flags


def changed_holes() -> Iterator[tuple[str, str]]:
    """For every hole its file, with the hole unwritten, and with the mistake."""
    for (file, function), (_, _, old, new) in HOLES.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        assert old in source, f"{file} has changed: the mistake cannot be made there"
        yield file, without_body(source, function)
        yield file, source.replace(old, new)


def edits(script: str) -> list[tuple[str, str, str]]:
    return [(row.values[1], *row.values[3:]) for row in rows() if row.values[0] == script]


def run(script: str, folder: Path, flags: list[str]) -> tuple[int, str]:
    """Run a script of the project on a folder's modules."""
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.path[0], sys.argv = str(folder), [script, "--code", str(folder), *flags]
    os.chdir(folder)
    program = importlib.import_module(script)
    program.student_of = lambda args: LocalStudent(Path(args.code))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = program.main()
    return status, printed.getvalue()


@cache
def outcomes(script: str) -> dict[tuple[str, str, str], dict[str, tuple[int, str]]]:
    """What a script says to each of its mistakes: status and printed text by script; of file, old and new."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-B", __file__, script, scratch]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    names = [(*hole, what) for hole in HOLES for what in ("unwritten", "wrong")] if script == "holes" else edits(script)
    return dict(zip(names, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("script", "file", "said", "old", "new"), rows())
def test_a_usual_mistake_is_named(script: str, file: str, said: str, old: str, new: str):
    assert old in (ROOT / file).read_text(encoding="utf-8"), f"{file} has changed: the mistake cannot be made there"
    status, printed = outcomes(script)[file, old, new][script]
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert status == 1 and any(said in line for line in lines), printed
    if script == "sanity_check":
        assert any(line.startswith(f"Begin with: {said.partition(':')[0]} (") for line in lines), printed


def test_the_holes_are_those_of_the_table():
    text = (ROOT / "structure.md").read_text(encoding="utf-8")
    table = text.partition("| file | class, function | checked by |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(.*?)` \| `(.*?)` \|", table, re.MULTILINE)) == set(HOLES)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["unwritten", "wrong"])
@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole[1])
def test_what_is_missing_or_wrong_in_a_hole_is_reported_by_its_own_part_alone(hole: tuple[str, str], what: str):
    script, part = HOLES[hole][:2]
    printed = outcomes("holes")[(*hole, what)]
    assert {each for each, (status, _) in printed.items() if status} == {script, *(["sanity_check"] if part else [])}
    lines = printed["sanity_check"][1].partition("Part by part")[2].splitlines()[1:]
    verdicts = [line.split(":", 1) for line in lines if line.startswith("  ")]
    bad = [name for name, said in verdicts if not said.strip().startswith(("ok", "not judged"))]
    reported = {name.strip().partition(",")[0] for name in bad}
    assert reported == ({part} if part else set()), lines


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
