"""The driver: generate text, classify zero-shot, fine-tune a classifier, predict with it, measure perplexity.

    python run_llama.py --option generate [--prompt TEXT] [--temperature T]
    python run_llama.py --option generate --prompt_file F [--output F]
    python run_llama.py --option prompt   --train F --dev F --test F --label-names F --dev_out F --test_out F
    python run_llama.py --option finetune --train F --dev F --test F --label-names F --dev_out F --test_out F
    python run_llama.py --option predict --model SAVED.pt --input F [--output F]
    python run_llama.py --option perplexity --input F --attention causal

The folder engine/ has the rest of a run: the flags (engine/flags.py) and their checks (engine/arguments.py), the
computations (engine/runs.py), the printed lines and tables (engine/reports.py). PyTorch is imported after the
arguments have been checked, so that `--help` and every argument error answer at once.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from utils import UserError, choose_device, read_text, seed_everything

if TYPE_CHECKING:
    from engine.plan import ComputeSettings
    from engine.processes import Distributed

# ------------------------------------------------------------------------------------------------------ prompt


def prompt(args: Namespace, compute: ComputeSettings, distributed: Distributed) -> None:
    """Zero-shot classification: which label name does the language model expect after the prompt?"""
    from engine.combining import combine
    from engine.reports import encode, load_llama, naming_the_flag, predict_and_report, read_data
    from engine.runs import assemble_zero_shot

    if args.combined:
        combine(args, compute)
        return
    splits, label_names = read_data(args)
    llama, tokenizer = load_llama(args, compute)
    train = splits.pop("train", ())
    texts, asked = [example.sentence for example in train], (args.question, compute, distributed)
    with naming_the_flag():
        model = assemble_zero_shot(llama, tokenizer, label_names, args.methods, texts, *asked, train, args.seed)
    if remark := getattr(model, "remark", ""):
        print(remark)
    datasets = encode(args, splits, tokenizer, model)
    predict_and_report(args, model, datasets, label_names, compute.device, distributed)


# -------------------------------------------------------------------------------------------------- perplexity


def perplexity(args: Namespace, compute: ComputeSettings) -> None:
    """Measure how well the language model predicts a text."""
    from engine import saved
    from engine.columns import check_format, has_columns, read_texts
    from engine.reports import load_llama
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


# --------------------------------------------------------------------------------------------------- processes


@contextmanager
def join_world(args: Namespace) -> Iterator[Distributed]:
    """The processes of this run: only this one, or those that torchrun started."""
    from engine.arguments import is_one_of_several

    if not is_one_of_several():
        from engine.processes import SINGLE_PROCESS

        yield SINGLE_PROCESS
        return
    from engine import torchrun

    with torchrun.join(choose_device(args.device, args.use_gpu), shard=args.shard) as group:
        group.require_alike(facts(args))
        yield group


def facts(args: Namespace) -> dict[str, Any]:
    """Values that must be equal in all processes: checksums of the input files, and the flags that name no file."""
    from engine.flags import inputs_of
    from engine.plan import InputFile

    inputs = inputs_of(args.option)
    given = {name: value for name, value in vars(args).items() if name not in inputs and not name.endswith("_out")}
    files = {name: getattr(args, name) for name in inputs if getattr(args, name) is not None}
    sums = {name: InputFile.of(path, getattr(args, "model_files", ())).sha256 for name, path in files.items()}
    return given | sums | {path: InputFile.of_several(path).sha256 for path in getattr(args, "method_files", ())}


def announce(args: Namespace) -> None:
    """Print arguments of the run; warn if the bundled checkpoint replaces the absent default."""
    from engine.flags import DEFAULT_CHECKPOINT, shown_arguments
    from engine.reports import prints_data

    if not prints_data(args):
        print(f"args: {shown_arguments(args)}")
    if args.is_bundled:
        bar = "*" * 100
        print(
            f"{bar}\nWARNING: {DEFAULT_CHECKPOINT} is not here. Running on the small bundled checkpoint\n"
            f"{args.pretrained_model_path} instead. Its text and accuracies are NOT those of {DEFAULT_CHECKPOINT}.\n"
            f"setup.sh fetches the real one where it can be reached.\n{bar}",
            file=sys.stderr,
        )


def main() -> None:
    from engine.arguments import check_args
    from engine.files import find_model
    from engine.flags import get_args
    from engine.reports import print_methods

    args = get_args()
    if args.list_methods:
        print_methods(args, find_model(args))
        return
    check_args(args)
    if os.environ.get("RANK", "0") == "0":
        announce(args)
    from engine.declaration import Insisted
    from engine.finetuning import finetune
    from engine.generation import continue_each, continue_prompt
    from engine.plan import ComputeSettings
    from engine.predicting import predict

    with join_world(args) as distributed:
        seed_everything(args.seed)
        device = choose_device(args.device, args.use_gpu)
        insists = isinstance(args.precision, Insisted)
        compute = ComputeSettings(device, args.kernels, args.shard, str(args.precision), insists)
        if args.option in ("prompt", "finetune", "lora"):
            {"prompt": prompt, "finetune": finetune, "lora": finetune}[args.option](args, compute, distributed)
        else:
            continued = continue_prompt if args.prompt_file is None else continue_each
            {"generate": continued, "predict": predict, "perplexity": perplexity}[args.option](args, compute)


def start() -> int:
    """Run `main`; if the folder engine/ is absent, print an error in one line. Returns the exit status."""
    try:
        from engine.programs import run_main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "engine":
            raise
        print(
            "error: run_llama.py needs the folder engine/ of this package beside it; without it the model's modules "
            "run with the course's own run_llama.py",
            file=sys.stderr,
        )
        return 2
    return run_main(main)


if __name__ == "__main__":
    sys.exit(start())
