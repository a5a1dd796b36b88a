"""The tokenizer of a Hugging Face directory, from all of its files, as version 5 of transformers reads it.

`tokenizer.json` is the tokenizer, else `tokenizer.model`, which is described as one. `tokenizer_config.json` names a
class: of a file of Llama's or GPT-2's class only vocabulary, merges and template are read, all other steps are those of
the class. At the end come the tokens that the files beside it add.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.directory import ADDED_TOKENS, CONFIG, SPECIAL_TOKENS, TOKENIZER_CONFIG, read_settings, require_file
from convert.vocabulary import BYTE, SPACE_PIECE, is_bpe, pieces_and_types, reserved_tokens, rewriting_rules
from tokenizer import Tokenizer
from utils import UserError, short_repr, warn

MOST_JSON_BYTES = 2**26  # of a file; the largest known ones have 35 MB
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LLAMA, CODE_LLAMA, GPT2 = "LlamaTokenizer", "CodeLlamaTokenizer", "GPT2Tokenizer"
DEFAULTS = {  # the special tokens of these classes
    LLAMA: {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    CODE_LLAMA: {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    | {f"{name}_token": f"{SPACE_PIECE}<{name[:3].upper()}>" for name in ("prefix", "middle", "suffix")}
    | {"eot_token": f"{SPACE_PIECE}<EOT>", "fill_token": "<FILL_ME>"},
    GPT2: dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}
WITHOUT_CLASS = (None, "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")  # the file says all
MARKED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_PIECE}
UNMARKED = {"type": "Replace", "pattern": {"String": SPACE_PIECE}, "content": " "}

Added = dict[str, Any]  # an added token: "content", and which of FLAGS are set


def read(path: str | os.PathLike) -> tuple[str, dict[str, Any], dict[int, str]]:
    """A `tokenizer.json` or `tokenizer.model` with the files beside it: the arguments `content` and `special` of
    `tokenizer.JsonTokenizer`, and the added tokens by the ids that the files say. Raises `UserError`.
    """
    path = Path(path)
    said, config = settings_of(path.parent)
    kind = said["tokenizer_class"]
    if path.suffix == ".json":
        content, listed = _of_json(path, said)
    else:
        content, listed = _of_sentencepiece(path, said), []
    by_class = DEFAULTS.get(kind, {})
    own, said = said, by_class | said
    special = {name: said[name] for name in ("add_bos_token", "split_special_tokens") if name in said}
    for name in ("bos_token", "eos_token"):
        number = config.get(f"{name}_id")
        number = number[0] if isinstance(number, list) and number else number
        special[name] = number if said.get(name) is None else said[name]
    added, numbered = added_tokens(path.parent, said, listed, () if by_class else listed)
    if by_class:
        without = {token for name, token in by_class.items() if name not in own}
        added = _with_embeddings(added, without, content["model"]["vocab"], config.get("vocab_size"))
    special |= {"added_tokens": added, "pads_with_byte_0": True}
    content = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return content, special, numbered


def read_content(path: Path) -> str:
    """The text of a `tokenizer.json`. Raises `UserError`."""
    require_file(path, MOST_JSON_BYTES)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"cannot load {path}: it is not UTF-8 text") from None


def parsed(content: str, path: str | os.PathLike) -> dict[str, Any]:
    """The object of a `tokenizer.json`. Raises `UserError`."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    model, added = (found.get("model"), found.get("added_tokens")) if isinstance(found, dict) else (None, None)
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not isinstance(added or [], list):
        raise UserError(f"cannot use {path}: it is not a tokenizer, or it is damaged")
    return found


def settings_of(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `tokenizer_config.json` and older files say of the tokenizer, and `config.json`. Raises `UserError`.

    tokenizer_class: None, or the name without "Fast" at its end.
    """
    said, config = _read(folder / TOKENIZER_CONFIG), _read(folder / CONFIG)
    said["tokenizer_class"] = kind = said.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(kind, str | None):
        raise UserError(f"{folder / TOKENIZER_CONFIG}: tokenizer_class is {short_repr(kind)}, not a name")
    said["tokenizer_class"] = kind and kind.removesuffix("Fast")
    if not said.get("extra_special_tokens") and "additional_special_tokens" in said:
        said["extra_special_tokens"] = said.pop("additional_special_tokens")
    if "added_tokens_decoder" not in said:
        said |= _read(folder / SPECIAL_TOKENS)
    kept = ("tokenizer_class", *NAMED)  # null as a special token: there is none, also where the class has one
    return {name: value for name, value in said.items() if value is not None or name in kept}, config


def _read(file: Path) -> dict[str, Any]:
    return read_settings(file) if os.path.lexists(file) else {}


# ------------------------------------------------------------------------------- both kinds of files as tokenizer.json


def _of_json(path: Path, said: dict[str, Any]) -> tuple[str | dict[str, Any], list[Added]]:
    """A `tokenizer.json` as its class reads it, as text or parsed, and its added tokens. Its template puts bos."""
    content = read_content(path)
    file, kind = parsed(content, path), said["tokenizer_class"]
    said.pop("add_bos_token", None)
    if file.get("post_processor") is None or kind == CODE_LLAMA:
        said["add_bos_token"] = kind == CODE_LLAMA
    listed = [token for token in file.get("added_tokens") or [] if isinstance(token, dict)]
    if kind in DEFAULTS:
        vocabulary, merges = file["model"]["vocab"], file["model"].get("merges") or []
        if isinstance(vocabulary, list):
            pieces = (each[0] if isinstance(each, list) and each else each for each in vocabulary)
            vocabulary = {str(piece): id for id, piece in enumerate(pieces)}
        made = _of_gpt2(vocabulary, merges, said) if kind == GPT2 else _of_llama(vocabulary, merges, said)
        if kind != GPT2 and "ByteLevel" in json.dumps(file.get("pre_tokenizer")):
            warn(f"{path} has pieces of bytes, and its class is Llama's: it is read as transformers 5 does, not 4")
        return made | {"post_processor": file.get("post_processor")}, listed
    if said.get("clean_up_tokenization_spaces") and file["model"].get("type") != "BPE":
        warn(f"{path}: spaces before full stops and commas stay, unlike in transformers (clean_up_tokenization_spaces)")
    if kind not in WITHOUT_CLASS:
        warn(f"{path}: the class {short_repr(kind)} is not known here; the tokenizer is what the file says")
    return content, listed


def _of_sentencepiece(path: Path, said: dict[str, Any]) -> dict[str, Any]:
    """A SentencePiece model as a `tokenizer.json`: Llama's class, or none, which puts no space before a text."""
    model, kind = Tokenizer(tokenizer_model=path).sp_model, said["tokenizer_class"]
    pieces, types = pieces_and_types(model, path)
    if kind not in (LLAMA, CODE_LLAMA, *WITHOUT_CLASS):
        raise UserError(f"{path} is read for Llama's tokenizers alone, and its class is {short_repr(kind)}")
    if kind == CODE_LLAMA:
        said.setdefault("add_bos_token", True)
    if "add_bos_token" not in said:
        warn(f"{path.parent} does not say add_bos_token: no bos is put before a text, as in transformers 5 (not 4)")
    if said.get("add_eos_token"):
        warn(f"{path.parent} puts eos after a text (add_eos_token), which is left out here")
    said["add_bos_token"] = bool(said.get("add_bos_token"))
    said["additional_special_tokens"] = reserved_tokens(pieces, types)
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    if kind not in WITHOUT_CLASS:
        return _of_llama(vocabulary, _merges(vocabulary), said)
    if not is_bpe(map(model.get_score, range(len(pieces))), types):
        raise UserError(f"{path} is no BPE model, and such a one without a class is not read here")
    for name, id in (("bos_token", model.bos_id()), ("eos_token", model.eos_id()), ("unk_token", model.unk_id())):
        said.setdefault(name, pieces[id])
    rules, has_bytes = rewriting_rules(model.serialized_model_proto()), BYTE in types
    first = [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(rules).decode()}] if rules else []
    after = [{"type": "ByteFallback"}, {"type": "Fuse"}] if has_bytes else []
    unknown = pieces[model.unk_id()]
    return {
        "model": _bpe(vocabulary, _merges(vocabulary), fuse_unk=True, byte_fallback=has_bytes, unk_token=unknown),
        "normalizer": {"type": "Sequence", "normalizers": [*first, MARKED]},
        "decoder": {"type": "Sequence", "decoders": [UNMARKED, *after]},
    }


def _of_llama(vocabulary: dict[str, int], merges: Sequence, said: dict[str, Any]) -> dict[str, Any]:
    """The steps of Llama's class, and of Code Llama's."""
    puts_space, is_code = said.get("add_prefix_space", True), said["tokenizer_class"] == CODE_LLAMA
    scheme = ("always" if said.get("legacy") and not is_code else "first") if puts_space else "never"
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if puts_space or is_code else []
    unknown = said.get("unk_token", "<unk>")
    unknown = {"unk_token": unknown.get("content") if isinstance(unknown, dict) else unknown} if is_code else {}
    return {
        "model": _bpe(vocabulary, merges, fuse_unk=True, byte_fallback=True, **unknown),
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE_PIECE, "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": [UNMARKED, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]},
    }


def _of_gpt2(vocabulary: dict[str, int], merges: Sequence, said: dict[str, Any]) -> dict[str, Any]:
    """The steps of GPT-2's class."""
    step = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "model": _bpe(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""),
        "pre_tokenizer": step | {"add_prefix_space": bool(said.get("add_prefix_space"))},
        "decoder": step,
    }


def _bpe(vocabulary: dict[str, int], merges: Sequence, **settings: Any) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, **settings}


def _merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that make another one, in the order of the pieces that they make."""
    found = []
    for piece in vocabulary:
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        found += [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
    return found


# ------------------------------------------------------------------------------------------------------- added tokens


def added_tokens(
    folder: Path, said: dict[str, Any], listed: Sequence[dict[str, Any]] = (), there: Sequence[dict[str, Any]] = ()
) -> tuple[list[Added], dict[int, str]]:
    """The tokens to add to a tokenizer, in this order, and those that the files number, by their ids.

    said: see `settings_of`. listed: the added tokens of a `tokenizer.json`. there: those that the tokenizer has.
    Raises `UserError` for a file that does not say them properly.
    """
    numbered = _numbered(folder, said, listed)
    return _to_add(folder, said, numbered, there), {id: token["content"] for id, token in numbered.items()}


def _numbered(folder: Path, said: dict[str, Any], listed: Sequence[dict[str, Any]]) -> dict[int, Added]:
    """The tokens that the files list with ids, in the order of these. listed: those of `tokenizer.json`."""
    found, file = said.get("added_tokens_decoder"), folder / TOKENIZER_CONFIG
    if found is None:
        file = folder / ADDED_TOKENS
        special = {token["content"] for token in (*_named(said, file), *_extra(said, file, "extra_special_tokens"))}
        found = {
            id: {"content": text, "special": text in special, "normalized": text not in special}
            for text, id in _read(file).items()
            if isinstance(id, int)
        }
        found |= {token.get("id"): token for token in listed}
    try:
        return {id: _token(token, file) for id, token in sorted((int(id), token) for id, token in found.items())}
    except (TypeError, ValueError, AttributeError):
        raise UserError(f"{file} does not list added tokens by their ids, or it is damaged") from None


def _to_add(folder: Path, said: dict[str, Any], numbered: dict[int, Added], there: Sequence[dict]) -> list[Added]:
    """The tokens to add, in this order: those with ids, then special ones that are not among them or already there."""
    file = folder / TOKENIZER_CONFIG
    named = _named(said, file)
    names = {token["content"] for token in named}
    added = [{**token, "special": True} if token["content"] in names else token for token in numbered.values()]
    known = {token["content"] for token in (*there, *added)}
    there = [_token(token, file) for token in there]
    added = [token for token in added if token not in there]
    which = "extra" if isinstance(said.get("extra_special_tokens"), list) else "additional"
    named += _extra(said, file, f"{which}_special_tokens")
    return added + [token for token in named if token["content"] not in known]


def _with_embeddings(added: list[Added], unnamed: set[str], vocabulary: dict[str, int], size: Any) -> list[Added]:
    """The tokens without those that only the class names, not the files, and for which the model has no embedding."""
    new = [token for token in added if token["content"] not in vocabulary]
    excess = len(vocabulary) + len(new) - size if isinstance(size, int) else 0
    left_out = [token for token in reversed(new) if token["content"] in unnamed][: max(0, excess)]
    return [token for token in added if token not in left_out]


def _named(said: dict[str, Any], file: Path) -> list[Added]:
    """The special tokens that have a name, such as `bos_token`, in the order in which they are added."""
    names = [*NAMED, *(name for name in said if name.endswith("_token") and name not in NAMED)]
    named = [said[name] for name in names if isinstance(said.get(name), str | dict)]
    extra = said.get("extra_special_tokens")
    named += extra.values() if isinstance(extra, dict) else ()
    return [{**_token(token, file), "special": True} for token in named]


def _extra(said: dict[str, Any], file: Path, name: str) -> list[Added]:
    """The special tokens without a name."""
    found = said.get(name, [])
    if not isinstance(found, list | dict):
        raise UserError(f"{file}: {name} is {short_repr(found)}, not a list")
    return [_token(token, file) for token in found] if isinstance(found, list) else []


def _token(token: Any, file: Path) -> Added:
    """A token of a settings file, which is a text or an object. Raises `UserError`."""
    if isinstance(token, str):
        return {"content": token, "special": True, "normalized": False}
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        raise UserError(f"{file}: {short_repr(token)} is no token")
    flags = {name: token[name] for name in FLAGS if isinstance(token.get(name), bool)}
    return {"content": token["content"], "special": True, "normalized": False, **flags}
