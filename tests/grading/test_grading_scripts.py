"""sanity_check.py, rope_test.py, optimizer_test.py: what they accept, what they reject, and what they say."""

import hashlib
import itertools
import json
import math
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import ROOT, random_llama, save_checkpoint, slow_among
from error_helpers import check_one_error
from local_student import LocalStudent

import classifier  # noqa: F401 (it keeps llama.py's own `load_pretrained`, which a test replaces)
import llama
import optimizer
import optimizer_test
import rope_test
import sanity_check
from grading import adamw, parts, published, questions, reference, rotary, small_model
from grading.editions import ATTENTION_KINDS, EDITIONS
from grading.programs import GradingError, run_main
from grading.published import PublishedLabels, label_row
from grading.reference import Reference, check_model
from grading.rotary import alike
from handout.writing import write_handout
from optimizer import AdamW

TOKENS = torch.tensor([[1, 45, 299, 7, 0, 0], [1, 45, 8, 260, 9, 3]])


# ------------------------------------------------------------------------------------------- rope and optimizer


@pytest.mark.parametrize("script", slow_among(["rope_test.py", "optimizer_test.py"], ["optimizer_test.py"]))
def test_they_pass_from_any_folder_with_one_closing_line(script: str, run: Callable, tmp_path: Path):
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith("test passed!") and not done.stderr


def call_main(monkeypatch: pytest.MonkeyPatch, script: ModuleType, *flags: object, code: Path | None = None) -> int:
    """Run a script in this process, on the modules as they are here; code: on those of a folder, in a process."""
    given = () if code is None else ("--code", code)
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, (*given, *flags))])
    with monkeypatch.context() as patch:
        if code is None:
            patch.setattr(script, "student_of", lambda args: LocalStudent(ROOT))
        return run_main(script.main)


class FactorDecay(AdamW):
    """Decays by a factor of 1 - lr * weight_decay, which float32 rounds from 1 - 1e-7 to 1 - 1.19e-7."""

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> torch.Tensor | None:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        loss = super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.decay(parameter, group)
        return loss

    def decay(self, parameter: torch.Tensor, group: dict) -> None:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])


class ScaledDecay(FactorDecay):
    """Decays by alpha_t * weight_decay: the decay stands in the main update, where the step size is corrected."""

    def decay(self, parameter: torch.Tensor, group: dict) -> None:
        step, (beta1, beta2) = self.state[parameter]["step"], group["betas"]
        corrected = math.sqrt(1 - beta2**step) / (1 - beta1**step) if group["correct_bias"] else 1.0
        parameter.sub_(group["lr"] * corrected * group["weight_decay"] * parameter)


def course_accepts(optimizer_class: type) -> bool:
    """What the course's own optimizer_test.py does (github.com/neubig/minllama-assignment, commit 2951cdd)."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    opt = optimizer_class(model.parameters(), lr=1e-3, weight_decay=1e-4, correct_bias=True)
    for _ in range(1000):
        opt.zero_grad()
        x = torch.FloatTensor(rng.uniform(size=[model.in_features]))
        loss = ((torch.Tensor([x[0] + x[1], -x[2]]) - model(x)) ** 2).sum()
        loss.backward()
        opt.step()
    return torch.allclose(torch.tensor(adamw.PUBLISHED_WEIGHTS), model.weight.detach(), atol=1e-5, rtol=1e-3)


class NoDecay(AdamW):
    """Without the weight decay that is asked for."""

    def __init__(self, params, **settings):
        super().__init__(params, **{**settings, "weight_decay": 0.0})


class SwiftAdamW(AdamW):
    """Takes steps that are twice as long, so that the course's own check fails as well."""

    def __init__(self, params, **settings):
        super().__init__(params, **{**settings, "lr": 2 * settings["lr"]})


class SilentAdamW(AdamW):
    """Forgets the loss of a closure, of which the course's own check has none."""

    def step(self, closure: Callable | None = None) -> None:
        super().step(closure)


def test_a_decay_that_loses_digits_is_right_and_said(monkeypatch, capsys):
    """PyTorch's own AdamW decays so, and the course's own check accepts it."""
    monkeypatch.setattr(optimizer, "AdamW", FactorDecay)
    assert call_main(monkeypatch, optimizer_test) == 0 and course_accepts(FactorDecay)
    *_, run, note, verdict = capsys.readouterr().out.splitlines()
    assert "the course's tolerance 1e-05 + 0.001 of a weight: ok" in run and "loses digits" in note
    assert verdict == "Optimizer test passed!"


@pytest.mark.parametrize("wrong", [ScaledDecay, *slow_among((kinds := (NoDecay, SwiftAdamW, SilentAdamW)), kinds)])
def test_that_the_courses_own_check_would_accept_it_is_said_where_it_would(wrong: type, monkeypatch, capsys):
    monkeypatch.setattr(optimizer, "AdamW", wrong)
    status = call_main(monkeypatch, optimizer_test)
    lines = capsys.readouterr().out.splitlines()
    said = (
        "the course's own check: passed (its own run alone, to atol 1e-05 and rtol 0.001; in this edition it decides)"
    )
    assert (said in lines) == course_accepts(wrong) == (wrong is not SwiftAdamW) == (status == 0)
    assert any(line.startswith("this package's limit: failed: ") for line in lines) == (status == 0)
    assert lines[-1].startswith("Optimizer test passed!" if status == 0 else "Optimizer test FAILED: ")


def test_the_formulas_by_hand_are_pytorchs_where_eps_is_added_after_the_bias_correction():
    mistake = next(wrong for said, wrong in adamw.ADAMW_MISTAKES.items() if "torch.optim.AdamW" in said)
    settings = {name: adamw.FEW_SETTINGS[name] for name in ("lr", "betas", "eps", "weight_decay")}
    theirs = questions.few_steps(adamw.FIRST_WEIGHTS, adamw.gradients(), torch.optim.AdamW, **settings)
    torch.testing.assert_close(adamw.adamw(**settings, correct_bias=True, **mistake), theirs, atol=1e-12, rtol=0)


def test_pytest_collects_none_of_the_grading_scripts():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    scripts = ["rope_test.py", "optimizer_test.py", "sanity_check.py"]
    done = subprocess.run([*command, *scripts], cwd=ROOT, capture_output=True, text=True)
    assert "no tests collected" in done.stdout


# ------------------------------------------------------------------------------------------------ sanity_check


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model.pt", random_llama())


def reference_of(attention: str, error: float = 0.0) -> Reference:
    with torch.no_grad():
        logits, hidden_states = random_llama(attention=attention)(TOKENS)
    return Reference(TOKENS, logits, hidden_states + error, attention)


def save_course_files(folder: Path, error: float = 0.0, **changes) -> None:
    """A replacement of stories42M.pt, which declares no other attention, and its numbers for the course's sequences."""
    model = random_llama(vocab_size=32000, **changes)
    save_checkpoint(folder / "stories42M.pt", model, **{**vars(model.config), "attention": "bidirectional"})
    with torch.no_grad():
        logits, hidden_states = model(torch.tensor(reference.COURSE_TOKENS))
    torch.save({"logits": logits + error, "hidden_states": hidden_states}, folder / "sanity_check.data")


MASKED = reference_of("causal")._replace(attention="bidirectional")  # as if the model had added the mask


@pytest.mark.parametrize(("references", "words"), [
    ([reference_of("bidirectional"), reference_of("causal")], None),
    ([MASKED], ["causal mask is the cause"]),
    ([reference_of("bidirectional", error=0.1)], ["causal mask is not the cause", "1.0e-01"]),
    ([reference_of("bidirectional", error=float("nan"))], []),
])  # fmt: skip
def test_a_model_is_right_under_both_semantics_or_its_mask_is_the_cause(checkpoint: Path, capsys, references, words):
    assert check_model(LocalStudent(ROOT), checkpoint, references) is (words is None)
    out = capsys.readouterr().out
    assert out.count(": ok") == 4 if words is None else all(word in out for word in words)


@pytest.mark.slow
def test_the_course_files_are_used_where_they_are(tmp_path: Path, run: Callable):
    save_course_files(tmp_path)
    done = run("sanity_check.py", cwd=tmp_path)
    assert done.returncode == 0 and "course's reference" in done.stdout
    assert done.stdout.splitlines()[-1] == "Your Llama implementation is correct!"
    save_course_files(tmp_path, error=1.0)
    done = run("sanity_check.py", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("Sanity check FAILED")


def test_without_them_the_bundled_checkpoint_is_checked_and_said(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = call_main(monkeypatch, sanity_check, code=ROOT)
    out, err = capsys.readouterr()
    if "course's reference" in out:
        pytest.skip("the course's files lie beside the code here")
    assert status == 0 and not err, err
    assert "checking the bundled checkpoint" in out and out.count(": ok") == 2
    assert len(out.splitlines()) == 5


@pytest.mark.parametrize(("changed", "verdict"), [(0, "equal"), (1, "close"), (40, "DIFFERS")])
def test_published_labels_are_equal_close_or_different(tmp_path: Path, changed: int, verdict: str):
    gold, output = tmp_path / "gold.txt", tmp_path / "output.txt"
    gold.write_text("".join(f"{i % 2} ||| s{i}\n" for i in range(200)))
    output.write_text("".join(f"{i % 2 if i >= changed * 2 else 1} ||| s{i}\n" for i in range(200)))
    digest = hashlib.sha256(("0\n1\n" * 100).encode()).hexdigest()
    row = label_row("x-dev", output, gold, (PublishedLabels(digest, (100, 100), 1.0),))
    assert row[-1] == verdict


def test_published_fails_with_the_drivers_own_last_line_and_wants_the_real_checkpoint(tmp_path: Path):
    said = r"run_llama.py failed \(status 2\): error: --pretrained-model-path absent.pt"
    with pytest.raises(GradingError, match=said):
        published.run_driver(ROOT, ["--option", "generate", "--pretrained-model-path", "absent.pt"], str(tmp_path))
    args = Namespace(pretrained_model_path="absent.pt", tokenizer=None, data_dir="data")
    with pytest.raises(GradingError, match="absent.pt"):
        published.check_published(ROOT, args, {}, {})


@pytest.mark.parametrize(("driver", "words"), [
    ("while True: pass", "run_llama.py --option generate did not end within 1 s"),
    ("import os, time\nif os.fork() == 0: time.sleep(60)\nraise SystemExit(3)", r"failed \(status 3\)"),
    ("raise SystemExit('Your Llama implementation is correct!\\n\x1b[2K')", r"failed \(status 1\): [^\x1b]*$"),
    ("", "has not written generated-sentence-temp-0.txt"),
])  # fmt: skip
def test_published_bounds_the_driver(monkeypatch, tmp_path: Path, driver: str, words: str):
    (tmp_path / "run_llama.py").write_text(driver)
    (tmp_path / "model.pt").touch()
    monkeypatch.setattr(published.run_driver, "__defaults__", (1.0,))
    args = Namespace(pretrained_model_path=str(tmp_path / "model.pt"), tokenizer=None, data_dir="data")
    with pytest.raises(GradingError, match=words):
        published.check_published(tmp_path, args, {"bidirectional": "0" * 64}, {})


def test_the_published_facts_are_complete():
    assert set(published.PUBLISHED_LABELS) == {"sst-dev", "sst-test", "cfimdb-dev", "cfimdb-test"}
    sizes = {"sst-dev": 1101, "sst-test": 2210, "cfimdb-dev": 245, "cfimdb-test": 488}
    for name, accepted in published.PUBLISHED_LABELS.items():
        assert all(sum(one.counts) == sizes[name] and len(one.sha256) == 64 for one in accepted)


# ------------------------------------------------------------------------------------------------ part by part


def tables() -> dict[str, tuple[dict[str, tuple], tuple]]:
    """Of every part of every script: what the mistakes make of its inputs, and what is right."""
    expected = parts.stored_numbers()
    found = {}
    for part in parts.all_parts(ATTENTION_KINDS):
        numbers = {said: wrong() for said, wrong in part.mistakes.items()}
        numbers = {said: one if isinstance(one, tuple) else (one,) for said, one in numbers.items()}
        found[part.name] = numbers, expected.get(part.name, ())
    cases = [rotary.published_case(), *rotary.closed_form_cases()]
    turned = {
        said: sum((rotary.rotate_both(case.query, case.key, case.theta, **wrong) for case in cases), ())
        for said, wrong in rotary.ROTATION_MISTAKES.items()
    }
    found["rope_test"] = turned, sum((case.expected for case in cases), ())
    steps = {said: tuple(adamw.few_steps_by_hand(**wrong).values()) for said, wrong in adamw.ADAMW_MISTAKES.items()}
    found["optimizer_test"] = (steps, tuple(adamw.few_steps_by_hand().values()))
    return found


def test_every_mistake_has_numbers_of_its_own():
    """But those of the other kind of attention, which give what is right."""
    for name, (mistakes, right) in tables().items():
        wrong = {said: numbers for said, numbers in mistakes.items() if not alike(numbers, right)}
        assert len(wrong) >= len(mistakes) - 2, name
        for one, other in itertools.combinations(wrong, 2):
            assert not alike(wrong[one], wrong[other], 5e-4), f"{name}: {one}; {other}"


def test_the_stored_numbers_are_what_transformers_computes_now():
    pytest.importorskip("transformers")
    from parts import compute_parts  # of checkpoints/

    stored = json.loads((ROOT / parts.PARTS_FILE).read_text(encoding="utf-8"))
    stored = {name: tuple(map(torch.tensor, numbers)) for name, numbers in stored.items()}
    computed = {name: tuple(map(torch.tensor, numbers)) for name, numbers in compute_parts().items()}
    assert stored.keys() == computed.keys()
    assert all(alike(stored[name], computed[name], 2e-6) for name in stored)


def sanity(monkeypatch: pytest.MonkeyPatch, *flags: object, code: Path | None = None) -> int:
    return call_main(monkeypatch, sanity_check, *flags, code=code)


def handed_out(folder: Path, edition: str) -> Path:
    """The files of an edition as those have them who have written all of its holes."""
    write_handout(folder / edition, edition, holes=[])
    return folder / edition


def test_the_parts_of_a_right_model_are_printed_where_asked_for(monkeypatch, capsys: pytest.CaptureFixture):
    assert sanity(monkeypatch, "--parts") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("  ") and line.endswith(" ok")]) == 2 + 13
    assert lines[-1] == "Your Llama implementation is correct!"


def test_parts_need_no_checkpoint(monkeypatch, capsys):
    monkeypatch.setattr(reference, "BUNDLED_CHECKPOINT", "absent.pt")
    assert sanity(monkeypatch, "--parts") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("Part by part") and len(lines) == 1 + 14 + 1
    assert lines[-1] == "Your Llama implementation is correct!"
    assert captured.err.startswith("note: no checkpoint is here") and captured.err.count("\n") == 1
    assert captured.err.endswith("so the whole model was not checked\n")
    monkeypatch.setattr(llama.RMSNorm, "forward", lambda self, x: x)
    assert sanity(monkeypatch, "--parts") == 1
    assert sanity(monkeypatch) == 2  # without the flag, the whole model is what is checked
    assert sanity(monkeypatch, "--parts", "--data", "absent.data") == 2  # which is named


@pytest.mark.parametrize("script", [sanity_check, rope_test, optimizer_test])
@pytest.mark.parametrize(("flags", "words"), [
    (["--time_limit", "0"], "--time_limit 0"), (["--time_limit", "nan"], "--time_limit nan"),
    (["--time_limit", "inf"], "--time_limit inf"), (["--code", "absent"], "absent is not a folder"),
    (["--code", ""], "--code is empty"),
])  # fmt: skip
def test_flags_that_cannot_be_are_one_line(monkeypatch, capsys, script: ModuleType, flags: list[str], words: str):
    monkeypatch.setattr(sys, "argv", [script.__name__, *flags])
    check_one_error(run_main(script.main), capsys.readouterr().err, words)


def test_a_load_pretrained_without_attention_is_the_hand_outs_and_has_one_kind(monkeypatch, capsys):
    """The course's signature; its model is bidirectional, or in an edition causal."""
    load = llama.load_pretrained
    for kind, other in (("bidirectional", "causal"), ("causal", "bidirectional")):
        monkeypatch.setattr(llama, "load_pretrained", lambda checkpoint, kind=kind: load(checkpoint, attention=kind))
        assert sanity(monkeypatch, *(["--attention", "causal"] if kind == "causal" else [])) == 0
        assert other not in capsys.readouterr().out
    assert sanity(monkeypatch) == 1  # it is causal, and nobody said that it should be


@pytest.mark.slow
def test_an_edition_with_another_norm_is_checked_against_its_own_tensors(monkeypatch, capsys, tmp_path: Path):
    """Of PyTorch's LayerNorm without bias: its checkpoint has the names of one with RMSNorm, as the course's has."""
    flags = ["--pretrained-model-path", tmp_path / "stories42M.pt", "--data", tmp_path / "sanity_check.data"]
    for edition, attention in (("cmu2026", "causal"), ("cmu2025", "bidirectional")):
        with monkeypatch.context() as patch:
            patch.setitem(llama.NORMS, "rms", lambda dim, eps: torch.nn.LayerNorm(dim, eps, bias=False))
            save_course_files(tmp_path, attention=attention)
        assert sanity(monkeypatch, *flags, "--edition", edition, code=handed_out(tmp_path, edition)) == 0
        captured = capsys.readouterr()
        assert f"{attention} attention" in captured.out and "parts" not in captured.err
    code = tmp_path / "cmu2025"
    assert sanity(monkeypatch, *flags, "--edition", "cmu2026", code=tmp_path / "cmu2026") == 1  # has a mask
    assert "layer, causal" in capsys.readouterr().out  # the parts are named, as the whole is wrong
    assert sanity(monkeypatch, *flags) == 1
    with monkeypatch.context() as patch:
        patch.setattr(sanity_check, "COURSE_CHECKPOINT", "absent.pt")
        assert sanity(patch, "--edition", "cmu2025") == 2 and "has no bundled tensors" in capsys.readouterr().err
    digest = hashlib.sha256((tmp_path / "sanity_check.data").read_bytes()).hexdigest()[:16]
    with monkeypatch.context() as patch:  # the file of one edition, and another one named
        patch.setitem(reference.PUBLISHED_TENSORS, digest, ("layer", "bidirectional"))
        assert sanity(patch, *flags, "--edition", "cmu2025", code=code) == 0 and sanity(patch, *flags) == 2
        check_one_error(2, capsys.readouterr().err, "sanity_check.data is that of cmu2025: name it with --edition")
    source, mean = (code / "base_llama.py").read_text(encoding="utf-8"), " - x.mean(-1, keepdim=True)"
    assert source.count(mean) == 1
    (code / "base_llama.py").write_text(source.replace(mean, ""), encoding="utf-8")
    capsys.readouterr()
    assert sanity(monkeypatch, *flags, "--edition", "cmu2025", code=code) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first == "cmu2025 has LayerNorm, and llama.py computes RMSNorm: its numbers cannot be the same."
    assert last.startswith("Sanity check FAILED")


@pytest.mark.slow
@pytest.mark.parametrize("edition", ["cmu2025", "cmu2026"])
def test_of_the_package_itself_a_later_edition_takes_all_but_the_sampling(monkeypatch, capsys, edition: str):
    """Its `generate` draws from all tokens."""
    assert sanity(monkeypatch, "--parts", "--edition", edition, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    (wrong,) = (one for one in told["parts"] if one["verdict"] != "ok")
    assert wrong["name"] == f"sampling, {EDITIONS[edition].attention}" and wrong["verdict"] == "WRONG"
    assert wrong["sentence"].startswith("tokens are drawn that the edition's sampling leaves out")


def test_every_mistake_in_the_later_norm_and_in_clipping_has_numbers_of_its_own():
    token = small_model.NORM.set("layer")
    part, right = parts.norm_part(), parts.stored_numbers("layer")["LayerNorm"]
    small_model.NORM.reset(token)
    steps = adamw.few_steps_by_hand(adamw.CLIPPED_CASES)
    tables = [
        ({said: (wrong(),) for said, wrong in part.mistakes.items()}, right),
        ({said: tuple(adamw.few_steps_by_hand(adamw.CLIPPED_CASES, **wrong).values())
          for said, wrong in adamw.CLIP_MISTAKES.items()}, tuple(steps.values())),
    ]  # fmt: skip
    for mistakes, right in tables:
        for one, other in itertools.combinations(mistakes, 2):
            assert not alike(mistakes[one], mistakes[other], 1e-4), (one, other)
        assert not any(alike(numbers, right, 1e-4) for numbers in mistakes.values())


class WithoutClipping(AdamW):
    def __init__(self, *given, max_grad_norm=None, **named):
        super().__init__(*given, **named)


class ByAlpha(AdamW):
    """The decay that made the published weights of the editions that clip: scaled by the corrected step size."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                t, (b1, b2) = self.state[p]["step"], group["betas"]
                alpha = group["lr"] * (math.sqrt(1 - b2**t) / (1 - b1**t) if group["correct_bias"] else 1.0)
                p /= 1 - group["lr"] * group["weight_decay"]
                p *= 1 - alpha * group["weight_decay"]
        return loss


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "edition", "said"), [
    (AdamW, "cmu2025", None), (ByAlpha, "cmu2026", None), (ByAlpha, "ucsc", None),
    (WithoutClipping, "ucsc", None), (WithoutClipping, "cmu2025", "max_grad_norm is ignored"),
])  # fmt: skip
def test_the_editions_that_clip_take_both_decays(monkeypatch, capsys, kind: type, edition: str, said: str | None):
    monkeypatch.setattr(optimizer, "AdamW", kind)
    assert call_main(monkeypatch, optimizer_test, "--edition", edition) == bool(said)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Optimizer test passed!" if said is None else said in last


@pytest.mark.parametrize("script", [rope_test, optimizer_test])
def test_the_unit_scripts_refuse_arguments_that_they_do_not_know(monkeypatch, capsys, script: ModuleType):
    for flags in (["--edition", "cmu2023"], ["--foo"], ["x"]):
        monkeypatch.setattr(sys, "argv", [script.__name__, *flags])
        check_one_error(run_main(script.main), capsys.readouterr().err, flags[-1])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--edition", "cmu2025"]])
@pytest.mark.parametrize("script", [rope_test, optimizer_test, sanity_check])
def test_with_json_a_script_prints_one_object(
    monkeypatch, capsys, script: ModuleType, flags: list[str], tmp_path: Path
):
    code = handed_out(tmp_path, flags[1]) if flags else None
    if script is sanity_check:
        flags = [*flags, "--parts"]
    assert call_main(monkeypatch, script, *flags, code=code) == 0
    lines = capsys.readouterr().out.splitlines()
    assert call_main(monkeypatch, script, *flags, "--json", code=code) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lines"] == lines and told["status"] == 0 and told["script"] == f"{script.__name__}.py"
    assert told["edition"] == (flags[1] if flags[:1] == ["--edition"] else "ucsc")
    if script is sanity_check:
        assert {one["verdict"] for one in told["parts"]} == {"ok"} and told["parts"][0]["name"] == parts.IMPORT
    monkeypatch.setattr(sys, "argv", [script.__name__, "--json", "--foo"])
    status, captured = run_main(script.main), capsys.readouterr()
    check_one_error(status, captured.err, "--foo")
    assert captured.out == ""


def test_without_the_numbers_parts_are_an_error_only_where_asked_for(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setattr(parts, "PARTS_FILE", str(tmp_path / "parts.json"))
    assert sanity(monkeypatch) == 0 and "not here" in capsys.readouterr().err
    assert sanity(monkeypatch, "--parts") == 2 and "--parts needs" in capsys.readouterr().err
    for damage in ("", "[]", '{"RMSNorm": [["a"]]}'):
        (tmp_path / "parts.json").write_text(damage)
        assert sanity(monkeypatch) == 2 and "parts.json is damaged" in capsys.readouterr().err


def test_a_reference_of_another_model_cannot_be_checked(checkpoint: Path):
    right = reference_of("bidirectional")
    other = right._replace(hidden_states=right.hidden_states[..., :-1])
    with pytest.raises(GradingError, match="which is not the shape of"):
        check_model(LocalStudent(ROOT), checkpoint, [other])


@pytest.mark.parametrize("content", [b"", b"<html></html>", {"logits": 1, "hidden_states": 2}, {"logits": None}, [1]])
def test_a_damaged_reference_is_one_line(monkeypatch, capsys, tiny_checkpoint: Path, tmp_path: Path, content: object):
    path = tmp_path / "reference.data"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    status = sanity(monkeypatch, "--pretrained-model-path", tiny_checkpoint, "--data", path)
    check_one_error(status, capsys.readouterr().err, path)


def test_what_cannot_be_checked_is_one_line(monkeypatch, capsys, tiny_checkpoint: Path, tmp_path: Path):
    """A missing file, a damaged checksum, a file that is no checkpoint. No bundled file replaces one that is named."""
    monkeypatch.chdir(tmp_path)
    Path("broken.pt").write_text("x")
    right, damaged, one = tmp_path / "reference.data", tmp_path / "damaged.data", torch.ones(100).numpy().tobytes()
    torch.save({"logits": torch.ones(100), "hidden_states": torch.ones(100)}, right)
    deep = tmp_path / "deep.pt"
    torch.save({"model": {"tok_embeddings.weight": torch.ones(300, 32, 1)}}, deep)
    raw = right.read_bytes()
    assert raw.count(one) == 2
    damaged.write_bytes(raw.replace(one, bytes(8) + one[8:]))
    for checkpoint, data, words in (
        ("absent.pt", None, ("absent.pt", "does not exist")), (None, "absent.pt", ("absent.pt", "does not exist")),
        ("broken.pt", None, ()), (None, "broken.pt", ()),
        ("absent.pt", right, ("absent.pt", "does not exist")), (tiny_checkpoint, "absent.pt", ("absent.pt does not",)),
        (tiny_checkpoint, damaged, ("damaged.data", "truncated or damaged")),
        (right, right, ("no tok_embeddings.weight",)), (deep, right, ("no tok_embeddings.weight",)),
        (tiny_checkpoint, right, ("too small for the reference's token ids",)),
    ):  # fmt: skip
        named = {"--pretrained-model-path": checkpoint, "--data": data}
        status = sanity(monkeypatch, *(word for pair in named.items() if pair[1] for word in pair))
        captured = capsys.readouterr()
        check_one_error(status, captured.err, *words)
        assert "Your Llama" not in captured.out
