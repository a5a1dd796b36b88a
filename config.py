"""`LlamaConfig`, the hyper-parameters of a Llama, and its presets. This module does not import PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, fields
from typing import Any, ClassVar, TypeVar

from utils import join_names, short_repr

Config = TypeVar("Config", bound="Checks")

ATTENTION_KINDS = ("bidirectional", "causal")
NORM_KINDS = ("rms", "layer")
# Limits to the tokens that `generate` draws, in the course's editions.
SAMPLINGS: dict[str, dict[str, Any]] = {"plain": {}, "epsilon": {"epsilon": 0.05}, "top-p": {"top_p": 0.95}}
PRECISIONS = ("fp32", "bf16", "int8", "int4")
ROUNDING = ("int8", "int4")  # those that round the weights for good, so that they cannot be trained
ROPE_SCALINGS = {  # the numbers of each kind, under their Hugging Face names
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

PRESETS = {
    "stories42M": dict(
        dim=512, n_layers=8, n_heads=8, n_kv_heads=8, vocab_size=32000, multiple_of=32, max_seq_len=1024
    ),
    "tiny": dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=300, multiple_of=16, max_seq_len=64),
}

DERIVED: Any = None  # the default of a field of another type: `__post_init__` computes it from other fields


class Checks:
    """Base class of model configs: presets and field checks. A failed check raises `ValueError`, naming the field."""

    n_layers: int
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

    @classmethod
    def from_preset(cls: type[Config], name: str, **changes) -> Config:
        """A preset with changed fields: `LlamaConfig.from_preset("tiny", attention="causal")`. Raises `ValueError`."""
        if name not in cls.presets:
            raise ValueError(f"no preset {short_repr(name)}; there are {', '.join(cls.presets)}")
        return cls(**{**cls.presets[name], **changes})


@dataclass(frozen=True)
class LlamaConfig(Checks):
    """Hyper-parameters of a Llama 2 (Touvron et al. 2023, arXiv:2307.09288); the defaults are those of `stories42M.pt`.

    If `n_kv_heads` is None, it becomes `n_heads`; if `hidden_dim` is None, `swiglu_hidden_dim` computes it. Raises
    `ValueError`, naming the field, for a value that no model can have. The fields cannot be changed, because a model is
    made for one config; `dataclasses.replace(config, attention="causal")` makes another config.

    attention: "bidirectional" lets every position attend to every other, padding included (the assignment's reference);
    "causal" lets a position attend to itself and to earlier positions (as Llama was pretrained).
    tied: whether token embeddings and output projection are one matrix. rope_scaling: slower RoPE angles, for longer
    texts: a name of `ROPE_SCALINGS` and its numbers, for example `("linear", 4.0)`; see rope.py.
    norm and sampling: of later editions of the course, a LayerNorm, and a limit to the tokens that `generate` draws.
    position_embedding_type and use_cache: the course's addition_run.py passes them. The first can only be "rotary", and
    the second changes nothing: `generate` says whether there is a cache.
    """

    presets = PRESETS

    vocab_size: int = 32000
    dim: int = 512
    dropout: float = 0.0
    n_layers: int = 8
    n_heads: int = 8
    n_kv_heads: int = 8
    max_seq_len: int = 1024
    layer_norm_eps: float = 1e-5
    multiple_of: int = 32
    hidden_dim: int = DERIVED
    attention: str = "bidirectional"
    rope_theta: float = 10000.0
    tied: bool = True
    rope_scaling: tuple | None = None
    norm: str = "rms"
    sampling: str = "plain"
    position_embedding_type: InitVar[str] = "rotary"
    use_cache: InitVar[bool] = True

    def __post_init__(self, position_embedding_type: str, use_cache: bool) -> None:
        if position_embedding_type != "rotary":
            raise ValueError(f"position_embedding_type={short_repr(position_embedding_type)} must be rotary")
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "max_seq_len"):
            self._require_positive_int(name)
        if self.hidden_dim is None:
            object.__setattr__(self, "hidden_dim", swiglu_hidden_dim(self.dim, self.multiple_of))
        self._require_positive_int("hidden_dim")
        self._require_fraction("dropout")
        self._require_epsilon("layer_norm_eps")
        self._require_number("rope_theta", lambda theta: 0.0 < theta < 1e30, "above 0 and below 1e30")
        object.__setattr__(self, "rope_theta", float(self.rope_theta))  # PyTorch takes an int of 64 bits at most
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise ValueError(f"n_heads={self.n_heads} must divide dim={self.dim} into heads of an even size")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}")
        for name, choices in (("attention", ATTENTION_KINDS), ("norm", NORM_KINDS), ("sampling", tuple(SAMPLINGS))):
            self._require_choice(name, choices)
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
        """Whether the result for a text does not depend on its batch, that is, on the amount of padding."""
        return self.is_causal

    @classmethod
    def from_checkpoint(cls, model_args: Any, **changes) -> LlamaConfig:
        """The config of a checkpoint's `model_args`; `changes` replace single fields.

        Raises `ValueError` for a value that is not a dict, and for unknown keys, which it names: if it ignored a
        setting, the loaded model could compute something else.
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

    SwiGLU has three matrices, a plain feed-forward has two; two thirds of the width keep the number of parameters
    (Shazeer 2020, arXiv:2002.05202, section 2).
    """
    hidden_dim = 2 * 4 * dim // 3
    return multiple_of * ((hidden_dim + multiple_of - 1) // multiple_of)
