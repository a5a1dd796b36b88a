"""The table of the course's editions: what each hands out, asks for and publishes. Imports nothing of the project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LABEL_NAMES = {"sst": ("awful", "bad", "average", "good", "excellent"), "cfimdb": ("bad", "good")}  # as published
ATTENTION_KINDS = ("bidirectional", "causal")
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}  # llama.py has the first
OUTPUT_KINDS = ("prompting", "finetuning", "lora", "advanced")


def output_names(*kinds: str) -> tuple[str, ...]:
    """The output files of some kinds, one for each data set and split."""
    pairs = [(data, split) for data in LABEL_NAMES for split in ("dev", "test")]
    return tuple(f"{data}-{split}-{kind}-output.txt" for kind in kinds for data, split in pairs)


class Accuracy(NamedTuple):
    """A published accuracy: its mean over seeds, and their standard deviation where that is known."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Edition:
    """What one edition of the course hands out, asks for and publishes; what is not known of it is left empty.

    norm: a key of `NORMS`, with which the reference tensors and numbers were computed from the same `stories42M.pt`.
    required: without these files a submission is wrong. listed: in the course's own list, but its checker does not
    demand them. size_limit: of the zip, in millions of bytes. references: by output file, without "-output.txt".
    """

    norm: str
    attention: str
    id_name: str = "ID"
    required: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    size_limit: float = 10.0
    label_names: Mapping[str, Sequence[str]] = field(default_factory=lambda: LABEL_NAMES)
    references: Mapping[str, Accuracy] = field(default_factory=dict)


CODE = ("run_llama.py", "llama.py", "optimizer.py", "classifier.py", "rope.py")
TEXTS = ("generated-sentence-temp-0.txt", "generated-sentence-temp-1.txt")
ADVANCED = output_names("advanced")  # all of these or none
REQUIRED = (*CODE, *TEXTS, *output_names("prompting", "finetuning"))
LISTED = ("base_llama.py", "config.py", "sanity_check.py", "tokenizer.py", "utils.py", "README.md", "structure.md",
          "sanity_check.data", "setup.sh")  # fmt: skip
REFERENCES_2024 = {
    "sst-dev-prompting": Accuracy(0.213, 0.0), "sst-test-prompting": Accuracy(0.224, 0.0),
    "cfimdb-dev-prompting": Accuracy(0.498, 0.0),
    "sst-dev-finetuning": Accuracy(0.414, 0.014), "sst-test-finetuning": Accuracy(0.418, 0.017),
    "cfimdb-dev-finetuning": Accuracy(0.800, 0.115),
}  # fmt: skip
REFERENCES_2025 = {
    "sst-dev-prompting": Accuracy(0.237), "sst-test-prompting": Accuracy(0.250),
    "cfimdb-dev-prompting": Accuracy(0.490),
    "sst-dev-lora": Accuracy(0.275), "sst-test-lora": Accuracy(0.269), "cfimdb-dev-lora": Accuracy(0.510),
}  # fmt: skip
REFERENCES_2026 = {
    "sst-dev-prompting": Accuracy(0.197), "sst-test-prompting": Accuracy(0.176),
    "cfimdb-dev-prompting": Accuracy(0.514),
}  # fmt: skip

# Sources. cmu2024: neubig/minllama-assignment. ucsc: the fork of it that UC Santa Cruz hands out in NLP 244, as seen in
# the public copy iamsorenl/minllama-assignment: the same checker and tree, only the ID is a CruzID. cmu2025:
# cmu-l3/anlp-fall2025-hw1, where LoRA outputs and feedback.txt are new. Its checker counts feedback.txt among the
# advanced outputs and so accepts one of the four alone; here the rule is "all four or none" in every edition. cmu2026:
# ialdarmaki/anlp-spring2026-hw1, which has pre-training in place of fine-tuning; its list of files is not known.
# The limit of 10 MB is that of fall 2025; the earlier ones name none.
EDITIONS = {
    "ucsc": Edition("rms", "bidirectional", "CruzID", REQUIRED, LISTED, references=REFERENCES_2024),
    "cmu2024": Edition("rms", "bidirectional", "AndrewID", REQUIRED, LISTED, references=REFERENCES_2024),
    "cmu2025": Edition(
        "layer",
        "bidirectional",
        "AndrewID",
        REQUIRED + output_names("lora"),
        (*LISTED, "lora.py", "checklist.md"),
        ("feedback.txt",),
        references=REFERENCES_2025,
    ),
    "cmu2026": Edition("layer", "causal", size_limit=15.0, references=REFERENCES_2026),
}
BUNDLED_NORM = "rms"  # of the bundled model and the parts' numbers, and of what public repositories share
DEFAULT_EDITION = "ucsc"
