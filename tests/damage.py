"""Damaged lines of JSON that are still JSON: some value is another, an entry is gone, or a line stands there twice."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

OTHERS = (None, True, -1, 0, 0.5, 10**30, 1e308, "", "x", "\u2028", [], [1], [[]], {}, {"a": 1}, "missing", "twice")


def damaged(lines: Sequence[str], count: int, seed: int = 0) -> Iterator[str]:
    """Yield texts of the lines, each with one value changed."""
    drawing = random.Random(seed)
    for _ in range(count):
        records = [json.loads(line) for line in lines]
        place = drawing.randrange(len(records))
        changed = {"line": copy.deepcopy(records[place])}
        inside, key = drawing.choice([*_places(changed)])
        other = drawing.choice(OTHERS)
        if other == "missing" and key != "line":
            del inside[key]
        else:
            inside[key] = other
        records[place : place + (other != "twice")] = [changed["line"]]
        yield "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in lists and objects, at most two of each list."""
    for key in [*value] if isinstance(value, dict) else range(min(2, len(value))):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])
