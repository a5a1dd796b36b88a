"""The entries that the file of a table may have, checked before the first run. No PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from config import PRECISIONS
from utils import UserError, short_repr


class Wanted(NamedTuple):
    """A condition for a value. words: the condition in words, for the message."""

    fits: Callable[[Any], bool]
    words: str


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e300


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _list_of(fits: Callable[[Any], bool], words: str, is_set: bool = True) -> Wanted:
    """A condition for a list: not empty, every value fits. is_set: no two values are equal."""

    def all_fit(values: Any) -> bool:
        is_list = isinstance(values, list) and values and all(map(fits, values))
        return bool(is_list) and (not is_set or len(set(values)) == len(values))

    return Wanted(all_fit, f"a list of {words}{', none of them twice' if is_set else ''}")


SETTING_CONDITIONS = {
    "lr": Wanted(lambda value: _is_number(value) and value > 0, "a number above 0"),
    "epochs": Wanted(_is_count, "a whole number of at least 1"),
    "batch_size": Wanted(_is_count, "a whole number of at least 1"),
    "hidden_dropout_prob": Wanted(_is_share, "a number from 0 to below 1"),
    "hold_out": Wanted(_is_share, "a number from 0 to below 1"),
    "precision": Wanted(lambda value: value in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
    "attention": Wanted(lambda value: value in (None, "causal", "bidirectional"), "causal, bidirectional or null"),
    "max_sentence_len": Wanted(lambda value: value is None or _is_count(value), "a whole number above 0, or null"),
    "dropout": Wanted(lambda value: value is None or _is_share(value), "a number from 0 to below 1, or null"),
    "weight_decay": Wanted(_is_share, "a number from 0 to below 1"),
    "clip": Wanted(lambda value: value is None or (_is_number(value) and value > 0), "a number above 0, or null"),
    "second_test": Wanted(lambda value: value == 0 or _is_count(value), "a number of sentences"),
    "judged_on": Wanted(lambda value: isinstance(value, str), "the name of a data set"),
}
ANY_TEXT = Wanted(lambda value: isinstance(value, str), "a text")
LINE = Wanted(lambda value: isinstance(value, str) and not {*value} & {*"|\r\n"}, "a text of one line, without |")
OBJECT = Wanted(lambda value: isinstance(value, dict), "an object")
SEEDS = _list_of(lambda value: type(value) is int and 0 <= value < 2**32, "seeds from 0 to 2^32 - 1")
SHOTS = _list_of(lambda value: value is None or _is_count(value), "null for all, or sentences a class")
JUDGES = ("dev", "test")
TABLE_CONDITIONS = {
    "title": ANY_TEXT, "data": OBJECT, "rows": _list_of(OBJECT.fits, "rows", is_set=False),
    "seeds": Wanted(lambda value: value == [] or SEEDS.fits(value), SEEDS.words),
    "shots": SHOTS, "settings": OBJECT, "tune_seeds": SEEDS, "baseline": ANY_TEXT, "registered": ANY_TEXT,
    "judges": _list_of(JUDGES.__contains__, "dev and test"),
}  # fmt: skip
BAG_OF_WORDS = "bag-of-words"
SOLVED = (BAG_OF_WORDS, "frozen-states")  # options of rows that are solved instead of trained
OPTIONS = ("finetune", "prompt", *SOLVED)
KEYS_AND_VALUES = _list_of(ANY_TEXT.fits, "texts KEY=VALUE")
ROW_CONDITIONS = {
    "name": LINE,
    "option": Wanted(lambda value: value in OPTIONS, f"one of {', '.join(OPTIONS)}"),
    "method": ANY_TEXT,
    "arguments": Wanted(lambda value: value == [] or KEYS_AND_VALUES.fits(value), KEYS_AND_VALUES.words),
    "settings": OBJECT,
    "tune": OBJECT,
    "shots": SHOTS,
    "data": _list_of(ANY_TEXT.fits, "data sets of the table"),
    "seeds": SEEDS,
    "checkpoint": ANY_TEXT,
    "members": Wanted(lambda value: _is_count(value) and value > 1, "a whole number above 1"),
    "source": LINE,
}


def check_table(content: Any) -> None:
    """Raises `UserError` that names the first wrong entry."""
    if not isinstance(content, dict):
        raise UserError("it is no JSON object")
    if missing := [name for name in ("title", "data", "rows", "seeds") if name not in content]:
        raise UserError(f"it has no {missing[0]}")
    _check(content, TABLE_CONDITIONS, "")
    _check(content.get("settings", {}), SETTING_CONDITIONS, "settings: ")
    if not content["data"]:
        raise UserError("data: it names no data set")
    for name, settings in content["data"].items():
        if not isinstance(settings, dict):
            raise UserError(f"data: {name} must be an object")
        _check(settings, SETTING_CONDITIONS, f"data, {name}: ")
    for number, row in enumerate(content["rows"], start=1):
        _check_row(row, f"row {short_repr(row['name']) if isinstance(row.get('name'), str) else number}: ", content)


def _check_row(row: Mapping[str, Any], place: str, content: Mapping[str, Any]) -> None:
    if "name" not in row:
        raise UserError(f"{place}it has no name")
    if not content["seeds"] and ("seeds" in row or not row.get("tune")):
        raise UserError(f"{place}in a table without seeds a row has tune, and no seeds")
    _check(row, ROW_CONDITIONS, place)
    _check(row.get("settings", {}), SETTING_CONDITIONS, f"{place}settings: ")
    if row.get("arguments") and not row.get("method"):
        raise UserError(f"{place}it has arguments, and no method that they could be of")
    if row.get("option") in SOLVED and (found := {"tune", "method", "members"} & row.keys()):
        raise UserError(f"{place}what is solved has no {sorted(found)[0]}")
    if row.get("members") and row.get("option", "finetune") != "finetune":
        raise UserError(f"{place}members are trained, with the option finetune")
    if row.get("option") == "prompt" and "shots" in row:
        raise UserError(f"{place}shots are of training sentences, and it is not trained")
    if unknown := {*row.get("data", ())} - content["data"].keys():
        raise UserError(f"{place}the table has no data set {', '.join(sorted(unknown))}")
    for key, values in row.get("tune", {}).items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{place}tune: {key} must be a list of values")
        for value in values:
            if key in SETTING_CONDITIONS:
                _check({key: value}, SETTING_CONDITIONS, f"{place}tune: ")
            elif not row.get("method"):
                raise UserError(f"{place}tune: there is no setting {key}, and no method that it could be of")


def _check(values: Mapping[str, Any], wanted: Mapping[str, Wanted], place: str) -> None:
    for name, value in values.items():
        if name not in wanted:
            raise UserError(f"{place}there is no {short_repr(name)} here; there are {', '.join(wanted)}")
        if not wanted[name].fits(value):
            raise UserError(f"{place}{name} must be {wanted[name].words}, not {short_repr(value)}")
