"""Intervals and tests of differences: against closed forms, against slow versions, and how often they find nothing."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score

from advanced.experiments.results import compare, figure_of, fits, judges_of, table_of
from advanced.experiments.statistics import Difference, holm, macro_f1_table, pooled, two_way
from engine.data import pack
from utils import UserError


def test_with_one_seed_it_is_the_t_test_of_paired_sentences():
    drawing = np.random.default_rng(1)
    better, base = drawing.random(900) < 0.6, drawing.random(900) < 0.5
    found, known = two_way((better.astype(float) - base)[None]), stats.ttest_rel(better.astype(float), base)
    assert found.p == pytest.approx(known.pvalue) and found.degrees == known.df == 899
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval()))


def test_mean_squares_are_those_of_the_analysis_of_variance():
    """A slow version, cell by cell; the degrees are Satterthwaite's."""
    table = np.random.default_rng(2).normal(size=(4, 7)) + np.arange(4)[:, None] / 3
    grand, rows, columns = table.mean(), table.mean(1), table.mean(0)
    rest = sum((table[s, n] - rows[s] - columns[n] + grand) ** 2 for s, n in np.ndindex(4, 7)) / (3 * 6)
    by_seed, by_sentence = 7 * sum((rows - grand) ** 2) / 3, 4 * sum((columns - grand) ** 2) / 6
    found, variance = two_way(table), by_seed + by_sentence - rest
    assert found.mean == pytest.approx(grand) and found.error == pytest.approx(math.sqrt(variance / 28))
    degrees = variance**2 / (by_seed**2 / 3 + by_sentence**2 / 6 + rest**2 / 18)
    assert found.degrees == pytest.approx(degrees)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(grand) / found.error, degrees))


def test_where_the_estimate_is_not_positive_the_rest_is_taken():
    table = np.array([[1.0, -1.0], [-1.0, 1.0]])  # rows and columns have no effect
    assert two_way(table) == Difference(0.0, math.sqrt(4 / 1 / 4), 1)
    same = two_way(np.zeros((5, 40)))
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1) and two_way(np.ones((5, 40))).p == 0


def test_an_interval_is_never_thousands_wide():
    """Of three seeds without an effect, V comes out near 0 in some tables; accuracies differ by 1 at most."""
    drawing = np.random.default_rng(6)
    found = [two_way(drawing.integers(-1, 2, (3, 600))) for _ in range(400)]
    assert min(each.degrees for each in found) == 1.0 and max(each.high - each.low for each in found) < 1


def test_seeds_that_differ_widen_the_interval():
    drawing = np.random.default_rng(2)
    steady = (drawing.random((5, 400)) < 0.1).astype(float)
    moody = np.zeros((5, 400))
    moody[:2] = drawing.random((2, 400)) < 0.25  # the same gain on average, in two seeds of five
    narrow, wide = two_way(steady), two_way(moody)
    assert wide.mean == pytest.approx(narrow.mean, abs=0.02) and wide.error > 1.5 * narrow.error


def drawn_pair(drawing: np.random.Generator, seeds: int, sentences: int, of_seed: float, of_sentence: float):
    """Whether two equally good methods are right: S n each, with effects of sentences, of seeds, and of both."""
    each, hard = [], drawing.normal(0, 2, sentences)
    for _ in range(2):
        own = hard + drawing.normal(0, of_sentence, sentences)
        logits = own + drawing.normal(0, of_seed, (seeds, 1)) + drawing.normal(0, 0.5, (seeds, sentences))
        each.append((drawing.random((seeds, sentences)) < 1 / (1 + np.exp(-logits))).astype(float))
    return each


@pytest.mark.parametrize("seeds", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_equal_methods_differ_in_five_of_a_hundred_comparisons(seeds: int):
    """5 % +- 2, over a grid of how much seeds and sentences matter, in 400 simulated comparisons each."""
    drawing, found = np.random.default_rng(3), []
    for of_seed, of_sentence, sentences in itertools.product((0.1, 0.5), (0.0, 0.5), (245, 1101)):
        for _ in range(400):
            one, other = drawn_pair(drawing, seeds, sentences, of_seed, of_sentence)
            found.append(two_way(one - other).p < 0.05)
    assert 0.03 <= np.mean(found) <= 0.07


def test_a_true_difference_is_found_as_often_as_is_said():
    """`detectable` is what is found with a probability of .8, about: its error is an estimate."""
    drawing = np.random.default_rng(4)
    true = np.mean(
        [two_way(drawing.normal(0, 1, (10, 300)) + drawing.normal(0, 1, 300)).detectable for _ in range(200)]
    )
    found = [two_way(drawing.normal(true, 1, (10, 300)) + drawing.normal(0, 1, 300)).p < 0.05 for _ in range(400)]
    assert 0.72 < np.mean(found) < 0.88


def test_macro_f1_is_the_mean_of_its_table_and_its_error_that_of_drawing_sentences():
    """Against scikit-learn's figure, of all sentences and of draws of them with replacement."""
    drawing = np.random.default_rng(5)
    labels = drawing.integers(0, 3, 600)
    row = np.where(drawing.random(600) < 0.6, labels, drawing.integers(0, 2, 600))
    score = partial(f1_score, average="macro", labels=[0, 1, 2, 3], zero_division=0)  # the last is never there
    table = macro_f1_table(row[None], labels, 4)
    assert table.shape == (1, 600) and table.mean() == pytest.approx(score(labels, row))
    draws = [drawing.integers(0, 600, 600) for _ in range(400)]
    spread = np.std([score(labels[draw], row[draw]) for draw in draws], ddof=1)
    assert two_way(table).error == pytest.approx(spread, rel=0.1)


def test_differences_of_several_panels_are_pooled():
    each = [Difference(0.1, 0.03, 4), Difference(0.3, 0.04, 9)]
    found = pooled(each)
    assert (found.mean, found.error) == pytest.approx((0.2, 0.025))
    assert found.degrees == pytest.approx((9 + 16) ** 2 / (81 / 4 + 256 / 9))
    assert pooled(each[:1]) == pytest.approx(each[0]) and not found.has_few_seeds
    assert pooled([each[0], each[1]._replace(has_few_seeds=True)]).has_few_seeds


def test_p_values_are_corrected_as_by_holm():
    """A slow version: the k-th smallest of m is rejected if all smaller ones are, and it is below level / (m - k)."""
    drawing = np.random.default_rng(6)
    for _ in range(50):
        ps = (drawing.random(6) ** 3).tolist()
        adjusted, order = holm(ps), sorted(range(6), key=ps.__getitem__)
        for level in (0.01, 0.05, 0.2):
            rejected = itertools.takewhile(lambda rank: ps[order[rank]] * (6 - rank) < level, range(6))  # noqa: B023
            assert {order[rank] for rank in rejected} == {place for place in range(6) if adjusted[place] < level}
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


# ------------------------------------------------------------------------------------------------------- of results


def run_of(answers: list[int], labels: list[int], test: list[int] | None = None, **more) -> dict:
    """A result: answers on dev and, in the same order of labels, on test."""
    entry = {"predictions": pack(answers), "labels": pack(labels)}
    run = {"key": str(hash((*answers, *more.items()))), "model": "m", "weights": "w", "settings": {"hold_out": 0.1}}
    more_splits = {} if test is None else {"test": {"predictions": pack(test), "labels": pack(labels)}}
    return {**run, "dev": entry, **more_splits, **more}


def test_one_or_two_seeds_of_what_is_trained_say_nothing_about_seeds():
    """What is not trained, of all sentences, has no other seed: it is compared with each seed of the other side."""
    labels = [0, 1] * 100
    right, wrong = run_of(labels, labels), run_of(labels[::-1], labels)
    trained = [
        [{**each, "trainable": 5, "key": f"{each['key']}{seed}"} for seed in range(3)] for each in (right, wrong)
    ]
    assert not compare({1: right}, {1: wrong}, ["dev"]).has_few_seeds
    for seeds, is_few in ((1, True), (2, True), (3, False)):
        several = [dict(enumerate(each[:seeds])) for each in trained]
        assert compare(*several, ["dev"]).has_few_seeds == is_few
        asked = compare({7: right}, several[1], ["dev"])
        assert (asked.has_few_seeds, asked.mean) == (is_few, 1.0)
    drawn = {**right, "shots": 16}  # not trained, but of a draw of sentences
    asked = {**right, "method": "in-context", "arguments": ["shots=4"]}  # of drawn examples
    solved = {**right, "option": "frozen-states"}  # of what is not held out
    for each in (drawn, asked, solved):
        assert compare({1: each}, {1: wrong}, ["dev"]).has_few_seeds
        assert compare({1: each}, {2: each}, ["dev"]) is None
    assert not compare({1: {**asked, "arguments": ["shots=0"]}}, {1: wrong}, ["dev"]).has_few_seeds
    assert not compare({1: {**solved, "settings": {"hold_out": 0}}}, {1: wrong}, ["dev"]).has_few_seeds


def test_methods_are_compared_on_the_seeds_that_both_have_and_on_one_make_of_a_checkpoint():
    labels = [0, 1, 0, 1]
    ours = {seed: run_of(labels, labels, trainable=1) for seed in (1, 2)}
    theirs = {seed: run_of([0, 1, 1, 1], labels, trainable=1) for seed in (2, 3)}
    assert compare(ours, theirs, ["dev"]).mean == pytest.approx(0.25)
    assert compare(ours, {}, ["dev"]) is None
    again = {2: {**theirs[2], "weights": "of another make"}}
    assert compare(ours, again, ["dev"]) is None
    assert compare(ours, {2: {**again[2], "model": "another"}}, ["dev"]).mean == pytest.approx(0.25)


def test_dev_and_test_count_together_unless_dev_has_chosen():
    labels = [0, 1, 0, 1]
    run = run_of(labels, labels, test=[1, 0, 0, 1], epoch=1)
    assert judges_of([run]) == ["dev", "test"] and figure_of([run], ["dev", "test"]).mean == 0.75
    assert table_of([run], ["dev", "test"]).tolist() == [[1, 1, 1, 1, 0, 0, 1, 1]]
    chosen = {**run, "settings": {"hold_out": 0.0}}
    assert judges_of([chosen]) == ["test"] and judges_of([{**run_of(labels, labels), "epoch": 1}]) == ["dev"]
    assert judges_of([{**run_of(labels, labels, epoch=1), "settings": {}}]) == ["dev"]


@pytest.mark.parametrize("other", [[0, 1, 0], [1, 1, 0, 1]])
def test_runs_of_other_sentences_are_not_compared(other: list[int]):
    one, two = run_of([0, 1, 0, 1], [0, 1, 0, 1]), run_of(other, other)
    with pytest.raises(UserError, match="other"):
        table_of([one, two], ["dev"])


def test_what_did_not_fit_its_sentences_is_known_by_their_loss():
    """.9 ln 5 is 1.4485."""
    assert fits({"fit_loss": 1.44, "classes": 5}) and not fits({"fit_loss": 1.45, "classes": 5}) and fits({})
