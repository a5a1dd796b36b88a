"""Pre-train a BERT on text: masked tokens and next sentences (Devlin et al. 2019, arXiv:1810.04805, section 3.1).

    python -m bert.pretrain --text F [F ...] --out DIR [--dim 192 --n_layers 6 ...]
    python -m bert.pretrain --text F [F ...] --out DIR --init DIRECTORY

A text has a sentence on each line and a blank line between documents. The second goes on from a Hugging Face directory
of a BERT; heads that it lacks begin anew. A vocabulary is trained on the texts, if none is given.

DIR becomes such a directory: the best model so far by the loss of held-out documents, its vocabulary and, in
pretraining.json, the figures after about every `--every` steps: loss, perplexity and accuracy of masked tokens, loss
and accuracy of next sentences, beside those of predictions from the frequencies of tokens alone. No file is written
before the first measurement, and no run overwrites the files of another one.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from bert.config import NEW_BERT, config_of
from bert.package import PACKAGE, directory_of
from bert.vocabulary import tokenizers
from convert.directory import (
    BESIDE_BERT,
    SAFETENSORS,
    TOKENIZER_JSON,
    VOCABULARY,
    WEIGHTS,
    lock_of,
    require_safetensors,
    vocabulary_file,
)
from engine.plan import RECORD
from engine.programs import ArgumentParser, input_file, run_main
from engine.text.flags import Outputs, Row, add_text_flags, check_text_flags, fill_shape, follow
from utils import UserError, warn

PRETRAINING_POINT = "pretraining.resume"
PARTS_OF_LINE = {  # the printed parts of a measurement, each with the figure without which it is left out
    "step": "step {step}",
    "train": "train loss :: {train:.3f}",
    "word_loss": "masked tokens :: loss {word_loss:.4f}, perplexity {perplexity:.2f}, acc {word_accuracy:.3f}",
    "hidden_accuracy": "at [MASK] :: perplexity {hidden_perplexity:.2f}, acc {hidden_accuracy:.3f}",
    "next_loss": "next sentence :: loss {next_loss:.4f}, acc {next_accuracy:.3f}",
    "unigram_accuracy": "unigrams :: perplexity {unigram_perplexity:.2f}, acc {unigram_accuracy:.3f}",
    "rows_per_second": "{rows_per_second} rows a second",
}
NOTHING_LEARNED = (
    "what [MASK] hides is predicted no better than by how frequent each token is; "
    "shorter rows (--length 32), a smaller --lr or more --epochs may help"
)


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m bert.pretrain", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="the directory that is made")
    add("--init", metavar="DIRECTORY", help=f"go on from this one, or {PACKAGE}, with its shape and vocabulary")
    add("--tokenizer", metavar="VOCAB.txt", help="a vocabulary; else that of --init, or one trained on the texts")
    add_text_flags(parser)
    parser.set_defaults(lr=5e-4, length=128, batch_size=32)
    add = parser.add_argument_group("what is asked").add_argument
    add("--no_nsp", action="store_true", help="masked tokens alone; a row is a stretch of one document")
    add("--share", type=float, default=0.15, help="of the tokens, how many are to be predicted")
    add("--mask", type=float, default=0.8, help="of these, how many become [MASK]")
    add("--random", type=float, default=0.1, help="and how many another token; the rest stays what it is")
    add("--whole_words", action="store_true", help="the pieces of a word are chosen together")
    add("--static", action="store_true", help="every pass has the pairs and masks of the first one")
    shape = parser.add_argument_group("a new model").add_argument
    for name, value in NEW_BERT.items():
        shape(f"--{name}", type=int, help=f"{value} if not given")
    shape("--dropout", type=float, help="in training; 0.1 if not given")
    cased = "the vocabulary tells case and accents apart; else as is written beside --tokenizer"
    shape("--textbook", action="store_true", help="the BERT of textbooks, not the paper's: see bert/README.md")
    shape("--cased", action="store_true", help=cased)
    return parser.parse_args(argv)


def check_args(args: Namespace) -> None:
    """Raises `UserError` naming the flag; turns the names of files into paths."""
    check_text_flags(args)
    for name in ("share", "mask", "random"):
        if not 0 <= getattr(args, name) <= 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be from 0 to 1")
    if args.share == 0:
        raise UserError("--share 0.0: nothing would be asked")
    if args.mask + args.random > 1:
        raise UserError(f"--mask {args.mask} and --random {args.random}: together they must be at most 1")
    if args.init is not None:
        _check_init(args)
    if args.tokenizer is not None:
        args.tokenizer = input_file("--tokenizer", args.tokenizer)
    elif args.init is None:
        tokenizers()
    sizes = {**NEW_BERT, "hidden_dim": 4 * (args.dim or NEW_BERT["dim"]), "dropout": 0.1}
    fill_shape(args, sizes, lambda: config_of(args, args.vocab_size))
    require_safetensors()
    args.out = Path(args.out)
    outputs_of(args).check(args)


def _check_init(args: Namespace) -> None:
    path = directory_of(args.init, "--init")
    args.init = str(path)
    if args.tokenizer is not None:
        raise UserError("--tokenizer: the vocabulary is that of --init")
    if args.cased:
        raise UserError("--cased: the vocabulary is that of --init")
    if args.textbook:
        raise UserError("--textbook: the shape is that of --init")
    if not vocabulary_file(path).is_file():
        raise UserError(f"--init {path} holds no {VOCABULARY} and no {TOKENIZER_JSON}")


def outputs_of(args: Namespace) -> Outputs:
    out, beside = args.out, tuple(args.out / name for name in BESIDE_BERT)
    of_init = () if args.init is None else (Path(args.init, name) for name in (*BESIDE_BERT, TOKENIZER_JSON, *WEIGHTS))
    inputs = *args.text, *of_init, args.tokenizer
    return Outputs(out / SAFETENSORS, beside, out / RECORD, out / PRETRAINING_POINT, lock_of(out), inputs=inputs)


def line_of(row: Row) -> str:
    return ", ".join(text.format_map(row) for name, text in PARTS_OF_LINE.items() if name in row)


def main(argv: list[str] | None = None) -> None:
    args = get_args(argv)
    check_args(args)
    from bert.pretraining import pretrain, record_of
    from engine.plan import ComputeSettings
    from utils import choose_device, seed_everything

    seed_everything(args.seed)
    outputs = outputs_of(args)
    compute = ComputeSettings(choose_device(args.device))
    rows = follow(args, outputs, pretrain(args, compute, outputs), line_of)
    outputs.write_figures(args, rows, record_of(args))
    best = min((row for row in rows if "train" in row), key=lambda row: row["held_out"])
    figures = f"masked tokens :: perplexity {best['perplexity']:.2f}, acc {best['word_accuracy']:.3f}"
    print(f"save the model to {args.out} (step {best['step']}, {figures})")
    if "held_out" in rows[0] and best["held_out"] >= rows[0]["held_out"]:
        warn(f"it predicts the held-out text no better than {args.init} did; a smaller --lr may help")
    if best.get("hidden_perplexity", 0.0) >= rows[0]["unigram_perplexity"]:
        warn(NOTHING_LEARNED)


if __name__ == "__main__":
    sys.exit(run_main(main))
