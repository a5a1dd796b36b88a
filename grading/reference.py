"""The whole model against reference tensors: the course's where its files are here, else the bundled ones."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import torch

from grading import small_model
from grading.editions import ATTENTION_KINDS, BUNDLED_NORM, EDITIONS, NORMS, PUBLISHED_TENSORS, Edition
from grading.parts import kind_to_judge
from grading.programs import DefaultText, GradingError, find_course_file, find_own
from grading.rotary import alike
from grading.student_process import ChildAnswer, ChildQuestion, Student, takes_attention
from grading.verdicts import small_config

ATOL, RTOL = 1e-5, 1e-3
BUNDLED_CHECKPOINT, BUNDLED_REFERENCE = "checkpoints/minllama1M.pt", "checkpoints/minllama1M-reference.pt"
# the two sequences behind the course's sanity_check.data (github.com/neubig/minllama-assignment, commit 2951cdd)
COURSE_TOKENS = ((101, 7592, 2088, 102, 0, 0, 0, 0), (101, 7592, 15756, 2897, 2005, 17953, 2361, 102))


class Reference(NamedTuple):
    """The right numbers of a checkpoint for `tokens`, b s, with one kind of attention."""

    tokens: torch.Tensor
    logits: torch.Tensor
    hidden_states: torch.Tensor
    attention: str


def load_tensors(path: str | os.PathLike) -> object:
    """The content of a file of `torch.save`: tensors and plain Python values.

    Raises `GradingError` if the file is missing, damaged (checksums are verified) or holds other objects.
    """
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                if any(record.CRC for record in archive.infolist()) and archive.testzip() is not None:
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


def check_edition(path: Path, edition: Edition) -> None:
    """Raise `GradingError` if `path` is the sanity_check.data of an edition with another norm or attention."""
    found = PUBLISHED_TENSORS.get(hashlib.sha256(path.read_bytes()).hexdigest()[:16])
    if found and found != (edition.norm, edition.attention):
        of = " and ".join(name for name, one in EDITIONS.items() if found == (one.norm, one.attention))
        raise GradingError(f"{path} is that of {of}: name it with --edition, or take the file from your hand-out")


def bundled_references(path: Path) -> list[Reference]:
    data = load_tensors(path)
    return [
        Reference(data["tokens"].clone(), data[kind]["logits"].clone(), data[kind]["hidden_states"].clone(), kind)
        for kind in ATTENTION_KINDS
    ]


def checkpoint_shape(path: Path) -> tuple[int, int]:
    """Size of the vocabulary and of a hidden state. Raises `GradingError` if the file is not a checkpoint."""
    content = load_tensors(path)
    weights = content.get("model") if isinstance(content, dict) else None
    for name in ("tok_embeddings.weight", "_orig_mod.tok_embeddings.weight"):
        table = weights.get(name) if isinstance(weights, dict) else None
        if isinstance(table, torch.Tensor) and table.dim() == 2:
            return table.shape[0], table.shape[1]
    raise GradingError(f"cannot load {path}: it is not a checkpoint of a Llama, as it has no tok_embeddings.weight")


def choose_device(name: str) -> str:
    """The device that `--device` names. Raises `GradingError` if PyTorch sees no such device."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(device for device in present if present[device]) if name == "auto" else name
    if not present[name]:
        raise GradingError(f"--device {name}: PyTorch sees no such device; use --device auto or cpu")
    return name


def check_shapes(checkpoint: Path, references: list[Reference]) -> None:
    """Raise `GradingError` if the references have other shapes than the checkpoint gives."""
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
    if (norm := small_model.NORM.get()) != BUNDLED_NORM:
        settings["norm"] = norm
    answer = student.ask(ChildQuestion("model", "llama", settings, {"tokens": reference.tokens}))
    if not answer.trouble and len(answer.tensors) != 2:
        return ChildAnswer(trouble=f"it returns {len(answer.tensors)} tensors, not logits and hidden states")
    return answer


def compare(answer: ChildAnswer, reference: Reference) -> tuple[bool, list[str]]:
    """Whether the student computed the reference within atol + rtol * |reference|, and the lines to print."""
    if answer.trouble:
        return False, [f"  {answer.line}"]
    is_right, lines = True, []
    expected_tensors = (reference.hidden_states, reference.logits)
    for name, actual, expected in zip(("hidden states", "logits"), answer.tensors, expected_tensors, strict=True):
        if actual.shape != expected.shape:
            is_close, said = False, f"{list(actual.shape)}, but the reference's are {list(expected.shape)}"
        else:
            difference = (actual.float() - expected.float()).abs()
            is_close = bool((difference <= ATOL + RTOL * expected.abs()).all())  # False for NaN as well
            relative = (difference / expected.abs().clamp(min=ATOL)).max()
            said = f"largest absolute error {difference.max():.1e}, largest relative error {relative:.1e}"
        lines.append(f"  {name:13s}  {said}: {'ok' if is_close else 'WRONG'}")
        is_right = is_right and is_close
    return is_right, lines


def check_model(student: Student, checkpoint: Path, references: list[Reference], device: str = "cpu") -> bool:
    """Check every reference; if one fails, print whether the attention mask is the cause."""
    device, passed = choose_device(device), True
    check_shapes(checkpoint, references)
    lost = None  # the answer that lost the process: the next reference would have to wait as long
    for reference in references:
        print(f"{checkpoint} with {reference.attention} attention (atol {ATOL:g}, rtol {RTOL:g}):")
        answer = lost or compute(student, checkpoint, reference, reference.attention, device)
        lost = answer if answer.is_lost else None
        is_right, lines = compare(answer, reference)
        print("\n".join(lines))
        passed = passed and is_right
        if is_right or answer.trouble or not takes_attention(student):
            continue
        other = "causal" if reference.attention == "bidirectional" else "bidirectional"
        answer = compute(student, checkpoint, reference, other, device)
        if answer.trouble:
            continue
        if compare(answer, reference)[0]:
            print(f"  The causal mask is the cause: with {other} attention the model gives exactly this reference.")
        else:
            print(f"  The causal mask is not the cause: with {other} attention the reference is missed as well.")
    return passed


class Given(NamedTuple):
    """A checkpoint and its references, in memory: the student's code can write to any file once it runs."""

    checkpoint: Path
    references: list[Reference]
    said: str
    is_bundled: bool = False


def find_given(args: Namespace, judged: Path) -> Given | None:
    """The course's files if both are here, else the bundled ones; None if only `--parts` can be checked, without them.

    judged: the student's folder, whose files do not count. Raises `GradingError` if nothing can be checked.
    """
    edition, named = EDITIONS[args.edition], (args.pretrained_model_path, args.data)
    checkpoint, reference = (find_course_file(name, judged) for name in named)
    if checkpoint and reference:
        check_edition(reference, edition)
        said = f"Checking against the course's reference tensors ({reference})."
        return Given(checkpoint, [course_reference(reference, args.attention or edition.attention)], said)
    missing = ", ".join(name for name, found in zip(named, (checkpoint, reference), strict=True) if not found)
    absent = f"{missing} does not exist; "
    if not all(isinstance(name, DefaultText) for name in named):
        raise GradingError(f"{absent}a checkpoint that you name is checked against the course's tensors")
    if edition.norm != BUNDLED_NORM and not args.parts:
        said = "has no bundled tensors; get these files, or check the parts alone: --parts"
        raise GradingError(f"not here: {missing}; {args.edition} {said}")
    bundled = (BUNDLED_CHECKPOINT, BUNDLED_REFERENCE) if edition.norm == BUNDLED_NORM else ()
    checkpoint, reference = map(find_own, bundled) if bundled else (None, None)
    if args.parts and not (checkpoint and reference):
        print(f"note: no checkpoint is here ({missing}), so the whole model was not checked", file=sys.stderr)
        return None
    if not checkpoint or not reference:
        hint = "setup.sh fetches the course's files, and --parts needs none"
        raise GradingError(f"not here: {missing}, nor the bundled checkpoint; {hint}")
    said = f"Not here: {missing}. So checking the bundled checkpoint against Hugging Face transformers' numbers."
    return Given(checkpoint, bundled_references(reference), said, is_bundled=True)


def check_sanity(student: Student, args: Namespace, given: Given | None) -> bool:
    """Whether the student's model computes the references; prints their source. True for None: nothing to compare."""
    if given is None:
        return True
    print(given.said)
    kinds = (kind_to_judge(args),) if given.is_bundled else ATTENTION_KINDS
    references = [reference for reference in given.references if reference.attention in kinds]
    return check_model(student, given.checkpoint, references, args.device)


def norm_kind(student: Student) -> str | None:
    """The norm of the student's layers, a key of `NORMS`; None if they give none. LayerNorm does not see an added 1."""
    x, settings = small_model.states(), {"config": small_config("bidirectional")}
    answer = student.ask(ChildQuestion("layer_norm_of", "llama", settings, {"x": x, "shifted": x + 1}))
    if answer.trouble or len(answer.tensors) != 2:
        return None
    return "layer" if alike(answer.tensors[:1], answer.tensors[1:]) else "rms"


def has_other_norm(student: Student, edition: str) -> bool:
    """Whether the student's layers have another norm than an edition; says so."""
    norm, found = EDITIONS[edition].norm, norm_kind(student)
    if found in (None, norm):
        return False
    print(f"{edition} has {NORMS[norm]}, and llama.py computes {NORMS[found]}: its numbers cannot be the same.")
    return True
