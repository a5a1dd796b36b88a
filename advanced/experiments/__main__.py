"""Run the experiments of tables, and render them.

    python -m advanced.experiments TABLE [TABLE ...] [--pretrained-model-path CKPT] [--workers N] [--minutes M]
    python -m advanced.experiments TABLE [TABLE ...] --render
    python -m advanced.experiments TABLE --html PAGE.html

It may be killed at any moment and started again, also in another checkout: runs whose lines are in the results are not
done again, and an interrupted run resumes from its last epoch if `--work` is still there. Several processes may share
one file of results. If the results of another table of the checkpoint lie beside it, their lines are taken over.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from advanced.experiments.cluster import Cluster
from advanced.experiments.grid import Done, Table
from advanced.experiments.models import Model, model_of, name_of
from advanced.experiments.plots import draw
from advanced.experiments.render import render, write_page
from advanced.experiments.report import text_of
from advanced.experiments.results import read_results, results_beside, results_now
from advanced.experiments.rows import Trial
from advanced.experiments.runner import Runner, describe, take_over
from engine.arguments import check_page
from engine.programs import ArgumentParser, Default, check_new, check_writable, require_folder, run_main
from utils import UserError, atomic_write, warn

HERE = Path(__file__).resolve().parent


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m advanced.experiments", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    known = f"names of the folder tables/ ({known_tables()}), or files; several are done one after the other"
    add("tables", nargs="+", metavar="TABLE", help=known)
    add("--pretrained-model-path", default=Default("stories42M.pt"), help="checkpoint that all runs start from")
    add("--tokenizer", help="SentencePiece model; else the checkpoint's own .model, else tokenizer.model")
    add("--results", help="file of JSON lines, of one table; else results/TABLE-CHECKPOINT.jsonl beside this program")
    add("--work", help="folder for weights while a run lasts; else one in the system's temporary folder")
    add("--workers", type=int, help="runs at a time (else 1, of a cluster all); each gets its share of the processors")
    add("--cluster", metavar="ADDRESS", help="do the runs on the workers of the Dask scheduler there, tcp://HOST:8786")
    add("--minutes", type=float, help="start no run after so many, of all tables together")
    add(
        "--only", nargs="+", metavar="ROW", help="rows of one table, beside its baseline and the bag of words; else all"
    )
    add("--baseline", metavar="ROW", help="what the rows of one table are compared with, if not its baseline")
    add("--data", nargs="+", metavar="NAME", help="data sets of the table; all of them if not given")
    add("--tune", action="store_true", help="only the runs on data held out of train, none that looks at dev or test")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    add("--list", action="store_true", help="say which runs are left, and end")
    add("--render", action="store_true", help="write tables and plots beside the results, and end")
    add("--report", metavar="FILE.md", help="write a report on one table, and end")
    add("--html", metavar="FILE", help="write a page to look at the runs of one table, and end")
    return parser.parse_args(argv)


def known_tables() -> str:
    return ", ".join(sorted(path.stem for path in (HERE / "tables").glob("*.json")))


def check_args(args: Namespace) -> None:
    """Raises `UserError` naming the flag."""
    if len({*args.tables}) < len(args.tables):
        raise UserError(f"a table is named twice: {', '.join(args.tables)}")
    if len(args.tables) > 1:
        for flag in ("results", "only", "baseline", "report", "html"):
            if getattr(args, flag):
                raise UserError(f"--{flag} is for one table, not for {', '.join(args.tables)}")
    asked = [f"--{flag}" for flag in ("list", "render", "report", "html") if getattr(args, flag)]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} cannot be combined: each does one thing and ends")
    if args.tune and asked not in ([], ["--list"]):
        raise UserError(f"--tune says which runs are done, and {asked[0]} does none")
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: must be at least 1")
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise UserError(f"--minutes {args.minutes}: must be above 0 and finite")
    if args.results:
        if Path(args.results).suffix != ".jsonl":
            raise UserError(f"--results {args.results}: the name must end in .jsonl")
        if Path(args.results).exists():
            check_writable(args.results, "--results")
    if args.html:
        require_folder("explore", "--html")
        check_page("--html", args.html)
    if args.report:
        if Path(args.report).suffix != ".md":
            raise UserError(f"--report {args.report}: the name must end in .md")
        check_new(args.report, "--report")


def results_of(args: Namespace, table: Table) -> Path:
    name = f"{table.name}-{name_of(args.pretrained_model_path)}.jsonl"
    return Path(args.results or HERE / "results" / name)


def write_tables(args: Namespace, table: Table, model: Model, done: Done) -> None:
    """Write page and plots beside the results; of some rows, or with another baseline, to names with -part.

    Raises `UserError` if another file has that name.
    """
    path = results_of(args, table)
    stem = path.with_name(f"{path.stem}-part" if args.only or args.data or args.baseline else path.stem)
    page = stem.with_name(f"{stem.name}.md")
    write_page(page, render(table, model, done), "--results")
    print(f"wrote {page}")
    for plot in draw(table, model, done, stem):
        print(f"wrote {plot}")


def write_report(args: Namespace, table: Table, model: Model, done: Done) -> None:
    """Write the report for --report. Raises `UserError` if there are no results or too many rows."""
    text = text_of(table, model, done, command_of(args))
    with atomic_write(args.report) as file:
        file.write(text)
    pdf = Path(args.report).with_suffix(".pdf")
    print(f"wrote {args.report}; this makes a PDF of it: {shlex.join(['pandoc', args.report, '-o', str(pdf)])}")


def write_html(args: Namespace, table: Table, model: Model, done: Done) -> None:
    """Write the page for --html. Raises `UserError` if there are no runs."""
    from explore.page import write_page
    from explore.trained import page_of_results

    runs = [run for row, data, shots in table.cells() for run in table.final(row, data, shots, model, done)]
    content = page_of_results([done[key] for run in runs if (key := run.key(model)) in done], table.title)
    write_page(args.html, content)
    print(f"wrote {args.html}")


def command_of(args: Namespace) -> list[str]:
    """The words of the command that makes the runs again."""
    words = [args.tables[0], "--pretrained-model-path", args.pretrained_model_path]
    words += ["--tokenizer", args.tokenizer] if args.tokenizer else []
    words += ["--results", args.results] if args.results else []
    baseline = [args.baseline] if args.baseline else None
    for flag, names in (("--only", args.only), ("--baseline", baseline), ("--data", args.data)):
        words += [flag, *names] if names else []
    return ["python", "-m", "advanced.experiments", *words]


def table_of(args: Namespace, name: str) -> Table:
    """A table by its name or file, with the baseline of the flags. Raises `UserError` for an unknown name."""
    path = next((path for path in (HERE / "tables" / f"{name}.json", Path(name)) if path.is_file()), None)
    if path is None:
        raise UserError(f"there is no table {name}; there are {known_tables()}")
    table = Table.read(path)
    baseline = args.baseline or table.baseline
    if unknown := {*(args.only or ()), baseline} - {row.name for row in table.rows}:
        rows = ", ".join(row.name for row in table.rows)
        raise UserError(f"{name} has no row {', '.join(sorted(unknown))}; it has {rows}")
    if unknown := {*(args.data or ())} - {*table.data}:
        raise UserError(f"{name} has no data {', '.join(sorted(unknown))}; it has {', '.join(table.data)}")
    return replace(table, baseline=baseline)


def main() -> None:
    args = get_args()
    check_args(args)
    end = time.monotonic() + 60 * (math.inf if args.minutes is None else args.minutes)
    tables = [table_of(args, name) for name in args.tables]
    if len(tables) == 1:
        return work_on(args, tables[0], end)
    failed = []
    for table in tables:
        print(f"table {table.name}", flush=True)
        try:
            work_on(args, table, end)
        except UserError as error:  # the other tables are done all the same
            warn(f"{table.name}: {error}")
            failed.append(table.name)
    if failed:
        raise UserError(f"of {len(tables)} tables {len(failed)} failed: {', '.join(failed)}")


def work_on(args: Namespace, table: Table, end: float) -> None:
    """Do the work of the flags on one table. end: the `time.monotonic` after which no run is started."""
    path = results_of(args, table)
    done, others = read_results([path]), results_beside(path, name_of(args.pretrained_model_path))
    model = model_of(args.pretrained_model_path, args.tokenizer, {**others, **done})
    table = table.without_unknown(model).only(args.only, args.data)
    table.check_families(model)
    if args.render:
        write_tables(args, table, model, done)
    elif args.report:
        write_report(args, table, model, done)
    elif args.html:
        write_html(args, table, model, done)
    elif args.list:
        for trial in (trials := table.without_absent(model).ready(model, {**others, **done}, only_tune=args.tune)):
            print(describe(trial))
        print(f"{len(trials)} runs can be started now")
    else:
        run(args, table, model, path, end)


def run(args: Namespace, table: Table, model: Model, path: Path, end: float) -> None:
    """Take over the lines of other tables, then do the runs that are left and whose checkpoint is here."""

    def left_of(table: Table) -> list[Trial]:
        return table.ready(model, results_now(path), only_tune=args.tune)

    work = Path(args.work or Path(gettempdir()) / "min-llama-experiments")
    for folder in (path.parent, work):
        folder.mkdir(parents=True, exist_ok=True)
    take_over(partial(left_of, table), model, path, work)
    left = partial(left_of, table.without_absent(model))
    cluster = Cluster(args.cluster, args.workers) if args.cluster else None
    workers = cluster.workers if cluster else args.workers or 1
    Runner(left, model, path, work, args.device, workers, partial(kept_of, table, model, path), cluster).run(end)


def kept_of(table: Table, model: Model, path: Path) -> set[str]:
    """The keys of the models that rows with `members` will combine."""
    done, kept = results_now(path), set()
    for row, data, shots in table.cells():
        for trial in table.final(row, data, shots, model, done) if row.members > 1 else ():
            if trial.key(model) not in done:
                kept |= {member.key(model) for member in trial.each_member()}
    return kept


if __name__ == "__main__":
    sys.exit(run_main(main))
