"""Make a page to look at: what a model computes of a text, or how a run went.

    python -m explore checkpoints/minllama1M.pt --text "A warm little film." --out page.html
    python -m explore finetune-5-0.0002.pt --data data/films-dev.txt --out page.html
    python -m explore finetune-5-0.0002.pt --beside checkpoints/minllama1M.pt --out page.html     # two models
    python -m explore LOG_DIR --out page.html                                   # a run with --log_dir
    python -m explore finetune-5-0.0002.pt --run LOG_DIR --out page.html        # both
    python -m explore advanced/experiments/results/NAME.jsonl --out page.html   # a grid of runs
    python -m explore checkpoints/minllama1M.pt --live --out page.html          # the model itself, in the page
    python -m explore checkpoints/minllama1M.pt --serve                         # the same for models of any size

The page is one file that needs no other file and no network.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import ATTENTION_KINDS
from engine.arguments import check_page, columns_of
from engine.flags import add_flags, flags_named, utf8_text
from engine.metrics import FILE, read_records
from engine.programs import ArgumentParser, find_checkpoint, input_file, run_main
from engine.tables import has_columns, read_examples, read_sentences
from utils import UserError, hub_hint

if TYPE_CHECKING:
    from explore.inspected import InspectedModel, InspectedText

SAMPLE_TEXT = "A warm little film about a baker and her stubborn goat."


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m explore", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("model", metavar="MODEL", help="checkpoint, Hugging Face directory or classifier; or a --log_dir or results")
    what = f"what is read; may be given several times; else: {SAMPLE_TEXT}"
    add("--text", type=utf8_text, metavar="T", action="append", help=what)
    add("--data", metavar="FILE", help="data file, or a sentence a line: its first ones, a classifier's errors before")
    add_flags(parser, flags_named("text-column", "label-column", "skip_empty"))
    add("--count", type=int, default=6, help="how many sentences of --data are shown in full")
    add("--beside", metavar="MODEL", help="a second model of the same shape and tokens, beside it in each figure")
    add("--run", metavar="LOG_DIR", help="a run to show beside the model: its --log_dir, or a file of results")
    add("--tokenizer", help="SentencePiece model; else the checkpoint's own .model, else tokenizer.model")
    add("--attention", choices=ATTENTION_KINDS, help="override what the checkpoint declares (nothing: bidirectional)")
    add("--live", action="store_true", help="a page that computes: the model's weights are in it")
    add("--bits", type=int, choices=(16, 8), help="for each weight of --live (nothing: 16)")
    add("--serve", type=int, nargs="?", const=0, metavar="PORT", help="serve the page of --live on this machine alone")
    add("--out", metavar="PAGE.html", help="the file that is written")
    return parser.parse_args(argv)


def check_args(args: Namespace) -> None:
    """Find the files, without PyTorch. Raises `UserError` for a mistake."""
    check_live(args)
    if args.serve is None:
        check_page("--out", args.out)
    args.columns = columns_of(args, [args.data])
    if args.text and args.data:
        raise UserError("--text and --data both say what is read; give one of them")
    for text in args.text or ():
        if not text.strip():
            raise UserError("--text holds no text")
    if not 1 <= args.count <= 20:
        raise UserError(f"--count {args.count}: must be from 1 to 20")
    if is_run(args.model):
        flags = ("text", "data", "beside", "run", "tokenizer", "attention")
        if given := [flag for flag in flags if getattr(args, flag)]:
            raise UserError(f"--{given[0]} is for a model, and {args.model} is a run; give the model, and --run RUN")
        return
    if Path(args.model).is_dir() and not Path(args.model, "config.json").is_file():
        raise UserError(f"{args.model} is a folder without {FILE} or config.json: neither a run nor a model")
    for flag, what in (("model", "MODEL"), ("beside", "--beside")):
        if (name := getattr(args, flag)) is not None and not Path(name).is_dir():
            setattr(args, flag, input_file(what, name, hub_hint(name), find_checkpoint))
    if args.data is not None:
        args.data = input_file("--data", args.data)
    if args.run is not None and not is_run(args.run):
        raise UserError(f"--run {args.run} is neither a folder with {FILE} nor a file of results (.jsonl)")
    inputs = (args.model, args.beside, args.data, args.run)
    if args.out is not None and Path(args.out).resolve() in {
        Path(path).resolve() for path in inputs if path is not None
    }:
        raise UserError(f"--out {args.out} is also an input; give it a name of its own")


def check_live(args: Namespace) -> None:
    """The flags of a page that computes. Raises `UserError`."""
    is_live = args.live or args.serve is not None
    if args.serve is None and args.out is None:
        raise UserError("--out PAGE.html is missing, the file that is written")
    if args.serve is not None and (args.out or args.bits):
        raise UserError(f"--{'out' if args.out else 'bits'} is for a page that is written, and --serve writes none")
    if args.serve is not None and not 0 <= args.serve <= 65535:
        raise UserError(f"--serve {args.serve}: a port is from 0 (a free one) to 65535")
    if args.bits and not args.live:
        raise UserError("--bits is for the weights of --live")
    if is_live and (args.data or args.run or args.beside or len(args.text or ()) > 1):
        given = next((flag for flag in ("data", "run", "beside") if getattr(args, flag)), "text")
        raise UserError(f"--{given} is for a page that is drawn once; a live page begins with one --text")
    if is_live and is_run(args.model):
        raise UserError(f"{args.model} is a run, and a live page is of a model")


def is_run(path: str) -> bool:
    return (Path(path) / FILE).is_file() or (path.removesuffix(".xz").endswith(".jsonl") and Path(path).is_file())


def page_of_run(path: str) -> dict[str, Any]:
    from explore.trained import page_of_log, page_of_results, read_results_file

    if Path(path).name == FILE:
        path = str(Path(path).parent)
    if Path(path).is_dir():
        return page_of_log(read_records(path), Path(path).resolve().name)
    return page_of_results(read_results_file(path), Path(path).name)


def texts_of(args: Namespace, inspected: InspectedModel) -> tuple[list[InspectedText], dict[str, Any]]:
    """The texts of the page; for a classifier and labelled data, also its results on all of them as a run."""
    from engine.data import NO_GOLD_LABEL, has_gold_labels
    from engine.families import encode_for
    from engine.runs import loader_of
    from engine.tasks import Judging, outcome_of
    from engine.training import evaluate
    from explore.inspected import InspectedText, examples_of

    if args.data is None:
        return [InspectedText(text) for text in args.text or [SAMPLE_TEXT]], {}
    if inspected.classifier is None or not (has_columns(args.data) or is_labelled(args.data)):
        sentences = [sentence for sentence in read_sentences(args.data, args.columns) if sentence is not None]
        return [InspectedText(sentence) for sentence in sentences[: args.count]], {}
    examples = read_examples(args.data, inspected.label_names, args.columns, is_test=True)
    sentences = [example.sentence for example in examples]
    dataset = encode_for(inspected.classifier, inspected.tokenizer, examples)
    device = next(inspected.llama.parameters()).device
    loader = loader_of(dataset, inspected.llama.config, inspected.about.batch_size, device)
    result = evaluate(inspected.classifier, loader, task=Judging())
    if not has_gold_labels(result.labels):
        return [InspectedText(sentence) for sentence in sentences[: args.count]], {}
    name = Path(args.data).name
    run = {
        "name": name,
        "settings": {},
        "steps": 0,
        "chosen_on": "dev",
        "curves": [],
        "epochs": [],
        "judged": [outcome_of(name, sentences, result, inspected.label_names)],
    }
    labels = [None if label == NO_GOLD_LABEL else label for label in result.labels]
    return examples_of(sentences, labels, result, args.count), {"run": {"name": name, "runs": [run]}}


def is_labelled(path: str) -> bool:
    from engine.data import create_data

    try:
        create_data(path, is_test=True)
    except UserError:
        return False
    return True


def open_live(args: Namespace) -> tuple[InspectedModel, str]:
    """The model of a page that computes, and the text that it begins with."""
    from explore.inspected import InspectedModel

    inspected = InspectedModel.open(args.model, args.tokenizer, args.attention)
    return inspected, args.text[0] if args.text else inspected.sample_text(SAMPLE_TEXT)


def write_live(args: Namespace) -> None:
    """Write or serve a page that computes."""
    if args.serve is not None:
        from explore.serve import serve

        serve(lambda: open_live(args), args.serve)
        return
    from explore.live import live_page
    from explore.page import write_page

    write_page(args.out, *live_page(*open_live(args), args.bits or 16, args.out))
    print(f"wrote {args.out}")


def main() -> None:
    args = get_args()
    check_args(args)
    from explore.page import write_page

    if args.live or args.serve is not None:
        write_live(args)
        return
    if is_run(args.model):
        content = page_of_run(args.model)
    else:
        from explore.inspected import InspectedModel, page_of_model

        inspected = InspectedModel.open(args.model, args.tokenizer, args.attention)
        texts, content = texts_of(args, inspected)
        other = InspectedModel.open(args.beside, args.tokenizer, args.attention) if args.beside is not None else None
        content |= page_of_model(inspected, texts, other)
        if args.run is not None:  # after the results on --data, if there are any
            run = page_of_run(args.run)["run"]
            content["run"] = run | {"runs": [*content.get("run", {"runs": []})["runs"], *run["runs"]]}
    write_page(args.out, content)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    sys.exit(run_main(main))
