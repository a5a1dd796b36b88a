"""The flags of run_llama.py, and everything that can be wrong with them, found before PyTorch is imported."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from columns import FORMATS, Columns, has_columns
from course import QUESTION, SEPARATOR
from sentences import STANDARD_INPUT
from utils import (
    ArgumentParser,
    Default,
    NeedsCausal,
    UserError,
    check_writable,
    decimal_number,
    find_asset,
    import_folder,
    import_part,
    sha256_of,
    some,
    tokenizer_name,
    warn,
    whole_number,
)

DEFAULT_CHECKPOINT = "stories42M.pt"
BUNDLED_CHECKPOINT = "checkpoints/minllama1M.pt"
DEFAULT_LABEL_NAMES = "data/cfimdb-label-mapping.json"
PREFIX = (
    "I have wanted to see this thriller for a while, and it didn't disappoint. "
    "Keanu Reeves, playing the hero John Wick, is"
)
OPTIONS = ("generate", "prompt", "finetune", "lora", "predict", "perplexity")
OUTPUT_WORDS = {"prompt": "prompting", "finetune": "finetuning", "lora": "lora"}
TRAINING = ("finetune", "lora")
LORA_RANK, LORA_ALPHA = 4, 1.0
LORA_TARGETS = "compute_query+compute_key+compute_value+compute_output"  # of the fall 2025 edition


# ------------------------------------------------------------------------------------------------------ flags


def get_args(argv: list[str] | None = None) -> Namespace:
    """Parse the command line. Raises `UserError` for an unknown flag or a value of the wrong type."""
    from config import ATTENTION_KINDS

    parser = ArgumentParser(description="Llama 2: generate text, classify zero-shot, fine-tune a classifier.")
    add = parser.add_argument
    add("--option", choices=OPTIONS, default="generate", help="the task")
    add_data_flags(parser)
    what = "checkpoint to start from, or a Hugging Face directory, which is causal where --attention says nothing"
    add("--pretrained-model-path", default=Default(DEFAULT_CHECKPOINT), help=what)
    add("--tokenizer", help="SentencePiece model or tokenizer.json; else the checkpoint's own, else tokenizer.model")
    add("--attention", choices=ATTENTION_KINDS, help="override what the checkpoint declares (nothing: bidirectional)")
    add_place_flags(parser)
    add("--shard", action="store_true", help="under torchrun: split the model over the processes (FSDP)")
    add("--list-methods", action="store_true", help="print what there is beyond the base, or what --method names")

    _add_generate_flags(parser)
    add("--question", metavar="TEMPLATE", help=f"prompt: what is asked after a sentence, in the place of {QUESTION!r}")
    add = add_classify_flags(parser, "finetune and lora")
    add("--lora_rank", type=int, help="lora: the rank of an update; 4 if not given")
    add("--lora_alpha", type=float, help="lora: updates are scaled by this / rank; 1.0 if not given")
    _add_predict_flags(parser)
    return parser.parse_args(argv)


def add_data_flags(parser: ArgumentParser) -> None:
    """Which sentences."""
    add = parser.add_argument
    add("--train", default=Default("data/cfimdb-train.txt"), help=f"training data, lines of 'LABEL{SEPARATOR}sentence'")
    add("--dev", default=Default("data/cfimdb-dev.txt"), help="development data")
    add("--test", default="data/cfimdb-test.txt", help="test data")
    add("--label-names", default=Default(DEFAULT_LABEL_NAMES), help="JSON list of label names")
    where = f"in data files that end in {', '.join(FORMATS)}: the column of the {{}}; {{}} if not given"
    for kind, name in Columns()._asdict().items():
        add(f"--{kind}-column", metavar="NAME", help=where.format(f"{kind}s", name))


def add_place_flags(parser: ArgumentParser, has_precision: bool = True) -> None:
    """How much of a sentence is read, where a run is computed, and with which random numbers."""
    from config import PRECISIONS

    add = parser.add_argument
    add("--max_sentence_len", type=int, help="cut sentences to this many tokens")
    add("--seed", type=int, default=1337, help="seed of everything random")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    add("--use_gpu", action="store_true", help="insist on a GPU: CUDA, else MPS, else an error")
    if has_precision:
        what = "of the products; int8 is not for finetune"
        add("--precision", choices=PRECISIONS, default=Default("fp32"), help=what)
    add("--kernels", choices=("auto", "plain"), default="auto", help="the fastest here, or everything as it is written")


def _add_generate_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("generate").add_argument
    add("--prompt", default=Default(PREFIX), metavar="TEXT", help="the text to continue")
    each = "texts to continue, one a line, - for standard input; makes JSON lines, see --output"
    add("--prompt_file", metavar="FILE", help=each)
    add("--temperature", type=float, metavar="T", help="one text more, at T; with --prompt_file of all texts, else 0")
    add("--max_new_tokens", type=int, default=75, help="how many tokens to add")
    add("--cuda_graphs", action="store_true", help="decode on CUDA through recorded graphs (untested on a GPU)")
    add("--num_samples", type=int, default=1, help="how many texts to sample at temperature 1, decoded together")
    add("--top_k", type=int, help="sample among the K most likely tokens only")
    add("--top_p", type=float, help="sample among the most likely tokens that hold this probability together")
    add("--epsilon", type=float, help="never sample a token less likely than this")
    add("--min_p", type=float, help="never sample a token less likely than this share of the likeliest")
    add("--repetition_penalty", type=float, help="above 1: tokens of the text are less likely, in every text")
    add("--beam", type=int, metavar="N", help=BEAM)
    add("--contrastive", type=number_and_count, metavar="ALPHA,K", help=CONTRASTIVE)
    for name, temperature in (("low", 0), ("high", 1)):
        file = Default(f"generated-sentence-temp-{temperature}.txt")
        add(f"--generated_sentence_{name}_temp_out", default=file, help=f"text at temperature {temperature}")


def add_classify_flags(parser: ArgumentParser, title: str = "finetune") -> Callable[..., Any]:
    """How sentences are classified, and a classifier is trained. title: of the latter's group, whose `add` it gives."""
    is_alone = title == "finetune"
    add = parser.add_argument_group(title if is_alone else "prompt and finetune").add_argument
    ending = "the name ends in {0}-prompting-output.txt, in {0}-finetuning-output.txt where it is fine-tuned, in "
    ending += "{0}-lora-output.txt with --option lora, in {0}-advanced-output.txt where a method is used"
    if is_alone:
        ending = "the name ends in {0}-finetuning-output.txt, in {0}-advanced-output.txt where a method is used"
    for split in ("dev", "test"):
        add(f"--{split}_out", default=f"cfimdb-{split}-prompting-output.txt", help=ending.format(split))
    add("--batch_size", type=int, default=8, help="sentences in a batch")
    where = "advanced/README.md" if is_alone else "--list-methods"
    add("--method", metavar="NAME[,NAME...]", action=Once, help=f"ways beyond the base, see {where}")
    how = dict(nargs="+", action="extend", default=[])
    add("--method-args", metavar="KEY=VALUE", help="arguments of the methods; or METHOD.KEY=VALUE", **how)

    add = add if is_alone else parser.add_argument_group(title).add_argument
    add("--epochs", type=int, default=5, help="passes over the training data")
    add("--lr", type=float, default=2e-5, help="learning rate")
    add("--hidden_dropout_prob", type=float, default=0.3, help="dropout before the classifier head")
    add("--model_out", metavar="FILE", help="where the model is saved; else a name made of epochs and learning rate")
    add("--no_train_eval", action="store_true", help="do not measure the accuracy on the training data (prints nan)")
    add("--resume", action="store_true", help="go on after the last finished epoch of an interrupted run")
    add("--shots", type=int, metavar="N", help="train on N sentences of each class alone, drawn with the seed")
    add("--hold_out", type=float, metavar="SHARE", help=HOLD_OUT)
    add("--log_dir", metavar="DIR", help="keep the figures of each step and epoch there, as JSON lines")
    add("--html", metavar="FILE", help="at the end, write a page to look at the run and its model")
    return add


def _add_predict_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("predict and perplexity").add_argument
    add("--model", metavar="FILE", help="predict: what finetune has saved; it needs no other file")
    add("--input", metavar="FILE", help="predict: a sentence a line, - for standard input; perplexity: a text")
    lines = f"predict: lines of 'LABEL{SEPARATOR}sentence', generate with --prompt_file: of JSON; else standard output"
    add("--output", metavar="FILE", help=lines)
    add("--probabilities", action="store_true", help="predict: label, probability of each label, sentence; with tabs")


HOLD_OUT = "choose the epoch on this share of the training data, which is not trained on, in the place of dev"
HELD_OUT = 0.1  # where a method chooses by a score, and nobody says otherwise


BEAM = "the text at temperature 0 is the likeliest that a search with N beams finds; not with --contrastive"
CONTRASTIVE = "the text at temperature 0 is made of the K likeliest tokens, and avoids by ALPHA (0 to 1) what is like "
CONTRASTIVE += "the text so far; needs causal attention; not with --beam"


def number_and_count(text: str) -> tuple[float, int]:
    """`0.6,5`. Raises `ArgumentTypeError`."""
    number, _, count = text.partition(",")
    try:
        return decimal_number(number), whole_number(count)
    except ValueError:
        raise argparse.ArgumentTypeError("must be a number and a whole number, as in 0.6,5") from None


class Once(argparse.Action):
    """A flag of which the first one would be ignored if it were given twice."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option: Any = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice; name several with a comma between them")
        setattr(namespace, self.dest, values)


# ----------------------------------------------------------------------------------------------------- checks


def check_args(args: Namespace, find: Callable[[Namespace], bool] | None = None) -> None:
    """Find every mistake in the arguments before anything is loaded, and resolve input files to where they lie.

    find: resolves the model's files, and says whether the bundled checkpoint stands in for an absent default; that of
    a Llama and its tokenizer if it is not given. Adds `columns`, `methods`, `derive_labels`, and `is_bundled`. Raises
    `UserError` naming the flag.
    """
    check_numbers(args)
    _check_option(args)
    args.columns = _columns_of(args)
    _check_precision(args)
    _check_processes(args)
    try:
        getattr(args, "prompt", "").encode()
    except UnicodeEncodeError:
        raise UserError("--prompt is not UTF-8 text") from None
    _check_question(args)
    args.methods = _choose_methods(args)
    args.hold_out = _held_out(args)
    args.derive_labels = args.option in TRAINING and isinstance(args.label_names, Default)
    args.is_bundled = False
    outputs = _check_files(args)
    if args.option != "predict":
        args.is_bundled = (find or _find_llama)(args)
    check_overlaps(args, outputs)


def _at_least_1(number: int) -> bool:
    return number >= 1


def _positive(number: float) -> bool:
    return 0.0 < number < math.inf


NUMBERS = {  # flags that are not given are not asked about
    "seed": (lambda number: 0 <= number < 2**32, "from 0 to 2^32 - 1"),
    "batch_size": (lambda number: 1 <= number < 2**31, "from 1 to 2^31 - 1"),
    "epochs": (_at_least_1, "at least 1"),
    "lr": (_positive, "above 0 and finite"),
    "hidden_dropout_prob": (lambda share: 0.0 <= share < 1.0, "from 0 to below 1"),
    "max_sentence_len": (_at_least_1, "at least 1"),
    "max_new_tokens": (_at_least_1, "at least 1"),
    "temperature": (lambda number: 0.0 <= number < math.inf, "at least 0 and finite"),
    "num_samples": (lambda number: 1 <= number < 2**16, "from 1 to 2^16 - 1"),
    "top_k": (_at_least_1, "at least 1"),
    "top_p": (lambda share: 0.0 < share <= 1.0, "above 0 and at most 1"),
    "min_p": (lambda share: 0.0 <= share <= 1.0, "from 0 to 1"),
    "repetition_penalty": (_positive, "above 0 and finite"),
    "beam": (lambda number: 1 <= number <= 1000, "from 1 to 1000"),
    "shots": (_at_least_1, "at least 1"),
    "hold_out": (lambda share: 0.0 <= share < 1.0, "from 0 to below 1"),
    "lora_rank": (lambda number: 1 <= number <= 2**16, "from 1 to 2^16"),
    "lora_alpha": (_positive, "above 0 and finite"),
    "epsilon": (lambda share: 0.0 <= share < 1.0, "from 0 to below 1"),
}


def check_numbers(args: Namespace) -> None:
    """Raises `UserError` for a number that cannot be."""
    for flag, (fits, wanted) in NUMBERS.items():
        value = getattr(args, flag, None)
        if value is not None and not fits(value):
            raise UserError(f"--{flag} {value}: must be {wanted}")
    if getattr(args, "contrastive", None) is not None:
        alpha, count = args.contrastive
        if not (0.0 <= alpha <= 1.0 and 1 <= count <= 1000):
            raise UserError(f"--contrastive {alpha},{count}: ALPHA must be from 0 to 1, and K from 1 to 1000")


OF_OPTIONS = {  # what makes no sense elsewhere, and would be ignored without a word
    "max_sentence_len": ("generate", "prompt", *TRAINING),
    "method": ("prompt", "finetune"),
    "method_args": ("prompt", "finetune"),
    "model_out": TRAINING,
    "temperature": ("generate",),
    "prompt_file": ("generate",),
    "beam": ("generate",),
    "contrastive": ("generate",),
    "question": ("prompt",),
    "text_column": ("generate", "prompt", *TRAINING, "predict"),
    "label_column": ("prompt", *TRAINING),
    "lora_rank": ("lora",),
    "lora_alpha": ("lora",),
    "shots": TRAINING,
    "hold_out": TRAINING,
    "log_dir": TRAINING,
    "html": TRAINING,
    "model": ("predict",),
    "input": ("predict", "perplexity"),
    "output": ("predict", "generate"),
    "probabilities": ("predict",),
    "attention": ("generate", "prompt", *TRAINING, "perplexity"),
    "tokenizer": ("generate", "prompt", *TRAINING, "perplexity"),
}
NEEDED = {"predict": ("model", "input"), "perplexity": ("input",)}


def _check_option(args: Namespace) -> None:
    for name, options in OF_OPTIONS.items():
        value = getattr(args, name, None)
        is_given = value is not None and value is not False and value != []  # 0 is given, too
        if is_given and args.option not in options:
            raise UserError(f"{_flag(name)} is for --option {' and '.join(options)}, not for {args.option}")
    searches = [flag for flag in ("beam", "contrastive") if getattr(args, flag, None)]
    if len(searches) > 1:
        raise UserError("--beam and --contrastive both say what the text at temperature 0 is; give one of them")
    _check_texts(args)
    advanced = import_folder("advanced") if searches else None
    if searches and advanced is None:
        flag = f"--{searches[0]}"
        raise UserError(f"{flag} needs the folder advanced/ of this package beside run_llama.py")
    if "contrastive" in searches and getattr(args, "attention", None) == "bidirectional":
        raise UserError(f"{advanced.part('table').CONTRASTIVE_WHY}; add --attention causal")
    if args.option == "predict" and not isinstance(args.pretrained_model_path, Default):
        raise UserError("--pretrained-model-path is not for --option predict, whose --model is enough by itself")
    for name in NEEDED.get(args.option, ()):
        if getattr(args, name) is None:
            raise UserError(f"--option {args.option} needs --{name} FILE")


HYPHENED = ("method_args", "label_names", "pretrained_model_path", "text_column", "label_column")


def _flag(name: str) -> str:
    return "--" + (name.replace("_", "-") if name in HYPHENED else name)


def _check_texts(args: Namespace) -> None:
    """What is for one prompt is not for a file of them, and the other way round."""
    if getattr(args, "prompt_file", None) is None:
        if args.option == "generate" and args.output is not None:
            raise UserError("--output is for --prompt_file; the texts after --prompt have names of their own")
        if getattr(args, "temperature", None) in (0.0, 1.0):
            raise UserError(f"--temperature {args.temperature}: the texts at temperature 0 and 1 are made in any case")
        return
    for name in ("prompt", "generated_sentence_low_temp_out", "generated_sentence_high_temp_out"):
        if not isinstance(getattr(args, name), Default):
            raise UserError(f"--{name} is not for --prompt_file, whose texts go to --output")
    if args.num_samples > 1:
        raise UserError("--num_samples is not for --prompt_file: name a prompt as often as you want texts after it")


def _check_question(args: Namespace) -> None:
    question = getattr(args, "question", None)
    if question is not None and not (question.strip() and question.isprintable()):
        raise UserError("--question must be a text in one line, with {labels} where the label names are to stand")


def _columns_of(args: Namespace) -> Columns:
    given = {kind: name for kind in Columns._fields if (name := getattr(args, f"{kind}_column", None)) is not None}
    files = [getattr(args, name, None) for name in INPUTS[args.option]]
    if given and not any(path is not None and has_columns(path) for path in files):
        flag = f"--{next(iter(given))}-column"
        raise UserError(f"{flag} is for files that end in {', '.join(FORMATS)}, and no input is one")
    return Columns(**given)


def _check_precision(args: Namespace) -> None:
    if args.precision == "int8" and args.option in TRAINING:
        raise UserError("--precision int8 rounds the weights, which cannot be trained then; use bf16 or fp32")
    if args.precision != "fp32" and args.kernels == "plain":
        raise UserError(f"--kernels plain is fp32 alone; leave it out for --precision {args.precision}")
    if args.precision != "fp32" and importlib.util.find_spec("fast") is None:
        raise UserError(f"--precision {args.precision} needs the folder fast/ beside run_llama.py")


def is_one_of_several() -> bool:
    """Whether torchrun, or what stands for it, has started this process beside others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _check_processes(args: Namespace) -> None:
    if is_one_of_several() and args.option not in ("prompt", *TRAINING):
        raise UserError(f"--option {args.option} runs in one process; start it without torchrun")
    if getattr(args, "shard", False) and not is_one_of_several():
        raise UserError(
            "--shard splits the model over several processes; start them with torchrun --nproc_per_node N run_llama.py"
        )


def _choose_methods(args: Namespace) -> tuple:
    names, assignments = args.method, args.method_args
    if args.option == "lora":
        names = "lora"
        rank, alpha = (LORA_RANK if args.lora_rank is None else args.lora_rank), args.lora_alpha
        assignments = [f"rank={rank}", f"alpha={LORA_ALPHA if alpha is None else alpha}", f"targets={LORA_TARGETS}"]
    if names is None:
        if assignments:
            raise UserError("--method-args are for the methods that --method names")
        return ()
    advanced = import_folder("advanced")
    if advanced is None:
        raise UserError("--method needs the folder advanced/ of this package beside run_llama.py")
    option = "finetune" if args.option == "lora" else args.option
    kinds = getattr(args, "family", "llama"), getattr(args, "attention", None)
    try:
        return advanced.choose(names, assignments, option, *kinds)
    except NeedsCausal as error:
        raise UserError(f"{error}; add --attention causal") from None


def _held_out(args: Namespace) -> float:
    """The share that is asked for, or, where a method chooses by a score that is not to be that of dev, a tenth."""
    if not args.methods:
        return args.hold_out or 0.0
    entries = import_folder("advanced").METHODS
    choosing = [method.name for method in args.methods if entries[method.name].holds_out]
    if choosing and args.hold_out == 0:
        warn(f"--hold_out 0: {some(choosing)} chooses on dev, whose accuracy is then too high")
    return args.hold_out if args.hold_out is not None else HELD_OUT if choosing else 0.0


# ------------------------------------------------------------------------------------------------------ files


def _check_files(args: Namespace) -> dict[str, Path]:
    """What the run will write, by what the user calls it."""
    if args.option == "generate":
        return _check_generate_files(args)
    if args.option in OUTPUT_WORDS:
        return _check_classify_files(args)
    for name in NEEDED[args.option]:
        path = getattr(args, name)
        if (args.option, name, path) != ("predict", "input", STANDARD_INPUT):
            setattr(args, name, _find_input(name, path))
    return _check_output(args)


def _check_output(args: Namespace) -> dict[str, Path]:
    if args.output is None:
        return {}
    check_writable(args.output, "--output")
    return {"--output": Path(args.output)}


def _find_input(name: str, path: str) -> str:
    found = find_asset(path)
    if found is None and name in ("input", "prompt_file") and os.path.exists(path) and not os.path.isdir(path):
        return path  # a pipe: it is read once
    if found is None:
        _refuse_what_is_no_file(name, path)
        raise UserError(f"--{name} {path} does not exist")
    return str(found)


def _check_generate_files(args: Namespace) -> dict[str, Path]:
    if args.prompt_file is not None:
        if args.prompt_file != STANDARD_INPUT:
            args.prompt_file = _find_input("prompt_file", args.prompt_file)
        return _check_output(args)
    outputs = {"--generated_sentence_low_temp_out": Path(args.generated_sentence_low_temp_out)}
    samples = sample_paths(args)
    outputs["--generated_sentence_high_temp_out"] = samples[0]
    if args.temperature is not None:
        outputs["the text of --temperature"] = temperature_path(args)
    outputs |= {f"sample {number} of --num_samples": path for number, path in enumerate(samples[1:], 2)}
    for name, path in outputs.items():
        check_writable(path, name)
    return outputs


def sample_paths(args: Namespace) -> list[Path]:
    """The files of the sampled texts: the contract's name, then the same with -2, -3, ... before the ending."""
    first = Path(args.generated_sentence_high_temp_out)
    return [first, *(first.with_stem(f"{first.stem}-{number}") for number in range(2, args.num_samples + 1))]


def temperature_path(args: Namespace) -> Path:
    """Of the text at `--temperature`: `generated-sentence-temp-0.7.txt`."""
    return Path(f"generated-sentence-temp-{args.temperature:g}.txt")


def _check_classify_files(args: Namespace) -> dict[str, Path]:
    """Turns the names of the data files into paths."""
    kind, outputs = "advanced" if args.method else OUTPUT_WORDS[args.option], {}
    for flag, split in (("dev_out", "dev"), ("test_out", "test")):
        path = getattr(args, flag)
        ending = f"{split}-{kind}-output.txt"
        if not path.endswith(ending):
            how = f"--method {args.method}" if args.method else f"--option {args.option}"
            raise UserError(f"--{flag} {path}: with {how} the name must end in {ending}")
        check_writable(path, f"--{flag}")
        outputs[f"--{flag}"] = Path(path)
    if args.option == "prompt" and isinstance(args.train, Default):
        # nothing is trained: its absence is no mistake, and beside other data it is not what is meant
        if find_asset(args.train) is None or not isinstance(args.dev, Default):
            args.train = None
    for flag in ("train", "dev", "test", "label_names"):
        if getattr(args, flag) is not None:
            setattr(args, flag, _find_data(flag.replace("_", "-"), getattr(args, flag)))
    if args.option in TRAINING:
        outputs |= _check_looking(args)
        candidates = model_candidates(args)
        check_writable(candidates[0], "--model_out" if args.model_out else "the fine-tuned model")
        for path in candidates:
            outputs |= files_of_model(path)
    return outputs


def _check_looking(args: Namespace) -> dict[str, Path]:
    """The page of the run, and the figures of its steps."""
    given = [flag for flag in ("log_dir", "html") if getattr(args, flag) is not None]
    if given and import_folder("explore") is None:
        raise UserError(f"--{given[0]} needs the folder explore/ of this package beside run_llama.py")
    if "html" in given:
        check_page("--html", args.html)
    if "log_dir" in given:
        import_part("explore.metrics", "--log_dir").check_folder(args.log_dir, args.resume)
    return {f"--{flag}": Path(getattr(args, flag)) for flag in given}


def check_page(flag: str, path: str) -> None:
    """Raises `UserError` unless a page can be written there."""
    if Path(path).suffix not in (".html", ".htm"):
        raise UserError(f"{flag} {path}: the name must end in .html")
    check_writable(path, flag)


def contract_model_path(args: Namespace) -> Path:
    kind = f"{args.family}-" if hasattr(args, "family") else ""
    return Path(f"{kind}{args.option}-{args.epochs}-{args.lr}.pt")


def model_candidates(args: Namespace, digest: str = "") -> list[Path]:
    """Where the fine-tuned model may go: the contract's name, and two that tell the data as well.

    digest: of the plan; part of the name where methods are used, which are many.
    """
    if args.model_out is not None:
        return [Path(args.model_out)]
    path = contract_model_path(args)
    if args.methods:
        parts = path.stem, *(method.name for method in args.methods), digest[:8]
        return [path.with_stem("-".join(filter(None, parts)))]
    suffixes = Path(args.train).stem, sha256_of(args.train)[:12]
    return [path, *(path.with_stem(f"{path.stem}-{suffix}") for suffix in suffixes)]


def files_of_model(path: Path) -> dict[str, Path]:
    """What lies under the name of a fine-tuned model while it is trained."""
    return {
        f"the fine-tuned model, {path}": path,
        f"the resume point, {path.with_suffix('.resume')}": path.with_suffix(".resume"),
        f"the lock of the run, {path.with_suffix('.lock')}": path.with_suffix(".lock"),
    }


def _find_data(flag: str, name: str) -> str:
    path = find_asset(name)
    if path is None:
        _refuse_what_is_no_file(flag, name)
        hint = "" if find_asset("data/films-train.txt") is None else "; data/films-*.txt is here in any case"
        raise UserError(f"--{flag} {name} does not exist; setup.sh fetches the course's data{hint}")
    return str(path)


def _refuse_what_is_no_file(flag: str, name: str) -> None:
    """Say what it is, where something of that name is there."""
    if name and os.path.isdir(name):
        raise UserError(f"--{flag} {name} is a folder; name a file")
    if name and os.path.lexists(name):
        what = "a link that leads nowhere" if os.path.islink(name) else "a pipe or device, which can be read only once"
        raise UserError(f"--{flag} {name} is {what}; name a file")


def _resolve_checkpoint(args: Namespace) -> bool:
    """Turn the checkpoint's name into a path; True if the bundled one stands in for an absent default."""
    if os.path.isdir(args.pretrained_model_path):
        args.model_files = _files_of_directory(Path(args.pretrained_model_path))
        return False
    path = find_asset(args.pretrained_model_path)
    is_bundled = path is None and isinstance(args.pretrained_model_path, Default)
    if is_bundled:
        path = find_asset(BUNDLED_CHECKPOINT)
    if path is None:
        _refuse_what_is_no_file("pretrained-model-path", args.pretrained_model_path)
        raise UserError(
            f"--pretrained-model-path {args.pretrained_model_path} does not exist; "
            f"setup.sh fetches {DEFAULT_CHECKPOINT}, or name a checkpoint that is here"
        )
    args.pretrained_model_path = str(path)
    return is_bundled


def _files_of_directory(folder: Path) -> list[str]:
    try:
        return import_part("convert.directory", "a Hugging Face directory").files_of_llama(folder)
    except UserError as error:
        raise UserError(f"--pretrained-model-path {folder} is a folder, and no model: {error}") from None


def _find_llama(args: Namespace) -> bool:
    """Turn the names of checkpoint and tokenizer into paths."""
    is_bundled = _resolve_checkpoint(args)
    args.tokenizer = _resolve_tokenizer(args)
    return is_bundled


def find_model(args: Namespace) -> str:
    """Turn the names of checkpoint and tokenizer into paths. Returns why that cannot be, empty where it can."""
    try:
        _find_llama(args)
    except UserError as error:
        return str(error)
    return ""


def _resolve_tokenizer(args: Namespace) -> str:
    name = tokenizer_name(args.pretrained_model_path, args.tokenizer)
    path = find_asset(name)
    if path is None:
        _refuse_what_is_no_file("tokenizer", name)
        if not args.tokenizer and os.path.isdir(args.pretrained_model_path):
            folder = args.pretrained_model_path
            raise UserError(f"{folder} holds no tokenizer.model and no tokenizer.json; name one with --tokenizer")
        flag = "--tokenizer " if args.tokenizer else ""
        raise UserError(f"{flag}{name} does not exist; setup.sh fetches tokenizer.model, or name one with --tokenizer")
    return str(path)


INPUTS = {
    "generate": ("pretrained_model_path", "tokenizer", "prompt_file"),
    "prompt": ("pretrained_model_path", "tokenizer", "train", "dev", "test", "label_names"),
    "finetune": ("pretrained_model_path", "tokenizer", "train", "dev", "test", "label_names"),
    "lora": ("pretrained_model_path", "tokenizer", "train", "dev", "test", "label_names"),
    "predict": ("model", "input"),
    "perplexity": ("pretrained_model_path", "tokenizer", "input"),
}


def check_overlaps(args: Namespace, outputs: dict[str, Path], inputs: Sequence[str] | None = None) -> None:
    """No output may overwrite another output or an input, under whatever name. inputs: else those of the option."""
    taken = {}
    for name in INPUTS[args.option] if inputs is None else inputs:
        if getattr(args, name) not in (None, STANDARD_INPUT):
            taken |= dict.fromkeys(_identities(Path(getattr(args, name))), _flag(name))
    for file in getattr(args, "model_files", ()):
        path = Path(args.pretrained_model_path, file)
        taken |= dict.fromkeys(_identities(path), f"{file} of --pretrained-model-path")
    for name, path in outputs.items():
        identities = _identities(path)
        if other := next((taken[identity] for identity in identities if identity in taken), None):
            raise UserError(f"{name}: {path} is also {other}; one of them needs another name")
        taken |= dict.fromkeys(identities, name)


def _identities(path: Path) -> list[object]:
    """What makes two paths one file: where they lead, and the file that is there, which can have several names."""
    identities: list[object] = [path.resolve()]
    if path.exists():
        identities.append((path.stat().st_dev, path.stat().st_ino))
    return identities
