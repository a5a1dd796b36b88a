"""Sentences without labels beside the labelled ones: each step of training reads as many of them as its batch has.

They are those lines of the training file that are neither trained on nor held out (`engine.data.set_aside`). Sentences
are not compared: of two equal lines one may be held out and the other not (of SST's 8,544 lines 10 repeat another).
"""

from __future__ import annotations

import torch

from engine.methods import Step
from engine.tasks import Sentences


def places_at(step: Step, count: int, batch_size: int) -> list[int]:
    """Which of `count` sentences belong to a step: all of them in a random order, then in another one, and so on.

    The same in all processes and after a resume. batch_size: of a full batch.
    """
    numbers = range(step.number * batch_size, step.number * batch_size + step.local.total)
    rounds = {number // count for number in numbers}
    orders = {
        turn: torch.randperm(count, generator=torch.Generator().manual_seed((step.seed * 1_000_003 + turn) % 2**63))
        for turn in rounds
    }
    return [int(orders[number // count][number % count]) for number in numbers]


def own_rows(step: Step, rows: torch.Tensor) -> torch.Tensor:
    """The rows of this process; one that does not count if it has none (see `engine.torchrun`)."""
    return rows[step.local.start : step.local.end] if step.local.share else rows[:1]


def outputs_for(step: Step, sentences: Sentences, places: list[int]) -> torch.Tensor:
    """The outputs, with new dropout masks, for this process's rows of these sentences: b c"""
    token_ids = own_rows(step, sentences.collate_fn([sentences[place] for place in places])["token_ids"])  # b s
    return step.forward(same_masks=False, token_ids=token_ids.to(step.batch["token_ids"].device))
