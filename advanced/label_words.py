"""Heads that compute the likelihood of each label's words after a text, with the language model.

For the tokens w_1 ... w_n of a label's words and a text x that ends in a question, by the chain rule

    log P(w | x) = sum_t log P(w_t | x, w_1 ... w_{t-1})

where the model reads the tokens that it should have predicted (teacher forcing). The base's zero-shot classifier sums
all tokens of a label at one position; this is a probability for any number of tokens.

The model only has to predict the token after each *proper prefix* w_1 ... w_{t-1}, and words share prefixes: words of
one token share the empty prefix, so one pass serves all labels. A causal model reads the text once, and then all
prefixes behind it in a short second pass that reuses the text's keys and values. A bidirectional model needs a pass
for each prefix, because no position may see the token that it predicts.

Shapes: b batch   s position   k tokens of a prefix   m prefixes   D model dim   v vocabulary   c classes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from advanced.reading import Heard, Listening, context_after, is_within
from advanced.table import METHODS
from base_llama import causal_mask, sequence_lengths
from classifier import read_last
from engine.context import AttentionContext, embed, hidden_states
from engine.families import reads_last
from engine.tasks import ids_before
from llama import Llama
from tokenizer import Tokenizer
from utils import QUESTION, UserError, prompt_suffix

Ids = tuple[int, ...]


class LabelWords(nn.Module):
    """The likelihoods of the words that stand for the labels; a subclass computes its scores from them in `forward`.

    settings: of the subclass's entry in the table; those that are not given have their defaults. All have template, the
    question after every sentence, with the words for {labels} ("": the course's; a space at its end is dropped, since
    words begin with one), and words, one for each label, joined by + ("": the label names). Raises `UserError` for too
    many or too few words, and for two words of the same tokens.
    """

    name = ""
    question = QUESTION  # where settings have none

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        super().__init__()
        self.settings = METHODS[self.name].defaults | settings
        self.llama, self.tokenizer = llama, tokenizer
        self.pad_id, self.num_labels = tokenizer.pad_id, len(label_names)
        self.words = words_of_labels(self.settings["words"], label_names)
        self.word_ids = ids_of_words(self.words, tokenizer)
        self.begin = ids_before(tokenizer)
        self.prompt_suffix: str | None = prompt_suffix(self.words, self.settings["template"] or self.question).rstrip()
        self.room = max(map(len, self.word_ids)) - 1  # positions that a text must leave for the appended words
        self.read: Callable[..., torch.Tensor] = read_last

    def read_before(self) -> Listening | None:
        """A text that a causal model has read, and that stands before every text; None: no text."""
        return None

    def log_likelihoods(self, token_ids: torch.Tensor) -> torch.Tensor:
        """log P(words of a label | text). token_ids: b s, right-padded -> b c"""
        prefixes = proper_prefixes(self.word_ids)
        if self.llama.config.is_causal and reads_last(self):
            longest = [one for one in prefixes if not any(is_longer(other, one) for other in prefixes)]
            after = self.after_each(token_ids, longest)  # b v for each prefix
        else:
            after = {}
            for prefix in ((), *prefixes):
                text = append(token_ids, prefix, self.pad_id)  # b s+k
                after[prefix] = self.log_probabilities(self.read(self.llama, text, self.pad_id))
        scores = [sum(after[ids[:t]][:, ids[t]] for t in range(len(ids))) for ids in self.word_ids]
        return torch.stack(scores, dim=-1)  # b c

    def after_each(self, token_ids: torch.Tensor, prefixes: Sequence[Ids]) -> dict[Ids, torch.Tensor]:
        """A causal model's log-probabilities after a text, and after each beginning of the prefixes behind the text.

        token_ids: b s -> b v for each beginning
        """
        llama, (tokens, context) = self.llama, context_after(self.read_before(), token_ids, len(self.begin))
        context = context._replace(cache=context.cache or Listening())
        at = sequence_lengths(token_ids, self.pad_id) - 1 - (token_ids.shape[1] - tokens.shape[1])  # b: the last tokens
        states = hidden_states(llama, tokens, context)  # b s D
        after = {(): self.log_probabilities(states[torch.arange(len(at), device=at.device), at])}
        if prefixes:
            behind = context_behind(context.cache, context.start + at + 1, prefixes)
            behind = hidden_states(llama, context=behind, embedded=self.embed_behind(prefixes, at))  # b*m k D
            behind = behind.unflatten(0, (len(at), len(prefixes)))  # b m k D
            for number, ids in enumerate(prefixes):
                after |= {ids[:t]: self.log_probabilities(behind[:, number, t - 1]) for t in range(1, len(ids) + 1)}
        return after

    def embed_behind(self, prefixes: Sequence[Ids], at: torch.Tensor) -> torch.Tensor:
        """The vectors of all prefixes, once for each text. at: b -> b*m k D

        They are looked up apart from the texts, so that a method which moves the vectors of texts leaves them alone.
        """
        k = max(map(len, prefixes))
        ids = [token for prefix in prefixes for token in (*prefix, *prefix[-1:] * (k - len(prefix)))]  # m*k
        embedded = embed(self.llama, torch.tensor(ids, device=at.device)).unflatten(0, (-1, k))  # m k D
        return embedded.repeat(len(at), 1, 1)

    def log_probabilities(self, states: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of the next token. states: b D -> b v"""
        return F.log_softmax(self.llama.output(states).float(), dim=-1)


# ------------------------------------------------------------------------------------------------ words and tokens


def words_of_labels(words: str, label_names: Sequence[str]) -> list[str]:
    """The words of `a+b`, or the label names for "". Raises `UserError` unless there is one for each label."""
    found = [word.strip() for word in words.split("+")] if words else list(label_names)
    if len(found) != len(label_names):
        raise UserError(f"words={words}: there are {len(label_names)} labels, and each has one of {len(found)} words")
    return found


def ids_of_words(words: Sequence[str], tokenizer: Tokenizer, is_first: bool = False) -> list[Ids]:
    """The tokens of each word after a text, or of each text if `is_first`.

    Raises `UserError` for a word without tokens, or with the tokens of another word.
    """
    encode = tokenizer.encode_all if is_first else tokenizer.encode_next
    encoded = [tuple(encode(word)) for word in words]  # whole, however short sentences are cut
    for number, ids in enumerate(encoded):
        if not ids:
            raise UserError(f"the word {words[number]!r} has no tokens")
        if ids in encoded[:number]:
            other = words[encoded.index(ids)]
            raise UserError(f"the words {other!r} and {words[number]!r} of two labels are the same tokens")
    return encoded


def proper_prefixes(words: Sequence[Ids]) -> list[Ids]:
    """The prefixes of all words, each once, without the empty one: a and ab for the word abc."""
    return sorted({ids[:t] for ids in words for t in range(1, len(ids))})


def is_longer(other: Ids, one: Ids) -> bool:
    """Whether `other` begins with `one` and goes on."""
    return len(other) > len(one) and other[: len(one)] == one


def context_behind(texts: Listening, lengths: torch.Tensor, prefixes: Sequence[Ids]) -> AttentionContext:
    """The context of rows that stand behind the real tokens of texts, m rows for each text. lengths: b"""
    m, k, s = len(prefixes), max(map(len, prefixes)), texts.length
    lengths = lengths.repeat_interleave(m)  # b*m
    is_text = is_within(lengths, s)  # b*m s
    own = causal_mask(k, lengths.device).expand(len(lengths), 1, k, k)
    mask = torch.cat((is_text[:, None, None].expand(-1, 1, k, s), own), dim=-1)  # b*m 1 k s+k
    return AttentionContext(start=lengths, mask=mask, cache=Heard(texts, m))


def append(token_ids: torch.Tensor, ids: Ids, pad_id: int) -> torch.Tensor:
    """Put the same tokens behind the last real token of each row, before padding. token_ids: b s -> b s+k"""
    at = sequence_lengths(token_ids, pad_id)[:, None] + torch.arange(len(ids), device=token_ids.device)  # b k
    appended = torch.tensor(ids, dtype=token_ids.dtype, device=token_ids.device).expand_as(at)  # b k
    return F.pad(token_ids, (0, len(ids)), value=pad_id).scatter(1, at, appended)
