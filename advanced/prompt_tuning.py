"""Prompt tuning: trained vectors before the text (Lester et al. 2021, arXiv:2104.08691, section 2).

    [P; X]    P: p D, trained    X: s D, the embedded text, bos included

goes through the frozen model. The prompt stands before the text and its bos (the paper's texts have no bos). It begins
as the vectors of random tokens (section 2.1; section 3.2 draws them from the 5000 commonest and finds the labels' words
as good or better; here they are drawn from all). The paper predicts a word; here a trained head reads the state that
the base reads.

The text moves by p positions. One that fills `max_seq_len` then has positions beyond it, which rotary embedding can
compute, but which the model has not seen in pretraining.

Shapes: p position of the prompt   s position of the text   D model dim
"""

from __future__ import annotations

import torch
from torch import nn

from advanced.added import AddedVectors
from advanced.reading import reading_of


class PromptTuning(AddedVectors):
    """length: p, how many vectors."""

    name = "prompt-tuning"
    mark = "read.prompt"

    def prepare(self, model: nn.Module) -> None:
        table = model.llama.tok_embeddings.weight.detach()  # v D
        drawn = torch.randint(len(table), (self.length,), device=table.device)  # p
        reading_of(model).prompt = nn.Parameter(table[drawn].clone())  # p D
