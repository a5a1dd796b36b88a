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
from typing import TYPE_CHECKING

from utils import choose_device, seed_everything

if TYPE_CHECKING:
    from engine.plan import ComputeSettings
    from engine.processes import Distributed


def prompt(args: Namespace, compute: ComputeSettings, distributed: Distributed) -> None:
    """Zero-shot classification: which label name does the language model expect after the prompt?"""
    from engine.finetuning import combine
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


def announce(args: Namespace) -> None:
    """Warn if the bundled checkpoint replaces the absent default; print the arguments that this option uses."""
    from engine.flags import DEFAULT_CHECKPOINT, shown_arguments
    from engine.reports import prints_data

    if args.is_bundled:
        bar = "*" * 100
        print(
            f"{bar}\nWARNING: {DEFAULT_CHECKPOINT} is not here. Running on the small bundled checkpoint\n"
            f"{args.pretrained_model_path} instead. Its text and accuracies are NOT those of {DEFAULT_CHECKPOINT}.\n"
            f"setup.sh fetches the real one where it can be reached.\n{bar}",
            file=sys.stderr,
        )
    if not prints_data(args):
        print(f"args: {shown_arguments(args)}")


def main() -> None:
    from engine.arguments import check_args, find_model
    from engine.flags import get_args
    from engine.reports import print_methods

    args = get_args()
    if args.list_methods:
        print_methods(args, find_model(args))
        return
    check_args(args)
    if os.environ.get("RANK", "0") == "0":
        announce(args)
    from engine.finetuning import finetune
    from engine.flags import Insisted
    from engine.inference import continue_each, continue_prompt, perplexity, predict
    from engine.plan import ComputeSettings
    from engine.reports import held_outputs, join_world

    with join_world(args) as distributed, held_outputs(args, distributed):
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
