"""Convert a checkpoint.

    python -m convert stories42M.pt stories42M.gguf --to gguf --attention causal
    python -m convert checkpoints/minllama1M.pt minllama1M.gguf --to gguf --dtype q8_0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convert import gguf
from utils import ArgumentParser, UserError, check_writable, find_asset, run_main


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises `UserError` for what does not fit."""
    parser = ArgumentParser(prog="python -m convert", description="a checkpoint in another program's format")
    parser.add_argument("model", metavar="MODEL", help="checkpoint")
    parser.add_argument("out", metavar="OUT", help="the file to write")
    parser.add_argument("--to", choices=("gguf",), required=True, help="gguf: llama.cpp's format")
    parser.add_argument("--dtype", choices=gguf.DTYPES, default="f32", help="of the matrices")
    parser.add_argument("--tokenizer", metavar="FILE", help="else the checkpoint's own .model, else tokenizer.model")
    parser.add_argument("--attention", choices=("causal",), help="read the checkpoint as a causal model")
    args = parser.parse_args(argv)
    check_args(args)
    return args


def check_args(args: argparse.Namespace) -> None:
    """Everything that can be known before work starts; resolves the input files."""
    model = find_asset(args.model)
    if model is None:
        what = "is a folder" if Path(args.model).is_dir() else "does not exist"
        raise UserError(f"{args.model} {what}; name a checkpoint that is here")
    beside = model.with_suffix(".model")
    name = args.tokenizer or (beside if beside.is_file() else "tokenizer.model")
    tokenizer = find_asset(name)
    if tokenizer is None:
        raise UserError(f"tokenizer {name} does not exist; name one with --tokenizer")
    check_writable(args.out, "OUT")
    if Path(args.out).resolve() in (model.resolve(), tokenizer.resolve()):
        raise UserError(f"OUT {args.out} is also an input; give it a name of its own")
    args.model, args.tokenizer = str(model), str(tokenizer)


def main() -> int:
    args = get_args()
    from llama import load_pretrained
    from tokenizer import Tokenizer

    model = load_pretrained(args.model, attention=args.attention)
    tokenizer = Tokenizer(tokenizer_model=args.tokenizer)
    vocabulary = gguf.read_vocabulary(tokenizer.sp_model, args.tokenizer)
    gguf.write(args.out, model.state_dict(), model.config, vocabulary, args.dtype, name=Path(args.model).stem)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
