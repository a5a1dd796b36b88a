"""Whether a model is still what its class and config make it, so that something may compute in its place."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn

from config import LlamaConfig
from engine.weights import blueprint
from fast.kernel import has_hooks, own_methods
from fast.plan import LLAMA_KERNELS
from llama import NORMS, Attention, FeedForward, Llama, LlamaLayer

LLAMA_MODULES = {nn.ModuleList, nn.Embedding, nn.Dropout, LlamaLayer, Attention, FeedForward, nn.Linear}


def kinds_of(llama: Llama) -> list[type]:
    """Changes when another kernel takes a module's place."""
    return [type(module) for module in llama.modules()]


def what_changed_in(llama: Llama) -> str | None:
    """What of a model is not as its class and config make it: a module or method replaced, a hook, another setting."""
    try:
        as_made = _settings_as_made(tuple(vars(llama.config).items()))
        known = LLAMA_MODULES | LLAMA_KERNELS | {NORMS[llama.config.norm]}
        for name, module in llama.named_modules():
            where = name or "the model"
            if module is not llama and type(module) not in known:
                return f"{where} is a {type(module).__name__}"
            if has_hooks(module):
                return f"{where} has a hook"
            if own_methods(module) or _settings(module) != as_made.get(name):
                return f"{where} has other settings or methods than its class gives it"
    except Exception as error:  # a config or modules that cannot be made again, or compared
        return f"it cannot be compared with what its config makes: {type(error).__name__}"
    return None


@lru_cache(maxsize=8)
def _settings_as_made(config: tuple[tuple[str, Any], ...]) -> dict[str, dict[str, Any]]:
    return {name: _settings(module) for name, module in blueprint(LlamaConfig(**dict(config))).named_modules()}


def _settings(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    # stop_ids, of a directory's model, is what callers hand to `generate`; no module computes with it
    return {name: value for name, value in own.items() if name not in ("training", "stop_ids")}
