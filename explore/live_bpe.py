"""A `tokenizer.json` of byte-level BPE as a live page reads it, see page/live/tokenizer.js."""

from __future__ import annotations

import json
import re
from typing import Any

from utils import UserError

# GPT-2's words, which `ByteLevel` cuts by itself (Radford et al. 2019; Unicode classes as in its encoder.py)
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WHITE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's, unlike JavaScript's
NOT_WHITE = r"\S"


def page_of_json_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Raises `UserError` for a tokenizer that works otherwise."""
    file = json.loads(tokenizer.content)
    model, steps = file["model"], _steps(file.get("pre_tokenizer"))
    other = next((reason for reason in _reasons(tokenizer, file, steps) if reason), None)
    if other:
        beside = tokenizer.sentencepiece_file()  # the same tokenizer, but for special tokens that a text spells out
        hint = f", or --tokenizer {beside}" if beside else ""
        raise UserError(f"{tokenizer.model_path} has {other}, which the page cannot read; use --serve{hint}")
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    last = steps[-1]
    patterns = [pattern for step in steps for pattern in _patterns(step)]
    return {
        "kind": "bytes", "pieces": [tokenizer.piece_name(id) for id in range(tokenizer.n_words)],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        "added": [[token.content, id] for id, token in added.items()],
        "patterns": [for_javascript(pattern) for pattern in patterns],
        "nfc": file.get("normalizer") is not None,
        "addsSpace": bool(last.get("add_prefix_space")),
        "ignoresMerges": bool(model.get("ignore_merges")),
        "begins": tokenizer.begins, "bos": tokenizer.bos_id,
        "special": [id for id in added if tokenizer.is_special(id)],
    }  # fmt: skip


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The single steps of a pre-tokenizer."""
    if step is None:
        return []
    return [each for one in step["pretokenizers"] for each in _steps(one)] if step["type"] == "Sequence" else [step]


def _reasons(tokenizer: Any, file: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    """Why the page cannot read it; empty strings among them."""
    model, normalizer = file["model"], file.get("normalizer") or {"type": "NFC"}
    added = tokenizer.tokenizer.get_added_tokens_decoder().values()
    odd = next((token.content for token in added if token.lstrip or token.rstrip or token.single_word), None)
    is_byte_level = bool(steps) and steps[-1]["type"] == "ByteLevel" and model.get("type") == "BPE"
    unknown = [step["type"] for step in steps[:-1] if step["type"] not in ("Split", "Digits")]
    is_other_split = any(step.get("behavior", "Isolated") != "Isolated" or step.get("invert") for step in steps[:-1])
    return [
        "" if is_byte_level else "another kind of model than byte-level BPE",
        "" if normalizer["type"] == "NFC" else f"the normalizer {normalizer['type']}",
        f"the step {unknown[0]}" if unknown else "",
        "a split that drops or joins" if is_other_split else "",
        "" if odd is None else f"the token {odd!r}, which takes the spaces around it",
        "special tokens that are cut as text" if tokenizer.tokenizer.encode_special_tokens else "",
        "dropout or affixes" if any(model.get(name) for name in
                                    ("dropout", "continuing_subword_prefix", "end_of_word_suffix")) else "",
    ]  # fmt: skip


def _patterns(step: dict[str, Any]) -> list[str]:
    """The regular expressions by which a step cuts a text."""
    if step["type"] == "Digits":
        return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
    if step["type"] == "Split":
        pattern = step["pattern"]
        return [
            pattern["Regex"] if "Regex" in pattern else re.sub(r"[\\^$.*+?()\[\]{}|/]", r"\\\g<0>", pattern["String"])
        ]
    return [GPT2_WORDS] if step.get("use_regex", True) else []


def for_javascript(pattern: str) -> str:
    """The same regular expression in JavaScript with the flag u.

    White space is written out. A part that ignores case, `(?i:...)`, names both cases of its letters. A possessive `?+`
    or `++` becomes a greedy one: what stands behind them in the known patterns cannot match what they would give back.
    """
    pattern = re.sub(r"\(\?i:([^()]*)\)", lambda part: f"(?:{_both_cases(part[1])})", pattern)
    pattern = re.sub(r"(?<!\\)([?+*]|\{\d[\d,]*\})\+", r"\1", pattern)
    parts, is_class = [], False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        if part in ("\\s", NOT_WHITE):
            parts.append(WHITE if is_class else f"[{'^' * (part == NOT_WHITE)}{WHITE}]")
            continue
        is_class = (is_class or part == "[") and part != "]"
        parts.append(part)
    return "".join(parts)


def _both_cases(letters: str) -> str:
    return re.sub(r"[A-Za-z]", lambda letter: f"[{letter[0].lower()}{letter[0].upper()}]", letters)
