"""Whole processes: what a user waits for, and the memory that a process takes.

- `first_run`: `run_llama.py`, from the start of Python to its end. The kernels that are compiled at their first use
  must not cost more than they save, so the first run in a fresh copy of the repository, where nothing compiled lies
  beside the code, is measured as well as a later one in the same copy.
- `peak_memory`: fine-tuning, each contender alone.
- `large`: `run_llama.py` with a large model, random weights of TinyLlama's shape in bfloat16: time and peak memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.alone import LABEL_NAMES, NEW_TOKENS, RUN_AND_TELL, SPLITS
from benchmarks.apart import run_python, seconds_and_megabytes
from benchmarks.bench import Bench, Line
from benchmarks.measure import ratio
from benchmarks.peers import SEED
from benchmarks.sentences import find_tokenizers
from benchmarks.table import COURSE, HF, HF_BF16, OURS, PLAIN_PATH, Work
from config import LlamaConfig
from convert import hugging_face
from engine.storage import free_memory
from engine.weights import blueprint
from llama import Llama
from tokenizer import TOKENIZER_MODEL, Tokenizer
from utils import ROOT

KERNELS_FLAG = {OURS: "auto", PLAIN_PATH: "plain"}
LARGE_CHECKPOINT = "stories42M.pt"
GREEDY_TEXT = "generated-sentence-temp-0.txt"
# What would keep Python or numba from writing, or let them find, compiled code elsewhere than in the copy.
CACHE_SETTINGS = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR")
TINYLLAMA = LlamaConfig(  # 1.1 billion numbers
    dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, hidden_dim=5632, max_seq_len=2048, tied=False, attention="causal"
)
NEEDED = 10**10  # bytes of memory: writing it takes the most
ASKED = 10  # sentences of each of two files that are classified zero-shot
TRANSFORMERS_DTYPES = {HF: "float32", HF_BF16: "bfloat16"}


def not_measured(works: Sequence[Work], why: str) -> list[Line]:
    """The lines of `works` where the machine lacks what they need."""
    return [Line(work.title, against, note=why) for work in works for against in work.against]


# ------------------------------------------------------------------------------------------- first and later runs


class Copies:
    """Runs `--option generate` in copies of the repository's tracked files, one for each contender and round.

    extra: files that are linked into every copy. `texts`: what each contender wrote last at temperature 0.
    """

    def __init__(self, folder: Path, tracked: list[str], extra: list[Path], threads: int):
        self.folder, self.tracked, self.extra, self.threads = folder, tracked, extra, threads
        self.copies: dict[str, Path] = {}
        self.texts: dict[str, str] = {}

    def first(self, name: str) -> float:
        """Seconds of a run in a fresh copy."""
        if name in self.copies:
            shutil.rmtree(self.copies[name])
        copy = self.copies[name] = Path(tempfile.mkdtemp(dir=self.folder))
        for file in self.tracked:
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
        for path in self.extra:
            os.link(path, copy / path.name)
        return self.later(name)

    def later(self, name: str) -> float:
        """Seconds of a run in the copy of the last `first`. Raises as `run_python`."""
        copy = self.copies[name]
        env = {key: value for key, value in os.environ.items() if key not in CACHE_SETTINGS}
        env["XDG_CACHE_HOME"] = str(copy / ".cache")
        command = ["run_llama.py", "--option", "generate", "--kernels", KERNELS_FLAG[name]]
        what = f"run_llama.py --kernels {KERNELS_FLAG[name]}"
        seconds, _ = run_python(what, command, self.threads, cwd=copy, env=env)
        self.texts[name] = (copy / GREEDY_TEXT).read_text(encoding="utf-8")
        return seconds


def tracked_files() -> list[str]:
    """The repository's files as git knows them; none where this folder is no repository."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    except OSError:
        return []
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    return [name for name in names if (ROOT / name).is_file()]


def first_run(bench: Bench, works: Sequence[Work]) -> list[Line]:
    """With the kernels that are chosen by default and with none, for two models."""
    tracked = tracked_files()
    if not tracked:
        return not_measured(works, "no git repository, so its files are not known")
    lines = _first_and_later(bench, works[:2], tracked, [])
    tokenizers = find_tokenizers(bench.config.vocab_size)
    if not tokenizers:
        return lines + not_measured(works[2:], f"no tokenizer of {bench.config.vocab_size} pieces")
    checkpoint = bench.folder / LARGE_CHECKPOINT
    # like the real one, it says nothing about attention
    model_args = {name: value for name, value in vars(bench.config).items() if name != "attention"}
    torch.save({"model": bench.peers.state, "model_args": model_args}, checkpoint)
    shutil.copy(tokenizers[0], bench.folder / TOKENIZER_MODEL)
    return lines + _first_and_later(bench, works[2:], tracked, [checkpoint, bench.folder / TOKENIZER_MODEL])


def _first_and_later(bench: Bench, works: Sequence[Work], tracked: list[str], extra: list[Path]) -> list[Line]:
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        copies = Copies(Path(folder), tracked, extra, bench.threads)
        runs = {
            f"{when.__name__} {name}": partial(when, name)
            for name in KERNELS_FLAG
            for when in (copies.first, copies.later)
        }
        # a round may compile for a minute; the median drops a cold disk
        costs = bench.turns.take(runs, warm_up=0, most=1 if bench.is_quick else None)
    same = {PLAIN_PATH: copies.texts[OURS] == copies.texts[PLAIN_PATH]}
    notes = {PLAIN_PATH: "identical text" if same[PLAIN_PATH] else "DIFFERENT text"}
    lines = []
    for work, when in zip(works, ("first", "later"), strict=True):
        by_name = {name: costs[f"{when} {name}"] for name in KERNELS_FLAG}
        lines += bench.lines(work, by_name, notes=notes, same=same)
    return lines


# --------------------------------------------------------------------------------------------------------- memory


def memory_line(bench: Bench, work: str, against: str, peaks: dict[str, float], ours: str = OURS) -> Line:
    """Ours / theirs, in MB. peaks: of each contender that was measured."""
    line = Line(work, against, unit="MB")
    if against in peaks and bench.has(against):
        line.ours, line.theirs, line.note = peaks[ours], peaks[against], "lower is better"
        line.ratio = ratio([line.ours], [line.theirs])
        line.costs = {OURS: [line.ours], against: [line.theirs]}
    else:
        bench.explain(line)
    return line


def peak_memory(bench: Bench, works: Sequence[Work]) -> list[Line]:
    """Of a process that loads a checkpoint, takes two training steps and evaluates one batch."""
    checkpoint = bench.folder / "model.pt"
    torch.save({"model": bench.peers.state, "model_args": vars(bench.config)}, checkpoint)
    course: dict[str, float] = {}  # it computes the same in all lines
    lines = []
    for work in works:
        peaks = dict(course)
        for name in (OURS, *bench.able(work.against)):
            if name not in peaks:
                attention = "bidirectional" if name == COURSE else work.attention
                what = ["fine-tune", name, work.precision, attention, checkpoint, *bench.sizes.shape(work.shape)]
                with bench.attempt(name):
                    command = ["-m", "benchmarks.alone", *what]
                    _, peaks[name] = seconds_and_megabytes(f"the process of {name}", command, bench.threads)
        course = {name: peak for name, peak in peaks.items() if name == COURSE}
        lines += [memory_line(bench, work.title, against, peaks) for against in work.against]
    return lines


# --------------------------------------------------------------------------------------------------- large models


def large(bench: Bench, works: Sequence[Work]) -> list[Line]:
    """Ours in each precision beside transformers in the nearest that it has, for each task of `works`."""
    config = bench.config if bench.is_quick else TINYLLAMA
    tokenizers, free = find_tokenizers(config.vocab_size), free_memory()
    why = "" if tokenizers else f"no tokenizer of {config.vocab_size} pieces"
    if free is not None and free < NEEDED and not bench.is_quick:
        why = f"{free / 1e9:.1f} GB of memory are free, and it takes {NEEDED / 1e9:.0f}"
    if why:
        of_memory = [work._replace(title=memory_title(work)) for work in works]
        return not_measured([each for pair in zip(works, of_memory, strict=True) for each in pair], why)
    folder = write_large(bench.folder / "large", config, tokenizers[0])
    tasks = dict.fromkeys(task_of(work) for work in works)
    return [line for task in tasks for line in _large(bench, task, folder, works)]


def task_of(work: Work) -> str:
    return work.title.split(", ")[1]


def memory_title(work: Work) -> str:
    return work.title.replace("large model", "large model's memory")


def write_large(folder: Path, config: LlamaConfig, tokenizer: Path) -> Path:
    """A Hugging Face directory, a text, sentences with labels, and the tokenizer."""
    draw = torch.Generator().manual_seed(SEED)
    shapes = {name: tensor.shape for name, tensor in blueprint(config, Llama).state_dict().items()}
    state = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for tensor in state.values():
        if tensor.dim() > 1:
            tensor.normal_(std=0.02, generator=draw)
    hugging_face.write(folder, state, config, Tokenizer(tokenizer_model=tokenizer), "bf16")
    (folder / TOKENIZER_MODEL).write_bytes(tokenizer.read_bytes())
    lines = (ROOT / "data/films-train.txt").read_text(encoding="utf-8").splitlines()[: 2 * ASKED]
    (folder / "text.txt").write_text("\n".join(line.split("|||")[-1].strip() for line in lines), encoding="utf-8")
    for start, split in zip((0, ASKED), SPLITS, strict=True):
        (folder / f"{split}.txt").write_text("\n".join(lines[start : start + ASKED]) + "\n", encoding="utf-8")
    return folder


def _large(bench: Bench, task: str, folder: Path, works: Sequence[Work]) -> list[Line]:
    works = [work for work in works if task_of(work) == task]
    peaks: dict[str, float] = {}

    def seconds(name: str, command: list[str]) -> float:
        spent, peaks[name] = seconds_and_megabytes("its process", command, bench.threads)
        return spent

    commands = {f"{OURS}, {work.precision}": our_command(task, work.precision, folder) for work in works}
    for name in bench.able(TRANSFORMERS_DTYPES):
        commands[name] = ["-m", "benchmarks.alone", "transformers", task, TRANSFORMERS_DTYPES[name], str(folder)]
    runs = {name: partial(seconds, name, command) for name, command in commands.items()}
    costs = bench.turns.take(runs, warm_up=0, most=bench.sizes.large_models, drop=bench.drop)
    lines = []
    for work in works:
        ours, (against,) = f"{OURS}, {work.precision}", work.against
        lines += bench.lines(work, {name: costs[name] for name in (ours, against) if name in costs})
        lines.append(memory_line(bench, memory_title(work), against, peaks, ours))
    return lines


def our_command(task: str, precision: str, folder: Path) -> list[str]:
    """`run_llama.py` with the model in `folder`, as arguments of Python."""
    flags = ["--pretrained-model-path", folder, "--tokenizer", folder / TOKENIZER_MODEL]
    flags += ["--precision", precision] * 2  # twice: --quick has a model that is too small for int4
    if task == "generate":
        flags += ["--max_new_tokens", NEW_TOKENS, "--ignore_eos"]
        for when in ("low", "high"):
            flags += [f"--generated_sentence_{when}_temp_out", folder / f"{when}.txt"]
    elif task == "perplexity":
        flags += ["--input", folder / "text.txt"]
    else:
        flags += ["--label-names", LABEL_NAMES, "--batch_size", ASKED]
        for split in SPLITS:
            flags += [f"--{split}", folder / f"{split}.txt", f"--{split}_out", folder / f"{split}-prompting-output.txt"]
    return ["-c", RUN_AND_TELL, "--option", task, *map(str, flags)]
