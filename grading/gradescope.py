"""An autograder for Gradescope: `python -m grading.gradescope --build autograder.zip`; there it runs with `--run`.

It checks the submitted files as `prepare_submit.py` does, and runs the code as another user (`grading.sandbox`), who
can reach neither the grader nor the results. `results.json` is there from the first second, and is replaced as a whole
after each test: a run that is ended has the points that it had earned, and says so.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import stat
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from grading.archive import FormatError, fixed_entry
from grading.box import ADAMW, ROPE, Executed, run_checks
from grading.editions import ACCURACY_BANDS, DEFAULT_EDITION, EDITIONS, LABEL_NAMES, reference_accuracies
from grading.findings import SEVERITIES
from grading.programs import (
    ROOT,
    GradingError,
    GradingParser,
    atomic_write,
    check_writable,
    create_data,
    printable,
    run_main,
    whole_number,
)
from grading.rules import Report, Rules
from grading.sandbox import STUDENT, BoxLimits, UserBox, add_python
from grading.submission import check_bytes
from grading.uploads import read_payload

CONFIG, GOLD = "gradescope.json", "gold"  # in the zip
# Gradescope gives half a processor, 768 MB and ten minutes, if nobody asks for more. The grader itself needs 320 MB.
LIMITS = BoxLimits(seconds=60.0, total=210.0, memory=380, processes=32, printed=16)
POINTS = {"files": 20.0, "accuracy": 20.0, ROPE: 10.0, ADAMW: 15.0, "parts": 35.0}
MOST_PARTS = 23  # which share their points
UNFINISHED = "The autograder did not finish. Submit again; if that does not help, write to the staff of the course."
SETUP = """#!/usr/bin/env bash
# Gradescope runs this once, as root, when it makes the container.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends python3 python3-venv util-linux
python3 -m venv /opt/autograder
pip() {{ /opt/autograder/bin/pip install --no-cache-dir "$@"; }}
pip {index}{torch}
pip {others} requests importlib-metadata filelock pypdf
chmod -R go-rwx /autograder/source
"""
RUN = """#!/usr/bin/env bash
# Gradescope runs this for each submission, as root.
cd /autograder/source
exec /opt/autograder/bin/python -m grading.gradescope --run /autograder
"""


class Results:
    """The tests so far, and the file `results.json` that Gradescope reads."""

    def __init__(self, folder: Path):
        self.path, self.tests, self.leaderboard = folder / "results.json", [], []
        self.write(UNFINISHED)

    def add(self, name: str, passed: bool, points: float, said: Iterable[str], visibility: str = "visible") -> None:
        """Add a test. said: lines that tell what to do."""
        test = {"name": name, "output": "\n".join(said) or "ok", "status": "passed" if passed else "failed"}
        self.tests.append({**test, "visibility": visibility})
        self.share_out(len(self.tests) - 1, points)

    def share_out(self, first: int, points: float) -> None:
        """Let the tests from number `first` on have so many points together."""
        for test in self.tests[first:]:
            test["max_score"] = round(points / len(self.tests[first:]), 4)
            test["score"] = test["max_score"] * (test["status"] == "passed")
        self.write(UNFINISHED)

    def write(self, output: str, earlier: float | None = None) -> None:
        """Replace the file. earlier: the score of another submission, as this one is not graded; None: it is."""
        total = round(sum(test["score"] for test in self.tests), 2) if earlier is None else earlier
        found = {"score": total, "output": output, "visibility": "visible", "stdout_visibility": "hidden"}
        found["extra_data"] = {"graded": earlier is None}
        with atomic_write(self.path) as file:
            file.write(json.dumps({**found, "tests": self.tests, "leaderboard": self.leaderboard}, indent=1).encode())


# --------------------------------------------------------------------------------------------- what is submitted


def read_metadata(path: Path) -> dict[str, Any]:
    """Gradescope's `submission_metadata.json`; an empty dictionary where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def graded_in_the_day(metadata: dict[str, Any]) -> list[tuple[float, str]]:
    """Score and time of the submissions that were graded in the 24 hours before this one.

    Empty where the metadata do not tell. One that was not graded has a score that is another's.
    """
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        begin = datetime.fromisoformat(metadata["created_at"]) - timedelta(days=1)
        earlier = metadata["previous_submissions"]
        today = [one for one in earlier if datetime.fromisoformat(one["submission_time"]) > begin]
        return [(float(one.get("score") or 0), one["submission_time"]) for one in today if is_graded(one)]
    return []


def is_graded(submission: dict[str, Any]) -> bool:
    """Whether an earlier submission has a score of its own, as its results say (`Results.write`)."""
    return ((submission.get("results") or {}).get("extra_data") or {}).get("graded", True)


def submitted(folder: Path, metadata: dict[str, Any]) -> tuple[Path, str]:
    """The folder of the submitted files, and the student's ID: the top folder's name, else the e-mail's first part."""
    inside = [path for path in folder.iterdir() if not path.name.startswith((".", "_"))] if folder.is_dir() else []
    if len(inside) == 1 and inside[0].is_dir() and not inside[0].is_symlink():
        return inside[0], inside[0].name
    name = ""
    with contextlib.suppress(KeyError, TypeError, IndexError, AttributeError):
        name = metadata["users"][0]["email"].partition("@")[0]
    return folder, re.sub("[^A-Za-z0-9.-]", "-", name).strip(".-") or "student"


# ------------------------------------------------------------------------------------------------------ the tests


def check_files(results: Results, report: Report) -> None:
    """The files and outputs, without what tells an accuracy on a test set; dev accuracies to the leaderboard."""
    said = [
        f"{one.severity}: {one}"
        for severity in SEVERITIES
        for one in report.of(severity)
        if one.code not in ("E040-accuracy", "E041-high") or "-test-" not in one.file
    ]
    for data in LABEL_NAMES:
        found = [accuracy for name, accuracy in report.accuracies.items() if name.startswith(f"{data}-dev-")]
        results.leaderboard.append({"name": f"{data} dev accuracy", "value": round(max(found, default=0.0), 3)})
    results.add("Files and outputs", not report.wrong, POINTS["files"], said)


def check_accuracies(results: Results, report: Report, edition: str) -> None:
    """Hidden tests: an accuracy on a test set is at most the band of an A below the reference's."""
    first = len(results.tests)
    for (data, kind), (_, reference) in reference_accuracies(edition).items():
        if reference is not None:
            name = f"{data}-test-{kind}-output.txt"
            accuracy = report.accuracies.get(name, 0.0)
            is_enough = round(reference - accuracy, 3) <= ACCURACY_BANDS[data]
            said = f"{name}: {accuracy:.3f}; the reference's is {reference:.3f}"
            results.add(f"Accuracy: {data} test, {kind}", is_enough, 0.0, [said], "hidden")
    results.share_out(first, POINTS["accuracy"])


def check_code(results: Results, folder: Path, edition: str, seconds: float) -> None:
    """Every executed check is a test; one that does not end has no points, and the checks after it still run.

    A part that needs a wrong one, and is right by itself, has its points: a mistake costs those of its own part.
    """
    parts: list[str] = []

    def tell(one: Executed) -> None:
        said = [one.message, *(["By itself it is right."] if one.is_right_alone else [])]
        said += ["What the code printed last:", one.tail] if one.tail else []
        parts.extend([one.part] * (one.part not in POINTS))
        points = POINTS.get(one.part, POINTS["parts"] / MOST_PARTS)
        results.add(one.part, one.passed or one.is_right_alone, points, filter(None, said))

    limits = replace(LIMITS, seconds=seconds)
    run_checks(folder, edition, add_python(UserBox(sys.executable, limits, STUDENT)), tell=tell)
    if parts:
        results.share_out(len(results.tests) - len(parts), POINTS["parts"])


def grade(base: Path) -> None:
    """Write the results of the submission in Gradescope's folder. No other user can enter the grader's folders."""
    for path in (ROOT, base / "results"):
        path.chmod(0o700)
    results, metadata = Results(base / "results"), read_metadata(base / "submission_metadata.json")
    config = json.loads((ROOT / CONFIG).read_text(encoding="utf-8"))
    edition, most, earlier = config["edition"], config["max_per_day"], graded_in_the_day(metadata)
    if most and len(earlier) >= most:
        best, submitted_at = max(earlier)
        said = f"Not graded: {most} submissions in 24 hours are graded."
        results.write(f"{said} The score is that of your submission of {submitted_at}.", best)
        return
    folder, student_id = submitted(base / "submission", metadata)
    try:
        rules = Rules(edition=edition, data_dir=ROOT / GOLD)
        report = check_bytes(read_payload(folder, student_id), student_id, rules)
        check_files(results, report)
        check_accuracies(results, report, edition)
        check_code(results, folder, edition, config["seconds"])
    except (GradingError, FormatError) as error:
        results.write(str(error))
        return
    shown = [test for test in results.tests if test["visibility"] == "visible"]
    failed = [test["name"] for test in shown if test["status"] == "failed"]
    results.write(f"Begin with: {failed[0]}." if failed else f"All {len(shown)} visible tests passed.")


# ------------------------------------------------------------------------------------------------------- building


def data_files(rules: Rules) -> dict[str, bytes]:
    """The data sets. Raises `GradingError` if one is absent or broken."""
    files = {}
    for data in LABEL_NAMES:
        for split in ("dev", "test"):
            path = rules.find(f"{data}-{split}.txt")
            if path is None:
                raise GradingError(f"{data}-{split}.txt is not here: give --data DIR, the folder of the course's data")
            create_data(path, is_test=split == "test")
            files[f"{GOLD}/{path.name}"] = path.read_bytes()
        files[f"{GOLD}/{data}-label-mapping.json"] = json.dumps([*rules.label_names(data)]).encode()
    return files


def build(
    out: Path, edition: str, data_dir: str | None,
    max_per_day: int = 0, seconds: float = LIMITS.seconds, torch_index: str = "",
) -> None:  # fmt: skip
    """Write the zip for Gradescope; the same input gives the same bytes."""
    pins = re.findall(r"(?m)^[a-z-]+==\S+", (ROOT / "requirements.txt").read_text(encoding="utf-8"))
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    index = f"--index-url {shlex.quote(torch_index)} " if torch_index else ""
    setup = SETUP.format(index=index, torch=torch, others=" ".join(pin for pin in pins if pin != torch))
    scripts = {"setup.sh": setup.encode(), "run_autograder": RUN.encode()}
    config = {"edition": edition, "max_per_day": max_per_day, "seconds": seconds}
    files = {**scripts, CONFIG: json.dumps(config).encode()}
    files |= {f"grading/{path.name}": path.read_bytes() for path in (ROOT / "grading").glob("*.py")}
    files |= data_files(Rules(edition=edition, data_dir=data_dir))
    with atomic_write(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            mode = stat.S_IFREG | (0o755 if name in scripts else 0o644)
            archive.writestr(fixed_entry(name, mode), content, zipfile.ZIP_DEFLATED)


def main() -> int:
    parser = GradingParser(prog="python -m grading.gradescope", description="An autograder for Gradescope.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", metavar="FILE.zip", help="write the autograder")
    what.add_argument("--run", metavar="DIR", help="grade what is in Gradescope's folder; run_autograder does it")
    parser.add_argument("--edition", choices=EDITIONS, default=DEFAULT_EDITION, help="of the course")
    parser.add_argument("--data", metavar="DIR", help="data sets with gold labels (default: the usual folders)")
    parser.add_argument("--max_per_day", metavar="N", type=whole_number, default=0, help="graded; 0: all")
    parser.add_argument("--time_limit", metavar="SECONDS", type=float, default=LIMITS.seconds, help="for each test")
    index = "where pip finds PyTorch for processors alone; without it pip may bring gigabytes for GPUs"
    parser.add_argument("--torch_index", metavar="URL", default="", help=index)
    args = parser.parse_args()
    if args.run:
        grade(Path(args.run))
        return 0
    if not args.build.endswith(".zip"):
        raise GradingError(f"--build {args.build}: the name must end in .zip")
    check_writable(args.build, "--build")
    if args.max_per_day < 0:
        raise GradingError(f"--max_per_day {args.max_per_day}: give a number from 0 (all) on")
    if not 0 < args.time_limit <= LIMITS.total:
        raise GradingError(f"--time_limit {args.time_limit:g}: give seconds above 0 and up to {LIMITS.total:g}")
    if args.torch_index and not args.torch_index.startswith("https://"):
        raise GradingError(f"--torch_index {printable(args.torch_index)}: must begin with https://")
    build(Path(args.build), args.edition, args.data, args.max_per_day, args.time_limit, args.torch_index)
    print(f"wrote {args.build}: upload it to Gradescope as the autograder, for {args.edition}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
