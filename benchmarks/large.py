"""Whole processes with a large model, random weights of TinyLlama's shape in bfloat16: their time and peak memory.

python -m benchmarks.large TASK DTYPE FOLDER     # what stands for transformers: prints its peak in bytes
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.learning import memory_line
from benchmarks.measure import Contender, Turns
from benchmarks.memory import RUN_AND_TELL, own_peak, run_and_ask
from benchmarks.sentences import find_tokenizers
from benchmarks.table import QUICK_SIZES, Bench, Line, lines_of
from benchmarks.targets import HF, HF_BF16, LARGE_TASKS, LINES, OURS
from config import LlamaConfig
from engine.data import create_data, read_label_names
from engine.flags import PREFIX
from engine.storage import free_memory
from tokenizer import TOKENIZER_MODEL, Tokenizer
from utils import ROOT, prompt_suffix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINYLLAMA = LlamaConfig(  # 1.1 billion numbers
    dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, hidden_dim=5632, max_seq_len=2048, tied=False, attention="causal"
)
NEEDED = 10**10  # bytes of memory: writing takes the most
NEW_TOKENS = 12  # of each of two texts
ASKED = 10  # sentences of each of two files that are classified zero-shot
SPLITS = ("dev", "test")
LABEL_NAMES = ROOT / "data/films-label-mapping.json"
DTYPES = {HF: "float32", HF_BF16: "bfloat16"}


def large(bench: Bench) -> list[Line]:
    """Ours in each precision beside transformers in the nearest that it has."""
    config = bench.config if bench.sizes == QUICK_SIZES else TINYLLAMA
    tokenizers, free = find_tokenizers(config.vocab_size), free_memory()
    why = None if tokenizers else f"no tokenizer of {config.vocab_size} pieces"
    if free is not None and free < NEEDED and config is TINYLLAMA:
        why = f"{free / 1e9:.1f} GB of memory are free, and it takes {NEEDED / 1e9:.0f}"
    if why is not None:
        return [Line(work, against, note=why) for work, others in LINES["large"].items() for against in others]
    folder = _write(bench.folder / "large", config, tokenizers[0], bench.seed)
    return [line for task in LARGE_TASKS for line in _lines(bench, task, folder)]


def _write(folder: Path, config: LlamaConfig, tokenizer: Path, seed: int) -> Path:
    """A Hugging Face directory, a text, sentences with labels, and the tokenizer."""
    import torch

    from convert.hugging_face import write
    from engine.weights import blueprint

    draw = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in blueprint(config).state_dict().items()}
    state = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for tensor in state.values():
        if tensor.dim() > 1:
            tensor.normal_(std=0.02, generator=draw)
    write(folder, state, config, Tokenizer(tokenizer_model=tokenizer), "bf16")
    (folder / TOKENIZER_MODEL).write_bytes(tokenizer.read_bytes())
    lines = (ROOT / "data/films-train.txt").read_text(encoding="utf-8").splitlines()[: 2 * ASKED]
    (folder / "text.txt").write_text("\n".join(line.split("|||")[-1].strip() for line in lines), encoding="utf-8")
    for start, split in zip((0, ASKED), SPLITS, strict=True):
        (folder / f"{split}.txt").write_text("\n".join(lines[start : start + ASKED]) + "\n", encoding="utf-8")
    return folder


def _lines(bench: Bench, task: str, folder: Path) -> list[Line]:
    peaks: dict[str, float] = {}
    works = [work for work in LINES["large"] if work.startswith(f"large model, {task}")]
    precisions = {work: work.rpartition(", ")[2] for work in works}
    commands = {f"{OURS}, {each}": _our_command(task, each, folder) for each in precisions.values()}
    for name, dtype in DTYPES.items():
        if bench.has(name):
            commands[name] = ["-m", "benchmarks.large", task, dtype, str(folder)]
    contenders = [Contender(name, partial(_seconds, bench, peaks, name, each)) for name, each in commands.items()]

    def drop(name: str, error: Exception) -> None:
        if name not in DTYPES:
            raise error
        bench.drop(name, error)

    turns = Turns(min(bench.turns.repeats, bench.sizes.large_models), bench.turns.pause)
    costs, lines = turns.take(contenders, warm_up=0, drop=drop), []
    for work, precision in precisions.items():
        ours, (against,) = f"{OURS}, {precision}", LINES["large"][work]
        lines += lines_of(bench, work, [against], {name: costs[name] for name in (ours, against) if name in costs})
        of_memory = work.replace("large model", "large model's memory")
        lines.append(memory_line(bench, of_memory, against, peaks[ours], peaks))
    return lines


def _our_command(task: str, precision: str, folder: Path) -> list[str]:
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


def _seconds(bench: Bench, peaks: dict[str, float], name: str, command: list[str]) -> float:
    """Of a process, which prints its peak memory last. Raises as `memory.run_and_ask`."""
    start = time.perf_counter()
    peaks[name] = run_and_ask("its process", command, bench.threads) / 1e6
    return time.perf_counter() - start


def use_transformers(task: str, dtype: str, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer(tokenizer_model=f"{folder}/{TOKENIZER_MODEL}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        if task == "perplexity":
            text = Path(folder, "text.txt").read_text(encoding="utf-8")
            ids = torch.tensor([tokenizer.encode(text, bos=True, eos=False)[: model.config.max_position_embeddings]])
            model(input_ids=ids, labels=ids, use_cache=False).loss.item()
            return
        if task == "prompt":
            for split in SPLITS:
                _ask_transformers(model, tokenizer, f"{folder}/{split}.txt")
            return
        ids = torch.tensor([tokenizer.encode(PREFIX, bos=True, eos=False)])
        new = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        for way in ({"do_sample": False}, {"do_sample": True, "temperature": 1.0}):
            model.generate(ids, attention_mask=torch.ones_like(ids), **new, **way)


def _ask_transformers(model: PreTrainedModel, tokenizer: Tokenizer, file: str) -> list[int]:
    """The likeliest label of each sentence: padding comes first, so that the last position alone is asked for."""
    import torch

    names = read_label_names(LABEL_NAMES)
    labels = [tokenizer.encode(name, bos=False, eos=False) for name in names]
    texts = [f"{example.sentence} {prompt_suffix(names)}" for example in create_data(file)]
    ids = [tokenizer.encode(text, bos=True, eos=False) for text in texts]
    width = max(map(len, ids))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    logits = model(input_ids=tokens, attention_mask=mask, logits_to_keep=1, use_cache=False).logits[:, -1]
    scores = logits.float().log_softmax(-1)
    return torch.stack([scores[:, label].sum(-1) for label in labels], dim=1).argmax(-1).tolist()


if __name__ == "__main__":
    use_transformers(*sys.argv[1:])
    print(own_peak())
