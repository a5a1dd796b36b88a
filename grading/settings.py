"""The config of `python -m grading`: its fields with their comments, reading and checking it, writing the first one.

The extra `grading` is needed to read one: pydantic checks its fields. The classes are plain, so that worker processes
need none of it.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from grading.editions import ACCURACY_BANDS, DEFAULT_EDITION, EDITIONS, OUTPUT_KINDS, output_names
from grading.findings import CHECKS, SEVERITIES
from grading.programs import GradingError, atomic_write, check_writable, few, printable, read_text
from grading.rules import Rules

SCALE = ("A+", "A", "A-", "B+", "B", "B-", "C+", "C", "C-", "D+", "D", "D-", "F")
FORBID_OTHERS = {"extra": "forbid"}  # pydantic's setting: an unknown key is an error
DEFAULT_PATTERN = Rules().id_pattern


def setting(default: Any, comment: str) -> Any:
    """A field with the comment that stands above it in the file."""
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"comment": comment})
    return field(default=default, metadata={"comment": comment})


@dataclass(frozen=True)
class Thresholds:
    __pydantic_config__ = FORBID_OTHERS
    sst: float = setting(ACCURACY_BANDS["sst"], "grade A: at most so far below the reference")
    cfimdb: float = setting(ACCURACY_BANDS["cfimdb"], "")
    copied_sst: float = setting(0.6, "an accuracy from which on copied gold labels are looked for")
    copied_cfimdb: float = setting(0.98, "")
    lines: int = setting(100, "output files with fewer lines are not judged by accuracy")
    trigrams: float = setting(0.6, "least share of distinct trigrams of words in the text at temperature 0")
    known_words: float = setting(0.7, "least share of words that the data sets know; at temperature 1 half of it")
    words: int = setting(20, "texts with fewer words after the prompt are too short to be judged")


@dataclass(frozen=True)
class Penalties:
    __pydantic_config__ = FORBID_OTHERS
    format_steps: int = setting(1, "steps (A to A- is one) for faults of format: once, however many there are")
    late_steps: int = setting(0, "steps for what Canvas calls late")


@dataclass(frozen=True)
class SizeLimits:
    __pydantic_config__ = FORBID_OTHERS
    size: float = setting(0.0, "of a zip, in millions of bytes; 0: the edition's")
    unpacked: float = setting(0.0, "of all its files; 0: 20 times that, at most 500")


@dataclass(frozen=True)
class Settings:
    __pydantic_config__ = FORBID_OTHERS
    edition: str = setting(DEFAULT_EDITION, f"one of {', '.join(EDITIONS)}")
    gold: str = setting(
        "data", "the folder of sst-dev.txt and so on, with gold labels; paths are relative to this file"
    )
    roster: str = setting("", "a CSV file with a column id and, where they are known, name, canvas_id and section")
    id_pattern: str = setting(DEFAULT_PATTERN, "what an ID is, or a file name with the ID as group (?P<id>...)")
    overrides: str = setting("", "a CSV file with the columns id, grade, reason: these grades win")
    assignment: str = setting("min-llama", "the assignment's column in canvas.csv, as Canvas writes it")
    thresholds: Thresholds = field(default_factory=Thresholds)
    penalties: Penalties = field(default_factory=Penalties)
    limits: SizeLimits = field(default_factory=SizeLimits)
    references: dict[str, float] = setting({}, 'accuracies in place of the course\'s: "sst-dev-finetuning" = 0.414')
    points: dict[str, float] = setting({}, "points in place of letters in canvas.csv: A = 95.0")
    severity: dict[str, str] = setting({}, f"of a check, in place of its own: {', '.join(SEVERITIES)}")

    def rules(self) -> Rules:
        """Raises `GradingError` for a value that cannot be."""
        pattern = DEFAULT_PATTERN if "(?P<id>" in self.id_pattern else self.id_pattern
        return Rules(self.edition, self.gold, self.limits.size or None, self.limits.unpacked or None, pattern)


# ---------------------------------------------------------------------------------------------------------- reading


def need(name: str) -> ModuleType:
    """A library of the extra `grading`. Raises `GradingError` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        said = f"python -m grading needs the package {name}; install it with: pip install 'min-llama[grading]'"
        raise GradingError(f"{said} (or, in a clone, pip install -e '.[grading]')") from None


def read_settings(path: Path) -> Settings:
    """A config file. Raises `GradingError` with everything that is wrong in it."""
    try:
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        toml = need("tomli")
    pydantic = need("pydantic")
    try:
        table = toml.loads(read_text(path))
        text = json.dumps(table, default=str)
        settings = pydantic.TypeAdapter(Settings).validate_json(text, strict=True)
    except toml.TOMLDecodeError as error:
        raise GradingError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise GradingError(f"{path} is nested too deeply") from None
    except pydantic.ValidationError as error:
        faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        raise GradingError(f"{path}: {'; '.join(faults)}") from None
    settings = _beside(settings, Path(path).parent)
    if faults := list(_faults(settings)):
        raise GradingError(f"{path}: {'; '.join(faults)}")
    return settings


def _beside(settings: Settings, folder: Path) -> Settings:
    """The settings with paths that do not depend on the current folder."""
    paths = {name: getattr(settings, name) for name in ("gold", "roster", "overrides")}
    return replace(settings, **{name: str(folder / path) for name, path in paths.items() if path})


def _faults(settings: Settings):
    """What pydantic cannot know."""
    for group in ("thresholds", "penalties", "limits"):
        for name, value in asdict(getattr(settings, group)).items():
            most = 1 if group == "thresholds" and isinstance(value, float) else 10_000
            if not 0 <= value <= most:
                yield f"{group}.{name}: {value} is not between 0 and {most}"
    for name, value in settings.references.items():
        if f"{name}-output.txt" not in output_names(*OUTPUT_KINDS) or not 0 <= value <= 1:
            yield f"references.{printable(name)}: not a name like sst-dev-finetuning with an accuracy from 0 to 1"
    for code, severity in settings.severity.items():
        if code not in CHECKS or severity not in SEVERITIES:
            what = f"severity.{printable(code)} = {printable(severity)}"
            yield f"{what}: the codes are those of grading/checks.md, the severities {', '.join(SEVERITIES)}"
    if strange := settings.points.keys() - {*SCALE}:
        yield f"points: no grades {few(strange)}; there are {', '.join(SCALE)}"
    for name, path in {"roster": settings.roster, "overrides": settings.overrides}.items():
        if path and not Path(path).is_file():
            yield f"{name}: {printable(path)} does not exist"
    try:
        settings.rules()
        re.compile(settings.id_pattern)
    except (re.error, GradingError) as error:
        yield str(error)


# ---------------------------------------------------------------------------------------------------------- writing


def write_first(path: Path) -> None:
    """Write the config with all defaults and comments. Raises `GradingError` if the file is there already."""
    if path.exists():
        raise GradingError(f"--init {printable(path)} is there already; give another name, or remove it first")
    check_writable(path, "--init")
    with atomic_write(path) as file:
        file.write(first_config().encode())


def first_config() -> str:
    """The text of the config with all defaults. The checks' severities stand there as comments."""
    lines = ["# The config of python -m grading. Remove what stays as it is: these are the defaults."]
    lines += _lines_of([each for each in fields(Settings) if not _is_table(each)])
    for each in filter(_is_table, fields(Settings)):
        comment = each.metadata.get("comment")
        lines += ["", f"[{each.name}]", *([f"# {comment}"] if comment else [])]
        inner = each.default_factory()
        lines += _lines_of(fields(inner)) if is_dataclass(inner) else []
    lines += [f'# {code} = "{check.severity}"  # {check.what}' for code, check in CHECKS.items()]
    return "\n".join(lines) + "\n"


def _is_table(each: Field) -> bool:
    return each.default is MISSING


def _lines_of(some: list[Field] | tuple[Field, ...]) -> list[str]:
    lines = []
    for each in some:
        comment = each.metadata["comment"]
        lines += [f"# {comment}"] if comment else []
        lines.append(f"{each.name} = {json.dumps(each.default)}")
    return lines
