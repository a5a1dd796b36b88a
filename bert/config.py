"""The shape of a BERT. Nothing here needs PyTorch."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from config import Checks
from utils import short_repr

POSITIONS = ("learned", "sinusoidal")
ACTIVATIONS = ("gelu", "gelu_new", "relu")  # as `config.json` calls them; gelu_new is GELU approximated by tanh

BERT_PRESETS = {
    "base": dict(dim=768, n_layers=12, n_heads=12),
    "large": dict(dim=1024, n_layers=24, n_heads=16),
    "mini": dict(vocab_size=300, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_seq_len=64),
}
# How the BERT of textbooks differs from the paper's: in the embeddings, and in heads that are single matrices.
TEXTBOOK = dict(
    positions="sinusoidal", n_segments=3, first_segment=1, embedding_norm=False, has_pooler=False, plain_heads=True
)
# The shape of a new model of `bert.pretrain`, unless flags say otherwise.
NEW_BERT = {"dim": 192, "n_layers": 6, "n_heads": 6, "hidden_dim": 768, "vocab_size": 4096, "max_seq_len": 512}


@dataclass(frozen=True)
class BertConfig(Checks):
    """Hyper-parameters of a BERT (Devlin et al. 2019, arXiv:1810.04805, section 3); the defaults are those of base.

    Left as None, `hidden_dim` becomes 4 * `dim`, and `head_dropout`, that of the heads, becomes `dropout`. Raises
    `ValueError`, naming the field, for a value that no model can have.

    positions: "learned" as in the paper, or "sinusoidal" as in Vaswani et al. 2017 (arXiv:1706.03762, section 3.5),
    which are never trained.
    n_segments, has_pooler: 0 and False in a DistilBERT (Sanh et al. 2019, arXiv:1910.01108, section 3).
    first_segment: the number of a text's first segment; 1 where segment 0 is that of padding. embedding_norm: whether
    the sum of the embeddings is normalised. plain_heads: masked tokens are predicted by a matrix of its own.
    """

    presets = BERT_PRESETS

    vocab_size: int = 30522
    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    hidden_dim: int | None = None
    max_seq_len: int = 512
    n_segments: int = 2
    first_segment: int = 0
    embedding_norm: bool = True
    has_pooler: bool = True
    plain_heads: bool = False
    positions: str = "learned"
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    head_dropout: float | None = None
    layer_norm_eps: float = 1e-12
    pad_id: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "max_seq_len"):
            self._require_positive_int(name)
        for name in ("n_segments", "first_segment", "pad_id"):
            self._require_int(name, least=0)
        if self.hidden_dim is None:
            object.__setattr__(self, "hidden_dim", 4 * self.dim)
        self._require_positive_int("hidden_dim")
        if self.head_dropout is None:
            object.__setattr__(self, "head_dropout", self.dropout)
        for name in ("dropout", "attention_dropout", "head_dropout"):
            self._require_fraction(name)
        self._require_epsilon("layer_norm_eps")
        self._require_choice("positions", POSITIONS)
        self._require_choice("activation", ACTIVATIONS)
        for name in ("embedding_norm", "has_pooler", "plain_heads"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={short_repr(getattr(self, name))} must be True or False")
        if self.first_segment and self.first_segment >= self.n_segments:
            raise ValueError(f"first_segment={self.first_segment} must be below n_segments={self.n_segments}")
        if self.dim % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} must divide dim={self.dim}")
        if self.positions == "sinusoidal" and self.dim % 2:
            raise ValueError(f"dim={self.dim} must be even: sinusoidal positions are pairs of sine and cosine")
        if self.pad_id >= self.vocab_size:
            raise ValueError(f"pad_id={self.pad_id} must be below vocab_size={self.vocab_size}")

    @classmethod
    def textbook(
        cls, vocab_size: int, hidden: int = 768, n_layers: int = 12, attn_heads: int = 12, **changes
    ) -> BertConfig:
        """The BERT of textbooks: see `TEXTBOOK`. changes: other fields. Raises `ValueError`.

        Ids of segments are 1 and 2, and 0 at padding. `BertForPreTraining` gives it its two plain heads.
        """
        shape = dict(vocab_size=vocab_size, dim=hidden, n_layers=n_layers, n_heads=attn_heads)
        return cls(**{**shape, **TEXTBOOK, **changes})

    @property
    def n_texts(self) -> int:
        """How many texts of one input the segments tell apart."""
        return self.n_segments - self.first_segment

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def attention(self) -> None:
        """There is one kind: every token sees every other one."""

    @property
    def ignores_padding(self) -> bool:
        """No token attends to padding, so the result for a text does not depend on the rest of its batch."""
        return True


def config_of(args: Namespace, vocab_size: int, pad_id: int = 0) -> BertConfig:
    """The config of a new model of `bert.pretrain`. Raises `ValueError` for a shape that no model can have."""
    sizes = {name: getattr(args, name) for name in NEW_BERT if name != "vocab_size"}
    more = {"dropout": args.dropout, "attention_dropout": args.dropout, **(TEXTBOOK if args.textbook else {})}
    return BertConfig(vocab_size=vocab_size, pad_id=pad_id, **sizes, **more)
