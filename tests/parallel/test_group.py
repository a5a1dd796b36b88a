"""Several processes must do what one does, figures, predictions and files alike, and end together whatever happens."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import FIGURES, ROOT, drive_in, outputs, succeed
from error_helpers import stderr_lines
from group_worker import CASES, Case, methods_of, train_case

from engine.storage import load_tensors
from tokenizer import Tokenizer
from utils import UserError

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
LIMIT = 300  # seconds after which a run hangs: collectives wait for ten minutes
DRIVER = ROOT / "run_llama.py"


def torchrun(processes: int, *args: object) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    return [str(word) for word in (*launch, *args)]


def start(processes: int, *args: object, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(torchrun(processes, *args), cwd=cwd, env=ENVIRONMENT, timeout=LIMIT, **PIPES)


def errors(stderr: str) -> list[str]:
    return [line for line in stderr_lines(stderr) if line.startswith("error: ")]


# ------------------------------------------------------------------------------------- the same as one process


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> dict:
    """What three processes made of every case."""
    folder = tmp_path_factory.mktemp("outcomes")
    done = start(3, ROOT / "tests/parallel/group_worker.py", folder, tiny_tokenizer, "train", cwd=folder)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "outcomes.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_three_processes_train_and_predict_as_one(outcomes: dict, tmp_path: Path, tiny_tokenizer: Path, case: Case):
    alone = train_case(case, Tokenizer(tokenizer_model=tiny_tokenizer), tmp_path, methods=methods_of(case))
    together = outcomes[tuple(case)]
    for mine, theirs in zip(alone["figures"], together["figures"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-5, nan_ok=True)
    assert together["predictions"] == alone["predictions"] and len(set(alone["predictions"])) == 2
    assert torch.equal(together["rng"], alone["rng"])
    assert list(together["model"]) == list(alone["model"])
    for name, tensor in alone["model"].items():
        torch.testing.assert_close(together["model"][name], tensor, atol=2e-5, rtol=1e-4)
    places = [{tensor.data_ptr() for tensor in each["model"].values()} for each in (alone, together)]
    assert len(places[0]) == len(places[1])  # a tied matrix is stored once
    assert str(together["methods"].keys()) == str(alone["methods"].keys())
    averages = [each["methods"].get("ema", {}).get("average", {}) for each in (alone, together)]
    teachers = [each["methods"].get("smart", {}).get("teacher", {}) for each in (alone, together)]
    for mine, theirs in ((alone["best"], together["best"]), averages, teachers):
        assert list(mine) == list(theirs)
        for name, tensor in mine.items():
            torch.testing.assert_close(theirs[name], tensor, atol=2e-5, rtol=1e-4)
    assert together["optimizer"]["param_groups"] == alone["optimizer"]["param_groups"]
    for index, state in alone["optimizer"]["state"].items():
        assert together["optimizer"]["state"][index]["step"] == state["step"]
        for name in ("m", "v"):
            torch.testing.assert_close(together["optimizer"]["state"][index][name], state[name], atol=1e-5, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [["--shard"], []], ids=["sharded", "copied"])
def test_prompt_prints_and_writes_once_what_one_process_does(tmp_path: Path, classify_flags: Callable, shard: list):
    flags, alone, together = [*classify_flags("prompt"), "--batch_size", 7], tmp_path / "alone", tmp_path / "together"
    shown = drive_in(alone, *flags)
    together.mkdir()
    printed = succeed(start(2, DRIVER, *flags, *shard, cwd=together))
    assert printed.split("\n")[1:] == shown.split("\n")[1:]  # the first line has the arguments
    assert outputs(together) == outputs(alone) and len(outputs(alone)) == 2
    assert sorted(os.listdir(together)) == sorted(os.listdir(alone))


@pytest.mark.slow
def test_a_run_with_methods_is_that_of_one_process(tmp_path: Path, classify_flags: Callable):
    flags = [*classify_flags("finetune"), "--epochs", 3, "--lr", 0.01, "--batch_size", 5, "--method", "lora,ema"]
    flags += ["--method-args", "rank=2", "dropout=0.1", "decay=0.8"]
    flags += [word for each in ("dev", "test") for word in (f"--{each}_out", f"films-{each}-advanced-output.txt")]
    shown, together = drive_in(tmp_path / "alone", *flags), tmp_path / "together"
    together.mkdir()
    printed = succeed(start(2, DRIVER, *flags, cwd=together))
    assert FIGURES.findall(printed) == FIGURES.findall(shown)
    assert outputs(together) == outputs(tmp_path / "alone") and len(outputs(together)) == 2
    (mine,), (theirs,) = (list(folder.glob("*.pt")) for folder in (tmp_path / "alone", together))
    assert mine.name == theirs.name
    states = load_tensors(mine)["model"], load_tensors(theirs)["model"]
    for one, other in zip(*(state.values() for state in states), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_kernels_and_plain_code_train_on_several_processes_as_on_one(
    tmp_path: Path, classify_flags: Callable, attention: str
):
    """Copied and split models, of which `auto` reads one position of the last layer; the one process is plain."""
    flags = [*classify_flags("finetune"), "--epochs", 2, "--lr", 0.01, "--batch_size", 5, "--attention", attention]
    flags += ["--clip", 0.5, "--weight_decay", 0.1, "--dropout", 0.1]
    shown = drive_in(tmp_path / "alone", *flags, "--kernels", "plain")
    (expected,) = (tmp_path / "alone").glob("*.pt")
    for kernels, shard in (("auto", []), ("auto", ["--shard"]), ("plain", ["--shard"])):
        (folder := tmp_path / "-".join([kernels, *shard])).mkdir()
        printed = succeed(start(2, DRIVER, *flags, "--kernels", kernels, *shard, cwd=folder))
        assert FIGURES.findall(printed) == FIGURES.findall(shown) != []
        assert outputs(folder) == outputs(tmp_path / "alone") and len(outputs(folder)) == 2
        states = load_tensors(expected)["model"], load_tensors(folder / expected.name)["model"]
        assert list(states[0]) == list(states[1])
        for one, other in zip(*(state.values() for state in states), strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


# ---------------------------------------------------------------------------- fine-tuning, killed and taken up


@pytest.fixture(scope="module")
def flags(classify_flags: Callable) -> list:
    return [*classify_flags("finetune"), "--epochs", 6, "--lr", 0.01, "--batch_size", 5]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, flags: list) -> tuple[str, Path]:
    """What one process prints, and the folder with what it writes."""
    folder = tmp_path_factory.mktemp("alone")
    return drive_in(folder, *flags), folder


def without_seconds(stdout: str) -> list[str]:
    return [re.sub(r" +\d+\.\d(  <- .*)?$", "", line) for line in stdout.split("\n")[1:]]


def kill_one(process: subprocess.Popen, rank: int) -> None:
    """SIGKILL for one of the processes that torchrun has started."""
    listing = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.split("\n")[1:] if line]
    os.kill(sorted(pid for pid, parent in pairs if parent == process.pid)[rank], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "successor"), [(0, "sharded"), (1, "single"), (1, "copied")])
def test_one_is_killed_all_end_and_another_number_of_processes_takes_up(
    tmp_path: Path, flags: list, alone: tuple[str, Path], rank: int, successor: str
):
    with subprocess.Popen(torchrun(2, DRIVER, *flags), cwd=tmp_path, env=ENVIRONMENT, **PIPES) as process:
        assert any(line.startswith("epoch 2:") for line in process.stdout)
        kill_one(process, rank)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and not outputs(tmp_path)
    assert "Signal 9 (SIGKILL)" in stderr
    assert all("--resume goes on from finetune-6-0.01.resume" in line for line in errors(stderr))

    if successor == "single":
        printed = drive_in(tmp_path, *flags, "--resume")
    else:
        shard = ["--shard"] if successor == "sharded" else []
        printed = succeed(start(3, DRIVER, *flags, "--resume", *shard, cwd=tmp_path))
    assert "resuming from finetune-6-0.01.resume" in printed
    assert FIGURES.findall(printed) == FIGURES.findall(alone[0])
    assert outputs(tmp_path) == outputs(alone[1])
    assert not list(tmp_path.glob("*.resume"))


@pytest.fixture
def by_hand() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the driver as one of two, without torchrun: `by_hand(rank, flags, cwd)`; two machines, so to speak."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []

    def start_one(rank: int, flags: list, cwd: Path) -> subprocess.Popen:
        cwd.mkdir()
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
        command = [sys.executable, DRIVER, *map(str, flags)]
        started.append(subprocess.Popen(command, cwd=cwd, env={**ENVIRONMENT, **where}, **PIPES))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()


@pytest.mark.slow
def test_two_machines_need_no_common_folder_and_the_first_writes(
    tmp_path: Path, by_hand: Callable, flags: list, alone: tuple[str, Path]
):
    processes = [by_hand(rank, flags, tmp_path / str(rank)) for rank in range(2)]
    (stdout, stderr), (silence, second) = (process.communicate(timeout=LIMIT) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], stderr + second
    assert without_seconds(stdout) == without_seconds(alone[0])
    assert outputs(tmp_path / "0") == outputs(alone[1])
    assert not os.listdir(tmp_path / "1") and silence == "" and stderr_lines(second) == []
    saved, expected = (load_tensors(folder / "finetune-6-0.01.pt") for folder in (tmp_path / "0", alone[1]))
    assert list(saved["model"]) == list(expected["model"]) and saved["identity"] == expected["identity"]


@pytest.mark.slow
def test_other_data_on_another_machine_is_noticed(tmp_path: Path, by_hand: Callable, flags: list, films: dict):
    other = tmp_path / "train.txt"
    other.write_text(films["train"].read_text() + "1 ||| one more\n")
    processes = [by_hand(0, flags, tmp_path / "0"), by_hand(1, [*flags, "--train", other], tmp_path / "1")]
    for process in processes:
        _, stderr = process.communicate(timeout=LIMIT)
        assert process.returncode == 2
        assert errors(stderr) == ["error: process 1 of 2 has another train than process 0"]
    assert not os.listdir(tmp_path / "0")


# -------------------------------------------------------------------------------------------------- what fails


@pytest.mark.slow
def test_the_error_of_one_process_is_named_and_ends_all(tmp_path: Path, tiny_tokenizer: Path):
    done = start(2, ROOT / "tests/parallel/group_worker.py", tmp_path, tiny_tokenizer, "raise", cwd=tmp_path)
    assert done.returncode == 1 and not os.listdir(tmp_path)
    first, *others = errors(done.stderr)
    assert first == "error: the second process has had enough"
    assert all("another process of this run has ended" in line for line in others)


def test_an_error_that_all_meet_is_printed_once(tmp_path: Path, flags: list):
    done = start(2, DRIVER, *flags, "--lr", -1, cwd=tmp_path)
    assert errors(done.stderr) == ["error: --lr -1.0: must be above 0 and finite"] and done.returncode == 1


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_all_with_one_line(tmp_path: Path, flags: list):
    done = start(2, DRIVER, *flags, "--lr", "1e30", cwd=tmp_path)
    (error,) = errors(done.stderr)
    assert "the loss is nan, training stops" in error and not os.listdir(tmp_path)


@pytest.mark.slow
def test_a_full_disk_on_the_first_process_ends_all(tmp_path: Path, flags: list):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    settings = dict(cwd=tmp_path, env=ENVIRONMENT, timeout=LIMIT, preexec_fn=limit)
    done = subprocess.run(torchrun(2, DRIVER, *flags), **settings, **PIPES)
    assert done.returncode == 1 and not os.listdir(tmp_path)
    assert errors(done.stderr)[0].startswith("error: cannot read or write finetune-6-0.01.pt: File too large")


@pytest.mark.slow
def test_an_interrupt_says_once_what_is_kept(tmp_path: Path, flags: list):
    command = torchrun(3, DRIVER, *flags)
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, start_new_session=True, **PIPES) as process:
        assert any(line.startswith("epoch 2:") for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT)
    (error,) = errors(stderr)
    assert error.startswith("error: interrupted; the best of") and "--resume goes on" in error


TWO = {"WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(
    ("flags", "distributed", "message"),
    [
        (["--option", "generate"], TWO, "--option generate runs in one process"),
        (["--shard"], {}, "--shard splits the model over several processes; start them with torchrun"),
        (["--shard"], {"WORLD_SIZE": "1", "RANK": "0"}, "--shard splits the model"),
        ([], TWO, "WORLD_SIZE=2 announces several processes, but MASTER_ADDR"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path,
    drive: Callable,
    monkeypatch: pytest.MonkeyPatch,
    classify_flags: Callable,
    flags,
    distributed,
    message,
):
    for name, value in distributed.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        drive(*classify_flags("prompt"), *flags)
    assert not os.listdir(tmp_path)


def test_a_world_of_one_is_an_ordinary_run(
    tmp_path: Path, drive: Callable, monkeypatch: pytest.MonkeyPatch, classify_flags: Callable
):
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert "dev acc ::" in drive(*classify_flags("prompt")) and len(outputs(tmp_path)) == 2
