"""The shape of a Llama. Nothing here needs PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from utils import join_names, short_repr

Config = TypeVar("Config", bound="Checks")

ATTENTION_KINDS = ("bidirectional", "causal")
PRECISIONS = ("fp32", "bf16", "int8")
MAX_POSITIONS = 2**20  # the RoPE table has a row for each: keeps a damaged config from asking for terabytes
ROPE_SCALINGS = {  # their numbers, under the names that Hugging Face gives them
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

PRESETS = {
    "stories42M": dict(
        dim=512, n_layers=8, n_heads=8, n_kv_heads=8, vocab_size=32000, multiple_of=32, max_seq_len=1024
    ),
    "tiny": dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=300, multiple_of=16, max_seq_len=64),
}


class Checks:
    """What the configs of all models share: checks of single fields, which raise `ValueError` by name, and presets."""

    presets: ClassVar[dict[str, dict]] = {}

    def _require_positive_int(self, name: str) -> None:
        self._require_int(name, least=1)

    def _require_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise ValueError(f"{name}={short_repr(value)} must be a whole number of at least {least}, and below 2^31")

    def _require_number(self, name: str, fits: Callable[[float], bool], wanted: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
            raise ValueError(f"{name}={short_repr(value)} must be a number {wanted}")

    def _require_choice(self, name: str, choices: Iterable[str]) -> None:
        value = getattr(self, name)
        if value not in tuple(choices):
            raise ValueError(f"{name}={short_repr(value)} must be one of {', '.join(choices)}")

    def _require_fraction(self, name: str) -> None:
        self._require_number(name, lambda p: 0.0 <= p < 1.0, "from 0 to below 1")

    def _require_epsilon(self, name: str) -> None:
        self._require_number(name, lambda eps: 0.0 < eps < 1.0, "above 0 and below 1")

    def _require_positions(self, name: str) -> None:
        self._require_positive_int(name)
        if getattr(self, name) > MAX_POSITIONS:
            raise ValueError(f"{name}={getattr(self, name)} must be at most {MAX_POSITIONS}")

    @classmethod
    def from_preset(cls: type[Config], name: str, **changes) -> Config:
        """`LlamaConfig.from_preset("tiny", attention="causal")`. Raises `ValueError` for an unknown preset."""
        if name not in cls.presets:
            raise ValueError(f"no preset {short_repr(name)}; there are {', '.join(cls.presets)}")
        return cls(**{**cls.presets[name], **changes})


@dataclass(frozen=True)
class LlamaConfig(Checks):
    """Hyper-parameters of a Llama 2 (Touvron et al. 2023, arXiv:2307.09288); the defaults are those of `stories42M.pt`.

    Left as None, `n_kv_heads` becomes `n_heads` and `hidden_dim` follows the SwiGLU rule. Raises `ValueError`,
    naming the field, for a value that no model can have. A model is made for one config, whose fields therefore cannot
    be set; another config is `dataclasses.replace(config, attention="causal")`.

    attention: "bidirectional" lets every position attend to every other, padding included (the assignment's reference);
    "causal" lets a position attend to itself and to what stands before it (what Llama is).
    tied: whether the token embeddings are the output matrix as well. rope_scaling: how angles were stretched for longer
    texts, a name of `ROPE_SCALINGS` and its numbers, as `("linear", 4.0)`; see rope.py.
    """

    presets = PRESETS

    vocab_size: int = 32000
    dim: int = 512
    dropout: float = 0.0
    n_layers: int = 8
    n_heads: int = 8
    n_kv_heads: int | None = 8
    max_seq_len: int = 1024
    layer_norm_eps: float = 1e-5
    multiple_of: int = 32
    hidden_dim: int | None = None
    attention: str = "bidirectional"
    rope_theta: float = 10000.0
    tied: bool = True
    rope_scaling: tuple | None = None

    def __post_init__(self) -> None:
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of"):
            self._require_positive_int(name)
        self._require_positions("max_seq_len")
        if self.hidden_dim is None:
            object.__setattr__(self, "hidden_dim", swiglu_hidden_dim(self.dim, self.multiple_of))
        self._require_positive_int("hidden_dim")
        self._require_fraction("dropout")
        self._require_epsilon("layer_norm_eps")
        self._require_number("rope_theta", lambda theta: 0.0 < theta < 1e30, "above 0 and below 1e30")
        object.__setattr__(self, "rope_theta", float(self.rope_theta))  # of whole ones PyTorch takes 64 bits at most
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise ValueError(f"n_heads={self.n_heads} must divide dim={self.dim} into heads of an even size")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}")
        self._require_choice("attention", ATTENTION_KINDS)
        if not isinstance(self.tied, bool):
            raise ValueError(f"tied={short_repr(self.tied)} must be True or False")
        self._require_scaling()

    def _require_scaling(self) -> None:
        if self.rope_scaling is None:
            return
        kind, *numbers = self.rope_scaling if isinstance(self.rope_scaling, (tuple, list)) else (None,)
        names = ROPE_SCALINGS.get(kind, ()) if isinstance(kind, str) else ()
        are_possible = all(type(number) in (int, float) and 0.0 < number < 1e6 for number in numbers)
        if not names or len(numbers) != len(names) or not are_possible:
            known = " or ".join(f"{kind} with {', '.join(names)}" for kind, names in ROPE_SCALINGS.items())
            raise ValueError(
                f"rope_scaling={short_repr(self.rope_scaling)} must be {known}, numbers above 0 and below 1e6"
            )
        if kind == "llama3" and not numbers[1] < numbers[2]:
            raise ValueError(
                f"rope_scaling={short_repr(self.rope_scaling)}: low_freq_factor must be below high_freq_factor"
            )
        object.__setattr__(self, "rope_scaling", (kind, *map(float, numbers)))

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def is_causal(self) -> bool:
        return self.attention == "causal"

    @property
    def ignores_padding(self) -> bool:
        """Whether what is said of a text does not depend on the batch that it stands in."""
        return self.is_causal

    @classmethod
    def from_checkpoint(cls, model_args: dict, **changes) -> LlamaConfig:
        """The config that a checkpoint's `model_args` describe, with `changes` on top.

        Raises `ValueError` for a key that no Llama of this family has, and names it: a silently dropped setting
        would load a model that computes something else.
        """
        if not isinstance(model_args, dict):
            raise ValueError(f"model_args is a {type(model_args).__name__}, not a dict")
        known = {field.name for field in fields(cls)}
        unknown = [str(key) for key in model_args if key not in known]
        if unknown:
            raise ValueError(f"model_args has unknown keys: {join_names(unknown)}")
        return cls(**{**model_args, **changes})


def swiglu_hidden_dim(dim: int, multiple_of: int) -> int:
    """Llama's feed-forward width: two thirds of 4 * dim, rounded up to a multiple of `multiple_of`.

    SwiGLU has three matrices where a plain feed-forward has two; two thirds of the width keeps the parameter count
    (Shazeer 2020, arXiv:2002.05202, section 2).
    """
    hidden_dim = 2 * 4 * dim // 3
    return multiple_of * ((hidden_dim + multiple_of - 1) // multiple_of)
