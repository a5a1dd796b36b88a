"""Checks of a command: its flags, the files that it reads and those that it writes. They find every mistake before
PyTorch is imported.

In: what the parser gives. Out: the same with every default and path filled in, or one `UserError`. No two of all
files of a run are one file, and every output can be written.
"""

from __future__ import annotations

import os
import stat
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from config import ROUNDING, SAMPLINGS
from engine.flags import (
    BUNDLED_CHECKPOINT,
    CLASSIFYING,
    DEFAULT_CHECKPOINT,
    FLAGS,
    HELD_OUT,
    LORA_ALPHA,
    LORA_RANK,
    LORA_TARGETS,
    OF_ONE_PROMPT,
    OUTPUT_WORDS,
    PREFIX,
    SPLITS,
    TRAINING,
    flag_name,
    inputs_of,
    needed_of,
)
from engine.metrics import check_folder
from engine.plan import files_of_model, model_candidates
from engine.programs import (
    Default,
    NeedsCausal,
    check_writable,
    find_checkpoint,
    import_part,
    input_file,
    require_folder,
    tokenizer_name,
)
from engine.streams import STANDARD_INPUT
from engine.tables import FORMATS, GZIP_ENDING, Columns, has_columns
from utils import QUESTION_OF_TEXTS, UserError, find_asset, hub_hint, join_names, warn

TO_STDOUT = (None, "-")  # values of --output
OUTPUT_FLAGS = {"dev_out": "dev", "test_out": "test"}  # each with the data that is predicted


def check_files(args: Namespace) -> dict[str, Path]:
    """Check the files of a run. Returns the paths of its outputs, each under the name that the user knows (a flag)."""
    if args.option == "generate":
        return _check_generate_files(args)
    if args.option in OUTPUT_WORDS:
        return _check_classify_files(args)
    for name in needed_of(args.option):
        path = getattr(args, name)
        if (args.option, name, path) != ("predict", "input", STANDARD_INPUT):
            setattr(args, name, _find_input(name, path))
    return _check_output(args)


def _check_output(args: Namespace) -> dict[str, Path]:
    if args.output in TO_STDOUT:
        return {}
    if args.output.lower().endswith(GZIP_ENDING):
        raise UserError(f"--output {args.output}: what is written is not packed; leave {GZIP_ENDING} out")
    check_writable(args.output, "--output")
    return {"--output": Path(args.output)}


def _find_input(name: str, path: str) -> str:
    if name in ("input", "prompt_file") and os.path.exists(path) and not os.path.isdir(path):
        return path  # also a pipe, which can be read once
    return input_file(f"--{name}", path)


def _check_generate_files(args: Namespace) -> dict[str, Path]:
    if args.prompt_file is not None:
        if args.prompt_file != STANDARD_INPUT:
            args.prompt_file = _find_input("prompt_file", args.prompt_file)
        return _check_output(args)
    low, *samples = texts_to_write(args)
    outputs = {"--generated_sentence_low_temp_out": low, "--generated_sentence_high_temp_out": samples[0]}
    if args.temperature is not None:
        outputs["the text of --temperature"] = temperature_path(args)
    outputs |= {f"sample {number} of --num_samples": path for number, path in enumerate(samples[1:], 2)}
    written = {name: path for name, path in outputs.items() if path is not None}
    for name, path in written.items():
        check_writable(path, name)
    return written


def texts_to_write(args: Namespace) -> list[Path | None]:
    """The files of the text at temperature 0, of the sampled text, and of more samples (-2, -3, ... before the ending).

    None: the text is only shown. The assignment's two files hold texts after its own prompt, not after another one,
    unless a flag names them.
    """
    named = args.generated_sentence_low_temp_out, args.generated_sentence_high_temp_out
    first = [Path(name) if args.prompt == PREFIX or not isinstance(name, Default) else None for name in named]
    high = Path(named[1])
    return [*first, *(high.with_stem(f"{high.stem}-{number}") for number in range(2, args.num_samples + 1))]


def temperature_path(args: Namespace) -> Path:
    """The file of the text at `--temperature`, for example `generated-sentence-temp-0.7.txt`."""
    return Path(f"generated-sentence-temp-{args.temperature:g}.txt")


def _check_classify_files(args: Namespace) -> dict[str, Path]:
    """Check the outputs of a classification, and replace the names of the data files by their paths."""
    kind = "advanced" if args.method else OUTPUT_WORDS[args.option]
    outputs: dict[str, Path] = {}
    for flag, split in OUTPUT_FLAGS.items():
        path = getattr(args, flag)
        ending = f"{split}-{kind}-output.txt"
        if not path.endswith(ending):
            how = f"--method {args.method}" if args.method else f"--option {args.option}"
            raise UserError(f"--{flag} {path}: with {how} the name must end in {ending}")
        check_writable(path, f"--{flag}")
        outputs |= {f"--{flag}": Path(path), f"the lock of --{flag}": lock_of(path)}
    if args.option == "prompt" and isinstance(args.train, Default):
        # nothing is trained: the default file may be absent, and it is left out if the user names other data
        if find_asset(args.train) is None or not isinstance(args.dev, Default):
            args.train = None
    for flag in ("train", "dev", "test", "label_names"):
        if getattr(args, flag) is not None:
            setattr(args, flag, _find_data(flag.replace("_", "-"), getattr(args, flag)))
    args.combined = _find_models(args.combined)
    if args.option in TRAINING and args.combines != "predictions":
        outputs |= _check_looking(args)
        candidates = model_candidates(args)
        check_writable(candidates[0], "--model_out" if args.model_out else "the fine-tuned model")
        for path in candidates:
            outputs |= files_of_model(path)
    return outputs


def lock_of(path: str) -> Path:
    """The lock on an output file; its name is no longer than that of the file."""
    return Path(path).with_suffix(".lck")


def _find_models(names: Sequence[str]) -> list[str]:
    """The paths of the saved models of `--method-args models=`. Raises `UserError` if one is absent or given twice."""
    found: dict[object, str] = {}
    for path in (paths := [_find_input("method-args", name) for name in names]):
        if other := next((found[identity] for identity in _identities(Path(path)) if identity in found), None):
            raise UserError(f"--method-args models: {path} and {other} are one file")
        found |= dict.fromkeys(_identities(Path(path)), path)
    return paths


def _check_looking(args: Namespace) -> dict[str, Path]:
    """Check the outputs of --log_dir and --html."""
    given = [flag for flag in ("log_dir", "html") if getattr(args, flag) is not None]
    if given:
        require_folder("explore", f"--{given[0]}")
    if "html" in given:
        check_page("--html", args.html)
    if "log_dir" in given:
        check_folder(args.log_dir, args.resume)
    return {f"--{flag}": Path(getattr(args, flag)) for flag in given}


def check_page(flag: str, path: str) -> None:
    """Raise `UserError` unless an HTML page can be written to `path`."""
    if Path(path).suffix not in (".html", ".htm"):
        raise UserError(f"{flag} {path}: the name must end in .html")
    check_writable(path, flag)


def _find_data(flag: str, name: str) -> str:
    hint = "" if find_asset("data/films-train.txt") is None else "; data/films-*.txt is here in any case"
    return input_file(f"--{flag}", name, f"; setup.sh fetches the course's data{hint}")


def _resolve_checkpoint(args: Namespace) -> bool:
    """Replace the checkpoint's name by its path; True if the bundled checkpoint replaces the absent default."""
    if os.path.isdir(args.pretrained_model_path):
        args.model_files = _files_of_directory(Path(args.pretrained_model_path))
        return False
    name = args.pretrained_model_path
    bundled = find_asset(BUNDLED_CHECKPOINT) if isinstance(name, Default) and find_asset(name) is None else None
    hint = f"; setup.sh fetches {DEFAULT_CHECKPOINT}, or name a checkpoint that is here{hub_hint(name)}"
    args.pretrained_model_path = str(bundled or input_file("--pretrained-model-path", name, hint, find_checkpoint))
    return bundled is not None


def _files_of_directory(folder: Path) -> list[str]:
    try:
        return import_part("convert.directory", "a Hugging Face directory").files_of_llama(folder)
    except UserError as error:
        raise UserError(f"--pretrained-model-path {folder} is a folder, and no model: {error}") from None


def find_llama(args: Namespace) -> bool:
    """Replace the names of checkpoint and tokenizer by paths. Returns whether it is the bundled checkpoint."""
    is_bundled = _resolve_checkpoint(args)
    args.tokenizer = _resolve_tokenizer(args)
    return is_bundled


def find_model(args: Namespace) -> str:
    """Replace the names of checkpoint and tokenizer by paths. Returns an error message, empty if both files exist."""
    try:
        find_llama(args)
    except UserError as error:
        return str(error)
    return ""


def _resolve_tokenizer(args: Namespace) -> str:
    name = tokenizer_name(args.pretrained_model_path, args.tokenizer)
    folder = args.pretrained_model_path
    if not args.tokenizer and os.path.isdir(folder) and not os.path.lexists(name):
        raise UserError(f"{folder} holds no tokenizer.model and no tokenizer.json; name one with --tokenizer")
    return tokenizer_file(folder, args.tokenizer, "setup.sh fetches tokenizer.model, or name one with --tokenizer")


def tokenizer_file(checkpoint: str, given: str | None, hint: str = "name one with --tokenizer") -> str:
    """The path of a checkpoint's tokenizer, see `tokenizer_name`. Raises `UserError` if it is not there.

    Of a file that is no pretrained model, such as a fine-tuned classifier, the error says that: it has no such file.
    """
    name = tokenizer_name(checkpoint, given)
    if not given and find_asset(name) is None and checkpoint.endswith(".pt"):
        from engine.weights import load_llama_model

        load_llama_model(checkpoint)
    return input_file("--tokenizer" if given else "the tokenizer", name, f"; {hint}")


def check_overlaps(args: Namespace, outputs: dict[str, Path], inputs: Sequence[str] | None = None) -> None:
    """Raise `UserError` if an output is the same file as another output or an input, even under another name.

    inputs: the names of the arguments that are input files; None: those of the option.
    """
    taken: dict[object, str] = {}
    for name in inputs_of(args.option) if inputs is None else inputs:
        path = getattr(args, name, None)
        if path == STANDARD_INPUT:
            taken |= dict.fromkeys(_file_of_stream(0), f"standard input, {flag_name(name)} -")
        elif path is not None:
            taken |= dict.fromkeys(_identities(Path(path)), flag_name(name))
    for file in getattr(args, "model_files", ()):
        path = Path(args.pretrained_model_path, file)
        taken |= dict.fromkeys(_identities(path), f"{file} of --pretrained-model-path")
    for path in ",".join(getattr(args, "method_files", ())).split(","):
        taken |= dict.fromkeys(_identities(Path(path)) if path else (), f"{path} of --method-args")
    if args.option in ("predict", "generate") and args.output in TO_STDOUT:
        if other := next((taken[identity] for identity in _file_of_stream(1) if identity in taken), None):
            raise UserError(f"standard output goes to the file that is {other}; send it to another one")
    for name, path in outputs.items():
        identities = _identities(path)
        if other := next((taken[identity] for identity in identities if identity in taken), None):
            raise UserError(f"{name}: {path} is also {other}; one of them needs another name")
        taken |= dict.fromkeys(identities, name)


def _file_of_stream(number: int) -> list[object]:
    """What identifies the file that a standard stream reads or writes; nothing for a pipe, a terminal or a device."""
    try:
        status = os.fstat(number)
    except OSError:  # it is closed
        return []
    return [(status.st_dev, status.st_ino)] if stat.S_ISREG(status.st_mode) else []


def _identities(path: Path) -> list[object]:
    """Values that two paths of one file share: the resolved path, and, for an existing file, device and inode."""
    identities: list[object] = [path.resolve()]
    if path.exists():
        identities.append((path.stat().st_dev, path.stat().st_ino))
    return identities


# ------------------------------------------------------------------------------------------ what the flags say together


def check_args(args: Namespace, find: Callable[[Namespace], bool] | None = None) -> None:
    """Find every mistake in the arguments before anything is loaded, and replace file names by the paths of the files.

    find: finds the model's files, and returns whether the bundled checkpoint replaces the absent default checkpoint;
    None: `find_llama`. Sets `columns`, `methods`, `hold_out`, `combines`, `combined`, `derive_labels` and `is_bundled`
    in `args`. Raises `UserError` naming the flag.
    """
    check_numbers(args)
    _check_option(args)
    _take_edition(args)
    args.columns = columns_of(args, [getattr(args, name, None) for name in inputs_of(args.option)])
    _check_precision(args)
    _check_processes(args)
    _check_question(args)
    args.methods = _choose_methods(args)
    _check_files_and_shots(args)
    args.hold_out = _held_out(args)
    args.combines, args.combined = _models_to_combine(args)
    is_own = args.option in CLASSIFYING and any(has_columns(getattr(args, split) or "") for split in SPLITS)
    args.derive_labels = (is_own or args.option in TRAINING) and isinstance(args.label_names, Default)
    if args.derive_labels and is_own and (args.option not in TRAINING or has_columns(args.train)):
        args.label_names = None  # those of the data, see `engine.reports.read_data`
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
    if searches:
        advanced = require_folder("advanced", f"--{searches[0]}")
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


def columns_of(args: Namespace, files: Sequence[str | None]) -> Columns:
    """The columns that the flags name. Raises `UserError` if they name one, and none of the files has columns."""
    given = {kind: name for kind in ("text", "label") if (name := getattr(args, f"{kind}_column", None)) is not None}
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
