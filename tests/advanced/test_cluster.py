"""Grids on a Dask cluster: a scheduler and three workers on this machine, or something in their places."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import logged_runs
import pytest
from conftest import ROOT, random_llama, save_checkpoint
from grids import CONTENT, table_of

from advanced.experiments import cluster, runner
from advanced.experiments.cluster import Cluster, ClusterError, Lacking
from advanced.experiments.grid import Table
from advanced.experiments.models import Model
from advanced.experiments.results import read_results
from advanced.experiments.rows import Trial
from engine.plan import checksum
from utils import UserError

OF_TIME = {"seconds", "wall_seconds", "date", "machine", "peak_mb"}
PICTURES = {"pictures": CONTENT["data"]["films"]}
ROWS = [  # 12 runs of two seeds: values are chosen, a method, a solved head, a vote
    {"name": "plain", "tune": {"hidden_dropout_prob": [0.1, 0.2]}},
    {"name": "moving average", "method": "ema"},
    {"name": "states", "option": "frozen-states"},
    {"name": "of two", "members": 2},
]
TIMEOUT = 900  # seconds, on a machine that does much else


@pytest.fixture
def distributed() -> Any:
    return pytest.importorskip("distributed", reason="the extra cluster is not installed")


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Path, films: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a table, its data, which lie nowhere else, and the checkpoint."""
    (tmp_path / "data").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"data/pictures-{split}.txt").write_bytes(films[split].read_bytes())
    (tmp_path / "data/pictures-label-mapping.json").write_bytes(films["label_names"].read_bytes())
    for name in ("tiny.pt", "tiny.model"):
        (tmp_path / name).write_bytes(tiny_checkpoint.with_name(name).read_bytes())
    table_of(tmp_path, rows=ROWS, shots=[4], data=PICTURES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def first(table: Table, model: Model, row: int = 0) -> Trial:
    """The first final run of a row, which has nothing to choose."""
    return table.final(table.rows[row], "pictures", 4, model, {})[0]


# ---------------------------------------------------------------------------------------------------- files and errors


def laid_out(files: dict[str, str], folder: Path) -> None:
    """Copy the files of a run into its folder."""
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(Path(path).read_bytes())


@pytest.mark.parametrize(
    ("row", "files"),
    [
        ({}, set()),
        ({"checkpoint": "{model}-reviews.pt"}, {"tiny-reviews.pt", "tiny-reviews.json"}),
        ({"method": "distill", "arguments": ["teacher=saved/a.pt,b.pt"]}, {"a.pt", "b.pt"}),
        ({"settings": {"judged_on": "films"}}, {"films-dev.txt"}),
    ],
)
def test_in_its_folder_a_run_has_the_key_that_it_has_here(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, row: dict, files: set[str]
):
    """The key is made of all files that decide a run."""
    (folder / "saved").mkdir()
    for name in ("tiny-reviews.pt", "saved/a.pt", "b.pt"):
        save_checkpoint(folder / name, random_llama(seed=len(name)))
    record = {"weights": checksum("tiny-reviews.pt"), "settings": {"lr": 1}, "made_of": {}}
    (folder / "tiny-reviews.json").write_text(json.dumps(record), encoding="utf-8")
    table = table_of(folder, rows=[{"name": "x", **row}], shots=[4], data=PICTURES)
    model = Model("tiny.pt", "tiny.model")
    trial = first(table, model)
    found, there = cluster.folder_of(trial, model)
    run_folder = tmp_path_factory.mktemp("run")
    laid_out(found, run_folder)
    key = trial.key(model)
    monkeypatch.chdir(run_folder)
    assert trial.key(there) == key and files <= {Path(name).name for name in found}
    assert there.name == "tiny" and not any(Path(path).is_absolute() for path in (there.checkpoint, there.tokenizer))


@pytest.mark.parametrize("name", ["/a.pt", "../a.pt", "b/../../a.pt"])
def test_a_file_that_would_lie_outside_of_the_folder_of_a_run_is_refused(folder: Path, name: str):
    row = {"name": "x", "method": "distill", "arguments": [f"teacher={name}"]}
    table, model = table_of(folder, rows=[row], shots=[4], data=PICTURES), Model("tiny.pt", "tiny.model")
    with pytest.raises(UserError, match=f"^{name}: with --cluster, .* begins in this folder$"):
        cluster.folder_of(first(table, model), model)


def test_without_dask_one_line_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match="^--cluster needs the package distributed: pip install "):
        Cluster("tcp://127.0.0.1:1")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nowhere", "smoke://127.0.0.1:1", "tcp://127.0.0.1:many"])
def test_where_no_scheduler_is_one_line_says_so(
    distributed: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, address: str
):
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.2)
    with pytest.raises(ClusterError, match=f"^--cluster {address}: no scheduler answers that .*: ."):
        Cluster(address)


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        ("wait_for_workers", asyncio.TimeoutError("Only 0/1 workers"), "program: Only 0/1 workers"),
        ("wait_for_workers", asyncio.TimeoutError(), "program: TimeoutError"),  # an error without words
        ("imported", Exception("ModuleNotFoundError: no advanced"), "program: ModuleNotFoundError: no advanced"),
    ],
)
def test_a_scheduler_without_workers_that_can_compute_is_an_error(
    distributed: Any, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, said: str
):
    def fails(*given: object, **how: object) -> None:
        raise error

    monkeypatch.setattr(Answers, method, fails)
    monkeypatch.setattr(distributed, "Client", Answers([], []))
    with pytest.raises(ClusterError, match=f"^--cluster tcp://x: no scheduler answers that .* {said}$"):
        Cluster("tcp://x")


class Answers:
    """In the place of Dask's client: gives the answers of a list, to runs and to the functions of workers."""

    def __init__(self, runs: list, functions: list, status: str = "running"):
        self.runs, self.functions, self.status, self.asked = runs, functions, status, []

    def __call__(self, address: str, timeout: float) -> Answers:
        return self

    def wait_for_workers(self, fewest: int, timeout: float) -> None:
        pass

    def imported(self) -> dict:
        return {}

    def nthreads(self) -> dict[str, int]:
        return {"w": 2, "v": 1}

    def close(self) -> None:
        pass

    def submit(self, *call: object, **how: object) -> SimpleNamespace:
        return SimpleNamespace(result=self.result)

    def result(self) -> Any:
        answer = self.runs.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, function: Callable, *given: object, workers: list[str] | None = None, **how: object) -> dict:
        if workers is None:
            return self.imported()
        self.asked.append((function.__name__, workers))
        answer = self.functions.pop(0)
        return {} if answer == "gone" else {workers[0]: answer}


DIGEST = "of the tokenizer"  # in the place of the true one
LACKS, DONE = Lacking("w", [DIGEST]), {"key": "k"}


@pytest.mark.parametrize(
    ("runs", "functions", "error"),
    [
        ([DONE], [], None),
        ([LACKS, DONE], [[DIGEST], None], None),
        ([LACKS, DONE], [[]], None),  # another run has sent it meanwhile
        ([LACKS, LACKS, DONE], ["gone", [DIGEST], "gone"], None),  # the worker dies, before and after
        ([LACKS, DONE], [[DIGEST], OSError("the connection is closed")], None),
        ([LACKS], [[DIGEST], OSError(28, "No space left on device")], (OSError, "No space left")),
        ([LACKS], [[DIGEST], UserError("a file has changed")], (UserError, "a file has changed")),
        ([UserError("the loss is nan")], [], (UserError, "^the loss is nan$")),
        ([CancelledError()], [], (ClusterError, "the scheduler tcp://x went away")),
    ],
)
def test_a_worker_is_sent_what_it_lacks_and_errors_are_of_the_run_or_of_the_cluster(
    distributed: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, runs: list, functions: list, error: tuple | None
):
    client = Answers([*runs], [*functions])
    monkeypatch.setattr(distributed, "Client", client)
    monkeypatch.setattr(cluster, "checksum", lambda path: DIGEST if path.endswith("tiny.model") else path)
    executor, table, model = Cluster("tcp://x"), Table.read(folder / "trial.json"), Model("tiny.pt", "tiny.model")
    assert executor.workers == 3 and Cluster("tcp://x", 7).workers == 7
    trial = first(table, model, row=1)
    future = executor.submit(print, trial, model, folder, "cpu", 1, None)
    if error is None:
        assert future.result() == DONE
    else:
        with pytest.raises(error[0], match=error[1]):
            future.result()
        assert isinstance(future.exception(), ClusterError) == (error[0] is ClusterError)
    assert not client.runs and not client.functions and {workers[0] for _, workers in client.asked} <= {"w"}


def test_a_run_that_the_scheduler_has_lost_is_an_error_of_the_cluster(
    distributed: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(distributed, "Client", Answers([OSError("x")], [], status="connecting"))
    monkeypatch.setattr(runner, "commit_of_code", lambda: None)
    table, model = Table.read(folder / "trial.json"), Model("tiny.pt", "tiny.model")
    trial = first(table, model, row=1)
    running = runner.Runner(lambda: [trial], model, folder / "r.jsonl", folder, "cpu", 1, executor=Cluster("tcp://x"))
    with pytest.raises(ClusterError, match="went away; the same command goes on later"):
        running.run()
    assert not [*folder.glob("*.lock")]


@pytest.mark.parametrize(("is_daemon", "commit", "said"), [(True, "b", "--no-nanny"), (False, "b", "of commit a, and")])
def test_a_worker_of_another_kind_ends_the_grid(
    distributed: Any, monkeypatch: pytest.MonkeyPatch, is_daemon: bool, commit: str, said: str
):
    monkeypatch.setattr(distributed, "get_worker", lambda: SimpleNamespace(address="tcp://w"))
    monkeypatch.setattr(cluster, "commit_of_code", lambda: "a")
    monkeypatch.setattr(cluster, "current_process", lambda: SimpleNamespace(daemon=is_daemon))
    with pytest.raises(ClusterError, match=f"tcp://w .*{said}"):
        cluster.compute_there({}, print, None, None, "cpu", 0, commit)


def test_a_file_that_is_not_that_of_its_digest_is_not_kept(tmp_path: Path):
    worker = SimpleNamespace(local_directory=tmp_path / "worker-x")
    (tmp_path / "a").write_bytes(b"content")
    digest = checksum(tmp_path / "a")
    with pytest.raises(UserError, match="has changed"):
        cluster.take(digest, b"contents", worker)
    assert cluster.lacking_of([digest, digest], worker) == [digest]
    cluster.take(digest, b"content", worker)
    assert cluster.lacking_of([digest], worker) == []


# ------------------------------------------------------------------------------------------------------- true clusters


class Started:
    """A scheduler and three workers on this machine, each worker with a folder of its own for files."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, []
        self.env = {**os.environ, "PATH": "", "OMP_NUM_THREADS": "1", logged_runs.LOG: str(folder)}  # without git
        self.env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/advanced")))
        (folder / "empty").mkdir()
        self.start_all()

    def start_all(self) -> None:
        about = self.folder / f"scheduler-{time.time_ns()}.json"
        self.scheduler = self.start("scheduler", "--host", "127.0.0.1", "--port", 0, "--scheduler-file", about)
        how = "--scheduler-file", about, "--no-nanny", "--nthreads", 1, "--local-directory"
        self.workers = [self.start("worker", *how, self.folder / f"w{number}") for number in range(3)]
        while not about.exists():
            assert self.scheduler.poll() is None
            time.sleep(0.05)
        time.sleep(0.1)
        self.address = json.loads(about.read_text(encoding="utf-8"))["address"]

    def start(self, what: str, *flags: object) -> subprocess.Popen:
        with open(self.folder / f"{what}.log", "ab") as log:
            command = [sys.executable, "-m", "dask", what, "--no-dashboard", *map(str, flags)]
            how = {"env": self.env, "cwd": self.folder / "empty", "stdout": log, "stderr": log}
            self.processes.append(subprocess.Popen(command, **how))
        return self.processes[-1]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def started(folder: Path, distributed: Any) -> Iterator[Started]:
    all_of_them = Started(folder)
    yield all_of_them
    all_of_them.end()


def grid(folder: Path, env: dict[str, str], *flags: object) -> subprocess.Popen:
    command = ["-m", "advanced.experiments", "trial.json", "--pretrained-model-path", "tiny.pt", "--work", "work"]
    how = {"env": env, "cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command, *map(str, flags)], **how)


def lines_of(path: Path) -> dict[str, dict]:
    """The lines of results by key, without what differs from run to run."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == len({line["key"] for line in lines})
    return {line["key"]: {name: line[name] for name in line.keys() - OF_TIME} for line in lines}


@pytest.mark.slow
def test_a_grid_on_a_cluster_is_that_of_this_machine(folder: Path, started: Started):
    """Also where the scheduler goes away in the middle, and the command is given again. No file is sent twice."""
    here = grid(folder, started.env, "--results", "here.jsonl", "--workers", 2)
    said, errors = here.communicate(timeout=TIMEOUT)
    assert (here.returncode, said.count("done: ")) == (0, 12), errors

    there = "--results", "there.jsonl", "--cluster"
    stopped = grid(folder, started.env, *there, started.address)
    while "done: " not in stopped.stdout.readline():
        assert stopped.poll() is None
    started.scheduler.kill()
    _, errors = stopped.communicate(timeout=TIMEOUT)
    assert stopped.returncode == 2 and errors.count("\n") == 1, errors
    assert errors.startswith(f"error: the scheduler {started.address} went away") and not [*folder.glob("work/*")]
    done = lines_of(folder / "there.jsonl")
    assert 1 <= len(done) < 12
    for worker in started.workers:
        worker.wait(timeout=TIMEOUT)  # none works on without a scheduler
    sent = {path: path.stat().st_ino for path in folder.glob("w?/dask-scratch-space/min-llama/*")}
    assert sent and all(checksum(path) == path.name for path in sent)

    started.start_all()
    gone_on = grid(folder, started.env, *there, started.address)
    said, errors = gone_on.communicate(timeout=TIMEOUT)
    assert (gone_on.returncode, said.count("done: ")) == (0, 12 - len(done)), errors
    lines = lines_of(folder / "there.jsonl")
    assert lines == lines_of(folder / "here.jsonl") and done.items() <= lines.items()
    assert {path: path.stat().st_ino for path in sent} == sent  # a file that is sent again is another one
    assert not [*folder.glob("w?/dask-scratch-space/worker-*/tmp*")]


def ends(process: int) -> bool:
    """Whether a process ends within a minute."""
    for _ in range(600):
        with suppress(ProcessLookupError):
            os.kill(process, 0)
            time.sleep(0.1)
            continue
        return True
    return False


@pytest.mark.slow
def test_a_killed_worker_costs_its_run_again_and_nothing_else(
    folder: Path, started: Started, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "compute_trial", logged_runs.compute)
    monkeypatch.setattr(runner, "commit_of_code", lambda: None)
    table = table_of(folder, rows=[{"name": "plain"}], shots=[4], seeds=[*range(12)], data=PICTURES)
    model, path, (killed, *_) = Model("tiny.pt", "tiny.model"), folder / "r.jsonl", started.workers

    def left() -> list[Trial]:
        return table.ready(model, read_results([path]))

    executor = Cluster(started.address)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(runner.Runner(left, model, path, folder, "cpu", 3, executor=executor).run)
        begun = logged_runs.begun(folder, fewest=3)
        assert len({Path(each.work).parts[len(folder.parts)] for each in begun}) == 3  # each on a worker of its own
        (lost,) = [each for each in begun if Path(each.work).is_relative_to(folder / "w0")]
        killed.kill()
        assert ends(lost.process)
        (folder / logged_runs.GO_ON).touch()
        running.result(timeout=TIMEOUT)
    assert len(read_results([path])) == 12
    assert Counter(each.seed for each in logged_runs.begun(folder)) == Counter([*range(12), lost.seed])


@pytest.mark.slow
def test_the_workers_end_what_they_compute_when_the_program_ends(folder: Path, started: Started):
    executor, model = Cluster(started.address), Model("tiny.pt", "tiny.model")
    trial = first(table_of(folder, rows=[{"name": "plain"}], shots=[4], data=PICTURES), model)
    executor.submit(logged_runs.compute, trial, model, folder, "cpu", 1, None)
    (begun,) = logged_runs.begun(folder, fewest=1)
    executor.shutdown(cancel_futures=True)
    assert ends(begun.process) and all(worker.poll() is None for worker in started.workers)
