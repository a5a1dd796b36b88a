"""setup.sh: its arguments, and that it fetches what is right, refuses what is not, and keeps what is there.

Nothing here installs a package or leaves this machine: `--fetch_only --mirror_only` asks MINLLAMA_ASSETS alone, which
is a folder or a web server of the test.
"""

import contextlib
import functools
import http.server
import os
import re
import shutil
import signal as signals
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bert.package import PACKAGE
from engine.programs import SMOLLM2_PACKAGE

ROOT = Path(__file__).resolve().parent.parent
FILES = "stories42M.pt tokenizer.model sanity_check.data rotary_embedding_actual.data optimizer_test.npy".split()
FILES += [f"data/{task}-{split}.txt" for task in ("sst", "cfimdb") for split in ("train", "dev", "test")]
WRITTEN = ["data/cfimdb-label-mapping.json", "data/sst-label-mapping.json"]  # what needs no fetching
LEFT = [*WRITTEN, "setup.sh"]  # in the script's folder, where nothing could be fetched

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="setup.sh needs bash")


def setup(script, *args, mirror="", cwd=None, env=None):
    """Run a copy of setup.sh; `mirror` is its MINLLAMA_ASSETS."""
    return subprocess.run(
        ["bash", str(script), *map(str, args)],
        cwd=cwd,
        env={**os.environ, "MINLLAMA_ASSETS": str(mirror), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )


def fetch(script, mirror, **options):
    result = setup(script, "--fetch_only", "--mirror_only", "--python", sys.executable, mirror=mirror, **options)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def check_refused(result, status, *words):
    """One line on standard error, with all the words."""
    assert result.returncode == status
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    assert all(word in result.stderr for word in words)


def files_under(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def line_about(name, result):
    """The one line of the standard error that is about this file."""
    named = rf"(missing|kept) .*(?<![\w/]){re.escape(name)}\b"  # not as the end of an address
    lines = [line for line in result.stderr.splitlines() if re.match(named, line)]
    assert len(lines) == 1, result.stderr
    return lines[0]


def checkpoint_like(path, size=101_000_000):
    """A zip archive of this size that takes no space on the disk: a hole between its signature and its directory."""
    with zipfile.ZipFile(path, "w"):
        pass
    end_record = path.read_bytes()
    with open(path, "wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(size - len(end_record))
        file.write(end_record)


@pytest.fixture
def script(tmp_path):
    """setup.sh alone, in a folder with a space in its name."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    return Path(shutil.copy(ROOT / "setup.sh", folder))


@pytest.fixture
def mirror(tmp_path):
    folder = tmp_path / "course files"
    folder.mkdir()
    return folder


def start_server(stack, handler):
    """Serve on this machine until the stack is closed; returns the address."""
    server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
    server.block_on_close = False  # a request may be answered for ever
    stack.callback(server.shutdown)
    often = {"poll_interval": 0.01}  # seconds; every test waits until the server has seen that it shall end
    threading.Thread(target=server.serve_forever, kwargs=often, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def served():
    """Serve a folder over HTTP on this machine; returns its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with contextlib.ExitStack() as stack:
        yield lambda folder: start_server(stack, functools.partial(Handler, directory=str(folder)))


# ------------------------------------------------------------------------------------------------------- arguments


def test_syntax():
    for path in ("setup.sh", ".ci/run"):
        subprocess.run(["bash", "-n", str(ROOT / path)], check=True)


def test_help_names_every_flag():
    result = setup(ROOT / "setup.sh", "--help")
    flags = set(re.findall(r"^ +(?:-h \| )?(--\w+)(?:\)|=\*\))", (ROOT / "setup.sh").read_text(encoding="utf-8"), re.M))
    assert result.returncode == 0 and result.stderr == ""
    installing = {"--tests", "--bert", "--smollm", "--notebook"}
    assert installing | {"--fetch_only", "--no_fetch", "--python", "--mirror_only"} < flags
    assert all(flag in result.stdout for flag in flags)


@pytest.mark.parametrize(
    ("args", "mirror", "says"),
    [
        (["--bogus"], "", "--bogus"),
        (["--python"], "", "--python needs"),
        (["--python", "no-such-python"], "", "--python no-such-python does not run"),
        (["--no_fetch", "--fetch_only"], "", "nothing to do"),
        (["--bert", "--fetch_only"], "", "--bert installs"),
        (["--smollm", "--fetch_only"], "", "--smollm installs"),
        (["--notebook", "--fetch_only"], "", "--notebook installs"),
        (["--fetch_only"], "no/such/folder", "MINLLAMA_ASSETS=no/such/folder is neither"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(script, args, mirror, says):
    check_refused(setup(script, *args, mirror=mirror), 2, says)
    assert files_under(script.parent) == ["setup.sh"]


def python_except(path, cases):
    """Write a program that does what the cases of the shell say for its arguments, and is this Python otherwise."""
    path.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\nexec \'{sys.executable}\' "$@"\n')
    path.chmod(0o755)
    return path


def pretend_python(folder, refuses):
    """A `python3` that fails on code with this text in it, and calls itself 3.9.1."""
    return python_except(folder / "python3", f"*{refuses}*) exit 1 ;; *python_version*) echo 3.9.1; exit 0 ;;")


def test_an_unsupported_python_is_named_with_its_version(script, tmp_path):
    old = pretend_python(tmp_path, refuses="version_info")
    result = setup(script, "--python", "./python3", cwd=tmp_path)
    check_refused(result, 2, f"error: --python {tmp_path}/./python3 is Python 3.9.1; min-llama needs 3.10 to 3.13\n")
    assert old.exists() and not (script.parent / ".venv").exists()


def test_a_missing_ensurepip_names_the_package(script, tmp_path):
    python = pretend_python(tmp_path, refuses="ensurepip")
    check_refused(setup(script, "--python", python), 1, f"apt-get install python3.{sys.version_info.minor}-venv")
    assert not (script.parent / ".venv").exists()


def test_a_broken_venv_is_named_and_left_alone(script):
    (script.parent / ".venv" / "bin").mkdir(parents=True)
    check_refused(setup(script), 1, ".venv is broken", "rm -rf .venv")
    assert (script.parent / ".venv" / "bin").is_dir()


@pytest.mark.parametrize("flag", ["--tests", "--bert", "--smollm", "--notebook"])
def test_what_a_submission_lacks_is_named_for_a_flag_that_needs_it(script, flag):
    (script.parent / "requirements.txt").write_text("")
    name = f"requirements/{flag[2:].removesuffix('s')}.txt"
    check_refused(setup(script, flag), 2, f"error: {name} is not here: {flag} is for a clone of the project\n")
    (script.parent / "requirements.txt").unlink()
    check_refused(setup(script), 1, "error: requirements.txt, which names the packages,")
    assert files_under(script.parent) == ["setup.sh"]


def test_a_submission_sets_itself_up(script, tmp_path, mirror):
    """Made from the assignment's files; the folder holds no fast/, no checkpoint, no data and no tests."""
    for name in ("requirements.txt", "requirements"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, script.parent / name)
    (script.parent / ".venv" / "bin").mkdir(parents=True)
    python_except(script.parent / ".venv" / "bin" / "python", '*"pip install"*) echo "pip $*"; exit 0 ;;')
    result = setup(script, "--mirror_only", mirror=mirror, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    asked = [line for line in result.stdout.splitlines() if line.startswith("pip ")]
    assert len(asked) == 1 and asked[0].endswith("-r requirements.txt")
    assert "next: get stories42M.pt, then .venv/bin/python run_llama.py" in result.stdout
    assert "set-up is done" in result.stdout and "run_llama.py needs stories42M.pt, which is not here" in result.stdout
    assert all(line_about(name, result) for name in FILES)
    (script.parent / "fast").mkdir()
    again = setup(script, "--mirror_only", mirror=mirror)
    assert again.returncode == 0 and "-r requirements/fast.txt" in again.stdout and "wrote" not in again.stdout


def test_sourcing_leaves_the_shell_alone(script):
    result = subprocess.run(
        ["bash", "-c", f"source '{script}'; false; echo still here"], capture_output=True, text=True, check=True
    )
    assert result.stdout == "still here\n" and "bash setup.sh" in result.stderr


# -------------------------------------------------------------------------------------------------------- fetching


def test_what_cannot_be_had_is_named_with_its_address(script, tmp_path):
    result = fetch(script, mirror="", cwd=tmp_path)
    line = line_about("stories42M.pt", result)
    assert line.startswith("missing 11 files: no address was asked. Get stories42M.pt at https://www.cs.cmu.edu/")
    assert re.search(f"; {', '.join(FILES[1:])} at https://raw.githubusercontent.com/\\S+/NAME$", line)
    assert result.stderr.count("missing ") == 1 and f"save each file under its name in {script.parent}" in result.stderr
    assert "0 of 11 course files are in place" in result.stdout
    assert "bundled checkpoint" in result.stdout
    assert files_under(script.parent) == LEFT and len(files_under(tmp_path)) == len(LEFT)
    for name in WRITTEN:
        assert (script.parent / name).read_bytes() == (ROOT / name).read_bytes() and f"wrote {name}" in result.stdout


@pytest.mark.parametrize("over_http", [False, True], ids=["folder", "http"])
def test_wrong_files_are_refused(script, mirror, served, over_http):
    (mirror / "data").mkdir()
    (mirror / "tokenizer.model").write_bytes(b"another tokenizer")
    (mirror / "data" / "sst-dev.txt").write_bytes(b"0 ||| another data set\r\n")
    (mirror / "stories42M.pt").write_bytes(b"<!DOCTYPE html><title>404 Not Found</title>")
    result = fetch(script, served(mirror) if over_http else mirror)
    assert "refused: its SHA-256 is " in line_about("tokenizer.model", result)
    assert "refused: its SHA-256 is " in line_about("data/sst-dev.txt", result)
    assert "refused: it is not a PyTorch checkpoint" in line_about("stories42M.pt", result)
    assert ("answers 404" if over_http else f"folder {mirror}. Get") in line_about("sanity_check.data", result)
    assert result.stderr.count("missing ") == 4  # three refusals, and a line for the eight that are not there
    assert files_under(script.parent) == LEFT


def test_a_truncated_or_small_checkpoint_is_refused(script, mirror):
    checkpoint_like(mirror / "stories42M.pt")
    os.truncate(mirror / "stories42M.pt", 100_500_000)
    assert "it is cut short" in line_about("stories42M.pt", fetch(script, mirror))
    checkpoint_like(mirror / "stories42M.pt", size=1_000_000)
    assert "it has 1,000,000 bytes" in line_about("stories42M.pt", fetch(script, mirror))
    assert files_under(script.parent) == LEFT


def test_a_checkpoint_is_fetched_and_reported(script, mirror, served):
    checkpoint_like(mirror / "stories42M.pt")
    result = fetch(script, served(mirror))
    assert (script.parent / "stories42M.pt").stat().st_size == 101_000_000
    assert "fetched stories42M.pt from 127.0.0.1" in result.stdout
    assert "its tokenizer.model is missing" in result.stderr  # the checkpoint alone does not run
    assert files_under(script.parent) == [*LEFT, "stories42M.pt"]


def test_a_different_file_is_kept_and_named(script, mirror):
    mine = script.parent / "tokenizer.model"
    mine.write_bytes(b"mine")
    result = fetch(script, mirror)
    assert "its SHA-256 is" in line_about("tokenizer.model", result)
    assert mine.read_bytes() == b"mine" and "0 of 11" in result.stdout


def test_a_dead_mirror_is_one_quick_failure(script, served, mirror):
    port = served(mirror).rsplit(":", 1)[1]
    result = fetch(script, f"http://127.0.0.1:{int(port) ^ 1}")
    line = line_about("tokenizer.model", result)
    assert line.startswith(f"missing 11 files: 127.0.0.1:{int(port) ^ 1} cannot be reached (")
    assert result.stderr.splitlines()[0] == line and result.stderr.count("\n") == 2


def test_each_host_that_cannot_be_reached_has_one_line_with_its_files(script, monkeypatch):
    """As on a machine without a network: the proxy that would be asked for every address is not there."""
    for kind in ("http", "https"):
        monkeypatch.setenv(f"{kind}_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    result = setup(script, "--fetch_only", "--python", sys.executable)
    pattern = r"^missing (.+): (\S+) cannot be reached \(.*\)\. (?:It is|Get .*) at (\S+)$"
    found = re.findall(pattern, result.stderr, re.MULTILINE)
    assert [(what, host) for what, host, _ in found] == [
        ("stories42M.pt", "www.cs.cmu.edu"),
        ("stories42M.pt", "huggingface.co"),
        ("10 files", "raw.githubusercontent.com"),
    ]
    assert all(address.startswith(f"https://{host}/") for _, host, address in found)
    assert result.returncode == 0 and result.stderr.count("\n") == 4
    assert all(name in result.stderr for name in FILES)


def test_real_files_are_fetched_once(script, assets, served, tmp_path):
    names = [name for name in FILES if (assets / name).is_file()]
    if "tokenizer.model" not in names:
        pytest.skip("the course's files are not among the assets")
    result = fetch(script, os.path.relpath(assets, tmp_path), cwd=tmp_path)
    assert files_under(script.parent) == sorted([*names, *LEFT])
    assert all((script.parent / name).read_bytes() == (assets / name).read_bytes() for name in names)
    assert result.stdout.count("fetched ") == len(names)

    before = {name: (script.parent / name).stat().st_mtime_ns for name in names}
    (script.parent / "data" / "sst-dev.txt").unlink()
    result = fetch(script, served(assets))
    assert re.findall(r"fetched (\S+) from 127", result.stdout) == ["data/sst-dev.txt"]
    assert all((script.parent / name).stat().st_mtime_ns == before[name] for name in names if "sst-dev" not in name)


# -------------------------------------------------------------------------------------- hostile servers, full disks

CLEAR = "\x1b[2J\x1b[31m"  # what a terminal obeys


def send(handler, *headers, status="200 OK", body=b"", again=0.0):
    """Answer as it stands, HTTP or not, then with `body` for ever, every so many seconds, until the other hangs up."""
    head = "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""])
    with contextlib.suppress(OSError):
        handler.wfile.write(head.encode())
        while body and handler.command == "GET":
            handler.wfile.write(body)
            time.sleep(again)


@pytest.fixture
def hostile():
    """Serve with a function that is given the handler of a request; returns the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with contextlib.ExitStack() as stack:
        yield lambda answer: start_server(stack, type("Hostile", (Handler,), {"do_GET": answer, "do_HEAD": answer}))


@pytest.fixture
def impatient(script):
    """setup.sh, but it waits a second where it would wait 20."""
    text = script.read_text(encoding="utf-8")
    assert text.count("\nSTALLED = 20 ") == 1
    script.write_text(text.replace("\nSTALLED = 20 ", "\nSTALLED = 1 "), encoding="utf-8")
    return script


@pytest.mark.parametrize(
    ("headers", "settings", "says"),
    [
        ([], {"body": bytes(1 << 20)}, "refused: it has more than 499,723 bytes"),
        (["Content-Length: 999999999999999"], {"body": b"x", "again": 9.0}, "refused: it has more than 499,723 bytes"),
        (["Content-Length: a few"], {}, "refused: its SHA-256 is"),
        (["Content-Length: -1"], {"body": bytes(1 << 20)}, "refused: it has more than 499,723 bytes"),
        (
            ["Transfer-Encoding: chunked"],
            {"body": b"fff\r\n%s\r\n" % bytes(4095)},
            "refused: it has more than 499,723 bytes",
        ),
        (["Transfer-Encoding: chunked"], {"body": b"z" * 99}, "failed: LineTooLong."),
        (
            ["Location: /again"],
            {"status": "302 Found", "body": bytes(1 << 20)},
            "refused: it redirects more than 5 times",
        ),
        (
            ["Location: ftp://127.0.0.1/"],
            {"status": "301 Moved"},
            "refused: it redirects to something else than a page",
        ),
        (["Location: http://["], {"status": "308 Moved"}, "refused: it redirects to something else than a page"),
        ([], {"status": f"404 {CLEAR}Password:"}, "answers 404 Not Found."),
        ([], {"status": f"599 {CLEAR}Password:"}, "answers 599."),
        ([], {"status": f"{CLEAR}Password:"}, "failed: BadStatusLine."),
        ([f"A{CLEAR}", "B: \x00"], {}, "refused: its SHA-256 is"),
    ],
)
def test_no_answer_of_a_server_does_harm(script, hostile, headers, settings, says):
    settings = {"status": "200 OK", **settings}
    checkpoint = {**settings, "status": "404 Not Found"}  # 400 MB of zeros would take seconds

    def answer(handler):
        send(handler, *headers, **(checkpoint if "stories" in handler.path else settings))

    result = fetch(script, hostile(answer))
    assert says in line_about("tokenizer.model", result)
    assert "\x1b" not in result.stderr and "0 of 11" in result.stdout and files_under(script.parent) == LEFT


@pytest.mark.slow
@pytest.mark.parametrize("head", [None, "Content-Length: 499723"], ids=["headers", "body"])
def test_a_download_that_trickles_is_given_up(impatient, hostile, head):
    def answer(handler):
        if head is None and handler.command == "GET":
            send(handler, "A: ", body=b"a", again=0.1)
        else:
            send(handler, head or "", body=b"a", again=0.1)

    start = time.monotonic()
    result = fetch(impatient, hostile(answer))
    assert "it stalled" in line_about("tokenizer.model", result) and files_under(impatient.parent) == LEFT
    assert time.monotonic() - start < 30


def test_the_checkpoint_is_at_most_400_mb():
    text = (ROOT / "setup.sh").read_text(encoding="utf-8")
    sizes = dict(re.findall(r'^    "(\S+)": ([\d_]+),', text, re.M))
    assert sorted(sizes) == sorted(FILES) and sizes["stories42M.pt"] == "400_000_000"


@pytest.mark.parametrize("signal", ["TERM", "INT", "HUP"])
def test_nothing_is_left_of_a_run_that_is_ended(script, hostile, signal):
    address = hostile(lambda handler: send(handler, body=b"a", again=0.1))
    command = ["bash", str(script), "--fetch_only", "--mirror_only", "--python", sys.executable]
    env = {**os.environ, "MINLLAMA_ASSETS": address}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        # a shell that runs the tests in the background has them, and so this process, ignore the signals
        preexec_fn=lambda: signals.signal(getattr(signals, f"SIG{signal}"), signals.SIG_DFL),
    ) as run:  # fmt: skip
        deadline = time.monotonic() + 30
        while not list(script.parent.glob(".*.tmp")) and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(getattr(signals, f"SIG{signal}"))
        _, errors = run.communicate(timeout=30)  # ends when nothing holds its standard error any more
    assert run.returncode == 128 + getattr(signals, f"SIG{signal}")
    assert files_under(script.parent) == LEFT and "Traceback" not in errors


@pytest.mark.parametrize("kept", [[], WRITTEN], ids=["label names", "data"])
def test_a_folder_that_cannot_be_written_is_said_so(script, served, mirror, kept):
    """A file in the place of the folder data/: permissions do not hold back the administrator."""
    if kept:
        (mirror / "tokenizer.model").write_bytes(bytes(499_723))
        command = f"ulimit -f 100; exec bash '{script}' --fetch_only --mirror_only --python '{sys.executable}'"
        env = {**os.environ, "MINLLAMA_ASSETS": served(mirror)}
        result = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("missing stories42M.pt")]
        assert result.returncode == 1 and lines == [f"error: {script.parent} cannot be written: File too large"]
        assert files_under(script.parent) == LEFT
    else:
        (script.parent / "data").write_text("")
        result = setup(script, "--fetch_only", "--mirror_only", mirror=mirror)
        check_refused(result, 1, f"{script.parent / 'data'} cannot be written: ")


def test_cdpath_does_not_lead_elsewhere(script, mirror, tmp_path):
    checkpoint_like(mirror / "stories42M.pt")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / mirror.name).mkdir(parents=True)
    (elsewhere / script.parent.name).mkdir()
    relative = Path(script.parent.name, script.name)
    result = fetch(relative, mirror.name, cwd=tmp_path, env={"CDPATH": f"{elsewhere}:."})
    assert f"fetched stories42M.pt from {mirror}\n" in result.stdout and (script.parent / "stories42M.pt").exists()


@pytest.mark.parametrize("address", ["http://[", "http://a..b", "http://:x", "https://a b"])
def test_an_address_that_cannot_be_one_is_named(script, address):
    assert "cannot be reached" in line_about("tokenizer.model", fetch(script, address))


# ------------------------------------------------------------------------------------------- the files around setup.sh


def pins():
    paths = [ROOT / "requirements.txt", *sorted((ROOT / "requirements").glob("*.txt"))]
    assert [path.stem for path in paths] == ["requirements", "bert", "fast", "notebook", "smollm", "test"]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    return [Requirement(line) for line in text.splitlines() if line and line[0] not in "#-"]


def test_pins_lie_in_the_ranges_of_pyproject():
    tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = ("bert", "fast", "notebook", "smollm", "test")
    declared = [*project["dependencies"], *(each for name in names for each in extras[name])]
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, declared)}
    pinned = {pin.name: next(iter(pin.specifier)) for pin in pins()}
    del pinned[PACKAGE], pinned[SMOLLM2_PACKAGE]  # weights, which no code imports
    assert ranges.keys() == pinned.keys()
    for name, pin in pinned.items():
        assert pin.operator == "==" and ranges[name].contains(pin.version), name


def test_git_ignores_what_is_fetched_and_keeps_what_is_bundled(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)

    def ignored(names):
        command = ["git", "-C", str(tmp_path), "check-ignore", *names]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()

    made = [".venv/x", "generated-sentence-temp-0.txt", "sst-dev-prompting-output.txt", "finetune-5-2e-05.pt", "me.zip"]
    assert ignored(FILES + made) == FILES + made
    bundled = ["checkpoints/a.pt", "checkpoints/a.model", "data/sst-label-mapping.json", "data/films-dev.txt"]
    assert ignored(bundled) == []
