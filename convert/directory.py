"""A Hugging Face directory: `config.json`, and weights as safetensors or pickled, in one file or in several.

What all kinds of models share; Llamas are read by `hugging_face.py`, BERTs by `bert/load.py`. Nothing but tensors is
ever unpickled. PyTorch is imported when weights are read, and not before.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from engine.storage import DAMAGED, SURROGATE, load_tensors
from utils import UserError, atomic_write, join_names, read_text, short_repr, shorten, warn

if TYPE_CHECKING:
    import torch

CONFIG, SAFETENSORS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
WEIGHTS = (SAFETENSORS, PICKLED)  # the first that is there is read, as one file or as several
INDEX_ENDING = ".index.json"  # after either name: which of several files holds which tensor
TOKENIZER_MODEL, TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"
ADDED_TOKENS, SPECIAL_TOKENS = "added_tokens.json", "special_tokens_map.json"  # which older versions wrote
GENERATION = "generation_config.json"
VOCABULARY = "vocab.txt"  # of WordPiece
ADAPTER_CONFIG = "adapter_config.json"  # of a folder with an update of a model that lies elsewhere, see `peft.py`
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
HEADS = ("classifier", "pre_classifier", "score", "qa_outputs", "v_head")  # of other tasks than language models
BESIDE_BERT = (CONFIG, VOCABULARY, TOKENIZER_CONFIG)  # what is written beside the weights of a BERT
# Of each model_type, see `engine.families`; "textbook-bert" is none of transformers, see bert/names.py.
FAMILIES = {"llama": "llama", "bert": "bert", "distilbert": "bert", "textbook-bert": "bert"}
MOST_SETTINGS = 2**23  # bytes of a JSON file: a damaged one must not fill the memory

State = dict[str, "torch.Tensor"]


def read_settings(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `UserError` if the file holds no object."""
    require_file(file, MOST_SETTINGS)
    text = read_text(file)
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):  # of numbers with thousands of digits; of brackets in brackets
        settings = None
    if not isinstance(settings, dict):
        raise UserError(f"{file} does not hold a JSON object, or it is damaged")
    return settings


def base_folder(folder: Path) -> Path:
    """The folder of the model that an adapter updates; a folder with a model of its own is returned as it is.

    A relative name is looked for in the adapter's folder, then in the current one. Raises `UserError`.
    """
    file = folder / ADAPTER_CONFIG
    if not os.path.lexists(file):
        return folder
    name = read_settings(file).get("base_model_name_or_path")
    places = [folder / name, Path(name)] if isinstance(name, str) and name else []
    if found := [place for place in places if os.path.isdir(place)]:
        return require_base(found[0])
    how = f"name it there, or, of a Llama, python -m convert {folder} OUT --to hf --base DIR makes a model of both"
    raise UserError(f"{file}: base_model_name_or_path is {short_repr(name)}, which is no folder here; {how}")


def require_base(folder: Path) -> Path:
    """The folder. Raises `UserError` if it is an adapter itself."""
    if os.path.lexists(folder / ADAPTER_CONFIG):
        raise UserError(f"{folder} is named as the base of an adapter, and is an adapter itself")
    return folder


def stop_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end a text, as transformers reads them; empty where none does. Raises `UserError`."""
    file = folder / (GENERATION if os.path.lexists(folder / GENERATION) else CONFIG)
    said = read_settings(file).get("eos_token_id")
    ids = tuple(said if isinstance(said, list) else () if said is None else (said,))
    if not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        raise UserError(f"{file}: eos_token_id is {short_repr(said)}, not a token id or a list of them")
    return ids


def require_file(file: Path, most: int | None = None) -> None:
    """Raises `UserError` if `file` is no plain file (reading a pipe would not end), or has more than `most` bytes."""
    if not os.path.lexists(file):
        raise UserError(f"{file} does not exist")
    if not file.is_file():
        raise UserError(f"{file} is {'a link that leads nowhere' if not file.exists() else 'no plain file'}")
    if most is not None and file.stat().st_size > most:
        raise UserError(f"{file} has {file.stat().st_size} bytes; at most {most} are read of such a file")


# ---------------------------------------------------------------------------------------------------- weights


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights; of several files, their index comes first. Raises `UserError`."""
    for name in WEIGHTS:
        if os.path.lexists(folder / name):
            return [folder / name]
        index = folder / f"{name}{INDEX_ENDING}"
        if os.path.lexists(index):
            return [index, *_shards(index)]
    raise UserError(f"{folder} holds no weights: neither {SAFETENSORS} nor {PICKLED}, nor an index of several files")


def _shards(index: Path) -> list[Path]:
    placed = read_settings(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise UserError(f"{index} does not say under 'weight_map' which file holds which tensor")
    names = sorted(set(placed.values()))
    ending = index.name.removesuffix(INDEX_ENDING).rpartition(".")[2]
    if foreign := [name for name in names if not name.endswith(f".{ending}") or set("/\\:\0") & set(name)]:
        raise UserError(f"{index} names {short_repr(foreign[0])}, which is no .{ending} file of this folder")
    if absent := [name for name in names if not (index.parent / name).exists()]:
        raise UserError(f"{index} names files that are not here: {join_names(absent)}")
    return [index.parent / name for name in names]


def read_tensors(folder: Path) -> tuple[Path, State]:
    """The file or the index of a folder's weights, for messages, and the tensors. Raises `UserError`."""
    known_by, *shards = weight_files(folder)
    tensors: State = {}
    for file in shards or [known_by]:
        for name, tensor in read_file(file).items():
            if name in tensors:
                raise UserError(f"{known_by} names several files that hold {shorten(str(name))}; keep one")
            tensors[name] = tensor
    return known_by, tensors


def read_file(file: Path) -> dict:
    """The state dict in one file of weights. Raises `UserError`."""
    require_file(file)
    tensors = _read_safetensors(file) if file.suffix == ".safetensors" else load_tensors(file)
    if not isinstance(tensors, dict):
        raise UserError(f"{file} does not hold a state dict")
    return tensors


def without_heads(file: Path, tensors: State, known: Collection[str] = ()) -> State:
    """The tensors without those of other tasks' heads; a warning names these. known: names of heads that stay."""
    bare = {name: bare_name(name) for name in tensors}
    heads = [name for name in tensors if bare[name].partition(".")[0] in HEADS and bare[name] not in known]
    if heads:
        warn(f"{file}: {join_names(shorten(str(name)) for name in heads)} left out, the head of another task")
    return {name: tensor for name, tensor in tensors.items() if name not in heads}


def bare_name(name: str) -> str:
    """A name without what a model with a head puts in front."""
    return re.sub(r"^(model|transformer(?=\.(layers|norm|embed_tokens)\.)|bert|distilbert)\.", "", str(name))


def _read_safetensors(file: Path) -> State:
    library = safetensors()
    try:  # it opens no file whose name is not UTF-8
        return library.load(file.read_bytes()) if SURROGATE.search(str(file)) else library.load_file(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except Exception:  # of several unrelated classes, by what is damaged
        raise UserError(f"cannot load {file}: {DAMAGED.replace('PyTorch checkpoint', 'safetensors file')}") from None


def safetensors() -> ModuleType:
    """The module that reads and writes safetensors. Raises `UserError` where it is not installed."""
    require_safetensors()
    return importlib.import_module("safetensors.torch")


def require_safetensors() -> None:
    """Raises `UserError` where the package is not installed. It is not imported."""
    if importlib.util.find_spec("safetensors") is None:
        raise UserError(f"{SAFETENSORS} needs a package: pip install safetensors")


def lock_of(folder: Path) -> Path:
    """The lock file of a folder: beside it, as "." may be the folder itself."""
    return Path(f"{folder.resolve()}.lock")


# ---------------------------------------------------------------------------------------------------- writing


def write_model(
    folder: Path,
    settings: dict[str, Any],
    tensors: State,
    about: dict[str, str] | None = None,
    names: tuple[str, str] = (CONFIG, SAFETENSORS),
) -> None:
    """Write `config.json` and the weights, each whole or not at all, into a folder, which is made where there is none.

    about: metadata, which the file of the weights holds as well. names: of the two files.
    """
    content = _in_order(safetensors().save(tensors, metadata={"format": "pt", **(about or {})}))
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / names[1], "wb") as file:
        file.write(content)
    with atomic_write(folder / names[0]) as file:
        file.write(json.dumps(settings, indent=2) + "\n")


def _in_order(content: bytes) -> bytes:
    """The same safetensors file with a sorted header: the library writes metadata in any order."""
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def files_read(folder: Path, of_tokenizer: Sequence[str]) -> list[str]:
    """The names of the existing files of the model and its tokenizer; paths for those of an adapter's base.

    Raises `UserError`.
    """
    base = base_folder(folder)
    names = (CONFIG, *(file.name for file in weight_files(base)), *of_tokenizer)
    found = [name for name in names if (base / name).is_file()]
    if base == folder:
        return found
    return [ADAPTER_CONFIG, adapter_weights(folder).name, *(os.path.abspath(base / name) for name in found)]


def adapter_weights(folder: Path) -> Path:
    """The file of an adapter's weights. Raises `UserError`."""
    found = [folder / name for name in ADAPTER_WEIGHTS if os.path.lexists(folder / name)]
    if not found:
        raise UserError(f"{folder} holds an {ADAPTER_CONFIG} and no weights: neither {' nor '.join(ADAPTER_WEIGHTS)}")
    return found[0]


def files_of_llama(folder: Path) -> list[str]:
    """`files_read` of a language model, whose tokenizer may lie elsewhere. Raises `UserError`."""
    require_file(base_folder(folder) / CONFIG)
    more = (TOKENIZER_MODEL, TOKENIZER_JSON, TOKENIZER_CONFIG, ADDED_TOKENS, SPECIAL_TOKENS, GENERATION)
    return files_read(folder, more)


def files_of_bert(folder: Path) -> list[str]:
    """`files_read` of a BERT. Raises `UserError`."""
    return files_read(folder, (TOKENIZER_CONFIG, VOCABULARY, TOKENIZER_JSON, ADDED_TOKENS, SPECIAL_TOKENS))


def vocabulary_file(folder: Path) -> Path:
    """The file of a directory's vocabulary; the name of the usual one where there is none."""
    base = base_folder(folder)
    return base / (TOKENIZER_JSON if (base / TOKENIZER_JSON).exists() else VOCABULARY)


def family_of(folder: Path) -> str:
    """The family of a directory's model, by its name in `engine.families`. Raises `UserError` for others."""
    file = base_folder(folder) / CONFIG
    kind = read_settings(file).get("model_type", "bert")  # the oldest files do not say it
    if kind not in FAMILIES:
        known = join_names(list(FAMILIES))
        raise UserError(f"{file} describes a model of type {short_repr(kind)}; known here are {known}")
    return FAMILIES[kind]


def files_of_model(folder: Path) -> list[str]:
    """`files_read` of either kind. Raises `UserError`."""
    return files_of_llama(folder) if family_of(folder) == "llama" else files_of_bert(folder)
