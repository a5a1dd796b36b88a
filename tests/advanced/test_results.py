"""The committed figures: pages are what the lines of their runs say, and the README quotes the pages."""

from __future__ import annotations

import json
import re
import shlex
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest
from conftest import ROOT, asset

from advanced import pretrain
from advanced.experiments import __main__ as program
from advanced.experiments.grid import Table
from advanced.experiments.models import Model, model_of
from advanced.experiments.render import cells_of, difference_in_words, labels_of, plain, render
from advanced.experiments.report import write_report
from advanced.experiments.results import compare, interval, read_results
from advanced.experiments.summary import columns_of, render_summary
from engine.data import create_data, majority_accuracy
from tokenizer import Tokenizer

EXPERIMENTS = program.HERE
RESULTS = EXPERIMENTS / "results"
LINES = sorted(RESULTS.glob("*.jsonl"))
FOLDERS = "advanced", "bert"  # whose README says what was measured
TABLES = sorted((path.stem for path in (program.HERE / "tables").glob("*.json")), key=len, reverse=True)


def table_and_model(path: Path) -> tuple[str, str]:
    """Of a file TABLE-CHECKPOINT.jsonl."""
    name = next(name for name in TABLES if path.stem.startswith(f"{name}-"))
    return name, path.stem.removeprefix(f"{name}-")


PAGES = [path for path in LINES if path.with_suffix(".md").exists()]


@pytest.fixture
def at_assets(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are read from the course's files."""

    def find(data: str, split: str) -> str:
        name = f"{data}-label-mapping.json" if split == "label_names" else f"{data}-{split}.txt"
        return str(asset(assets / "data", name))

    for module in ("grid", "render"):
        monkeypatch.setattr(f"advanced.experiments.{module}.path_of", find)


def opened(path: Path) -> tuple[Table, Model, dict[str, dict]]:
    (name, checkpoint), done = table_and_model(path), read_results([path])
    model = model_of(str(path.with_name(f"{checkpoint}.pt")), None, done)
    return Table.read(program.HERE / "tables" / f"{name}.json").without_unknown(model), model, done


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_what_the_lines_of_its_runs_say(at_assets: None, path: Path):
    assert render(*opened(path)) == path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_report_is_what_the_lines_say(at_assets: None, tmp_path: Path):
    """`python -m advanced.experiments best --pretrained-model-path base3M.pt --report`."""
    table, model, done = opened(RESULTS / "best-base3M.jsonl")
    args = program.get_args(["best", "--pretrained-model-path", "base3M.pt"])
    write_report(table, model, done, program.command_of(args), tmp_path / "report.md")
    page = RESULTS / "report-best-base3M.md"
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_summary_is_what_the_lines_say(at_assets: None):
    page = (RESULTS / "summary.md").read_text(encoding="utf-8")
    assert render_summary([*columns_of(RESULTS)]) == page, "python -m advanced.experiments.summary --out writes it"


@pytest.mark.parametrize("path", LINES, ids=lambda path: path.stem)
def test_lines_hold_figures_alone(path: Path):
    """No sentence of a data set, no folder of a machine; and what tells one make of a checkpoint from another."""
    for line in path.read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        assert "/" not in result["model"] and len(result["checksums"]) == 2
        assert re.fullmatch("[0-9a-f]{64}", result["weights"])
        assert "|||" not in line and "/tmp" not in line and "/home" not in line


def words_of(page: Path) -> str:
    """Its text, wherever lines are broken."""
    return " ".join(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_readme_quotes_the_pages(folder: str):
    pages = "\n".join(page.read_text(encoding="utf-8") for page in RESULTS.glob("*.md")).splitlines()
    readme = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    for name, block in re.findall(r"<!-- of (\S+) -->\n(.*?)\n\n", readme, flags=re.DOTALL):
        page = (RESULTS / name).read_text(encoding="utf-8").splitlines()
        rows = block.splitlines()
        assert len(rows) > 2 and not {*rows} - {*page}, name
    quoted = [line for line in readme.splitlines() if re.match(r"\| .* ± ", line)]
    assert quoted and not {*quoted} - {*pages}


# What the README compares with another row than the table's baseline (--baseline).
OTHER_BASELINES = (
    ("few-shot-stories260K", "sst", 16, "prompt-finetune, shuffled words", "prompt-finetune"),
    ("zero-shot-base3M", "cfimdb", None, "channel", "course"),
    ("words-base3M", "cfimdb", None, "channel, cfimdb words", "course, bidirectional"),
    ("few-shot-stories260K", "sst", 64, "padding-mask, bidirectional", "plain, bidirectional"),
    ("few-shot-stories260K", "cfimdb", 64, "padding-mask, bidirectional", "plain, bidirectional"),
    ("few-shot-base3M", "sst", 64, "padding-mask, bidirectional", "plain, bidirectional"),
    ("few-shot-base3M", "cfimdb", 64, "padding-mask, bidirectional", "plain, bidirectional"),
    ("full-base3M", "sst", None, "class-weights", "plain"),
    ("best-base3M", "cfimdb", None, "recipe", "plain, 6 epochs"),
    ("best-base3M", "cfimdb", None, "recipe", "without bidirectional attention"),
    ("best-base3M", "sst", None, "recipe", "plain"),
    ("best-base3M", "sst", None, "recipe", "without pooling"),
    ("encoders-base3M", "sst", None, "encoder", "encoder, untrained"),
    ("encoders-base3M", "sst", None, "decoder, mean of its states", "decoder"),
    ("encoders-base3M", "sst", None, "encoder, [MASK] always", "encoder"),
    ("encoders-base3M", "sst", None, "encoder, no next sentences", "encoder"),
    ("encoders-base3M", "sst", None, "encoder, [MASK] always, frozen", "encoder, frozen"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "least"), [*zip(FOLDERS, ((11, 11, 1), (14, 4, 4)), strict=True)])
def test_intervals_and_spreads_in_the_readme_are_of_the_tables(at_assets: None, folder: str, least: tuple[int, ...]):
    """least: how many of each it has at least."""
    known = "\n".join(page.read_text(encoding="utf-8") for page in RESULTS.glob("*.md"))
    for stem, data, shots, row, baseline in OTHER_BASELINES:
        table, model, done = opened(RESULTS / f"{stem}.jsonl")
        cells = {cell.row.name: cell.runs for cell in cells_of(table, model, done, data, shots)}
        for split, figure in product(("dev", "test") if data == "sst" else ("dev",), ("accuracy", "macro_f1")):
            labels = labels_of(data, split)
            known += difference_in_words(compare(cells[row], cells[baseline], split, labels, figure))
            alone = interval(cells[row], split, labels, figure)
            known += f" [{plain(alone.low)}, {plain(alone.high)}]"
    words = words_of(ROOT / folder / "README.md")
    digits = r"[+-]0?\.\d{3}"
    intervals = re.findall(rf"({digits}) \[({digits}), ({digits})\]", words)
    spreads = re.findall(r"\.\d{3} ± \.\d{3}", words)
    assert len(intervals) >= least[0] and len(spreads) >= least[1]
    for found in intervals:
        mean, low, high = (re.sub(r"([+-])\.", r"\g<1>0.", number) for number in found)
        assert f"{mean} [{low}, {high}]" in known
    alone = re.findall(r"\[\.\d{3}, \.\d{3}\]", words)
    assert len(alone) >= least[2]
    for found in [*spreads, *alone]:
        assert found in known


def test_as_many_intervals_leave_0_out_as_the_readme_says():
    readme = words_of(ROOT / "advanced" / "README.md")
    said = re.search(r"Of the (\d+) with 16 sentences of a class (\d+) are", readme)
    found: list[str] = []
    for section in (RESULTS / "summary.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        heads, *rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
        chosen = [place for place, head in enumerate(heads) if "16 a class" in head]
        found += [row[place] for row in rows for place in chosen if "[" in row[place]]
    assert [*map(int, said.groups())] == [len(found), sum("**" in cell for cell in found)]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["base3M", "stories260K"])
def test_with_few_sentences_nothing_is_above_the_majority_class_of_sst_beyond_noise(at_assets: None, checkpoint: str):
    table, model, done = opened(RESULTS / f"few-shot-{checkpoint}.jsonl")
    for split, shots in product(("dev", "test"), (16, 64)):
        labels = labels_of("sst", split)
        for cell in cells_of(table, model, done, "sst", shots):
            assert interval(cell.runs, split, labels).low < majority_accuracy(labels), cell.row.name


def test_words_that_are_searched_for_lift_the_channel_above_the_majority_class_of_cfimdb(at_assets: None):
    table, model, done = opened(RESULTS / "words-base3M.jsonl")
    cells = {cell.row.name: cell.runs for cell in cells_of(table, model, done, "cfimdb", None)}
    labels = labels_of("cfimdb", "dev")
    assert interval(cells["channel, cfimdb words"], "dev", labels).low > majority_accuracy(labels)
    for runs in (cells["course, bidirectional"], cells["calibrated on train, cfimdb words"]):
        assert interval(runs, "dev", labels).low < majority_accuracy(labels)


def test_as_many_reviews_are_cut_for_a_causal_model_as_the_readme_says(assets: Path):
    """Of stories260K, whose tokenizer lies beside the data."""
    readme = words_of(ROOT / "advanced" / "README.md")
    said = re.search(r"that cuts (\d+) % of CFIMDB's dev reviews for stories260K", readme)
    reviews = [each.sentence for each in create_data(asset(assets / "data", "cfimdb-dev.txt"))]
    tokenizer = Tokenizer(tokenizer_model=asset(assets, "tok512.model"))
    lengths = map(len, tokenizer.encode_batch(reviews, bos=True, eos=False))
    assert int(said[1]) == round(100 * fmean(length > 512 for length in lengths))


def test_how_long_runs_take_is_what_the_lines_say():
    """The shortest and the longest, in minutes but for the first of the short ones, which is in seconds."""
    words = words_of(EXPERIMENTS / "README.md")
    number = r"(\d+(?:\.\d+)?)"
    said = re.search(
        rf"took {number} to {number} minutes on all of SST, {number} to {number} on CFIMDB and {number} to {number} on "
        rf"the first 128 tokens of each of its reviews, one of stories260K with few sentences "
        rf"{number} seconds to {number} minutes",
        words,
    )
    files = {"3M": ("best-base3M", "recipe-base3M", "full-base3M"), "few": ("few-shot-stories260K",)}
    texts = {kind: "".join((RESULTS / f"{name}.jsonl").read_text() for name in names) for kind, names in files.items()}
    lines = {kind: [json.loads(line) for line in text.splitlines()] for kind, text in texts.items()}
    found = []
    few = (("sst", None), ("cfimdb", None), ("cfimdb", 128))
    for kind, parts in (*(("3M", (part,)) for part in few), ("few", few)):
        runs = [line for line in lines[kind] if (line["data"], line["settings"]["max_sentence_len"]) in parts]
        seconds = [line["wall_seconds"] for line in runs]
        found += [min(seconds) if kind == "few" else min(seconds) / 60, max(seconds) / 60]
    assert [*map(float, said.groups())] == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("stem", ["full-stories260K", "full-base3M", "best-base3M"])
@pytest.mark.parametrize("data", ["sst", "cfimdb"])
def test_plain_training_was_tried_on_both_sides_of_the_chosen_rate(stem: str, data: str):
    """On all sentences, with about a third of the rate and with three times as much, as the page of the grids says."""
    lines = [json.loads(line) for line in (RESULTS / f"{stem}.jsonl").read_text(encoding="utf-8").splitlines()]
    plain_runs = [line for line in lines if (line["row"], line["data"]) == ("plain", data)]
    (chosen,) = {line["settings"]["lr"] for line in plain_runs if line["phase"] == "final"}
    scores: dict[float, list[float]] = {}
    for line in plain_runs:
        if line["phase"] == "tune":
            scores.setdefault(line["settings"]["lr"], []).append(line["selection"])
    for factor in (1 / 3, 3):
        (beside,) = {lr for lr in scores if lr == pytest.approx(chosen * factor, rel=0.12)}
        assert fmean(scores[beside]) < fmean(scores[chosen])


def test_the_commands_that_made_models_are_those_of_their_files():
    page = (EXPERIMENTS / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    known = set()
    for line in re.findall(r"^python -m advanced\.pretrain .*--out \S+\.pt.*", page, re.MULTILINE):
        args = pretrain.get_args(shlex.split(line)[3:])
        name = Path(args.out).stem
        settings = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["settings"]
        given = {key: value for key, value in vars(args).items() if key in settings and value is not None}
        assert given == {key: settings[key] for key in given} and len(given) > 8, name
        known.add(name)
    assert known == {path.stem for path in RESULTS.glob("*.json") if "encoder" not in path.stem}
