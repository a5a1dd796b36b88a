"""Convert a model into another program's format.

    python -m convert stories42M.pt stories42M --to hf --attention causal
    python -m convert stories42M.bin stories42M --from llama2c --to hf
    python -m convert checkpoints/minllama1M.pt minllama1M.bin --to llama2c
    python -m convert checkpoints/minllama1M.pt minllama1M.gguf --to gguf --dtype q8_0
    python -m convert finetune-5-2e-05.pt films.onnx --to onnx
    python -m convert finetuned-with-lora.pt adapter --to peft --base films-hf
    python -m convert adapter merged --to hf --base films-hf

MODEL is a checkpoint, a Hugging Face directory, an adapter of one, a GGUF file or, with --from llama2c, a .bin file;
with --to onnx and --to peft, what --option finetune has saved. See docs/formats.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from config import ATTENTION_KINDS
from convert.directory import ADAPTER_CONFIG, files_of_llama, files_of_model, require_base
from convert.formats import DTYPES
from engine.arguments import tokenizer_file
from engine.programs import ArgumentParser, check_new, find_checkpoint, input_file, run_main, tokenizer_name
from utils import UserError, find_asset, hub_hint, printable

# What is made of a saved classifier, and the flags that are not for it.
OF_CLASSIFIERS = {"onnx": ("attention", "tokenizer", "source", "base"), "peft": ("tokenizer", "source")}
FORMATS_HELP = (
    "hf: a Hugging Face directory; llama2c: a .bin file and its tokenizer.bin; gguf: for llama.cpp; "
    "onnx: a fine-tuned classifier; peft: what --method lora has learned, as an adapter"
)


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked. Raises `UserError`."""
    parser = ArgumentParser(prog="python -m convert", description="a model in another program's format")
    what = "checkpoint, Hugging Face directory, adapter or GGUF file; for onnx and peft a saved classifier"
    parser.add_argument("model", metavar="MODEL", help=what)
    parser.add_argument("out", metavar="OUT", help="what is written, a folder for hf and peft; nothing is overwritten")
    parser.add_argument("--to", choices=DTYPES, required=True, help=FORMATS_HELP)
    parser.add_argument("--from", dest="source", choices=("llama2c",), help="MODEL is a .bin file of llama2.c")
    kinds = tuple(dict.fromkeys(dtype for dtypes in DTYPES.values() for dtype in dtypes))
    parser.add_argument("--dtype", choices=kinds, default="f32", help="of the matrices")
    what = "SentencePiece model or tokenizer.json; else the model's own, else tokenizer.model"
    parser.add_argument("--tokenizer", metavar="FILE", help=what)
    what = "override what the checkpoint declares; a directory, a GGUF and a .bin file are causal"
    parser.add_argument("--attention", choices=ATTENTION_KINDS, help=what)
    what = "Hugging Face directory that an adapter is of, written (--to peft) or read (else that which it names)"
    parser.add_argument("--base", metavar="DIR", help=what)
    args = parser.parse_args(argv)
    check_args(args)
    return args


def check_args(args: argparse.Namespace) -> None:
    """Find every mistake before the work starts. Turns the names of the inputs into paths. Raises `UserError`."""
    if args.dtype not in DTYPES[args.to]:
        raise UserError(f"--dtype {args.dtype} is not for --to {args.to}, which has {', '.join(DTYPES[args.to])}")
    if args.to in OF_CLASSIFIERS:
        for flag in OF_CLASSIFIERS[args.to]:
            if getattr(args, flag) is not None:
                name = "from" if flag == "source" else flag
                raise UserError(f"--{name} is not for --to {args.to}: a saved classifier says all of itself")
    if args.to != "onnx" and args.attention == "bidirectional":
        raise UserError(f"--attention bidirectional is nothing that {args.to} can say; use --attention causal")
    _check_base(args)
    args.model = _find_model(args)
    if args.to not in OF_CLASSIFIERS:
        args.tokenizer = _find_tokenizer(args)
    outputs = [args.out]
    if args.to == "llama2c":
        from convert.llama2c import TOKENIZER_BIN

        outputs.append(str(Path(args.out).with_name(TOKENIZER_BIN)))
        if outputs[0] == outputs[1]:
            raise UserError(f"OUT {args.out} is where the tokenizer goes; give the model another name")
    for path in outputs:
        if os.path.isdir(path):
            raise UserError(f"OUT {path} is a folder that is there already; name another one")
        check_new(path, "OUT")


def _check_base(args: argparse.Namespace) -> None:
    """`--base` names the directory of an adapter that is written or read, and is for nothing else."""
    if args.to == "peft" and args.base is None:
        raise UserError("--to peft needs --base DIR, the directory of the model that was fine-tuned")
    if args.base is None:
        return
    if args.to != "peft" and not (args.source is None and (Path(args.model) / ADAPTER_CONFIG).exists()):
        raise UserError(f"--base is for adapters, and MODEL {args.model} holds no {ADAPTER_CONFIG}")
    if not os.path.isdir(args.base):
        raise UserError(f"--base {args.base} is no folder; name the directory of a model{hub_hint(args.base)}")
    files_of_model(require_base(Path(args.base)))


def _find_model(args: argparse.Namespace) -> str:
    if os.path.isdir(args.model) and args.source is None and args.to not in OF_CLASSIFIERS:
        files_of_llama(Path(args.base or args.model))
        return args.model
    return input_file("MODEL", args.model, hub_hint(args.model), find_checkpoint)


def _find_tokenizer(args: argparse.Namespace) -> str | None:
    """The path of the tokenizer; None for a directory without one that becomes a directory again."""
    model = args.base or args.model
    may_lack = args.to == "hf" and os.path.isdir(args.model) and args.tokenizer is None
    return None if may_lack and find_asset(tokenizer_name(model)) is None else tokenizer_file(model, args.tokenizer)


def main() -> int:
    args = get_args()
    if args.to == "onnx":
        from convert import onnx
        from engine.runs import load_classifier

        onnx.write(args.out, *load_classifier(args.model))
    elif args.to == "peft":
        from convert import peft

        peft.write(args.out, args.model, args.base, args.attention)
    else:
        _convert_language_model(args)
    print(f"wrote {args.out}")
    return 0


def _convert_language_model(args: argparse.Namespace) -> None:
    from convert import gguf, hugging_face, llama2c
    from convert.vocabulary import vocabulary_of
    from engine import weights
    from engine.families import OtherVocabulary, read_tokenizer, require_vocabulary

    tokenizer = None if args.tokenizer is None else read_tokenizer(args.tokenizer)
    load = llama2c.load_llama2c if args.source else weights.load_llama_model
    try:
        if args.base is not None:
            model = hugging_face.load_directory(args.model, args.attention, args.base)
        else:
            model = load(args.model, attention=args.attention)
    except UserError as error:
        if args.source or Path(args.model).suffix != ".bin":
            raise
        raise UserError(f"{error}; a .bin file of llama2.c is read with --from llama2c") from None
    if model.config.norm != "rms":
        raise UserError(f"{args.model} has LayerNorm, and to {args.to} a Llama is one with RMSNorm")
    if tokenizer is not None:
        try:
            require_vocabulary(tokenizer, model, args.model)
        except OtherVocabulary as error:
            raise UserError(f"{error}; name the right one with --tokenizer") from None
    state, config = model.state_dict(), model.config
    if args.to == "hf":
        hugging_face.write(args.out, state, config, tokenizer, args.dtype, getattr(model, "stop_ids", None))
        return
    vocabulary = vocabulary_of(tokenizer).filled(config.vocab_size)
    if args.to == "llama2c":
        llama2c.write(args.out, state, config, vocabulary)
    else:
        path = Path(args.model).resolve()
        name = path.name if path.is_dir() else path.stem  # a folder's may have a dot, as TinyLlama-1.1B
        gguf.write(args.out, state, config, vocabulary, args.dtype, printable(name))


if __name__ == "__main__":
    sys.exit(run_main(main))
