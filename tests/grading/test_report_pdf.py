"""The report of a submission: its name, whether it is a PDF, how many pages it has."""

import contextlib
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from submissions import entries_of, object_stream, pdf_of, peak_memory

from grading import outputs
from grading.outputs import Uncountable, count_pages

pytest_plugins = ["submission_fixtures"]
END = b"\n%%EOF\n"


@pytest.fixture
def warnings_on(check, folder):
    """The warnings of the complete submission with one file more."""
    return lambda name, content: check([*entries_of(folder), (f"alice/{name}", content)]).warnings


@pytest.mark.parametrize("in_stream", [False, True])
@pytest.mark.parametrize("pages", [1, 3, 4, 12])
def test_pages_are_counted(warnings_on, pages, in_stream):
    raw = pdf_of(pages, in_stream)
    assert count_pages(raw) == pages
    expected = [f"alice-report.pdf has {pages} pages; a report has at most 3"] if pages > 3 else []
    assert warnings_on("alice-report.pdf", raw) == expected


def replaced(*pairs, pages=4):
    raw = pdf_of(pages)
    for old, new in pairs:
        assert old in raw
        raw = raw.replace(old, new)
    return raw


def page(number):
    return b"%d 0 obj\n<< /Type /Page /Parent 2 0 R >>\nendobj\n" % number


OBJECTS = {3: b"<</Type/Page>>", 4: b"<</Type /Page /Annots [<< /Type /Annot >>]>>", 5: b"<< /Type /Font >>"}


@pytest.mark.parametrize("raw, pages", [
    (replaced((b"/Type /Page ", b"/Type/Page/X ")), 4), (replaced((b"\n", b"\r\n")), 4),
    (replaced((b"/Type /Page ", b"/Resources << /Type /Font >> /Type /Page ")), 4),
    (b"junk\n" + pdf_of(2), 2), (pdf_of(2)[:-20], 2),
    (pdf_of(2) + page(3) + page(4) + END, 2),  # an edit writes objects anew
    (pdf_of(2) + page(20) + page(21) + page(22) + END, 2),  # pages that no page tree counts are old ones
    (replaced((b"/Count 4", b"/Count 9 0 R")), 4), (replaced((b"/Type /Pages", b"/Type /Other")), 4),
    # what the data of a stream hold is no object of this file: an attached PDF
    (pdf_of(2) + b"50 0 obj\n<< /Length %d >>\nstream\n%s\nendstream\nendobj\n" % (len(pdf_of(9)), pdf_of(9)), 2),
    (pdf_of(2) + b"50 0 obj\n<< /Length 51 0 R >>\nstream\r\n%s\nendstream\nendobj\n" % pdf_of(9)[9:], 2),
    (b"%PDF-1.5\n" + object_stream(OBJECTS), 2), (b"%PDF-1.5\n" + object_stream(OBJECTS, Filter="[ /FlateDecode ]"), 2),
    (pdf_of(1) + object_stream({7: b"<< /Type /Catalog >>"}), 1),
    (pdf_of(1) + object_stream({}, b"x" * 50, Type="/XRef").replace(b"/Type /ObjStm", b""), 1),
])  # fmt: skip
def test_pages_of_many_kinds_of_files(raw, pages):
    assert count_pages(raw) == pages


@pytest.mark.parametrize("raw", [
    b"%PDF-1.7\n", b"%PDF-1.5\n" + object_stream(OBJECTS, Filter="/LZWDecode"),
    b"%PDF-1.5\n" + object_stream(OBJECTS, b"not packed"), b"%PDF-1.5\n" + object_stream(OBJECTS, First="8 0 R"),
    b"%PDF-1.5\n" + object_stream(OBJECTS, DecodeParms="<< /Predictor 12 >>"),
    b"%PDF-1.5\n" + object_stream({}), replaced((b"/Type /Page ", b"/Type /Sheet ")),
])  # fmt: skip
def test_nothing_is_said_of_pages_that_cannot_be_counted(warnings_on, raw):
    with pytest.raises(Uncountable):
        count_pages(raw)
    assert warnings_on("alice-report.pdf", raw) == []


def test_what_is_no_pdf_is_named(warnings_on):
    for content in (b"", b"My report", b"PK\3\4 a document", b"x" * 2000 + pdf_of(1)):
        assert warnings_on("alice-report.pdf", content) == [
            "alice-report.pdf is not a PDF file: it does not begin with %PDF-"
        ]


@pytest.mark.parametrize("name", [
    "report.pdf", "alice_report.pdf", "alice-report.PDF", "Alice-report.pdf", "bob-report.pdf", "alice-report.docx",
    "alice.pdf", "docs/alice-report.pdf", "Report (1).pdf",
])  # fmt: skip
def test_a_misnamed_report_is_named(warnings_on, name):
    first, *others = warnings_on(name, pdf_of(5))
    assert first == f"{name}: the report, if one is handed in, is called alice-report.pdf and lies in the top folder"
    assert [other for other in others if "5 pages" in other or "not a PDF" in other] == others != []


def test_other_files_are_no_reports(warnings_on, folder):
    assert warnings_on("report.html", "<p>x") == warnings_on("training-report.md", "x") == []
    (folder / "alice-report.pdf").write_bytes(pdf_of(2))
    assert warnings_on("paper.pdf", b"x") == []


def test_memory_and_time_are_bounded(monkeypatch):
    monkeypatch.setattr(outputs, "MAX_INFLATED", 1_000_000)
    large = b"%PDF-1.5\n" + object_stream(OBJECTS | {9: bytes(50_000_000)})

    def pages():
        with contextlib.suppress(Uncountable):
            return count_pages(large)

    counted, peak = peak_memory(pages)
    assert counted is None and peak < 5_000_000
    numbers = b"".join(b"%d %d " % (number, 0 if number % 2 else 900_000) for number in range(60_000))
    crowded = zlib.compress(numbers + b"<< /Type /Page >>" * 10_000)
    start = time.process_time()
    count_pages(b"%PDF-1.5\n" + object_stream({}, crowded, N=60_000, First=len(numbers)) + page(1))
    count_pages(b"%PDF-1.5\n" + b"1 0 obj " * 200_000 + page(1))
    assert time.process_time() - start < 20


WORDS = [b"1 0 obj", b"2 0 obj", b"<<", b">>", b"/Type /Page", b"/Type /Pages", b"/Type /ObjStm", b"/N 2", b"/First 4",
         b"/Length 9", b"/Count 3", b"stream\n", b"endstream", b"endobj", b"1 0 2 5",
         zlib.compress(b"1 0 2 5 xx")]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(WORDS) | st.binary(max_size=6), max_size=30))
def test_any_bytes_are_counted_or_uncountable(parts):
    with contextlib.suppress(Uncountable):
        assert count_pages(b" ".join(parts)) > 0
