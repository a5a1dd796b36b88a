"""Programs whose peak memory is measured, each alone in a fresh process; they print their peak in bytes last.

python -m benchmarks.alone fine-tune CONTENDER PRECISION ATTENTION CHECKPOINT ROWS LENGTH
python -m benchmarks.alone transformers TASK DTYPE FOLDER     # what transformers does with a large model

What a program does not need is not imported: it would count.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tokenizer import Tokenizer

# `run_llama.py`, which then says how many bytes it had in memory at most.
RUN_AND_TELL = """import sys, run_llama
from benchmarks.alone import own_peak
status = run_llama.start()
print(own_peak())
sys.exit(status)"""
MEASURED_STEPS = 2  # the second has the optimizer's state, which the first allocates
NEW_TOKENS = 12  # of each of two texts of a large model
SPLITS = ("dev", "test")  # the files that it classifies zero-shot
LABEL_NAMES = Path(__file__).resolve().parent.parent / "data/films-label-mapping.json"


def own_peak() -> int:
    """The largest resident set that this process had, in bytes.

    On Linux not `ru_maxrss`: a process that was started without a copy of its parent's memory inherits the parent's
    peak there. `VmHWM` is its own.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fine_tune(contender: str, precision: str, attention: str, checkpoint: str, rows: str, length: str) -> None:
    """Two training steps and one batch of evaluation on a batch of random ids without padding, each in its own way."""
    import torch

    from benchmarks import peers
    from benchmarks.table import COURSE
    from engine.weights import load_llama_model

    contenders = peers.Peers(load_llama_model(checkpoint))
    model = contenders.classifier(contender, precision, attention, trains=True)
    batch = contenders.batch(int(rows), int(length))
    del contenders  # and with it the weights that the model was made from
    optimizer = peers.optimizer(contender, model)
    for _ in range(MEASURED_STEPS):
        peers.train_step(model, optimizer, batch)
    with torch.inference_mode(contender != COURSE):  # the course evaluates without it
        model.eval()(*batch.inputs)


def use_transformers(task: str, dtype: str, folder: str) -> None:
    """What `run_llama.py --option TASK` does, with a Hugging Face directory."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.flags import PREFIX
    from tokenizer import TOKENIZER_MODEL, Tokenizer

    tokenizer = Tokenizer(tokenizer_model=f"{folder}/{TOKENIZER_MODEL}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        if task == "perplexity":
            text = Path(folder, "text.txt").read_text(encoding="utf-8")
            ids = torch.tensor([tokenizer.encode(text, bos=True, eos=False)[: model.config.max_position_embeddings]])
            model(input_ids=ids, labels=ids, use_cache=False).loss.item()
        elif task == "prompt":
            for split in SPLITS:
                ask_transformers(model, tokenizer, f"{folder}/{split}.txt")
        else:
            ids = torch.tensor([tokenizer.encode(PREFIX, bos=True, eos=False)])
            new = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
            for way in ({"do_sample": False}, {"do_sample": True, "temperature": 1.0}):
                model.generate(ids, attention_mask=torch.ones_like(ids), **new, **way)


def ask_transformers(model: PreTrainedModel, tokenizer: Tokenizer, file: str) -> list[int]:
    """The likeliest label of each sentence: padding comes first, so that the last position alone is asked for."""
    import torch

    from engine.data import create_data, read_label_names
    from utils import prompt_suffix

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
    {"fine-tune": fine_tune, "transformers": use_transformers}[sys.argv[1]](*sys.argv[2:])
    print(own_peak())
