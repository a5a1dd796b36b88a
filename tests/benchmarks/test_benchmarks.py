"""The benchmarks: turns, ratios, the machine's limit, the least work of an answer, and the program as a whole."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention
import torch.utils.flop_counter
from conftest import random_llama
from error_helpers import ROOT, check_one_error, snapshot

from benchmarks import __main__ as benchmarks_main
from benchmarks import bench as bench_module
from benchmarks import decoders, limits, measure, peers, processes, report, run, table
from benchmarks.__main__ import get_args
from benchmarks.bench import Bench, Line
from benchmarks.decoding import Decoding
from benchmarks.limits import Measured, Pass, Rates
from benchmarks.measure import Ratio, Share, Turns, ratio
from benchmarks.peers import Peers
from benchmarks.table import ROWS, Work
from config import LlamaConfig
from engine.context import KVCache, last_rows
from fast.last_position import hidden_state_at, read_one_position
from llama import Llama
from utils import UserError

# ----------------------------------------------------------------------------------------------- measurement


class FakeTime:
    """A clock that only moves when somebody works or sleeps."""

    def __init__(self):
        self.now, self.log = 100.0, []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def worker(self, name: str, seconds: list[float], own: float | None = None) -> Callable[[], float | None]:
        left = iter(seconds)

        def run() -> float | None:
            self.log.append(name)
            self.now += next(left)
            return own

        return run


def test_contenders_take_turns_and_pauses_are_not_counted():
    time = FakeTime()
    turns = Turns(3, pause=0.5, clock=time.clock, sleep=time.sleep)
    runs = {"a": time.worker("a", [9, 1, 2, 3]), "b": time.worker("b", [9, 4, 4, 9])}
    costs = turns.take(runs | {"c": time.worker("c", [1] * 4, own=7.0)})
    assert time.log == [*"abc", *"cba"] * 2
    assert costs == {"a": [1, 2, 3], "b": [4, 4, 9], "c": [7, 7, 7]}
    assert time.now == 100 + 12 * 0.5 + 15 + 26 + 4
    assert ratio(costs["b"], costs["a"]) == Ratio(3.0, 2.0, 4.0)
    assert turns.take({"d": time.worker("d", [1, 2, 3])}, warm_up=0) == {"d": [1, 2, 3]}
    assert turns.take({"e": time.worker("e", [1, 2])}, warm_up=0, most=2) == {"e": [1, 2]}


def test_a_turn_lasts_at_least_as_long_as_it_should():
    time = FakeTime()
    turns = Turns(1, pause=0.0, clock=time.clock, sleep=time.sleep)
    runs = {"a": time.worker("a", [1, 2, 3]), "b": time.worker("b", [4]), "c": time.worker("c", [1], own=7.0)}
    assert turns.take(runs, warm_up=0, least=4.0) == {"a": [2], "b": [4], "c": [7]}
    assert time.log == ["a"] * 3 + ["b", "c"]


def test_every_line_takes_turns_of_the_length_that_the_sizes_say(monkeypatch: pytest.MonkeyPatch):
    taken = {}
    monkeypatch.setattr(Turns, "take", lambda self, runs, **settings: taken.update(settings) or {})
    sizes = bench_module.Sizes()
    bench = Bench(None, None, Turns(1), sizes, None, None, 1, None, {})
    bench.race(Work("a line", ()), {}, most=2)
    assert taken == {"least": sizes.turn, "drop": bench.drop, "most": 2}
    assert bench_module.QUICK_SIZES.turn == 0.0 < sizes.turn


def test_ratios_need_equal_rounds():
    with pytest.raises(ValueError):
        ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("against", "ratio", "same", "verdict"),
    [
        (table.PLAIN_PATH, Ratio(1.2, 1.1, 1.3), None, "not slower"),
        (table.PLAIN_PATH, Ratio(0.98, 0.9, 1.01), None, "not slower"),  # within noise: some round was not slower
        (table.PLAIN_PATH, Ratio(0.98, 0.9, 0.99), None, "SLOWER"),
        (table.PLAIN_PATH, Ratio(0.96, 0.9, 1.3), None, "SLOWER"),
        (table.PLAIN_PATH, Ratio(9.9, 9.8, 10.0), False, "RESULTS DIFFER"),
        (table.HF, Ratio(0.5, 0.4, 0.6), True, ""),
        (table.HF, Ratio(0.5, 0.4, 0.6), False, "RESULTS DIFFER"),
        (table.PLAIN_PATH, None, None, "not measured"),
    ],
)
def test_verdicts(against: str, ratio: Ratio | None, same: bool | None, verdict: str):
    assert Line("decode, fp32", against, ratio, same_result=same).verdict == verdict


def limit_line(work_: str, passes: list[Pass], precision: str, seconds: list[float]) -> Line:
    goal = next(work.goal for row in ROWS.values() for work in row.works if work.title == work_)
    return Line(work_, table.LIMIT, passes=passes, precision=precision, goal=goal, costs={table.OURS: seconds})


def test_fractions_of_the_machines_limit():
    """800 weights at 4 bytes take 32 s at 100 bytes/s, 2000 operations 20 s at 100 a second: memory is the limit."""
    line = limit_line("decode, fp32", [Pass(2000, 800)], "fp32", [40.0, 32.0, 64.0])
    assert line.verdict == "not measured"
    line.compare_with_limit(Rates(100.0, {"fp32": 100.0}))
    assert line.ratio == Ratio(0.8, 0.5, 1.0) and (line.ours, line.theirs, line.goal) == (40.0, 32.0, 0.9)
    assert line.verdict == "0.80 of the limit, goal 0.9 missed"
    line.compare_with_limit(Rates(100.0, {"fp32": 2000 / 36}))  # now arithmetic is, 36 s
    assert line.ratio.median == pytest.approx(0.9) and line.verdict == "0.90 of the limit, goal 0.9 met"


def test_fewer_bits_have_a_goal_where_they_are_faster():
    passes = [Pass(1000, 1)]
    line = limit_line("forward 10x45, bf16", passes, "bf16", [10.0])
    line.compare_with_limit(Rates(1e9, {"fp32": 100.0, "bf16": 119.0}))
    assert line.goal is None and line.verdict == "0.84 of the limit, bf16 is not faster here"
    line = limit_line("forward 10x45, bf16", passes, "bf16", [10.0])
    line.compare_with_limit(Rates(1e9, {"fp32": 100.0, "bf16": 121.0}))
    assert line.goal == 0.7 and line.verdict == "0.83 of the limit, goal 0.7 met"
    reading = limit_line("decode, bf16", [Pass(1, 1000)], "bf16", [10.0])  # half the bytes whatever products cost
    reading.compare_with_limit(Rates(1000.0, {"fp32": 100.0}))
    assert reading.goal == 0.85 and reading.ratio.median == pytest.approx(0.2)


def test_rates_are_the_best_of_a_kind_and_of_two_measurements():
    before = [Measured("read", "a", 5.0), Measured("read", "b", 3.0), Measured("fp32", "c", 9.0)]
    before += [Measured("bf16", "d", None), Measured("bf16", "e", 4.0)]
    after = [Measured("read", "a", 4.0), Measured("read", "b", 6.0), Measured("fp32", "c", None)]
    after += [Measured("bf16", "d", None), Measured("bf16", "e", 7.0)]
    best = limits.best_of(before, after)
    assert [measured.rate for measured in best] == [5.0, 6.0, 9.0, None, 7.0]
    rates = limits.limits(best)
    assert rates == Rates(6.0, {"fp32": 9.0, "bf16": 7.0})
    assert rates.product("bf16") == rates.product("int8") == 9.0  # numbers in fewer bits can be widened


def test_a_way_that_does_not_run_here_is_no_limit(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(limits, "_int8", fails)
    measured = limits.measure(Turns(1, 0.0), shrink=512)
    by_kind = {kind: [rate for k, _, rate in measured if k == kind] for kind in ("read", "fp32", "bf16", "int8")}
    assert set(by_kind["int8"]) == {None} and "int8" not in limits.limits(measured).products
    assert all(rate > 0.0 for rate in by_kind["read"])
    assert max(by_kind["fp32"]) == limits.limits(measured).products["fp32"]
    assert len({name for _, name, _ in measured}) == len(measured)


def test_every_row_has_a_function_and_every_contender_its_needs():
    for row in ROWS.values():
        module, _, name = row.measure.partition(".")
        assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), name))
        for work in row.works:
            assert all(name in table.CONTENDERS for name in work.against if name != table.LIMIT)
            assert (table.LIMIT in work.against) <= (work.goal is not None)
    for info in table.CONTENDERS.values():
        module, _, name = info.kind.rpartition(".")
        assert not info.kind or isinstance(getattr(importlib.import_module(module), name), type)


# ------------------------------------------------------------------------------------------- the least work


def counted(run: Callable[[], object]) -> int:
    """Operations of the products that `run` does, attention spelled out, as PyTorch counts them."""
    spelled_out = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter, spelled_out:
        run()
    return counter.get_total_flops()


def test_operations_are_those_that_pytorch_counts():
    """Bidirectional, where no score is left out; grouped-query, and no two widths alike."""
    contenders = Peers(random_llama(hidden_dim=80))
    config, tokens, at = contenders.config, torch.randint(4, 300, (3, 11)), torch.full((3,), 10)
    model = contenders.llama(table.PLAIN_PATH, "bidirectional")
    assert limits.forward_pass(config, 3, 11, read=11).operations == counted(lambda: model(tokens, targets=tokens))
    last = limits.forward_pass(config, 3, 11, outputs=0)
    assert last.operations == counted(lambda: hidden_state_at(model, tokens, at))
    classifier = contenders.classifier(table.PLAIN_PATH, attention="bidirectional")
    read_one_position(classifier)  # which is what has to be computed
    counted(lambda: classifier(tokens))  # compares it with llama.py
    assert limits.classifying(config, 3, 11, 5)[0].operations == counted(lambda: classifier(tokens))
    optimizer, batch = peers.optimizer(table.OURS, classifier), peers.Batch((tokens,), torch.tensor([0, 1, 4]))
    step = counted(lambda: peers.train_step(classifier, optimizer, batch))
    assert limits.training(config, 3, 11, 5)[0].operations == step


def test_operations_of_a_step_with_a_cache():
    model = random_llama(attention="causal", hidden_dim=80)
    cache, tokens = KVCache(model, 3, 20), torch.randint(4, 300, (3, 11))
    cache.read(tokens)
    step = limits.forward_pass(model.config, 3, 1, before=11)
    assert step.operations == counted(lambda: cache.read(tokens[:, :1]))
    in_layers = sum(weight.numel() for weight in model.layers.parameters() if weight.dim() == 2)
    assert step.weights == in_layers + model.output.weight.numel()


def test_the_plain_contender_keeps_what_it_has_read_and_the_courses_does_not():
    contenders = Peers(random_llama(attention="causal"))
    works = Work("a line", (table.PLAIN_PATH, table.COURSE))
    bench = Bench(None, contenders, Turns(1), bench_module.QUICK_SIZES, None, None, 1, None, {})
    asked, make = [], contenders.llama

    def watched(*args: object) -> torch.nn.Module:
        model = make(*args)
        model.register_forward_pre_hook(lambda module, args: asked.append(args[0].shape[1]))
        return model

    contenders.llama = watched
    race = Decoding(bench, works)
    expected = random_llama(attention="causal").generate(race.prompt, 8, temperature=0.0).tolist()
    for name, lengths in ((table.PLAIN_PATH, [5] + [1] * 7), (table.COURSE, [*range(5, 13)])):
        asked.clear()
        race.runs[name]()
        assert asked == lengths and race.ids[name] == expected


@pytest.mark.parametrize("asking", [1, 4, 9])
def test_a_causal_model_sees_the_pairs_of_its_mask(asking: int):
    config = LlamaConfig.from_preset("tiny", attention="causal")
    assert limits.visible_pairs(config, 9, asking) == last_rows(asking, 9).sum()
    assert limits.visible_pairs(LlamaConfig.from_preset("tiny"), 9, asking) == 9 * asking


def test_decoding_reads_once_a_token_and_recomputing_grows():
    causal, bidirectional = (LlamaConfig.from_preset("tiny", attention=kind) for kind in ("causal", "bidirectional"))
    passes = limits.decoding(causal, 2, prompt=5, new=4)
    assert len(passes) == 4 and passes[0].operations > passes[3].operations > passes[1].operations
    # what was computed with a cache in four passes is what one pass over all of it computes, but for what is read
    whole = limits.forward_pass(causal, 2, 8, read=8, outputs=0).operations
    alone = [limits.forward_pass(causal, 2, 1, before=before, outputs=0).operations for before in range(8)]
    assert sum(alone) == whole
    assert limits.recomputing(bidirectional, 1, 5, 3) == [limits.forward_pass(bidirectional, 1, n) for n in (5, 6, 7)]


# ----------------------------------------------------------------------------------------------- the program


def program(*flags: object, timeout: float = 120) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks", *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=timeout)


@pytest.mark.slow
def test_a_quick_run_prints_every_line_and_writes_its_files(tmp_path: Path):
    """All but the whole processes, which the next test measures."""
    pytest.importorskip("fast", reason="the kernels that are measured are not here")
    names = [name for name in ROWS if name not in ("first-run", "large")]
    flags = ["--quick", "--repeats", 1, "--threads", 1, "--json", tmp_path / "report.json"]
    flags += ["--markdown", tmp_path / "report.md", "--rows", *names]
    if os.environ.get("MINLLAMA_LLAMA2C"):
        flags += ["--llama2c", os.environ["MINLLAMA_LLAMA2C"]]
    done = program(*flags, timeout=540)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    printed = [(line["work"], line["against"]) for line in results["rows"]]
    works = [work for name in names for work in ROWS[name].works]
    titles = [(work.title, against) for work in works for against in work.against]
    assert sorted(printed) == sorted(titles)
    text, markdown = done.stdout.splitlines(), (tmp_path / "report.md").read_text(encoding="utf-8")
    for line in results["rows"]:
        (found,) = (row for row in text if row.startswith(f"{line['work']:<43}{line['against']:<18}"))
        assert line["verdict"] in found and f"| {line['work']} |" in markdown
        assert line["verdict"] == "not measured" or line["ratio"]["low"] <= line["ratio"]["median"]
        assert line["same_result"] is not False
        assert line["against"] != table.LIMIT or 0.0 < line["ratio"]["median"] < 1.0
    assert set(results["profiles"]) == {work.title for work in works if table.LIMIT in work.against}
    sums = [sum(row["share"] for row in rows) for rows in results["profiles"].values()]
    assert sums == pytest.approx([1.0] * len(sums), abs=0.05)
    grown = {row["work"]: row for row in results["growth"]}
    assert all(f"| {name} |" in markdown and row["verdict"] in markdown for name, row in grown.items())
    assert (
        len(grown) == 11 and grown["predict, lines"]["exponent"] < 1.1 and all(row["costs"] for row in grown.values())
    )
    assert grown["memory of predict, lines"]["exponent"] < 0.1
    assert "where our time goes" in done.stdout and "where the time goes" in markdown
    assert results["machine"]["threads"] == 1 and results["limits"]["products"]["fp32"] > 0 and results["kernels"]


@pytest.mark.slow
def test_whole_processes_are_measured(tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("fast", reason="the kernels that are measured are not here")
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer.read_bytes())
    monkeypatch.setenv("MINLLAMA_ASSETS", str(tmp_path))
    done = program("--quick", "--rows", "first-run", "large", "--json", tmp_path / "report.json", timeout=600)
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["rows"]
    ran, others = lines[:4], lines[4:]
    assert [line["work"] for line in ran] == [work.title for work in ROWS["first-run"].works]
    assert all(line["same_result"] and line["ours"] > 0.5 for line in ran)
    works = ROWS["large"].works
    assert {line["work"] for line in others} == {
        title for work in works for title in (work.title, processes.memory_title(work))
    }
    for line in others:
        has_peer = importlib.util.find_spec("transformers") is not None
        assert (line["ratio"] is not None) == has_peer, line["note"]
        assert not has_peer or line["ours"] > (50 if "memory" in line["work"] else 0.5)


def test_without_a_fitting_tokenizer_or_git_a_line_says_so(monkeypatch: pytest.MonkeyPatch):
    works = ROWS["first-run"].works
    titles = [work.title for work in works]
    bench = SimpleNamespace(config=LlamaConfig.from_preset("tiny"))
    monkeypatch.setattr(processes, "find_tokenizers", lambda _: [])
    monkeypatch.setattr(
        processes, "_first_and_later", lambda bench, works, *_: [Line(work.title, "x") for work in works]
    )
    monkeypatch.setattr(processes, "tracked_files", lambda: ["run_llama.py"])
    lines = processes.first_run(bench, works)
    assert [line.work for line in lines] == titles
    assert [line.note for line in lines] == ["", ""] + ["no tokenizer of 300 pieces"] * 2
    monkeypatch.setattr(processes, "tracked_files", list)
    assert all("git" in line.note and line.ratio is None for line in processes.first_run(bench, works))


@pytest.mark.parametrize(("same", "status"), [(True, 0), (None, 0), (False, 1)])
def test_results_that_differ_end_with_status_1_after_all_is_written(
    same: bool | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def measure(*_: object) -> list[Line]:
        slow = limit_line("decode, fp32", [Pass(1, 1)], "fp32", [1e9])  # a missed goal is no failure
        slower = Line("decode, fp32", table.PLAIN_PATH, Ratio(0.1, 0.1, 0.1), note="x", same_result=same)
        return [slower, slow]

    canned = [Measured("read", "r", 1.0), Measured("fp32", "p", 1.0)]
    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "measure_rates", lambda *_: canned)
    files = ["--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", *files])
    assert benchmarks_main.main() == status
    assert ("error: decode, fp32, plain path: x" in (shown := capsys.readouterr()).err) == bool(status)
    verdicts = [line["verdict"] for line in json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["rows"]]
    assert verdicts == ["RESULTS DIFFER" if same is False else "SLOWER", "0.00 of the limit, goal 0.9 missed"]
    assert all(verdict in (tmp_path / "r.md").read_text(encoding="utf-8") for verdict in verdicts)
    assert "goal 0.9 missed" in shown.out


def test_where_time_goes_adds_up_and_names_what_takes_longest():
    a, b = torch.ones(400, 400), torch.ones(3)

    def run() -> None:
        for _ in range(5):
            a @ a
        b + b
        time.sleep(0.05)

    first, *_, others, elsewhere = measure.shares(run)
    assert first.operation == "mm" and first.calls == 5 and first.share > 0
    assert (others.operation, elsewhere.operation) == (measure.OTHER_OPERATIONS, measure.OUTSIDE_PYTORCH)
    assert elsewhere.share > 0.3  # it slept
    assert sum(share.share for share in measure.shares(run)) == pytest.approx(1.0, abs=0.05)


def test_markdown_has_every_line_also_the_missed_ones():
    reached = limit_line("decode, fp32", [Pass(1, 1)], "fp32", [5.0])
    reached.compare_with_limit(Rates(4.0, {"fp32": 2.0}))
    lines = [
        reached,
        Line("decode, fp32", table.PLAIN_PATH, Ratio(0.5, 0.4, 0.6), 1.0, 2.0, "tok/s", note="identical ids"),
        Line("decode, fp32", table.LLAMA2C, note="no --llama2c"),
    ]
    profiles = {"decode, fp32": [Share("mm", 0.625, 8, 2e-4), Share("Python and compiled loops", 0.375, 1, 1.0)]}
    text = report.markdown({"cpu": "some|other"}, Rates(4e9, {"fp32": 2e9}), lines, profiles)
    assert "| decode, fp32 | mm 62% (8 x 200 us), Python and compiled loops 38% |" in text
    assert (
        "| cpu | some\\|other |" in text and "memory read: 4.0 GB/s" in text and "products, fp32: 2.0 GFLOP/s" in text
    )
    assert "| decode, fp32 | 0.20 | 0.20-0.20 | 5 s | 1 s | 0.20 of the limit, goal 0.9 missed |" in text
    assert "| decode, fp32 | plain path | 0.50 | 0.40-0.60 | 1 tok/s | 2 tok/s | SLOWER; identical ids |" in text
    assert "| decode, fp32 | llama2.c | - | - | - | - | not measured: no --llama2c |" in text


def test_help_answers_without_pytorch():
    code = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_module('benchmarks', run_name='__main__')"
    command = [sys.executable, "-c", f"import sys; sys.argv = ['benchmarks', '--help']; {code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--llama2c" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows", "decode-fp31"], ["--rows", "decode-fp31", "decode-fp32"]),
        (["--repeats", "0"], ["--repeats", "'0'"]),
        (["--repeats", "many"], ["--repeats", "'many'"]),
        (["--threads", "-1"], ["--threads"]),
        (["--json", "no-such-folder/report.json"], ["--json", "no-such-folder"]),
        (["--json", "."], ["--json", "folder"]),
        (["--markdown", "no-such-folder/report.md"], ["--markdown", "no-such-folder"]),
        (["--markdown", "report", "--json", "./report"], ["--markdown", "--json"]),
        (["--quik"], ["--quik"]),
    ],
)
def test_wrong_flags_are_one_sentence(flags: list[str], words: list[str]):
    with pytest.raises(UserError) as caught:
        get_args(flags)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)


def test_all_lines_are_measured_where_none_is_named():
    assert get_args([]).rows == tuple(ROWS)


def test_wrong_input_ends_with_status_2_and_no_file(tmp_path: Path):
    before = snapshot(tmp_path)
    done = program("--repeats", "0", "--json", tmp_path / "report.json")
    check_one_error(done.returncode, done.stderr, "--repeats")
    assert snapshot(tmp_path) == before


def test_a_missing_or_foreign_llama2c_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match="--llama2c"):
        decoders.find_program(tmp_path)
    (tmp_path / "run").write_text("#!/bin/sh\necho no such thing >&2\n")
    (tmp_path / "run").chmod(0o755)
    config = LlamaConfig.from_preset("tiny", attention="causal")
    foreign = decoders.Llama2C(decoders.find_program(tmp_path), tmp_path, Llama(config).state_dict(), config, 1)
    with pytest.raises(UserError, match="no such thing"):
        foreign.generate([1, 259, 260], 3)
