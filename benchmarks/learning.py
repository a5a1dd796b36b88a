"""The lines that classify and take training steps, of a Llama and of a BERT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks import peers
from benchmarks.apart import Apart, LibraryModel
from benchmarks.bench import Bench, Line
from benchmarks.encoders import BertPeers
from benchmarks.limits import classifying, training
from benchmarks.table import CONTENDERS, LIMIT, NUM_LABELS, OURS, PLAIN_PATH, Work

Contenders = dict[str, "nn.Module | Apart"]


def forward(bench: Bench, works: Sequence[Work], models: peers.Peers | BertPeers | None = None) -> list[Line]:
    """Log-probabilities; of a causal Llama each row is read at its last token."""
    models, lines = models or bench.peers, []
    for work in works:
        rows, length = bench.sizes.shape(work.shape)
        inputs = models.batch(rows, length, is_padded=work.texts == "padded").inputs
        contenders = _contenders(bench, models, work, trains=False)
        answers: dict[str, torch.Tensor] = {}
        runs = {name: partial(_answer, answers, name, model, inputs) for name, model in contenders.items()}
        costs = bench.race(work, runs)
        errors = {name: (answer - answers[OURS]).abs().max().item() for name, answer in answers.items()}
        notes = {name: f"log-probabilities differ by at most {error:.0e}" for name, error in errors.items()}
        exact = [name for name in errors if "bf16" not in (work.precision, CONTENDERS[name].dtype)]
        same = {name: errors[name] < models.tolerance for name in exact}
        passes = None
        if LIMIT in work.against:
            passes = classifying(replace(models.config, attention=work.attention), rows, length, NUM_LABELS)
        unit = "sentences/s" if models is bench.peers else "texts/s"
        lines += bench.lines(work, costs, amount=float(rows), unit=unit, notes=notes, same=same, passes=passes)
    return lines


def train(bench: Bench, works: Sequence[Work], models: peers.Peers | BertPeers | None = None) -> list[Line]:
    """A step: gradients to zero, forward with dropout, loss, backward, AdamW (Hugging Face's: PyTorch's fused one)."""
    models, lines = models or bench.peers, []
    for work in works:
        rows, length = bench.sizes.shape(work.shape)
        batch = models.batch(rows, length, is_padded=work.texts == "padded")
        runs = {}
        for name, model in _contenders(bench, models, work, trains=True).items():
            if isinstance(model, Apart):
                runs[name] = partial(model.train_step, *batch.inputs, batch.labels)
            else:
                runs[name] = partial(peers.train_step, model, peers.optimizer(name, model), batch)
        passes = None
        if LIMIT in work.against:
            passes = training(replace(models.config, attention=work.attention), rows, length, NUM_LABELS)
        lines += bench.lines(work, bench.race(work, runs), passes=passes)
    return lines


def bert_forward(bench: Bench, works: Sequence[Work]) -> list[Line]:
    return forward(bench, works, BertPeers(bench))


def bert_train(bench: Bench, works: Sequence[Work]) -> list[Line]:
    return train(bench, works, BertPeers(bench))


def _contenders(bench: Bench, models: peers.Peers | BertPeers, work: Work, *, trains: bool) -> Contenders:
    """Ours first, then those of `work` that are here; libraries in processes of their own until the race is over."""
    contenders: Contenders = {}
    for name in (OURS, *bench.able(work.against)):
        with bench.attempt(name):
            if CONTENDERS[name].kind:
                dtype = CONTENDERS[name].dtype or (
                    "autocast" if trains and work.precision == "bf16" else work.precision
                )
                state, folder = models.classifier(PLAIN_PATH).state_dict(), bench.folder / f"{models.kind}-classifier"
                given = LibraryModel(folder, state, models.config, bench.threads, dtype)
                contenders[name] = bench.start(name, given)
            else:
                contenders[name] = models.classifier(name, work.precision, work.attention, trains=trains)
    return contenders


def _answer(
    answers: dict[str, torch.Tensor],
    name: str,
    model: nn.Module | Apart,
    inputs: tuple[torch.Tensor | None, ...],
) -> None:
    """Keep what a contender answers. Raises `RuntimeError` if that is not finite."""
    classify = model.classify if isinstance(model, Apart) else partial(peers.classify, model)
    answers[name] = classify(*inputs).float()
    if not answers[name].isfinite().all():
        raise RuntimeError("its log-probabilities are not finite")
