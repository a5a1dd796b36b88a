"""The report of a submission: its name, whether it is a PDF, how many pages it has."""

import subprocess
import sys
import zlib

import pytest
from conftest import ROOT
from submissions import beside, entries_of, pdf_of

from grading import outputs
from grading.outputs import Uncountable, can_count_pages, count_pages

pytest_plugins = ["submission_fixtures"]

with_pypdf = pytest.mark.skipif(not can_count_pages(), reason="pypdf is not installed")


@pytest.fixture
def report_on(check, folder):
    """The report on the complete submission with one file more."""
    return lambda name, content: check([*entries_of(folder), (f"alice/{name}", content)])


@with_pypdf
@pytest.mark.parametrize("pages", [1, 3, 4, 12])
def test_pages_are_counted(report_on, pages):
    report = report_on("alice-report.pdf", pdf_of(pages))
    expected = [f"alice-report.pdf has {pages} pages; a report has at most 3"] if pages > 3 else []
    assert beside(report) == expected


@with_pypdf
@pytest.mark.parametrize("raw, pages", [
    (b"junk\n" + pdf_of(2), 2), (pdf_of(2) + b"\r\n\r\n", 2), (pdf_of(4).replace(b"/Count 4", b"/Count 1"), 4),
])  # fmt: skip
def test_pages_of_odd_files(raw, pages):
    assert count_pages(raw) == pages


@with_pypdf
@pytest.mark.parametrize("raw", [b"%PDF-1.7\n", pdf_of(2)[:-60], b"%PDF-1.5\n" + bytes(range(256)) * 9])
def test_a_note_says_that_pages_could_not_be_counted(report_on, raw):
    report = report_on("alice-report.pdf", raw)
    assert beside(report) == ["alice-report.pdf: its pages were not counted: pypdf cannot read it"]


def test_without_pypdf_name_header_and_size_are_checked_and_a_note_says_the_rest(report_on, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    report = report_on("alice-report.pdf", pdf_of(9))
    (note,) = beside(report)
    assert note.code == "E065-uncounted"
    assert note.endswith("its pages were not counted: the package pypdf is not installed (pip install pypdf)")
    assert "is not a PDF file" in beside(report_on("alice-report.pdf", b"My report"))[0]
    assert "is called alice-report.pdf" in beside(report_on("report.pdf", pdf_of(1)))[0]


def test_what_is_no_pdf_is_named(report_on):
    for content in (b"", b"My report", b"PK\3\4 a document", b"x" * 2000 + pdf_of(1)):
        assert beside(report_on("alice-report.pdf", content)) == [
            "alice-report.pdf is not a PDF file: it does not begin with %PDF-"
        ]


@pytest.mark.parametrize("name", [
    "report.pdf", "alice_report.pdf", "alice-report.PDF", "Alice-report.pdf", "bob-report.pdf", "alice-report.docx",
    "alice.pdf", "docs/alice-report.pdf", "Report (1).pdf",
])  # fmt: skip
def test_a_misnamed_report_is_named(report_on, name):
    first, *others = beside(report_on(name, pdf_of(5)))
    assert first == f"{name}: the report, if one is handed in, is called alice-report.pdf and lies in the top folder"
    assert [other for other in others if "5 pages" in other or "not a PDF" in other] == others
    assert others != [] or not can_count_pages()


def test_other_files_are_no_reports(report_on, folder):
    assert beside(report_on("report.html", "<p>x")) == beside(report_on("training-report.md", "x")) == []
    (folder / "alice-report.pdf").write_bytes(pdf_of(2))
    assert beside(report_on("paper.pdf", b"x")) == []


# ------------------------------------------------------------------------------------------------------ hostile files


def pdf_in_streams(count, text):
    """A PDF whose catalog lies in an object stream of `count` objects, unpacked to `text`."""
    data = zlib.compress(text, 9)
    head = b"%PDF-1.5\n"
    stream = (
        b"2 0 obj\n<< /Type /ObjStm /N %d /First %d /Filter /FlateDecode /Length %d >>\nstream\n%s\nendstream\nendobj\n"
    )
    stream %= (count, len(text), len(data), data)
    rows = b"".join(bytes([kind]) + place.to_bytes(4, "big") + bytes(1) for kind, place in (
        (0, 0), (2, 2), (1, len(head)), (1, len(head) + len(stream))))  # fmt: skip
    keys = b"/Type /XRef /Size 4 /W [1 4 1] /Root 1 0 R /Length %d" % len(rows)
    table = b"3 0 obj\n<< %s >>\nstream\n%s\nendstream\nendobj\n" % (keys, rows)
    return head + stream + table + b"startxref\n%d\n%%%%EOF\n" % (len(head) + len(stream))


@with_pypdf
def test_memory_of_a_hostile_file_is_bounded(tmp_path):
    """A file of some kilobytes whose object stream unpacks to millions of numbers: pypdf alone takes 240 MB."""
    raw = pdf_in_streams(30_000_000, b"7 0 " * 15_000_000)
    assert len(raw) < 100_000
    (tmp_path / "hostile.pdf").write_bytes(raw)
    (tmp_path / "right.pdf").write_bytes(pdf_of(2))
    code = (
        "import resource, sys; from pathlib import Path; from grading import outputs; outputs.MAX_MEMORY = 128 << 20\n"
        "print(outputs.count_pages(Path(sys.argv[1], 'right.pdf').read_bytes()))\n"
        "try: outputs.count_pages(Path(sys.argv[1], 'hostile.pdf').read_bytes())\n"
        "except outputs.Uncountable as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    pages, said, peak = done.stdout.splitlines()
    assert pages == "2" and said == "pypdf cannot read it" and int(peak) << 10 <= 128 << 20


@with_pypdf
def test_a_file_that_takes_long_is_given_up(monkeypatch):
    monkeypatch.setattr(outputs, "COUNT_PAGES", "import time; time.sleep(60)")
    monkeypatch.setattr(outputs, "MAX_SECONDS", 0.5)
    with pytest.raises(Uncountable, match="did not end within 0.5 seconds"):
        count_pages(pdf_of(1))


@with_pypdf
def test_no_file_of_the_current_folder_is_imported(tmp_path, monkeypatch):
    for name in ("io", "pypdf", "resource"):
        (tmp_path / f"{name}.py").write_text("print(1)\nraise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    assert count_pages(pdf_of(2)) == 2
