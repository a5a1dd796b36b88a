"""From texts to a score: batches of token ids, what a `Task` computes from them and its loss, how it is judged.

In: `Example`s or documents. Out: padded batches, perhaps grouped by length, losses, scores, the confusion matrix
and the errors with the least likely gold label.

Shapes: b batch, s position, n sentences, c classes, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from engine.data import NO_GOLD_LABEL, Example, has_gold_labels, majority_accuracy
from engine.processes import Batch, Distributed
from tokenizer import Tokenizer
from utils import UserError


def padded(rows: Sequence[list[int]], fill: int) -> torch.Tensor:
    """Rows of several lengths as b s, with `fill` at the end of the shorter ones."""
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


class Sentences(Dataset):
    """Labelled sentences with their token ids, encoded once.

    sentences: the texts for the output file. is_too_long: for each sentence, whether it has more tokens than fit.
    """

    labels: list[int]
    sentences: list[str]
    token_ids: list[list[int]]
    is_too_long: list[bool]
    pad_id: int

    @property
    def too_long(self) -> int:
        """The number of sentences with more tokens than fit into the model."""
        return sum(self.is_too_long)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[list[int], int, str, int]:
        return self.token_ids[index], self.labels[index], self.sentences[index], index

    def collate_fn(self, items: list[tuple[list[int], int, str, int]]) -> dict[str, Any]:
        """A batch, right-padded to its longest row: token_ids b s, labels b, sents, and indices in the data set."""
        token_ids, labels, sentences, indices = zip(*items, strict=True)
        return {
            "token_ids": padded(token_ids, self.pad_id),
            "labels": torch.tensor(labels),
            "sents": list(sentences),
            "indices": list(indices),
        }

    def loader(
        self, batch_size: int, *, shuffle: bool = False, bucket: bool = False, pin_memory: bool = False
    ) -> DataLoader:
        """Batches in file order, or in an order drawn from PyTorch's global random generator.

        bucket: put sentences of similar length into one batch, so that there is little padding; for models whose
        predictions do not depend on the batch. pin_memory: CUDA copies from such memory while the program goes on.
        """
        if bucket:
            batches = LengthBuckets([len(ids) for ids in self.token_ids], batch_size, shuffle)
            return DataLoader(self, batch_sampler=batches, collate_fn=self.collate_fn, pin_memory=pin_memory)
        return DataLoader(self, batch_size, shuffle, collate_fn=self.collate_fn, pin_memory=pin_memory)


class LengthBuckets(Sampler[list[int]]):
    """Batches of sentences of similar length.

    shuffle: divide the sentences at random into groups of `GROUP` batches, sort each group by length, cut it into
    batches, and draw the order of the batches: each epoch has other batches, with short and long sentences mixed over
    the epoch. Otherwise sort all sentences, the longest first: a batch that is too large for the memory fails at once.
    """

    GROUP = 50

    def __init__(self, lengths: Sequence[int], batch_size: int, shuffle: bool):
        self.lengths, self.batch_size, self.shuffle = lengths, batch_size, shuffle

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        count = len(self.lengths)
        order = torch.randperm(count).tolist() if self.shuffle else list(range(count))
        size = self.GROUP * self.batch_size if self.shuffle else count
        batches = []
        for start in range(0, count, size):
            group = sorted(order[start : start + size], key=self.lengths.__getitem__, reverse=True)
            batches += [group[first : first + self.batch_size] for first in range(0, len(group), self.batch_size)]
        order = torch.randperm(len(batches)).tolist() if self.shuffle else list(range(len(batches)))
        yield from (batches[position] for position in order)


class EncodingRules(NamedTuple):
    """How sentences become token ids: the text after each sentence, and the largest length in tokens.

    room: the number of positions to leave free at the end; if it is not None, the prompt suffix is never cut.
    follows: whether the model puts other text between bos and each sentence, so that a space is before the sentence.
    """

    prompt_suffix: str | None = None
    max_seq_len: int | None = None
    is_causal: bool = False
    room: int | None = None
    follows: bool = False


class LlamaDataset(Sentences):
    """Sentences as a Llama reads them: bos, sentence, prompt suffix; no eos.

    `sentences` include the suffix. The bidirectional reference uses a text longer than `max_seq_len` whole; for a
    causal model the sentence is cut, never the suffix. Raises `UserError` if the suffix leaves no room for a sentence.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, rules: EncodingRules | None = None):
        rules = rules or EncodingRules()
        self.labels = [example.label for example in examples]
        self.pad_id = tokenizer.pad_id
        suffix = "" if rules.prompt_suffix is None else f" {rules.prompt_suffix}"
        self.sentences = [example.sentence + suffix for example in examples]
        if rules.is_causal or rules.room is not None:
            suffix_ids = [] if rules.prompt_suffix is None else tokenizer.encode_next(rules.prompt_suffix)
            sentence_ids = _sentence_ids([example.sentence for example in examples], tokenizer, rules)
        else:
            sentence_ids = tokenizer.encode_batch(self.sentences, bos=True, eos=False)
            suffix_ids = []
        taken = len(suffix_ids) + (rules.room or 0)
        limit = float("inf") if rules.max_seq_len is None else rules.max_seq_len - taken
        if rules.is_causal and taken and limit < 2:
            raise UserError(f"the prompt takes {taken} tokens, which leaves no room in max_seq_len={rules.max_seq_len}")
        self.is_too_long = [len(ids) > limit for ids in sentence_ids]
        cut = int(limit) if rules.is_causal and rules.max_seq_len is not None else None
        self.token_ids = [ids[:cut] + suffix_ids for ids in sentence_ids]


def ids_before(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before a text: bos, or none."""
    framed, bare = (tokenizer.encode("a", bos=bos, eos=False) for bos in (True, False))
    return tuple(framed[: len(framed) - len(bare)])


def _sentence_ids(sentences: list[str], tokenizer: Tokenizer, rules: EncodingRules) -> list[list[int]]:
    """The token ids of each sentence without its suffix, behind what the tokenizer puts before a text."""
    if rules.follows:
        begin = list(ids_before(tokenizer))
        return [begin + tokenizer.encode_next(sentence)[: tokenizer.max_len] for sentence in sentences]
    encoded = tokenizer.encode_batch(sentences, bos=True, eos=False)
    if rules.prompt_suffix is None or all(sentences):
        return encoded
    # alone, an empty text gets bos from a tokenizer that puts none before others; here the suffix follows it
    begin = list(ids_before(tokenizer))
    return [ids if sentence else begin for ids, sentence in zip(encoded, sentences, strict=True)]


class TextWindows(Dataset):
    """A long text, cut into windows so that every token of the text is predicted once.

    Each window begins with bos and predicts the next `length` tokens of the text. The last window may be shorter; it
    is a batch by itself.
    """

    def __init__(self, token_ids: Sequence[int], bos_id: int, length: int):
        self.token_ids, self.bos_id, self.length = torch.tensor(token_ids), bos_id, length

    def __len__(self) -> int:
        return -(-len(self.token_ids) // self.length)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.token_ids[index * self.length : (index + 1) * self.length]

    def collate_fn(self, windows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """token_ids and targets, b s each: the target of a position is the next token."""
        targets = torch.stack(windows)  # b s
        bos = torch.full_like(targets[:, :1], self.bos_id)
        return {"token_ids": torch.cat((bos, targets[:, :-1]), dim=1), "targets": targets}

    def loader(self, batch_size: int) -> DataLoader:
        """Batches in the order of the text."""
        whole = len(self.token_ids) // self.length
        batches = [list(range(whole)[first : first + batch_size]) for first in range(0, whole, batch_size)]
        batches += [[whole]] if whole < len(self) else []
        return DataLoader(self, batch_sampler=batches, collate_fn=self.collate_fn)


# ---------------------------------------------------------------------------------------------------------------- tasks


@dataclass
class Evaluation:
    """Predictions and gold labels, both in the order of the data set (batches may have another order)."""

    predictions: list[int]
    labels: list[int]

    @property
    def accuracy(self) -> float:
        return sum(map(int.__eq__, self.predictions, self.labels)) / len(self.labels)

    @property
    def score(self) -> float:
        return self.accuracy

    @property
    def majority_accuracy(self) -> float:
        """The accuracy of always answering the most frequent gold label."""
        return majority_accuracy(self.labels)

    @property
    def has_gold_labels(self) -> bool:
        """Whether the labels can be gold labels; placeholders are all equal."""
        return has_gold_labels(self.labels)

    def add(self, log_probs: torch.Tensor, batch: Batch) -> None:
        """Record the predictions for some rows of a batch. log_probs: b c"""
        for index, prediction in zip(batch["indices"], log_probs.argmax(dim=-1).tolist(), strict=False):
            self.predictions[index] = prediction

    def finish(self, distributed: Distributed) -> None:
        self.predictions = distributed.merge(self.predictions)


@dataclass
class LanguageEvaluation:
    """The cross-entropy of a language model on a text. nats: the sum over its tokens."""

    nats: float = 0.0
    tokens: int = 0

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def score(self) -> float:
        """Minus the loss: a higher score is better."""
        return -self.loss

    def add(self, logits: torch.Tensor, batch: Batch) -> None:
        """Add the losses of a batch. logits: b s v"""
        self.nats += next_token_losses(logits, batch["targets"]).cpu().double().sum().item()  # MPS has no float64
        self.tokens += int((batch["targets"] != NO_TARGET).sum())

    def finish(self, distributed: Distributed) -> None:
        both = distributed.total(torch.tensor([self.nats, self.tokens], dtype=torch.float64))
        self.nats, self.tokens = both[0].item(), int(both[1])


class Task:
    """How a model computes its outputs from a batch, the loss of the outputs, and their evaluation."""

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        """The outputs of the model, for `loss` and the evaluation. changed: further arguments of the model."""
        raise NotImplementedError

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        """The loss of some rows of a batch. The losses of all parts of a batch sum to the loss of the batch."""
        raise NotImplementedError

    def check(self, outputs: torch.Tensor) -> None:
        """Raise `UserError` if the loss is not defined for such outputs. Called once per epoch."""

    def count_not_finite(self, outputs: Any) -> torch.Tensor:
        """The number of NaN values in the outputs."""
        return outputs.isnan().sum()

    def evaluation(self, dataset: Any) -> Any:
        """A new evaluation: `add` is called with every batch, then `finish`; a higher `score` is better."""
        raise NotImplementedError


LARGEST_LOG_PROBABILITY = 1e-3  # log(1), plus the rounding error of half precision


class Classification(Task):
    """One label for each text. The model: token ids b s -> log-probabilities b c."""

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        return network(batch["token_ids"], **changed)  # b c

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        # divided by the full batch size even in a short last batch: the reference numbers depend on it
        return F.nll_loss(outputs, batch["labels"], reduction="sum") / batch_size

    def check(self, outputs: torch.Tensor) -> None:
        if bool((outputs > LARGEST_LOG_PROBABILITY).any()):
            raise UserError("the classifier's outputs are not log-probabilities (log_softmax), so the loss is none")

    def evaluation(self, dataset: Any) -> Evaluation:
        return Evaluation([NO_GOLD_LABEL] * len(dataset.labels), list(dataset.labels))


class OtherLoss(Task):
    """The task `plain` with another loss, which a subclass computes; its outputs and their evaluation stay."""

    def __init__(self, plain: Task):
        self.plain = plain

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        return self.plain.forward(network, batch, **changed)

    def check(self, outputs: torch.Tensor) -> None:
        self.plain.check(outputs)

    def evaluation(self, dataset: Any) -> Any:
        return self.plain.evaluation(dataset)


class NextToken(Task):
    """Prediction of every token from the tokens before it. The model: a causal `Llama`.

    A batch has `targets` b s and may have `weights` b s, which sum to 1 over the whole batch, for the loss.
    """

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        return network(batch["token_ids"], batch["targets"], **changed)[0]  # b s v

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        losses = next_token_losses(outputs, batch["targets"])  # b s
        if "weights" in batch:
            return (losses * batch["weights"]).sum()
        return losses.sum() / (batch_size * losses.shape[1])

    def evaluation(self, dataset: Any) -> LanguageEvaluation:
        return LanguageEvaluation()


CLASSIFICATION = Classification()
NO_TARGET = -100  # the label that PyTorch's loss functions ignore


def next_token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropies in nats, 0 where the target is `NO_TARGET`. logits: b s v, targets: b s -> b s"""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


LARGEST_EXPONENT = 709.0  # e^709 is still a float, e^710 is not


def perplexity_of(nats: float) -> float:
    """The perplexity, e^nats. nats: the mean loss of a token"""
    return math.inf if nats > LARGEST_EXPONENT else math.exp(nats)


# ---------------------------------------------------------------------------- the confusion matrix and the worst errors

WORST = 30  # the number of errors to keep


@dataclass
class WithProbabilities(Evaluation):
    """An evaluation that keeps the probabilities of all classes beside the predicted class."""

    probabilities: list[list[float]] = field(default_factory=list)  # n c

    def add(self, log_probs: torch.Tensor, batch: Batch) -> None:
        super().add(log_probs, batch)
        if not self.probabilities:
            self.probabilities = [[0.0] * log_probs.shape[-1] for _ in self.labels]
        for index, row in zip(batch["indices"], log_probs.float().softmax(-1).tolist(), strict=False):
            self.probabilities[index] = row

    def finish(self, distributed: Distributed) -> None:
        """Combine the processes: for each sentence, one process has the probabilities and the others have zeros."""
        super().finish(distributed)
        self.probabilities = distributed.total(torch.tensor(self.probabilities)).tolist()


class Judging(Classification):
    """Classification whose evaluation keeps the probabilities (`WithProbabilities`)."""

    def evaluation(self, dataset: Any) -> WithProbabilities:
        return WithProbabilities([NO_GOLD_LABEL] * len(dataset.labels), list(dataset.labels))


def outcome_of(
    split: str, sentences: Sequence[str], result: WithProbabilities, label_names: Sequence[str]
) -> dict[str, Any]:
    """The results as plain values, for a line of figures and for the HTML page."""
    content = {"split": split, "label_names": list(label_names), "count": len(sentences)}
    if not has_gold_labels(result.labels):
        return content  # the labels of a test file may be placeholders
    return content | {
        "accuracy": result.accuracy,
        "majority": result.majority_accuracy,
        "confusion": confusion(result.labels, result.predictions, len(label_names)),
        "errors": worst_errors(sentences, result),
    }


def confusion(labels: Sequence[int], predictions: Sequence[int], classes: int) -> list[list[int]]:
    """The number of sentences for each gold label (row) and predicted label (column)."""
    counts = [[0] * classes for _ in range(classes)]
    for label, prediction in zip(labels, predictions, strict=True):
        counts[label][prediction] += 1
    return counts


def worst_errors(sentences: Sequence[str], result: WithProbabilities) -> list[dict[str, Any]]:
    """The errors whose gold label had the lowest probabilities, at most WORST."""
    wrong: list[dict[str, Any]] = [
        {
            "index": index,
            "sentence": sentences[index],
            "label": label,
            "prediction": prediction,
            "probability": round(row[prediction], 5),
            "gold_probability": round(row[label], 5),
        }
        for index, (label, prediction, row) in enumerate(
            zip(result.labels, result.predictions, result.probabilities, strict=True)
        )
        if label != prediction
    ]
    return sorted(wrong, key=lambda error: error["gold_probability"])[:WORST]
