"""How long a tokenizer makes a text, by what its `tokenizer.json` declares: a small file may ask for a terabyte."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from math import prod
from typing import Any

from utils import UserError

MOST_GROWTH = 10_000  # characters for one of a text; known tokenizers stay below 200
MOST_AROUND = 256  # tokens around a text; known ones have three
STEPS = ("normalizers", "pretokenizers", "decoders", "processors")  # of a sequence of steps
GROWTH = {"NFC": 4, "NFD": 4, "NFKC": 18, "NFKD": 18, "Precompiled": 18, "BertNormalizer": 12, "Lowercase": 3}
GROWTH |= {"ByteLevel": 4, "Metaspace": 2, "ByteFallback": 4}


def require_bounded(file: dict[str, Any], path: str | os.PathLike) -> None:
    """Raises `UserError` for a `tokenizer.json` whose steps, one after the other, may make a text far longer."""
    try:
        fault = _fault(file)
    except (KeyError, TypeError, AttributeError, ValueError):  # of something else than it should be
        fault = "it is not a tokenizer, or it is damaged"
    if fault:
        raise UserError(f"cannot use {path}: {fault}")


def _fault(file: dict[str, Any]) -> str:
    before = [*_steps(file.get("normalizer")), *_steps(file.get("pre_tokenizer"))]
    for steps in (before, [*_steps(file.get("decoder"))]):
        if prod(map(_growth, steps)) > MOST_GROWTH:
            return f"its {len(steps)} steps may make more than {MOST_GROWTH} characters of one"
    around = [_around(step) for step in _steps(file.get("post_processor"))]
    if sum(tokens for tokens, _ in around) > MOST_AROUND or any(texts > 1 for _, texts in around):
        return f"it puts more than {MOST_AROUND} tokens around a text, or repeats the text"
    for table in (step["precompiled_charsmap"] for step in before if step.get("type") == "Precompiled"):
        rules = base64.b64decode(table or "")
        if rules and int.from_bytes(rules[:4], "little") > len(rules) - 4:
            return "its table of letters is damaged: it says another length than it has"
    return ""


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """The single steps of a step, which may be a sequence of others."""
    waiting = [step]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            inner = [each for name in STEPS if isinstance(step.get(name), list) for each in step[name]]
            waiting += inner
            if not inner:
                yield step


def _growth(step: dict[str, Any]) -> int:
    """The most characters that a step makes of one."""
    content, prepended = (str(step.get(name, "")) for name in ("content", "prepend"))
    if step.get("type") == "Prepend":
        return 1 + len(prepended)
    if step.get("type") == "Replace":
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1, -(-len(content) // len(text))) if text else 1 + len(content)  # a regex may match nothing at all
    return GROWTH.get(step.get("type"), 2 if content else 1)


def _around(step: dict[str, Any]) -> tuple[int, int]:
    """How many tokens a step puts around a text, and how often the text stands between them."""
    if step.get("type") != "TemplateProcessing":
        return 2, 1
    pieces, special = step.get("single") or [], step.get("special_tokens") or {}
    names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
    return sum(len(special[name]["ids"]) for name in names if name in special), len(pieces) - len(names)
