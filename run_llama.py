"""The driver: generate text, classify zero-shot, fine-tune a classifier, predict with it, measure perplexity.

    python run_llama.py --option generate
    python run_llama.py --option prompt   --train F --dev F --test F --label-names F --dev_out F --test_out F
    python run_llama.py --option finetune --train F --dev F --test F --label-names F --dev_out F --test_out F
    python run_llama.py --option predict --model SAVED.pt --input F [--output F]
    python run_llama.py --option perplexity --input F --attention causal

The flags and their checks are in arguments.py, what is computed in runs.py, lines and tables in reports.py. PyTorch is
imported after the arguments have been checked, so that `--help` and every argument error answer at once.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import (
    DEFAULT_CHECKPOINT,
    INPUTS,
    check_args,
    find_model,
    get_args,
    is_one_of_several,
    sample_paths,
)
from reports import (
    TextStream,
    encode,
    line_of,
    naming_the_flag,
    predict_and_report,
    print_methods,
    print_model,
    read_data,
    warn_of_changes,
    warn_of_long_sentences,
)
from sentences import read_sentences
from utils import (
    Default,
    UserError,
    atomic_write,
    choose_device,
    import_folder,
    read_text,
    run_main,
    seed_everything,
)

if TYPE_CHECKING:

    from llama import Llama
    from plan import Place
    from tasks import World
    from tokenizer import Tokenizer

# ----------------------------------------------------------------------------------- what the commands share


def load_llama(args: Namespace) -> tuple[Llama, Tokenizer]:
    from families import load_llama

    with naming_the_flag():
        llama, tokenizer = load_llama(args.pretrained_model_path, args.tokenizer, args.attention, args.max_sentence_len)
    print_model(args, llama)
    return llama, tokenizer


# ------------------------------------------------------------------------------------------- generate, prompt


SAMPLING = ("top_k", "top_p", "epsilon", "min_p", "repetition_penalty")


def generate(args: Namespace, place: Place) -> None:
    """Continue the prompt at temperature 0 and at temperature 1, printing as it grows, and write every text."""
    import torch

    from runs import generator_of, search_of

    llama, tokenizer = load_llama(args)
    one_by_one = 2 if args.num_samples == 1 else 1  # texts; several samples are decoded together
    generator = generator_of(llama, args.precision, place, one_by_one * args.max_new_tokens, args.cuda_graphs)
    with naming_the_flag():
        search = search_of(llama, generator, args.beam, args.contrastive)
    ids = tokenizer.encode(args.prompt, bos=True, eos=False)
    warn_of_changes(args.prompt, ids, tokenizer, llama.config.max_seq_len)
    prompt_ids = torch.tensor([ids], device=place.device)  # 1 s
    outputs = {0.0: [Path(args.generated_sentence_low_temp_out)], 1.0: sample_paths(args)}
    for temperature, paths in outputs.items():
        print(f"Temperature is {temperature}")
        stream = TextStream(tokenizer, prompt_ids[0].tolist())
        if search is not None and temperature == 0.0:
            rows = search.generate(prompt_ids, args.max_new_tokens, repetition_penalty=args.repetition_penalty)
        else:
            rows = generator.generate(
                prompt_ids.expand(len(paths), -1),
                args.max_new_tokens,
                temperature=temperature,
                on_token=stream if len(paths) == 1 else None,
                **{name: getattr(args, name) for name in SAMPLING},
            )
        sentences = [tokenizer.decode(ids.tolist()) for ids in rows]
        print("\n".join([sentences[0].removeprefix(stream.shown), *sentences[1:]]))
        print("---------------")
        for path, sentence in zip(paths, sentences, strict=True):
            with atomic_write(path) as file:
                file.write(sentence)
            print(f"Wrote generated sentence to {path}.")


def prompt(args: Namespace, place: Place, world: World) -> None:
    """Zero-shot classification: which label name does the language model expect after the prompt?"""
    from runs import assemble_zero_shot

    splits, label_names = read_data(args)
    llama, tokenizer = load_llama(args)
    texts = [example.sentence for example in splits.pop("train", ())]
    where = dict(precision=args.precision, place=place, world=world)
    with naming_the_flag():
        model = assemble_zero_shot(llama, tokenizer, label_names, args.methods, texts=texts, **where)
    if remark := getattr(model, "remark", ""):
        print(remark)
    datasets = encode(args, splits, tokenizer, model)
    predict_and_report(args, model, datasets, label_names, place.device, world)


# ----------------------------------------------------------------------------------------- predict, perplexity


def predict(args: Namespace, place: Place) -> None:
    """Classify sentences, one a line, as many as come, with what a fine-tuning has saved."""
    import runs

    model, saved = runs.load_classifier(args.model)
    precision = saved.precision if isinstance(args.precision, Default) and args.kernels == "auto" else args.precision
    runs.compute_fast(model, precision, place)
    predictions = runs.predict(model, saved, shown_before_waiting(read_sentences(args.input)))
    if hasattr(sys.stdout, "reconfigure"):  # what is printed is data: the same on every machine
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    with ExitStack() as written:
        file = sys.stdout if args.output is None else written.enter_context(atomic_write(args.output))
        count = too_long = 0
        for prediction in predictions:
            file.write(line_of(prediction, args.probabilities))
            count, too_long = count + 1, too_long + prediction.is_too_long
            if not getattr(file, "has_reader", True):  # nobody wants the rest
                break
    warn_of_long_sentences(too_long, saved.config)
    if args.output is not None:
        print(f"wrote {count} predictions to {args.output}")


def shown_before_waiting(sentences: Iterable[str | None]) -> Iterator[str | None]:
    """None says that no sentence is at hand for now; when the next one is asked for, what was said is printed."""
    for sentence in sentences:
        yield sentence
        if sentence is None:
            sys.stdout.flush()


def perplexity(args: Namespace, place: Place) -> None:
    """How well the language model predicts a text."""
    import runs

    text = read_text(args.input)
    if not text.strip():
        raise UserError(f"--input {args.input} holds no text")
    llama, tokenizer = load_llama(args)
    if not llama.config.is_causal:
        raise UserError("a bidirectional model sees the tokens that it would predict; add --attention causal")
    runs.compute_fast(llama, args.precision, place, trains=False)
    result = runs.perplexity(llama, tokenizer, text, args.batch_size)
    print(f"{result.tokens} tokens in {args.input}")
    print(f"nats a token :: {result.nats_per_token:.4f}, bits a byte :: {result.bits_per_byte:.4f}")
    print(f"perplexity :: {result.perplexity:.3f}")


# --------------------------------------------------------------------------------------------------- processes


@contextmanager
def join_world(args: Namespace) -> Iterator[World]:
    """The processes of this run: this one alone, or those that torchrun started."""
    if not is_one_of_several():
        from tasks import ALONE

        yield ALONE
        return
    parallel = import_folder("parallel")
    if parallel is None:
        raise UserError("several processes need the folder parallel/ of this package beside run_llama.py")
    with parallel.join(choose_device(args.device, args.use_gpu), shard=args.shard) as group:
        group.require_alike(facts(args))
        yield group


def facts(args: Namespace) -> dict[str, Any]:
    """What must be equal on every machine: the contents of the input files, and the flags that name no file."""
    from plan import InputFile

    inputs = INPUTS[args.option]
    given = {name: value for name, value in vars(args).items() if name not in inputs and not name.endswith("_out")}
    files = {name: getattr(args, name) for name in inputs if getattr(args, name) is not None}
    return given | {name: InputFile.of(path, getattr(args, "model_files", ())).sha256 for name, path in files.items()}


def announce(args: Namespace) -> None:
    """Say with what the run is done."""
    print(f"args: {vars(args)}")
    if args.is_bundled:
        bar = "*" * 100
        print(
            f"{bar}\nWARNING: {DEFAULT_CHECKPOINT} is not here. Running on the small bundled checkpoint\n"
            f"{args.pretrained_model_path} instead. Its text and accuracies are NOT those of {DEFAULT_CHECKPOINT}.\n"
            f"setup.sh fetches the real one where it can be reached.\n{bar}",
            file=sys.stderr,
        )


def main() -> None:
    args = get_args()
    if args.list_methods:
        print_methods(args, find_model(args))
        return
    check_args(args)
    if os.environ.get("RANK", "0") == "0" and args.option != "predict":  # whose output is data
        announce(args)
    from finetuning import finetune
    from plan import Place

    with join_world(args) as world:
        seed_everything(args.seed)
        place = Place(choose_device(args.device, args.use_gpu), args.kernels, args.shard)
        if args.option in ("prompt", "finetune", "lora"):
            {"prompt": prompt, "finetune": finetune, "lora": finetune}[args.option](args, place, world)
        else:
            {"generate": generate, "predict": predict, "perplexity": perplexity}[args.option](args, place)


if __name__ == "__main__":
    sys.exit(run_main(main))
