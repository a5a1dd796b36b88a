"""The processes of a command: only this one, or those that torchrun started."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.arguments import is_one_of_several
from engine.flags import inputs_of
from engine.plan import InputFile
from engine.processes import SINGLE_PROCESS, Distributed
from utils import choose_device


@contextmanager
def join_world(args: Namespace) -> Iterator[Distributed]:
    """The processes of this run: only this one, or those that torchrun started."""
    if not is_one_of_several():
        yield SINGLE_PROCESS
        return
    from engine import torchrun

    with torchrun.join(choose_device(args.device, args.use_gpu), shard=args.shard) as group:
        group.require_alike(facts(args))
        yield group


def facts(args: Namespace) -> dict[str, Any]:
    """Values that must be equal in all processes: checksums of the input files, and the flags that name no file."""
    inputs = inputs_of(args.option)
    given = {name: value for name, value in vars(args).items() if name not in inputs and not name.endswith("_out")}
    files = {name: getattr(args, name) for name in inputs if getattr(args, name) is not None}
    sums = {name: InputFile.of(path, getattr(args, "model_files", ())).sha256 for name, path in files.items()}
    return given | sums | {path: InputFile.of_several(path).sha256 for path in getattr(args, "method_files", ())}
