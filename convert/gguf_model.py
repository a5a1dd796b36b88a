"""A GGUF file as a model here: its settings, its weights and its tokenizer.

llama.cpp's architecture "llama" rotates interleaved pairs as rope.py does, so no row is moved. A file without an output
matrix is read as tied. Weights in blocks are unpacked to float32: that is what they stand for, and what is computed.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from config import LlamaConfig
from convert.gguf_file import GGUFFile
from convert.merges import equal_scores
from convert.tokenizer import JsonTokenizer
from convert.vocabulary import CONTROL, NORMAL, USER_DEFINED, Vocabulary, as_json, reserved_tokens
from utils import UserError, join_names, short_repr, warn

if TYPE_CHECKING:
    from llama import Llama

ARCHITECTURE = "llama"
SETTINGS = {  # our names: the names in a file, and the values where it leaves them out
    "dim": ("embedding_length", None),
    "hidden_dim": ("feed_forward_length", None),
    "n_layers": ("block_count", None),
    "n_heads": ("attention.head_count", None),
    "n_kv_heads": ("attention.head_count_kv", "attention.head_count"),
    "max_seq_len": ("context_length", None),
    "layer_norm_eps": ("attention.layer_norm_rms_epsilon", None),
    "rope_theta": ("rope.freq_base", 10000.0),
}
HARMLESS = {"expert_count": (0,), "attention.causal": (True,), "attention.sliding_window": (0,)}
HARMLESS |= {"rope.scaling.attn_factor": (1.0,)}
FACTORS = "rope_freqs.weight"  # what the angle of each pair is divided by
LLAMA3_TURNS = 1.0, 4.0  # low_freq_factor and high_freq_factor of every Llama from 3.1 on
LLAMA3_LENGTHS = [2.0**power for power in range(4, 18)]

# Byte-level vocabularies: the expressions by which a text is cut before pieces are merged, by tokenizer.ggml.pre.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS_APART = {"type": "Digits", "individual_digits": True}
CUTS = {
    **dict.fromkeys(("gpt-2", "gpt2"), []),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), [DIGITS_APART]),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "pixtral"), WORDS % r"\p{N}{1,3}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), WORDS % r"\p{N}"),
}
# What ends a text in llama.cpp (src/llama-vocab.cpp, special_eog_ids; read on 2026-11-29): tokens that a file declares
# as the end of a text, a turn, a message or a part of a program, and tokens with these texts, whatever it declares.
# There, two exceptions follow, for vocabularies of other architectures.
ENDS_BY_ID = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
ENDS_BY_TEXT = frozenset((
    "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    "<|eot_id|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "[e~[",
    "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>",
    "<PAD>", "[PAD]", "<|fim_pad|>", "<fim-pad>", "<fim_pad>",
    "<REPO>", "<reponame>", "<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<|file_sep|>",
))  # fmt: skip
# A `tokenizer.json`; the vocabulary, where it is one of SentencePiece; whether bos is put where nothing is declared.
Built = tuple[dict[str, Any], Vocabulary | None, bool]
# A word that is a piece is not merged from parts.
KEEPS_WHOLE_PIECES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")


def load_gguf(path: str | os.PathLike, attention: str | None = None, precision: str | None = None) -> Llama:
    """The Llama of a GGUF file, on the CPU; causal unless `attention` says otherwise.

    precision: see `engine.weights.load_llama_model`. Its attribute `stop_ids` has the token that ends a text. Raises
    `UserError` if the file is damaged or describes another kind of model: every missing, unexpected or misshapen tensor
    is named.
    """
    return _model_in(GGUFFile(path), attention, precision)


def read_tokenizer(path: str | os.PathLike, max_len: int | None = None) -> JsonTokenizer:
    """The tokenizer that a GGUF file describes. Raises `UserError` for a kind that is not known here."""
    return _tokenizer_in(GGUFFile(path), max_len)


def load_both(
    path: str | os.PathLike, attention: str | None = None, max_len: int | None = None, precision: str | None = None
) -> tuple[Llama, JsonTokenizer]:
    """`load_gguf` and `read_tokenizer` of a file that is opened once."""
    file = GGUFFile(path)
    tokenizer = _tokenizer_in(file, max_len)
    return _model_in(file, attention, precision), tokenizer


def _model_in(file: GGUFFile, attention: str | None, precision: str | None = None) -> Llama:
    import torch

    from convert.names import all_names, in_names_of
    from engine.weights import filled, keeper, shape_errors

    path, config = file.path, read_config(file, attention or "causal")
    if config.n_layers > len(file.tensors):
        raise UserError(f"{path}: it declares {config.n_layers} layers, but has only {len(file.tensors)} tensors")
    ours = {names.llama_cpp: names.ours for names in all_names(config)}
    stored = {name: each for name, each in file.tensors.items() if name != FACTORS}
    keep = keeper(path, sum(math.prod(each.shape) for each in stored.values()), precision)
    state = {}
    for name in stored:
        own, tensor = ours.get(name, name), torch.from_numpy(file.tensor(name))
        is_output = own == "tok_embeddings.weight" and config.tied
        state[own] = keep("output.weight" if is_output else own, tensor) if keep else tensor
    if config.tied and "tok_embeddings.weight" in state:
        state["output.weight"] = state["tok_embeddings.weight"]
    if found := shape_errors(state, config):
        raise UserError(f"{path} does not fit what it declares: {in_names_of('llama_cpp', join_names(found))}")
    model = filled(path, config, state, keep and (lambda _, tensor: tensor))
    model.stop_ids = _stop_ids(file)
    return model


def read_config(file: GGUFFile, attention: str = "causal") -> LlamaConfig:
    """The config of a file. Raises `UserError` that names a setting which no model here computes."""
    if (kind := file.values.get("general.architecture")) != ARCHITECTURE:
        raise UserError(f"{file.path} describes a model of the architecture {short_repr(kind)}; llama is known here")
    said = _of_architecture(file.values)
    fields = {ours: said.get(theirs, said.get(default, default)) for ours, (theirs, default) in SETTINGS.items()}
    tensors = file.tensors
    embeddings = tensors.get("token_embd.weight")
    try:
        for name, harmless in HARMLESS.items():
            if (value := said.get(name, harmless[0])) not in harmless:
                raise ValueError(f"{name}={short_repr(value)}: no model here computes that")
        if absent := [theirs for theirs, default in SETTINGS.values() if default is None and theirs not in said]:
            raise ValueError(f"it does not declare {join_names([f'{ARCHITECTURE}.{name}' for name in absent])}")
        fields |= {"vocab_size": embeddings.shape[0] if embeddings else 0, "tied": "output.weight" not in tensors}
        config = LlamaConfig(**fields, attention=attention, rope_scaling=_scaling(file, said))
        if FACTORS in tensors and tensors[FACTORS].shape != (config.head_dim // 2,):
            raise ValueError(f"{FACTORS} has the shape {list(tensors[FACTORS].shape)}, not [{config.head_dim // 2}]")
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            if said.get(name, config.head_dim) != config.head_dim:
                heads = f"a head has {config.head_dim} dimensions"
                raise ValueError(f"{name}={short_repr(said[name])}, but {heads}: no model here computes that")
        return config
    except ValueError as error:
        raise UserError(f"{file.path}: {error}") from None


def _of_architecture(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is declared of the architecture, without its prefix; arrays, of values that differ by layer, as lists."""
    prefix = f"{ARCHITECTURE}."
    named = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return {name: value[:4].tolist() if isinstance(value, array) else value for name, value in named.items()}


def _scaling(file: GGUFFile, said: Mapping[str, Any]) -> tuple | None:
    """The scaling of the angles. Raises `ValueError` for one that no model here computes.

    As in llama.cpp a factor without a type is one of linear scaling; `rope.scale_linear` is its name in old files.
    """
    kind = said.get("rope.scaling.type", "linear")
    factor = said.get("rope.scaling.factor", said.get("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type={short_repr(kind)}: no model here computes that; known is linear")
    linear = None if kind == "none" or factor in (0.0, 1.0) else ("linear", factor)
    if FACTORS not in file.tensors:
        return linear
    if linear is not None:  # llama.cpp divides by both
        raise ValueError(f"{FACTORS} and rope.scaling.factor={short_repr(factor)}: no model here computes both")
    return _llama3_scaling(file.tensor(FACTORS), said)


def _llama3_scaling(factors: np.ndarray, said: Mapping[str, Any]) -> tuple:
    """The numbers of Llama 3's scaling whose angles are those of `factors`. Raises `ValueError` if there are none."""
    import torch

    from rope import frequencies

    theta = said.get("rope.freq_base", 10000.0)
    if factors.ndim == 1 and isinstance(theta, float) and theta > 0 and 1.0 <= factors.max() < 1e6:
        plain = frequencies(2 * len(factors), theta)
        for length in LLAMA3_LENGTHS:
            scaling = ("llama3", float(factors.max()), *LLAMA3_TURNS, length)
            if torch.allclose(plain / frequencies(2 * len(factors), theta, scaling), torch.from_numpy(factors), 1e-5):
                return scaling
    raise ValueError(f"{FACTORS}: these are not the factors of Llama 3, and no model here computes others")


def _stop_ids(file: GGUFFile) -> tuple[int, ...]:
    said = _of_tokenizer(file)
    tokens, declared = said.get("tokens"), (said.get(f"{name}_token_id") for name in ENDS_BY_ID)
    by_text = (id for id, token in enumerate(tokens if isinstance(tokens, list) else ()) if token in ENDS_BY_TEXT)
    return tuple(dict.fromkeys(id for id in (*declared, *by_text) if type(id) is int))


# ---------------------------------------------------------------------------------------------------------- tokenizer


def _of_tokenizer(file: GGUFFile) -> dict[str, Any]:
    """What is declared of the tokenizer; one of SentencePiece has llama.cpp's ids where the file leaves them out."""
    said = {name.removeprefix("tokenizer.ggml."): value for name, value in file.values.items()}
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if said.get("model") == "llama" else {}
    return ids | said


def _tokenizer_in(file: GGUFFile, max_len: int | None) -> JsonTokenizer:
    path, said = file.path, _of_tokenizer(file)
    try:
        pieces, types = _tokens_of(said)
    except UserError as error:
        raise UserError(f"{path}: {error}; name a tokenizer with --tokenizer") from None
    try:
        builder = BUILDERS[said.get("model")]
    except (KeyError, TypeError):
        kind = short_repr(said.get("model"))
        raise UserError(f"{path} has a tokenizer of the kind {kind}; known are {join_names(list(BUILDERS))}") from None
    try:
        content, vocabulary, adds_bos = builder(said, pieces, types)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        reason = error if isinstance(error, UserError) else "its tokenizer is damaged"
        raise UserError(f"{path}: {reason}; name another with --tokenizer") from None
    special = {f"{name}_token": said.get(f"{name}_token_id") for name in ("bos", "eos")}
    special |= {"added_tokens": reserved_tokens(pieces, types), "pads_with_byte_0": True}
    if vocabulary and (tied := equal_scores(vocabulary.scored(None), content["model"]["merges"])):
        names = join_names(tied)
        warn(f"{path}: the pieces {names} have the same score; a text may be cut otherwise than in llama.cpp")
    if said.get("add_eos_token") is True:
        warn(f"{path} puts eos after a text (add_eos_token), which is left out here")
    special["add_bos_token"] = adds_bos = bool(said.get("add_bos_token", adds_bos))
    tokenizer = JsonTokenizer(json.dumps(content, ensure_ascii=False), special, max_len, str(path))
    tokenizer.vocabulary = vocabulary and vocabulary._replace(adds_bos=adds_bos)
    return tokenizer


def _tokens_of(said: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """The text and the type of every token, as llama.cpp reads them. Raises `UserError`."""
    tokens, types = said.get("tokens"), said.get("token_type")
    if not isinstance(tokens, list) or not tokens:
        raise UserError("its list of tokens is absent or damaged")
    pieces = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]  # llama.cpp's name
    ids: dict[str, int] = {}
    for id, piece in enumerate(pieces):
        if (first := ids.setdefault(piece, id)) != id:
            raise UserError(f"the tokens {first} and {id} are both {short_repr(piece)}, which llama.cpp refuses, too")
    types = _one_each(types, len(pieces), "types", NORMAL)
    return pieces, [CONTROL if piece in ENDS_BY_TEXT else kind for piece, kind in zip(pieces, types, strict=True)]


def _one_each(values: Any, count: int, what: str, default: float) -> list:
    """A number for each of `count` tokens; further ones have no token. Raises `UserError`."""
    if values is None:
        return [default] * count
    if not isinstance(values, array) or len(values) < count:
        raise UserError(f"it has {len(values) if isinstance(values, array) else 'no'} {what} for {count} tokens")
    return values[:count].tolist()


def _sentencepiece(said: Mapping[str, Any], pieces: list[str], types: list[int]) -> Built:
    """Pieces with scores: whatever pair makes the best piece is merged first."""
    scores = _one_each(said.get("scores"), len(pieces), "scores", 0.0)
    ids = [said[f"{name}_token_id"] for name in ("unknown", "bos", "eos")]
    if not all(type(id) is int and 0 <= id < len(pieces) for id in ids):
        raise ValueError
    added = [
        piece
        for id, (piece, type_) in enumerate(zip(pieces, types, strict=True))
        if type_ == USER_DEFINED or (type_ == CONTROL and id not in ids)
    ]
    adds_space = bool(said.get("add_space_prefix", True))
    vocabulary = Vocabulary(pieces, scores, types, *ids, adds_space, added=tuple(added))
    return as_json(vocabulary, [], of_type=None) | {"post_processor": None}, vocabulary, True


def _byte_level(said: Mapping[str, Any], pieces: list[str], types: list[int]) -> Built:
    """Pieces of bytes, and a list of merges, as GPT-2's."""
    cut = said.get("pre")
    if cut not in CUTS:
        raise UserError(f"it cuts texts by the rule {short_repr(cut)}; known are {join_names(list(CUTS))}")
    if "merges" not in said:
        raise UserError("it has no list of merges")
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    by_words = isinstance(CUTS[cut], str)
    split = {"type": "Split", "pattern": {"Regex": CUTS[cut]}, "behavior": "Isolated", "invert": False}
    steps = [*([split] if by_words else CUTS[cut]), bytes_only | {"use_regex": not by_words}]
    model = {
        "type": "BPE",
        "vocab": {piece: id for id, piece in enumerate(pieces)},
        "merges": [pair.split(" ") for pair in said["merges"]],
        "ignore_merges": cut in KEEPS_WHOLE_PIECES,
    }
    content = {
        "model": model,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": bytes_only | {"use_regex": True},
    }
    return content, None, cut in KEEPS_WHOLE_PIECES


BUILDERS = {"llama": _sentencepiece, "gpt2": _byte_level}
