"""The course: its editions, what each hands out and asks for, and the libraries that its set-up installs."""

from __future__ import annotations

import sys
from dataclasses import dataclass

LABEL_NAMES = {"sst": ("awful", "bad", "average", "good", "excellent"), "cfimdb": ("bad", "good")}  # as published
ATTENTION_KINDS = ("bidirectional", "causal")
TEXT_PROMPT = (  # what both generated texts continue
    "I have wanted to see this thriller for a while, and it didn't disappoint. "
    "Keanu Reeves, playing the hero John Wick, is"
)
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}  # in llama.py, in base_llama.py
SAMPLINGS = {  # by what `generate` keeps of the probabilities above temperature 0: nothing less, or more, than that
    "plain": "every token can be drawn", "epsilon": "tokens of a probability of at least 0.05",
    "top-p": "the fewest likely tokens whose probabilities sum to at least 0.95",
}  # fmt: skip
EPSILON, TOP_P = 0.05, 0.95
ADAPTERS = "tests/adapters.py"  # of a submission whose code has another structure: see grading.answers
OUTPUT_KINDS = ("prompting", "finetuning", "lora", "advanced")


def output_names(*kinds: str) -> tuple[str, ...]:
    """The output files of some kinds, one for each data set and split."""
    pairs = [(data, split) for data in LABEL_NAMES for split in ("dev", "test")]
    return tuple(f"{data}-{split}-{kind}-output.txt" for kind in kinds for data, split in pairs)


@dataclass(frozen=True)
class Edition:
    """What one edition of the course hands out and asks for. A field that is not known is empty.

    norm: a key of `NORMS`; with this norm the reference tensors were computed from the same `stories42M.pt`.
    required: without these files a submission is wrong. listed: the course's own list names them, but its checker does
    not demand them. size_limit: of the zip, in millions of bytes; where the course names none, what a check reads.
    sampling: a key of `SAMPLINGS`. clips: AdamW has an argument `max_grad_norm`. folders: of trained models, which a
    submission must hold. libraries: that its set-up installs beside `INSTALLED`. packs_listed: False: the course's own
    packer leaves out the listed files, so a submission may lack modules that its code imports. lora: the variant of
    this package's method `lora` that draws the first matrices as the course does.
    """

    norm: str
    attention: str
    id_name: str = "ID"
    required: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    size_limit: float = 100.0
    sampling: str = "plain"
    clips: bool = False
    folders: tuple[str, ...] = ()
    libraries: frozenset[str] = frozenset()
    packs_listed: bool = True
    lora: str = "plain"


CODE = ("run_llama.py", "llama.py", "optimizer.py", "classifier.py", "rope.py")
TEXTS = ("generated-sentence-temp-0.txt", "generated-sentence-temp-1.txt")
ADVANCED = output_names("advanced")  # each is optional; dev and test of one data set belong together
ADDITION_CODE = ("addition_data_generation.py", "addition_lib.py", "addition_run.py")
REQUIRED = (*CODE, *TEXTS, *output_names("prompting", "finetuning"))
LISTED = ("base_llama.py", "config.py", "sanity_check.py", "tokenizer.py", "utils.py", "README.md", "structure.md",
          "sanity_check.data", "setup.sh")  # fmt: skip
MATPLOTLIB = frozenset({"matplotlib", "contourpy", "cycler", "dateutil", "fontTools", "kiwisolver", "packaging",
                        "pyparsing", "six"})  # fmt: skip

# Sources. cmu2024: neubig/minllama-assignment. ucsc: the fork of it that UC Santa Cruz hands out in NLP 244, as seen in
# the public copy iamsorenl/minllama-assignment: the same checker and tree, only the ID is a CruzID. cmu2025:
# cmu-l3/anlp-fall2025-hw1, where LoRA outputs and feedback.txt are new. The course's lists mark each of the four
# advanced outputs as [OPTIONAL], so those of one data set may be absent in every edition; dev without test, or test
# without dev, is a note here. cmu2026: ialdarmaki/anlp-spring2026-hw1, which has pre-training on additions in place
# of fine-tuning (grading.addition).
# The limit of 10 MB is that of fall 2025; the earlier ones name none.
EDITIONS = {
    "ucsc": Edition("rms", "bidirectional", "CruzID", REQUIRED, LISTED),
    "cmu2024": Edition("rms", "bidirectional", "AndrewID", REQUIRED, LISTED),
    "cmu2025": Edition("layer", "bidirectional", "AndrewID", REQUIRED + output_names("lora"),
                       (*LISTED, "lora.py", "checklist.md"), ("feedback.txt",), 10.0, "epsilon", True,
                       lora="normal"),
    "cmu2026": Edition("layer", "causal", "AndrewID", (*CODE, *TEXTS, *output_names("prompting"), *ADDITION_CODE),
                       (*LISTED, "checklist.md"), ("feedback.txt",), 15.0, "top-p", True, ("addition_models",),
                       MATPLOTLIB, packs_listed=False),
}  # fmt: skip
# README's reference accuracies (dev, test) of stories42M.pt with RMSNorm, by data set and kind of output; and how far
# from them an accuracy may be for the grade A.
REFERENCE_ACCURACIES = {
    ("sst", "prompting"): (0.213, 0.224), ("sst", "finetuning"): (0.414, 0.418),
    ("cfimdb", "prompting"): (0.498, None), ("cfimdb", "finetuning"): (0.800, None),
}  # fmt: skip
LATER_ACCURACIES = {  # of the same checkpoint with LayerNorm, by edition
    "cmu2025": {
        ("sst", "prompting"): (0.237, 0.250), ("sst", "finetuning"): (0.411, 0.399), ("sst", "lora"): (0.275, 0.269),
        ("cfimdb", "prompting"): (0.490, None), ("cfimdb", "finetuning"): (0.833, None),
        ("cfimdb", "lora"): (0.510, None),
    },
    "cmu2026": {("sst", "prompting"): (0.197, 0.176), ("cfimdb", "prompting"): (0.514, None)},
}  # fmt: skip
ACCURACY_BANDS = {"sst": 0.05, "cfimdb": 0.15}


def reference_accuracies(edition: str) -> dict[tuple[str, str], tuple[float, float | None]]:
    """The course's mean accuracies (dev, test; None: no gold labels) by data set and kind of output."""
    return LATER_ACCURACIES.get(edition, REFERENCE_ACCURACIES)


def reference_accuracy(edition: str, dataset: str, split: str, kind: str) -> float | None:
    """One of them; None where the course names none."""
    dev, test = reference_accuracies(edition).get((dataset, kind), (None, None))
    return dev if split == "dev" else test


BUNDLED_NORM = "rms"  # of the bundled model and the parts' numbers, and of what public repositories share
# The norm and attention of the published files sanity_check.data, by the beginning of their SHA-256.
PUBLISHED_TENSORS = {
    "34f7c763a3bb0259": ("rms", "bidirectional"), "94f5f19530f4bdff": ("layer", "bidirectional"),
    "2dcdc958f99d4983": ("layer", "causal"),
}  # fmt: skip
DEFAULT_EDITION = "ucsc"

# The libraries that a submission may import: the packages that the hand-outs' set-up installs, by the names that Python
# imports, and the packages that these bring with them.
INSTALLED = {
    "torch", "torchvision", "torchaudio", "numpy", "sklearn", "tqdm", "sentencepiece", "tokenizers", "requests",
    "filelock", "importlib_metadata",
    "PIL", "certifi", "charset_normalizer", "fsspec", "idna", "jinja2", "joblib", "markupsafe", "mpmath", "networkx",
    "scipy", "sympy", "threadpoolctl", "triton", "typing_extensions", "urllib3", "zipp",
}  # fmt: skip
# Modules that the standard library has in some of the Pythons from 3.10 on, and not in the one that runs this.
OTHER_PYTHONS = {
    "__main__", "aifc", "annotationlib", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "compression",
    "crypt", "distutils", "imghdr", "imp", "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes",
    "smtpd", "sndhdr", "spwd", "sunau", "telnetlib", "tomllib", "uu", "xdrlib",
}  # fmt: skip
ALLOWED = INSTALLED | OTHER_PYTHONS | set(sys.stdlib_module_names)
