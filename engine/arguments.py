"""Checks of the flags of run_llama.py: they find every mistake before PyTorch is imported."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable

from config import ROUNDING, SAMPLINGS
from engine.columns import FORMATS, Columns, has_columns
from engine.files import check_files, check_overlaps, find_llama
from engine.flags import (
    CLASSIFYING,
    FLAGS,
    HELD_OUT,
    LORA_ALPHA,
    LORA_RANK,
    LORA_TARGETS,
    OF_ONE_PROMPT,
    SPLITS,
    TRAINING,
    inputs_of,
    needed_of,
)
from engine.programs import Default, NeedsCausal, import_part, require_folder
from utils import QUESTION_OF_TEXTS, UserError, join_names, warn


def check_args(args: Namespace, find: Callable[[Namespace], bool] | None = None) -> None:
    """Find every mistake in the arguments before anything is loaded, and replace file names by the paths of the files.

    find: finds the model's files, and returns whether the bundled checkpoint replaces the absent default checkpoint;
    None: `find_llama`. Sets `columns`, `methods`, `hold_out`, `combines`, `combined`, `derive_labels` and `is_bundled`
    in `args`. Raises `UserError` naming the flag.
    """
    check_numbers(args)
    _check_option(args)
    _take_edition(args)
    args.columns = _columns_of(args)
    _check_precision(args)
    _check_processes(args)
    try:
        getattr(args, "prompt", "").encode()
    except UnicodeEncodeError:
        raise UserError("--prompt is not UTF-8 text") from None
    _check_question(args)
    args.methods = _choose_methods(args)
    _check_files_and_shots(args)
    args.hold_out = _held_out(args)
    args.combines, args.combined = _models_to_combine(args)
    is_own = args.option in CLASSIFYING and any(has_columns(getattr(args, split) or "") for split in SPLITS)
    args.derive_labels = (is_own or args.option in TRAINING) and isinstance(args.label_names, Default)
    if is_own and getattr(args, "question", None) is None:
        _ask_of_own_data(args)
    args.is_bundled = False
    outputs = check_files(args)
    if args.option != "predict" and not args.combined:
        args.is_bundled = (find or find_llama)(args)
    check_overlaps(args, outputs)


def check_numbers(args: Namespace) -> None:
    """Raise `UserError` for a number outside the range of its flag."""
    for flag in FLAGS:
        flag.check(args)


def _check_option(args: Namespace) -> None:
    for flag in FLAGS:
        if flag.options and flag.is_given(args) and args.option not in flag.options:
            raise UserError(f"{flag.name} is for --option {' and '.join(flag.options)}, not for {args.option}")
    searches = [flag for flag in ("beam", "contrastive") if getattr(args, flag, None)]
    if len(searches) > 1:
        raise UserError("--beam and --contrastive both say what the text at temperature 0 is; give one of them")
    _check_texts(args)
    advanced = require_folder("advanced", f"--{searches[0]}") if searches else None
    if "contrastive" in searches and getattr(args, "attention", None) == "bidirectional":
        raise UserError(f"{advanced.part('table').CONTRASTIVE_WHY}; add --attention causal")
    if args.option == "predict" and not isinstance(args.pretrained_model_path, Default):
        raise UserError("--pretrained-model-path is not for --option predict, whose --model is enough by itself")
    for name in needed_of(args.option):
        if getattr(args, name) is None:
            raise UserError(f"--option {args.option} needs --{name} FILE")


def _take_edition(args: Namespace) -> None:
    """Set `norm` and `lora`; and the edition's attention and limits of sampling, where no flag says them."""
    args.norm, args.lora = None, "plain"
    if getattr(args, "edition", None) is None:
        return
    edition = import_part("grading.editions", "--edition").EDITIONS[args.edition]
    args.norm, args.lora, args.attention = edition.norm, edition.lora, args.attention or edition.attention
    if args.option == "generate" and args.top_p is None and args.epsilon is None:
        limits = SAMPLINGS[edition.sampling]
        args.top_p, args.epsilon = limits.get("top_p"), limits.get("epsilon")


def _check_texts(args: Namespace) -> None:
    """Raise `UserError` for flags of one prompt beside `--prompt_file`, and for `--output` without `--prompt_file`."""
    if getattr(args, "prompt_file", None) is None:
        if args.option == "generate" and args.output is not None:
            raise UserError("--output is for --prompt_file; the texts after --prompt have names of their own")
        if getattr(args, "temperature", None) in (0.0, 1.0):
            raise UserError(f"--temperature {args.temperature}: the texts at temperature 0 and 1 are made in any case")
        return
    for name in OF_ONE_PROMPT:
        if not isinstance(getattr(args, name), Default):
            raise UserError(f"--{name} is not for --prompt_file, whose texts go to --output")
    if args.num_samples > 1:
        raise UserError("--num_samples is not for --prompt_file: name a prompt as often as you want texts after it")


def _check_question(args: Namespace) -> None:
    question = getattr(args, "question", None)
    if question is not None and not (question.strip() and question.isprintable()):
        raise UserError("--question must be a text in one line, with {labels} where the label names are to stand")


def _ask_of_own_data(args: Namespace) -> None:
    """Ask about texts, not about films: with `--question`, or with the template of a method that has none given."""
    if not args.methods and args.option == "prompt":
        args.question = QUESTION_OF_TEXTS
    if args.methods and not any(each.partition("=")[0].endswith("template") for each in args.method_args):
        args.methods = require_folder("advanced", "--method").part("prompts").about_texts(args.methods)


def _columns_of(args: Namespace) -> Columns:
    given = {kind: name for kind in ("text", "label") if (name := getattr(args, f"{kind}_column", None)) is not None}
    files = [getattr(args, name, None) for name in inputs_of(args.option)]
    if given and not any(path is not None and has_columns(path) for path in files):
        flag = f"--{next(iter(given))}-column"
        raise UserError(f"{flag} is for files that end in {', '.join(FORMATS)}, and no input is one")
    return Columns(**given, skip_empty=args.skip_empty)


def _check_precision(args: Namespace) -> None:
    if args.precision in ROUNDING and args.option in TRAINING:
        flag = f"--precision {args.precision}"
        raise UserError(f"{flag} rounds the weights, which cannot be trained then; use bf16 or fp32")
    if args.precision != "fp32" and args.kernels == "plain":
        raise UserError(f"--kernels plain is fp32 alone; leave it out for --precision {args.precision}")
    if args.precision != "fp32":
        require_folder("fast", f"--precision {args.precision}")


def is_one_of_several() -> bool:
    """Whether torchrun, or a similar program, has started this process together with others."""
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
        assignments += [] if args.lora == "plain" else [f"variant={args.lora}"]
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


def _check_files_and_shots(args: Namespace) -> None:
    """Set `method_files` to the files that the methods' arguments name; check that these exist, and `--shots`."""
    if not args.methods:
        return
    advanced = require_folder("advanced", "--method")
    for method in args.methods:
        if advanced.METHODS[method.name].needs_shots and args.shots is None:
            raise UserError(f"{method.name} {advanced.part('table').NO_SENTENCES}")
    if files := advanced.named_files(args.methods):
        args.method_files = files
        for path in ",".join(files).split(","):
            if not os.path.isfile(path):
                raise UserError(f"--method-args: {path} does not exist, or is no file")


def _held_out(args: Namespace) -> float:
    """The share to hold out: `--hold_out`; if not given, a tenth for methods that choose by a score, so not on dev."""
    if not args.methods:
        return args.hold_out or 0.0
    entries = require_folder("advanced", "--method").METHODS
    choosing = [method.name for method in args.methods if entries[method.name].holds_out]
    if choosing and args.hold_out == 0:
        warn(f"--hold_out 0: {join_names(choosing)} chooses on dev, whose accuracy is then too high")
    return args.hold_out if args.hold_out is not None else HELD_OUT if choosing else 0.0


def _models_to_combine(args: Namespace) -> tuple[str, list[str]]:
    """What a method combines of saved models (`MethodEntry.combines`), and their files; "" and none for the others."""
    entries = require_folder("advanced", "--method").METHODS if args.methods else {}
    chosen = next((each for each in args.methods if entries[each.name].combines), None)
    if chosen is None:
        return "", []
    combines, reasons = entries[chosen.name].combines, dict.fromkeys(("resume", "log_dir", "html"), "trains nothing")
    if combines == "predictions":
        reasons["model_out"] = "saves no model"
    for flag, reason in reasons.items():
        if getattr(args, flag, None):
            raise UserError(f"--{flag} is not for --method {chosen.name}, which {reason}")
    if is_one_of_several():
        raise UserError(f"--method {chosen.name} runs in one process; start it without torchrun")
    return combines, dict(chosen.settings)["models"].split(",")
