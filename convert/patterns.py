"""Regular expressions that a file holds, matched with names in a process of its own.

Some expressions take longer than a life for a name of thirty letters, and Python's `re` cannot be interrupted in time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

from utils import UserError, short_repr

SECONDS = 10.0
# the rule of PEFT (peft/utils/other.py, get_pattern_key): the whole name, or its end behind a full stop
PROGRAM = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
compiled = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
json.dump([next((n for n, each in enumerate(compiled) if each.match(name)), None) for name in names], sys.stdout)
"""


def first_matches(patterns: Sequence[str], names: Iterable[str], what: str) -> dict[str, str | None]:
    """The first pattern that matches each name, as PEFT matches them, or None.

    Raises `UserError`, which begins with `what`, for texts that are no patterns or take too long.
    """
    names = list(names)
    if not patterns:
        return dict.fromkeys(names)
    command = [sys.executable, "-I", "-c", PROGRAM]
    how = {"input": json.dumps([[*patterns], names]), "capture_output": True, "text": True, "timeout": SECONDS}
    try:
        found = json.loads(subprocess.run(command, check=True, **how).stdout)
    except subprocess.TimeoutExpired:
        raise UserError(f"{what}: matching {short_repr([*patterns])} takes more than {SECONDS:g} seconds") from None
    except (subprocess.CalledProcessError, ValueError):
        raise UserError(f"{what}: one of {short_repr([*patterns])} is no regular expression") from None
    return {name: None if number is None else patterns[number] for name, number in zip(names, found, strict=True)}
