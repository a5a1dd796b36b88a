"""Complete submissions of a few lines, made here, and zips written by hand."""

import io
import struct
import tracemalloc
import zipfile
import zlib

from grading.editions import EDITIONS, TEXT_PROMPT, TEXTS

NAMES = {"sst": ["awful", "bad", "average", "good", "excellent"], "cfimdb": ["bad", "good"]}
SUFFIX = {
    "sst": " Is this movie awful, bad, average, good, or excellent? This movie is ",
    "cfimdb": " Is this movie bad or good? This movie is ",
}
LABELS = {"sst-dev": [0, 1, 2, 3, 4, 4], "sst-test": [3, 2, 1, 0], "cfimdb-dev": [0, 1, 1, 0], "cfimdb-test": [0, 0, 0]}
SENTENCES = {
    part: [f"{part} sentence {i} , très bien ." for i in range(len(labels))] for part, labels in LABELS.items()
}


def write_outputs(folder, *kinds):
    """Right predictions for every line but the first."""
    for part, labels in LABELS.items():
        dataset = part.split("-")[0]
        for kind in kinds:
            end = SUFFIX[dataset] if kind == "prompting" else ""
            guesses = [1 if labels[0] != 1 else 0, *labels[1:]]
            lines = [f"{guess} ||| {text}{end}\n" for guess, text in zip(guesses, SENTENCES[part], strict=True)]
            (folder / f"{part}-{kind}-output.txt").write_bytes("".join(lines).encode())


def fill(folder, edition="ucsc"):
    for name in EDITIONS[edition].required + EDITIONS[edition].listed:
        (folder / name).write_text(f"{TEXT_PROMPT} bad." if name in TEXTS else f"# content of {name}\n")
    kinds = {"cmu2025": ["finetuning", "lora"], "cmu2026": []}.get(edition, ["finetuning"])
    write_outputs(folder, "prompting", *kinds)
    for top in EDITIONS[edition].folders:
        for name in ("best_model", *(f"ablation_{number}" for number in range(1, 6))):
            (folder / top / name).mkdir(parents=True)
            (folder / top / name / "best_model.pth").write_bytes(b"tensors")
    return folder


def pack(entries):
    """A zip of (name or ZipInfo, content) pairs."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def entries_of(folder, top="alice"):
    return [(f"{top}/{path.name}", path.read_bytes()) for path in sorted(folder.iterdir())]


def forge(*entries, before=b"", between=b"", comment=b"", end=b"", wide_end=None):
    """A zip written by hand. entries: name, content, fields of both headers or, as local_..., of the first alone."""
    body, directory = before, b""
    for name, content, *changes in entries:
        changed = dict(*changes)
        local = {key[6:]: value for key, value in changed.items() if key.startswith("local_")}
        both = dict(name=name if isinstance(name, bytes) else name.encode(), version=20, flags=0, method=0,
                    crc=zlib.crc32(content), packed=len(content), size=len(content), extra=b"", attributes=0,
                    offset=len(body))  # fmt: skip
        both |= changed
        headers = [
            struct.pack("<5H3L2H", h["version"], h["flags"], h["method"], 0, 33, h["crc"], h["packed"], h["size"],
                        len(h["name"]), len(h["extra"]))
            for h in (both | local, both)
        ]  # fmt: skip
        local = both | local
        body += b"PK\3\4" + headers[0] + local["name"] + local["extra"] + content + changed.get("descriptor", b"")
        directory += b"PK\1\2\x14\3" + headers[1] + struct.pack("<3H2L", 0, 0, 0, both["attributes"], both["offset"])
        directory += both["name"] + both["extra"]
    body += between
    numbers = [len(entries), len(entries), len(directory), len(body)]
    if wide_end:
        at = len(body) + len(directory)
        directory += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *wide_end(numbers))
        directory += struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
    return body + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *numbers, len(comment)) + comment + end


def extra(number, content):
    return struct.pack("<2H", number, len(content)) + content


def unicode_path(path, name=b""):
    return extra(0x7075, struct.pack("<BL", 1, zlib.crc32(name)) + path.encode())


def beside(report):
    """What checks have found beside what is wrong, but for optional files, absent data and texts in a code page."""
    passed_over = ("", "E025-optional", "E045-no-data", "E057-code-page")
    return [one for one in report.of("flag", "note") if one.code not in passed_over]


def only_problem(report, *words):
    assert len(report.wrong) == 1, report.wrong
    for word in words:
        assert word in report.wrong[0], report.wrong[0]


def pdf_of(pages):
    """A PDF with a page tree, so many empty pages and the table of its objects."""
    kids = b" ".join(b"%d 0 R" % number for number in range(3, 3 + pages))
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count %d /Kids [%s] >>" % (pages, kids)]
    objects += [b"<< /Type /Page /Parent 2 0 R >>"] * pages
    raw, table = b"%PDF-1.4\n", b"0000000000 65535 f \n"
    for number, text in enumerate(objects, 1):
        table += b"%010d 00000 n \n" % len(raw)
        raw += b"%d 0 obj\n%s\nendobj\n" % (number, text)
    size = len(objects) + 1
    end = b"trailer << /Root 1 0 R /Size %d >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(raw))
    return raw + b"xref\n0 %d\n%s" % (size, table) + end


def change(folder, name, edit):
    path = folder / name
    path.write_bytes(edit(path.read_bytes()))


def peak_memory(function):
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
