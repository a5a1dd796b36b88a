"""Small models, tokenizers and data that the tests make for themselves, and the real assets where they are at hand."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from error_helpers import check_one_error, generate_flags, snapshot

import fast.apply
from config import LlamaConfig
from engine.decoding import Sampling, chooser
from engine.programs import run_main
from llama import Llama
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
SENTENCES = (
    "A warm little film about a baker and her stubborn goat",
    "The plot wanders off and never comes home",
    "I laughed twice, once by accident",
    "Two sisters, one boat, and the best storm I have seen on a screen",
    "Nothing happens, slowly, in the rain",
    "My uncle slept through it and I envied him",
    "The songs stayed with me all the way to the bus stop",
    "A thin joke stretched over two hours",
    "She plays the lighthouse keeper with such quiet care",
    "The robots are cardboard and so is the hero",
)

TAKEN = ("oneDNN", "bfloat16 products", "fused", fast.apply.TRAINED_BY_PRODUCTS)  # of ways that are measured
FIGURES = re.compile(r"^(epoch \d+:.*|(?:dev|test) acc :: .*)$", re.MULTILINE)  # what a run prints


def pytest_configure() -> None:
    """Threads of numba, of OpenBLAS, which scikit-learn computes with, and of the processes that tests start.

    Before numba is imported: loops must be right for three threads also where there are fewer processors. Of the others
    one: what tests compute is small, and threads that wait for one another take twice the time where two tests run.
    """
    os.environ.setdefault("NUMBA_NUM_THREADS", str(max(3, os.cpu_count() or 1)))
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: PyTorch in each takes half a gigabyte, and some tests start processes of their own."""
    return min(os.cpu_count() or 1, 4)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from threads, and threads that wait for one another are slow on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def steady_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that work are taken, however fast they are here: tests are about what they compute."""

    def fastest(question: str, ways: dict[str, Callable[[], object]]) -> tuple[str, str]:
        wanted = [name for name in ways if name in TAKEN]
        return (wanted or [*ways])[0], "chosen for a test"

    monkeypatch.setattr(fast.apply, "fastest", fastest)


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 300 pieces with byte fallback, so `<0x00>` is id 3 as in Llama's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_prefix=str(folder / "tiny"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder / "tiny.model"


@pytest.fixture
def tokenizer(tiny_tokenizer: Path) -> Tokenizer:
    return Tokenizer(tokenizer_model=tiny_tokenizer)


def hear_interrupts() -> None:
    """The `preexec_fn` of a process that is to be interrupted: where tests run in the background, SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def save_checkpoint(path: Path, model: Llama, **model_args) -> Path:
    """Write a checkpoint in the course's layout. model_args: what it declares, else the model's own config."""
    torch.save({"model": model.state_dict(), "model_args": model_args or vars(model.config)}, path)
    return path


def random_llama(seed: int = 0, gain: float = 4.0, **changes) -> Llama:
    """A tiny Llama with weights large enough for its layers to matter (fresh ones barely move the residual stream)."""
    torch.manual_seed(seed)
    model = Llama(LlamaConfig.from_preset("tiny", **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layers") and parameter.dim() == 2:
                parameter.mul_(gain)
    return model.eval()


def choosing(temperature: float = 1.0, **settings: Any) -> Callable:
    """The argument `choose` of `continue_texts` for settings of `Sampling`."""
    return chooser(Sampling(temperature, **settings))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A random two-layer checkpoint that declares no attention, its tokenizer beside it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shutil.copy(tiny_tokenizer, folder / "tiny.model")
    model = random_llama()
    declared = {name: value for name, value in vars(model.config).items() if name != "attention"}
    return save_checkpoint(folder / "tiny.pt", model, **declared)


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two-class data files of 24, 10 and 10 lines, and their label mapping."""
    folder = tmp_path_factory.mktemp("films")
    paths = {}
    for split, size in (("train", 24), ("dev", 10), ("test", 10)):
        paths[split] = folder / f"films-{split}.txt"
        lines = (f"{index % 2} ||| {SENTENCES[index % 10]} , {split} {index}" for index in range(size))
        paths[split].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    paths["label_names"] = folder / "films-label-mapping.json"
    paths["label_names"].write_text(json.dumps(["bad", "good"]), encoding="utf-8")
    return paths


@pytest.fixture
def course_folder(tmp_path: Path, tiny_checkpoint: Path, films: dict[str, Path]) -> Path:
    """The tiny model and data under the names that every flag has by default."""
    shutil.copy(tiny_checkpoint, tmp_path / "stories42M.pt")
    shutil.copy(tiny_checkpoint.with_suffix(".model"), tmp_path / "tokenizer.model")
    (tmp_path / "data").mkdir()
    for split in ("train", "dev", "test"):
        shutil.copy(films[split], tmp_path / f"data/cfimdb-{split}.txt")
    shutil.copy(films["label_names"], tmp_path / "data/cfimdb-label-mapping.json")
    return tmp_path


@pytest.fixture(scope="session")
def run() -> Callable[..., subprocess.CompletedProcess]:
    """Runs a script of this repository as a user would: `run("run_llama.py", "--help", cwd=folder)`."""

    def run_script(
        script: str, *args: object, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(ROOT / script), *map(str, args)],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout,
        )

    return run_script


def succeed(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout


def slow_among(names: Iterable[str], slow: Container[str]) -> list:
    """Parameters of a test, of which some are done with `-m slow` alone."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def outputs(folder: Path) -> dict[str, bytes]:
    """The predictions that a run has written."""
    return {path.name: path.read_bytes() for path in folder.glob("*-output.txt")}


def drive_in(folder: Path, *flags: object, stdout: io.StringIO | None = None) -> str:
    """Run the driver in this process, which spares importing PyTorch; returns what it prints. An error is raised."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout or io.StringIO()) as printed:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["run_llama.py", *map(str, flags)])
        importlib.import_module("run_llama").main()  # by name: it is a program, and no library to anybody
    return printed.getvalue()


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., str]:
    """`drive_in` the test's own folder."""
    return functools.partial(drive_in, tmp_path)


@pytest.fixture(scope="session")
def classify_flags(tiny_checkpoint: Path, films: dict[str, Path]) -> Callable[[str], list[str]]:
    """The flags of `--option prompt` or `finetune` on the tiny model and data."""

    def flags(option: str) -> list[str]:
        kind = {"prompt": "prompting", "finetune": "finetuning"}[option]
        named = {
            "--option": option,
            "--pretrained-model-path": tiny_checkpoint,
            "--train": films["train"],
            "--dev": films["dev"],
            "--test": films["test"],
            "--label-names": films["label_names"],
            "--dev_out": f"films-dev-{kind}-output.txt",
            "--test_out": f"films-test-{kind}-output.txt",
        }
        return [str(item) for pair in named.items() for item in pair]

    return flags


@pytest.fixture
def flags_for(classify_flags: Callable, tiny_checkpoint: Path) -> Callable[[str], list]:
    """The flags of an option on the tiny model and data; none for ""."""
    few = {"": [], "generate": generate_flags(tiny_checkpoint)}
    return lambda option: few[option] if option in few else classify_flags(option)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable:
    """Runs the driver's `main` in `tmp_path` as `__main__` would; returns status, standard output and error.

    What libraries warn of goes to standard error too, as it does outside pytest.
    """
    monkeypatch.chdir(tmp_path)

    def run_driver(*argv: object, main: Callable | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["run_llama.py", *map(str, argv)])
        interrupts = signal.getsignal(signal.SIGINT)
        capsys.readouterr()
        with warnings.catch_warnings(record=True) as caught:
            status = run_main(main or importlib.import_module("run_llama").main)
        signal.signal(signal.SIGINT, interrupts)  # a program that was interrupted hears no more of them
        out, err = capsys.readouterr()
        return status, out, err + "".join(f"{w.message}\n" for w in caught if w.category is UserWarning)

    return run_driver


@pytest.fixture
def refused(call: Callable, tmp_path: Path) -> Callable[..., str]:
    """Asserts that the driver refuses the arguments in one line with all of `words`, and leaves the folder alone."""

    def check(argv: list, *words: object) -> str:
        (tmp_path / "cfimdb-dev-prompting-output.txt").write_text("earlier work")
        before = snapshot(tmp_path)
        status, _, err = call(*argv)
        line = check_one_error(status, err, *words)
        assert snapshot(tmp_path) == before
        return line

    return check


@pytest.fixture(scope="session")
def assets() -> Path:
    """The course's files and stories260K.pt, named by MINLLAMA_ASSETS; skips where they are not at hand."""
    folder = os.environ.get("MINLLAMA_ASSETS", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MINLLAMA_ASSETS names no folder, so the real data and checkpoint are not at hand")
    return Path(folder).resolve()


def asset(folder: Path, name: str) -> Path:
    """One file of the assets; skips where it is not among them."""
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not among the assets")
    return folder / name
