"""python -m grading: submissions to grades. Seventy-odd submissions, each wrong in one way, and right ones."""

from pathlib import Path

import pytest
from wrong_submissions import RIGHT, WRONG, accept_these_files, write_data, write_wrong_and_right

from grading.batch import judge_all, rows_of
from grading.findings import SEVERITIES
from grading.outputs import can_count_pages
from grading.settings import Settings, SizeLimits
from grading.uploads import find_submissions


def graded(folder: Path, out: Path, settings: Settings, overrides: dict | None = None, **functions) -> dict:
    """The rows by ID, in this process."""
    submissions, _ = find_submissions(folder, settings)
    out.mkdir(exist_ok=True)
    rows = rows_of(list(judge_all(submissions, settings, out, 1, **functions)), settings, overrides or {})
    return {row.student_id: row for row in rows}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    write_data(folder / "data")
    write_wrong_and_right(folder / "zips")
    severity = {} if can_count_pages() else {"E065-uncounted": "off"}
    settings = Settings(gold=str(folder / "data"), limits=SizeLimits(1.0, 20.0), severity=severity)
    with pytest.MonkeyPatch.context() as patch:
        accept_these_files(patch)
        return graded(folder / "zips", folder / "out", settings)


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_submission_has_its_finding_and_grade(rows, name):
    if name in ("report-pages", "report-uncounted") and not can_count_pages():
        pytest.skip("pypdf is not installed")
    case, row = WRONG[name], rows[name]
    codes = {one.code: one.severity for one in row.findings}
    assert codes.keys() == {case.code, *case.also}, row.findings
    assert (codes[case.code], row.grade.letter) == (case.severity, case.grade), row.grade
    assert row.findings == sorted(row.findings, key=lambda one: SEVERITIES.index(one.severity))  # the severest first
    assert any(f"look at {case.code}: " in one for one in row.grade.open) == (case.severity == "flag")
    assert row.grade.status == ("refused" if case.severity == "refuse" else "provisional")


@pytest.mark.parametrize("name", RIGHT)
def test_right_submissions_have_none(rows, name):
    row = rows[f"right-{name}"]
    assert (row.findings, row.grade.letter, row.grade.reasons) == ([], "A", [])
    assert row.grade.open == ["the student's code was not run", "coherence of the text at temperature 0: read it"]


def test_there_are_enough_of_them():
    assert len(WRONG) >= 60
