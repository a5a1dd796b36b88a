"""The root's files as each edition has them: its norm, its sampling, clipping, and the course's arguments."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from grading.editions import EDITIONS
from handout.holes import without
from utils import ROOT

LATER = Path(__file__).resolve().with_name("later.py")
GENERATES = {"epsilon": "generate_epsilon", "top-p": "generate_top_p"}  # in later.py, by an edition's sampling
# Of the root's files: what an edition does not have, and what stands in its place.
RMS_ALONE = {
    "base_llama.py": (
        ('"""What Llama-like models share: config, initial weights, the causal mask; and the norm of later editions.',
         '"""What Llama-like models share: config, initial weights and the causal mask.'),
    ),
    "llama.py": (
        ("import LayerNorm, LlamaPreTrainedModel", "import LlamaPreTrainedModel"),
        (', "layer": LayerNorm}', "}"),
        ("""    biases = {name: zeros for name, zeros in model.state_dict().items() if name.endswith("norm.bias")}
    # as in the course, a LayerNorm takes the weights of an RMSNorm, which has no biases: they stay 0
    state = biases | {""", """    state = {"""),
    ),
    "config.py": (('NORM_KINDS = ("rms", "layer")', 'NORM_KINDS = ("rms",)'),),
}  # fmt: skip
LAYER_ALONE = {
    "llama.py": (('{"rms": RMSNorm, ', "{"),),
    "config.py": (('NORM_KINDS = ("rms", "layer")', 'NORM_KINDS = ("layer",)'),),
}
WITHOUT_CLIPPING = {
    "optimizer.py": (
        ("""= lr. max_grad_norm: if the gradients of a group are longer together, each step
    first makes them this long; None: never. Raises""", "= lr. Raises"),
        ("        max_grad_norm: float | None = None,\n", ""),
        ('(params, defaults | {"max_grad_norm": max_grad_norm})', "(params, defaults)"),
        ("""        limit = settings["max_grad_norm"]
        if limit is not None and not 0.0 < limit < math.inf:
            raise ValueError(f"max_grad_norm={limit} must be None, or above 0 and finite")
""", ""),
        ("""            if group.get("max_grad_norm") is not None:
                torch.nn.utils.clip_grad_norm_(group["params"], group["max_grad_norm"])
""", ""),
    ),
}  # fmt: skip
WITHOUT_SCALING = {  # which no checkpoint of the course has
    "rope.py": (
        ("""
A model that was trained further on longer texts may have smaller angles, its `scaling`: see `SCALINGS`.
""", ""),
        ("import math\nfrom collections.abc import Callable\n", ""),
        ("\nScaling = tuple  # the name of one of SCALINGS, and its numbers\n", ""),
        ("    theta: float = 10000.0,\n    scaling: Scaling | None = None,\n", "    theta: float = 10000.0,\n"),
        ('    device: torch.device | str = "cpu",\n    scaling: Scaling | None = None,\n',
         '    device: torch.device | str = "cpu",\n'),
        ("query.device, scaling)", "query.device)"),
        ("frequencies(head_dim, theta, scaling))", "frequencies(head_dim, theta))"),
        ("theta: float = 10000.0, scaling: Scaling | None = None)", "theta: float = 10000.0)"),
        ("    plain = 1.0 /", "    return 1.0 /"),
        ("    return plain if scaling is None else SCALINGS[scaling[0]](plain, *scaling[1:])\n", ""),
    ),
}  # fmt: skip
GONE = {"rope.py": ("_closer", "_slow_ones_closer", "SCALINGS")}
FIELDS = ("norm", "attention", "sampling")  # of LlamaConfig, whose defaults are the edition's


def text_of(file: str, edition: str) -> str:
    """A file of the root as an edition has it, with all functions written."""
    text, about = (ROOT / file).read_text(encoding="utf-8"), EDITIONS[edition]
    tables = [RMS_ALONE if about.norm == "rms" else LAYER_ALONE, {} if about.clips else WITHOUT_CLIPPING]
    tables.append(WITHOUT_SCALING)
    for old, new in (pair for table in tables for pair in table.get(file, ())):
        text = replaced(text, old, new)
    other = {("base_llama.py", "rms"): "LayerNorm", ("llama.py", "layer"): "RMSNorm"}.get((file, about.norm))
    text = without(text, [other] if other else GONE.get(file, ()))
    if file == "llama.py" and about.sampling in GENERATES:
        text = _with_generate(text, GENERATES[about.sampling])
    for field in FIELDS if file == "config.py" else ():
        (line,) = re.findall(rf'(?m)^    {field}: str = "[\w-]+"$', text)
        text = replaced(text, line, f'    {field}: str = "{getattr(about, field)}"')
    return text


def _with_generate(text: str, name: str) -> str:
    """llama.py with one of the functions of later.py as `Llama.generate`."""
    source = LATER.read_text(encoding="utf-8")
    (node,) = (each for each in ast.parse(source).body if getattr(each, "name", "") == name)
    function = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
    function = function.replace(f"def {name}(", "def generate(").replace("self: Llama, ", "self, ")
    (model,) = (each for each in ast.parse(text).body if getattr(each, "name", "") == "Llama")
    (own,) = (each for each in model.body if getattr(each, "name", "") == "generate")
    lines = text.splitlines(keepends=True)
    lines[own.lineno - 1 : own.end_lineno] = [textwrap.indent(function, "    ") + "\n"]
    return "".join(lines)


def replaced(text: str, old: str, new: str) -> str:
    """Replace a text that stands exactly once. Raises `ValueError` if it does not."""
    if text.count(old) != 1:
        raise ValueError(f"{old!r} stands {text.count(old)} times in the text, not once")
    return text.replace(old, new)
