"""What a model of edited root modules computes, with kernels and without: run as `edit_worker.py FOLDER`, prints JSON.

FOLDER holds the root modules, some of them edited; everything else is this repository's.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [sys.argv[1], str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from classifier import LlamaEmbeddingClassifier  # noqa: E402
from config import LlamaConfig  # noqa: E402
from engine.inference import SAMPLING, PromptDecoder  # noqa: E402
from fast import accelerate, compiled, decoder  # noqa: E402
from llama import Llama  # noqa: E402


def make_model(attention: str) -> Llama:
    torch.manual_seed(0)
    model = Llama(LlamaConfig.from_preset("tiny", attention=attention, n_layers=6))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layers") and parameter.dim() == 2:
                parameter.mul_(6.0)
    return model.eval()


def numbers(model: Llama, kernels: bool) -> tuple[list[float], Any]:
    """Of a text, of three together, of a classification, of a training step; and the decoder, if there are kernels."""
    generator, out = None, []
    if kernels:
        accelerate(model)
        generator = decoder(model)
        command = PromptDecoder(model, None, generator, None, 12, dict.fromkeys(SAMPLING), ())
    for shape, seed in (((1, 45), 1), ((3, 10), 4)):
        idx = torch.randint(0, 300, shape, generator=torch.Generator().manual_seed(seed))
        texts = command.continued(idx, 0.0) if kernels else model.generate(idx, 12, temperature=0.0).tolist()
        out += [number for text in texts for number in text[shape[1] :]]
    settings = SimpleNamespace(num_labels=3, hidden_dropout_prob=0.0, option="finetune")
    torch.manual_seed(2)
    classifier = LlamaEmbeddingClassifier(settings, llama=model)
    if kernels:
        accelerate(classifier)
    batch = torch.randint(4, 300, (3, 20), generator=torch.Generator().manual_seed(3))
    batch[1, 15:] = 3
    with torch.inference_mode():
        out += classifier.eval()(batch).flatten().tolist()
    loss = F.nll_loss(classifier.train()(batch), torch.tensor([0, 1, 2]))
    loss.backward()
    out.append(loss.item())
    out += [parameter.grad.norm().item() for parameter in classifier.parameters() if parameter.grad is not None]
    model.eval()
    return out, generator


def outcome(attention: str, *, accelerated: bool) -> dict[str, object]:
    model, generator = make_model(attention), None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # which an edit may print on
            of_model, generator = numbers(model, accelerated)
            found: dict[str, object] = {"numbers": of_model}
    except (RuntimeError, AssertionError, TypeError) as error:
        found = {"error": type(error).__name__}
    if generator is not None:
        is_causal = attention == "causal"
        found["loops"] = generator.choice.kernel == "numba" if is_causal else generator._may_compute()
    return found


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for attention in ("causal", "bidirectional"):
        found[attention] = {
            "plain": outcome(attention, accelerated=False),
            "fast": outcome(attention, accelerated=True),
            "compiled": compiled.why_no_loops() is None and compiled.are_compiled("fp32"),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
