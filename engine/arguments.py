"""Everything that can be wrong with the flags of run_llama.py, found before PyTorch is imported."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Callable

from engine.columns import FORMATS, Columns, has_columns
from engine.files import check_files, check_overlaps, find_llama
from engine.flags import HELD_OUT, INPUTS, LORA_ALPHA, LORA_RANK, LORA_TARGETS, NEEDED, TRAINING, flag_name
from engine.programs import Default, NeedsCausal, require_folder
from utils import UserError, join_names, warn


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
    outputs = check_files(args)
    if args.option != "predict":
        args.is_bundled = (find or find_llama)(args)
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


def _check_option(args: Namespace) -> None:
    for name, options in OF_OPTIONS.items():
        value = getattr(args, name, None)
        is_given = value is not None and value is not False and value != []  # 0 is given, too
        if is_given and args.option not in options:
            raise UserError(f"{flag_name(name)} is for --option {' and '.join(options)}, not for {args.option}")
    searches = [flag for flag in ("beam", "contrastive") if getattr(args, flag, None)]
    if len(searches) > 1:
        raise UserError("--beam and --contrastive both say what the text at temperature 0 is; give one of them")
    _check_texts(args)
    advanced = require_folder("advanced", f"--{searches[0]}") if searches else None
    if "contrastive" in searches and getattr(args, "attention", None) == "bidirectional":
        raise UserError(f"{advanced.part('table').CONTRASTIVE_WHY}; add --attention causal")
    if args.option == "predict" and not isinstance(args.pretrained_model_path, Default):
        raise UserError("--pretrained-model-path is not for --option predict, whose --model is enough by itself")
    for name in NEEDED.get(args.option, ()):
        if getattr(args, name) is None:
            raise UserError(f"--option {args.option} needs --{name} FILE")


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
    if args.precision != "fp32":
        require_folder("fast", f"--precision {args.precision}")


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
    advanced = require_folder("advanced", "--method")
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
    entries = require_folder("advanced", "--method").METHODS
    choosing = [method.name for method in args.methods if entries[method.name].holds_out]
    if choosing and args.hold_out == 0:
        warn(f"--hold_out 0: {join_names(choosing)} chooses on dev, whose accuracy is then too high")
    return args.hold_out if args.hold_out is not None else HELD_OUT if choosing else 0.0
