"""Train a Llama to predict the next token of a text: from scratch, or from a checkpoint.

    python -m advanced.pretrain --text F [F ...] --out NEW.pt [--dim 256 --n_layers 6 ...]
    python -m advanced.pretrain --text F [F ...] --out NEW.pt --init CHECKPOINT

The second is continued pre-training (Gururangan et al. 2020, "Don't Stop Pretraining", arXiv:2004.10964): on texts of
the domain (DAPT, section 3), or on the training sentences of the task (TAPT, section 4); the labels of a data file are
dropped. The paper's model, RoBERTa, predicts masked tokens. The model here is always causal: a bidirectional one sees
the token that it shall predict. Documents are packed into one row of tokens, with bos and eos between them, which are
predicted and counted, too, and cut into windows, each of which begins with another bos.

Besides NEW.pt the program writes NEW.model, the tokenizer, and NEW.json, the figures: loss and perplexity of held-out
documents after about every `--every` steps. NEW.pt is the best model so far by that loss; all other commands can load
it. The files are written at the first measurement, and a run never overwrites the files of another one.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from config import PRECISIONS, ROUNDING, LlamaConfig
from engine.plan import origin
from engine.programs import ArgumentParser, input_file, run_main, tokenizer_name
from engine.text.flags import Outputs, Row, add_text_flags, check_text_flags, fill_shape, follow
from utils import UserError, find_asset, sha256_of, warn

DEFAULT_SHAPE = {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 4096, "max_seq_len": 512}


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m advanced.pretrain", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--out", required=True, metavar="NEW.pt", help="the checkpoint; its tokenizer is NEW.model")
    add("--init", metavar="CHECKPOINT", help="go on from this one, with its shape and tokenizer")
    add("--tokenizer", help="SentencePiece model; else that of --init, or one that is trained on the texts")
    add_text_flags(parser)
    can_train = [each for each in PRECISIONS if each not in ROUNDING]
    add("--precision", choices=can_train, default="fp32", help="of the products")
    shape = parser.add_argument_group("the shape of a new model").add_argument
    for name, value in DEFAULT_SHAPE.items():
        shape(f"--{name}", type=int, help=f"{value} if not given")
    return parser.parse_args(argv)


def check_args(args: Namespace) -> None:
    """Raises `UserError` naming the flag; turns the names of files into paths."""
    check_text_flags(args)
    for flag in ("init", "tokenizer"):
        if getattr(args, flag) is not None:
            setattr(args, flag, input_file(f"--{flag}", getattr(args, flag)))
    fill_shape(args, DEFAULT_SHAPE, lambda: config_of(args))
    if args.init is not None and args.tokenizer is None:
        args.tokenizer = str(find_asset(tokenizer_name(args.init)) or "")
        if not args.tokenizer:
            raise UserError(f"{args.init} has no .model file beside it; name its tokenizer with --tokenizer")
    args.out = Path(args.out)
    if args.out.suffix != ".pt":
        raise UserError(f"--out {args.out}: the name must end in .pt")
    outputs_of(args).check(args)


def config_of(args: Namespace) -> LlamaConfig:
    """Raises `ValueError` for an impossible shape."""
    return LlamaConfig(attention="causal", **{name: getattr(args, name) for name in DEFAULT_SHAPE})


def outputs_of(args: Namespace) -> Outputs:
    out = args.out
    beside, figures, point = (out.with_suffix(ending) for ending in (".model", ".json", ".resume"))
    inputs = *args.text, args.init, args.tokenizer
    return Outputs(out, (beside,), figures, point, out.with_suffix(".pt.lock"), inputs=inputs)


def line_of(row: Row) -> str:
    train = f"train loss :: {row['train']:.3f}, " if "train" in row else ""
    speed = f", {row['tokens_per_second']} tokens a second" if "tokens_per_second" in row else ""
    held_out = f"held-out loss :: {row['held_out']:.4f}, perplexity :: {row['perplexity']:.2f}"
    return f"step {row['step']}: {train}{held_out}, bits a byte :: {row['bits_per_byte']:.4f}{speed}"


def main() -> None:
    args = get_args()
    check_args(args)
    from advanced.pretraining import pretrain
    from engine.plan import ComputeSettings
    from utils import choose_device, seed_everything

    seed_everything(args.seed)
    outputs = outputs_of(args)
    compute = ComputeSettings(choose_device(args.device), precision=str(args.precision))
    rows = follow(args, outputs, pretrain(args, compute, outputs, DEFAULT_SHAPE), line_of)
    made_of = origin(args.text, args.out.with_suffix(".model"), args.init)
    outputs.write_figures(args, rows, {"made_of": made_of, "weights": sha256_of(args.out)})
    best = min((row for row in rows if "train" in row), key=lambda row: row["held_out"])
    print(f"save the model to {args.out} (step {best['step']}, held-out perplexity {best['perplexity']:.2f})")
    if best["held_out"] >= rows[0]["held_out"] and best is not rows[0]:
        warn(f"it predicts the held-out text no better than {args.init} did; a smaller --lr may help")


if __name__ == "__main__":
    sys.exit(run_main(main))
