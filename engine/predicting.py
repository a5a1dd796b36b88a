"""`--option predict`: from an input of sentences to lines of predictions, or to rows with the input's columns;
and `--option perplexity`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

from engine.columns import check_format, has_columns, read_texts
from engine.data import format_line
from engine.programs import Default
from engine.reports import load_llama, opened_output, print_count, warn_of_long_sentences
from engine.stream import shown_before_waiting
from engine.tables import Row, TableWriter, names_of_rows, read_rows
from utils import UserError, read_text

if TYPE_CHECKING:
    from engine.plan import ComputeSettings
    from engine.saved import Prediction

PREDICTION, PROBABILITY = "prediction", "probability_{}"  # names of columns


def predict(args: Namespace, compute: ComputeSettings) -> None:
    """Classify any number of sentences, one per line, with the classifier that a fine-tuning has saved."""
    sentences, rows = read_rows(args.input, args.columns)
    names_of_rows(rows or (), [PREDICTION], args.input)  # before the model is loaded
    from engine.runs import compute_fast
    from engine.saved import load_classifier
    from engine.saved import predict as predicted

    def kept_precision(of_run: str) -> str | None:
        return compute_as_saved(args, compute, of_run).kept_precision

    model, saved = load_classifier(args.model, kept_precision=kept_precision)
    compute_fast(model, compute_as_saved(args, compute, saved.precision))
    with opened_output(args.output) as file:
        write = _writer(args, file, saved.label_names, rows)
        count = too_long = 0
        for prediction in predicted(model, saved, shown_before_waiting(sentences)):
            write(prediction)
            count, too_long = count + 1, too_long + prediction.is_too_long
            if not getattr(file, "has_reader", True):  # the program that reads the output has ended
                break
    warn_of_long_sentences(too_long, saved.config)
    print_count(count, "predictions", args.output)


def compute_as_saved(args: Namespace, compute: ComputeSettings, of_run: str) -> ComputeSettings:
    """With the precision of the run that a model was saved with, unless a flag says otherwise."""
    is_free = isinstance(args.precision, Default) and args.kernels == "auto"
    return compute._replace(precision=of_run) if is_free else compute


def _writer(
    args: Namespace, file: IO[str], label_names: Sequence[str], rows: list[Row] | None
) -> Callable[[Prediction], None]:
    """The function that writes a prediction: as a line, or with all columns if the name of the output says so."""

    def label_of(prediction: Prediction) -> int | str:
        return label_names[prediction.label] if args.names else prediction.label

    if args.output is None or not has_columns(args.output):
        return lambda prediction: file.write(line_of(prediction, label_of(prediction), args.probabilities))
    own = [PREDICTION, *(PROBABILITY.format(name) for name in label_names if args.probabilities)]
    names = [args.columns.text] if rows is None else names_of_rows(rows, own, args.input)
    table, left = TableWriter(file, args.output, [*names, *own]), iter(rows or ())

    def write(prediction: Prediction) -> None:
        row = next(left) if rows is not None else {args.columns.text: prediction.sentence}
        figures = [label_of(prediction), *(round(each, 6) for each in prediction.probabilities)]
        table.write({**row, **dict(zip(own, figures, strict=False))})

    return write


def line_of(prediction: Prediction, label: int | str, with_probabilities: bool) -> str:
    if not with_probabilities:
        return f"{format_line(label, prediction.sentence)}\n"
    probabilities = [f"{probability:.6f}" for probability in prediction.probabilities]
    sentence = prediction.sentence.replace("\t", " ")  # tabs separate the columns
    return "\t".join((str(label), *probabilities, sentence)) + "\n"


def perplexity(args: Namespace, compute: ComputeSettings) -> None:
    """Measure how well the language model predicts a text."""
    from engine import saved
    from engine.runs import compute_fast

    check_format(args.input)
    text = "\n".join(read_texts(args.input, args.columns)) if has_columns(args.input) else read_text(args.input)
    if not text.strip():
        raise UserError(f"--input {args.input} holds no text")
    llama, tokenizer = load_llama(args, compute)
    if not llama.config.is_causal:
        raise UserError("a bidirectional model sees the tokens that it would predict; add --attention causal")
    compute_fast(llama, compute, trains=False)
    result = saved.perplexity(llama, tokenizer, text, args.batch_size)
    print(f"{result.tokens} tokens in {args.input}")
    print(f"nats a token :: {result.nats_per_token:.4f}, bits a byte :: {result.bits_per_byte:.4f}")
    print(f"perplexity :: {result.perplexity:.3f}")
