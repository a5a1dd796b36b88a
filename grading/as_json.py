"""`--json`: what a grading script found as one JSON object, in the place of its lines."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object in the place of the lines")


def run_told(script: str, args: argparse.Namespace, run: Callable[[dict[str, Any]], int]) -> int:
    """Run a script's check and return its exit status; with `--json` its lines are an entry of the object.

    run: takes a dictionary for what else belongs into the object. Where it raises, nothing is printed here: the object
    is on standard output only if something was checked.
    """
    told: dict[str, Any] = {}
    if not args.json:
        return run(told)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = run(told)
    lines = printed.getvalue().splitlines()
    print(json.dumps({"script": script, "edition": args.edition, "status": status, **told, "lines": lines}))
    return status
