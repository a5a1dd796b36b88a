"""A saved classifier beside the ONNX file made of it: how far apart they are, and sentences a second of both.

    python -m convert.compare finetune-5-2e-05.pt films.onnx --input sentences.txt

Both get the same batches of token ids; encoding them is not timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.arguments import columns_of
from engine.flags import add_flags, flags_named
from engine.programs import ArgumentParser, input_file, run_main
from engine.tables import read_sentences
from utils import UserError

if TYPE_CHECKING:
    import torch

TIMED_PASSES = 3  # over all sentences; the fastest one counts


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the paths of its files. Raises `UserError` for a file that does not exist."""
    parser = ArgumentParser(prog="python -m convert.compare", description="a saved classifier beside its ONNX file")
    parser.add_argument("model", metavar="MODEL", help="what --option finetune has saved")
    parser.add_argument("file", metavar="FILE.onnx", help="what python -m convert --to onnx made of it")
    parser.add_argument("--input", required=True, metavar="FILE", help="a sentence a line, or a file with columns")
    add_flags(parser, flags_named("text-column", "skip_empty"))
    args = parser.parse_args(argv)
    for name in ("model", "file", "input"):
        setattr(args, name, input_file("--input" if name == "input" else name.upper(), getattr(args, name)))
    args.columns = columns_of(args, [args.input])
    return args


def main() -> None:
    args = get_args()
    import torch

    from engine import families, runs
    from engine.data import NO_GOLD_LABEL, Example
    from engine.plan import ComputeSettings

    run = program_of(args.file)
    sentences = [sentence for sentence in read_sentences(args.input, args.columns) if sentence is not None]
    model, about = runs.load_classifier(args.model)
    compute = ComputeSettings(torch.device("cpu"), precision=about.precision)
    runs.compute_fast(model, compute, trains=False)
    dataset = families.encode_for(model, about.tokenizer, [Example(sentence, NO_GOLD_LABEL) for sentence in sentences])
    loader = runs.loader_of(dataset, about.config, about.batch_size, compute.device)
    batches = [batch["token_ids"] for batch in loader]
    with torch.inference_mode():
        ours, our_seconds = timed(model, batches)
        theirs, their_seconds = timed(run, batches)
    largest = largest_difference(ours, theirs)
    alike = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(ours, theirs, strict=True))
    print(f"{len(sentences)} sentences, {alike} with the same label; log-probabilities differ by at most {largest:.1e}")
    rates = [len(sentences) / seconds for seconds in (our_seconds, their_seconds)]
    print(f"sentences a second :: {rates[0]:.1f} here, {rates[1]:.1f} in onnxruntime")


def program_of(path: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """An ONNX file as a function on the CPU: token ids b s -> log-probabilities b c. Raises `UserError`."""
    import torch

    try:
        import onnxruntime
    except ImportError:
        raise UserError("an ONNX file is run with the package onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # as many as PyTorch has
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception:  # of onnxruntime's own classes
        raise UserError(f"{path} is not an ONNX file, or it is damaged") from None

    def run(token_ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: token_ids.numpy()})[0])

    return run


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Of all batches; NaN where one of them has a NaN, which Python's own `max` would pass over."""
    import torch

    return float(torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]).max())


def timed(
    compute: Callable[[torch.Tensor], torch.Tensor], batches: list[torch.Tensor]
) -> tuple[list[torch.Tensor], float]:
    """The results for all batches, and the seconds of the fastest pass over them."""
    best = float("inf")
    for _ in range(TIMED_PASSES):
        start = time.perf_counter()
        results = [compute(batch) for batch in batches]
        best = min(best, time.perf_counter() - start)
    return results, best


if __name__ == "__main__":
    sys.exit(run_main(main))
