"""Students who write the course's functions with the course's arguments: what `--parts` and `optimizer_test.py` say."""

import contextlib
import io
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from classic_functions import (
    ATTENTION,
    ATTENTION_FORWARD,
    CLASSIC,
    CLASSIFIER,
    GENERATE,
    LATER,
    LAYER,
    NORM,
    SCORES,
    STEP,
    WITH_A_MASK,
    write_student,
)
from conftest import slow_among

import optimizer_test
import sanity_check
from grading import parts, small_model
from grading.programs import run_main
from grading.student_process import ChildAnswer, ChildQuestion
from grading.verdicts import TWO_MISTAKES, CheckedPart, as_tensors, explanation, usual_mistake, with_mistakes

OWN_WORDS = "this edition does not ask for it"


def graded(script: ModuleType, folder: Path, *flags: str) -> tuple[int, str]:
    """Run a script in this process, on a folder whose code has a process of its own: the exit status and the output."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [script.__name__, "--code", str(folder), *flags])
        patch.chdir(folder)
        return run_main(script.main), printed.getvalue()


def parts_of(folder: Path, *flags: str) -> tuple[int, dict[str, str]]:
    """The exit status of `sanity_check.py --parts`, and the verdicts by the names of the parts."""
    status, printed = graded(sanity_check, folder, "--parts", *flags)
    lines = [line.strip() for line in printed.partition("Part by part")[2].splitlines()[1:] if line[:2] == "  "]
    return status, {name: said.strip() for name, _, said in (line.partition(":") for line in lines)}


def changed(place: str, old: str, new: str) -> dict[str, str]:
    """A classic function with another line."""
    assert old in CLASSIC[place], (place, old)
    return {place: CLASSIC[place].replace(old, new)}


def with_mask(old: str, new: str) -> dict[str, str]:
    assert old in WITH_A_MASK[SCORES]
    return {SCORES: WITH_A_MASK[SCORES].replace(old, new)}


@pytest.mark.parametrize("edition", slow_among(LATER, ["cmu2024"]))
def test_a_right_classic_student_is_right_in_every_part(tmp_path: Path, edition: str):
    status, said = parts_of(write_student(tmp_path / "student", edition), "--edition", edition)
    extra = said.pop("extra", "")
    assert status == 0 and set(said.values()) == {"ok"} and len(said) == 13, said
    takes_none = f"compute_query_key_value_scores takes no mask, so --attention causal is not there ({OWN_WORDS})"
    assert extra == (takes_none if edition in ("ucsc", "cmu2024") else "")


@pytest.mark.slow
@pytest.mark.parametrize(("texts", "said"), [
    (WITH_A_MASK, "with the causal mask as well, --attention causal works"),
    (with_mask("masked_fill(~mask", "masked_fill(mask"),
     f"scores and softmax, causal: the causal mask is inverted: it hides what should be seen ({OWN_WORDS})"),
    (with_mask('scores.masked_fill(~mask, float("-inf"))', "scores + mask"),
     f"scores and softmax, causal: the mask is added to the scores; it is True where a query may see a key, and the "
     f"other scores become -inf ({OWN_WORDS})"),
    (with_mask("if mask is not None:", "if False:"),
     f"scores and softmax, causal: the causal mask is missing: a position sees what follows ({OWN_WORDS})"),
])  # fmt: skip
def test_a_mask_is_extra_where_the_edition_has_none(tmp_path: Path, texts: dict[str, str], said: str):
    status, found = parts_of(write_student(tmp_path / "student", changed=texts))
    assert status == 0 and found.pop("extra") == said and set(found.values()) == {"ok"}, found


@pytest.mark.slow
def test_where_scores_are_wrong_without_a_mask_nothing_is_said_of_one(tmp_path: Path):
    texts = with_mask(" / math.sqrt(self.head_dim)", "")
    status, found = parts_of(write_student(tmp_path / "student", changed=texts))
    assert status == 1 and "extra" not in found
    assert found["scores and softmax, bidirectional"].startswith("WRONG: scores are not scaled")


@pytest.mark.slow
def test_the_kind_that_is_asked_for_decides(tmp_path: Path):
    status, found = parts_of(write_student(tmp_path / "asked"), "--attention", "bidirectional")
    assert status == 0 and "extra" not in found
    status, found = parts_of(write_student(tmp_path / "plain"), "--attention", "causal")
    assert status == 1 and "extra" not in found
    assert found["scores and softmax, causal"] == "WRONG: the causal mask is missing: a position sees what follows"
    status, found = parts_of(write_student(tmp_path / "masked", changed=WITH_A_MASK), "--attention", "causal")
    assert status == 0 and set(found.values()) == {"ok"}, found


@pytest.mark.slow
@pytest.mark.parametrize(("texts", "said"), [
    ({**WITH_A_MASK, ATTENTION: None}, "ok"),
    ({**with_mask("~mask,", "mask,"), ATTENTION: None},
     "WRONG: the causal mask is inverted: it hides what should be seen"),
    ({SCORES: CLASSIC[SCORES]}, "WRONG: the causal mask is missing: a position sees what follows"),
    ({SCORES: LATER["cmu2026"][SCORES].replace("value):", "value, mask=None):"), ATTENTION: None}, "ok"),
    ({SCORES: LATER["cmu2026"][SCORES].replace("torch.tril(", "torch.triu(")},
     "WRONG: the causal mask is upside down: a position sees itself and what follows"),
])  # fmt: skip
def test_a_causal_edition_takes_a_mask_of_the_functions_own_and_one_that_it_is_given(
    tmp_path: Path, texts: dict[str, str | None], said: str
):
    folder = write_student(tmp_path / "student", "cmu2026", texts)
    status, found = parts_of(folder, "--edition", "cmu2026")
    assert found["scores and softmax, causal"] == said and status == (said != "ok"), found


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "said"), [
    ("probs = torch", "unused = torch", "tokens are drawn that the edition's sampling leaves out"),
    ("/ temperature", "* 9.0", "likely tokens are never drawn"),
    ("(-1, order, ordered)", "(-1, order, (ordered > 0).float())", "tokens are drawn with other probabilities"),
])  # fmt: skip
def test_a_sampling_that_is_not_the_editions_is_named(tmp_path: Path, old: str, new: str, said: str):
    assert old in LATER["cmu2026"][GENERATE]
    folder = write_student(tmp_path / "student", "cmu2026", {GENERATE: LATER["cmu2026"][GENERATE].replace(old, new)})
    status, found = parts_of(folder, "--edition", "cmu2026")
    assert status == 1 and found["sampling, causal"].startswith(f"WRONG: {said}"), found


def test_two_mistakes_in_one_part_are_both_named(tmp_path: Path):
    texts = changed(SCORES, " / math.sqrt(self.head_dim)", "")
    texts = {SCORES: texts[SCORES].replace("dim=-1", "dim=1")}
    texts |= {NORM: CLASSIC[NORM].replace(".pow(2)", "").replace(")\n", ") * self.weight\n")}
    _, found = parts_of(write_student(tmp_path / "student", changed=texts))
    assert found["scores and softmax, bidirectional"] == "WRONG: " + TWO_MISTAKES.format(
        "scores are not scaled: divide them by sqrt(d)",
        "the softmax runs over the heads, not over the keys (dim=-1)",
    )
    assert found["RMSNorm"] == "WRONG: " + TWO_MISTAKES.format(
        "the mean is of x, not of its squares",
        "it multiplies by the weight twice; forward does that, _norm does not",
    )


@pytest.mark.slow
def test_a_mistake_is_named_although_a_part_that_is_needed_is_wrong(tmp_path: Path):
    once, alternating = "torch.repeat_interleave(x, self.n_rep, dim=2)", "x.repeat(1, 1, self.n_rep, 1)"
    assert once in ATTENTION_FORWARD
    texts = {
        **changed(NORM, "self.eps", "1e-4"),
        **changed(SCORES, "dim=-1", "dim=-2"),
        ATTENTION: ATTENTION_FORWARD.replace(once, alternating),
        **changed(LAYER, "self.ffn_norm(h)", "h"),
        **changed(GENERATE, "range(max_new_tokens)", "range(max_new_tokens - 1)"),
        **changed(CLASSIFIER, "hidden[:, -1]", "hidden.mean(dim=1)"),
    }
    status, found = parts_of(write_student(tmp_path / "student", changed=texts))
    assert status == 1
    assert found["grouped queries, bidirectional"].startswith("WRONG: key/value heads are repeated as 1 2 1 2")
    assert found["layer, bidirectional"] == "WRONG: ffn_norm is missing"
    assert found["generate, bidirectional"] == "WRONG: there is one new token too few"
    assert found["embedding classifier, bidirectional"].startswith("WRONG: it averages over the positions")
    needed = "RMSNorm; scores and softmax, bidirectional; grouped queries, bidirectional; layer, bidirectional"
    assert found["embedding and head, bidirectional"] == f"not judged: it needs {needed}"
    assert found["zero-shot classifier, bidirectional"].startswith("not judged: it needs ")


@pytest.mark.slow
def test_right_parts_behind_a_wrong_one_are_not_judged(tmp_path: Path):
    _, found = parts_of(write_student(tmp_path / "student", changed=changed(NORM, "return x", "return 2 * x")))
    wrong = {name for name, said in found.items() if said.startswith("WRONG")}
    assert wrong == {"RMSNorm"}, found
    for name in ("layer", "embedding and head", "generate", "zero-shot classifier", "embedding classifier"):
        assert found[f"{name}, bidirectional"] == "not judged: it needs RMSNorm", found


@pytest.mark.slow
def test_an_exception_of_its_own_is_told_of_a_part_that_needs_a_wrong_one(tmp_path: Path):
    texts = {**changed(NORM, "self.eps", "1e-4"), **changed(LAYER, "return h +", "return h @")}
    _, found = parts_of(write_student(tmp_path / "student", changed=texts))
    assert found["layer, bidirectional"].startswith("WRONG: RuntimeError in llama.py line "), found


def test_two_mistakes_are_tried_together_only_where_they_change_different_things():
    table = {"one": dict(scale=2.0), "two": dict(shift=3.0), "three": dict(scale=5.0)}
    wrong = with_mistakes(lambda x, scale=1.0, shift=0.0: scale * x + shift, table, torch.ones(2))
    said = partial(usual_mistake, wrong, right=(torch.ones(2),))
    assert said(actual=(torch.full((2,), 2.0),)) == "one"
    assert said(actual=(torch.full((2,), 8.0),)) == TWO_MISTAKES.format("two", "three")
    assert said(actual=(torch.full((2,), 10.0),)) == said(actual=(torch.ones(2),)) == ""


def test_numbers_that_no_usual_mistake_gives_are_described():
    part = CheckedPart("norm", "llama.py RMSNorm", ChildQuestion("norm", "llama"), {})
    twice = SimpleNamespace(ask=lambda question: ChildAnswer((torch.tensor([1.5, 1.0]),)))
    said = partial(explanation, twice, part, expected=(torch.ones(2),))
    off = "off by up to 5.0e-01, and no usual mistake gives these numbers"
    assert said(actual=(torch.tensor([1.5, 1.0]),)) == off
    assert said(actual=(torch.tensor([1.0, 2.0]),)) == part.drawn  # asked again, it gives other numbers
    assert said(actual=()) == "it returns 0 tensors, not 1"
    assert said(actual=(torch.ones(3),)) == "it returns [3] numbers, not [2]"


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_parts_that_are_asked_alone_have_numbers_of_their_own(norm: str):
    token = small_model.NORM.set(norm)
    try:
        for part in parts.all_parts(("bidirectional",)):
            if part.alone is None:
                continue
            right = as_tensors(part.alone.right())
            wrong = {said: as_tensors(mistake()) for said, mistake in part.alone.mistakes.items()}
            shown = {said for said, numbers in wrong.items() if not parts.alike(numbers, right, 5e-4)}
            hidden = wrong.keys() - shown
            assert len(hidden) <= (2 if part.name.startswith(("zero-shot", "embedding c")) else 1), (part.name, hidden)
            for said in shown:
                assert usual_mistake(part.alone.mistakes, wrong[said], right) == said
    finally:
        small_model.NORM.reset(token)


# ---------------------------------------------------------------------------------------------------------- AdamW

BY_ALPHA = changed(STEP, 'group["lr"] * group["weight_decay"]', 'alpha_t * group["weight_decay"]')
OWN, COURSE = "this package's limit: failed: ", "the course's own check: passed "


@pytest.mark.slow
@pytest.mark.parametrize("edition", ["ucsc", "cmu2024"])
def test_a_decay_inside_alpha_fails_here_and_passes_the_course(tmp_path: Path, edition: str):
    folder = write_student(tmp_path / "student", changed=BY_ALPHA)
    status, printed = graded(optimizer_test, folder, "--edition", edition)
    *_, own, course, last = printed.splitlines()
    assert status == 0 and last == "Optimizer test passed!", printed
    assert own.startswith(f"{OWN}the weight decay is scaled by alpha_t") and course.startswith(COURSE)
    assert course.endswith("; in this edition it decides)")


@pytest.mark.slow
def test_what_the_course_does_not_accept_fails(tmp_path: Path):
    folder = write_student(tmp_path / "student", changed=changed(STEP, "math.sqrt(1 - beta2 ** t)", "1"))
    status, printed = graded(optimizer_test, folder)
    assert status == 1 and COURSE not in printed
    assert printed.splitlines()[-1].startswith("Optimizer test FAILED: the bias correction lacks sqrt"), printed


@pytest.mark.slow
def test_a_step_that_knows_the_published_weights_alone_fails(tmp_path: Path):
    """It does nothing but write the weights of the course's run."""
    forged = """
def step(self, closure=None):
    from torch import tensor
    for group in self.param_groups:
        for p in group["params"]:
            if p.shape == (2, 3):
                p.data = tensor([[0.5548278, 0.8666567, 0.0729198], [-0.4472451, -0.2951228, -0.2717272]])
"""
    status, printed = graded(optimizer_test, write_student(tmp_path / "student", changed={STEP: forged}))
    assert status == 1 and printed.splitlines()[-1].startswith("Optimizer test FAILED: "), printed
