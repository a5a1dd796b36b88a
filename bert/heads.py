"""The heads of a BERT, which turn its hidden states into log-probabilities.

All models here take the arguments of the encoder, `(input_ids, segment_ids=None, padding_mask=None)`, and train the
encoder with the head.

Shapes: b batch   s position   D model dim   v vocabulary   c classes
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bert.model import Bert, activation, init_weights

Ids = torch.Tensor | None


def first_or_pooled(hidden: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
    """The vector that stands for the text: the pooled one or, without a pooler, the first token's state. -> b D"""
    return hidden[:, 0] if pooled is None else pooled


class MaskedLM(nn.Module):
    """Hidden states to the vocabulary, as the original does it: a transform, then the token embeddings and a bias.

    The paper (section 3.1, task 1) speaks of an output softmax over the vocabulary; that its matrix is tied to the
    embeddings, and the transform before it, stand in the code that was published with it.
    """

    def __init__(self, encoder: Bert):
        super().__init__()
        config = encoder.config
        self.transform = nn.Linear(config.dim, config.dim)
        self.activation = activation(config.activation)
        self.norm = nn.LayerNorm(config.dim, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.dim, config.vocab_size)
        self.decoder.weight = encoder.embeddings.tokens.weight  # tied (Press & Wolf 2017, arXiv:1608.05859)
        init_weights(self.transform)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits. hidden: ... D -> ... v, for all positions or a selection of them."""
        return self.decoder(self.norm(self.activation(self.transform(hidden))))


def masked_lm(encoder: Bert, plain: bool) -> nn.Module:
    """The original's head or, if `plain` or the config says so, one matrix of its own, as textbooks have it."""
    return _linear(encoder, encoder.config.vocab_size) if plain or encoder.config.plain_heads else MaskedLM(encoder)


def _words(head: nn.Module, hidden: torch.Tensor, at: Ids) -> torch.Tensor:
    """Log-probabilities of tokens. hidden: b s D, at: b s -> b s v, or n v"""
    return F.log_softmax(head(hidden if at is None else hidden[at]), dim=-1)


def _linear(encoder: Bert, n_outputs: int) -> nn.Linear:
    linear = nn.Linear(encoder.config.dim, n_outputs)
    init_weights(linear)
    return linear


class BertForPreTraining(nn.Module):
    """The two tasks of pre-training (Devlin et al. 2019, section 3.1): masked tokens, and whether B follows A.

    plain: a linear layer for the masked tokens, not the original's head; the `plain_heads` of a config says the same.
    Without a pooler, the next sentence is predicted from the first token's state.
    """

    def __init__(self, encoder: Bert, plain: bool = False):
        super().__init__()
        self.encoder = encoder
        self.masked_lm = masked_lm(encoder, plain)
        self.next_sentence = _linear(encoder, 2)

    def forward(
        self, input_ids: torch.Tensor, segment_ids: Ids = None, padding_mask: Ids = None, at: Ids = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """b s -> log-probabilities of the next sentence (b 2: class 0 says that B follows A) and of tokens (b s v).

        at: b s, true at the n tokens to predict: then n v, row after row, which saves most of the work.
        """
        hidden, pooled = self.encoder(input_ids, segment_ids, padding_mask)
        next_sentence = F.log_softmax(self.next_sentence(first_or_pooled(hidden, pooled)), dim=-1)
        return next_sentence, _words(self.masked_lm, hidden, at)


class BertForNextSentencePrediction(nn.Module):
    """The next sentence alone. Without a pooler it is predicted from the first token's state."""

    def __init__(self, encoder: Bert):
        super().__init__()
        self.encoder = encoder
        self.next_sentence = _linear(encoder, 2)

    def forward(self, input_ids: torch.Tensor, segment_ids: Ids = None, padding_mask: Ids = None) -> torch.Tensor:
        """b s -> log-probabilities b 2: class 0 says that B follows A"""
        hidden, pooled = self.encoder(input_ids, segment_ids, padding_mask)
        return F.log_softmax(self.next_sentence(first_or_pooled(hidden, pooled)), dim=-1)


class BertForMaskedLM(nn.Module):
    """Masked tokens alone, for encoders that were published with this task alone, as DistilBERT."""

    def __init__(self, encoder: Bert, plain: bool = False):
        super().__init__()
        self.encoder = encoder
        self.masked_lm = masked_lm(encoder, plain)

    def forward(
        self, input_ids: torch.Tensor, segment_ids: Ids = None, padding_mask: Ids = None, at: Ids = None
    ) -> torch.Tensor:
        """b s -> log-probabilities b s v. at: b s, true at n tokens -> n v for these alone."""
        hidden, _ = self.encoder(input_ids, segment_ids, padding_mask)
        return _words(self.masked_lm, hidden, at)


class BertForSequenceClassification(nn.Module):
    """A class for a text or a pair of texts (section 4.1): dropout and a linear layer on the pooled vector.

    An encoder without a pooler gets a layer with ReLU in its place, as DistilBERT's classifier has it.
    """

    family = "bert"  # see `engine.families`
    prompt_suffix = None

    def __init__(self, encoder: Bert, n_classes: int):
        super().__init__()
        self.encoder, self.num_labels = encoder, n_classes
        self.transform = None if encoder.config.has_pooler else _linear(encoder, encoder.config.dim)
        self.dropout = nn.Dropout(encoder.config.head_dropout)
        self.classifier = _linear(encoder, n_classes)
        self.pad_id = encoder.config.pad_id

    @property
    def classifier_head(self) -> nn.Linear:
        """The name that `LlamaEmbeddingClassifier` has for it: methods (advanced/) find it so in both."""
        return self.classifier

    def forward(self, input_ids: torch.Tensor, segment_ids: Ids = None, padding_mask: Ids = None) -> torch.Tensor:
        """b s -> log-probabilities b c"""
        hidden, pooled = self.encoder(input_ids, segment_ids, padding_mask)
        text = first_or_pooled(hidden, pooled)  # b D
        if self.transform is not None:
            text = F.relu(self.transform(text))
        return F.log_softmax(self.classifier(self.dropout(text)), dim=-1)


class BertForTokenClassification(nn.Module):
    """A class for each token (section 5.3, named entities)."""

    def __init__(self, encoder: Bert, n_classes: int):
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(encoder.config.head_dropout)
        self.classifier = _linear(encoder, n_classes)

    def forward(self, input_ids: torch.Tensor, segment_ids: Ids = None, padding_mask: Ids = None) -> torch.Tensor:
        """b s -> log-probabilities b s c"""
        hidden, _ = self.encoder(input_ids, segment_ids, padding_mask)
        return F.log_softmax(self.classifier(self.dropout(hidden)), dim=-1)


class BertForQuestionAnswering(nn.Module):
    """Where in a text the answer to a question begins and ends (section 4.2): a start vector and an end vector."""

    def __init__(self, encoder: Bert):
        super().__init__()
        self.encoder = encoder
        self.span = _linear(encoder, 2)

    def forward(
        self, input_ids: torch.Tensor, segment_ids: Ids = None, padding_mask: Ids = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """b s -> log-probabilities, over all positions, of the answer's first and of its last token, b s each.

        As in the original, the question and padding count as positions; training makes them improbable.
        """
        hidden, _ = self.encoder(input_ids, segment_ids, padding_mask)
        start, end = F.log_softmax(self.span(hidden), dim=1).unbind(dim=-1)
        return start, end
