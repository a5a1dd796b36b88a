"""The files of a run: find the inputs, check that outputs can be written and that no two of all these are one file."""

from __future__ import annotations

import os
import stat
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from engine.finding import find_checkpoint, tokenizer_name
from engine.flags import (
    BUNDLED_CHECKPOINT,
    DEFAULT_CHECKPOINT,
    OUTPUT_WORDS,
    PREFIX,
    TRAINING,
    flag_name,
    inputs_of,
    needed_of,
)
from engine.metrics import check_folder
from engine.programs import Default, check_writable, import_part, require_folder
from engine.stream import STANDARD_INPUT
from utils import UserError, find_asset, hub_hint, sha256_of

TO_STDOUT = (None, "-")  # values of --output


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
    check_writable(args.output, "--output")
    return {"--output": Path(args.output)}


def _find_input(name: str, path: str) -> str:
    found = find_asset(path)
    if found is None and name in ("input", "prompt_file") and os.path.exists(path) and not os.path.isdir(path):
        return path  # a pipe, which can be read once
    if found is None:
        _refuse_what_is_no_file(name, path)
        raise UserError(f"--{name} {path} does not exist")
    return str(found)


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
    outputs = {name: path for name, path in outputs.items() if path is not None}
    for name, path in outputs.items():
        check_writable(path, name)
    return outputs


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


def contract_model_path(args: Namespace) -> Path:
    kind = f"{args.family}-" if hasattr(args, "family") else ""
    return Path(f"{kind}{args.option}-{args.epochs}-{args.lr}.pt")


def model_candidates(args: Namespace, digest: str = "") -> list[Path]:
    """Possible paths of the fine-tuned model: the assignment's name, and two names that include the training data.

    digest: of the plan; it is part of the name if the run uses methods, because there are many combinations of them.
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
    """The files that belong to a fine-tuned model during training, each with a description."""
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
    """Raise `UserError` if the name belongs to a folder, a broken link, a pipe or a device."""
    if name and os.path.isdir(name):
        raise UserError(f"--{flag} {name} is a folder; name a file")
    if name and os.path.lexists(name):
        what = "a link that leads nowhere" if os.path.islink(name) else "a pipe or device, which can be read only once"
        raise UserError(f"--{flag} {name} is {what}; name a file")


def _resolve_checkpoint(args: Namespace) -> bool:
    """Replace the checkpoint's name by its path; True if the bundled checkpoint replaces the absent default."""
    if os.path.isdir(args.pretrained_model_path):
        args.model_files = _files_of_directory(Path(args.pretrained_model_path))
        return False
    path = find_checkpoint(args.pretrained_model_path)
    is_bundled = path is None and isinstance(args.pretrained_model_path, Default)
    if is_bundled:
        path = find_asset(BUNDLED_CHECKPOINT)
    if path is None:
        _refuse_what_is_no_file("pretrained-model-path", args.pretrained_model_path)
        raise UserError(
            f"--pretrained-model-path {args.pretrained_model_path} does not exist; "
            f"setup.sh fetches {DEFAULT_CHECKPOINT}, or name a checkpoint that is here"
            f"{hub_hint(args.pretrained_model_path)}"
        )
    args.pretrained_model_path = str(path)
    return is_bundled


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
    path = find_asset(name)
    if path is None:
        _refuse_what_is_no_file("tokenizer", name)
        if not args.tokenizer and os.path.isdir(args.pretrained_model_path):
            folder = args.pretrained_model_path
            raise UserError(f"{folder} holds no tokenizer.model and no tokenizer.json; name one with --tokenizer")
        flag = "--tokenizer " if args.tokenizer else ""
        raise UserError(f"{flag}{name} does not exist; setup.sh fetches tokenizer.model, or name one with --tokenizer")
    return str(path)


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
