"""The trained models of additions: each file is read in an empty box, and the model runs here, by hand.

So nothing is unpickled here, and no code of the student's has a part in a model's size and accuracy. The problems are
drawn for each run.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from grading.addition import ABLATION, BEST, Experiment, accuracy_of, capacity_of, contradictions, judge_experiments
from grading.judge import Executed
from grading.programs import few, printable
from grading.small_model import below, feed_forward, normed
from grading.student_process import ChildQuestion, Student
from grading.wire import MAX_BYTES

NORMS = ("attention_norm", "ffn_norm")
LETTERS = "\0+0123456789="  # by token id; 0 begins and ends a text
PROBLEMS, AT_ONCE = 2000, 500
ANSWER = 6  # tokens: five digits, and what follows them
EPS = 1e-5  # of addition_run.py, as all that is not in a model's shape
WIDEST = 4096  # numbers of a hidden state
MAX_JSON = 100_000  # bytes

Cache = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer so far, b g t d


class Unfit(ValueError):
    """A model that cannot be judged, with the reason."""


def check_models(reader: Student, folder: Path, drawer: random.Random) -> Iterator[Executed]:
    """The verdict on each model of a folder, then on all. reader: a box without code. drawer: draws the problems."""
    problems, found, unread = draw_problems(drawer), {}, 0
    for place in sorted(filter(Path.is_dir, folder.glob("*"))):
        files = {path.name: path for path in sorted(place.iterdir()) if is_plain(path, folder.parent)}
        models = [path for name, path in files.items() if name.endswith(".pth")]
        if not (models and (place.name == BEST or ABLATION.fullmatch(place.name))):
            continue
        part = f"{folder.name}/{place.name}"
        try:
            one = experiment_of(reader, files, models[0], problems)
        except Unfit as error:
            unread += 1
            yield Executed(part, False, str(error), code="E083-model")
            continue
        found[place.name] = one
        claims = (read_json(files, f"{name}.json") for name in ("training_config", "experiment_summary"))
        said = list(contradictions(one, *claims))
        shown = f"{one.parameters:,} parameters, {one.capacity:,} operations, {one.accuracy:.2%} of drawn problems"
        yield Executed(part, not said, "; ".join(said) or shown, code="E086-claims" if said else "")
    for message in judge_experiments(found, unread) if found else ():
        yield Executed(folder.name, False, str(message), code=message.code)


def is_plain(path: Path, root: Path) -> bool:
    """Whether a path is a file in which no link leads elsewhere."""
    return path.is_file() and path.resolve() == root.resolve() / path.relative_to(root)


def read_json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is none."""
    try:
        if name in files and files[name].stat().st_size <= MAX_JSON:
            found = json.loads(files[name].read_bytes())
            return found if isinstance(found, dict) else {}
    except (ValueError, RecursionError):
        pass
    return {}


def experiment_of(reader: Student, files: Mapping[str, Path], path: Path, problems: list[str]) -> Experiment:
    """What the model in a .pth file is worth, with the JSON files beside it. Raises `Unfit`."""
    training, config = read_json(files, "training_config.json"), read_json(files, "model_config.json")
    for said, names in ((training, ("train_samples", "n_epochs", "batch_size")), (config, ("n_heads",))):
        if not all(type(said.get(name)) is int and 0 < said[name] < 1 << 40 for name in names):
            file = "training_config.json" if said is training else "model_config.json"
            raise Unfit(f"{file} beside it is missing, or says no {', '.join(names)}")
    weights = read_weights(reader, path)
    steps, parameters = int(weights.pop("steps")), parameters_of(weights)
    capacity = capacity_of(parameters, training["train_samples"], training["n_epochs"])
    texts = continued(weights, config["n_heads"], [problem.partition("=")[0] + "=" for problem in problems])
    return Experiment(parameters, capacity, accuracy_of(problems, texts), steps)


def read_weights(reader: Student, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .pth file in float32, and `steps`. Raises `Unfit`."""
    size, name = path.stat().st_size, printable(path.name)
    if size > MAX_BYTES - 8:
        raise Unfit(f"{name} has {size:,} bytes, too many for a model of additions")
    content = torch.frombuffer(bytearray(path.read_bytes() + bytes(8 - size % 8)), dtype=torch.int64)
    answer = reader.ask(ChildQuestion("saved_model", path.stem, {"size": size}, {"file": content}))
    if answer.trouble:
        raise Unfit(f"{name} cannot be read as plain tensors: {answer.trouble}")
    return {each: tensor.float() for each, tensor in zip(answer.names, answer.tensors, strict=True)}


def parameters_of(weights: Mapping[str, torch.Tensor]) -> int:
    """The size of a Llama with LayerNorms and the letters of additions. Raises `Unfit` for the tensors of another."""
    try:
        hidden, dim = weights["layers.0.feed_forward.w1.weight"].shape
        heads = (len(weights["layers.0.attention.compute_key.weight"]), dim)
    except (KeyError, ValueError, TypeError):
        raise Unfit("it holds no Llama: there is no first layer") from None
    layer = {"feed_forward.w1": (hidden, dim), "feed_forward.w2": (dim, hidden), "feed_forward.w3": (hidden, dim)}
    layer |= {f"attention.compute_{name}": (dim, dim) for name in ("query", "output")}
    layer |= {f"attention.compute_{name}": heads for name in ("key", "value")} | dict.fromkeys(NORMS, (dim,))
    shapes = {"tok_embeddings.weight": (len(LETTERS), dim), "output.weight": (len(LETTERS), dim)}
    shapes |= {"norm.weight": (dim,), "norm.bias": (dim,)}
    for number in range(layers_of(weights)):
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {f"layers.{number}.{name}.bias": (dim,) for name in NORMS}
    given = {name: tuple(one.shape) for name, one in weights.items() if name.endswith((".weight", ".bias"))}
    if others := dict(shapes.items() ^ given.items()):  # a mask or a table that a module keeps is no parameter
        raise Unfit(f"it holds no Llama of additions: {few(others, 3)}")
    if max(dim, hidden, *heads) > WIDEST:
        raise Unfit(f"it is wider than {WIDEST:,}")
    is_tied = torch.equal(weights["output.weight"], weights["tok_embeddings.weight"])
    return sum(map(math.prod, shapes.values())) - is_tied * len(LETTERS) * dim


def layers_of(weights: Mapping[str, torch.Tensor]) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("layers.")})


def continued(weights: dict[str, torch.Tensor], n_heads: int, prompts: list[str]) -> list[str]:
    """The likeliest texts that begin with these prompts, all of one length. Raises `Unfit` for a number of heads."""
    key, dim = weights["layers.0.attention.compute_key.weight"].shape
    head_dim = dim // n_heads
    if dim % n_heads or head_dim % 2 or not head_dim or key % head_dim or not key or n_heads % (key // head_dim):
        raise Unfit(f"model_config.json says {n_heads} heads, which do not fit its {dim} and {key} rows")
    model = LanguageModel(weights, layers_of(weights), head_dim)
    tokens = torch.tensor([[0, *map(LETTERS.index, prompt)] for prompt in prompts])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tiny models: threads that wait for one another took six times the time
    try:
        rows = [model.continued(some, ANSWER) for some in tokens.split(AT_ONCE)]
    finally:
        torch.set_num_threads(threads)
    return ["".join(LETTERS[one] for one in row[1:]).partition(LETTERS[0])[0] for row in torch.cat(rows).tolist()]


def draw_problems(drawer: random.Random) -> list[str]:
    """Additions of two numbers with four digits, each with its sum."""
    pairs = [(drawer.randint(1000, 9999), drawer.randint(1000, 9999)) for _ in range(PROBLEMS)]
    return [f"{first}+{second}={first + second}" for first, second in pairs]


# ---------------------------------------------------------------------------------------------- the model by hand


def rotate(x: torch.Tensor, start: int, theta: float = 10000.0) -> torch.Tensor:
    """RoFormer's equation 34, the pairs as complex numbers. x: b s h d, its first position is `start`"""
    pairs = torch.arange(x.shape[-1] // 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(start, start + x.shape[1]).double(), theta ** (-2 * pairs / x.shape[-1]))  # s d/2
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


class LanguageModel:
    """A causal Llama with these weights, computed by hand: a grader imports no `llama.py`, which may be a student's."""

    def __init__(self, weights: dict[str, torch.Tensor], n_layers: int, head_dim: int):
        self.weights, self.head_dim = weights, head_dim
        self.layers = [below(weights, f"layers.{layer}.") for layer in range(n_layers)]

    def logits(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """tokens: b s -> b s v. They follow those in the cache, which must be empty where s > 1."""
        h = F.embedding(tokens, self.weights["tok_embeddings.weight"])  # b s D
        for number, layer in enumerate(self.layers):
            x = normed(h, below(layer, "attention_norm."), EPS)
            h = h + self._attention(x, below(layer, "attention."), number, cache)
            x = normed(h, below(layer, "ffn_norm."), EPS)
            h = h + feed_forward(x, below(layer, "feed_forward."))
        return F.linear(normed(h, below(self.weights, "norm."), EPS), self.weights["output.weight"])

    def _attention(self, x: torch.Tensor, layer: dict[str, torch.Tensor], number: int, cache: Cache) -> torch.Tensor:
        """x: b s D -> b s D. Adds keys and values to the cache."""
        start, heads = cache[number][0].shape[2] if number < len(cache) else 0, (-1, self.head_dim)
        names = ("query", "key", "value")
        query, key, value = (F.linear(x, layer[f"compute_{name}.weight"]).unflatten(-1, heads) for name in names)
        query, key, value = (x.transpose(1, 2) for x in (rotate(query, start), rotate(key, start), value))  # b h s d
        if start:
            key, value = (torch.cat(pair, dim=2) for pair in zip(cache[number], (key, value), strict=True))
        cache[number : number + 1] = [(key, value)]
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))  # b h t d
        output = F.scaled_dot_product_attention(query, key, value, is_causal=not start)
        return F.linear(output.transpose(1, 2).flatten(2), layer["compute_output.weight"])

    @torch.inference_mode()
    def continued(self, idx: torch.Tensor, new: int) -> torch.Tensor:
        """Each row with the `new` likeliest tokens behind it. idx: b s -> b s+new"""
        cache: Cache = []
        logits = self.logits(idx, cache)
        for left in reversed(range(new)):
            idx_next = logits[:, -1].argmax(-1, keepdim=True)
            idx = torch.cat((idx, idx_next), dim=1)
            if left:
                logits = self.logits(idx_next, cache)
        return idx
