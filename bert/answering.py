"""Question answering from the command line: fine-tuning on SQuAD's format, answers and official scores, one question.

Question and paragraph are two segments, a start and an end vector say where the answer stands (Devlin et al. 2019,
sections 4.2 and 4.3). As in the script published with it, the rate rises over the first tenth of the steps and falls to
nothing, gradients are clipped at 1, and matrices have a weight decay of .01. Otherwise than there, Adam's betas are .9
and .95 (there .9 and .999), its eps 1e-8 (1e-6), and its averages are corrected for their beginning; the rate begins
above 0 and falls from its highest value (there from .9 of it); 2 epochs of batches of 16 are the defaults (3 of 32).
An answer is given where it scores more than none: the paper chooses that bound on dev, here it is 0.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from advanced import create
from bert.directory import DirectoryCheckpointer
from bert.heads import BertForQuestionAnswering
from bert.load import check_pairs, load_model, load_tokenizer
from bert.spans import SpanData, SpanEvaluation, Spans
from bert.squad import Question, Scores, read_squad, trainable_questions
from bert.wordpiece import WordPiece
from convert.directory import BESIDE_BERT, SAFETENSORS, lock_of
from engine.methods import EpochResult
from engine.plan import ComputeSettings, checksum
from engine.runs import compute_fast, update_fast
from engine.text.flags import Outputs, follow
from engine.text.runs import alone, make_optimizer, resume
from engine.training import Trainer, evaluate
from utils import UserError, atomic_write, choose_device, sha256_of

SCORES_FILE, FINETUNING_POINT = "scores.json", "finetuning.resume"
WINDOW_LENGTH = 384  # tokens in a window, as in the code that was published with the paper
IDENTITY_FLAGS = ("epochs", "lr", "batch_size", "length", "stride", "seed")


def run(args: Namespace) -> None:
    compute = ComputeSettings(choose_device(args.device, args.use_gpu), args.kernels)
    if args.train is not None:
        train(args, compute)
    elif args.dev is not None:
        asked = read_squad(args.dev)
        model, tokenizer = answering_model(args)
        report(args, evaluate_on_dev(args, asked, model, tokenizer, compute))
    else:
        answer(args, compute)


def answer(args: Namespace, compute: ComputeSettings) -> None:
    """One question on one paragraph."""
    model, tokenizer = answering_model(args)
    question = Question("0", args.text, args.text_b, ())
    data = SpanData([question], tokenizer, args.length, args.stride)
    found = evaluate(model.to(compute.device), data.loader(args.batch_size), task=Spans(True)).predictions["0"]
    print(f"answer: {found}" if found else "the paragraph does not say it")


def answering_model(args: Namespace) -> tuple[BertForQuestionAnswering, WordPiece]:
    """The model and the tokenizer of --pretrained-model-path. Raises `UserError` if it has no trained head."""
    model, new = load_model(args.pretrained_model_path, BertForQuestionAnswering)
    if new:
        raise UserError(f"{args.pretrained_model_path} has no head for answers; train one with --train and --model_out")
    _check_shape(args, model)
    print(f"load model from {args.pretrained_model_path}")
    return model, load_tokenizer(args.pretrained_model_path)


def _check_shape(args: Namespace, model: nn.Module) -> None:
    check_pairs(model.encoder, args.pretrained_model_path)
    positions = model.encoder.config.max_seq_len
    if args.length is None:
        args.length = min(WINDOW_LENGTH, positions)
    elif args.length > positions:
        raise UserError(f"--length {args.length}: the model has {positions} positions")


def evaluate_on_dev(
    args: Namespace,
    asked: tuple[list[Question], bool],
    model: nn.Module,
    tokenizer: WordPiece,
    compute: ComputeSettings,
) -> SpanEvaluation:
    """asked: what `read_squad` has read."""
    questions, may_be_unanswered = asked
    data = SpanData(questions, tokenizer, args.length, args.stride)
    compute_fast(model, compute, trains=False)
    return evaluate(model, data.loader(args.batch_size), task=Spans(may_be_unanswered), desc="dev")


def report(args: Namespace, found: SpanEvaluation) -> None:
    print(line_of(found.scores))
    if args.dev_out is not None:
        with atomic_write(args.dev_out) as file:
            file.write(json.dumps(found.predictions, ensure_ascii=False, indent=1) + "\n")
        print(f"wrote {args.dev_out}")


def line_of(scores: Scores) -> str:
    parts = [f"dev exact match :: {scores.exact:.2f}, dev F1 :: {scores.f1:.2f} ({scores.total} questions)"]
    if scores.answered_f1 is not None:
        parts.append(f"F1 of answered ones :: {scores.answered_f1:.2f}")
    if scores.unanswered_f1 is not None:
        parts.append(f"of those without an answer :: {scores.unanswered_f1:.2f}")
    return ", ".join(parts)


# --------------------------------------------------------------------------------------------------- training


def outputs_of(args: Namespace) -> Outputs:
    out, beside = args.out, tuple(args.out / name for name in BESIDE_BERT)
    inputs = args.train, args.dev, *(Path(args.pretrained_model_path, name) for name in args.model_files)
    figures, point = out / SCORES_FILE, out / FINETUNING_POINT
    return Outputs(out / SAFETENSORS, beside, figures, point, lock_of(out), "--model_out", inputs)


def train(args: Namespace, compute: ComputeSettings) -> None:
    """Fine-tune, then answer --dev with the best epoch, loaded from its files."""
    args.out = Path(args.model_out)
    outputs = outputs_of(args)
    outputs.check(args)
    questions, asked = trainable_questions(args.train, read_squad(args.train)[0]), read_squad(args.dev)
    epochs = alone(args, outputs, lambda: _epochs(args, questions, asked, outputs, compute))
    rows = ({"epoch": each.epoch, "loss": each.train_loss, "f1": 100 * each.dev_score} for each in epochs)
    follow(args, outputs, rows, "epoch {epoch}: train loss :: {loss:.3f}, dev F1 :: {f1:.2f}".format_map)
    print(f"save the model to {args.out}")
    best, _ = load_model(args.out, BertForQuestionAnswering)
    found = evaluate_on_dev(args, asked, best, load_tokenizer(args.out), compute)
    with atomic_write(outputs.figures) as file:
        file.write(json.dumps(found.scores._asdict(), indent=1) + "\n")
    report(args, found)


def _epochs(
    args: Namespace,
    questions: list[Question],
    asked: tuple[list[Question], bool],
    outputs: Outputs,
    compute: ComputeSettings,
) -> Iterator[EpochResult]:
    torch.manual_seed(args.seed)
    model, new = load_model(args.pretrained_model_path, BertForQuestionAnswering)
    tokenizer = load_tokenizer(args.pretrained_model_path)
    print(f"load model from {args.pretrained_model_path}{', with a new head' if new else ''}")
    _check_shape(args, model)
    of_dev, may_be_unanswered = asked
    data, dev = (SpanData(each, tokenizer, args.length, args.stride) for each in (questions, of_dev))
    print(f"{len(questions)} questions in {len(data)} windows to train on, {len(of_dev)} in {len(dev)} to be answered")
    compute_fast(model, compute)
    optimizer = update_fast(make_optimizer(model, args.lr, 0.01), compute.kernels)
    methods = [create("schedule", {"warmup": 0.1, "decay": "linear"})]
    identity = {
        "train": sha256_of(args.train),
        "dev": sha256_of(args.dev),
        "init": checksum(args.pretrained_model_path),
        "model_args": asdict(model.encoder.config),
        **{name: getattr(args, name) for name in IDENTITY_FLAGS},
    }
    checkpointer = DirectoryCheckpointer(
        outputs.model, outputs.point, {}, identity, args.epochs, methods, flag=outputs.flag, tokenizer=tokenizer
    )
    history = resume(args, checkpointer, model, optimizer)
    yield from history
    loaders = data.loader(args.batch_size, shuffle=True), dev.loader(args.batch_size)
    trainer = Trainer(
        model, optimizer, Spans(may_be_unanswered), methods, checkpointer,
        seed=args.seed, clip=1.0, train_eval=False, history=list(history),
    )  # fmt: skip
    yield from trainer.fit(*loaders, args.epochs)
    checkpointer.resume_path.unlink(missing_ok=True)
