"""Prompt tuning: trained vectors before the text (Lester et al. 2021, arXiv:2104.08691, section 2).

    [P; X]    P: p D, trained    X: s D, the embedded text, bos included

goes through the frozen model. The prompt stands before all else, bos too, as in the paper, whose texts have no bos, and
in the default of its code. It begins as the vectors of drawn tokens (section 2.1; section 3.2 draws them from the 5000
commonest, and finds the labels' words as good or better; here they are drawn from all). The paper predicts a word; here
a head, which is trained along, reads the state that the base reads.

A text moves p positions on; one that fills `max_seq_len` then goes beyond it, where rotary positions have a closed form
and pretraining was not.

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
