"""Hugging Face's directories as models: `config.json` with `model.safetensors` or `pytorch_model.bin`.

BERT's and DistilBERT's, under old names and new ones, with a head or without; or an adapter of one. Nothing but
tensors is ever unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bert import heads
from bert.config import BertConfig
from bert.model import Bert
from bert.names import BERT, COUNTERS, DISTILBERT, HEAD_PARTS, TEXTBOOK, Layout
from bert.package import WORKS_OFFLINE
from bert.tokenizer_json import pieces_of, settings_in
from bert.wordpiece import SPECIAL, THEIR_NAMES, WordPiece
from convert.directory import CONFIG, TOKENIZER_CONFIG, State, base_folder, read_settings, vocabulary_file
from convert.peft import read_tensors
from convert.tokenizer_files import WITHOUT_CLASS, added_tokens, parsed, read_content, settings_of
from engine.weights import Unfilled, are_equal, is_finite, shape_errors_of, state_dict_errors
from utils import UserError, hub_hint, join_names, short_repr, shorten, warn

SIZES = ("vocab_size", "dim", "hidden_dim", "max_seq_len", "n_segments")  # each a side of some matrix
DECODER, TOKEN_EMBEDDINGS = "masked_lm.decoder.weight", "embeddings.tokens.weight"  # which the original ties


def load_bert(path: str | os.PathLike) -> Bert:
    """The encoder of a directory, in float32 on the CPU, in evaluation mode; weights of heads are passed over.

    A directory without weights of a pooler gives an encoder without one. Further training of a DistilBERT drops out the
    output of attention too, as in BERT. Raises `UserError` if a file is missing or damaged, or describes another kind
    of model: the message names every missing, unexpected or misshapen key.
    """
    return _load_encoder(path, *read_config(path))[0]


def load_model(path: str | os.PathLike, make: Callable[[Bert], nn.Module] | None = None) -> tuple[nn.Module, list[str]]:
    """A model with a head on the encoder of a directory, in evaluation mode, and which parts of the head are new.

    make: the model for an encoder, such as `BertForPreTraining`, or a function that gives the number of classes as
    well; by default the one of `heads.py` that the directory says it holds. Weights of the head are taken where the
    directory has them; a part of which it has none stays as `make` drew it. In training a
    DistilBERT's head for tokens has the dropout `seq_classif_dropout` and that for answers none, as a BERT's; in
    transformers they have `dropout` and `qa_dropout`. Raises `UserError` as `load_bert`, and where the weights of
    a part are there, but not all of them, or do not fit.
    """
    layout, settings = read_config(path)
    make = make or _declared(path, layout, settings)
    encoder, stored = _load_encoder(path, layout, settings)
    model = make(encoder)
    own = {name: tensor for name, tensor in model.state_dict().items() if _part(name) in HEAD_PARTS}
    if DECODER in own and any(_part(name) == _part(DECODER) for name in stored):
        stored.setdefault(DECODER, encoder.state_dict()[TOKEN_EMBEDDINGS])
    new, found, wrong = [], {}, []
    for part in sorted({_part(name) for name in own}):
        wanted, there = ({name: t for name, t in state.items() if _part(name) == part} for state in (own, stored))
        if wanted.keys() & there.keys():
            wrong += state_dict_errors(there, wanted)
            found |= there
        else:
            new.append(part)
    if not wrong and DECODER in found and not are_equal(found[DECODER].to(own[DECODER].dtype), own[DECODER]):
        wrong.append("the decoder of masked tokens differs from the token embeddings, to which this model ties it")
    if wrong:
        raise UserError(f"{path} does not fit its head: {layout.in_their_words(join_names(wrong))}")
    _check_finite(path, found, layout)
    model.load_state_dict(found, strict=False)
    return model.eval(), new


def load_tokenizer(path: str | os.PathLike) -> WordPiece:
    """The tokenizer of a directory: `tokenizer.json`, else `vocab.txt`, with what the files beside it say.

    Raises `UserError` as `read_vocabulary`, and for a vocabulary with more pieces than the model has embeddings.
    """
    _, settings = read_config(path)
    file = vocabulary_file(Path(path))
    tokenizer, most = read_vocabulary(file), settings.get("vocab_size")
    if isinstance(most, int) and len(tokenizer) > most:
        raise UserError(f"{path} has {len(tokenizer)} pieces in {file.name}, but a vocab_size of {most} in {CONFIG}")
    if isinstance(most, int) and len(tokenizer) < most:
        warn(f"{path} has {len(tokenizer)} pieces in {file.name} for a vocab_size of {most}; is the file whole?")
    pad_id = settings.get("pad_token_id")
    pad_id = BertConfig.pad_id if pad_id is None else pad_id
    if pad_id != tokenizer.pad_id:
        here = f"[PAD] is piece {tokenizer.pad_id} of {file.name}, but by {CONFIG} it is token {short_repr(pad_id)}"
        raise UserError(f"{path}: {here}")
    tokenizer.first_segment = settings.get("first_segment", tokenizer.first_segment)
    return tokenizer


def read_vocabulary(path: str | os.PathLike, lower_case: bool | None = None) -> WordPiece:
    """A tokenizer of a `vocab.txt` or a `tokenizer.json`.

    lower_case: None: take all settings and added tokens from the files beside it. Raises `UserError` as
    `WordPiece.from_file`, and for a `tokenizer.json` that has other steps than a BERT's.
    """
    if lower_case is not None:
        return WordPiece.from_file(path, lower_case)
    path = Path(path)
    beside = path.with_name(TOKENIZER_CONFIG)
    said, _ = settings_of(path.parent)
    for token in SPECIAL:
        name = f"{token[1:-1].lower()}_token"
        named = said.setdefault(name, token)
        if token not in (named, named.get("content") if isinstance(named, dict) else None):
            raise UserError(f"{beside}: {name} is {short_repr(named)}; a BERT here has {token}")
    found = {ours: said[theirs] for ours, theirs in THEIR_NAMES.items() if said.get(theirs) is not None}
    for name, value in found.items():
        if not isinstance(value, bool):
            raise UserError(f"{beside}: {THEIR_NAMES[name]} is {short_repr(value)}; it must be true, false or null")
    pieces, listed = None, []
    if path.suffix == ".json":
        file = parsed(read_content(path), path)
        pieces, listed = pieces_of(file, path), file.get("added_tokens") or []
        if said["tokenizer_class"] is not None and said["tokenizer_class"] in WITHOUT_CLASS:
            found |= settings_in(file, path)
    added, numbered = added_tokens(path.parent, said, listed)
    found["added"] = [
        token for token in added if token["content"] not in SPECIAL or token["normalized"] or token.get("single_word")
    ]
    tokenizer = WordPiece.from_file(path, **found) if pieces is None else WordPiece(pieces, path=str(path), **found)
    for id, text in numbered.items():
        if tokenizer.ids.get(text) != id:
            warn(f"{path}: the token {short_repr(text)} is {tokenizer.ids.get(text)}, as in transformers 5, not {id}")
            break
    return tokenizer


def check_pairs(encoder: Bert, path: str | os.PathLike) -> None:
    """Raises `UserError` for an encoder of one segment: it cannot tell two texts apart."""
    if encoder.config.n_texts == 1:
        raise UserError(f"{path} has one segment (type_vocab_size is 1), and a pair of texts needs two")


def read_config(path: str | os.PathLike) -> tuple[Layout, dict[str, Any]]:
    """The format of a directory, one of those of `names.py`, and its settings. Raises `UserError`."""
    if not Path(path).is_dir():
        hint = "" if Path(path).exists() else hub_hint(path, WORKS_OFFLINE)
        raise UserError(f"{path} is not a folder; name one that holds {CONFIG} and the weights of a BERT{hint}")
    file = base_folder(Path(path)) / CONFIG
    settings = read_settings(file)
    kind = settings.get("model_type", BERT.name)  # the oldest files do not say it
    for layout in (BERT, DISTILBERT, TEXTBOOK):
        if kind == layout.name:
            return layout, settings
    raise UserError(f"{file} describes a model of type {short_repr(kind)}; bert and distilbert are known here")


# ------------------------------------------------------------------------------------------- parts of loading


def _part(name: str) -> str:
    return name.partition(".")[0]


def _load_encoder(path: str | os.PathLike, layout: Layout, settings: dict[str, Any]) -> tuple[Bert, State]:
    """The encoder, and the tensors of heads under our names."""
    file, tensors = read_tensors(Path(path), base_folder(Path(path)))
    try:
        state = _canonical_state(tensors, layout)
        config = layout.config(settings, has_pooler=any(_part(name) == "pooler" for name in state))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    stored = {name: state.pop(name) for name in [*state] if _part(name) in HEAD_PARTS}
    if found := shape_errors_of(state, config, Bert, SIZES):
        raise UserError(f"{file} does not fit its {CONFIG}: {layout.in_their_words(join_names(found))}")
    _check_finite(file, state, layout)
    with Unfilled():
        encoder = Bert(config)
    encoder.load_state_dict(state)
    return encoder.eval(), stored


def _check_finite(path: str | os.PathLike, state: State, layout: Layout) -> None:
    if damaged := [name for name, tensor in state.items() if not is_finite(tensor)]:
        where = layout.in_their_words(join_names(damaged))
        raise UserError(f"{path} is damaged: not all numbers are finite in {where}")


def _canonical_state(tensors: dict, layout: Layout) -> dict:
    """The state dict under our names. Raises `ValueError` where two names of the same tensor differ in value."""
    renamed, before = {}, {}
    for name, tensor in tensors.items():
        full = str(name)
        name = layout.ours(full)
        if name in COUNTERS:
            continue
        if name in renamed and not _are_alike(tensor, renamed[name]):
            raise ValueError(f"{shorten(before[name])} and {shorten(full)} are names of the same tensor; keep one")
        renamed[name], before[name] = tensor, full
    return renamed


def _are_alike(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape and are_equal(a, b)


def _declared(path: str | os.PathLike, layout: Layout, settings: dict[str, Any]) -> Callable[[Bert], nn.Module]:
    """The model of `heads.py` that `config.json` names, with its number of classes."""
    named = settings.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else "nothing"
    make = getattr(heads, f"Bert{name.removeprefix(layout.prefix)}", None) if name.startswith(layout.prefix) else None
    if make is None or not name.startswith(f"{layout.prefix}For"):
        raise UserError(f"{path} holds no head that is known here: its {CONFIG} names {short_repr(name)}")
    if make not in (heads.BertForSequenceClassification, heads.BertForTokenClassification):
        return make
    labels = settings.get("id2label")
    return lambda encoder: make(encoder, len(labels) if isinstance(labels, dict) and labels else 2)
