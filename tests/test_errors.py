"""A user's mistake in flags and files: one line on standard error that says what, where and what to do, status 2.

No file is touched. `test_checkpoint_errors.py` has models and tokenizers, `test_run_errors.py` has runs that end early.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import torch
from conftest import ROOT
from error_helpers import TEXT_FLAGS, check_one_error, snapshot, stderr_lines

from engine import programs, storage
from engine.data import Example
from engine.flags import FLAGS, Flag, Range, get_args
from engine.programs import run_main
from engine.tasks import EncodingRules, LlamaDataset
from engine.text import flags as text_flags
from tokenizer import Tokenizer
from utils import UserError


class Case(NamedTuple):
    """A command that is refused: flags after those of `option`, and what the line must hold and must not hold.

    files: made before, by content or by a function of the path.
    """

    flags: list
    words: tuple
    option: str = "prompt"
    files: dict[str, bytes | Callable[[Path], object]] = {}
    without: str = "\0"


INPUT_FLAGS = ("--train", "--dev", "--test", "--label-names", "--pretrained-model-path", "--tokenizer")
GOOD = b"0 ||| a film\n1 ||| another film\n"
BAD_DATA = {  # content, the line it must name, what it must say
    "no separator": (GOOD + b"1 the film\n", 3, "' ||| '"),
    "separator without spaces": (GOOD + b"1|||the film\n", 3, "' ||| '"),
    "tab": (GOOD + b"1\tthe film\n", 3, "' ||| '"),
    "label is a word": (b"good ||| a film\n" + GOOD, 1, "'good' is not a whole number"),
    "label is a fraction": (GOOD + b"1.0 ||| a film\n", 3, "'1.0' is not a whole number"),
    "label is missing": (GOOD + b" ||| a film\n", 3, "not a whole number"),
    "label of 5000 digits": (GOOD + b"1" * 5000 + b" ||| a film\n", 3, "not a whole number"),
    "grouped digits": (GOOD + b"1_0 ||| bad\n", 3, "not a whole number"),
    "Arabic digit": (GOOD + "\u0661 ||| bad\n".encode(), 3, "not a whole number"),
    "wide digit": (GOOD + "\uff11 ||| bad\n".encode(), 3, "not a whole number"),
    "sentence is missing": (GOOD + b"1 ||| \n" + GOOD, 3, "sentence is empty"),
    "sentence is blank": (GOOD + b"1 |||  \t \n", 3, "sentence is empty"),
    "blank line": (b"0 ||| a film\n\n1 ||| a film\n", 2, "' ||| '"),
    "blank last line": (GOOD + b"\n", 3, "' ||| '"),
    "only a line end": (b"\n", 1, "' ||| '"),
    "label beyond the mapping": (GOOD + b"2 ||| a film\n", 3, "2 is not from 0 to 1"),
    "huge label": (GOOD + b"9" * 30 + b" ||| a film\n", 3, "from 0 to 1"),
    "label -2": (GOOD + b"-2 ||| a film\n", 3, "-2 is not from 0 to 1"),
    "Latin-1": (GOOD + "1 ||| un café\n".encode("latin-1"), 3, "not UTF-8"),
    "UTF-16": ("0 ||| a film\n".encode("utf-16"), 1, "not UTF-8"),
    "NUL": (GOOD + b"1 ||| a \0 film\n", 3, "not UTF-8 text, it has a NUL; "),
    "cut in a character": (GOOD + "1 ||| un café".encode()[:-1], 3, "not UTF-8"),
}
BAD_MAPPINGS = {
    "not JSON": b"bad, good",
    "empty": b"",
    "cut": b'["bad", "go',
    "object": b'{"0": "bad", "1": "good"}',
    "string": b'"bad"',
    "number": b"3",
    "null": b"null",
    "empty list": b"[]",
    "one name": b'["bad"]',
    "duplicate": b'["bad", "bad"]',
    "number among names": b'["bad", 1]',
    "null among names": b'["bad", null]',
    "list among names": b'["bad", ["good"]]',
    "empty name": b'["bad", ""]',
    "blank name": b'["bad", " "]',
    "not UTF-8": '["café", "good"]'.encode("latin-1"),
    "number of 5000 digits": b"[" + b"1" * 5000 + b"]",
    "a hundred thousand brackets": b"[" * 100_000,
    "lone surrogate": b'["bad", "\\ud800"]',
    "line end in a name": b'["bad", "go\\nod"]',
}
OUT_OF_RANGE = {
    "--batch_size": ("0", "-1", str(10**30)),
    "--epochs": ("0",),
    "--lr": ("nan", "-1", "0", "inf"),
    "--hidden_dropout_prob": ("1", "nan"),
    "--dropout": ("1", "-0.1"),
    "--weight_decay": ("-1", "inf"),
    "--clip": ("0", "nan"),
    "--seed": ("-1", str(2**32)),
    "--max_sentence_len": ("0",),
    "--max_new_tokens": ("0",),
    "--top_k": ("0",),
    "--top_p": ("0", "nan", "1.5"),
    "--epsilon": ("1", "nan"),
    "--min_p": ("-0.1", "1.1", "nan"),
    "--repetition_penalty": ("0", "-1", "inf", "nan"),
    "--beam": ("0", "1001"),
    "--contrastive": ("1.5,5", "nan,5", "0.6,0"),
}
MALFORMED = {
    "unknown flag": (["--batchsize", "8"], "--batchsize"),
    "abbreviated flag": (["--batch", "8"], "--batch"),
    "abbreviated file": (["--pretrained", "x.pt"], "--pretrained"),
    "stray word": (["finetune"], "finetune"),
    "not a number": (["--epochs", "five"], "--epochs"),
    "fraction": (["--batch_size", "8.5"], "--batch_size"),
    "unknown option": (["--option", "pretrain"], "--option"),
    "unknown device": (["--device", "tpu"], "--device"),
    "value missing": (["--lr"], "--lr"),
    "two hyphens": (["--seed=--"], "--seed"),
    "grouped digits": (["--epochs", "1_0"], "--epochs"),
    "another script's digits": (["--lr", "\u0661"], "--lr"),
    "one of two numbers": (["--contrastive", "0.6"], "--contrastive"),
    "three numbers": (["--contrastive", "0.6,5,1"], "--contrastive"),
    "two fractions": (["--contrastive", "0.6,5.0"], "--contrastive"),
    "a huge number": (["--seed", "9" * 5000], "--seed"),
}
OUTPUT_FLAGS = {
    "--dev_out": ("prompt", "x-dev-prompting-output.txt"),
    "--test_out": ("finetune", "x-test-finetuning-output.txt"),
    "--generated_sentence_low_temp_out": ("generate", "x.txt"),
    "--generated_sentence_high_temp_out": ("generate", "x.txt"),
}
SINGLE = {
    "bad data in finetune": Case(
        ["--dev", "dev.txt"], ("dev.txt line 3:", "' ||| '"), "finetune", {"dev.txt": GOOD + b"1 the film\n"}
    ),
    # the number of classes follows the training data here, which must not mean three million classes
    "a huge label under the default mapping": Case(
        ["--train", "train.txt", "--label-names", "data/cfimdb-label-mapping.json"],
        ("train.txt line 3", "30000"),
        "finetune",
        {"data/cfimdb-label-mapping.json": b'["bad", "good"]', "train.txt": GOOD + b"30000 ||| a film\n"},
    ),
    "a prompt longer than the model": Case(
        ["--attention", "causal", "--label-names", "names.json"],
        ("prompt", "max_seq_len=64"),
        files={"names.json": b'["' + b"bad" * 30 + b'", "' + b"good" * 30 + b'"]'},
    ),
    "dev and test output names swapped": Case(
        ["--dev_out", "films-test-prompting-output.txt", "--test_out", "films-dev-prompting-output.txt"], ("--dev_out",)
    ),
    "both generated sentences in one file": Case(
        ["--generated_sentence_low_temp_out", "a.txt", "--generated_sentence_high_temp_out", "./a.txt"],
        ("--generated_sentence_low_temp_out", "--generated_sentence_high_temp_out"),
        "generate",
    ),
    "a prompt with bytes that are not text": Case(["--prompt", "a\udcff"], ("--prompt", "UTF-8"), "generate"),
    "bare finetune": Case(
        ["--option", "finetune"],
        ("--dev_out", "cfimdb-dev-prompting-output.txt", "dev-finetuning-output.txt"),
        option="",
    ),
}


def input_cases() -> dict[str, Case]:
    """Files that are absent, no plain files, or hold what they should not."""
    made = {}
    for flag in INPUT_FLAGS:
        for option in ("prompt", "finetune"):
            words = (flag, "absent.file", "does not exist")
            made[f"{option} {flag} absent"] = Case([flag, "absent.file"], words, option)
        without = "\0" if flag == "--pretrained-model-path" else "does not exist"  # a folder without config.json
        words = (flag, "inputs", "folder")
        made[f"{flag} folder"] = Case([flag, "inputs"], words, files={"inputs": Path.mkdir}, without=without)
        made[f"{flag} pipe"] = Case([flag, "odd"], (flag, "pipe"), files={"odd": os.mkfifo})
        linked = {"real": os.mkfifo, "odd": lambda path: path.symlink_to("real")}  # as a shell's <(COMMAND)
        made[f"{flag} link to a pipe"] = Case([flag, "odd"], (flag, "a pipe", "read only once"), files=linked)
        loop = {"odd": lambda path: path.symlink_to("odd")}
        made[f"{flag} loop"] = Case([flag, "odd"], (flag, "leads nowhere"), files=loop)
        made[f"{flag} device"] = Case([flag, os.devnull], (flag, "device"))
    data = [(split, name, *bad) for split in ("train", "dev", "test") for name, bad in BAD_DATA.items()]
    for split, content, line in (("test", GOOD, 3), ("train", b"", 1), ("dev", b"", 1)):
        data.append((split, "label -1", content + b"-1 ||| a film\n", line, "-1"))  # which stands for no gold label
    for split, name, content, line, words in data:
        flags = [f"--{split}", f"{split}.txt"]
        made[f"{split} {name}"] = Case(flags, (f"{split}.txt line {line}:", words), files={f"{split}.txt": content})
    for name, content in (("nothing", b""), ("byte-order mark", b"\xef\xbb\xbf")):
        words = ("train.txt holds no data", "LABEL ||| sentence")
        made[name] = Case(["--train", "train.txt"], words, files={"train.txt": content})
    for name, content in BAD_MAPPINGS.items():
        made[f"mapping {name}"] = Case(["--label-names", "n.json"], ("n.json",), files={"n.json": content})
    return made


NUMBER = r"\d+(?:\^\d+)?(?: - 1)?"
RANGE = re.compile(
    rf"must be (from|at least|above) ({NUMBER})(?: (to|to below|and at most|and below) ({NUMBER})| and (finite))?"
)


def number_said(text: str) -> int:
    power, _, less = text.partition(" - ")
    base, _, exponent = power.partition("^")
    return int(base) ** int(exponent or 1) - int(less or 0)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS + text_flags.TEXT_FLAGS if isinstance(flag.within, Range)])
def test_a_number_is_taken_where_the_words_of_its_range_say_so(flag: Flag):
    from_where, least, to_where, most, finite = RANGE.fullmatch(flag.within.words).groups()
    low, high = number_said(least), number_said(most) if most else math.inf
    assert flag.within.holds(low) == (from_where != "above")
    assert flag.within.holds(high) == (finite is None and to_where not in ("to below", "and below"))
    assert flag.within.holds(math.nextafter(low, high)) and flag.within.holds(math.nextafter(high, low))
    assert not flag.within.holds(math.nextafter(low, -math.inf)) and not flag.within.holds(math.nan)
    assert most is None or not flag.within.holds(math.nextafter(high, math.inf))


def flag_cases() -> dict[str, Case]:
    """Values that cannot be, and outputs that cannot be written."""
    made = {}
    for flag, values in OUT_OF_RANGE.items():
        for value in values:
            made[f"{flag} {value}"] = Case([f"{flag}={value}"], (flag, "must be"))
    for name, (flags, word) in MALFORMED.items():
        made[name] = Case(flags, (word, "--help"), option="")
    for option, kind in (("prompt", "prompting"), ("finetune", "finetuning")):
        for split in ("dev", "test"):
            for name in ("answers.txt", "films-dev-output.txt", "films-train-prompting-output.txt"):
                flag, ending = f"--{split}_out", f"{split}-{kind}-output.txt"
                made[f"{option} {flag} {name}"] = Case([flag, name], (flag, name, ending), option)
    for flag, (option, name) in OUTPUT_FLAGS.items():
        made[f"{flag} nowhere"] = Case([flag, f"nowhere/{name}"], (flag, "nowhere", "create"), option)
        made[f"{flag} folder"] = Case([flag, name], (flag, name, "folder"), option, {name: Path.mkdir})
        # renaming over a pipe or a device would remove it
        made[f"{flag} pipe"] = Case([flag, name], (flag, name), option, {name: os.mkfifo})
    return made


CASES = SINGLE | input_cases() | flag_cases()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_mistake_is_one_line(case: Case, refused: Callable, flags_for: Callable, tmp_path: Path) -> None:
    for name, content in case.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content(tmp_path / name) if callable(content) else (tmp_path / name).write_bytes(content)
    line = refused([*flags_for(case.option), *case.flags], *case.words)
    assert case.without not in line and len(line) < 700


BUNDLED = ROOT / "checkpoints" / "minllama1M.pt"
OTHER_INPUTS = {  # of the programs beside the driver: module, arguments with the input PIPE, how the line begins
    "model converted": ("convert.__main__", ["PIPE", "out", "--to", "hf"], "MODEL"),
    "tokenizer converted": ("convert.__main__", [BUNDLED, "out", "--to", "hf", "--tokenizer", "PIPE"], "--tokenizer"),
    "model compared": ("convert.compare", ["PIPE", "a.onnx", "--input", "a.txt"], "MODEL"),
    "model on a page": ("explore.__main__", ["PIPE", "--out", "a.html"], "MODEL"),
    "data on a page": ("explore.__main__", [BUNDLED, "--data", "PIPE", "--out", "a.html"], "--data"),
    "tokenizer on a page": ("explore.__main__", [BUNDLED, "--tokenizer", "PIPE", "--out", "a.html"], "--tokenizer"),
    "text of a vocabulary": ("bert.vocabulary", ["--text", "PIPE", "--out", "out"], "--text"),
}


@pytest.mark.parametrize("module, flags, what", OTHER_INPUTS.values(), ids=OTHER_INPUTS)
def test_a_pipe_that_would_be_read_twice_is_named(
    call: Callable, tmp_path: Path, module: str, flags: list, what: str
) -> None:
    os.mkfifo(tmp_path / "PIPE")
    status, _, err = call(*flags, main=importlib.import_module(module).main)
    check_one_error(status, err, f"error: {what} PIPE is a pipe or device, which can be read only once")
    assert [path.name for path in tmp_path.iterdir()] == ["PIPE"]


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("option", ["generate", "prompt", "finetune"])
@pytest.mark.parametrize("flags", [["--use_gpu"], ["--device", "cuda"], ["--device", "mps"]], ids=" ".join)
def test_no_accelerator(refused: Callable, flags_for: Callable, option: str, flags: list[str]) -> None:
    refused([*flags_for(option), *flags], *flags, "CPU")


# ------------------------------------------------------------------------------------------------------- permissions


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
@pytest.mark.parametrize("flag", INPUT_FLAGS)
def test_unreadable_input(
    refused: Callable, flags_for: Callable, tmp_path_factory: pytest.TempPathFactory, flag: str
) -> None:
    locked = tmp_path_factory.mktemp("locked") / "file"
    locked.write_bytes(b"any")
    locked.chmod(0)
    refused([*flags_for("prompt"), flag, locked], locked)


@pytest.mark.parametrize("flag", ["--train", "--dev", "--test", "--label-names", "--pretrained-model-path"])
def test_permission_denied(refused: Callable, flags_for: Callable, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    flags = flags_for("prompt")
    locked = Path(flags[flags.index(flag) + 1])

    def deny(path: Path, *how: Any, **more: Any) -> IO:
        if Path(path) == locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, *how, **more)

    if flag == "--pretrained-model-path":
        flags = flags_for("generate")
        monkeypatch.setattr(storage, "open", deny, raising=False)
    else:
        monkeypatch.setattr("utils.open", deny, raising=False)
    refused(flags, locked, "permission denied")


# -------------------------------------------------------------------------- what looks like a mistake, and is none


@pytest.mark.parametrize("flag", ["--prompt", "--question", "--text-column", "--label-column"])
def test_a_text_is_utf8_whatever_the_locale_is(flag: str):
    code = "import sys; from engine.flags import get_args; print(ascii(vars(get_args(sys.argv[2:]))[sys.argv[1]]))"
    name = flag.removeprefix("--").replace("-", "_")
    for settings in ({"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {}):
        command = [sys.executable, "-c", code, name, "--option", "prompt", flag, "café 北京".encode()]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == ascii("café 北京") + "\n", done.stderr
    with pytest.raises(UserError, match=f"argument {flag}: not UTF-8 text"):
        get_args([flag, "caf\udce9"])  # Latin-1, as Python reads it where the locale is UTF-8
    assert isinstance(get_args([]).prompt, programs.Default)


def test_minus_one_is_a_label_in_test_files_without_gold_labels(
    call: Callable, flags_for: Callable, tmp_path: Path
) -> None:
    (tmp_path / "unlabelled.txt").write_bytes(b"-1 ||| a film\n" * 3)
    status, out, err = call(*flags_for("prompt"), "--test", "unlabelled.txt")
    assert status == 0, err
    assert "load 3 data from unlabelled.txt" in out


def test_top_k_beyond_64_bits_keeps_every_token(call: Callable, flags_for: Callable, tmp_path: Path) -> None:
    texts = []
    for more in ([], ["--top_k", 10**30]):
        status, _, err = call(*flags_for("generate"), *more)
        assert status == 0, err
        texts.append((tmp_path / "generated-sentence-temp-1.txt").read_bytes())
    assert texts[0] == texts[1]


def test_prompt_needs_no_training_data(call: Callable, flags_for: Callable, tmp_path: Path) -> None:
    flags = list(flags_for("prompt"))
    at = flags.index("--train")
    expected = [call(*flags), snapshot(tmp_path)]
    status, out, _ = call(*flags[:at], *flags[at + 2 :])
    assert status == 0 and [out.count("load "), snapshot(tmp_path)] == [expected[0][1].count("load ") - 1, expected[1]]


def test_a_prompt_that_is_cut_or_changed_is_said_to_be(call: Callable, flags_for: Callable) -> None:
    flags = [*flags_for("generate"), *TEXT_FLAGS]
    _, _, err = call(*flags, "--prompt", "a film " * 60)
    assert "of which the model sees the last 64" in err
    _, _, err = call(*flags, "--prompt", "a\tfilm\n\n")
    assert "the tokenizer changes --prompt" in err or "\t" in Path("generated-sentence-temp-0.txt").read_text()
    _, _, err = call(*flags, "--prompt", "a film")
    assert err == ""


@pytest.mark.parametrize("option", ["prompt", "finetune"])
@pytest.mark.parametrize("attention, what", [("bidirectional", "used whole"), ("causal", "cut")])
def test_long_sentences_warn_once(
    call: Callable, flags_for: Callable, tmp_path: Path, option: str, attention: str, what: str
) -> None:
    long_dev = tmp_path / "long-dev.txt"
    long_dev.write_text(f"0 ||| {'rain ' * 90}\n1 ||| short\n1 ||| {'storm ' * 90}\n")
    (tmp_path / "short.txt").write_text("0 ||| a\n1 ||| b\n")
    (tmp_path / "names.json").write_text('["b", "g"]')  # a suffix that fits the model
    flags = ["--dev", long_dev, "--test", "short.txt", "--label-names", "names.json"]
    status, _, err = call(*flags_for(option), *flags, "--attention", attention, "--epochs", 1)
    assert status == 0, err
    (mine,) = (line for line in stderr_lines(err) if line.startswith("warning: ") and str(long_dev) in line)
    assert "2 sentences" in mine and "max_seq_len=64" in mine and what in mine


def test_what_happens_to_long_sentences(tokenizer: Tokenizer) -> None:
    encode = tokenizer.sp_model.encode
    sentence, suffix = "rain " * 89 + "rain", "Is it a or b? It is "
    ids, suffix_ids = encode(sentence), encode(suffix)
    assert len(suffix_ids) < 40 < 64 < len(ids)
    examples = [Example(sentence, 0), Example("a", 1)]
    whole = LlamaDataset(examples, tokenizer, EncodingRules(suffix, 64, is_causal=False))
    assert whole.token_ids[0] == [1, *encode(f"{sentence} {suffix}")]
    cut = LlamaDataset(examples, tokenizer, EncodingRules(suffix, 64, is_causal=True))
    assert cut.token_ids[0] == [1, *ids][: 64 - len(suffix_ids)] + suffix_ids
    assert len(cut.token_ids[0]) == 64
    assert whole.too_long == cut.too_long == 1
    just_fits = EncodingRules(max_seq_len=len(ids) + 1)
    assert LlamaDataset(examples, tokenizer, just_fits).too_long == 0
    assert LlamaDataset(examples, tokenizer, just_fits._replace(max_seq_len=len(ids))).too_long == 1
    assert whole.sentences == cut.sentences == [f"{sentence} {suffix}", f"a {suffix}"]


# ----------------------------------------------------------------------------- outputs that are something else


def test_dev_null_is_not_replaced() -> None:
    with pytest.raises(UserError, match="--dev_out /dev/null"):
        programs.check_writable("/dev/null", "--dev_out")


@pytest.mark.parametrize("flag", OUTPUT_FLAGS)
@pytest.mark.parametrize("length", [300, 255])
def test_output_name_too_long(call: Callable, flags_for: Callable, tmp_path: Path, flag: str, length: int) -> None:
    """Found before anything is loaded if the name is too long for a file; used if it is not."""
    option, name = OUTPUT_FLAGS[flag]
    name = "x" * (length - len(name)) + name
    status, out, err = call(*flags_for(option), flag, name, "--epochs", 1)
    if length > 255:
        check_one_error(status, err, flag, "too long")
        assert "load" not in out
        assert snapshot(tmp_path) == {}
    else:
        assert status == 0, err
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize("taken", ["--train", "--dev", "--test", "--label-names", "--pretrained-model-path"])
def test_output_is_an_input(refused: Callable, flags_for: Callable, tmp_path: Path, taken: str) -> None:
    flags = flags_for("prompt")
    name = "my-dev-prompting-output.txt"
    shutil.copy(flags[flags.index(taken) + 1], tmp_path / name)
    tokenizer = Path(flags[flags.index("--pretrained-model-path") + 1]).with_suffix(".model")
    refused([*flags, taken, name, "--dev_out", f"./{name}", "--tokenizer", tokenizer], "--dev_out", taken[2:5])


def test_output_is_an_input_through_a_link(refused: Callable, flags_for: Callable, films: dict, tmp_path: Path) -> None:
    (tmp_path / "a-dev-prompting-output.txt").symlink_to(films["dev"])
    refused([*flags_for("prompt"), "--dev_out", "a-dev-prompting-output.txt"], "--dev_out", "--dev")


OVERLAPS = {  # the name of a sample, and what has it already
    "the checkpoint": ("--pretrained-model-path", "m-2.pt", "m.pt"),
    "the tokenizer": ("--tokenizer", "k-2.model", "k.model"),
    "the other text": ("--generated_sentence_low_temp_out", "g-2.txt", "g.txt"),
}


@pytest.mark.parametrize("flag, name, out", OVERLAPS.values(), ids=OVERLAPS)
def test_a_sample_is_an_input_or_another_output(
    refused: Callable, tiny_checkpoint: Path, tmp_path: Path, flag: str, name: str, out: str
) -> None:
    flags = {"--pretrained-model-path": tiny_checkpoint, "--tokenizer": tiny_checkpoint.with_suffix(".model")}
    if flag in flags:
        shutil.copy(flags[flag], tmp_path / name)
    flags |= {flag: name, "--num_samples": 2, "--generated_sentence_high_temp_out": out}
    refused([word for pair in flags.items() for word in pair], name, "sample 2")


@pytest.mark.parametrize("ending", [".pt", ".resume", ".lock", "-films-dev.resume"])
def test_data_under_a_name_that_the_run_writes(
    refused: Callable, flags_for: Callable, films: dict[str, Path], tmp_path: Path, ending: str
) -> None:
    name = f"finetune-5-2e-05{ending}"
    shutil.copy(films["dev"], tmp_path / "films-dev.txt")
    os.link(tmp_path / "films-dev.txt", tmp_path / name)  # the same file under two names is one file, too
    refused([*flags_for("finetune"), "--train", tmp_path / "films-dev.txt", "--dev", name], name, "also --dev")


# --------------------------------------------------------------------------------------------------------- how it ends

ANSWERED_AT_ONCE = {
    "help": (["--help"], 0),
    "bare finetune": (["--option", "finetune"], 2),
    "bad number": (["--lr", "nan"], 2),
    "missing checkpoint": (["--pretrained-model-path", "absent.pt"], 2),
}


@pytest.mark.parametrize("flags, status", ANSWERED_AT_ONCE.values(), ids=ANSWERED_AT_ONCE)
def test_answered_without_heavy_imports(tmp_path: Path, flags: list[str], status: int) -> None:
    watch = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    code = end.code\n"
        "heavy = sorted({'torch', 'sklearn', 'numpy', 'sentencepiece', 'tqdm'} & set(sys.modules))\n"
        "print('LOADED', heavy, 'STATUS', code)\n"
    )
    command = [sys.executable, "-c", f"import sys; sys.argv = {[str(ROOT / 'run_llama.py'), *flags]!r}\n{watch}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert f"LOADED [] STATUS {status}" in done.stdout, done.stderr
    if status:
        check_one_error(status, done.stderr)
    else:
        assert "--pretrained-model-path" in done.stdout and not done.stderr
    assert snapshot(tmp_path) == {}


def out_of_memory() -> None:
    torch.empty(2**55)


def absent_module() -> None:
    import no_such_module  # noqa: F401


def copies_to_a_full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "from.pt", None, "to.pt")


FAILURES = {
    copies_to_a_full_disk: ["cannot read or write to.pt: No space left", "free some space"],
    out_of_memory: ["memory is used up"],
    absent_module: ["no_such_module.py is not here", f"imported by {__file__} line"],
}


@pytest.mark.parametrize("fails", FAILURES)
def test_what_is_not_there_is_named(call: Callable, fails: Callable) -> None:
    status, _, err = call(main=fails)
    check_one_error(status, err, *FAILURES[fails])


def test_a_programs_own_defect_keeps_its_traceback() -> None:
    def defect() -> None:
        raise IndexError("a bug")

    with pytest.raises(IndexError, match="a bug"):
        run_main(defect)
