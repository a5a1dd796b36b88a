"""Runs that end early: a loss that diverges, a full disk, an interrupt, a damaged resume point, another run beside."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, hear_interrupts, outputs, random_llama
from error_helpers import TEXT_FLAGS, check_one_error, generate_flags, snapshot, stderr_lines

import classifier
import optimizer
import utils
from engine import checkpointer, families, finetuning, methods, metrics, programs, storage, training
from engine import runs as saved_runs
from utils import atomic_write

POINT = "finetune-3-0.01.resume"  # of the fixture `interrupted`
DEV_OUT, TEST_OUT = "films-dev-finetuning-output.txt", "films-test-finetuning-output.txt"


def accuracies(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if " :: " in line]


# ------------------------------------------------------------------------------------------- a loss that diverges


def poison_weights(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    """AdamW that leaves NaN behind at one of its steps, as a diverging run does."""
    step = optimizer.AdamW.step

    def poisoned(self: optimizer.AdamW, *args: object, **kwargs: object) -> object:
        result = step(self, *args, **kwargs)
        self.steps_done = getattr(self, "steps_done", 0) + 1
        if self.steps_done == at_step:
            self.param_groups[0]["params"][-1].data.fill_(float("nan"))
        return result

    monkeypatch.setattr(optimizer.AdamW, "step", poisoned)


def test_loss_not_finite_keeps_the_best_epoch(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 sentences in batches of 8: the fourth step is the first of the second epoch."""
    (tmp_path / DEV_OUT).write_text("earlier work")
    poison_weights(monkeypatch, at_step=4)
    status, out, err = call(*classify_flags("finetune"), "--epochs", 3)
    assert status == 2
    (line,) = [line for line in stderr_lines(err) if line.startswith("error: ")]
    assert line == stderr_lines(err)[-1]
    for words in ("epoch 1, batch 2", "nan", "--lr", "finetune-3-2e-05.pt", "finetune-3-2e-05.resume"):
        assert words in line
    assert "epoch 0:" in out and "epoch 1:" not in out
    own_files = ["finetune-3-2e-05.pt", "finetune-3-2e-05.resume"]
    saved = torch.load(tmp_path / own_files[0], weights_only=True)
    assert saved["epoch"] == 0
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())
    assert (tmp_path / DEV_OUT).read_text() == "earlier work"
    assert sorted(snapshot(tmp_path)) == [DEV_OUT, *own_files]


def test_weights_ruined_by_the_last_step_of_an_epoch_are_not_saved(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loss is computed after the last step; predictions made of NaN must not become the best model."""
    poison_weights(monkeypatch, at_step=3)
    status, _, err = call(*classify_flags("finetune"), "--epochs", 1)
    assert status == 2
    assert stderr_lines(err)[-1].startswith("error: ")
    assert "not finite" in err or "nan" in err
    assert snapshot(tmp_path) == {}


# ------------------------------------------------------------------------------------------------------ full disk


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside it, no file of this process can have more bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # half of it might stay in __pycache__
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes_none


def test_full_disk_while_saving_the_model(call: Callable, tmp_path: Path, classify_flags: Callable) -> None:
    """The zip writer of torch.save fails a second time when it closes; that must not be what a person sees."""
    (tmp_path / DEV_OUT).write_text("earlier work")
    before = snapshot(tmp_path)
    with files_of_at_most(20_000):
        status, _, err = call(*classify_flags("finetune"), "--epochs", 1)
    check_one_error(status, err, "finetune-1-2e-05.pt")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("size", [0, 1, 5_000, 50_000, 100_000])
def test_disk_fills_up_at_any_point_of_a_saved_model(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"earlier work")
    content = {"model": random_llama().state_dict()}
    with files_of_at_most(size), pytest.raises(OSError) as caught:
        storage.save_tensors(path, content)
    assert caught.value.errno == errno.EFBIG
    assert snapshot(tmp_path) == {"model.pt": b"earlier work"}


@pytest.mark.parametrize("writes", range(1, 9))
def test_an_interrupt_while_a_file_is_written_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """PyTorch's zip writer fails on closing a file that is not whole, which would hide it."""
    path, left = tmp_path / "model.pt", iter(range(writes))
    path.write_bytes(b"earlier work")

    class Interrupted(io.FileIO):
        def write(self, content: bytes) -> int:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return super().write(content)

    @contextlib.contextmanager
    def interrupted(path: Path, mode: str) -> Iterator[Interrupted]:
        with atomic_write(path, mode) as file:
            yield Interrupted(file.name, mode)

    monkeypatch.setattr(storage, "atomic_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        storage.save_tensors(path, {"a": torch.ones(100_000), "b": torch.ones(100_000)})
    assert snapshot(tmp_path) == {"model.pt": b"earlier work"}


@pytest.mark.parametrize("option", ["generate", "prompt"])
def test_full_disk_while_writing_outputs(
    call: Callable, flags_for: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    flags = flags_for(option)
    name = "generated-sentence-temp-0.txt" if option == "generate" else "films-dev-prompting-output.txt"
    (tmp_path / name).write_text("earlier work")
    before = snapshot(tmp_path)

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    status, _, err = call(*flags)
    check_one_error(status, err, name, "No space left on device", "free some space")
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_standard_output_on_a_full_disk(tmp_path: Path, flags_for: Callable) -> None:
    command = [sys.executable, str(ROOT / "run_llama.py"), *map(str, flags_for("generate"))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    check_one_error(done.returncode, done.stderr, "No space left on device", "standard output")


@pytest.mark.slow
def test_text_that_standard_output_cannot_encode(tmp_path: Path, flags_for: Callable, run: Callable) -> None:
    done = run(
        "run_llama.py",
        *flags_for("generate"),
        "--prompt",
        "un café",
        *TEXT_FLAGS,
        cwd=tmp_path,
        env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "generated-sentence-temp-0.txt").read_text(encoding="utf-8").startswith("un café")


# ------------------------------------------------------------------------------------------------------ interrupts


@pytest.mark.parametrize(
    ("number", "word", "expected"),
    [
        (signal.SIGINT, "interrupted", 130),
        # in this process: test_the_first_sigterm_ends_a_training_and_the_next_ones_are_ignored
        pytest.param(signal.SIGTERM, "terminated", 143, marks=pytest.mark.slow),
    ],
)
def test_interrupted_training_keeps_what_is_finished(
    tmp_path: Path, classify_flags: Callable, number: int, word: str, expected: int
) -> None:
    command = [sys.executable, str(ROOT / "run_llama.py"), *classify_flags("finetune"), "--epochs", "5000"]
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=hear_interrupts,
        ) as process,
    ):
        try:
            for line in process.stdout:
                if line.startswith("epoch 1:"):
                    break
            time.sleep(0.1)
            process.send_signal(number)
            status = process.wait(timeout=60)
        finally:
            process.kill()
    model, resume = tmp_path / "finetune-5000-2e-05.pt", tmp_path / "finetune-5000-2e-05.resume"
    words = (f"error: {word}; the best of", model.name, resume.name)
    line = check_one_error(status, (tmp_path / "stderr").read_text(), *words, expected=expected)
    assert "--resume" in line
    assert sorted(snapshot(tmp_path)) == [model.name, resume.name, "stderr"]
    saved = torch.load(model, weights_only=True)
    history = torch.load(resume, weights_only=True)["history"]
    assert len(history) >= 2
    assert saved["dev_score"] == max(result["dev_score"] for result in history)


@pytest.mark.parametrize("package", ["engine", "grading"])
def test_another_interrupt_while_the_program_ends_says_nothing(package: str) -> None:
    code = """if True:
        import os, signal, sys, threading, time
        from PACKAGE.programs import run_main

        def interrupt() -> None:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

        def main() -> None:
            threading.Thread(target=interrupt).start()  # it is waited for, as libraries are that have something to do
            raise KeyboardInterrupt

        sys.exit(run_main(main))"""
    command = [sys.executable, "-c", code.replace("PACKAGE", package)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=hear_interrupts)
    check_one_error(done.returncode, done.stderr, "interrupted", expected=130)


@pytest.mark.parametrize(
    ("number", "word", "expected"), [(signal.SIGTERM, "terminated", 143), (signal.SIGINT, "interrupted", 130)]
)
def test_the_first_signal_ends_a_training_and_the_next_ones_are_ignored(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    number: int, word: str, expected: int,
) -> None:  # fmt: skip
    ignored = []

    def end(*_: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            ignored.append(True)

    monkeypatch.setattr(finetuning, "run_epochs", end)
    status, _, err = call(*classify_flags("finetune"))
    check_one_error(status, err, f"error: {word}: files that were finished are kept", expected=expected)
    assert ignored and snapshot(tmp_path) == {} and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_is_left_alone_in_a_process_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, is_heard in (("1", True), ("2", False)):
        monkeypatch.setenv("WORLD_SIZE", size)
        with programs.hears_termination():
            assert (signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL) is is_heard


def after_two_epochs(patch: pytest.MonkeyPatch) -> None:
    print_epoch = finetuning.print_epoch

    def interrupt(result: methods.EpochResult, *what: object) -> None:
        print_epoch(result, *what)
        if result.epoch == 1:
            raise KeyboardInterrupt

    patch.setattr(finetuning, "print_epoch", interrupt)


def in_the_first_epoch(patch: pytest.MonkeyPatch) -> None:
    save = checkpointer.Checkpointer.save_resume_point

    def interrupt(self: checkpointer.Checkpointer, *state: object) -> None:
        save(self, *state)
        if self.begun.steps == 2:
            raise KeyboardInterrupt

    patch.setattr(checkpointer.Checkpointer, "save_resume_point", interrupt)


@pytest.mark.parametrize(
    ("interrupt", "kept"),
    [
        (after_two_epochs, "the best of 2 finished epochs stays in "),
        (in_the_first_epoch, "no epoch was finished; after 2 batches of the first one --resume goes on from "),
    ],
)
def test_interrupted_and_resumed_equals_uninterrupted(
    call: Callable,
    classify_flags: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupt: Callable,
    kept: str,
) -> None:
    flags = [*classify_flags("finetune"), "--epochs", 3, "--lr", 0.01, "--log_dir", "figures"]
    with monkeypatch.context() as patch:
        interrupt(patch)
        status, _, err = call(*flags, "--resume_every", 0)
    assert status == 130 and stderr_lines(err)[-1].startswith(f"error: interrupted; {kept}")
    status, resumed, _ = call(*flags, "--resume")
    assert status == 0 and ("goes on after 2 of its batches" in resumed) == (interrupt is in_the_first_epoch)
    files = outputs(tmp_path)
    figures = metrics.read_records(tmp_path / "figures")
    (tmp_path / "finetune-3-0.01.pt").unlink()
    status, straight, _ = call(*flags[:-1], "others")
    assert status == 0
    assert files == outputs(tmp_path) and sorted(files) == [DEV_OUT, TEST_OUT]
    assert accuracies(resumed) == accuracies(straight) and len(accuracies(resumed)) > 4
    others = metrics.read_records(tmp_path / "others")
    losses = [[each["loss"] for each in records if each["kind"] == "step"] for records in (figures, others)]
    assert losses[0] == losses[1] and len(losses[0]) > 6


@pytest.mark.parametrize("option", ["generate", "prompt"])
def test_interrupt_before_anything_is_written(
    call: Callable, flags_for: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(families, "load_llama", interrupt)
    status, _, err = call(*flags_for(option))
    check_one_error(status, err, "interrupted", expected=130)
    assert snapshot(tmp_path) == {}


def test_interrupt_while_writing(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("earlier work")
    with pytest.raises(KeyboardInterrupt), utils.atomic_write(tmp_path / "out.txt") as file:
        file.write("half")
        raise KeyboardInterrupt
    assert snapshot(tmp_path) == {"out.txt": b"earlier work"}


# ------------------------------------------------------------------------------------- standard streams, and memory

STREAMS = {"no output": ">&-", "no error": "2>&-", "neither": ">&- 2>&-", "a reader that goes": "| head -c 9 >&2"}


@pytest.mark.parametrize(
    ("option", "stream"),
    [("generate", "a reader that goes")]
    + [pytest.param("generate", stream, marks=pytest.mark.slow) for stream in STREAMS if stream != "a reader that goes"]
    + [pytest.param("finetune", stream, marks=pytest.mark.slow) for stream in STREAMS],
)
def test_work_goes_on_where_nobody_listens(tmp_path: Path, flags_for: Callable, option: str, stream: str) -> None:
    flags = " ".join(f"'{flag}'" for flag in [*flags_for(option), *(["--epochs", 1] if option == "finetune" else [])])
    command = f"set -o pipefail; '{sys.executable}' '{ROOT / 'run_llama.py'}' {flags} {STREAMS[stream]}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Error" not in done.stderr and "error" not in done.stderr
    assert len(list(tmp_path.glob("*.txt"))) == 2


def test_outputs_that_are_no_log_probabilities_stop_the_training(
    call: Callable, classify_flags: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier.F, "log_softmax", lambda scores, dim: scores * 50)
    status, _, err = call(*classify_flags("finetune"), "--batch_size", 24)  # all texts: the first batch is checked
    check_one_error(status, err, "not log-probabilities")


# -------------------------------------------------------------------------------------------- resuming, overwriting


@pytest.fixture
def interrupted(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    """The flags of a run of three epochs that was stopped after the second; its resume point is `POINT`."""
    flags = [*classify_flags("finetune"), "--epochs", 3, "--lr", 0.01]
    predict = training.evaluate
    with monkeypatch.context() as patch:

        def stop(*inputs: object, desc: str, **named: object) -> object:
            if desc == "dev acc 2":
                raise KeyboardInterrupt
            return predict(*inputs, desc=desc, **named)

        patch.setattr(training, "evaluate", stop)
        assert call(*flags)[0] == 130
    return flags


def worse(epoch: int) -> dict[str, object]:
    """What a point says of an epoch that has learned nothing."""
    figures = dict(train_loss=9.0, train_score=0.0, dev_score=0.0, seconds=1.0)
    return dict(epoch=epoch, **figures, improved=False, is_finish=False)


FIELDS = {  # one wrong field, the file being whole
    "a step size": lambda point: point["optimizer"]["param_groups"][0].update(lr=5.0),
    "a moment's shape": lambda point: point["optimizer"]["state"][0].update(m=torch.zeros(3)),
    "a moment's type": lambda point: point["optimizer"]["state"][0].update(v=torch.zeros(300, 32).half()),
    "half a step": lambda point: point["optimizer"]["state"][0].update(step=1.5),
    "a count": lambda point: point["optimizer"]["state"][0].update(step=-4),
    "a figure's type": lambda point: point["history"][0].update(dev_score="0.5"),
    "a figure": lambda point: point["history"][0].update(dev_score=50.0),
    "an epoch": lambda point: point["history"][1].update(epoch=7),
    "a long history": lambda point: point.update(history=[*point["history"], *(worse(n) for n in (2, 3))]),
    "another best epoch": lambda point: point["history"][1].update(improved=not point["history"][1]["improved"]),
    "other methods": lambda point: point.update(methods={"ema": {"steps": 1, "average": {}}}),
    "no best epoch": lambda point: point["history"][0].update(improved=False),
}
CONTENTS = {  # the point as another one
    "no model": lambda point: {k: v for k, v in point.items() if k != "model"},
    "no optimizer": lambda point: {k: v for k, v in point.items() if k != "optimizer"},
    "no history": lambda point: {k: v for k, v in point.items() if k != "history"},
    "no random state": lambda point: {**point, "rng": {}},
    "random state of another size": lambda point: {**point, "rng": {"cpu": torch.zeros(3, dtype=torch.uint8)}},
    "random state is a word": lambda point: {**point, "rng": "cpu"},
    "foreign history": lambda point: {**point, "history": [{"epoch": 0}]},
    "another model": lambda point: {**point, "model": {"w": torch.ones(1)}},
    "another optimizer": lambda point: {**point, "optimizer": {"state": {}, "param_groups": []}},
    "identity of tensors": lambda point: {**point, "identity": dict.fromkeys(point["identity"], torch.zeros(2))},
    "a part of no epoch": lambda point: {**point, "begun": {"random": point["rng"], "steps": -1}},
    "a part without its order": lambda point: {**point, "begun": {"random": {}, "steps": 1}},
    "list": lambda point: [1],
}
BYTES = {"cut": lambda raw: raw[:-100], "text": lambda raw: b"hello"}


@pytest.mark.parametrize("damage", [*BYTES, *CONTENTS, *FIELDS])
def test_a_damaged_resume_point_is_named_and_kept(
    call: Callable, interrupted: list, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / POINT
    if damage in BYTES:
        path.write_bytes(BYTES[damage](path.read_bytes()))
    elif damage in CONTENTS:
        torch.save(CONTENTS[damage](torch.load(path, weights_only=True)), path)
    else:
        point = storage.load_tensors(path, mmap=False)
        FIELDS[damage](point)
        storage.save_tensors(path, point)
    before = snapshot(tmp_path)
    status, _, err = call(*interrupted, "--resume")
    check_one_error(status, err, path.name, "damaged" if damage in FIELDS else "--resume")
    assert snapshot(tmp_path) == before


def test_resume_point_of_another_run(refused: Callable, interrupted: list, tmp_path: Path) -> None:
    refused([*interrupted, "--resume", "--seed", 7], POINT, "--seed")
    (tmp_path / "finetune-3-0.01.pt").unlink()
    refused([*interrupted, "--resume"], POINT, "finetune-3-0.01.pt does not exist")


@pytest.mark.parametrize("content", [torch.zeros(3), [1], {"identity": torch.zeros(1)}, {"identity": None}, {}, "text"])
def test_a_foreign_file_under_the_model_name_is_kept(
    call: Callable, classify_flags: Callable, tmp_path: Path, content: object
) -> None:
    torch.save(content, tmp_path / "finetune-1-2e-05.pt")
    before = (tmp_path / "finetune-1-2e-05.pt").read_bytes()
    status, out, err = call(*classify_flags("finetune"), "--epochs", 1)
    assert status == 0, err
    assert (tmp_path / "finetune-1-2e-05.pt").read_bytes() == before
    assert "save the model to finetune-1-2e-05-films-train.pt" in out


# ------------------------------------------------------------------------------------------- several runs, damaged runs


def test_two_runs_at_once_do_not_mix(call: Callable, classify_flags: Callable, tmp_path: Path) -> None:
    flags = [*classify_flags("finetune"), "--epochs", 1]
    _, alone, _ = call(*flags, "--seed", 7)
    for path in tmp_path.iterdir():
        path.unlink()
    other = storage.NameLock(tmp_path / "finetune-1-2e-05.lock")
    assert other.acquire()
    status, out, _ = call(*flags, "--seed", 7)
    other.release()
    assert status == 0 and "is in use by another process" in out
    assert "save the model to finetune-1-2e-05-films-train.pt" in out
    assert accuracies(out) == accuracies(alone)
    assert not list(tmp_path.glob("*.lock")) and not list(tmp_path.glob("*.resume"))


@pytest.mark.parametrize(("option", "split"), [("prompt", "dev"), ("finetune", "test")])
def test_output_files_of_another_run_are_not_overwritten(
    call: Callable, classify_flags: Callable, tmp_path: Path, option: str, split: str
) -> None:
    flags = classify_flags(option)
    path = Path(flags[flags.index(f"--{split}_out") + 1])
    other = storage.NameLock(path.with_suffix(".lck"))
    assert other.acquire()
    status, _, err = call(*flags)
    check_one_error(status, err, f"--{split}_out {path}", "is in use by another process")
    other.release()
    assert not list(tmp_path.iterdir())
    assert call(*flags)[0] == 0 and not list(tmp_path.glob("*.l*ck"))


def test_a_model_that_another_run_replaced_is_not_predicted_with(
    call: Callable, classify_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "finetune-1-2e-05.pt"
    load = saved_runs.load_classifier

    def replace(*inputs: object) -> object:
        content = storage.load_tensors(path, mmap=False)
        storage.save_tensors(path, {**content, "identity": {**content["identity"], "seed": 8}})
        return load(*inputs)

    monkeypatch.setattr(saved_runs, "load_classifier", replace)
    status, _, err = call(*classify_flags("finetune"), "--epochs", 1)
    check_one_error(status, err, path.name, "another process has replaced it")
    assert not list(tmp_path.glob("*output.txt"))


def test_a_damaged_best_model_is_named_and_the_resume_point_kept(
    call: Callable, interrupted: list, tmp_path: Path
) -> None:
    path = tmp_path / "finetune-3-0.01.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    before = snapshot(tmp_path)
    status, _, err = call(*interrupted, "--resume")
    check_one_error(status, err, path.name, "damaged", "without it")
    assert snapshot(tmp_path) == before


def test_resume_with_another_flag_names_the_run_that_lies_there(call: Callable, interrupted: list) -> None:
    status, out, _ = call(*interrupted, "--resume", "--lr", 0.02)
    assert status == 0 and "finetune-3-0.01.resume is of a run with another --lr" in out


@pytest.mark.parametrize("ending, word", [("pt", "fine-tuned classifier"), ("resume", "resume point")])
def test_what_a_run_saved_is_no_pretrained_model(
    call: Callable, tiny_tokenizer: Path, interrupted: list, ending: str, word: str
) -> None:
    status, _, err = call(*generate_flags(f"finetune-3-0.01.{ending}", "--tokenizer", tiny_tokenizer))
    check_one_error(status, err, word)
