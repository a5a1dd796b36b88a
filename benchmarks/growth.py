"""How cost grows with the length of a text, layers, texts in a batch, and lines of `predict`; fills `bench.growth`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from benchmarks.alone import RUN_AND_TELL
from benchmarks.apart import seconds_and_megabytes
from benchmarks.bench import Bench, Growth, Line
from benchmarks.limits import Pass, classifying, decoding, training
from benchmarks.peers import Peers, classify, optimizer, random_llama, train_step
from benchmarks.table import NUM_LABELS, OURS, Work
from classifier import LlamaEmbeddingClassifier
from config import LlamaConfig
from engine.data import create_data
from engine.runs import record_of, save_classifier
from llama import Llama
from tokenizer import Tokenizer
from utils import ROOT

MAX_ROUNDS = 3
ROWS_OF_LAYERS = 4  # texts of a batch where the layers grow
PREDICT_BATCH = 64


def context(bench: Bench, _: Sequence[Work]) -> list[Line]:
    """Lengths of one text, then numbers of layers; fills `bench.growth`."""
    lengths, layers = bench.sizes.lengths, bench.sizes.layers
    config = replace(bench.config, max_seq_len=max(lengths))
    for name, (run, passes) in _works(bench, config).items():
        _measure(bench, f"{name}, length", lengths, partial(run, 1), partial(passes, 1))
    by_layers = {count: _works(bench, replace(config, n_layers=count)) for count in layers}
    for name in by_layers[layers[0]]:
        runs = {count: works[name][0](ROWS_OF_LAYERS, lengths[0]) for count, works in by_layers.items()}
        passes = {count: works[name][1](ROWS_OF_LAYERS, lengths[0]) for count, works in by_layers.items()}
        _measure(bench, f"{name}, layers", layers, runs.get, passes.get)
    return []


def batches(bench: Bench, _: Sequence[Work]) -> list[Line]:
    """Texts in a batch, then lines of `predict`; fills `bench.growth`."""
    sizes, length = bench.sizes.batches, bench.sizes.lengths[0]
    for name, (run, passes) in _works(bench, bench.config).items():
        made = (lambda rows, make=make: make(rows, length) for make in (run, passes))
        _measure(bench, f"{name}, texts", sizes, *made)
    _measure_predict(bench)
    return []


def _works(bench: Bench, config: LlamaConfig) -> dict[str, tuple[Callable, Callable]]:
    """Classification, training and decoding in float32, with the kernels that are chosen here.

    Each is two functions of the number of texts and their length: the first makes what is timed, the second counts
    the least work of that, a list of `Pass`.
    """
    peers = Peers(random_llama(config))
    classifier, trained = peers.classifier(OURS), peers.classifier(OURS, trains=True)
    updates, decoder, start = optimizer(OURS, trained), peers.decoder(), bench.sizes.prompt

    def forward(rows: int, length: int) -> Callable[[], object]:
        return partial(classify, classifier, *peers.batch(rows, length).inputs)

    def train(rows: int, length: int) -> Callable[[], object]:
        return partial(train_step, trained, updates, peers.batch(rows, length))

    def decode(rows: int, length: int) -> Callable[[], object]:
        return partial(decoder.generate, peers.prompt(rows, start), length - start, temperature=0.0)

    return {
        "forward": (forward, lambda rows, length: classifying(config, rows, length, NUM_LABELS)),
        "training step": (train, lambda rows, length: training(config, rows, length, NUM_LABELS)),
        "decode": (decode, lambda rows, length: decoding(config, rows, start, length - start)),
    }


def _measure(
    bench: Bench,
    name: str,
    sizes: Sequence[int],
    run: Callable[[int], Callable[[], object]],
    passes: Callable[[int], list[Pass]],
) -> None:
    runs = {str(size): run(size) for size in sizes}
    costs = bench.turns.take(runs, least=bench.sizes.turn, most=MAX_ROUNDS)
    expected = [float(sum(each.operations for each in passes(size))) for size in sizes]
    bench.growth.append(Growth(name, sizes, [costs[str(size)] for size in sizes], expected))


# ----------------------------------------------------------------------------------------------------- predict


def _measure_predict(bench: Bench) -> None:
    """Whole processes of `--option predict` with a tiny model, once each: their time, and their peak memory."""
    sizes = bench.sizes.predicted
    model = _save_tiny_classifier(bench.folder / "predict.pt")
    costs = [_predict(bench, model, lines) for lines in sizes]
    seconds, megabytes = ([[cost[kind]] for cost in costs] for kind in (0, 1))
    bench.growth.append(Growth("predict, lines", sizes, seconds, [float(size) for size in sizes]))
    bench.growth.append(Growth("memory of predict, lines", sizes, megabytes, [1.0] * len(sizes), "MB"))


def _save_tiny_classifier(path: Path) -> Path:
    """A causal classifier of random weights with the bundled tokenizer."""
    tokenizer = Tokenizer(tokenizer_model=ROOT / "checkpoints/minllama1M.model")
    llama = Llama(LlamaConfig.from_preset("tiny", attention="causal", vocab_size=tokenizer.n_words, max_seq_len=256))
    settings = SimpleNamespace(num_labels=2, hidden_dropout_prob=0.0, option="finetune")
    model = LlamaEmbeddingClassifier(settings, llama=llama).eval()
    save_classifier(path, model, record_of(model, tokenizer, ["negative", "positive"], PREDICT_BATCH))
    return path


def _predict(bench: Bench, model: Path, lines: int) -> tuple[float, float]:
    """Seconds and MB. Raises as `apart.run_python`."""
    source, target = bench.folder / "sentences.txt", bench.folder / "predictions.txt"
    examples = itertools.cycle(create_data(ROOT / "data/films-train.txt"))
    with source.open("w", encoding="utf-8") as file:
        file.writelines(f"{example.sentence}\n" for example in itertools.islice(examples, lines))
    flags = ["--option", "predict", "--model", model, "--input", source, "--output", target]
    return seconds_and_megabytes("predict", ["-c", RUN_AND_TELL, *flags], bench.threads)
