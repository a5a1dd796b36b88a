"""Running a table: nothing twice, several at a time, what another table has done, flags of the program."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from grids import (  # noqa: F401 (fixtures)
    CONTENT,
    Finished,
    Threads,
    computing,
    finished,
    line_of,
    main,
    model,
    scored,
    table_of,
    tuning_runs,
)

from advanced.experiments import __main__ as program
from advanced.experiments import processes, rows, runner, trial
from advanced.experiments.grid import Table
from advanced.experiments.models import Model
from advanced.experiments.results import append_result, read_results, results_beside
from advanced.experiments.rows import Trial
from engine.data import pack
from engine.storage import NameLock
from utils import UserError


def test_a_line_that_a_kill_has_cut_is_done_again(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "results.jsonl"
    about = {"model": "m", "checksums": ["1", "2"]}
    append_result(path, {"key": "a", **about})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"key": "b", "x"')
    assert read_results([path, tmp_path / "absent"]).keys() == {"a"} and "left out" in capsys.readouterr().err
    append_result(path, {"key": "c", **about})
    with pytest.raises(UserError, match="line 2 is not a result"):  # somebody should look at it
        read_results([path])


@pytest.mark.parametrize("line", ['{"key": "a"}', '{"model": "m", "checksums": []}', '["key"]', "\xff"])
def test_a_line_of_another_kind_is_refused(tmp_path: Path, line: str):
    path = tmp_path / "results.jsonl"
    path.write_bytes(f"{line}\n".encode("latin-1"))
    append_result(path, {"key": "c", "model": "m", "checksums": ["1", "2"]})
    with pytest.raises(UserError, match="line 1 is not a result|not UTF-8"):
        read_results([path])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seconds": -7.0}, "'seconds' or 'peak_mb'"),
        ({"dev": {"accuracy": 0.95}}, "'accuracy' of 'dev' of the line, which is 0.60000 by its predictions"),
        ({"test": {"accuracy": 0.6001}}, "'accuracy' of 'test'"),
        ({"test": {"labels": pack([1])}}, "'labels' of 'test'"),
    ],
)
def test_figures_that_a_line_itself_contradicts_are_refused(
    finished: Finished, tmp_path: Path, changed: dict, said: str
):
    line = next(iter(finished[1].values()))
    line |= {name: line[name] | value if isinstance(value, dict) else value for name, value in changed.items()}
    append_result(tmp_path / "results.jsonl", line)
    with pytest.raises(UserError, match=f"line 1 is not a result: {said}"):
        read_results([tmp_path / "results.jsonl"])


@pytest.mark.slow
def test_the_program_runs_what_is_left_and_nothing_twice(tmp_path: Path, tiny_checkpoint: Path, films: dict[str, Path]):
    (tmp_path / "data").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"data/films-{split}.txt").write_bytes(films[split].read_bytes())
    (tmp_path / "data/films-label-mapping.json").write_bytes(films["label_names"].read_bytes())
    table_of(tmp_path, rows=[{"name": "plain", "tune": {"hidden_dropout_prob": [0.1, 0.2]}}], shots=[4])
    command = ["-m", "advanced.experiments", "trial.json", "--pretrained-model-path", tiny_checkpoint]
    command += ["--results", "r.jsonl", "--work", "work"]
    no_git = {"PATH": ""}  # so that a tree that is being worked on is no other commit
    env = {**os.environ, "PYTHONPATH": str(ROOT), **no_git}
    how = {"env": env, "cwd": tmp_path, "timeout": 300}
    for expected in (6, 0):  # two seeds, each with two values and a final run
        done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, **how)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("done:") == expected
    keys = [json.loads(line)["key"] for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 6 and not list((tmp_path / "work").iterdir())


def test_a_run_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, model: Model, computing: Callable, capsys: pytest.CaptureFixture
):
    rows = [{"name": "bad", "seeds": [1, 2]}, {"name": "good", "method": "ema"}]
    table, path = table_of(tmp_path, rows=rows, shots=[4]), tmp_path / "r.jsonl"
    calls = []

    def compute(one: Trial, *where) -> dict:
        calls.append(one.row)
        if one.row == "bad":
            raise UserError("the loss is nan")
        return line_of(one, model)

    computing(compute)
    running = runner.Runner(lambda: table.ready(model, read_results([path])), model, path, tmp_path, "cpu", 2)
    with pytest.raises(UserError, match="2 runs failed, for example: final bad on films .4 a class., seed [12]: .*nan"):
        running.run()
    assert sorted(calls) == ["bad", "bad", "good", "good"] and len(read_results([path])) == 2
    out, err = capsys.readouterr()
    assert out.count("done:") == 2 and out.count("start:") == 4 and err.count("failed: final bad") == 2
    assert "2 runs done, 2 failed, 0 that can be started now are left" in out
    assert not list(tmp_path.glob("*.lock"))


def test_no_two_runs_at_a_time_write_the_files_of_one_model(tmp_path: Path, model: Model, computing: Callable):
    """The first member of a vote is the plain run of its seed, and lies in the same file."""
    rows = [{"name": "plain"}, {"name": "of three", "members": 3}, {"name": "other", "method": "ema"}]
    table, path = table_of(tmp_path, rows=rows, shots=[4]), tmp_path / "r.jsonl"
    writing, twice, most = Counter(), [], 0

    def compute(one: Trial, *where) -> dict:
        nonlocal most
        names = {each.key(model) for each in one.each_member()}
        writing.update(names)
        most = max(most, len(+writing))
        time.sleep(0.2)  # the others begin meanwhile
        twice.extend(name for name in names if writing[name] > 1)
        writing.subtract(names)
        return line_of(one, model)

    computing(compute)
    left = partial(table.ready, model)
    runner.Runner(lambda: left(read_results([path])), model, path, tmp_path, "cpu", 6).run()
    assert not twice and len(read_results([path])) == 6 and most > 3  # which do run at a time
    plain, three = (table.final(row, "films", 4, model, {})[0] for row in table.rows[:2])
    running = runner.Runner(lambda: [three], model, path, tmp_path, "cpu", 1)
    elsewhere = NameLock(tmp_path / f"{plain.key(model)}.lock")
    assert elsewhere.acquire() and not [*running.free()]  # in another process
    elsewhere.release()
    ((found, locks),) = running.free()
    assert found == three and len([*tmp_path.glob("*.lock")]) == 4
    locks.close()
    assert not [*tmp_path.glob("*.lock")]


def test_a_run_that_another_table_has_done_is_taken_over(
    tmp_path: Path, model: Model, computing: Callable, main: Callable, capsys: pytest.CaptureFixture
):
    """Its tuning settles which final runs there are; those that the other table has are not run either."""
    row = {"method": "lora", "arguments": ["rank=2"], "tune": {"dropout": [0.1, 0.2]}}
    other = table_of(tmp_path, rows=[{**row, "name": "low rank", "arguments": ["rank=2", "alpha=4"]}], shots=[4])
    results = tmp_path / "results"
    results.mkdir()
    runs = [run for seed in (1, 2) for run in tuning_runs(other, model, seeds=[seed])]
    lines = {each.key(model): line_of(each, model, selection=dict(each.settings)["dropout"]) for each in runs}
    for each in other.final(other.rows[0], "films", 4, model, lines)[:1]:
        lines[each.key(model)] = line_of(each, model, selection=0.5)
    for line in lines.values():
        append_result(results / f"other-{model.name}.jsonl", {**line, "checksums": [], "row": "x"})
    text = 'no result\n{"key": "x"}\n"key model checksums"\n'
    (results / f"notes-{model.name}.jsonl").write_text(text, encoding="utf-8")

    ran = []

    def compute(one: Trial, *where) -> dict:
        ran.append((one.phase, one.seed, dict(one.settings)["dropout"]))
        return line_of(one, model)

    computing(compute)
    table_of(tmp_path, rows=[{**row, "name": "plain", "arguments": ["alpha=4", "rank=2"]}], shots=[4])
    path = results / f"trial-{model.name}.jsonl"
    main("--results", path, "--list")
    assert "1 runs can be started now" in capsys.readouterr().out and not path.exists()
    again = results / "again.jsonl"
    again_left = partial(Table.read(tmp_path / "trial.json").ready, model)
    runner.take_over(lambda: again_left(read_results([again])), model, again, tmp_path)
    assert len(read_results([again])) == capsys.readouterr().out.count("taken over from another table: ") == 5
    for expected in (5, 0):
        main("--results", path, "--work", tmp_path / "work")
        assert capsys.readouterr().out.count("taken over from another table: ") == expected
    assert ran == [("final", 2, 0.2)]
    done = read_results([path])
    assert len(path.read_text().splitlines()) == len(done) == 6 and {*lines} < {*done}
    assert all(line["row"] == "plain" for line in done.values())
    assert all(done[key]["arguments"][:2] == ["alpha=4", "rank=2"] for key in lines)
    assert {done[key]["data"] for key in lines} == {"films"} and not list((tmp_path / "work").iterdir())


def test_probabilities_are_those_of_their_run_and_are_taken_over_with_it(
    tmp_path: Path, model: Model, computing: Callable, main: Callable, capsys: pytest.CaptureFixture
):
    """Two rows without a method are two runs of one seed."""
    results, work, rows = tmp_path / "results", tmp_path / "work", [{"name": "plain"}, {"name": "short"}]
    rows[1]["settings"] = {"max_sentence_len": 5}
    size = {}

    def compute(one: Trial, *where) -> dict:
        size[one.key(model)] = len(size) + 1
        return {**line_of(one, model), trial.PROBABILITIES: {"dev": np.full((size[one.key(model)], 2), 0.5)}}

    computing(compute)
    table_of(tmp_path, rows=rows, seeds=[1], shots=[4])
    first = results / f"first-{model.name}.jsonl"
    main("--results", first, "--work", work)
    expected = {f"{key}-dev": (length, 2) for key, length in size.items()}
    computing(lambda *one: pytest.fail("it is done already"))
    main("--results", results / f"second-{model.name}.jsonl", "--work", work)
    for name in ("first", "second"):
        with np.load(results / f"{name}-{model.name}-films-4.npz") as kept:
            assert {key: kept[key].shape for key in kept.files} == expected
    damaged = results / f"first-{model.name}-films-4.npz"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    main("--results", results / f"third-{model.name}.jsonl", "--work", work)
    said = capsys.readouterr().err
    assert "are not taken over: " in said and "first-tiny-films-4.npz is damaged" in said
    assert len(read_results([results / f"third-{model.name}.jsonl"])) == 2
    runner.keep(results / f"first-{model.name}.jsonl", work, read_results([first])[[*size][0]], {})
    assert "are not kept: " in capsys.readouterr().err


def test_results_beside_are_those_of_other_tables_of_the_checkpoint(tmp_path: Path):
    own = tmp_path / "own-a[1].jsonl"
    for number, name in enumerate(("own-a[1]", "other-a[1]", "other-a1", "other-b")):
        append_result(tmp_path / f"{name}.jsonl", {"key": str(number), "model": "a[1]", "checksums": []})
    assert [*results_beside(own, "a[1]")] == ["1"]


def test_a_run_that_another_table_ends_meanwhile_is_taken_over_by_one_process(
    tmp_path: Path, model: Model, computing: Callable
):
    """Also where it is not this process: a run that somebody holds is left to him."""
    table, path = table_of(tmp_path, rows=[{"name": "plain"}], shots=[4]), tmp_path / f"trial-{model.name}.jsonl"
    first, second = table.ready(model, {})
    others, line = tmp_path / f"other-{model.name}.jsonl", line_of(second, model)
    held, ran = runner.NameLock(tmp_path / f"{second.key(model)}.lock"), []

    def compute(one: Trial, *where) -> dict:
        ran.append(one.seed)
        held.release()
        append_result(others, line)
        return {**line_of(one, model), "row": "of the other"}

    append_result(others, line)
    assert held.acquire()

    def left() -> list[Trial]:
        return table.ready(model, read_results([path]))

    runner.take_over(left, model, path, tmp_path)
    assert not path.exists()
    computing(compute)
    runner.Runner(left, model, path, tmp_path, "cpu", 1).run()
    done = read_results([path])
    assert ran == [1] and len(path.read_text().splitlines()) == 2
    assert [done[one.key(model)]["row"] for one in (first, second)] == ["of the other", "plain"]


def test_what_other_tables_have_done_needs_no_checkpoint(tmp_path: Path, model: Model, main: Callable):
    table, path = table_of(tmp_path, rows=[{"name": "plain"}], shots=[4]), tmp_path / "trial-gone.jsonl"
    gone = Model(str(tmp_path / "gone.pt"), "", {"gone": model.checksums})
    (first, _) = table.ready(gone, {})
    append_result(tmp_path / "other-gone.jsonl", line_of(first, gone))
    with pytest.raises(UserError, match="gone.pt does not exist"):
        main("--results", path, "--work", tmp_path / "work", checkpoint=gone.checkpoint)
    assert [*read_results([path])] == [first.key(gone)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--workers", "-1"], "at least 1"),
        (["--minutes", "0"], "--minutes 0.0: must be above 0"),
        (["--minutes", "nan"], "must be above 0 and finite"),
        (["--results", "."], "must end in .jsonl"),
        (["--results", "trial.json"], "must end in .jsonl"),
        (["--results", "folder.jsonl"], "is a folder"),
        (["--report", "dev.txt"], "must end in .md"),
        (["--report", "absent/r.md"], "does not exist"),
        (["--render", "--list"], "--list and --render cannot be combined"),
        (["--report", "r.md", "--html", "p.html"], "--report and --html cannot be combined"),
        (["--tune", "--render"], "--tune says which runs are done, and --render does none"),
        (["--only", "nope"], "has no row nope; it has plain, lora, asked"),
        (["--baseline", "y"], "no row y"),
        (["--data", "films", "x"], "no data x; it has films"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line(
    tmp_path: Path, main: Callable, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
):
    table_of(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        main(*flags)


PARENT = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from advanced.experiments.trial import end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def test_runs_end_when_the_program_is_killed(tmp_path: Path):
    (tmp_path / "parent.py").write_text(PARENT, encoding="utf-8")
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], env=settings, stdout=subprocess.PIPE) as parent:
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        parent.communicate(timeout=20)  # ends when no process, also no child, holds its output any more


@pytest.fixture
def running(tmp_path: Path, model: Model) -> runner.Runner:
    """Three runs for two workers."""
    table = table_of(tmp_path, rows=[{"name": "plain"}], shots=[4], seeds=[1, 2, 3])
    return runner.Runner(lambda: table.ready(model, {}), model, tmp_path / "r.jsonl", tmp_path, "cpu", 2)


def test_after_the_time_nothing_is_started(running: runner.Runner, computing: Callable):
    computing(lambda *run: pytest.fail("started"))
    running.run(end=0.0)
    assert running.done == 0


def test_no_more_runs_are_started_than_there_are_workers(running: runner.Runner):
    assert len([*running.free()]) == 2


def test_a_run_that_another_process_has_taken_is_left_to_it(running: runner.Runner, model: Model, tmp_path: Path):
    key = running.left()[0].key(model)
    lock = NameLock(tmp_path / f"{key}.lock")
    assert lock.acquire()
    assert key not in [each.key(model) for each, _ in running.free()]


def test_a_run_that_another_process_has_ended_meanwhile_is_not_done_again(running: runner.Runner, tmp_path: Path):
    asked = iter([running.left()[:1], []])  # before its lock is taken, and after
    running.left = lambda: next(asked)
    assert not [*running.free()] and not [*tmp_path.glob("*.lock")]


def test_a_run_is_free_again_when_its_line_is_written_and_its_weights_go_then(
    running: runner.Runner, model: Model, computing: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def compute(one: Trial, *where) -> dict:
        (tmp_path / f"{one.key(model)}.pt").touch()
        return line_of(one, model, commit=where[-1])

    def release(lock: NameLock) -> None:
        done = read_results([tmp_path / "r.jsonl"])
        assert lock.path.stem in done and not lock.path.with_suffix(".pt").exists()
        released.append(lock.path.stem)

    released: list[str] = []
    left = running.left
    running.left = lambda: [one for one in left() if one.key(model) not in read_results([tmp_path / "r.jsonl"])]
    running.commit = "as it was at the start"
    computing(compute)
    monkeypatch.setattr(NameLock, "release", release)
    running.run()
    assert len(released) == 3
    assert {each["commit"] for each in read_results([tmp_path / "r.jsonl"]).values()} == {"as it was at the start"}


@pytest.mark.parametrize(("device", "processes"), [("cpu", 4), ("cuda", 3)])
def test_a_process_with_a_gpu_does_one_run_after_another_until_one_fails(
    tmp_path: Path, model: Model, computing: Callable, monkeypatch: pytest.MonkeyPatch, device: str, processes: int
):
    """Two workers, four runs, of which the first fails."""
    made, done = [], []

    class Counted(Threads):
        def __init__(self, *how, **named):
            made.append(self)
            super().__init__(*how, **named)

    def compute(one: Trial, *where) -> dict:
        if one.seed == 1:
            raise UserError("the loss is nan")
        done.append(one.seed)
        return line_of(one, model)

    computing(compute)
    monkeypatch.setattr("advanced.experiments.processes.ProcessPoolExecutor", Counted)
    table, path = table_of(tmp_path, rows=[{"name": "plain"}], shots=[4], seeds=[1, 2, 3, 4]), tmp_path / "r.jsonl"
    running = runner.Runner(lambda: table.ready(model, read_results([path])), model, path, tmp_path, device, 2)
    with pytest.raises(UserError, match="1 runs failed"):
        running.run()
    assert sorted(done) == [2, 3, 4] and len(made) <= processes and (device == "cuda" or len(made) == processes)
    assert all(pool._shutdown for pool in made)


def test_a_run_whose_files_have_changed_since_the_grid_began_is_no_result(
    running: runner.Runner,
    model: Model,
    computing: Callable,
    films: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    def compute(one: Trial, there: Model, *where) -> dict:
        monkeypatch.setattr(rows, "path_of", lambda _, split: str({**films, "test": films["dev"]}[split]))
        return {**line_of(one, model), "key": one.key(there)}

    running.left = partial(list, running.left()[:1])
    computing(compute)
    with pytest.raises(UserError, match="its files have changed since the grid began"):
        running.run()
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "workers", "threads"), [("3", 1, 3), ("4,2", 1, 4), (" 2 ", 1, 2), ("", 1, 8), (None, 2, 4)]
)
def test_threads_are_those_of_the_environment_or_workers_share_the_processors(
    running: Callable, monkeypatch: pytest.MonkeyPatch, text: str | None, workers: int, threads: int
):
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if text is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
    how = running.model, running.path, running.work, "cpu"
    assert runner.Runner(list, *how, workers).threads == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(UserError, match="OMP_NUM_THREADS=many: not a number of threads"):
        runner.Runner(list, *how, workers)


def test_new_processes_have_imported_pytorch(monkeypatch: pytest.MonkeyPatch):
    names: list[str] = []
    monkeypatch.setattr(
        "multiprocessing.context.BaseContext.set_forkserver_preload", lambda _, given: names.extend(given)
    )
    way = processes._context().get_start_method()
    assert all(map(importlib.util.find_spec, names)) and ("engine.runs" in names or way == "spawn")


def test_the_program_computes_where_it_is_told_to(tmp_path: Path, main: Callable, monkeypatch: pytest.MonkeyPatch):
    made: list[tuple] = []
    monkeypatch.setattr(program, "Runner", lambda *how: made.append(how) or SimpleNamespace(run=lambda minutes: None))
    table_of(tmp_path)
    for flags in (("--device", "mps", "--workers", 3), ()):
        main("--results", tmp_path / "r.jsonl", *flags)
    assert [how[4:6] for how in made] == [("mps", 3), ("cpu", 1)]


@pytest.fixture
def three_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables with seeds of their own, so that none takes over what another has done."""
    monkeypatch.setattr(program, "HERE", tmp_path)
    (tmp_path / "tables").mkdir()
    for number, name in enumerate(("first", "second", "third")):
        table_of(tmp_path, rows=[{"name": "plain"}], shots=[4], seeds=[2 * number, 2 * number + 1])
        (tmp_path / "trial.json").rename(tmp_path / f"tables/{name}.json")


def test_several_tables_are_done_one_after_the_other(
    tmp_path: Path, model: Model, three_tables: None, computing: Callable, main: Callable, capsys: pytest.CaptureFixture
):
    """What goes wrong in one does not stop the next, and is said at the end."""

    def compute(one: Trial, *where) -> dict:
        if one.table != "second":
            raise UserError("the loss is nan")
        return line_of(one, model)

    computing(compute)
    several = partial(main, "--work", tmp_path / "work", tables=("first", "second", "third"))
    for flags, said in ((["--list"], "2 runs can be started"), (["--minutes", "1e-9"], "0 runs done, 0 failed, 2")):
        several(*flags)
        out = capsys.readouterr().out
        assert out.count(said) == 3 and re.findall("^table (.*)$", out, re.MULTILINE) == ["first", "second", "third"]
    with pytest.raises(UserError, match="^of 3 tables 2 failed: first, third$"):
        several()
    said = capsys.readouterr().err
    assert all(f"warning: {name}: 2 runs failed, for example: final plain" in said for name in ("first", "third"))
    assert len(read_results([tmp_path / f"results/second-{model.name}.jsonl"])) == 2


def test_the_minutes_are_those_of_all_tables(
    tmp_path: Path, model: Model, three_tables: None, computing: Callable, main: Callable,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
):  # fmt: skip
    """The first one uses them up."""
    now = [0.0]

    def compute(one: Trial, *where) -> dict:
        now[0] += 120
        return line_of(one, model)

    computing(compute)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    main("--minutes", 1, "--work", tmp_path / "work", tables=("first", "second"))
    first, second = (line for line in capsys.readouterr().out.splitlines() if "runs done" in line)
    assert first.startswith("1 runs done, 0 failed, 1") and second.startswith("0 runs done")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((f"first second {flag}", f"{flag.split()[0]} is for one table, not for first, second") for flag in (
            "--results r.jsonl", "--only plain", "--baseline plain", "--report r.md", "--html p.html"
        )),
        ("first second first", "a table is named twice: first, second, first"),
        ("first nothing", "there is no table nothing; there are first, second, third"),
    ],
)  # fmt: skip
def test_of_several_tables_nothing_is_begun_where_one_cannot_be(
    tmp_path: Path, three_tables: None, main: Callable, words: str, said: str
):
    with pytest.raises(UserError, match=f"^{said}$"):
        main(tables=words.split())
    assert not (tmp_path / "results").exists()
