"""The contenders' models of BERT.

The shape is that of a MiniLM (Wang et al. 2020, arXiv:2002.10957), which people fine-tune on a CPU: 6 layers, 384
wide, 12 heads. Weights are random, and the same for all.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers import SEED, Batch
from benchmarks.sentences import length_at
from benchmarks.table import HF, NUM_LABELS, OURS
from bert.config import BertConfig
from bert.heads import BertForSequenceClassification
from bert.model import Bert
from bert.save import save_pretrained

if TYPE_CHECKING:
    from benchmarks.bench import Bench

MINILM = BertConfig(vocab_size=30522, dim=384, n_layers=6, n_heads=12, hidden_dim=1536, max_seq_len=512)
QUICK_BERT = BertConfig(vocab_size=300, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_seq_len=512)
BERT_GAIN = 4.0  # on fresh matrices: without it texts hardly differ, and all answers would agree
FIRST_WORD_PIECE = 200  # the first id of a word; below are [PAD] and other special pieces


class HFBertClassifier(nn.Module):
    """transformers' classifier, of our ids and mask, as log-probabilities."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, segment_ids: None, padding_mask: torch.Tensor) -> torch.Tensor:
        """b s -> b c"""
        return F.log_softmax(self.model(input_ids, attention_mask=padding_mask).logits, dim=-1)


class BertPeers:
    """Makes the contenders' classifiers from one model. The plain path is `--kernels plain`."""

    kind = "bert"
    tolerance = 1e-4  # between log-probabilities in float32

    def __init__(self, bench: Bench):
        torch.manual_seed(SEED)
        self.config = QUICK_BERT if bench.is_quick else MINILM
        self.kernels, self.folder = bench.peers.kernels, bench.folder / "transformers-bert"
        self.plain = BertForSequenceClassification(Bert(self.config), NUM_LABELS).eval()
        with torch.no_grad():
            for name, parameter in self.plain.named_parameters():
                if parameter.dim() == 2 and "embeddings" not in name:
                    parameter.mul_(BERT_GAIN)

    def classifier(self, name: str, precision: str = "fp32", attention: str = "", *, trains: bool = False) -> nn.Module:
        """The classifier of `name`, in evaluation mode. precision, attention: there is one of each."""
        if name == HF:
            import transformers

            save_pretrained(self.folder, self.plain)
            return HFBertClassifier(transformers.BertForSequenceClassification.from_pretrained(self.folder)).eval()
        model = copy.deepcopy(self.plain)
        if name == OURS:
            from fast import accelerate

            use = f"fp32, BERT, {'training' if trains else 'classification'}"
            self.kernels[use] = accelerate(model, generates=False, trains=trains)
        return model

    def batch(self, rows: int, length: int, *, is_padded: bool = False) -> Batch:
        """As `make_batch`."""
        return make_batch(rows, length, self.config.vocab_size, is_padded=is_padded)


def make_batch(rows: int, longest: int, vocab_size: int, *, is_padded: bool) -> Batch:
    """Random ids, no segments, the padding mask, and labels.

    is_padded: lengths are spread as those of SST's sentences, and the longest text has `longest`.
    """
    draw = torch.Generator().manual_seed(SEED)
    quantiles = torch.tensor([length_at((row + 0.5) / rows) for row in range(rows)])
    lengths = (quantiles * longest / quantiles.max()).round().long() if is_padded else torch.full((rows,), longest)
    mask = torch.arange(longest) < lengths[torch.randperm(rows, generator=draw)][:, None]  # b s
    ids = torch.randint(FIRST_WORD_PIECE, vocab_size, (rows, longest), generator=draw).where(mask, 0)
    return Batch((ids, None, mask.long()), torch.randint(0, NUM_LABELS, (rows,), generator=draw))
