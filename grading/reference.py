"""The whole model against reference tensors: the course's where its files are here, else the bundled ones."""

from __future__ import annotations

import os
import sys
import zipfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch

from grading import small_model
from grading.asking import ChildAnswer, ChildQuestion, Student
from grading.compare import alike
from grading.editions import ATTENTION_KINDS, BUNDLED_NORM, EDITIONS, NORMS
from grading.parts import kinds_to_check, small_config, takes_attention
from grading.programs import DefaultText, GradingError, find_course_file, find_own

ATOL, RTOL = 1e-5, 1e-3
BUNDLED_CHECKPOINT, BUNDLED_REFERENCE = "checkpoints/minllama1M.pt", "checkpoints/minllama1M-reference.pt"
# the two sequences behind the course's sanity_check.data (github.com/neubig/minllama-assignment, commit 2951cdd)
COURSE_TOKENS = ((101, 7592, 2088, 102, 0, 0, 0, 0), (101, 7592, 15756, 2897, 2005, 17953, 2361, 102))


@dataclass
class Reference:
    """What a checkpoint should compute from `tokens` under one attention semantics."""

    tokens: torch.Tensor
    logits: torch.Tensor
    hidden_states: torch.Tensor
    attention: str


def load_tensors(path: str | os.PathLike) -> object:
    """What `torch.save` wrote to a file: tensors and plain Python values, nothing else.

    Raises `GradingError` where the file is missing, damaged (checksums are verified) or holds anything else.
    """
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                has_checksums = any(record.CRC for record in archive.infolist())
                if has_checksums and archive.testzip() is not None:
                    raise ValueError("a checksum is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise GradingError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # whatever the unpickler meets in a damaged or foreign file
        if "weights_only" in str(error) and is_zip:
            reason = "it holds Python objects other than tensors and plain values, which are never unpickled here"
        else:
            reason = "it is not a PyTorch checkpoint, or it is truncated or damaged"
        raise GradingError(f"cannot load {path}: {reason}") from None


def course_reference(path: Path, attention: str) -> Reference:
    data = load_tensors(path)
    try:
        logits, hidden_states = data["logits"], data["hidden_states"]
    except (TypeError, KeyError, IndexError):
        logits = hidden_states = None
    if not isinstance(logits, torch.Tensor) or not isinstance(hidden_states, torch.Tensor):
        raise GradingError(f"{path} does not hold the tensors 'logits' and 'hidden_states'")
    return Reference(torch.tensor(COURSE_TOKENS), logits.clone(), hidden_states.clone(), attention)


def bundled_references(path: Path) -> list[Reference]:
    data = load_tensors(path)
    copies = {kind: {name: tensor.clone() for name, tensor in data[kind].items()} for kind in ATTENTION_KINDS}
    return [Reference(data["tokens"].clone(), **copies[kind], attention=kind) for kind in ATTENTION_KINDS]


def checkpoint_shape(path: Path) -> tuple[int, int]:
    """Vocabulary and width of a checkpoint. Raises `GradingError` where it is none."""
    content = load_tensors(path)
    weights = content.get("model") if isinstance(content, dict) else None
    for name in ("tok_embeddings.weight", "_orig_mod.tok_embeddings.weight"):
        table = weights.get(name) if isinstance(weights, dict) else None
        if isinstance(table, torch.Tensor) and table.dim() == 2:
            return table.shape[0], table.shape[1]
    raise GradingError(f"cannot load {path}: it is not a checkpoint of a Llama, as it has no tok_embeddings.weight")


def choose_device(name: str) -> str:
    """The device that `--device` asks for. Raises `GradingError` where PyTorch sees no such device."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(device for device in present if present[device]) if name == "auto" else name
    if not present[name]:
        raise GradingError(f"--device {name}: PyTorch sees no such device; use --device auto or cpu")
    return name


def check_shapes(checkpoint: Path, references: list[Reference]) -> None:
    """Raise `GradingError` if checkpoint and references do not belong together."""
    size, dim = checkpoint_shape(checkpoint)
    for reference in references:
        if reference.tokens.max() >= size:
            raise GradingError(f"{checkpoint} has a vocabulary of {size}, too small for the reference's token ids")
        shape = (*reference.tokens.shape, dim)
        if reference.hidden_states.shape != shape or reference.logits.shape != (shape[0], 1, size):
            shapes = f"{list(reference.hidden_states.shape)} and {list(reference.logits.shape)}"
            raise GradingError(f"the reference's tensors are {shapes}, which is not the shape of {checkpoint}")


def compute(student: Student, checkpoint: Path, reference: Reference, attention: str, device: str) -> ChildAnswer:
    """The student's hidden states and logits."""
    settings = {"path": str(checkpoint.resolve()), "attention": attention, "device": device}
    answer = student.ask(ChildQuestion("model", "llama", settings, {"tokens": reference.tokens}))
    if not answer.trouble and len(answer.tensors) != 2:
        return ChildAnswer(trouble=f"it returns {len(answer.tensors)} tensors, not logits and hidden states")
    return answer


def agrees(answer: ChildAnswer, reference: Reference, verbose: bool = True) -> bool:
    """Whether the student computed the reference within atol + rtol * |reference|; prints the largest errors."""
    if answer.trouble:
        if verbose:
            print(f"  {answer.line}")
        return False
    verdicts = []
    expected_tensors = (reference.hidden_states, reference.logits)
    for name, actual, expected in zip(("hidden states", "logits"), answer.tensors, expected_tensors, strict=True):
        if actual.shape != expected.shape:
            verdicts.append(False)
            line = f"{list(actual.shape)}, but the reference's are {list(expected.shape)}: WRONG"
        else:
            difference = (actual.float() - expected.float()).abs()
            verdicts.append(bool((difference <= ATOL + RTOL * expected.abs()).all()))  # False for NaN as well
            relative = (difference / expected.abs().clamp(min=ATOL)).max()
            line = (
                f"largest absolute error {difference.max():.1e}, largest relative error {relative:.1e}: "
                f"{'ok' if verdicts[-1] else 'WRONG'}"
            )
        if verbose:
            print(f"  {name:13s}  {line}")
    return all(verdicts)


def check_model(student: Student, checkpoint: Path, references: list[Reference], device: str = "cpu") -> bool:
    """Check every reference; where one fails, say whether the attention mask is the cause."""
    device, passed = choose_device(device), True
    check_shapes(checkpoint, references)
    lost = None  # the answer that lost the process: the next reference would have to wait as long
    for reference in references:
        print(f"{checkpoint} with {reference.attention} attention (atol {ATOL:g}, rtol {RTOL:g}):")
        answer = lost or compute(student, checkpoint, reference, reference.attention, device)
        lost = answer if answer.is_lost else None
        if agrees(answer, reference):
            continue
        passed = False
        if answer.trouble or not takes_attention(student):
            continue
        other = "causal" if reference.attention == "bidirectional" else "bidirectional"
        if agrees(compute(student, checkpoint, reference, other, device), reference, verbose=False):
            print(f"  The causal mask is the cause: with {other} attention the model gives exactly this reference.")
        else:
            print(f"  The causal mask is not the cause: with {other} attention the reference is missed as well.")
    return passed


@dataclass
class Given:
    """A checkpoint and what it should compute, in memory: the student's code can write to any file once it runs."""

    checkpoint: Path
    references: list[Reference]
    said: str
    is_bundled: bool = False


def find_given(args: Namespace, judged: Path) -> Given | None:
    """The course's files if both are here, the bundled ones if not; None where `--parts` can do without a checkpoint.

    judged: the student's folder, whose files do not count. Raises `GradingError` where nothing can be checked.
    """
    edition = EDITIONS[args.edition]
    wanted = {name: find_course_file(name, judged) for name in (args.pretrained_model_path, args.data)}
    checkpoint, reference = wanted[args.pretrained_model_path], wanted[args.data]
    if checkpoint and reference:
        said = f"Checking against the course's reference tensors ({reference})."
        return Given(checkpoint, [course_reference(reference, args.attention or edition.attention)], said)
    missing = ", ".join(name for name, found in wanted.items() if not found)
    if not (isinstance(args.pretrained_model_path, DefaultText) and isinstance(args.data, DefaultText)):
        raise GradingError(
            f"{missing} does not exist; a checkpoint that you name is checked against the course's tensors"
        )
    if edition.norm != BUNDLED_NORM:
        raise GradingError(
            f"{missing} does not exist; {args.edition} needs it, as no bundled tensors are of that edition"
        )
    checkpoint, reference = find_own(BUNDLED_CHECKPOINT), find_own(BUNDLED_REFERENCE)
    if args.parts and not (checkpoint and reference):
        print(f"note: no checkpoint is here ({missing}), so the whole model was not checked", file=sys.stderr)
        return None
    if not checkpoint or not reference:
        hint = "setup.sh fetches the course's files, and --parts needs none"
        raise GradingError(f"not here: {missing}, nor the bundled checkpoint; {hint}")
    said = f"Not here: {missing}. So checking the bundled checkpoint against Hugging Face transformers' numbers."
    return Given(checkpoint, bundled_references(reference), said, is_bundled=True)


def check_sanity(student: Student, args: Namespace, given: Given | None) -> bool:
    """Whether the student computes what is given; says what that is."""
    if given is None:
        return True
    print(given.said)
    references = given.references
    if given.is_bundled:
        kinds = kinds_to_check(student, args.attention)
        references = [reference for reference in references if reference.attention in kinds]
    return check_model(student, given.checkpoint, references, args.device)


def norm_kind(student: Student) -> str | None:
    """How the student's layers normalise; None where they cannot be asked. LayerNorm does not see what is added."""
    x = small_model.states()
    settings = {"config": small_config("bidirectional")}
    answer = student.ask(ChildQuestion("layer_norm_of", "llama", settings, {"x": x, "shifted": x + 1}))
    if answer.trouble or len(answer.tensors) != 2:
        return None
    plain, shifted = answer.tensors
    return "layer" if alike((plain,), (shifted,)) else "rms"


def check_another_norm(student: Student, args: Namespace) -> bool:
    """Of an edition with another norm than the bundled model's, the course's tensors alone can be checked."""
    given = find_given(args, student.folder)
    norm, found = EDITIONS[args.edition].norm, norm_kind(student)
    name = NORMS[norm]
    if found not in (None, norm):
        print(f"{args.edition} has {name}, and llama.py computes {NORMS[found]}: its numbers cannot be the same.")
        return False
    print(f"note: neither the parts nor classifier.py are checked for {name}", file=sys.stderr)
    return check_sanity(student, args, given)
