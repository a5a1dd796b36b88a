"""The thread that computes a live page, run by node: what it answers is compared with `llama.py`."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from explore.inspected import InspectedModel
from explore.live import in_8_bits, live_page
from explore.page import worker_script

ASKED = Path(__file__).with_name("asked.js").read_text(encoding="utf-8")


class Thread:
    """Answers questions of page/live/worker.js. Numbers that are not finite are NaN."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process

    def ask(self, kind: str, **given: Any) -> Any:
        self.process.stdin.write(json.dumps({"number": 1, "kind": kind, "given": given}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "failed" not in answer, answer["failed"]
        return answer["answer"]

    def logits(self, ids: list[int], **switches: Any) -> torch.Tensor:
        """s v"""
        rows = self.ask("logits", ids=ids, switches=switches)["logits"]
        return torch.tensor([[float(value) for value in row] for row in rows])


@contextlib.contextmanager
def thread_of(inspected: InspectedModel, folder: Path, bits: int = 16) -> Iterator[Thread]:
    """Skips the test where node is not installed."""
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    (folder / "thread.js").write_text(worker_script() + ASKED, encoding="utf-8")
    command = [node, str(Path(__file__).with_name("node.js")), str(folder / "thread.js")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as process:
        content, weights = live_page(inspected, "a", bits, str(folder / "p.html"))
        thread = Thread(process)
        thread.ask("open", weights=base64.b64encode(weights).decode(), **content["live"])
        yield thread
        process.stdin.close()


@torch.no_grad()
def rounded(inspected: InspectedModel, bits: int = 16) -> InspectedModel:
    """The same model with the weights that the page holds, in place."""
    for tensor in inspected.llama.parameters():
        if tensor.dim() > 1:
            whole, units = in_8_bits(tensor)
            tensor.copy_(tensor.half().float() if bits == 16 else whole.float() * units)
    return inspected


def occlusion_in_parts(ask: Callable[..., dict[str, Any]], **given: Any) -> tuple[list[float | None], int]:
    """As a page asks for it. No part has what an earlier one had."""
    found, together, first = {}, 0, 0
    while first is not None:
        part = ask("occlusion", **given, first=first)
        values = {at: value for at, value in enumerate(part["occlusion"]) if value is not None and value == value}
        assert values and not {*values} <= {*found} and (part["next"] is None or part["next"] > first)
        found, together, first = found | values, part["together"], part["next"]
    return [found.get(at) for at in range(len(part["occlusion"]))], together
