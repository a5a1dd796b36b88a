"""How cost grows: fitted exponents, and the verdict beside the algorithm's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import bench as bench_module
from benchmarks import growth as growth_module
from benchmarks import limits, report, run
from benchmarks.bench import Bench, Growth, exponent
from config import LlamaConfig
from utils import UserError

SIZES = (64, 128, 256, 512, 1024, 2048)
LINEAR = [float(size) for size in SIZES]


def grown(*powers: float, fixed: float = 0.0, expected: float = 1.0) -> Growth:
    """A round for each of `powers`."""
    costs = [[fixed + size**power for power in powers] for size in SIZES]
    return Growth("x", SIZES, costs, [size**expected for size in SIZES])


def test_an_exponent_is_that_of_the_power():
    assert exponent(SIZES, [3.0 * size**1.7 for size in SIZES]) == pytest.approx(1.7)
    assert exponent(SIZES, [5.0] * len(SIZES)) == pytest.approx(0.0)
    bent = [1.0, 1.0, 1.0, 2.0, 4.0, 8.0]
    growth = Growth("x", SIZES, [[cost] for cost in bent], LINEAR)
    assert growth.local == pytest.approx((0.0, 1.0)) and 0.0 < growth.fitted < 1.0


@pytest.mark.parametrize(
    ("growth", "is_faster"),
    [
        (grown(1.0), False),
        (grown(2.0), True),
        (grown(2.0, 1.1, 2.0), False),  # noise: one round was not
        (grown(2.0, expected=2.0), False),
        (grown(2.0, fixed=400.0**2), True),  # what is fixed hides it at small sizes only
        (grown(0.5, expected=0.0), True),
        (grown(0.1, expected=0.0), False),
    ],
)
def test_what_grows_faster_than_its_algorithm(growth: Growth, is_faster: bool):
    assert growth.is_faster == is_faster
    assert report.growth_cells(growth)[-1].startswith("GROWS FASTER") == is_faster


def test_a_run_fails_by_growth_unless_it_is_quick():
    bench = Bench(None, None, None, bench_module.Sizes(), None, None, 1, None, {}, growth=[grown(2.0), grown(1.0)])
    assert run.wrong([], bench) == ["x: GROWS FASTER than its algorithm"]
    bench.sizes = bench_module.QUICK_SIZES
    assert run.wrong([], bench) == []


def test_attention_makes_long_texts_more_than_linear():
    config = LlamaConfig.from_preset("stories42M", attention="causal")
    by_length = [limits.classifying(config, 1, size, 5)[0].operations for size in SIZES]
    by_rows = [limits.classifying(config, rows, 64, 5)[0].operations for rows in SIZES]
    assert 1.02 < exponent(SIZES[:3], by_length[:3]) < exponent(SIZES[3:], by_length[3:]) < 1.5
    assert exponent(SIZES, by_rows) == pytest.approx(1.0)


@pytest.mark.slow
def test_predict_is_measured_in_a_process_of_its_own(tmp_path: Path):
    bench = SimpleNamespace(
        folder=tmp_path, threads=1, sizes=bench_module.QUICK_SIZES._replace(predicted=(20, 40)), growth=[]
    )
    growth_module._measure_predict(bench)
    seconds, memory = bench.growth
    assert len((tmp_path / "predictions.txt").read_text(encoding="utf-8").splitlines()) == 40
    assert min(seconds.medians) > 0.1 and 50 < min(memory.medians) <= max(memory.medians) < 2000
    (tmp_path / "predict.pt").write_bytes(b"damaged")
    with pytest.raises(UserError, match="predict ended with status 2: error"):
        growth_module._predict(bench, tmp_path / "predict.pt", 20)
