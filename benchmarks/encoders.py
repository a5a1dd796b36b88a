"""The lines of BERT: classes of texts and steps of fine-tuning, of batches whose texts are equally long and of others.

The shape is that of a MiniLM (Wang et al. 2020, arXiv:2002.10957), which people fine-tune on a CPU: 6 layers, 384
wide, 12 heads. Weights are random, and the same for all.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.apart import LibraryModel
from benchmarks.measure import Contender
from benchmarks.peers import hf_optimizer, load_accelerate, our_optimizer, plain_optimizer
from benchmarks.sentences import length_at
from benchmarks.table import Bench, Line, classification_lines, lines_of
from benchmarks.targets import HF, LINES, NUM_LABELS, OPENVINO_BF16, OPENVINO_TYPES, OURS, PLAIN_PATH
from bert.config import BertConfig
from bert.heads import BertForSequenceClassification
from bert.model import Bert
from bert.save import save_pretrained

MINILM = BertConfig(vocab_size=30522, dim=384, n_layers=6, n_heads=12, hidden_dim=1536, max_seq_len=512)
QUICK_BERT = BertConfig(vocab_size=300, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_seq_len=512)
BERT_GAIN = 4.0  # on fresh matrices: without it texts hardly differ, and all answers would agree
FIRST_WORD_PIECE = 200  # the first id of a word; below are [PAD] and other special pieces


class Batch(NamedTuple):
    """Ids and the padding mask, b s, and labels, b."""

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


class HFBertClassifier(nn.Module):
    """transformers' classifier, of our ids and mask, as log-probabilities."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, segment_ids: None, padding_mask: torch.Tensor) -> torch.Tensor:
        """b s -> b c"""
        return F.log_softmax(self.model(input_ids, attention_mask=padding_mask).logits, dim=-1)


def make_batch(rows: int, longest: int, vocab_size: int, seed: int, *, is_padded: bool) -> Batch:
    """Random ids. is_padded: lengths are spread as those of SST's sentences, and the longest text has `longest`."""
    draw = torch.Generator().manual_seed(seed)
    quantiles = torch.tensor([length_at((row + 0.5) / rows) for row in range(rows)])
    lengths = (quantiles * longest / quantiles.max()).round().long() if is_padded else torch.full((rows,), longest)
    mask = torch.arange(longest) < lengths[torch.randperm(rows, generator=draw)][:, None]  # b s
    ids = torch.randint(FIRST_WORD_PIECE, vocab_size, (rows, longest), generator=draw).where(mask, 0)
    return Batch(ids, mask.long(), torch.randint(0, NUM_LABELS, (rows,), generator=draw))


def make_models(bench: Bench, *, trains: bool) -> dict[str, nn.Module]:
    """The contenders, on the same weights. The plain path is `--kernels plain`."""
    torch.manual_seed(bench.seed)
    config = QUICK_BERT if bench.sizes.turn == 0.0 else MINILM
    plain = BertForSequenceClassification(Bert(config), NUM_LABELS).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if parameter.dim() == 2 and "embeddings" not in name:
                parameter.mul_(BERT_GAIN)
    models = {OURS: copy.deepcopy(plain), PLAIN_PATH: plain}
    use = f"fp32, BERT, {'training' if trains else 'classification'}"
    bench.peers.kernels[use] = load_accelerate()(models[OURS], generates=False, trains=trains)
    if bench.has(HF):
        with bench.attempt(HF):
            import transformers

            save_pretrained(bench.folder / "bert", plain)
            theirs = transformers.BertForSequenceClassification.from_pretrained(bench.folder / "bert")
            models[HF] = HFBertClassifier(theirs).eval()
    return models


def classify(bench: Bench) -> list[Line]:
    """Log-probabilities, which must be equal to 1e-4."""
    lines, models = [], make_models(bench, trains=False)
    for work, contenders, batch in _works(bench, "bert-classify", models[OURS]):
        answers = {name: partial(_log_probs, model, batch) for name, model in models.items() if bench.has(name)}
        for name in filter(bench.has, OPENVINO_TYPES.keys() & contenders):
            plain, folder = models[PLAIN_PATH], bench.folder / "openvino"
            given = LibraryModel(folder, plain.state_dict(), plain.encoder.config, bench.threads, OPENVINO_TYPES[name])
            if library := bench.start(name, "benchmarks.ov.OpenVino", given):
                answers[name] = partial(library.classify, batch.ids, batch.mask)
        lines += classification_lines(
            bench, work, contenders, answers, unit="texts/s", tolerance=1e-4, rounded=[OPENVINO_BF16]
        )
    return lines


@torch.inference_mode()
def _log_probs(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.ids, None, batch.mask)


def train(bench: Bench) -> list[Line]:
    """A step: gradients to zero, forward with dropout of 0.1, loss, backward, AdamW (theirs: PyTorch's fused one)."""
    lines, models = [], make_models(bench, trains=True)
    makers = {HF: hf_optimizer, PLAIN_PATH: plain_optimizer}
    optimizers = {name: makers.get(name, our_optimizer)(model.train()) for name, model in models.items()}
    for work, contenders, batch in _works(bench, "bert-train", models[OURS]):
        here = filter(bench.has, models)
        runs = [Contender(name, partial(_step, models[name], optimizers[name], batch)) for name in here]
        lines += lines_of(bench, work, contenders, bench.race(work, runs, is_watched=False))
    return lines


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    F.nll_loss(model(batch.ids, None, batch.mask), batch.labels).backward()
    optimizer.step()


def _works(bench: Bench, name: str, model: nn.Module) -> list[tuple[str, tuple[str, ...], Batch]]:
    """The lines of a measurement, against whom, and their batches."""
    shapes, vocab_size = bench.sizes.bert.values(), model.encoder.config.vocab_size
    kinds = [(shape, is_padded) for shape in shapes for is_padded in (False, True)]
    return [
        (work, contenders, make_batch(*shape, vocab_size, bench.seed, is_padded=is_padded))
        for (work, contenders), (shape, is_padded) in zip(LINES[name].items(), kinds, strict=True)
    ]
