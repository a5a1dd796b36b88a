"""The questions of the grading scripts to a student's code, each a function. Imported in the student's process.

Inputs and weights come with the question. A function returns the student's numbers unchanged: none here knows the right
ones. A function raises `Wrong` where a sentence says more than an exception would.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grading import answers, wire
from grading.answers import StateDict, Wrong, is_float, numbers_of, saved_model

# ------------------------------------------------------------------------------------------------------------- to AdamW


def own_adamw() -> type:
    """The student's AdamW. Imports the module."""
    return importlib.import_module("optimizer").AdamW


def train(weight: torch.Tensor, inputs: torch.Tensor, optimizer: type | None = None, **settings) -> torch.Tensor:
    """The assignment's toy problem: a 3 -> 2 linear layer learns (x0 + x1, -x2). Returns its weight, 2 3.

    weight: the layer's first one. inputs: steps 3. optimizer: None takes the student's AdamW.
    """
    layer = torch.nn.Linear(3, 2, bias=False)
    layer.load_state_dict({"weight": weight})
    optimizer = (optimizer or own_adamw())(layer.parameters(), **settings)
    for x in inputs:
        target = torch.stack((x[0] + x[1], -x[2]))
        optimizer.zero_grad()
        (target - layer(x)).square().sum().backward()
        optimizer.step()
    return layer.weight.detach()


def few_steps(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    optimizer: type | None = None,
    own: list[dict] | None = None,
    late: int = 0,
    **settings,
) -> torch.Tensor:
    """The parameters after some steps, rows of a matrix. weights: the first ones. gradients: steps, then as weights.

    own: the settings of each parameter, which is then a group of its own. late: in how many steps, the first ones,
    the first parameter has no gradient.
    """
    parameters = [torch.nn.Parameter(row.clone()) for row in weights]
    groups = [{"params": [parameter], **each} for parameter, each in zip(parameters, own or (), strict=False)]
    optimizer = (optimizer or own_adamw())(groups or parameters, **settings)
    for step, gradient in enumerate(gradients):
        for parameter, row in zip(parameters, gradient, strict=True):
            parameter.grad = None if step < late and parameter is parameters[0] else row.clone()
        optimizer.step()
    return torch.stack([parameter.detach() for parameter in parameters])


def step_with_closure(weights: torch.Tensor, gradient: torch.Tensor, **settings) -> Any:
    """The loss that `step` returns for a closure, the parameter after that step, and each call of the closure.

    Of a loss that is None an empty tensor. A call is 1 where gradients are computed in it, else 0.
    """
    parameter, calls = torch.nn.Parameter(weights.clone()), []
    optimizer = own_adamw()([parameter], **settings)

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        parameter.grad = gradient
        return (parameter * gradient).sum()

    loss = optimizer.step(closure)
    return weights.new_zeros(0) if loss is None else loss, parameter, torch.tensor(calls).to(weights)


# --------------------------------------------------------------------------------------------------------- to the model

Weights = dict[str, torch.Tensor]
NEARLY_0, HOT = 1e-3, 1e4  # temperatures


def answer(header: dict, data: bytes) -> Weights:
    """Ask the question in `header` with the tensors in `data`. Returns the student's tensors as float64, by name.

    What was given comes back as it is after the call, under names that begin with `wire.GIVEN`.
    Raises `Wrong` if the student's code returns other things than tensors, and every exception of that code.
    """
    arguments: dict[str, Any] = dict(header["settings"])
    given = wire.unpack(header, data)
    for name, tensor in given.items():
        argument, _, inner = name.partition("/")  # with a slash: one of a dictionary of tensors
        if inner:
            arguments.setdefault(argument, {})[inner] = tensor
        else:
            arguments[argument] = tensor
    found = answers.call(header["question"], QUESTIONS[header["question"]], arguments)
    if not isinstance(found, StateDict):
        values = found if isinstance(found, (tuple, list)) else (found,)
        found = {str(number): value for number, value in enumerate(values)}
    dtype = next((one.dtype for one in arguments.values() if is_float(one)), None)
    numbers = {name: numbers_of(value, dtype) for name, value in found.items()}
    if header["question"] == "saved_model":  # a file, which no student's code has seen
        return numbers
    return numbers | {f"{wire.GIVEN}{name}": tensor for name, tensor in given.items()}


# ------------------------------------------------------------------------------------------------- questions


def student(module: str, name: str) -> Any:
    """A function or class of one of the student's modules. Imports the module."""
    return getattr(importlib.import_module(module), name)


def import_module(module: str) -> tuple:
    importlib.import_module(module)
    return ()


def rotate(query: torch.Tensor, key: torch.Tensor, head_dim: int, max_seq_len: int, theta: float | None = None) -> Any:
    """query: b s h d, key: b s g d. theta: None leaves it out, as in the assignment."""
    given = () if theta is None else (theta,)
    return student("rope", "apply_rotary_emb")(query, key, head_dim, max_seq_len, *given)


def fill(module: torch.nn.Module, weights: Weights) -> torch.nn.Module:
    """A student's module with these weights, in evaluation mode."""
    unknown = module.load_state_dict(weights, strict=False).unexpected_keys
    if unknown:
        raise Wrong(f"it has no parameter {unknown[0]}; the names are the checkpoint's")
    return module.eval()


def make(name: str, weights: Weights, *arguments) -> torch.nn.Module:
    """A module of the student's llama.py with these weights."""
    return fill(student("llama", name)(*arguments), weights)


def make_config(config: dict) -> Any:
    return student("config", "LlamaConfig")(**config)


def norm_or_feed_forward(name: str, arguments: list, weights: Weights, x: torch.Tensor) -> Any:
    return make(name, weights, *arguments)(x)


def scores(
    config: dict, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> Any:
    """The output without a mask; then, if there is one and the function takes it, with it (1: may be seen)."""
    function = student("llama", "Attention")(make_config(config)).eval().compute_query_key_value_scores
    unmasked = function(query, key, value)
    if mask is None or "mask" not in inspect.signature(function).parameters:
        return unmasked
    return unmasked, function(query, key, value, mask=mask.bool())


def attention(config: dict, weights: Weights, x: torch.Tensor) -> Any:
    module = make("Attention", weights, make_config(config))
    scores = module.compute_query_key_value_scores

    def watched(query: torch.Tensor, key: torch.Tensor, *others, **named) -> torch.Tensor:
        try:
            return scores(query, key, *others, **named)
        except RuntimeError as error:
            if key.shape[1] == config["n_kv_heads"]:
                raise Wrong("key/value heads are not repeated; each serves n_heads / n_kv_heads queries") from error
            raise

    module.compute_query_key_value_scores = watched
    return module(x)


def attention_alone(config: dict, weights: Weights, x: torch.Tensor) -> Any:
    """As `attention`, with stand-ins for rotation and scores."""
    module, code = make("Attention", weights, make_config(config)), importlib.import_module("llama")
    module.compute_query_key_value_scores = answers.attended
    rotation, code.apply_rotary_emb = code.apply_rotary_emb, answers.turned
    try:
        return module(x)
    finally:
        code.apply_rotary_emb = rotation


def layer(config: dict, weights: Weights, x: torch.Tensor, replaced: Weights | None = None) -> Any:
    """replaced: matrices of `answers.replace_parts`, by the names of the parts."""
    module = make("LlamaLayer", weights, 0, make_config(config))
    answers.replace_parts(module, replaced or {})
    return module(x)


def layer_norm_of(config: dict, x: torch.Tensor, shifted: torch.Tensor) -> Any:
    """The outputs of a new layer's attention norm for `x` and for `shifted`, x + 1: equal for a LayerNorm."""
    norm = student("llama", "LlamaLayer")(0, make_config(config)).eval().attention_norm
    return norm(x), norm(shifted)


def llama(config: dict, weights: Weights, tokens: torch.Tensor, replaced: Weights | None = None) -> Any:
    """The last position's logits, the hidden states, and the logits of all positions; then the matrix of the head
    after 1 is added to that of the embeddings. replaced: as for `layer`."""
    model = make("Llama", weights, make_config(config))
    answers.replace_parts(model, replaced or {})
    logits, hidden = model(tokens)
    every = model(tokens, tokens)[0]
    model.tok_embeddings.weight.add_(1.0)
    return logits, hidden, every, model.output.weight


def generate(
    config: dict,
    weights: Weights,
    tokens: torch.Tensor,
    new: int,
    hot: tuple = (NEARLY_0, HOT),
    table: torch.Tensor | None = None,
) -> Any:
    """Each row's continuation at temperature 0; the first row's at others: near 0, and where all are as likely.

    table: that of `answers.replace_forward`; None: the model computes.
    """
    model = make("Llama", weights, make_config(config))
    if table is not None:
        answers.replace_forward(model, table)
    texts = [model.generate(row[None], new, temperature=0.0) for row in tokens]  # one at a time, as run_llama.py does
    if any(map(is_float, texts)):
        raise Wrong(f"it returns {texts[0].dtype}, not whole numbers".replace("torch.", ""))
    return *texts, *(model.generate(tokens[:1], new, temperature=each) for each in hot)


# ------------------------------------------------------------------------------------------------ checkpoints


def names_attention() -> tuple:
    """Raises `Wrong` unless the student's load_pretrained has the argument `attention`; the hand-out's has none."""
    if "attention" not in inspect.signature(student("llama", "load_pretrained")).parameters:
        raise Wrong("load_pretrained has no argument attention")
    return ()


def load(path: str, attention: str, norm: str | None = None) -> torch.nn.Module:
    """The student's model of a checkpoint. A load_pretrained with one kind of attention gets no argument for it."""
    load_pretrained = student("llama", "load_pretrained")
    known = inspect.signature(load_pretrained).parameters
    given = {name: value for name, value in (("attention", attention), ("norm", norm)) if name in known and value}
    return load_pretrained(path, **given).eval()


@torch.no_grad()  # not inference_mode: tables that the code keeps from here could then not be used in training
def model(path: str, attention: str, device: str, tokens: torch.Tensor, norm: str | None = None) -> Any:
    """Hidden states and logits of a checkpoint's model. norm: None: the checkpoint's own."""
    logits, hidden_states = load(path, attention, norm).to(device)(tokens.to(device))
    return hidden_states, logits


@contextmanager
def small_checkpoint(config: dict, weights: Weights) -> Iterator[str]:
    """The path of a checkpoint of the small model. At the end of the `with` block the file is removed."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "small.pt")
        torch.save({"model": weights, "model_args": config}, path)
        yield path


def loading(config: dict, weights: Weights) -> StateDict:
    """The weights of the student's model after loading: those whose names the checkpoint has."""
    with small_checkpoint(config, weights) as path:
        loaded = load(path, config["attention"]).state_dict()
    return StateDict((name, loaded[name]) for name in weights if name in loaded)


class LabelTokenizer:
    """A replacement of a tokenizer: the name of a label is the list of its token ids."""

    bos_id, eos_id = 1, 2

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        return [self.bos_id] * bos + [int(number) for number in text.split()] + [self.eos_id] * eos


def make_classifier(name: str, config: dict, weights: Weights, settings: dict, *arguments) -> torch.nn.Module:
    with small_checkpoint(config, weights) as path:
        given = SimpleNamespace(**settings, pretrained_model_path=path, attention=config["attention"])
        return student("classifier", name)(given, *arguments)


def zero_shot(
    config: dict,
    weights: Weights,
    settings: dict,
    labels: list[str],
    tokens: torch.Tensor,
    table: torch.Tensor | None = None,
) -> Any:
    """table: as for `generate`, here and in `embedding`."""
    arguments = (LabelTokenizer(settings["pad_id"]), labels)
    model = make_classifier("LlamaZeroShotClassifier", config, weights, settings, *arguments)
    if table is not None:
        answers.replace_forward(model.llama, table)
    return model.eval()(tokens)


def embedding(
    config: dict,
    weights: Weights,
    settings: dict,
    head: Weights,
    tokens: torch.Tensor,
    table: torch.Tensor | None = None,
) -> Any:
    """Log-probabilities in evaluation, and in training."""
    model, _ = embedding_model(config, weights, settings, head)
    if table is not None:
        answers.replace_forward(model.llama, table)
    torch.manual_seed(0)
    return model.eval()(tokens), model.train()(tokens)


def embedding_model(
    config: dict, weights: Weights, settings: dict, head: Weights
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The student's classifier and its linear head, which gets the weights `head`."""
    model = make_classifier("LlamaEmbeddingClassifier", config, weights, settings)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    heads = [module for module in linear if module.weight.shape == head["weight"].shape]
    if len(heads) != 1:
        raise Wrong("it has no linear head from a hidden state to num_labels numbers")
    return model, fill(heads[0], head)


def embedding_gradients(
    config: dict, weights: Weights, settings: dict, head: Weights, tokens: torch.Tensor
) -> list[torch.Tensor]:
    """The gradients of the log-probabilities by the matrix of the embeddings and that of the head."""
    model, linear = embedding_model(config, weights, settings, head)
    first = next(one for name, one in model.named_parameters() if name.endswith("tok_embeddings.weight"))
    return answers.slopes(model.eval()(tokens), [first, linear.weight])


def gradients(question: str, inputs: list[str], **arguments) -> list[torch.Tensor]:
    """The gradients of what a part returns by these inputs, see `answers.slopes`."""

    def call(*given: torch.Tensor) -> Any:
        return globals()[question](**arguments | dict(zip(inputs, given, strict=True)))

    return answers.slopes_of(call, [arguments[name] for name in inputs])


WITHOUT_GRADIENTS = (
    norm_or_feed_forward, scores, attention, attention_alone, layer, layer_norm_of, llama, generate, loading,
    zero_shot, embedding,
)  # fmt: skip
QUESTIONS: dict[str, Callable[..., Any]] = {
    **{part.__name__: torch.no_grad()(part) for part in WITHOUT_GRADIENTS},
    **{one.__name__: one for one in (import_module, rotate, train, few_steps, step_with_closure)},
    **{one.__name__: one for one in (names_attention, model, gradients, embedding_gradients, saved_model)},
}
