"""What several commands share: their processes, reading data, printing accuracies and tables, writing output files.

In: checked flags. Out: the processes of the run, models, `Example`s, printed lines, output files.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from engine.arguments import OUTPUT_FLAGS, TO_STDOUT, is_one_of_several, lock_of
from engine.data import Example, create_data, format_line, read_label_names
from engine.flags import SPLITS, TRAINING, inputs_of
from engine.plan import InputFile
from engine.programs import NeedsCausal, hears_termination, require_folder
from engine.tables import derive_label_names, has_columns, is_number, read_examples
from utils import UserError, atomic_write, choose_device, find_asset, warn

if TYPE_CHECKING:
    import torch

    from config import LlamaConfig
    from engine.methods import EpochResult, Pretrained
    from engine.plan import ComputeSettings
    from engine.processes import Distributed
    from engine.tasks import Evaluation, Sentences, Task
    from llama import Llama
    from tokenizer import Tokenizer

# ------------------------------------------------------------------------------------------- the processes of a command


@contextmanager
def join_world(args: Namespace) -> Iterator[Distributed]:
    """The processes of this run: only this one, or those that torchrun started."""
    from engine.processes import SINGLE_PROCESS

    if not is_one_of_several():
        yield SINGLE_PROCESS
        return
    from engine import torchrun

    with torchrun.join(choose_device(args.device, args.use_gpu), shard=args.shard) as group:
        group.require_alike(facts(args))
        yield group


@contextmanager
def held_outputs(args: Namespace, distributed: Distributed) -> Iterator[None]:
    """Keep the files of --dev_out and --test_out for this run, which the first Ctrl-C or SIGTERM ends.

    Raises `UserError` if another run has them.
    """
    from engine.storage import NameLock

    def hold() -> None:
        for flag in OUTPUT_FLAGS if args.option in ("prompt", *TRAINING) else ():
            path = getattr(args, flag)
            lock = NameLock(lock_of(path))
            if not lock.acquire():
                where = "name another file, or run in another folder"
                raise UserError(f"--{flag} {path} is in use by another process; {where}")
            held.callback(lock.release)

    with hears_termination(), ExitStack() as held:
        distributed.from_first(hold)
        yield


def facts(args: Namespace) -> dict[str, Any]:
    """Values that must be equal in all processes: checksums of the input files, and the flags that name no file."""
    inputs = inputs_of(args.option)
    given = {name: value for name, value in vars(args).items() if name not in inputs and not name.endswith("_out")}
    files = {name: getattr(args, name) for name in inputs if getattr(args, name) is not None}
    sums = {name: InputFile.of(path, getattr(args, "model_files", ())).sha256 for name, path in files.items()}
    return given | sums | {path: InputFile.of_several(path).sha256 for path in getattr(args, "method_files", ())}


# -------------------------------------------------------------------------------------------- models and data


@contextmanager
def naming_the_flag() -> Iterator[None]:
    from engine.families import OtherVocabulary

    try:
        yield
    except OtherVocabulary as error:
        raise UserError(f"{error}; name the right one with --tokenizer") from None
    except NeedsCausal as error:
        raise UserError(f"{error}; add --attention causal") from None


def load_llama(args: Namespace, compute: ComputeSettings) -> tuple[Llama, Tokenizer]:
    """The model of a command that trains nothing, and its tokenizer."""
    from engine.families import load_llama

    with naming_the_flag():
        changes = args.attention, args.max_sentence_len, args.norm, compute.kept_precision
        llama, tokenizer = load_llama(args.pretrained_model_path, args.tokenizer, *changes)
    if not prints_data(args):
        print_model(args, llama)
    return llama, tokenizer


def print_model(args: Namespace, model: Pretrained) -> None:
    attention = model.config.attention
    print(f"load model from {args.pretrained_model_path}" + (f" (attention: {attention})" if attention else ""))


def read_data(args: Namespace) -> tuple[dict[str, list[Example]], list[str]]:
    """Read and check the three splits and the label names. Prints one line for each file."""
    label_names = _label_names(args)
    splits = {}
    for split in SPLITS:
        path = getattr(args, split)
        if path is None:
            continue
        splits[split] = read_examples(path, label_names, args.columns, is_test=split == "test")
        print(f"load {len(splits[split])} data from {path}")
    return splits, label_names


def _label_names(args: Namespace) -> list[str]:
    """Those of --label-names; if it is not given, those of the data. Raises `UserError`."""
    if not args.derive_labels:
        return read_label_names(args.label_names)
    paths = [path for split in SPLITS if (path := getattr(args, split)) is not None]
    own = [path for path in paths if has_columns(path)]
    if args.option in TRAINING and args.train not in own:
        known = read_label_names(args.label_names)
        # the reference takes the number of classes from the training data, so it overrules the default label names
        labels = [example.label for example in create_data(args.train, skip_empty=args.columns.skip_empty)]
        is_more = len(known) <= max(labels) < len(labels)  # more classes than examples would be a mistake in the data
        return [str(label) for label in range(max(labels) + 1)] if is_more or own else known
    names = derive_label_names(own[0], args.columns)
    print(f"labels: {', '.join(f'{number} {name}' for number, name in enumerate(names))}")
    if len(own) < len(paths) and any(map(is_number, names)) and names != [str(number) for number in range(len(names))]:
        other = next(path for path in paths if path not in own)
        raise UserError(f"{other} has class numbers, which are not the labels of {own[0]}; give it columns, too")
    return names


def encode(
    args: Namespace,
    splits: dict[str, list[Example]],
    tokenizer: Tokenizer,
    model: torch.nn.Module,
) -> dict[str, Sentences]:
    """Encode the splits in the form that a classifier reads, and warn of sentences longer than the model's limit."""
    from engine.families import encode_for
    from engine.methods import pretrained_of

    datasets, config = {}, pretrained_of(model).config
    for split, examples in splits.items():
        dataset = encode_for(model, tokenizer, examples)
        datasets[split] = dataset
        warn_of_long_sentences(dataset.too_long, config, getattr(args, split, args.train))
    return datasets


# ------------------------------------------------------------------------------------------------ predictions


def prints_data(args: Namespace) -> bool:
    """Whether standard output holds only data, because another program may read it."""
    return args.option == "predict" or (args.prompt_file is not None and args.output in TO_STDOUT)


@contextmanager
def opened_output(path: str | None) -> Iterator[IO[str]]:
    """The file of --output, written whole or not at all, or standard output: UTF-8 with `\\n` on every platform."""
    if path not in TO_STDOUT:
        with atomic_write(path) as file:
            yield file
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    yield sys.stdout


def print_count(count: int, what: str, path: str | None) -> None:
    """Print how much was written; beside data on standard output, where --output names it, on standard error."""
    if path is not None:
        is_data = path in TO_STDOUT
        where = "standard output" if is_data else path
        print(f"wrote {count} {what} to {where}", file=sys.stderr if is_data else sys.stdout)


def write_predictions(path: str, sentences: list[str], result: Evaluation) -> None:
    """Write the output file: one `PREDICTED ||| sentence` per line."""
    with atomic_write(path) as file:
        for prediction, sentence in zip(result.predictions, sentences, strict=True):
            file.write(f"{format_line(prediction, sentence)}\n")


def print_accuracy(split: str, path: str, result: Evaluation) -> None:
    """Print the assignment's line, or a line that says why there is no accuracy."""
    if split == "test" and not result.has_gold_labels:
        print(f"test: {path} has no gold labels (every label is {result.labels[0]}), so there is no accuracy")
    else:
        print(f"{split} acc :: {result.accuracy:.3f}")
    if len(result.predictions) > 1 and len(set(result.predictions)) == 1:
        print(f"{split}: all {len(result.predictions)} predictions are {result.predictions[0]}; nothing is told apart")


def print_report(split: str, result: Evaluation, label_names: list[str]) -> None:
    """Print precision, recall, F1 and support of each class, macro-F1, and the majority-class accuracy."""
    from sklearn.metrics import classification_report, f1_score

    if split == "test" and not result.has_gold_labels:
        return
    gold, predicted, classes = result.labels, result.predictions, list(range(len(label_names)))
    print(f"\n{split}, per class:")
    table = classification_report(gold, predicted, labels=classes, target_names=label_names, digits=3, zero_division=0)
    print(table.rstrip())
    macro_f1 = f1_score(gold, predicted, labels=classes, average="macro", zero_division=0)
    print(f"{split} macro-F1 :: {macro_f1:.3f}")
    print(f"{split} majority-class acc :: {result.majority_accuracy:.3f}")


def warn_of_long_sentences(count: int, config: LlamaConfig, path: str = "") -> None:
    """Warn how many sentences are longer than the model's limit, and whether they are cut."""
    if count:
        what = "cut" if config.ignores_padding else "used whole, as the reference does"
        where = f"{path}: " if path else ""
        warn(f"{where}{count} sentences are longer than max_seq_len={config.max_seq_len} tokens; {what}")


def predict_and_report(
    args: Namespace,
    model: torch.nn.Module,
    datasets: dict[str, Sentences],
    label_names: list[str],
    device: torch.device,
    distributed: Distributed,
    task: Task | None = None,
) -> dict[str, Evaluation]:
    """Predict dev and test, write both files, print the accuracies, then the tables.

    task: None: classification. Returns the evaluation of each split.
    """
    from engine.methods import pretrained_of
    from engine.runs import loader_of
    from engine.tasks import CLASSIFICATION
    from engine.training import evaluate

    def evaluated(split: str) -> Evaluation:
        loader = loader_of(datasets[split], pretrained_of(model).config, args.batch_size, device)
        return evaluate(model, loader, task=task or CLASSIFICATION, desc=split, distributed=distributed)

    sentences = {split: datasets[split].sentences for split in ("dev", "test")}
    return report_predictions(args, sentences, evaluated, label_names, distributed.is_first)


def report_predictions(
    args: Namespace,
    sentences: dict[str, list[str]],
    evaluated: Callable[[str], Evaluation],
    label_names: list[str],
    is_first: bool = True,
) -> dict[str, Evaluation]:
    """Evaluate dev and test, write both files, print the accuracies, then the tables. evaluated: does it for a split.

    sentences: for each split, the texts of its file. is_first: whether this process writes.
    """
    results = {}
    for split in sentences:
        results[split] = evaluated(split)
        if is_first:
            write_predictions(getattr(args, f"{split}_out"), sentences[split], results[split])
        print_accuracy(split, getattr(args, split), results[split])
    for split, result in results.items():
        print_report(split, result, label_names)
    return results


# ---------------------------------------------------------------------------------------------------- training


def print_epoch(result: EpochResult, model_path: Path, chosen_on: str) -> None:
    """Print the line of an epoch. chosen_on: the name of the data on which the best epoch is chosen."""
    if result.improved:
        print(f"save the model to {model_path}")
    if result.is_finish:
        print(f"after the last epoch: {chosen_on} acc :: {result.dev_score:.3f}", flush=True)
        return
    print(
        f"epoch {result.epoch}: train loss :: {result.train_loss:.3f}, "
        f"train acc :: {result.train_score:.3f}, {chosen_on} acc :: {result.dev_score:.3f}",
        flush=True,
    )


def print_epoch_table(history: list[EpochResult], chosen_on: str) -> None:
    from engine.checkpointer import best_of

    print(f"\nepoch  train loss  train acc  {chosen_on} acc  seconds")
    best = best_of(history)
    for result in history:
        mark = f"  <- best on {chosen_on}, used for the predictions" if result is best else ""
        epoch = "after" if result.is_finish else result.epoch
        print(
            f"{epoch:>5}  {result.train_loss:10.3f}  {result.train_score:9.3f}  "
            f"{result.dev_score:{len(chosen_on) + 4}.3f}  {result.seconds:7.1f}{mark}"
        )


# ------------------------------------------------------------------------------------------------------ methods


def print_figures(name: str, figures: dict[str, Any]) -> None:
    """Print the results of a method: lists as the columns of a table, other values in a line above it."""
    if not figures:
        return
    columns = {key: value for key, value in figures.items() if isinstance(value, list)}
    print(f"\n{name}: {', '.join(f'{key} {shown_figure(figures[key])}' for key in figures if key not in columns)}")
    widths = [max(len(key), 5) for key in columns]
    for row in (columns, *zip(*columns.values(), strict=True)) if columns else ():
        print("  ".join(f"{shown_figure(each):>{width}}" for each, width in zip(row, widths, strict=True)))


def shown_figure(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def print_methods(args: Namespace, missing: str) -> None:
    """Print the methods beyond the base, and how many parameters of the checkpoint each of them trains.

    missing: why the checkpoint cannot be loaded; empty if it can. Without it, the numbers are left out.
    """
    from engine.families import load_llama

    advanced = require_folder("advanced", "--list-methods")
    listing, trained = advanced.part("listing"), None
    listing.chosen_of(args.method)  # raises the error for a wrong name before anything is loaded
    if missing:
        print(f"How many parameters each method trains is left out: {missing}.")
    else:
        path = find_asset(args.label_names)
        label_names = read_label_names(path) if path else ["bad", "good"]  # only their number matters
        with naming_the_flag():
            llama, tokenizer = load_llama(args.pretrained_model_path, args.tokenizer)
        trained = listing.count_trained(llama.config, tokenizer, label_names, args.method)
        name = Path(args.pretrained_model_path).absolute().name
        print(f"Parameters that are trained are those of {name} with {len(label_names)} labels.")
    print("\n".join(listing.lines_of(trained, args.method)))
