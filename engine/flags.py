"""The flags of run_llama.py, one declaration each, from which the parser, `--help` and the checks are made. No
PyTorch.

Other programs that train classifiers use some of these flags (`flags_named`).
"""

from __future__ import annotations

import argparse
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from config import ATTENTION_KINDS, PRECISIONS
from engine.data import SEPARATOR
from engine.programs import ArgumentParser, Default
from engine.tables import FORMATS, Columns
from utils import QUESTION, UserError, decimal_number, whole_number


class Once(argparse.Action):
    """Refuses a flag that is given twice, because argparse would ignore its first value."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option: Any = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice; name several with a comma between them")
        setattr(namespace, self.dest, values)


class Insisted(str):
    """A choice that the user has made twice on the command line."""


class Insisting(argparse.Action):
    """Tells a choice that is made twice, which insists on it, from one that is made once."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option: Any = None) -> None:
        before = getattr(namespace, self.dest)
        insists = before == values and not isinstance(before, Default)
        setattr(namespace, self.dest, Insisted(values) if insists else values)


def number_and_count(text: str) -> tuple[float, int]:
    """Parse a text such as `0.6,5`. Raises `ArgumentTypeError`."""
    number, _, count = text.partition(",")
    try:
        return decimal_number(number), whole_number(count)
    except ValueError:
        raise argparse.ArgumentTypeError("must be a number and a whole number, as in 0.6,5") from None


def utf8_text(text: str) -> str:
    """A text of the command line: UTF-8, also where the locale (LANG=C) knows no such text.

    Raises `ArgumentTypeError` for other bytes.
    """
    try:
        return text if text.isascii() else text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise argparse.ArgumentTypeError("not UTF-8 text") from None


# ---------------------------------------------------------------------------------------------------- one declaration


class Range(NamedTuple):
    """The range of a number, and its description for errors. excludes: whether `least` and `most` are outside."""

    words: str
    least: float
    most: float = math.inf
    excludes: tuple[bool, bool] = (False, False)

    def holds(self, value: float) -> bool:
        is_low = value < self.least or (self.excludes[0] and value == self.least)
        is_high = value > self.most or (self.excludes[1] and value == self.most)
        return not (is_low or is_high or value != value)  # NaN is unequal to itself


class PairOfRanges(NamedTuple):
    """The ranges of two numbers with a comma between them, and their description for errors."""

    words: str
    first: Range
    second: Range

    def holds(self, values: tuple[float, float]) -> bool:
        return self.first.holds(values[0]) and self.second.holds(values[1])


AT_LEAST_1 = Range("must be at least 1", 1)
ABOVE_0 = Range("must be above 0 and finite", 0, excludes=(True, True))
FROM_0_TO_1 = Range("must be from 0 to 1", 0, 1)
BELOW_1 = Range("must be from 0 to below 1", 0, 1, excludes=(False, True))
ALPHA_AND_K = PairOfRanges("ALPHA must be from 0 to 1, and K from 1 to 1000", FROM_0_TO_1, Range("", 1, 1000))


@dataclass(frozen=True)
class Flag:
    """The declaration of one flag, for the parser, `--help` and the checks.

    type: int, float, str, bool for a switch, or a function from text to value. choices, metavar, action, default: as in
    argparse; a `Default` can be told apart from the same text typed by a user. options: the options that accept the
    flag, all others refuse it; empty: no option refuses it. reads: the options that read the file named by the flag.
    needed_by: the options that require the flag. group: its heading in --help.
    """

    name: str
    help: str
    type: Callable[[str], Any] = str
    default: Any = None
    within: Range | PairOfRanges | None = None
    options: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    needed_by: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    action: Any = None
    group: str = ""

    @property
    def dest(self) -> str:
        """The name of the flag's value among the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, parser: Any) -> None:
        """Add the flag to a parser. parser: an `ArgumentParser`, or a group of one."""
        if self.type is bool:
            parser.add_argument(self.name, action="store_true", help=self.help)
            return
        wanted = {"choices": self.choices, "metavar": self.metavar, "action": self.action}
        if self.type is not str:  # `type=str` would turn a `Default` into plain text
            wanted["type"] = self.type
        if self.action == "extend":
            wanted["nargs"] = "+"
        given = {name: value for name, value in wanted.items() if value is not None}
        parser.add_argument(self.name, help=self.help, default=self.default, **given)

    def is_given(self, args: Namespace) -> bool:
        """Whether the flag has a value; 0 is a value."""
        value = getattr(args, self.dest, None)
        return value is not None and value is not False and value != []

    def check(self, args: Namespace) -> None:
        """Raise `UserError` for a value outside the flag's range."""
        value = getattr(args, self.dest, None)
        if value is not None and self.within is not None and not self.within.holds(value):
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(f"{self.name} {shown}: {self.within.words}")


def add_flags(parser: ArgumentParser, flags: tuple[Flag, ...]) -> None:
    """Add flags to a parser in this order, each under its heading."""
    groups: dict[str, Any] = {"": parser}
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        flag.add_to(groups[flag.group])


# ------------------------------------------------------------------------------------------------------------ the flags

DEFAULT_CHECKPOINT = "stories42M.pt"
BUNDLED_CHECKPOINT = "checkpoints/minllama1M.pt"
PREFIX = (
    "I have wanted to see this thriller for a while, and it didn't disappoint. "
    "Keanu Reeves, playing the hero John Wick, is"
)
OPTIONS = ("generate", "prompt", "finetune", "lora", "predict", "perplexity")
EDITIONS = ("ucsc", "cmu2024", "cmu2025", "cmu2026")  # grading.editions says what each has
OUTPUT_WORDS = {"prompt": "prompting", "finetune": "finetuning", "lora": "lora"}
TRAINING = ("finetune", "lora")
CLASSIFYING = ("prompt", *TRAINING)
SPLITS = ("train", "dev", "test")
WITH_LLAMA = ("generate", *CLASSIFYING, "perplexity")  # the options that load a pretrained Llama
LORA_RANK, LORA_ALPHA = 4, 1.0
LORA_TARGETS = "compute_query+compute_key+compute_value+compute_output"  # as in the fall 2025 edition
HELD_OUT = 0.1  # the share if a method chooses by a score and --hold_out is not given

COURSE_FLAGS = {
    "option", "train", "dev", "test", "label_names", "pretrained_model_path", "max_sentence_len", "seed", "use_gpu",
    "generated_sentence_low_temp_out", "generated_sentence_high_temp_out", "dev_out", "test_out", "batch_size",
    "epochs", "lr", "hidden_dropout_prob",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- all of them


def _output_help(split: str) -> str:
    return (
        f"the name ends in {split}-prompting-output.txt, in {split}-finetuning-output.txt where it is fine-tuned, in "
        f"{split}-lora-output.txt with --option lora, in {split}-advanced-output.txt where a method is used"
    )


GENERATE, CLASSIFY, TRAIN, PREDICT = "generate", "prompt and finetune", "finetune and lora", "predict and perplexity"
COLUMN_HELP = f"in data files that end in {', '.join(FORMATS)}: the column of the {{}}s; {{}} if not given"
LINES_HELP = f"""predict: lines of 'LABEL{SEPARATOR}sentence', generate with --prompt_file: of JSON; with all columns of
the input if it ends in {", ".join(FORMATS)}; -, or not given: standard output"""
USED_BY_GROUP = {GENERATE: ("generate",), CLASSIFY: CLASSIFYING, TRAIN: TRAINING, PREDICT: ("predict", "perplexity")}
OF_ONE_PROMPT = ("prompt", "generated_sentence_low_temp_out", "generated_sentence_high_temp_out")
CONTRASTIVE_HELP = (
    "the text at temperature 0 is made of the K likeliest tokens, and avoids by ALPHA (0 to 1) what is like "
    "the text so far; needs causal attention; not with --beam"
)
# each entry sets only the fields of `Flag` that differ from their defaults
FLAGS = (
    Flag("--option", "the task", choices=OPTIONS, default="generate"),
    Flag("--train", f"training data, lines of 'LABEL{SEPARATOR}sentence'", default=Default("data/cfimdb-train.txt"),
         reads=CLASSIFYING),
    Flag("--dev", "development data", default=Default("data/cfimdb-dev.txt"), reads=CLASSIFYING),
    Flag("--test", "test data", default="data/cfimdb-test.txt", reads=CLASSIFYING),
    Flag("--label-names", "JSON list of label names", default=Default("data/cfimdb-label-mapping.json"),
         reads=CLASSIFYING),
    Flag("--text-column", COLUMN_HELP.format("text", Columns().text), utf8_text, metavar="NAME",
         options=OPTIONS),
    Flag("--label-column", COLUMN_HELP.format("label", Columns().label), utf8_text, metavar="NAME",
         options=CLASSIFYING),
    Flag("--skip_empty", "leave out lines of data files that have no text or no label, and count them", bool),
    Flag("--pretrained-model-path", "checkpoint to start from, or a Hugging Face directory, which is causal where "
         "--attention says nothing", default=Default(DEFAULT_CHECKPOINT), reads=WITH_LLAMA),
    Flag("--tokenizer", "SentencePiece model or tokenizer.json; else the checkpoint's own, else tokenizer.model",
         options=WITH_LLAMA, reads=WITH_LLAMA),
    Flag("--attention", "override what the checkpoint declares (nothing: bidirectional)", choices=ATTENTION_KINDS,
         options=WITH_LLAMA),
    Flag("--edition", "compute what this edition of the course does: norm, attention, sampling, LoRA; else what the "
         "checkpoint declares", choices=EDITIONS, options=WITH_LLAMA),
    Flag("--max_sentence_len", "cut sentences to this many tokens", int, within=AT_LEAST_1,
         options=("generate", *CLASSIFYING)),
    Flag("--seed", "seed of everything random", int, 1337, Range("must be from 0 to 2^32 - 1", 0, 2**32 - 1)),
    Flag("--device", "where to compute", choices=("auto", "cpu", "cuda", "mps"), default="cpu"),
    Flag("--use_gpu", "insist on a GPU: CUDA, else MPS, else an error", bool),
    Flag("--precision", "of the products; int8 and int4 are not for training, int4 is for large models",
         choices=PRECISIONS, default=Default("fp32"), action=Insisting),
    Flag("--kernels", "the fastest here, or everything as it is written", choices=("auto", "plain"), default="auto"),
    Flag("--shard", "under torchrun: split the model over the processes (FSDP)", bool),
    Flag("--list-methods", "print what there is beyond the base, or what --method names", bool),
    # generate
    Flag("--prompt", "the text to continue", utf8_text, Default(PREFIX), metavar="TEXT", group=GENERATE),
    Flag("--prompt_file", "texts to continue, one a line, - for standard input; makes JSON lines, see --output",
         metavar="FILE", options=("generate",), reads=("generate",), group=GENERATE),
    Flag("--temperature", "one text more, at T; with --prompt_file of all texts, else 0", float, metavar="T",
         within=Range("must be at least 0 and finite", 0, excludes=(False, True)), options=("generate",),
         group=GENERATE),
    Flag("--max_new_tokens", "how many tokens to add", int, 75, AT_LEAST_1, group=GENERATE),
    Flag("--ignore_eos", "go on after the end of a text, at which a Hugging Face directory's model stops", bool,
         options=("generate",), group=GENERATE),
    Flag("--num_samples", "how many texts to sample at temperature 1, decoded together", int, 1,
         Range("must be from 1 to 2^16 - 1", 1, 2**16 - 1), group=GENERATE),
    Flag("--top_k", "sample among the K most likely tokens only", int, within=AT_LEAST_1, group=GENERATE),
    Flag("--top_p", "sample among the most likely tokens that hold this probability together", float,
         within=Range("must be above 0 and at most 1", 0, 1, excludes=(True, False)), group=GENERATE),
    Flag("--epsilon", "never sample a token less likely than this", float, within=BELOW_1, group=GENERATE),
    Flag("--min_p", "never sample a token less likely than this share of the likeliest", float, within=FROM_0_TO_1,
         group=GENERATE),
    Flag("--repetition_penalty", "above 1: tokens of the text are less likely, in every text", float, within=ABOVE_0,
         group=GENERATE),
    Flag("--beam", "the text at temperature 0 is the likeliest that a search with N beams finds; not with "
         "--contrastive", int, metavar="N", within=Range("must be from 1 to 1000", 1, 1000), options=("generate",),
         group=GENERATE),
    Flag("--contrastive", CONTRASTIVE_HELP, number_and_count, metavar="ALPHA,K", within=ALPHA_AND_K,
         options=("generate",), group=GENERATE),
    Flag("--generated_sentence_low_temp_out", "text at temperature 0", default=Default("generated-sentence-temp-0.txt"),
         group=GENERATE),
    Flag("--generated_sentence_high_temp_out", "text at temperature 1",
         default=Default("generated-sentence-temp-1.txt"), group=GENERATE),
    Flag("--question", f"prompt: what is asked after a sentence, in the place of {QUESTION!r}", utf8_text,
         metavar="TEMPLATE", options=("prompt",)),
    # prompt, finetune, lora
    Flag("--dev_out", _output_help("dev"), default="cfimdb-dev-prompting-output.txt", group=CLASSIFY),
    Flag("--test_out", _output_help("test"), default="cfimdb-test-prompting-output.txt", group=CLASSIFY),
    Flag("--batch_size", "sentences in a batch", int, 8, Range("must be from 1 to 2^31 - 1", 1, 2**31 - 1),
         group=CLASSIFY),
    Flag("--method", "ways beyond the base, see --list-methods", metavar="NAME[,NAME...]", action=Once,
         options=("prompt", "finetune"), group=CLASSIFY),
    Flag("--method-args", "arguments of the methods; or METHOD.KEY=VALUE", metavar="KEY=VALUE", action="extend",
         default=[], options=("prompt", "finetune"), group=CLASSIFY),
    Flag("--epochs", "passes over the training data", int, 5, AT_LEAST_1, group=TRAIN),
    Flag("--lr", "learning rate", float, 2e-5, ABOVE_0, group=TRAIN),
    Flag("--hidden_dropout_prob", "dropout before the classifier head", float, 0.3, BELOW_1, group=TRAIN),
    Flag("--dropout", "dropout in the pretrained model; else as its config says, 0 for Llamas", float, within=BELOW_1,
         group=TRAIN),
    Flag("--weight_decay", "AdamW's, of all weights that are trained", float, 0.0, FROM_0_TO_1, group=TRAIN),
    Flag("--clip", "the largest norm of all gradients together; else any", float, within=ABOVE_0, group=TRAIN),
    Flag("--model_out", "where the model is saved; else a name made of epochs and learning rate", metavar="FILE",
         options=TRAINING, group=TRAIN),
    Flag("--no_train_eval", "do not measure the accuracy on the training data (prints nan)", bool, group=TRAIN),
    Flag("--resume", "go on with an interrupted run, from its resume point", bool, group=TRAIN),
    Flag("--resume_every", "save a resume point after each epoch, and within it every so many minutes", float, 10.0,
         Range("must be at least 0", 0), metavar="MINUTES", group=TRAIN),
    Flag("--shots", "train on N sentences of each class alone, drawn with the seed", int, metavar="N",
         within=AT_LEAST_1, options=TRAINING, group=TRAIN),
    Flag("--hold_out", "choose the epoch on this share of the training data, which is not trained on, in the place of "
         "dev", float, metavar="SHARE", within=BELOW_1, options=TRAINING, group=TRAIN),
    Flag("--log_dir", "keep the figures of each step and epoch there, as JSON lines", metavar="DIR", options=TRAINING,
         group=TRAIN),
    Flag("--html", "at the end, write a page to look at the run and its model", metavar="FILE", options=TRAINING,
         group=TRAIN),
    Flag("--lora_rank", "lora: the rank of an update; 4 if not given", int,
         within=Range("must be from 1 to 2^16", 1, 2**16), options=("lora",), group=TRAIN),
    Flag("--lora_alpha", "lora: updates are scaled by this / rank; 1.0 if not given", float, within=ABOVE_0,
         options=("lora",), group=TRAIN),
    # predict, perplexity
    Flag("--model", "predict: what finetune has saved; it needs no other file", metavar="FILE", options=("predict",),
         reads=("predict",), needed_by=("predict",), group=PREDICT),
    Flag("--input", "predict: a sentence a line, - for standard input; perplexity: a text", metavar="FILE",
         options=("predict", "perplexity"), reads=("predict", "perplexity"), needed_by=("predict", "perplexity"),
         group=PREDICT),
    Flag("--output", LINES_HELP, metavar="FILE", options=("predict", "generate"), group=PREDICT),
    Flag("--names", "predict: write the names of the labels, not their numbers", bool, options=("predict",),
         group=PREDICT),
    Flag("--probabilities", "predict: label, probability of each label, sentence; with tabs", bool,
         options=("predict",), group=PREDICT),
)  # fmt: skip


def flags_named(*names: str, **changes: Any) -> tuple[Flag, ...]:
    """The flags with these names, in this order. changes: fields of `Flag` to replace in each of them."""
    by_name = {flag.name: flag for flag in FLAGS}
    return tuple(replace(by_name[f"--{name}"], **changes) for name in names)


def get_args(argv: list[str] | None = None) -> Namespace:
    """Parse the command line. Raises `UserError` for an unknown flag or a value of the wrong type."""
    parser = ArgumentParser(description="Llama 2: generate text, classify zero-shot, fine-tune a classifier.")
    add_flags(parser, FLAGS)
    return parser.parse_args(argv)


def is_used(flag: Flag, args: Namespace) -> bool:
    """Whether the run with these arguments uses the flag's value; the course's flags are accepted by all options."""
    if args.option == "generate" and flag.dest in OF_ONE_PROMPT:
        return args.prompt_file is None
    if flag.dest == "batch_size" and args.option not in CLASSIFYING:
        return args.option == "perplexity" or args.prompt_file is not None
    users = flag.options or flag.reads or USED_BY_GROUP.get(flag.group, OPTIONS)
    return args.option in users


def shown_arguments(args: Namespace) -> dict[str, Any]:
    """The values that this run uses: of the course's flags, and of the others if they differ from the default."""
    values = {flag.dest: getattr(args, flag.dest) for flag in FLAGS if is_used(flag, args)}
    defaults = {flag.dest: False if flag.type is bool else flag.default for flag in FLAGS}
    return {name: value for name, value in values.items() if name in COURSE_FLAGS or value != defaults[name]}


def inputs_of(option: str) -> tuple[str, ...]:
    """The argument names (`Flag.dest`) of the files that an option reads."""
    return tuple(flag.dest for flag in FLAGS if option in flag.reads)


def needed_of(option: str) -> tuple[str, ...]:
    """The argument names (`Flag.dest`) of the files that an option requires."""
    return tuple(flag.dest for flag in FLAGS if option in flag.needed_by)


def flag_name(dest: str) -> str:
    """The flag of an argument name, for example `--label-names` for `label_names`."""
    return next((flag.name for flag in FLAGS if flag.dest == dest), f"--{dest}")
