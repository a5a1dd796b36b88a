"""The formats and editions of the course: what a line says is the same to all programs."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from config import NORM_KINDS, SAMPLINGS, LlamaConfig
from engine import data as engine_data
from engine import flags
from engine.data import NO_GOLD_LABEL, Example, has_gold_labels, majority_accuracy
from engine.tables import SKIP
from grading import editions, outputs, programs, published, rules
from grading.editions import EDITIONS
from utils import UserError, prompt_suffix

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_is_written_is_what_is_read():
    for example in (Example("a ||| b", 0), Example("naïve", NO_GOLD_LABEL)):
        assert engine_data.parse_line(engine_data.format_line(example.label, example.sentence)) == example
    assert engine_data.format_line(3, "with a prompt ") == "3 ||| with a prompt "


def read_by_checker(path: Path) -> list[Example]:
    """The data, which are checked as if they were a student's predictions, too; what is not read alike is a problem."""
    report, name = rules.Report("alice"), "cfimdb-test-finetuning-output.txt"
    outputs.check_text(name, path.read_bytes(), rules.Rules(data_dir=path.parent), report)
    data = outputs.create_data(path, is_test=True)
    labels = [row.label for row in data]
    assert [("outside 0..1" in problem) for problem in report.wrong] == [True] * (min(labels) < 0)
    gold = (1.0, majority_accuracy(labels)) if has_gold_labels(labels) else (None, None)
    assert report.scores[name] == (len(data), *gold)
    return data


def read_by_sanity_check(path: Path) -> str:
    """The beginning of the hash of its labels."""
    return published.label_row("x", path, path, (published.PublishedLabels("", (0, 0), None),))[2][:8]


def told(read: Callable, *arguments: object) -> object:
    """What a program reads, or the sentence with which it refuses."""
    try:
        return read(*arguments)
    except (UserError, programs.GradingError) as error:
        return str(error)


ODD = {  # content, and what it says; None where it is refused
    "label with spaces": (b"  1   ||| a film\n0\t ||| another\n", [("a film", 1), ("another", 0)]),
    "no line end, stripped": (
        "1 |||  a naïve film \r\n 0  ||| another".encode(),
        [("a naïve film", 1), ("another", 0)],
    ),
    "two separators": (b"1 ||| a ||| b\n0 ||| ||| c\n", [("a ||| b", 1), ("||| c", 0)]),
    "CRLF": (b"1 ||| a film\r\n0 ||| another\r\n", [("a film", 1), ("another", 0)]),
    "byte-order mark": (b"\xef\xbb\xbf1 ||| a film\n0 ||| another\n", [("a film", 1), ("another", 0)]),
    "signs and zeros": (b"+1 ||| a film\n00 ||| another\n", [("a film", 1), ("another", 0)]),
    "other line ends": ("1 ||| a\u2028b\x85c\x0cd\n0 ||| e\n".encode(), [("a\u2028b\x85c\x0cd", 1), ("e", 0)]),
    "withheld, -1": (b"-1 ||| a film\n -1 ||| another\n", [("a film", -1), ("another", -1)]),
    "withheld, all 0": (b"0 ||| a film\n0 ||| another\n", [("a film", 0), ("another", 0)]),
    "withheld in part": (b"1 ||| a film\n-1 ||| another\n", None),
    "no spaces": (b"1|||a film\n0 ||| another\n", None),
    "a blank line": (b"1 ||| a film\n\n", None),
}


@pytest.mark.parametrize("content, rows", ODD.values(), ids=ODD)
def test_all_programs_read_a_line_alike(
    tmp_path: Path, drive: Callable, classify_flags: Callable, content: bytes, rows: list | None
):
    path = tmp_path / "cfimdb-test.txt"
    path.write_bytes(content)
    checked, hashed = told(read_by_checker, path), told(read_by_sanity_check, path)
    printed = told(drive, *classify_flags("prompt"), "--test", path)
    if rows is None:  # the driver alone knows how many labels there are
        same = printed.removesuffix(f"; {SKIP}").partition(" is not ")[0]
        assert checked == hashed and checked.partition(" is not ")[0] == same
        assert printed.startswith(f"{path} line ")
        return
    assert checked == rows
    assert hashed == hashlib.sha256("".join(f"{label}\n" for _, label in rows).encode()).hexdigest()[:8]
    assert f"load {len(rows)} data from {path}\n" in printed
    is_gold = len({label for _, label in rows}) > 1
    assert ("test acc ::" in printed) == is_gold == ("no gold labels" not in printed)
    written = (tmp_path / "films-test-prompting-output.txt").read_bytes().decode().removesuffix("\n").split("\n")
    suffix = " Is this movie bad or good? This movie is "
    assert [line.partition(" ||| ")[2] for line in written] == [f"{sentence}{suffix}" for sentence, _ in rows]


def test_the_question_joins_the_names_as_the_course_does_and_equal_labels_are_no_gold_labels():
    assert prompt_suffix(["bad", "good"]) == "Is this movie bad or good? This movie is "
    assert prompt_suffix(["a", "b", "c"]) == "Is this movie a, b, or c? This movie is "
    assert has_gold_labels([0, 0, 1]) and majority_accuracy([0, 0, 1]) == pytest.approx(2 / 3)
    assert not has_gold_labels([0, 0, 0]) and not has_gold_labels([NO_GOLD_LABEL] * 3)


# ---------------------------------------------------------------------------------------------------- editions


def test_the_editions_are_what_is_known_of_them():
    facts = [(name, one.norm, one.attention, one.id_name, one.size_limit) for name, one in EDITIONS.items()]
    assert facts == [
        ("ucsc", "rms", "bidirectional", "CruzID", 100), ("cmu2024", "rms", "bidirectional", "AndrewID", 100),
        ("cmu2025", "layer", "bidirectional", "AndrewID", 10), ("cmu2026", "layer", "causal", "AndrewID", 15),
    ]  # fmt: skip
    assert [(one.sampling, one.clips) for one in EDITIONS.values()] == [
        ("plain", False), ("plain", False), ("epsilon", True), ("top-p", True)
    ]  # fmt: skip
    assert [one.folders for one in EDITIONS.values()] == [(), (), (), ("addition_models",)]
    assert not any("finetuning" in name for name in EDITIONS["cmu2026"].required)
    for field in ("norm", "attention", "sampling"):
        assert getattr(LlamaConfig(), field) == getattr(EDITIONS[editions.DEFAULT_EDITION], field)
    assert tuple(EDITIONS) == flags.EDITIONS
    assert SAMPLINGS == {"plain": {}, "epsilon": {"epsilon": editions.EPSILON}, "top-p": {"top_p": editions.TOP_P}}
    assert SAMPLINGS.keys() == editions.SAMPLINGS.keys() and NORM_KINDS == tuple(editions.NORMS)
    for one in EDITIONS.values():
        named = [*one.required, *one.listed, *one.optional]
        assert len(set(named)) == len(named)
        assert all(outputs.OUTPUT.fullmatch(name) for name in named if name.endswith("-output.txt"))
    for dataset, names in editions.LABEL_NAMES.items():
        assert engine_data.read_label_names(ROOT / f"data/{dataset}-label-mapping.json") == list(names)


def test_the_later_editions_have_references_of_their_own():
    """As their READMEs publish them: github.com/cmu-l3/anlp-fall2025-hw1 and ialdarmaki/anlp-spring2026-hw1."""
    later = editions.reference_accuracies("cmu2025")
    assert [later["sst", kind] for kind in ("finetuning", "lora")] == [(0.411, 0.399), (0.275, 0.269)]
    assert later["cfimdb", "finetuning"] == (0.833, None) and later["sst", "prompting"] == (0.237, 0.250)
    assert editions.reference_accuracies("cmu2026")["sst", "prompting"] == (0.197, 0.176)
    assert editions.reference_accuracies("cmu2024") == editions.reference_accuracies("ucsc")


def test_the_checker_takes_the_editions_whose_files_are_known():
    assert list(rules.EDITIONS) == ["ucsc", "cmu2024", "cmu2025", "cmu2026"]
    limits = rules.Rules("cmu2025"), rules.Rules(size_limit=3)
    assert [one.max_bytes for one in limits] == [10_000_000, 3_000_000]
    with pytest.raises(programs.GradingError, match="no edition 'cmu2023'; there are ucsc, cmu2024, cmu2025"):
        rules.Rules("cmu2023")


REFERENCES = {  # what the course publishes: mean accuracy and standard deviation
    "sst-dev-prompting": (0.213, 0.0), "sst-test-prompting": (0.224, 0.0), "cfimdb-dev-prompting": (0.498, 0.0),
    "sst-dev-finetuning": (0.414, 0.014), "sst-test-finetuning": (0.418, 0.017),
    "cfimdb-dev-finetuning": (0.800, 0.115),
}  # fmt: skip


def test_the_reference_numbers_are_those_of_the_readme_and_of_the_published_files():
    found = {}
    assert {f"{name}-output.txt" for name in REFERENCES} <= set(EDITIONS["ucsc"].required)
    for data, task, dev, test in re.findall(r"^\| (SST|CFIMDB) (zero|fine).*?\|(.*?)\|(.*?)\|$", README, re.MULTILINE):
        for split, cell in (("dev", dev), ("test", test)):
            if numbers := re.match(r" (\d\.\d+) \((\d\.\d+)\)", cell):
                kind = {"zero": "prompting", "fine": "finetuning"}[task]
                found[f"{data.lower()}-{split}-{kind}"] = tuple(map(float, numbers.groups()))
    assert found == REFERENCES
    for name, accepted in published.PUBLISHED_LABELS.items():
        means = {round(one.accuracy, 3) for one in accepted if one.accuracy is not None}
        assert REFERENCES[f"{name}-prompting"][0] in means if means else f"{name}-prompting" not in REFERENCES


@pytest.mark.parametrize(("shots", "hold_out", "sizes"), [
    (None, 0.0, (20, 0)), (None, 0.25, (15, 5)), (None, 0.0001, (18, 2)), (3, 0.0, (6, 0)), (3, 0.5, (6, 6)),
])  # fmt: skip
def test_the_training_data_is_divided_class_by_class(shots: int | None, hold_out: float, sizes: tuple[int, int]):
    """8 of one class and 12 of the other. What is asked to be held out is never nothing."""
    examples = [Example(f"film {number}", int(number >= 8)) for number in range(20)]
    train, held = engine_data.divide(examples, 3, shots, hold_out)
    assert (len(train), len(held)) == sizes and len({*train, *held}) == sum(sizes)
    assert not held or {each.label for each in held} == {0, 1}
    assert (train, held) == engine_data.divide(examples, 3, shots, hold_out)
    assert [*sorted(train, key=examples.index)] == train
    assert not held or held != engine_data.divide(examples, 4, shots, hold_out)[1]


@pytest.mark.parametrize(("shots", "hold_out", "words"), [
    (5, 0.1, "class 0 has 8 examples, too few for 5 to train on and 5 to hold out"),
    (9, 0.0, "class 0 has 8 examples, too few for 9 to train on"),
    (None, 0.95, "class 0 has 8 examples, too few for one to train on and 8 to hold out"),
])  # fmt: skip
def test_too_few_examples_to_divide_are_counted(shots: int | None, hold_out: float, words: str):
    examples = [Example(f"film {number}", int(number >= 8)) for number in range(20)]
    with pytest.raises(UserError, match=f"^{words}$"):
        engine_data.divide(examples, 3, shots, hold_out)
