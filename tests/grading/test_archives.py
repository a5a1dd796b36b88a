"""What a hostile archive must not do, and which archives of honest tools are fine."""

import io
import os
import stat
import struct
import tarfile
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from submissions import change, entries_of, extra, fill, forge, only_problem, pack, peak_memory, unicode_path

from grading import archive, submission
from grading.rules import Report
from grading.submission import check_zip

pytest_plugins = ["submission_fixtures"]

ME = b"alice/x.py"
UNIX = 16  # bits above DOS's attributes
RECORD = forge(("alice/y.py", b"y"))
HIDDEN = RECORD[: RECORD.index(b"PK\1\2")]  # an entry that no directory names
PACKED = zlib.compress(b"x", wbits=-15)
DEFLATED = {"method": 8, "size": 1, "crc": zlib.crc32(b"x")}
OTHER_HEADER = "another name, method, checksum or size"
# At the end of a header that is read alone: an end of zip64 with a directory of the header's own making.
PRETENDER = struct.pack("<4sQ2H2L4Q4sLQL", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, 0, 0, b"PK\6\7", 0, 0, 1)
# What the entry alice/x.py becomes, and what is said of it.
HOSTILE_ENTRIES = [
    *((dict(name=name.encode()), "refused entries") for name in (
        "../evil.py", "alice/../../evil.py", "/etc/passwd", "alice//etc", "alice/./x", "C:/x", "c:x", "alice\\x",
        "alice/\x1b[31m", "..", "", "\0lice/x.py", "alice/x\0py", "alice/.. /x", "alice/...")),
    (dict(name=b"alice/\xff", flags=0x800), "codec can't decode"),
    *((dict(attributes=(kind | 0o777) << UNIX), "a link or special file") for kind in (
        stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK)),
    *((dict(attributes=value), "a file to some tools") for value in (stat.S_IFDIR << UNIX, 0x10, 0x8)),
    (dict(name=b"alice/x/"), "a file to some tools"),
    *((dict(flags=flag), "encrypted") for flag in (1, 0x40, 0x2000)),
    (dict(local_flags=1), "encrypted"), (dict(version=46), "unzip skips"),
    *((dict(method=method), "compression method") for method in (12, 14, 99)),
    (dict(local_name=b"alice/y.py"), OTHER_HEADER), (dict(local_method=8), OTHER_HEADER),
    (dict(local_size=2), OTHER_HEADER), (dict(local_packed=0), OTHER_HEADER), (dict(local_crc=0), OTHER_HEADER),
    *((dict(offset=offset), "local header is damaged") for offset in (0, 1, 10**6)),
    *(({key: unicode_path(path, name)}, "Unicode path, 0x7075") for key in ("extra", "local_extra")
      for path in ("alice/y.py", "../../x", "alice/x.py\0", "alice/é.py", "") for name in (b"", ME)),
    (dict(name=b"alice/caf\xe9", extra=unicode_path("alice/cafe")), "Unicode path, 0x7075"),
    (dict(local_extra=b"up\xff\xff"), "local header is damaged"), (dict(extra=b"up\xff\xff"), "Corrupt extra field"),
    (dict(size=2**32 - 1, extra=extra(1, struct.pack("<Q", 2))), "declared 2 bytes"),
    (dict(size=2**32 - 1), "when unpacked"), (dict(local_extra=extra(1, bytes([5] * 16))), "zip64 field"),
    *((dict(extra=extra(1, struct.pack(f"<{len(words)}Q", *words))), "zip64 field") for words in ((9,), (1, 2))),
    (dict(size=2**32 - 1, extra=extra(1, struct.pack("<2Q", 1, 7))), "zip64 field"),
    (dict(local_name=ME + PRETENDER), OTHER_HEADER), (dict(name=ME, local_extra=PRETENDER), "local header is damaged"),
    *((dict(name=name.encode()), "several entries for one name") for name in (
        "alice/llama.py", "alice/LLAMA.py", "alice/llama.py/", "alice/llama.py;1", "alice/llama.py;", "alice/llama.py.",
        "alice/llama.py:x", "alice/l\u200blama.py")),
    (dict(name=b"alice/llama.py/x/y"), "both a file and a folder"),
    (dict(descriptor=b"junk"), "belong to no entry"), (dict(descriptor=HIDDEN), "belong to no entry"),
    (dict(flags=8), "belong to no entry"),
    (dict(flags=8, content=b"PK\7\x08", descriptor=struct.pack("<3L", zlib.crc32(b"PK\7\x08"), 4, 4)), "its own end"),
    (dict(content=PACKED + HIDDEN, **DEFLATED), "other data follow"), (dict(content=b"\xff", **DEFLATED), "damaged"),
    (dict(content=PACKED[:-1], **DEFLATED), "cut short"),
    (dict(name=b"__MACOSX/x", content=PACKED + HIDDEN, **DEFLATED), "other data follow"),
    (dict(crc=1), "CRC"), (dict(size=2), "declared 2 bytes"), (dict(size=0), "declared 0 bytes"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", HOSTILE_ENTRIES)
def test_hostile_entries_are_refused(check, folder, changes, words, tmp_path):
    changes = dict(changes)
    content = changes.pop("content", b"" if changes.get("name", b"").endswith(b"py/") else b"x")
    if changes.get("size") == 0 or "method" in changes or "descriptor" in changes:
        changes.setdefault("packed", len(content))
    report = check(forge(*entries_of(folder), (ME, content, changes)))
    assert words in report.wrong[0], report.wrong
    assert all(problem.isprintable() and len(problem) < 300 for problem in report.wrong)
    assert report.scores == {} or "damaged" in report.wrong[0]  # nothing was read
    assert sorted(os.listdir(tmp_path)) == ["given.zip", "here", "work"] and os.listdir() == []


@pytest.mark.parametrize("parts, words", [
    (dict(before=b"#!/bin/sh\n"), "front of the first entry"), (dict(between=HIDDEN), "belong to no entry"),
    *((parts, "not what its end says") for parts in (
        dict(end=b"more"), dict(end=RECORD), dict(comment=RECORD), dict(wide_end=lambda numbers: [1, *numbers[1:]]),
        dict(wide_end=lambda numbers: [*numbers[:3], 1]))),
    (dict(comment=HIDDEN), "comment of the archive holds an archive"),
])  # fmt: skip
def test_archives_with_two_readings_are_refused(check, folder, parts, words):
    only_problem(check(forge(*entries_of(folder), **parts)), words)


@pytest.mark.parametrize("place, value", [(4, 1), (6, 1), (8, 3), (10, 3), (12, 3), (16, 3), (20, 5)])
def test_an_end_that_lies_is_refused(check, folder, place, value):
    """Its numbers: two disks, two counts, size and start of the directory, length of the comment."""
    payload = bytearray(forge(*entries_of(folder)))
    struct.pack_into("<H", payload, len(payload) - 22 + place, value)
    only_problem(check(bytes(payload)), "not a zip archive")
    assert check(forge(*entries_of(folder))).wrong == []


def test_a_directory_that_goes_on_behind_its_end_is_refused(check, folder):
    payload = bytearray(forge(*entries_of(folder)))
    comment = payload.rindex(b"PK\1\2") + 32  # the length of the last entry's comment
    struct.pack_into("<H", payload, comment, 9)
    only_problem(check(bytes(payload)), "not what its end says")


def test_a_locator_of_zip64_that_lies_is_refused(check, folder):
    payload = forge(*entries_of(folder), wide_end=list)
    assert check(payload).wrong == []
    at = payload.rindex(b"PK\6\7") + 8
    only_problem(check(payload[:at] + struct.pack("<Q", 5) + payload[at + 8 :]), "not what its end says")
    assert check(forge(wide_end=list)).wrong == check(forge()).wrong  # of no file at all, which is no damage


def streamed(content, form):
    """What a tool writes that learns the sizes after the data."""
    zeros = {f"local_{name}": 0 for name in ("crc", "packed", "size")}
    return dict(flags=8, descriptor=struct.pack(form, zlib.crc32(content), len(content), len(content)), **zeros)


@pytest.mark.parametrize("name, changes, parts", [
    ("alice/x", streamed(b"x", "<3L"), {}), ("alice/x", streamed(b"x", "<L2Q"), {}),  # Finder, pipes
    ("alice/e\u0301", {}, {}), ("alice/é", dict(flags=0x800), {}),  # Finder; Windows and 7-Zip
    ("alice/é".encode("cp850"), dict(extra=unicode_path("alice/é")), {}),  # Info-ZIP and WinRAR on Windows
    (b"alice/#U20ac", dict(extra=unicode_path("alice/€")), {}), ("alice/é", dict(extra=unicode_path("alice/é")), {}),
    ("alice/x", dict(local_size=2**32 - 1, local_packed=2**32 - 1, local_extra=extra(1, struct.pack("<2Q", 1, 1))), {}),
    ("alice/x", dict(size=2**32 - 1, extra=extra(1, struct.pack("<Q", 1))), dict(wide_end=list)),  # OneDrive
    ("alice/x", dict(version=45), {}),  # of zip64, which some tools write for every file
    ("alice/x", dict(attributes=(stat.S_IFREG | 0o644) << UNIX, extra=b"\0\0\0"), dict(comment=b"40 digits of git")),
])  # fmt: skip
def test_honest_archives_of_other_tools_are_fine(check, folder, name, changes, parts):
    report = check(forge(*entries_of(folder), (name, b"x", changes), **parts))
    assert report.wrong == [] and len(report.files) == len(list(folder.iterdir())) + 1


def test_an_archive_of_the_largest_size_is_read(check, folder):
    room = 250_000 - len(forge(*entries_of(folder), (ME, b"")))
    assert check(forge(*entries_of(folder), (ME, bytes(room))), size_limit=0.25).wrong == []
    only_problem(check(forge(*entries_of(folder), (ME, bytes(room + 1))), size_limit=0.25), "the limit is 0.25 MB")


def test_unicode_forms_of_one_name_are_duplicates(check, folder):
    for twins in (("\u00e9", "e\u0301"), ("\u00df", "SS")):
        report = check([*entries_of(folder), *((f"alice/{name}", "x") for name in twins)])
        only_problem(report, "several entries for one name")


@pytest.mark.parametrize("name", ["alice/" + "x" * 256, "alice/" + "d/" * 500, "alice/a" + "\u0301\u0316" * 16_000])
@pytest.mark.parametrize("key", ["name", "local_name", "extra"])
def test_names_that_no_disk_holds_are_refused_unread(check, folder, monkeypatch, name, key):
    monkeypatch.setattr(archive, "unicodedata", None)
    value = unicode_path(name) if key == "extra" else name.encode()
    only_problem(check(forge(*entries_of(folder), (ME, b"x", {key: value}))), "bytes", "255 a part and 1000 in all")


@pytest.mark.parametrize("part", ["\u0390/", "a/"])
def test_memory_is_linear_in_the_names(check, folder, part):
    """Long names in deep folders, and letters that become three when case is folded."""
    names = [f"alice/{number}/{part * (900 // len(part.encode()))}x.txt" for number in range(100)]
    payload = forge(*entries_of(folder), *((name, b"x") for name in names))
    report, peak = peak_memory(lambda: check(payload, size_limit=0.3))
    assert report.wrong == [] and peak < 10 * len(payload)


def test_memory_is_linear_where_entries_share_their_data(check):
    """Five thousand entries at the place of one whose header is long."""
    long = dict(local_extra=extra(9, bytes(60_000)), offset=0)
    payload = forge((ME, b"", long), *((f"alice/{number}", b"", dict(offset=0)) for number in range(5000)))
    report, peak = peak_memory(lambda: check(payload, size_limit=1))
    assert "and 4995 more are damaged" in report.wrong[0] and peak < 10 * len(payload)


def test_declared_sizes_are_bounded(check, folder):
    bomb = [*entries_of(folder), ("alice/zeros", bytes(3_000_000))]
    report = check(bomb, size_limit=0.1)
    only_problem(report, "when unpacked", "the limit is 2 MB")
    assert report.scores == {}
    assert check(bomb, size_limit=0.1, max_unpacked=4).wrong == []


@pytest.mark.parametrize("declared", [1000, 0])
def test_reading_stops_at_the_declared_size(check, folder, declared):
    packed = zlib.compress(bytes(60_000_000), wbits=-15)
    payload = forge(*entries_of(folder), (ME, packed, dict(method=8, size=declared)))
    report, peak = peak_memory(lambda: check(payload, size_limit=0.3))
    only_problem(report, "x.py is damaged: its size")
    assert peak < 5_000_000


def test_limits(check, folder, monkeypatch):
    name = "sst-dev-finetuning-output.txt"
    change(folder, name, lambda b: b + b" " * 300_000)
    only_problem(check(entries_of(folder), size_limit=0.2), name, "too large")
    monkeypatch.setattr(archive, "MAX_ENTRIES", 10)
    only_problem(check(entries_of(folder)), "entries", "more than 10")
    monkeypatch.setattr(submission, "check_bytes", None)  # a large zip is not even read
    only_problem(check(b"x" * 2000, size_limit=0.001), "0.00 MB; the limit is 0.001 MB")


@pytest.mark.parametrize("payload", [b"", b"PK\x03\x04", b"hello", b"PK\x05\x06" + b"\xff" * 18, b"\0" * 100])
def test_no_zip_at_all(check, payload):
    only_problem(check(payload), "not a zip archive")


@pytest.fixture(scope="module")
def sound(data_dir, tmp_path_factory):
    """A right zip, and a folder to put changed ones in."""
    folder = fill(tmp_path_factory.mktemp("sound"))
    return pack(entries_of(folder)), tmp_path_factory.mktemp("changed")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4), cut=st.none() | st.floats(0, 1),
       near_end=st.booleans())  # fmt: skip
def test_fuzz_never_raises_and_never_writes(sound, data_dir, changes, cut, near_end):
    payload, folder = sound
    payload = bytearray(payload)
    start = payload.index(b"PK\x01\x02") if near_end else 0  # half of the changes hit the central directory
    for where, value in changes:
        payload[start + int(where * (len(payload) - 1 - start))] = value
    payload = payload[: int(cut * len(payload))] if cut is not None else payload
    path = folder / "changed.zip"
    path.write_bytes(payload)
    report = check_zip(path, "alice", data_dir=data_dir)
    assert isinstance(report, Report) and str(report).isprintable() == ("\n" not in str(report))
    assert os.listdir(folder) == ["changed.zip"]
    if cut is not None and cut < 0.99:
        assert report.wrong


OTHER_ARCHIVES = {"RAR": b"Rar!\x1a\7\0and so on", "7z": b"7z\xbc\xaf\x27\x1c\0\4"}


@pytest.mark.parametrize("kind", ["tar", "gzip", "bzip2", "xz", *OTHER_ARCHIVES])
def test_another_archive_is_named_for_what_it_is(check, kind):
    file, mode = io.BytesIO(), {"tar": "w", "gzip": "w:gz", "bzip2": "w:bz2", "xz": "w:xz"}.get(kind, "w")
    with tarfile.open(fileobj=file, mode=mode) as archive:
        archive.addfile(tarfile.TarInfo("alice/llama.py"))
    payload = OTHER_ARCHIVES.get(kind, file.getvalue())
    only_problem(check(payload), f"not a zip archive: it is of the kind {kind}")
