"""The report, `ID-report.pdf`: its name, whether it is a PDF, and how many pages it has. Nothing is rendered."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator

from grading.archive import MB
from grading.findings import Message
from grading.programs import few

MAX_PAGES = 3
MAX_REPORTS = 3  # files that are looked into, where several may be meant as the report
MAX_INFLATED = 20 * MB  # bytes of all object streams of a PDF, unpacked
# The header may stand behind other bytes, which most readers skip.
HEADER, HEADER_WITHIN = b"%PDF-", 1024
_OBJECT = re.compile(rb"\b(\d{1,10})\s+\d{1,5}\s+obj\b")
_BODY_END = re.compile(rb"endobj|\bstream\r?\n")
_TYPE = re.compile(rb"/Type\s*/(\w+)")
_LIKE_A_REPORT = re.compile(r"(?i).*\.pdf|.*report.*\.(docx?|odt|pages|rtf)")


class Uncountable(Exception):
    """A PDF whose pages this module cannot count."""


def right_name(student_id: str) -> str:
    return f"{student_id}-report.pdf"


def reports_among(names: Iterable[str], student_id: str) -> list[str]:
    """The report; if no file has its name, the files that may be meant as one."""
    names = sorted(names)
    if right_name(student_id) in names:
        return [right_name(student_id)]
    return [name for name in names if _LIKE_A_REPORT.fullmatch(name.rsplit("/", 1)[-1])][:MAX_REPORTS]


def name_warnings(names: Iterable[str], student_id: str) -> list[Message]:
    """A warning if files may be meant as the report and none of them has its name."""
    found, right = reports_among(names, student_id), right_name(student_id)
    if not found or found == [right]:
        return []
    said = f"{few(found)}: the report, if one is handed in, is called {right} and lies in the top folder"
    return [Message(said, "E060-report-name", found[0], expected=right)]


def content_warnings(name: str, raw: bytes) -> list[Message]:
    """A warning if the file is no PDF, or has too many pages. None if the pages cannot be counted."""
    if HEADER not in raw[:HEADER_WITHIN]:
        said = f"{name} is not a PDF file: it does not begin with {HEADER.decode()}"
        return [Message(said, "E061-report-pdf", name)]
    try:
        pages = count_pages(raw)
    except Uncountable:
        return []
    said = f"{name} has {pages} pages; a report has at most {MAX_PAGES}"
    return [Message(said, "E062-report-pages", name, 0, MAX_PAGES, pages)] if pages > MAX_PAGES else []


def count_pages(raw: bytes) -> int:
    """The number of page objects, or the page tree's count if that is less (an edited file keeps old pages).

    Raises `Uncountable` for a file without pages, or with object streams in another form than Flate.
    """
    pages, trees = {}, {}  # by object number, of which the last definition counts
    for number, body in _objects(raw):
        kinds = _TYPE.findall(body)
        pages[number] = b"Page" in kinds
        trees[number] = (_number(b"Count", body) or 0) if b"Pages" in kinds else 0
    if not any(pages.values()):
        raise Uncountable
    return min(sum(pages.values()), max(trees.values()) or len(pages))


def _objects(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and dictionary of each object, those in object streams included; the data of streams are skipped."""
    left, at = MAX_INFLATED, 0
    while match := _OBJECT.search(raw, at):
        end = _BODY_END.search(raw, match.end())
        body = raw[match.end() : end.start() if end else len(raw)]
        yield int(match[1]), body
        at = end.end() if end else len(raw)
        if end and end[0] != b"endobj":
            data, at = _stream(raw, at, body)
            if re.search(rb"/Type\s*/ObjStm\b", body):
                text = _inflate(data, body, left)
                left -= len(text)
                yield from _packed_objects(text, body)


def _stream(raw: bytes, start: int, body: bytes) -> tuple[bytes, int]:
    """The data of a stream and their end, by the declared length, or else by the word `endstream`."""
    length = _number(b"Length", body)
    if length is not None and re.match(rb"\s*endstream", raw[start + length : start + length + 16]):
        return raw[start : start + length], start + length
    end = raw.find(b"endstream", start)
    end = end if end >= 0 else len(raw)
    return raw[start:end], end


def _inflate(data: bytes, body: bytes, most: int) -> bytes:
    """The content of an object stream, at most `most` bytes. Raises `Uncountable` for more, or another form."""
    filters = re.findall(rb"/(\w+Decode)\b", body)
    if filters not in ([], [b"FlateDecode"]) or b"/Predictor" in body or most <= 0:
        raise Uncountable
    if not filters:
        return data
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(data, most)
    except zlib.error:
        raise Uncountable from None
    if inflater.unconsumed_tail:
        raise Uncountable
    return text


def _packed_objects(text: bytes, body: bytes) -> Iterator[tuple[int, bytes]]:
    """The objects of an object stream: it begins with pairs of a number and an offset from `First`."""
    first, count = _number(b"First", body), _number(b"N", body)
    if first is None or count is None:
        raise Uncountable
    numbers = [int(word) for word in text[:first].split()[: 2 * count] if word.isdigit() and len(word) < 11]
    pairs = sorted(zip(numbers[1::2], numbers[::2], strict=False))  # in order, so that no byte is looked at twice
    ends = [start for start, _ in pairs[1:]] + [len(text)]
    for (start, number), end in zip(pairs, ends, strict=False):
        yield number, text[first + start : first + end]


def _number(key: bytes, body: bytes) -> int | None:
    """A number of a dictionary. None for a reference to another object, as in `/Length 12 0 R`."""
    match = re.search(rb"/" + key + rb"\s+(\d{1,9})\b(?!\s+\d+\s+R)", body)
    return int(match[1]) if match else None
