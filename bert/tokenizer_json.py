"""The WordPiece of a `tokenizer.json`, as transformers 5 writes it in the place of `vocab.txt`. No PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bert.wordpiece import CONTINUED, LONGEST_WORD
from utils import UserError, short_repr

KIND = {"type": "WordPiece", "continuing_subword_prefix": CONTINUED, "max_input_chars_per_word": LONGEST_WORD}


def pieces_of(file: dict[str, Any], path: Path) -> list[str]:
    """The pieces in the order of their ids. file: the parsed file. Raises `UserError` for another vocabulary."""
    model = file.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise UserError(f"{path} holds no vocabulary, or it is damaged")
    for name, value in KIND.items():
        if model.get(name, value) != value:
            raise UserError(f"{path}: its model's {name} is {short_repr(model[name])}, and a BERT's here {value!r}")
    pieces = {id: piece for piece, id in model["vocab"].items()}
    if {*pieces} != {*range(len(model["vocab"]))}:
        raise UserError(f"{path}: its ids do not count its pieces, or it is damaged")
    return [pieces[id] for id in range(len(pieces))]


def settings_in(file: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings of `WordPiece` in a file that no class overrules. Raises `UserError` for steps of another kind."""
    normalizer, cutter = file.get("normalizer"), file.get("pre_tokenizer")
    kinds = [step.get("type") if isinstance(step, dict) else None for step in (normalizer, cutter)]
    if kinds != ["BertNormalizer", "BertPreTokenizer"] or not normalizer.get("clean_text"):
        raise UserError(f"{path} changes or cuts a text otherwise than a BERT's, by {kinds[0]} and {kinds[1]}")
    names = {"lower_case": "lowercase", "strip_accents": "strip_accents", "spaces_chinese": "handle_chinese_chars"}
    return {ours: normalizer[theirs] for ours, theirs in names.items() if isinstance(normalizer.get(theirs), bool)}
