"""The driver: generate text, classify zero-shot, or fine-tune a classifier.

    python run_llama.py --option generate
    python run_llama.py --option prompt   --train F --dev F --test F --label-names F --dev_out F --test_out F
    python run_llama.py --option finetune --train F --dev F --test F --label-names F --dev_out F --test_out F

All argument handling and all printing live here. PyTorch is imported after the arguments have been checked, so that
`--help` and every argument error answer at once.
"""

from __future__ import annotations

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from utils import (
    ArgumentParser,
    Default,
    UserError,
    atomic_write,
    check_writable,
    choose_device,
    find_asset,
    read_text,
    run_main,
    seed_everything,
    sha256_of,
    shown,
    some,
    warn,
)

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from llama import Llama
    from tokenizer import Tokenizer
    from training import Checkpoints, EpochResult, Evaluation, Example, LlamaDataset, World

DEFAULT_CHECKPOINT = "stories42M.pt"
BUNDLED_CHECKPOINT = "checkpoints/minllama1M.pt"
DEFAULT_LABEL_NAMES = "data/cfimdb-label-mapping.json"
PREFIX = (
    "I have wanted to see this thriller for a while, and it didn't disappoint. "
    "Keanu Reeves, playing the hero John Wick, is"
)
OUTPUT_KINDS = {"prompt": "prompting", "finetune": "finetuning"}


# ------------------------------------------------------------------------------------------------- arguments


def get_args(argv: list[str] | None = None) -> Namespace:
    """Parse the command line. Raises `UserError` for an unknown flag or a value of the wrong type."""
    from config import ATTENTION_KINDS, PRECISIONS

    parser = ArgumentParser(description="Llama 2: generate text, classify zero-shot, fine-tune a classifier.")
    add = parser.add_argument
    add("--option", choices=("generate", "prompt", "finetune"), default="generate", help="the task")
    add("--train", default=Default("data/cfimdb-train.txt"), help="training data, lines of 'LABEL ||| sentence'")
    add("--dev", default=Default("data/cfimdb-dev.txt"), help="development data")
    add("--test", default="data/cfimdb-test.txt", help="test data")
    add("--label-names", default=Default(DEFAULT_LABEL_NAMES), help="JSON list of label names")
    add("--pretrained-model-path", default=Default(DEFAULT_CHECKPOINT), help="checkpoint to start from")
    add("--tokenizer", help="SentencePiece model; else the checkpoint's own .model, else tokenizer.model")
    add("--attention", choices=ATTENTION_KINDS, help="override what the checkpoint declares (nothing: bidirectional)")
    add("--max_sentence_len", type=int, help="cut sentences to this many tokens")
    add("--seed", type=int, default=1337, help="seed of everything random")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    add("--use_gpu", action="store_true", help="insist on a GPU: CUDA, else MPS, else an error")
    add("--precision", choices=PRECISIONS, default="fp32", help="of the products; int8 is for generate and prompt")
    add("--kernels", choices=("auto", "plain"), default="auto", help="the fastest here, or everything as it is written")
    add("--shard", action="store_true", help="under torchrun: split the model over the processes (FSDP)")

    _add_task_flags(parser)
    return parser.parse_args(argv)


def _add_task_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("generate").add_argument
    add("--prompt", default=PREFIX, metavar="TEXT", help="the text to continue")
    add("--max_new_tokens", type=int, default=75, help="how many tokens to add")
    add("--cuda_graphs", action="store_true", help="decode on CUDA through recorded graphs (untested on a GPU)")
    add("--num_samples", type=int, default=1, help="how many texts to sample at temperature 1, decoded together")
    add("--top_k", type=int, help="sample among the K most likely tokens only")
    add("--top_p", type=float, help="sample among the most likely tokens that hold this probability together")
    add("--epsilon", type=float, help="never sample a token less likely than this")
    add("--generated_sentence_low_temp_out", default="generated-sentence-temp-0.txt", help="text at temperature 0")
    add("--generated_sentence_high_temp_out", default="generated-sentence-temp-1.txt", help="text at temperature 1")

    add = parser.add_argument_group("prompt and finetune").add_argument
    ending = "the name ends in {0}-prompting-output.txt, or {0}-finetuning-output.txt where it is fine-tuned"
    for split in ("dev", "test"):
        add(f"--{split}_out", default=f"cfimdb-{split}-prompting-output.txt", help=ending.format(split))
    add("--batch_size", type=int, default=8, help="sentences in a batch")

    add = parser.add_argument_group("finetune").add_argument
    add("--epochs", type=int, default=5, help="passes over the training data")
    add("--lr", type=float, default=2e-5, help="learning rate")
    add("--hidden_dropout_prob", type=float, default=0.3, help="dropout before the classifier head")
    add("--no_train_eval", action="store_true", help="do not measure the accuracy on the training data (prints nan)")
    add("--resume", action="store_true", help="go on after the last finished epoch of an interrupted run")


def check_args(args: Namespace) -> None:
    """Find every mistake in the arguments before anything is loaded, and resolve input files to where they lie.

    Raises `UserError` naming the flag.
    """
    _check_numbers(args)
    _check_precision(args)
    _check_processes(args)
    try:
        args.prompt.encode()
    except UnicodeEncodeError:
        raise UserError("--prompt is not UTF-8 text") from None
    args.derive_labels = args.option == "finetune" and isinstance(args.label_names, Default)
    outputs = _check_generate_files(args) if args.option == "generate" else _check_classify_files(args)
    args.is_bundled = _resolve_checkpoint(args)
    args.tokenizer = _resolve_tokenizer(args)
    _check_overlaps(args, outputs)


def _check_numbers(args: Namespace) -> None:
    def require(flag: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise UserError(f"--{flag} {getattr(args, flag)}: must be {wanted}")

    require("seed", 0 <= args.seed < 2**32, "from 0 to 2^32 - 1")
    require("batch_size", 1 <= args.batch_size < 2**31, "from 1 to 2^31 - 1")
    require("epochs", args.epochs >= 1, "at least 1")
    require("lr", 0.0 < args.lr < math.inf, "above 0 and finite")
    require("hidden_dropout_prob", 0.0 <= args.hidden_dropout_prob < 1.0, "from 0 to below 1")
    require("max_sentence_len", args.max_sentence_len is None or args.max_sentence_len >= 1, "at least 1")
    require("max_new_tokens", args.max_new_tokens >= 1, "at least 1")
    require("num_samples", 1 <= args.num_samples < 2**16, "from 1 to 2^16 - 1")
    require("top_k", args.top_k is None or args.top_k >= 1, "at least 1")
    require("top_p", args.top_p is None or 0.0 < args.top_p <= 1.0, "above 0 and at most 1")
    require("epsilon", args.epsilon is None or 0.0 <= args.epsilon < 1.0, "from 0 to below 1")


def _check_precision(args: Namespace) -> None:
    if args.precision == "int8" and args.option == "finetune":
        raise UserError("--precision int8 rounds the weights, which cannot be trained then; use bf16 or fp32")
    if args.precision != "fp32" and args.kernels == "plain":
        raise UserError(f"--kernels plain is fp32 alone; leave it out for --precision {args.precision}")


def is_one_of_several() -> bool:
    """Whether torchrun, or what stands for it, has started this process beside others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _check_processes(args: Namespace) -> None:
    if is_one_of_several() and args.option == "generate":
        raise UserError("--option generate runs in one process; start it without torchrun")
    if args.shard and not is_one_of_several():
        raise UserError(
            "--shard splits the model over several processes; start them with torchrun --nproc_per_node N run_llama.py"
        )


def _check_generate_files(args: Namespace) -> dict[str, Path]:
    """What the run will write, by what the user calls it."""
    outputs = {"--generated_sentence_low_temp_out": Path(args.generated_sentence_low_temp_out)}
    samples = sample_paths(args)
    outputs["--generated_sentence_high_temp_out"] = samples[0]
    outputs |= {f"sample {number} of --num_samples": path for number, path in enumerate(samples[1:], 2)}
    for name, path in outputs.items():
        check_writable(path, name)
    return outputs


def sample_paths(args: Namespace) -> list[Path]:
    """The files of the sampled texts: the contract's name, then the same with -2, -3, ... before the ending."""
    first = Path(args.generated_sentence_high_temp_out)
    return [first, *(first.with_stem(f"{first.stem}-{number}") for number in range(2, args.num_samples + 1))]


def _check_classify_files(args: Namespace) -> dict[str, Path]:
    """What the run will write, by what the user calls it. Turns the names of the data files into paths."""
    kind, outputs = OUTPUT_KINDS[args.option], {}
    for flag, split in (("dev_out", "dev"), ("test_out", "test")):
        path = getattr(args, flag)
        ending = f"{split}-{kind}-output.txt"
        if not path.endswith(ending):
            raise UserError(f"--{flag} {path}: with --option {args.option} the name must end in {ending}")
        check_writable(path, f"--{flag}")
        outputs[f"--{flag}"] = Path(path)
    if args.option == "prompt" and isinstance(args.train, Default):
        # nothing is trained: its absence is no mistake, and beside other data it is not what is meant
        if find_asset(args.train) is None or not isinstance(args.dev, Default):
            args.train = None
    for flag in ("train", "dev", "test", "label_names"):
        if getattr(args, flag) is not None:
            setattr(args, flag, _find_data(flag.replace("_", "-"), getattr(args, flag)))
    if args.option == "finetune":
        check_writable(contract_model_path(args), "the fine-tuned model")
        for path in model_candidates(args):
            outputs[f"the fine-tuned model, {path}"] = path
            outputs[f"the resume point, {path.with_suffix('.resume')}"] = path.with_suffix(".resume")
            outputs[f"the lock of the run, {path.with_suffix('.lock')}"] = path.with_suffix(".lock")
    return outputs


def _find_data(flag: str, name: str) -> str:
    path = find_asset(name)
    if path is None:
        _refuse_what_is_no_file(flag, name)
        hint = "" if find_asset("data/films-train.txt") is None else "; data/films-*.txt is here in any case"
        raise UserError(f"--{flag} {name} does not exist; setup.sh fetches the course's data{hint}")
    return str(path)


def _refuse_what_is_no_file(flag: str, name: str) -> None:
    """Say what it is, where something of that name is there."""
    if name and os.path.isdir(name):
        raise UserError(f"--{flag} {name} is a folder; name a file")
    if name and os.path.lexists(name):
        what = "a link that leads nowhere" if os.path.islink(name) else "a pipe or device, which can be read only once"
        raise UserError(f"--{flag} {name} is {what}; name a file")


def _resolve_checkpoint(args: Namespace) -> bool:
    """Turn the checkpoint's name into a path; True if the bundled one stands in for an absent default."""
    path = find_asset(args.pretrained_model_path)
    is_bundled = path is None and isinstance(args.pretrained_model_path, Default)
    if is_bundled:
        path = find_asset(BUNDLED_CHECKPOINT)
    if path is None:
        _refuse_what_is_no_file("pretrained-model-path", args.pretrained_model_path)
        raise UserError(
            f"--pretrained-model-path {args.pretrained_model_path} does not exist; "
            f"setup.sh fetches {DEFAULT_CHECKPOINT}, or name a checkpoint that is here"
        )
    args.pretrained_model_path = str(path)
    return is_bundled


def _resolve_tokenizer(args: Namespace) -> str:
    """--tokenizer, else the .model file of the checkpoint's own name beside it, else tokenizer.model."""
    beside = Path(args.pretrained_model_path).with_suffix(".model")
    name = args.tokenizer or (beside if beside.is_file() else "tokenizer.model")
    path = find_asset(name)
    if path is None:
        _refuse_what_is_no_file("tokenizer", str(name))
        flag = "--tokenizer " if args.tokenizer else ""
        raise UserError(f"{flag}{name} does not exist; setup.sh fetches tokenizer.model, or name one with --tokenizer")
    return str(path)


def _check_overlaps(args: Namespace, outputs: dict[str, Path]) -> None:
    """No output may overwrite another output or an input, under whatever name."""
    inputs = ["pretrained_model_path", "tokenizer"]
    if args.option != "generate":
        inputs += ["train", "dev", "test", "label_names"]
    taken = {}
    for flag in inputs:
        if getattr(args, flag) is not None:
            taken |= dict.fromkeys(_identities(Path(getattr(args, flag))), f"--{flag.replace('_', '-')}")
    for name, path in outputs.items():
        identities = _identities(path)
        if other := next((taken[identity] for identity in identities if identity in taken), None):
            raise UserError(f"{name}: {path} is also {other}; one of them needs another name")
        taken |= dict.fromkeys(identities, name)


def _identities(path: Path) -> list[object]:
    """What makes two paths one file: where they lead, and the file that is there, which can have several names."""
    identities: list[object] = [path.resolve()]
    if path.exists():
        identities.append((path.stat().st_dev, path.stat().st_ino))
    return identities


# ----------------------------------------------------------------------------------- what the commands share


def load_llama(args: Namespace) -> tuple[Llama, Tokenizer, torch.device]:
    """The model (on its device) and its tokenizer. Raises `UserError` if their vocabularies differ."""
    from llama import load_pretrained
    from tokenizer import Tokenizer

    device = choose_device(args.device, args.use_gpu)
    tokenizer = Tokenizer(args.max_sentence_len, args.tokenizer)
    llama = load_pretrained(args.pretrained_model_path, attention=args.attention)
    if tokenizer.n_words != llama.config.vocab_size:
        raise UserError(
            f"{args.pretrained_model_path} has a vocabulary of {llama.config.vocab_size}, "
            f"but {args.tokenizer} has {tokenizer.n_words} pieces; name the right one with --tokenizer"
        )
    print(f"load model from {args.pretrained_model_path} (attention: {llama.config.attention})")
    if not args.shard:  # a model that is to be split need not fit the device
        llama = llama.to(device)
    if args.kernels == "auto":
        use_fast_kernels(args, llama, device)
    return llama, tokenizer, device


def use_fast_kernels(args: Namespace, llama: Llama, device: torch.device) -> None:
    """Let fast/ choose how the model is computed; fp32 does without it where the root modules stand alone."""
    if find_spec("fast") is None:
        if args.precision != "fp32":
            raise UserError(f"--precision {args.precision} needs the folder fast/ beside run_llama.py")
        warn("the folder fast/ is not here: all is computed as it is written, long texts and training more slowly")
    if not is_worth_kernels(args, llama, device):
        return
    from fast import accelerate

    # splitting a model is there to avoid whole copies of its weights
    accelerate(
        llama,
        args.precision,
        device,
        generates=args.option == "generate",
        trains=args.option == "finetune",
        keeps_copies=not args.shard,
    )


def is_worth_kernels(args: Namespace, llama: Llama, device: torch.device) -> bool:
    """Whether fast/ is here, and choosing kernels is worth its time."""
    if find_spec("fast") is None:
        return False
    from fast.little import is_little

    is_fp32_text = args.option == "generate" and args.precision == "fp32" and device.type == "cpu"
    return not (is_fp32_text and is_little(llama, tokens_one_by_one(args)))


def tokens_one_by_one(args: Namespace) -> int:
    """How many tokens `generate` adds to one text at a time; several samples are decoded together."""
    return (2 if args.num_samples == 1 else 1) * args.max_new_tokens


def make_decoder(args: Namespace, llama: Llama, device: torch.device) -> Any:
    """What has a `generate` like the model's: a decoder of fast/, or the model itself."""
    if args.kernels == "plain" or not is_worth_kernels(args, llama, device):
        return llama
    from fast import decoder

    return decoder(llama, args.precision, tokens=tokens_one_by_one(args), cuda_graphs=args.cuda_graphs)


def read_data(args: Namespace) -> tuple[dict[str, list[Example]], list[str]]:
    """The three splits and the label names, everything checked. Prints a line a file."""
    from training import create_data

    label_names = read_label_names(args.label_names)
    if args.derive_labels:
        # the reference takes the number of classes from the training data, so a bare default must not be in the way
        examples = create_data(args.train)
        highest = max(example.label for example in examples)
        if len(label_names) <= highest < len(examples):  # more classes than examples is a slip in the data
            label_names = [str(label) for label in range(highest + 1)]
    splits = {}
    for split in ("train", "dev", "test"):
        path = getattr(args, split)
        if path is None:
            continue
        splits[split] = create_data(path, len(label_names), is_test=split == "test")
        print(f"load {len(splits[split])} data from {path}")
    return splits, label_names


def read_label_names(path: str) -> list[str]:
    """The label mapping. Raises `UserError` unless it is a JSON list of at least two distinct, non-empty strings."""
    text = read_text(path)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    is_list = isinstance(names, list) and all(
        isinstance(name, str) and name.strip() and name.isprintable() for name in names
    )
    if not is_list or len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f'{path} must be a JSON list of two or more distinct names, such as ["bad", "good"]')
    return names


def make_dataset(
    examples: list[Example], path: str, llama: Llama, tokenizer: Tokenizer, prompt_suffix: str | None = None
) -> LlamaDataset:
    """Encode one split, and warn of sentences beyond the model's length."""
    from training import EncodingRules, LlamaDataset

    config = llama.config
    dataset = LlamaDataset(examples, tokenizer, EncodingRules(prompt_suffix, config.max_seq_len, config.is_causal))
    if dataset.too_long:
        what = "cut" if config.is_causal else "used whole, as the reference does"
        warn(f"{path}: {dataset.too_long} sentences are longer than max_seq_len={config.max_seq_len} tokens; {what}")
    return dataset


def make_loader(
    args: Namespace, dataset: LlamaDataset, llama: Llama, device: torch.device, *, shuffle: bool = False
) -> DataLoader:
    """Batches as the model and its device want them."""
    bucket, pin_memory = llama.config.is_causal, device.type == "cuda"
    return dataset.loader(args.batch_size, shuffle=shuffle, bucket=bucket, pin_memory=pin_memory)


def write_predictions(path: str, sentences: list[str], result: Evaluation) -> None:
    """The output file: one `PREDICTED ||| sentence` a line."""
    with atomic_write(path) as file:
        for prediction, sentence in zip(result.predictions, sentences, strict=True):
            file.write(f"{prediction} ||| {sentence}\n")


def print_accuracy(split: str, path: str, result: Evaluation) -> None:
    """The contract's line, or a line that says why there is no accuracy."""
    if split == "test" and not result.has_gold_labels:
        print(f"test: {path} has no gold labels (every label is {result.labels[0]}), so there is no accuracy")
    else:
        print(f"{split} acc :: {result.accuracy:.3f}")


def print_report(split: str, result: Evaluation, label_names: list[str]) -> None:
    """Precision, recall, F1 and support of each class, macro-F1, and the majority-class accuracy."""
    from sklearn.metrics import classification_report, f1_score

    if split == "test" and not result.has_gold_labels:
        return
    classes = list(range(len(label_names)))
    scoring = dict(y_true=result.labels, y_pred=result.predictions, labels=classes, zero_division=0)
    print(f"\n{split}, per class:")
    print(classification_report(**scoring, target_names=label_names, digits=3).rstrip())
    print(f"{split} macro-F1 :: {f1_score(**scoring, average='macro'):.3f}")
    print(f"{split} majority-class acc :: {result.majority_accuracy:.3f}")


def predict_and_report(
    args: Namespace,
    model: torch.nn.Module,
    datasets: dict[str, LlamaDataset],
    label_names: list[str],
    device: torch.device,
    world: World,
) -> None:
    """Predict dev and test, write both files, print the accuracies, then the tables."""
    from training import evaluate

    results = {}
    for split in ("dev", "test"):
        dataset = datasets[split]
        loader = make_loader(args, dataset, model.llama, device)
        results[split] = evaluate(model, loader, device, desc=split, world=world)
        if world.is_first:
            write_predictions(getattr(args, f"{split}_out"), dataset.sentences, results[split])
        print_accuracy(split, getattr(args, split), results[split])
    for split, result in results.items():
        print_report(split, result, label_names)


# ---------------------------------------------------------------------------------------- the three commands


def generate(args: Namespace) -> None:
    """Continue the prompt at temperature 0 and at temperature 1, printing as it grows, and write every text."""
    import torch

    llama, tokenizer, device = load_llama(args)
    ids = tokenizer.encode(args.prompt, bos=True, eos=False)
    warn_of_changes(args.prompt, ids, tokenizer, llama.config.max_seq_len)
    prompt_ids = torch.tensor([ids], device=device)  # 1 s
    decoder = make_decoder(args, llama, device)
    outputs = {0.0: [Path(args.generated_sentence_low_temp_out)], 1.0: sample_paths(args)}
    for temperature, paths in outputs.items():
        print(f"Temperature is {temperature}")
        stream = TextStream(tokenizer, prompt_ids[0].tolist())
        rows = decoder.generate(
            prompt_ids.expand(len(paths), -1),
            args.max_new_tokens,
            temperature=temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            epsilon=args.epsilon,
            on_token=stream if len(paths) == 1 else None,
        )
        sentences = [tokenizer.decode(ids.tolist()) for ids in rows]
        print("\n".join([sentences[0].removeprefix(stream.shown), *sentences[1:]]))
        print("---------------")
        for path, sentence in zip(paths, sentences, strict=True):
            with atomic_write(path) as file:
                file.write(sentence)
            print(f"Wrote generated sentence to {path}.")


def warn_of_changes(prompt: str, ids: list[int], tokenizer: Tokenizer, limit: int) -> None:
    """Say where the text that is continued is not the one that was given."""
    if len(ids) > limit:
        warn(f"--prompt is {len(ids)} tokens long, of which the model sees the last {limit} (max_seq_len)")
    if tokenizer.max_len is None and (text := tokenizer.decode(ids)) != prompt:
        warn(f"the tokenizer changes --prompt, white space for instance; the text begins {shown(text)}")


class TextStream:
    """Prints a text while its tokens arrive. `shown` is what stands on the screen: a beginning of the final text."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int]):
        self.tokenizer = tokenizer
        self.ids = ids
        self.shown = ""

    def __call__(self, new_ids: torch.Tensor) -> None:
        """new_ids: 1 1"""
        self.ids.append(int(new_ids))
        text = self.tokenizer.decode(self.ids)
        # a letter of several byte tokens is not a letter before its last byte: wait for it
        if text.startswith(self.shown) and not text.endswith("\ufffd"):
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text


def prompt(args: Namespace, world: World) -> None:
    """Zero-shot classification: which label name does the language model expect after the prompt?"""
    from classifier import LlamaZeroShotClassifier, prompt_suffix

    splits, label_names = read_data(args)
    llama, tokenizer, device = load_llama(args)
    model = LlamaZeroShotClassifier(SimpleNamespace(num_labels=len(label_names)), tokenizer, label_names, llama=llama)
    world.spread(model, device)
    suffix = prompt_suffix(label_names)
    datasets = {
        split: make_dataset(splits[split], getattr(args, split), llama, tokenizer, suffix) for split in ("dev", "test")
    }
    predict_and_report(args, model, datasets, label_names, device, world)


def finetune(args: Namespace, world: World) -> None:
    """Train a head and the Llama below it, keep the best epoch by dev accuracy, and predict dev and test with it."""
    from classifier import LlamaEmbeddingClassifier
    from optimizer import AdamW
    from training import best_of, fit, load_best

    splits, label_names = read_data(args)
    llama, tokenizer, device = load_llama(args)
    settings = SimpleNamespace(
        num_labels=len(label_names),
        hidden_dropout_prob=args.hidden_dropout_prob,
        option=args.option,
        pad_id=tokenizer.pad_id,
    )
    model = LlamaEmbeddingClassifier(settings, llama=llama)
    world.spread(model, device)
    datasets = {split: make_dataset(splits[split], getattr(args, split), llama, tokenizer) for split in splits}
    optimizer = AdamW(model.parameters(), lr=args.lr)
    model_config = {**vars(settings), "model_args": vars(llama.config)}
    with ExitStack() as held:  # the lock on the run's name
        checkpoints = open_checkpoints(args, model_config, label_names, world, held)
        history = take_up(args, checkpoints, model, optimizer, world)
        epochs = fit(
            model,
            optimizer,
            make_loader(args, datasets["train"], llama, device, shuffle=True),
            make_loader(args, datasets["dev"], llama, device),
            epochs=args.epochs,
            device=device,
            checkpoints=checkpoints,
            history=history,
            train_eval=not args.no_train_eval,
            world=world,
        )
        run_epochs(epochs, history, checkpoints)
        load_best(model, checkpoints.model_path, world, identity=checkpoints.identity, epoch=best_of(history).epoch)
        print(f"load model from {checkpoints.model_path}")
        predict_and_report(args, model, datasets, label_names, device, world)
        print_epoch_table(history)
        if world.is_first:
            checkpoints.resume_path.unlink(missing_ok=True)


def run_epochs(epochs: Iterator[EpochResult], history: list[EpochResult], checkpoints: Checkpoints) -> None:
    """Train to the end, adding to `history` and printing; what stops it earlier says what is kept."""
    try:
        for result in epochs:
            history.append(result)
            print_epoch(result, checkpoints.model_path)
    except (UserError, KeyboardInterrupt) as error:
        raise type(error)(f"{str(error) or 'interrupted'}; {what_is_kept(history, checkpoints)}") from None


def print_epoch(result: EpochResult, model_path: Path) -> None:
    if result.improved:
        print(f"save the model to {model_path}")
    print(
        f"epoch {result.epoch}: train loss :: {result.train_loss:.3f}, "
        f"train acc :: {result.train_acc:.3f}, dev acc :: {result.dev_acc:.3f}",
        flush=True,
    )


def print_epoch_table(history: list[EpochResult]) -> None:
    from training import best_of

    print("\nepoch  train loss  train acc  dev acc  seconds")
    best = best_of(history)
    for result in history:
        mark = "  <- best on dev, used for the predictions" if result is best else ""
        print(
            f"{result.epoch:5d}  {result.train_loss:10.3f}  {result.train_acc:9.3f}  {result.dev_acc:7.3f}  "
            f"{result.seconds:7.1f}{mark}"
        )


# ------------------------------------------------------------------------------- where a fine-tuned model goes


def open_checkpoints(
    args: Namespace, model_config: dict[str, Any], label_names: list[str], world: World, held: ExitStack
) -> Checkpoints:
    """Choose the files of this run, and say what will be overwritten. held: keeps the lock on their name."""
    from training import Checkpoints

    identity = {
        "train": sha256_of(args.train),
        "dev": sha256_of(args.dev),
        "checkpoint": sha256_of(args.pretrained_model_path),
        "tokenizer": sha256_of(args.tokenizer),
        "label names": label_names,
        "attention": model_config["model_args"]["attention"],
    }
    flags = ("seed", "epochs", "lr", "batch_size", "hidden_dropout_prob", "max_sentence_len", "precision")
    identity |= {f"--{flag}": getattr(args, flag) for flag in flags}
    model_path = world.from_first(lambda: choose_model_path(args, identity, held))
    resume_path = model_path.with_suffix(".resume")
    if not args.resume:
        if resume_path.exists():
            print(f"{resume_path} is the resume point of an interrupted run; the first epoch will overwrite it")
            print("(to go on with that run instead, stop this one now and add --resume)", flush=True)
        if model_path.exists():
            print(f"{model_path} holds an earlier model of the same training data; the first epoch will overwrite it")
    return Checkpoints(
        model_path=model_path,
        resume_path=resume_path,
        model_config=model_config,
        args=vars(args),
        identity=identity,
    )


def contract_model_path(args: Namespace) -> Path:
    return Path(f"{args.option}-{args.epochs}-{args.lr}.pt")


def model_candidates(args: Namespace) -> list[Path]:
    """Where the fine-tuned model may go: the contract's name, and two that tell the data as well."""
    path = contract_model_path(args)
    suffixes = Path(args.train).stem, sha256_of(args.train)[:12]
    return [path, *(path.with_stem(f"{path.stem}-{suffix}") for suffix in suffixes)]


def choose_model_path(args: Namespace, identity: dict[str, Any], held: ExitStack) -> Path:
    """The contract's name, unless a model that was trained on other data, or is not ours, has it, or a run that lives.

    A run on other data with the same hyper-parameters would be lost without a word otherwise. With --resume, the name
    whose resume point is this run's. The lock on the name goes to `held`.
    """
    from storage import NameLock
    from training import identity_of

    candidates, own, reasons = model_candidates(args), [], []
    if args.resume:
        own = [path for path in candidates if identity_of(path.with_suffix(".resume")) == identity]
    for candidate in own or candidates:
        lock = NameLock(candidate.with_suffix(".lock"))
        if holder := lock.acquire():
            reasons.append(f"{candidate} is in use by {holder}")
            continue
        is_ours = bool(own) or identity_of(candidate).get("train") == identity["train"]
        if is_ours or not candidate.exists():
            held.callback(lock.release)
            break
        lock.release()
        reasons.append(f"{candidate} belongs to something else and is kept")
    else:
        raise UserError(f"{'; '.join(reasons)}; run in another folder")
    if reasons:
        print(f"{'; '.join(reasons)}; this run saves to {candidate}")
    return candidate


def take_up(
    args: Namespace, checkpoints: Checkpoints, model: torch.nn.Module, optimizer: Any, world: World
) -> list[EpochResult]:
    """With --resume, go back to the last finished epoch. Returns the epochs that are done."""
    if not args.resume:
        return []
    if not world.from_first(checkpoints.resume_path.is_file):
        print(f"there is no resume point {checkpoints.resume_path}; starting from the beginning")
        for line in world.from_first(lambda: other_resume_points(args, checkpoints)):
            print(line)
        return []
    history = checkpoints.load_resume_point(model, optimizer, world)
    print(f"resuming from {checkpoints.resume_path}")
    for result in history:
        print_epoch(result, checkpoints.model_path)
    return history


def other_resume_points(args: Namespace, checkpoints: Checkpoints) -> list[str]:
    """A line for each resume point that lies here and is of another run."""
    from training import differences, identity_of

    lines = []
    for path in sorted(Path().glob(f"{args.option}-*.resume")):
        if identity := identity_of(path):
            lines.append(f"{path} is of a run with another {some(differences(checkpoints.identity, identity))}")
    return lines


def what_is_kept(history: list[EpochResult], checkpoints: Checkpoints) -> str:
    if not history:
        return "no epoch was finished, nothing was saved"
    return (
        f"the best of {len(history)} finished epochs stays in {checkpoints.model_path}, "
        f"and --resume goes on from {checkpoints.resume_path}"
    )


# --------------------------------------------------------------------------------------------------- processes


@contextmanager
def join_world(args: Namespace) -> Iterator[World]:
    """The processes of this run: this one alone, or those that torchrun started."""
    if not is_one_of_several():
        from training import ALONE

        yield ALONE
        return
    try:
        from fast.distributed import join
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("fast"):
            raise
        raise UserError("several processes need the folder fast/ of this package beside run_llama.py") from None
    with join(choose_device(args.device, args.use_gpu), shard=args.shard) as group:
        group.require_alike(_facts(args))
        yield group


def _facts(args: Namespace) -> dict[str, Any]:
    """What must be equal on every machine: the contents of the input files, and the flags that name no file."""
    inputs = ("train", "dev", "test", "label_names", "pretrained_model_path", "tokenizer")
    facts = {name: value for name, value in vars(args).items() if name not in inputs and not name.endswith("_out")}
    return facts | {name: sha256_of(getattr(args, name)) for name in inputs if getattr(args, name) is not None}


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
    check_args(args)
    if os.environ.get("RANK", "0") == "0":
        announce(args)
    with join_world(args) as world:
        seed_everything(args.seed)
        if args.option == "generate":
            generate(args)
        else:
            {"prompt": prompt, "finetune": finetune}[args.option](args, world)


if __name__ == "__main__":
    sys.exit(run_main(main))
