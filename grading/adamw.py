"""Judging optimizer.AdamW: the formulas by hand, the usual mistakes, and the lines that `optimizer_test.py` prints."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from grading import questions
from grading.rotary import LARGEST_ERROR, Say, alike, report_error, report_verdict
from grading.small_model import SALT
from grading.student_process import ChildAnswer, ChildQuestion, Student

# The weights of the assignment's 1,000-step run, as its optimizer_test.npy publishes them
# (github.com/neubig/minllama-assignment, commit 2951cdd).
PUBLISHED_WEIGHTS = (
    (0.554827868938446, 0.8666566610336304, 0.0729198157787323),
    (-0.4472450613975525, -0.29512280225753784, -0.27172720432281494),
)
# Of the editions that clip, at max_grad_norm=0.9 (github.com/cmu-l3/anlp-fall2025-hw1, commit 36578d4). They come from
# a decay by the factor 1 - alpha_t * weight_decay, 1.5e-5 from those of lr * weight_decay: the course takes both.
CLIPPED_WEIGHTS = (
    (0.6819069981575012, 0.9682068228721619, 0.19228892028331757),
    (-0.3998804986476898, -0.2748161256313324, -0.37405914068222046),
)
TOY_STEPS, TOY_SEED = 1000, 0
COURSE_ATOL, COURSE_RTOL = 1e-5, 1e-3  # of the course's own optimizer_test.py, which looks at the first run alone
# eps is added before the bias correction here and after it in PyTorch: it must be tiny for the two to agree
WITHOUT_DECAY = {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-12}
OWN_LIMIT, COURSE_CHECK = "this package's limit", "the course's own check"  # the beginnings of two verdicts


def toy_problem(seed: int = TOY_SEED) -> dict[str, torch.Tensor]:
    """First weight, 2 3, and inputs, steps 3, of the assignment's toy problem."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    layer = torch.nn.Linear(3, 2, bias=False)
    inputs = np.array([rng.uniform(size=3) for _ in range(TOY_STEPS)])
    return {"weight": layer.weight.detach(), "inputs": torch.tensor(inputs, dtype=torch.float32)}


def has_shape_of(expected: torch.Tensor, answer: ChildAnswer) -> bool:
    return not answer.trouble and len(answer.tensors) == 1 and answer.tensors[0].shape == expected.shape


def report_run(what: str, answer: ChildAnswer, expected: torch.Tensor, say: Say = print) -> bool:
    """Print the largest error and whether it is within the tolerance."""
    if has_shape_of(expected, answer):
        return report_error(what, answer.tensors[0], expected, say)
    say(f"{what}: {answer.line or f'it is not {list(expected.shape)} numbers'}: WRONG")
    return False


# -------------------------------------------------------------------------------------------- AdamW by hand

# Two parameters, and few steps with such settings that every mistake shows.
FIRST_WEIGHTS = torch.tensor(((0.5, -0.3), (1.2, 0.8)), dtype=torch.float64)
FEW_STEPS = 5
FEW_SETTINGS = dict(lr=0.05, betas=(0.6, 0.9), eps=0.1, weight_decay=0.0, correct_bias=True)
FEW_CASES = {
    "eps 0.1": FEW_SETTINGS,
    "eps 0.1, weight decay 0.4": {**FEW_SETTINGS, "weight_decay": 0.4},
    "eps 0.1, correct_bias=False": {**FEW_SETTINGS, "correct_bias": False},
}
CLIPPED_CASES = FEW_CASES | {
    f"eps 0.1, max_grad_norm {most}": {**FEW_SETTINGS, "max_grad_norm": most} for most in (1.2, 0.7)
}


def gradients() -> torch.Tensor:
    """Of every step and both parameters: steps 2 2; a `SALT` moves the angles."""
    one = torch.arange(1, 5, dtype=torch.float64).square()
    return torch.stack([torch.sin(one + step + SALT.get()).view(2, 2) for step in range(FEW_STEPS)])


def adamw(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    correct_bias: bool,
    max_grad_norm: float = math.inf,
    first_step: int = 0,
    steps: int = FEW_STEPS,
    gradient: Callable = lambda g, p, decay: g,
    clip: Callable = lambda g, most: g * (most / (g.norm() + 1e-6)).clamp(max=1.0),
    first: Callable = lambda m, g, beta: beta * m + (1 - beta) * g,
    second: Callable = lambda v, g, beta: beta * v + (1 - beta) * g**2,
    count: Callable = lambda step: step,
    correction: Callable = lambda c1, c2: c2.sqrt() / c1,
    denominator: Callable = lambda v, eps, c2: v.sqrt() + eps,
    decay: Callable = lambda new, old, lr, alpha, decay: new - lr * decay * new,
) -> torch.Tensor:
    """The formulas of `optimizer.AdamW`'s docstring, in float64. The functions are what can go wrong.

    c1 and c2 are 1 - beta^t of the first and of the second moment.
    """
    weights, m, v = FIRST_WEIGHTS, torch.zeros_like(FIRST_WEIGHTS), torch.zeros_like(FIRST_WEIGHTS)
    for step, g in enumerate(gradients()[first_step:steps], 1):
        g = gradient(clip(g, max_grad_norm), weights, weight_decay)
        m, v = first(m, g, betas[0]), second(v, g, betas[1])
        c1, c2 = (1 - torch.tensor(beta if correct_bias else 0.0, dtype=torch.float64) ** count(step) for beta in betas)
        alpha = lr * correction(c1, c2) if correct_bias else lr
        weights = decay(weights - alpha * m / denominator(v, eps, c2), weights, lr, alpha, weight_decay)
    return weights


def few_steps_by_hand(cases: dict[str, dict] = FEW_CASES, **wrong) -> dict[str, torch.Tensor]:
    """What AdamW makes of `FIRST_WEIGHTS` in every case. wrong: keywords of `adamw` that differ."""
    return {what: adamw(**{**settings, **wrong}) for what, settings in cases.items()}


BY_ALPHA = dict(decay=lambda new, old, lr, alpha, decay: new - alpha * decay * new)


ADAMW_MISTAKES: dict[str, dict] = {
    "the weight decay comes before the update; subtract lr * weight_decay * p after it, of the new p":
        dict(decay=lambda new, old, lr, alpha, decay: new - lr * decay * old),
    "the weight decay is scaled by alpha_t, the corrected step size; it is lr * weight_decay * p": BY_ALPHA,
    "the weight decay comes before the update and is scaled by alpha_t; it is lr * weight_decay * p, after it":
        dict(decay=lambda new, old, lr, alpha, decay: new - alpha * decay * old),
    "the weight decay lacks lr; it is lr * weight_decay * p":
        dict(decay=lambda new, old, lr, alpha, decay: new - decay * new),
    "the weight decay has the wrong sign: it makes weights grow":
        dict(decay=lambda new, old, lr, alpha, decay: new + lr * decay * new),
    "the weight decay is added to the gradient (L2 regularization); AdamW decouples it from the moments":
        dict(gradient=lambda g, p, decay: g + decay * p, decay=lambda new, *_: new),
    "there is no weight decay": dict(weight_decay=0.0),
    "there is no bias correction: alpha_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)": dict(correct_bias=False),
    "correct_bias=False is ignored": dict(correct_bias=True),
    "the bias correction lacks sqrt(1 - beta2^t)": dict(correction=lambda c1, c2: 1 / c1),
    "the bias correction lacks the division by 1 - beta1^t": dict(correction=lambda c1, c2: c2.sqrt()),
    "the bias correction lacks the root of 1 - beta2^t": dict(correction=lambda c1, c2: c2 / c1),
    "the bias correction is upside down: it is sqrt(1 - beta2^t) / (1 - beta1^t)":
        dict(correction=lambda c1, c2: c1 / c2.sqrt()),
    "the bias correction has beta1 and beta2 exchanged": dict(correction=lambda c1, c2: c1.sqrt() / c2),
    "the step is counted from 0, where 1 - beta^t is 0; count it before it is used": dict(count=lambda step: step - 1),
    "the first step is counted as the second": dict(count=lambda step: step + 1),
    "the step stays 1; it is counted in the state of each parameter": dict(count=lambda step: 1),
    "eps stands inside the root; it is sqrt(v) + eps": dict(denominator=lambda v, eps, c2: (v + eps).sqrt()),
    "eps stands inside the root of the bias-corrected v; it is sqrt(v) + eps, of v as it is":
        dict(denominator=lambda v, eps, c2: (v + eps * c2).sqrt()),
    "eps is added after the bias correction, as in torch.optim.AdamW; it is sqrt(v) + eps, of v as it is":
        dict(denominator=lambda v, eps, c2: v.sqrt() + eps * c2.sqrt()),
    "eps is scaled by 1 - beta2^t; it is sqrt(v) + eps": dict(denominator=lambda v, eps, c2: v.sqrt() + eps * c2),
    "eps is missing, or not the one that was given; it is sqrt(v) + eps": dict(eps=0.0),
    "the root of the second moment is missing; it is sqrt(v) + eps": dict(denominator=lambda v, eps, c2: v + eps),
    "beta1 and beta2 are exchanged; beta1 is the first moment's": dict(betas=FEW_SETTINGS["betas"][::-1]),
    "beta1 and beta2 are exchanged in the moments; beta1 is the first moment's":
        dict(betas=FEW_SETTINGS["betas"][::-1], correction=lambda c1, c2: c1.sqrt() / c2),
    "the argument betas is ignored, (0.9, 0.999) always taken": dict(betas=(0.9, 0.999)),
    "the second moment lacks the square; it is of g^2": dict(second=lambda v, g, beta: beta * v + (1 - beta) * g),
    "the second moment is of |g|; it is of g^2": dict(second=lambda v, g, beta: beta * v + (1 - beta) * g.abs()),
    "the first moment lacks the factor 1 - beta1": dict(first=lambda m, g, beta: beta * m + g),
    "the second moment lacks the factor 1 - beta2": dict(second=lambda v, g, beta: beta * v + g**2),
    "the first moment has beta1 and 1 - beta1 exchanged": dict(first=lambda m, g, beta: (1 - beta) * m + beta * g),
    "the second moment has beta2 and 1 - beta2 exchanged": dict(second=lambda v, g, beta: (1 - beta) * v + beta * g**2),
    "the update takes the gradient itself; it is the first moment's": dict(first=lambda m, g, beta: g),
    "the moments are not kept from step to step; they belong into self.state":
        dict(first=lambda m, g, beta: (1 - beta) * g, second=lambda v, g, beta: (1 - beta) * g**2),
    "the second moment is made with beta1; it is beta2's":
        dict(second=lambda v, g, beta: FEW_SETTINGS["betas"][0] * v + (1 - FEW_SETTINGS["betas"][0]) * g**2),
    "weights do not change: `p = p - ...` makes a new tensor; change p.data, or p in place":
        dict(lr=0.0, weight_decay=0.0),
    "weights move up the gradient; subtract the update":
        dict(lr=-FEW_SETTINGS["lr"], decay=lambda new, old, lr, alpha, decay: new + lr * decay * new),
}  # fmt: skip
CLIP_MISTAKES: dict[str, dict] = {
    "max_grad_norm is ignored": dict(clip=lambda g, most: g),
    "every parameter is clipped by itself; the norm is of all gradients of a group together":
        dict(clip=lambda g, most: g * (most / g.norm(dim=-1, keepdim=True)).clamp(max=1.0)),
    "numbers are clipped, not the norm of all gradients together": dict(clip=lambda g, most: g.clamp(-most, most)),
    "gradients are made max_grad_norm long; shorter ones stay as they are":
        dict(clip=lambda g, most: g * most / g.norm() if most < math.inf else g),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- the check


def check_few_steps(student: Student, clips: bool, say: Say = print) -> tuple[bool, str, dict]:
    """Whether a few steps are right, where eps matters. If not, prints the errors and returns the mistake that fits.

    The third value: keywords of `adamw` for the weight decay that the student has; an edition that clips takes two.
    """
    tensors, cases = {"weights": FIRST_WEIGHTS, "gradients": gradients()}, CLIPPED_CASES if clips else FEW_CASES
    asked = [ChildQuestion("few_steps", "optimizer", settings, tensors) for settings in cases.values()]
    answers, expected = student.ask_all(asked), few_steps_by_hand(cases)
    table = ADAMW_MISTAKES | (CLIP_MISTAKES if clips else {})

    def are(steps: dict[str, torch.Tensor]) -> bool:
        return all(alike(answer.tensors, (step,)) for answer, step in zip(answers, steps.values(), strict=True))

    decays = ({}, BY_ALPHA) if clips else ({},)
    for decay in decays:
        if are(few_steps_by_hand(cases, **decay)):
            return True, "", decay
    for answer, (what, step) in zip(answers, expected.items(), strict=True):
        report_run(f"{FEW_STEPS} steps against the formulas, {what}", answer, step, say)
    tried = ((said, {**decay, **wrong}) for decay in decays for said, wrong in table.items())
    return False, next((said for said, wrong in tried if are(few_steps_by_hand(cases, **wrong))), ""), {}


def late_or_grouped_fault(student: Student, decay: dict) -> str:
    """What is wrong where a gradient is absent at first, or groups have settings of their own; "" if nothing is.

    decay: the third value of `check_few_steps`.
    """
    tensors, decayed = {"weights": FIRST_WEIGHTS, "gradients": gradients()}, FEW_CASES["eps 0.1, weight decay 0.4"]
    own = [decayed, {**FEW_SETTINGS, "lr": 0.02, "betas": (0.3, 0.5), "eps": 0.3, "correct_bias": False}]
    cases = {
        "a parameter without gradient (None) is to be skipped, and its steps count from its first gradient":
            ({**decayed, "late": 1}, [adamw(first_step=1, **decayed, **decay)[0], adamw(**decayed, **decay)[1]]),
        "each group of self.param_groups has settings of its own: group['lr'], group['betas'], ...":
            ({"own": own}, [adamw(**each, **decay)[row] for row, each in enumerate(own)]),
    }  # fmt: skip
    for sentence, (settings, expected) in cases.items():
        answer = student.ask(ChildQuestion("few_steps", "optimizer", settings, tensors))
        if not alike(answer.tensors, (torch.stack(expected),)):
            return f"AdamW: {sentence}{f' ({answer.line})' if answer.trouble else ''}"
    return ""


def closure_fault(student: Student) -> str:
    """What is wrong with a step that is given a closure, "" if nothing is."""
    tensors = {"weights": FIRST_WEIGHTS, "gradient": gradients()[0]}
    answer = student.ask(ChildQuestion("step_with_closure", "optimizer", FEW_SETTINGS, tensors))
    if answer.trouble:
        return f"AdamW: {answer.line}"
    *found, calls = answer.tensors
    if not calls.all():
        return "AdamW: step(closure) calls the closure without gradients: call it under torch.enable_grad()"
    if not calls.numel() or not found[0].numel():
        return "AdamW: step(closure) returns no loss: call the closure, and return what it returns"
    if calls.numel() > 1:
        return f"AdamW: step(closure) calls the closure {calls.numel()} times: once is enough"
    loss = (FIRST_WEIGHTS * gradients()[0]).sum()
    right = alike(tuple(found), (loss, adamw(steps=1, **FEW_SETTINGS)))
    return "" if right else "AdamW: step(closure) does not return the closure's loss, or steps otherwise than step()"


def adamw_mistake(pytorch_is_right: bool, trouble: str, mistake: str) -> str:
    """The mistake, or where to look. pytorch_is_right: of the run that is compared without weight decay."""
    if "ZeroDivisionError" in trouble:
        return f"is the step counted from 0, where 1 - beta^t is 0? {trouble}"
    if mistake:
        return mistake
    if pytorch_is_right:
        hint = (
            "It is right for one parameter and a tiny eps; look at eps, weight decay, and the state of each parameter"
        )
    else:
        hint = "Look at the moments and the bias correction"
    return f"no usual mistake fits. {hint}"


def report_published(answer: ChildAnswer, clips: bool, has_formulas: bool, say: Say = print) -> bool:
    """Print whether the course's run gives its weights; the course's own tolerance counts in two cases.

    clips: the course made these weights with another decay. has_formulas: all formulas were found right in float64; in
    float32 the same ones lose digits where the decay is written as a factor 1 - lr * weight_decay.
    """
    what, expected = f"{TOY_STEPS} steps against the published weights", course_weights(clips)
    passed = course_accepts(answer, clips)
    loses_digits = not clips and has_formulas and passed and not alike(answer.tensors, (expected,), LARGEST_ERROR)
    if not (clips and has_shape_of(expected, answer) or loses_digits):
        return report_run(what, answer, expected, say)
    error, limit = (answer.tensors[0] - expected).abs().max().item(), f"{COURSE_ATOL:g} + {COURSE_RTOL:g} of a weight"
    say(f"{what}: largest error {error:.1e}, the course's tolerance {limit}: {'ok' if passed else 'WRONG'}")
    if loses_digits:
        say("The weight decay loses digits, as a factor 1 - lr * weight_decay does in float32; its formula is right.")
    return passed


def course_weights(clips: bool) -> torch.Tensor:
    return torch.tensor(CLIPPED_WEIGHTS if clips else PUBLISHED_WEIGHTS)


def course_accepts(answer: ChildAnswer, clips: bool) -> bool:
    """Whether the course's own test accepts its run."""
    return close_enough(course_weights(clips), answer)


def close_enough(expected: torch.Tensor, answer: ChildAnswer) -> bool:
    has_shape = has_shape_of(expected, answer)
    return has_shape and torch.allclose(expected, answer.tensors[0].float(), COURSE_RTOL, COURSE_ATOL)


def passes_elsewhere(student: Student) -> bool:
    """Whether the course's tolerance holds for another toy problem as well: code may know the published weights."""
    problem = toy_problem(SALT.get() + 1)
    expected = questions.train(**problem, optimizer=torch.optim.AdamW, **WITHOUT_DECAY)
    return close_enough(expected, student.ask(ChildQuestion("train", "optimizer", WITHOUT_DECAY, problem)))


def check_adamw(student: Student, clips: bool = False, say: Say = print) -> bool:
    """Make the three checks, print their lines and the verdict. Returns whether the student's AdamW passes.

    clips: the edition's AdamW has an argument `max_grad_norm`. In the editions without it, the course's own check
    decides: code that it accepts passes, and a line says what the checks here find.
    """
    problem, with_decay = toy_problem(), {"lr": 1e-3, "weight_decay": 1e-4, "correct_bias": True}
    with_decay |= {"max_grad_norm": 0.9} if clips else {}
    asked = [ChildQuestion("train", "optimizer", settings, problem) for settings in (with_decay, WITHOUT_DECAY)]
    with ThreadPoolExecutor(1) as pool:  # PyTorch's optimizer runs here while the student's runs there
        training = pool.submit(questions.train, **problem, optimizer=torch.optim.AdamW, **WITHOUT_DECAY)
        ours, ours_without = student.ask_all(asked)
        theirs = training.result()
    pytorch = report_run(f"{TOY_STEPS} steps against torch.optim.AdamW without weight decay", ours_without, theirs, say)
    trouble = ours_without.line
    few, mistake, decay = (False, f"AdamW: {trouble}", {}) if trouble else check_few_steps(student, clips, say)
    published = report_published(ours, clips, pytorch and few, say)
    if published and pytorch and few:
        fault = closure_fault(student) or late_or_grouped_fault(student, decay)
    else:
        fault = adamw_mistake(pytorch, ours_without.trouble, mistake)
    if not fault or not course_accepts(ours, clips):
        return report_verdict("Optimizer", student, fault or None, say)
    decides = not clips and passes_elsewhere(student)
    say(f"{OWN_LIMIT}: failed: {fault}")
    how = f"its own run alone, to atol {COURSE_ATOL:g} and rtol {COURSE_RTOL:g}"
    say(f"{COURSE_CHECK}: passed ({how}{'; in this edition it decides' if decides else ''})")
    return report_verdict("Optimizer", student, None if decides else fault, say)
