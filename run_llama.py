"""The driver: generate text, classify zero-shot, fine-tune a classifier, predict with it, measure perplexity.

    python run_llama.py --option generate
    python run_llama.py --option prompt   --train F --dev F --test F --label-names F --dev_out F --test_out F
    python run_llama.py --option finetune --train F --dev F --test F --label-names F --dev_out F --test_out F
    python run_llama.py --option predict --model SAVED.pt --input F [--output F]
    python run_llama.py --option perplexity --input F --attention causal

The flags and their checks are in arguments.py, what is computed in runs.py; all printing is here. PyTorch is imported
after the arguments have been checked, so that `--help` and every argument error answer at once.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from arguments import (
    DEFAULT_CHECKPOINT,
    INPUTS,
    check_args,
    check_overlaps,
    files_of_model,
    get_args,
    is_one_of_several,
    model_candidates,
    sample_paths,
)
from course import Example, create_data, format_line, prompt_suffix, read_label_names
from sentences import read_sentences
from utils import (
    Default,
    UserError,
    atomic_write,
    choose_device,
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

    from batches import LlamaDataset
    from config import LlamaConfig
    from llama import Llama
    from plan import Plan
    from runs import Place, Prediction, Run
    from saver import Saver
    from tasks import Evaluation, World
    from tokenizer import Tokenizer
    from training import EpochResult

# ----------------------------------------------------------------------------------- what the commands share


def place_of(args: Namespace) -> Place:
    from runs import Place

    return Place(choose_device(args.device, args.use_gpu), args.kernels, args.shard)


def load_llama(args: Namespace) -> tuple[Llama, Tokenizer]:
    from runs import load_llama

    with naming_the_tokenizers_flag():
        llama, tokenizer = load_llama(args.pretrained_model_path, args.tokenizer, args.attention, args.max_sentence_len)
    print_model(args, llama)
    return llama, tokenizer


@contextmanager
def naming_the_tokenizers_flag() -> Iterator[None]:
    from runs import OtherVocabulary

    try:
        yield
    except OtherVocabulary as error:
        raise UserError(f"{error}; name the right one with --tokenizer") from None


def print_model(args: Namespace, llama: Llama) -> None:
    print(f"load model from {args.pretrained_model_path} (attention: {llama.config.attention})")


def read_data(args: Namespace) -> tuple[dict[str, list[Example]], list[str]]:
    """The three splits and the label names, everything checked. Prints a line a file."""
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


def encode(
    args: Namespace,
    splits: dict[str, list[Example]],
    tokenizer: Tokenizer,
    config: LlamaConfig,
    prompt_suffix: str | None = None,
) -> dict[str, LlamaDataset]:
    """Encode the splits, and warn of sentences beyond the model's length."""
    import runs

    datasets = {}
    for split, examples in splits.items():
        datasets[split] = dataset = runs.encode(examples, tokenizer, config, prompt_suffix)
        if dataset.too_long:
            what = "cut" if config.is_causal else "used whole, as the reference does"
            limit = f"max_seq_len={config.max_seq_len} tokens"
            warn(f"{getattr(args, split)}: {dataset.too_long} sentences are longer than {limit}; {what}")
    return datasets


def write_predictions(path: str, sentences: list[str], result: Evaluation) -> None:
    """The output file: one `PREDICTED ||| sentence` a line."""
    with atomic_write(path) as file:
        for prediction, sentence in zip(result.predictions, sentences, strict=True):
            file.write(f"{format_line(prediction, sentence)}\n")


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
    from runs import loader_of
    from training import evaluate

    results = {}
    for split in ("dev", "test"):
        dataset = datasets[split]
        loader = loader_of(dataset, model.llama.config, args.batch_size, device)
        results[split] = evaluate(model, loader, desc=split, world=world)
        if world.is_first:
            write_predictions(getattr(args, f"{split}_out"), dataset.sentences, results[split])
        print_accuracy(split, getattr(args, split), results[split])
    for split, result in results.items():
        print_report(split, result, label_names)


# ------------------------------------------------------------------------------------------- generate, prompt


def generate(args: Namespace) -> None:
    """Continue the prompt at temperature 0 and at temperature 1, printing as it grows, and write every text."""
    import torch

    from runs import generator_of

    place = place_of(args)
    llama, tokenizer = load_llama(args)
    one_by_one = 2 if args.num_samples == 1 else 1  # texts; several samples are decoded together
    generator = generator_of(llama, args.precision, place, one_by_one * args.max_new_tokens, args.cuda_graphs)
    ids = tokenizer.encode(args.prompt, bos=True, eos=False)
    warn_of_changes(args.prompt, ids, tokenizer, llama.config.max_seq_len)
    prompt_ids = torch.tensor([ids], device=place.device)  # 1 s
    outputs = {0.0: [Path(args.generated_sentence_low_temp_out)], 1.0: sample_paths(args)}
    for temperature, paths in outputs.items():
        print(f"Temperature is {temperature}")
        stream = TextStream(tokenizer, prompt_ids[0].tolist())
        rows = generator.generate(
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
    from classifier import LlamaZeroShotClassifier
    from runs import compute_fast

    place = place_of(args)
    splits, label_names = read_data(args)
    llama, tokenizer = load_llama(args)
    model = LlamaZeroShotClassifier(SimpleNamespace(num_labels=len(label_names)), tokenizer, label_names, llama=llama)
    compute_fast(model, args.precision, place, trains=False)
    world.spread(model, place.device)
    splits.pop("train", None)
    datasets = encode(args, splits, tokenizer, llama.config, prompt_suffix(label_names))
    predict_and_report(args, model, datasets, label_names, place.device, world)


# --------------------------------------------------------------------------------------------------- finetune


def finetune(args: Namespace, world: World) -> None:
    """Train a head and the Llama below it, keep the best epoch by dev accuracy, and predict dev and test with it."""
    import runs
    from saver import best_of

    place = place_of(args)
    splits, label_names = read_data(args)
    with naming_the_tokenizers_flag():
        run = runs.assemble(plan_of(args, label_names), place, world)
    print_model(args, run.model.llama)
    datasets = encode(args, splits, run.tokenizer, run.config)
    with ExitStack() as held:  # the lock on the run's name
        saver = open_saver(args, run, held)
        history = resume(args, run, saver) if args.resume else []
        train, dev = datasets["train"], datasets["dev"]
        epochs = runs.fine_tune(run, train, dev, saver, history=history, train_eval=not args.no_train_eval)
        run_epochs(epochs, history, saver)
        del run, epochs  # the model is made anew from what was saved
        model, saved = runs.load_classifier(saver.model_path, world)
        if (saved.identity, saved.epoch) != (saver.identity, best_of(history).epoch):
            raise UserError(f"{saver.model_path} is not what this run saved: another process has replaced it")
        runs.compute_fast(model, args.precision, place)
        world.spread(model, place.device)
        print(f"load model from {saver.model_path}")
        predict_and_report(args, model, datasets, label_names, place.device, world)
        print_epoch_table(history)
        if world.is_first:
            saver.resume_path.unlink(missing_ok=True)


def plan_of(args: Namespace, label_names: list[str]) -> Plan:
    from plan import InputFile, Plan

    names = ("seed", "epochs", "lr", "batch_size", "hidden_dropout_prob", "max_sentence_len", "methods", "attention")
    return Plan(
        checkpoint=InputFile.of(args.pretrained_model_path),
        tokenizer=InputFile.of(args.tokenizer),
        train=InputFile.of(args.train),
        dev=InputFile.of(args.dev),
        label_names=tuple(label_names),
        precision=str(args.precision),
        **{name: getattr(args, name) for name in names},
    )


def open_saver(args: Namespace, run: Run, held: ExitStack) -> Saver:
    """Choose the files of this run, and say what will be overwritten. held: keeps the lock on their name."""
    import runs
    from saver import choose_model_path

    candidates, identity = model_candidates(args, run.plan.digest), run.plan.identity()
    if args.methods:  # their name is known only now
        check_overlaps(args, files_of_model(candidates[0]))
    path, kept = run.world.from_first(lambda: choose_model_path(candidates, identity, args.resume, held))
    if kept:
        print(f"{'; '.join(kept)}; this run saves to {path}")
    saver = runs.saver_for(run, path, path.with_suffix(".resume"))
    if not args.resume:
        if saver.resume_path.exists():
            print(f"{saver.resume_path} is the resume point of an interrupted run; the first epoch will overwrite it")
            print("(to go on with that run instead, stop this one now and add --resume)", flush=True)
        if path.exists():
            print(f"{path} holds an earlier model of the same training data; the first epoch will overwrite it")
    return saver


def resume(args: Namespace, run: Run, saver: Saver) -> list[EpochResult]:
    """Go back to the last finished epoch. Returns the epochs that are done."""
    from saver import BadResumePoint, OtherRun, other_resume_points

    if not run.world.from_first(saver.resume_path.is_file):
        print(f"there is no resume point {saver.resume_path}; starting from the beginning")
        for path, differing in run.world.from_first(lambda: other_resume_points(f"{args.option}-*", saver.identity)):
            print(f"{path} is of a run with another {some(map(name_of, differing))}")
        return []
    try:
        history = saver.load_resume_point(run.model, run.optimizer)
    except OtherRun as error:
        other = f"{saver.resume_path} belongs to a run with another {some(map(name_of, error.differing))}"
        raise UserError(f"{other}; use the same arguments, or leave out --resume to start anew") from None
    except BadResumePoint as error:
        raise UserError(f"{error}, or leave out --resume to start anew") from None
    print(f"resuming from {saver.resume_path}")
    for result in history:
        print_epoch(result, saver.model_path)
    return history


def name_of(entry: str) -> str:
    """What the user calls an entry of a run's identity: a file, or a flag."""
    files = ("train", "dev", "checkpoint", "tokenizer", "label_names", "attention", "option")
    return entry.replace("_", " ") if entry in files else "--method" if entry == "methods" else f"--{entry}"


def run_epochs(epochs: Iterator[EpochResult], history: list[EpochResult], saver: Saver) -> None:
    """Train to the end, adding to `history` and printing; what stops it earlier says what is kept."""
    from training import Diverged

    try:
        for result in epochs:
            history.append(result)
            print_epoch(result, saver.model_path)
    except Diverged as error:
        raise UserError(f"{error}; try a smaller --lr; {what_is_kept(history, saver)}") from None
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{str(error) or 'interrupted'}; {what_is_kept(history, saver)}") from None
    except UserError as error:
        raise UserError(f"{error}; {what_is_kept(history, saver)}") from None


def print_epoch(result: EpochResult, model_path: Path) -> None:
    if result.improved:
        print(f"save the model to {model_path}")
    if result.is_finish:
        print(f"after the last epoch: dev acc :: {result.dev_score:.3f}", flush=True)
        return
    print(
        f"epoch {result.epoch}: train loss :: {result.train_loss:.3f}, "
        f"train acc :: {result.train_score:.3f}, dev acc :: {result.dev_score:.3f}",
        flush=True,
    )


def print_epoch_table(history: list[EpochResult]) -> None:
    from saver import best_of

    print("\nepoch  train loss  train acc  dev acc  seconds")
    best = best_of(history)
    for result in history:
        mark = "  <- best on dev, used for the predictions" if result is best else ""
        print(
            f"{result.epoch:5d}  {result.train_loss:10.3f}  {result.train_score:9.3f}  {result.dev_score:7.3f}  "
            f"{result.seconds:7.1f}{mark}"
        )


def what_is_kept(history: list[EpochResult], saver: Saver) -> str:
    if not history:
        return "no epoch was finished, nothing was saved"
    return (
        f"the best of {len(history)} finished epochs stays in {saver.model_path}, "
        f"and --resume goes on from {saver.resume_path}"
    )


# ----------------------------------------------------------------------------------------- predict, perplexity


def predict(args: Namespace) -> None:
    """Classify sentences, one a line, as many as come, with what a fine-tuning has saved."""
    import runs

    place = place_of(args)
    model, saved = runs.load_classifier(args.model)
    precision = saved.precision if isinstance(args.precision, Default) and args.kernels == "auto" else args.precision
    runs.compute_fast(model, precision, place)
    predictions = runs.predict(model, saved, shown_before_waiting(read_sentences(args.input)))
    with ExitStack() as written:
        file = sys.stdout if args.output is None else written.enter_context(atomic_write(args.output))
        count = too_long = 0
        for prediction in predictions:
            file.write(line_of(prediction, args.probabilities))
            count, too_long = count + 1, too_long + prediction.is_too_long
    if too_long:
        what = "cut" if saved.config.is_causal else "used whole, as the reference does"
        warn(f"{too_long} sentences are longer than max_seq_len={saved.config.max_seq_len} tokens; {what}")
    if args.output is not None:
        print(f"wrote {count} predictions to {args.output}")


def shown_before_waiting(sentences: Iterable[str | None]) -> Iterator[str | None]:
    """None says that no sentence is at hand for now; when the next one is asked for, what was said is printed."""
    for sentence in sentences:
        yield sentence
        if sentence is None:
            sys.stdout.flush()


def line_of(prediction: Prediction, with_probabilities: bool) -> str:
    if not with_probabilities:
        return f"{format_line(prediction.label, prediction.sentence)}\n"
    probabilities = [f"{probability:.6f}" for probability in prediction.probabilities]
    sentence = prediction.sentence.replace("\t", " ")  # a tab stands between two columns
    return "\t".join((str(prediction.label), *probabilities, sentence)) + "\n"


def perplexity(args: Namespace) -> None:
    """How well the language model predicts a text."""
    import runs

    place = place_of(args)
    llama, tokenizer = load_llama(args)
    if not llama.config.is_causal:
        raise UserError("a bidirectional model sees the tokens that it would predict; add --attention causal")
    runs.compute_fast(llama, args.precision, place, trains=False)
    result = runs.perplexity(llama, tokenizer, read_text(args.input), args.batch_size)
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
    try:
        from parallel import join
    except ModuleNotFoundError as error:
        if error.name != "parallel":
            raise
        raise UserError("several processes need the folder parallel/ of this package beside run_llama.py") from None
    with join(choose_device(args.device, args.use_gpu), shard=args.shard) as group:
        group.require_alike(facts(args))
        yield group


def facts(args: Namespace) -> dict[str, Any]:
    """What must be equal on every machine: the contents of the input files, and the flags that name no file."""
    inputs = INPUTS[args.option]
    given = {name: value for name, value in vars(args).items() if name not in inputs and not name.endswith("_out")}
    return given | {name: sha256_of(getattr(args, name)) for name in inputs if getattr(args, name) is not None}


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
    if os.environ.get("RANK", "0") == "0" and args.option != "predict":  # whose output is data
        announce(args)
    with join_world(args) as world:
        seed_everything(args.seed)
        if args.option in ("prompt", "finetune"):
            {"prompt": prompt, "finetune": finetune}[args.option](args, world)
        else:
            {"generate": generate, "predict": predict, "perplexity": perplexity}[args.option](args)


if __name__ == "__main__":
    sys.exit(run_main(main))
