"""From token ids to log-probabilities over classes: zero-shot through the language model, or with a trained head.

Shapes: b batch, s position, D model dim, v vocabulary, c classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from base_llama import sequence_lengths
from llama import Llama, load_pretrained
from tokenizer import Tokenizer
from utils import prompt_suffix

PAD_ID = 3  # `<0x00>` in every SentencePiece vocabulary of the Llama kind: unk, bos, eos, then the 256 bytes


def read_last(llama: Llama, token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """The hidden state that represents the whole text. token_ids: b s -> b D

    In a causal model this is the state at the last real token, which has seen all others. The bidirectional reference
    takes the last position of the padded batch, which is padding in most rows; its published numbers depend on that.
    """
    _, hidden_states = llama(token_ids)  # b s D
    last = torch.full_like(token_ids[:, 0], token_ids.shape[1] - 1)  # b
    at = sequence_lengths(token_ids, pad_id) - 1 if llama.config.is_causal else last
    return hidden_states[torch.arange(len(at), device=at.device), at]


class LlamaZeroShotClassifier(nn.Module):
    """Asks the language model which label name comes next; nothing is trained.

    config: any object with `pretrained_model_path`, `num_labels` and, optionally, `attention`; llama: replaces the
    model of that path. Raises `ValueError` if the number of names is not `num_labels`.
    """

    def __init__(self, config: Any, tokenizer: Tokenizer, label_names: list[str], *, llama: Llama | None = None):
        super().__init__()
        self.num_labels = config.num_labels
        if len(label_names) != self.num_labels:
            raise ValueError(f"{len(label_names)} label names for {self.num_labels} labels")
        attention = getattr(config, "attention", None)
        self.llama = llama or load_pretrained(config.pretrained_model_path, attention=attention)
        self.llama.requires_grad_(False)
        self.tokenizer = tokenizer
        self.label_name_ids = [tokenizer.encode(name, bos=False, eos=False) for name in label_names]
        self.prompt_suffix = prompt_suffix(label_names)  # the text after every sentence
        self.read: Callable[..., torch.Tensor] = read_last

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The sum of each label's log-probabilities, at *one* position as in the assignment. input_ids: b s -> b c"""
        last = self.read(self.llama, input_ids, self.tokenizer.pad_id)  # b D
        log_probabilities = F.log_softmax(self.llama.output(last), dim=-1)  # b v
        scores = [log_probabilities[:, ids].sum(dim=-1) for ids in self.label_name_ids]
        return torch.stack(scores, dim=-1)  # b c


class LlamaEmbeddingClassifier(nn.Module):
    """A linear head on the hidden state that represents the text; training changes the head and the Llama below it.

    config: any object with `pretrained_model_path`, `num_labels`, `hidden_dropout_prob`, `option` ("finetune" trains
    the Llama, "pretrain" freezes it) and, optionally, `attention` and `pad_id`; llama: replaces the model of that path.
    """

    def __init__(self, config: Any, *, llama: Llama | None = None):
        super().__init__()
        self.num_labels = config.num_labels
        self.pad_id = getattr(config, "pad_id", PAD_ID)
        attention = getattr(config, "attention", None)
        self.llama = llama or load_pretrained(config.pretrained_model_path, attention=attention)
        self.llama.requires_grad_(config.option != "pretrain")
        if not self.llama.config.tied:  # this classifier predicts no next token
            self.llama.output.requires_grad_(False)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier_head = nn.Linear(self.llama.config.dim, self.num_labels)
        self.prompt_suffix = None
        self.read: Callable[..., torch.Tensor] = read_last

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """log_softmax(head(dropout(state at the last position))). input_ids: b s -> log-probabilities b c

        The exponentials of a row sum to 1: with a head of zeros and two classes each is log(1/2) = -0.69.
        """
        last = self.read(self.llama, input_ids, self.pad_id)  # b D
        return F.log_softmax(self.classifier_head(self.dropout(last)), dim=-1)  # b c
