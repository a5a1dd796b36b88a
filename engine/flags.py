"""The flags of run_llama.py and of other programs that train classifiers, and their defaults."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from engine.columns import FORMATS, Columns
from engine.data import SEPARATOR
from engine.programs import ArgumentParser, Default
from utils import QUESTION, decimal_number, whole_number

DEFAULT_CHECKPOINT = "stories42M.pt"
BUNDLED_CHECKPOINT = "checkpoints/minllama1M.pt"
DEFAULT_LABEL_NAMES = "data/cfimdb-label-mapping.json"
PREFIX = (
    "I have wanted to see this thriller for a while, and it didn't disappoint. "
    "Keanu Reeves, playing the hero John Wick, is"
)
OPTIONS = ("generate", "prompt", "finetune", "lora", "predict", "perplexity")
OUTPUT_WORDS = {"prompt": "prompting", "finetune": "finetuning", "lora": "lora"}
TRAINING = ("finetune", "lora")
LORA_RANK, LORA_ALPHA = 4, 1.0
LORA_TARGETS = "compute_query+compute_key+compute_value+compute_output"  # of the fall 2025 edition


def get_args(argv: list[str] | None = None) -> Namespace:
    """Parse the command line. Raises `UserError` for an unknown flag or a value of the wrong type."""
    from config import ATTENTION_KINDS

    parser = ArgumentParser(description="Llama 2: generate text, classify zero-shot, fine-tune a classifier.")
    add = parser.add_argument
    add("--option", choices=OPTIONS, default="generate", help="the task")
    add_data_flags(parser)
    what = "checkpoint to start from, or a Hugging Face directory, which is causal where --attention says nothing"
    add("--pretrained-model-path", default=Default(DEFAULT_CHECKPOINT), help=what)
    add("--tokenizer", help="SentencePiece model or tokenizer.json; else the checkpoint's own, else tokenizer.model")
    add("--attention", choices=ATTENTION_KINDS, help="override what the checkpoint declares (nothing: bidirectional)")
    add_place_flags(parser)
    add("--shard", action="store_true", help="under torchrun: split the model over the processes (FSDP)")
    add("--list-methods", action="store_true", help="print what there is beyond the base, or what --method names")

    _add_generate_flags(parser)
    add("--question", metavar="TEMPLATE", help=f"prompt: what is asked after a sentence, in the place of {QUESTION!r}")
    add = add_classify_flags(parser, "finetune and lora")
    add("--lora_rank", type=int, help="lora: the rank of an update; 4 if not given")
    add("--lora_alpha", type=float, help="lora: updates are scaled by this / rank; 1.0 if not given")
    _add_predict_flags(parser)
    return parser.parse_args(argv)


def add_data_flags(parser: ArgumentParser) -> None:
    """Which sentences."""
    add = parser.add_argument
    add("--train", default=Default("data/cfimdb-train.txt"), help=f"training data, lines of 'LABEL{SEPARATOR}sentence'")
    add("--dev", default=Default("data/cfimdb-dev.txt"), help="development data")
    add("--test", default="data/cfimdb-test.txt", help="test data")
    add("--label-names", default=Default(DEFAULT_LABEL_NAMES), help="JSON list of label names")
    where = f"in data files that end in {', '.join(FORMATS)}: the column of the {{}}; {{}} if not given"
    for kind, name in Columns()._asdict().items():
        add(f"--{kind}-column", metavar="NAME", help=where.format(f"{kind}s", name))


def add_place_flags(parser: ArgumentParser, has_precision: bool = True) -> None:
    """How much of a sentence is read, where a run is computed, and with which random numbers."""
    from config import PRECISIONS

    add = parser.add_argument
    add("--max_sentence_len", type=int, help="cut sentences to this many tokens")
    add("--seed", type=int, default=1337, help="seed of everything random")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    add("--use_gpu", action="store_true", help="insist on a GPU: CUDA, else MPS, else an error")
    if has_precision:
        what = "of the products; int8 is not for finetune"
        add("--precision", choices=PRECISIONS, default=Default("fp32"), help=what)
    add("--kernels", choices=("auto", "plain"), default="auto", help="the fastest here, or everything as it is written")


def _add_generate_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("generate").add_argument
    add("--prompt", default=Default(PREFIX), metavar="TEXT", help="the text to continue")
    each = "texts to continue, one a line, - for standard input; makes JSON lines, see --output"
    add("--prompt_file", metavar="FILE", help=each)
    add("--temperature", type=float, metavar="T", help="one text more, at T; with --prompt_file of all texts, else 0")
    add("--max_new_tokens", type=int, default=75, help="how many tokens to add")
    add("--cuda_graphs", action="store_true", help="has no effect any more")
    add("--num_samples", type=int, default=1, help="how many texts to sample at temperature 1, decoded together")
    add("--top_k", type=int, help="sample among the K most likely tokens only")
    add("--top_p", type=float, help="sample among the most likely tokens that hold this probability together")
    add("--epsilon", type=float, help="never sample a token less likely than this")
    add("--min_p", type=float, help="never sample a token less likely than this share of the likeliest")
    add("--repetition_penalty", type=float, help="above 1: tokens of the text are less likely, in every text")
    add("--beam", type=int, metavar="N", help=BEAM)
    add("--contrastive", type=number_and_count, metavar="ALPHA,K", help=CONTRASTIVE)
    for name, temperature in (("low", 0), ("high", 1)):
        file = Default(f"generated-sentence-temp-{temperature}.txt")
        add(f"--generated_sentence_{name}_temp_out", default=file, help=f"text at temperature {temperature}")


def add_classify_flags(parser: ArgumentParser, title: str = "finetune") -> Callable[..., Any]:
    """How sentences are classified, and a classifier is trained. title: of the latter's group, whose `add` it gives."""
    is_alone = title == "finetune"
    add = parser.add_argument_group(title if is_alone else "prompt and finetune").add_argument
    ending = "the name ends in {0}-prompting-output.txt, in {0}-finetuning-output.txt where it is fine-tuned, in "
    ending += "{0}-lora-output.txt with --option lora, in {0}-advanced-output.txt where a method is used"
    if is_alone:
        ending = "the name ends in {0}-finetuning-output.txt, in {0}-advanced-output.txt where a method is used"
    for split in ("dev", "test"):
        add(f"--{split}_out", default=f"cfimdb-{split}-prompting-output.txt", help=ending.format(split))
    add("--batch_size", type=int, default=8, help="sentences in a batch")
    where = "advanced/README.md" if is_alone else "--list-methods"
    add("--method", metavar="NAME[,NAME...]", action=Once, help=f"ways beyond the base, see {where}")
    how = dict(nargs="+", action="extend", default=[])
    add("--method-args", metavar="KEY=VALUE", help="arguments of the methods; or METHOD.KEY=VALUE", **how)

    add = add if is_alone else parser.add_argument_group(title).add_argument
    add("--epochs", type=int, default=5, help="passes over the training data")
    add("--lr", type=float, default=2e-5, help="learning rate")
    add("--hidden_dropout_prob", type=float, default=0.3, help="dropout before the classifier head")
    add("--model_out", metavar="FILE", help="where the model is saved; else a name made of epochs and learning rate")
    add("--no_train_eval", action="store_true", help="do not measure the accuracy on the training data (prints nan)")
    add("--resume", action="store_true", help="go on after the last finished epoch of an interrupted run")
    add("--shots", type=int, metavar="N", help="train on N sentences of each class alone, drawn with the seed")
    add("--hold_out", type=float, metavar="SHARE", help=HOLD_OUT)
    add("--log_dir", metavar="DIR", help="keep the figures of each step and epoch there, as JSON lines")
    add("--html", metavar="FILE", help="at the end, write a page to look at the run and its model")
    return add


def _add_predict_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("predict and perplexity").add_argument
    add("--model", metavar="FILE", help="predict: what finetune has saved; it needs no other file")
    add("--input", metavar="FILE", help="predict: a sentence a line, - for standard input; perplexity: a text")
    lines = f"predict: lines of 'LABEL{SEPARATOR}sentence', generate with --prompt_file: of JSON; else standard output"
    add("--output", metavar="FILE", help=lines)
    add("--probabilities", action="store_true", help="predict: label, probability of each label, sentence; with tabs")


HOLD_OUT = "choose the epoch on this share of the training data, which is not trained on, in the place of dev"
HELD_OUT = 0.1  # where a method chooses by a score, and nobody says otherwise
BEAM = "the text at temperature 0 is the likeliest that a search with N beams finds; not with --contrastive"
CONTRASTIVE = "the text at temperature 0 is made of the K likeliest tokens, and avoids by ALPHA (0 to 1) what is like "
CONTRASTIVE += "the text so far; needs causal attention; not with --beam"


def number_and_count(text: str) -> tuple[float, int]:
    """`0.6,5`. Raises `ArgumentTypeError`."""
    number, _, count = text.partition(",")
    try:
        return decimal_number(number), whole_number(count)
    except ValueError:
        raise argparse.ArgumentTypeError("must be a number and a whole number, as in 0.6,5") from None


class Once(argparse.Action):
    """A flag of which the first one would be ignored if it were given twice."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option: Any = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice; name several with a comma between them")
        setattr(namespace, self.dest, values)


NEEDED = {"predict": ("model", "input"), "perplexity": ("input",)}
INPUTS = {
    "generate": ("pretrained_model_path", "tokenizer", "prompt_file"),
    "prompt": ("pretrained_model_path", "tokenizer", "train", "dev", "test", "label_names"),
    "finetune": ("pretrained_model_path", "tokenizer", "train", "dev", "test", "label_names"),
    "lora": ("pretrained_model_path", "tokenizer", "train", "dev", "test", "label_names"),
    "predict": ("model", "input"),
    "perplexity": ("pretrained_model_path", "tokenizer", "input"),
}
HYPHENED = ("method_args", "label_names", "pretrained_model_path", "text_column", "label_column")


def flag_name(name: str) -> str:
    return "--" + (name.replace("_", "-") if name in HYPHENED else name)
