"""Families of pretrained models: how each is loaded, becomes a classifier and reads sentences.

`runs` calls a `ModelFamily` for everything that depends on the kind of model. The loops, the checkpointer, methods,
reports and the driver work for every kind.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from classifier import LlamaEmbeddingClassifier, LlamaZeroShotClassifier, read_last
from config import LlamaConfig
from engine.data import Example
from engine.methods import Classifier, Method, Pretrained
from engine.plan import Plan
from engine.programs import import_part, is_gguf, require_folder, tokenizer_name
from engine.tasks import EncodingRules, LlamaDataset, Sentences
from engine.weights import load_llama_model, shape_errors, takes_mask
from llama import Attention, Llama
from rope import apply_rotary_emb
from tokenizer import Tokenizer
from utils import UserError, join_names, short_repr, warn


class OtherVocabulary(UserError):
    """A tokenizer does not belong to the model: their vocabularies have different sizes."""


class ModelFamily:
    """One kind of pretrained model.

    Its models have a `config`, a frozen dataclass with `max_seq_len`, `attention` and `ignores_padding`. Its tokenizers
    have `pad_id`, `max_len` and `to_bytes`. A method for several families finds its way by what is named alike in all:
    of a model `config` with `dim`, `n_layers` and `vocab_size`, `tok_embeddings`, `layers` (each with `attention`,
    `feed_forward` and matrices of the names in `advanced.table.MATRICES`) and `init_weights(part)`; of a classifier
    `classifier_head` and `pad_id`.
    """

    name: str

    def load(self, plan: Plan) -> tuple[Pretrained, Any]:
        """The pretrained model of a plan, and its tokenizer. Raises `UserError`."""
        raise NotImplementedError

    def reopen(self, saved: dict[str, Any], path: str) -> tuple[Pretrained, Any]:
        """The pretrained model of a saved classifier, before its weights are loaded, and its tokenizer.

        saved: the values of `runs.record_of`, and the weights under "model"; the weights are compared with the config
        before a model is made. path: the file's name for errors. Raises `UserError` or `ValueError`.
        """
        raise NotImplementedError

    def make_classifier(
        self,
        settings: dict[str, Any],
        pretrained: Pretrained,
        tokenizer: Any,
        label_names: Sequence[str],
        option: str = "finetune",
    ) -> Classifier:
        """Make a classifier of a pretrained model, b s -> log-probabilities b c. settings: see `model_settings`."""
        raise NotImplementedError

    def encode(self, model: Classifier, tokenizer: Any, examples: Sequence[Example]) -> Sentences:
        """Encode a data set in the form that this classifier reads."""
        raise NotImplementedError


def require_shapes(found: list[str]) -> None:
    """Raise `UserError` with the errors that `shape_errors` has found, if any."""
    if found:
        raise UserError(f"the model does not fit its model_args: {join_names(found)}")


def part_of(state: dict[str, Any], part: str) -> dict[str, Any]:
    """The entries of a classifier's state dict that belong to its attribute `part`, with their names in that part."""
    prefix = f"{part}."
    return {str(name).removeprefix(prefix): state[name] for name in state if str(name).startswith(prefix)}


# ---------------------------------------------------------------------------------------------------- Llamas

NO_MASK = (
    "a causal model needs a mask: add the argument mask=None (bool, True where a query may see a key) to "
    "Attention.compute_query_key_value_scores in llama.py"
)
HEADS = {"linear": LlamaEmbeddingClassifier, "label words": LlamaZeroShotClassifier}  # advanced/ has more heads


class LlamaFamily(ModelFamily):
    """The family of the models of `llama.py`."""

    name = "llama"

    def load(self, plan: Plan) -> tuple[Llama, Tokenizer]:
        files = plan.checkpoint.path, plan.tokenizer.path
        head, _ = head_among(plan.methods)  # all heads of advanced/ ask the language model
        return load_llama(*files, plan.attention, plan.max_sentence_len, plan.norm, needs_output=head is not None)

    def reopen(self, saved: dict[str, Any], path: str) -> tuple[Llama, Tokenizer]:
        config = LlamaConfig.from_checkpoint(saved["model_config"]["model_args"])
        if config.is_causal and not takes_mask(Attention):
            raise UserError(NO_MASK)
        require_shapes(shape_errors(part_of(saved["model"], "llama"), config))
        vocabulary, max_len = saved["tokenizer"].numpy().tobytes(), saved["max_sentence_len"]
        kind = _json_tokenizers(path) if vocabulary.startswith(b"{") else Tokenizer
        return Llama(config), kind.from_bytes(vocabulary, max_len, path)

    def make_classifier(
        self,
        settings: dict[str, Any],
        pretrained: Llama,
        tokenizer: Tokenizer,
        label_names: Sequence[str],
        option: str = "finetune",
    ) -> Classifier:
        head = settings["head"]
        if head not in HEADS:
            made = dict(settings["head_settings"])
            return advanced_folder().create_head(head, made, pretrained, tokenizer, list(label_names))
        names = "num_labels", "hidden_dropout_prob"
        config = SimpleNamespace(option=option, pad_id=tokenizer.pad_id, **{name: settings[name] for name in names})
        labels = (tokenizer, list(label_names)) if head == "label words" else ()
        return HEADS[head](config, *labels, llama=pretrained)

    def encode(self, model: Classifier, tokenizer: Tokenizer, examples: Sequence[Example]) -> LlamaDataset:
        """The prompt suffix of the classifier follows every text; positions for its answers (`room`) stay free.

        A classifier that puts text before every sentence says so (`follows`).
        """
        config, room, follows = model.llama.config, getattr(model, "room", None), getattr(model, "follows", False)
        rules = EncodingRules(model.prompt_suffix, config.max_seq_len, config.is_causal, room, follows)
        return LlamaDataset(examples, tokenizer, rules)


LLAMA_FAMILY = LlamaFamily()
OTHERS = ("bert",)  # folders that have a module `family`


def load_llama(
    path: str | os.PathLike,
    tokenizer: str | os.PathLike | None = None,
    attention: str | None = None,
    max_sentence_len: int | None = None,
    norm: str | None = None,
    precision: str | None = None,
    needs_output: bool = True,
) -> tuple[Llama, Tokenizer]:
    """Load a pretrained model and its tokenizer. Raises `OtherVocabulary` if they do not belong together.

    path: a checkpoint, a GGUF file or a Hugging Face directory. tokenizer: its file; None: the checkpoint's own, see
    `programs.tokenizer_name`. attention, norm: replace the checkpoint's own settings. max_sentence_len: the most tokens
    that the tokenizer keeps of a sentence. precision, needs_output: see `weights.load_llama_model`.

    A Hugging Face directory may have more embeddings than pieces (to round up the matrix): that is only a warning.
    """
    random_state = torch.get_rng_state()
    if norm is None and is_gguf(path) and os.fspath(tokenizer or path) == os.fspath(path):
        gguf_model = import_part("convert.gguf_model", "a GGUF file")
        llama, read = gguf_model.load_both(path, attention, max_sentence_len, precision)
    else:
        read = read_tokenizer(tokenizer or tokenizer_name(path), max_sentence_len)
        llama = load_llama_model(path, attention, norm, precision, needs_output)
    require_vocabulary(read, llama, path)
    if llama.config.rope_scaling is not None and "scaling" not in signature(apply_rotary_emb).parameters:
        raise UserError(f"{path} scales its positions: add the argument scaling=None to apply_rotary_emb in rope.py")
    if llama.config.is_causal and not takes_mask(Attention):
        if attention is not None:
            raise UserError(NO_MASK)
        warn(f"{NO_MASK}; {path} is read with --attention bidirectional")
        torch.set_rng_state(random_state)  # so that a seed means what it means where the flag is given
        return load_llama(path, tokenizer, "bidirectional", max_sentence_len, norm, precision, needs_output)
    return llama, read


def require_vocabulary(tokenizer: Tokenizer, llama: Llama, checkpoint: str | os.PathLike) -> None:
    """Raise `OtherVocabulary` if the sizes of the vocabularies differ, or warn, see `load_llama`."""
    size = llama.config.vocab_size
    if tokenizer.n_words != size:
        sizes = f"{checkpoint} has a vocabulary of {size}, but {tokenizer.model_path} has {tokenizer.n_words} pieces"
        if tokenizer.n_words > size or not os.path.isdir(checkpoint):
            raise OtherVocabulary(sizes)
        warn(sizes)


def read_tokenizer(path: str | os.PathLike, max_sentence_len: int | None = None) -> Tokenizer:
    """Load a tokenizer: `tokenizer.json`, a SentencePiece model, or that of a GGUF file. Raises `UserError`.

    A SentencePiece model that is the tokenizer of a Hugging Face directory is read with the directory's other files.
    """
    if is_gguf(path):
        return import_part("convert.gguf_model", f"the tokenizer of {path}").read_tokenizer(path, max_sentence_len)
    beside = {name: Path(path).with_name(name).exists() for name in ("config.json", "tokenizer.json")}
    if os.fspath(path).endswith(".json") or (beside["config.json"] and not beside["tokenizer.json"]):
        return _json_tokenizers(path).from_file(path, max_sentence_len)
    return Tokenizer(max_sentence_len, path)


def _json_tokenizers(path: str | os.PathLike) -> Any:
    return import_part("convert.tokenizer", f"the tokenizer of {path}").JsonTokenizer


def model_settings(head: tuple[str, Any] | None, num_labels: int, hidden_dropout_prob: float = 0.0) -> dict[str, Any]:
    """The settings for `ModelFamily.make_classifier`. head: name and settings of the classifier's head; None: linear"""
    name, settings = head or ("linear", ())
    shape = {"num_labels": num_labels, "hidden_dropout_prob": hidden_dropout_prob}
    return {"head": name, "head_settings": dict(settings), **shape}


def settings_of(model: Classifier) -> dict[str, Any]:
    """The settings with which `ModelFamily.make_classifier` makes a classifier like this one."""
    own = next((name for name, kind in HEADS.items() if isinstance(model, kind)), None)
    head = (own, {}) if own else (model.name, model.settings) if hasattr(model, "name") else None
    dropout = getattr(model, "dropout", None)
    return model_settings(head, model.num_labels, 0.0 if dropout is None else dropout.p)


def reads_last(model: nn.Module) -> bool:
    """Whether a classifier reads texts by `classifier.read_last`, or by a kernel in its place."""
    read = getattr(model, "read", None)
    return getattr(read, "replaces", read) is read_last


# ------------------------------------------------------------------------------------------------ which one


def advanced_folder() -> Any:
    return require_folder("advanced", "a method")


def family_named(name: str) -> ModelFamily:
    """The model family of this name. Raises `UserError` for an unknown name, and if its folder is absent."""
    if name == LLAMA_FAMILY.name:
        return LLAMA_FAMILY
    if name not in OTHERS:
        raise UserError(f"models of the kind {short_repr(name)} are unknown here")
    require_folder(name, f"a model of the kind {name}")
    return importlib.import_module(f"{name}.family").FAMILY


def family_of(model: nn.Module) -> ModelFamily:
    """The model family of a classifier: its attribute `family`, or Llama if it has none."""
    return family_named(getattr(model, "family", LLAMA_FAMILY.name))


# -------------------------------------------------------------------------------------------------------- methods, data


def create_methods(chosen: Sequence[tuple[str, Any]]) -> list[Method]:
    """Make methods from their names and settings. Raises `UserError` if the folder advanced/ is absent."""
    return [advanced_folder().create(name, dict(settings)) for name, settings in chosen]


def head_among(chosen: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any] | None, list[tuple[str, Any]]]:
    """Separate the method that is a classifier head (None if there is none) from the others: names and settings."""
    heads = [each for each in chosen if advanced_folder().METHODS[each[0]].is_head]
    return heads[0] if heads else None, [each for each in chosen if each not in heads]


def encode_for(model: nn.Module, tokenizer: Any, examples: Sequence[Example]) -> Sentences:
    """Encode a data set in the form that this classifier reads."""
    return family_of(model).encode(model, tokenizer, examples)
