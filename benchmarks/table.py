"""The two tables of the benchmarks: who is measured (`CONTENDERS`), and what (`ROWS`). Needs no PyTorch."""

from __future__ import annotations

from typing import NamedTuple

OURS, LIMIT = "min-llama", "machine's limit"
PLAIN_PATH, ONE_BY_ONE, COURSE = "plain path", "one after another", "course's way"
LLAMA2C = "llama2.c"
HF, HF_BF16, COMPILED = "HF transformers", "HF, bf16", "HF, torch.compile"
LLAMACPP, LLAMACPP_F16 = "llama.cpp f32", "llama.cpp f16"
LLAMACPP_Q8, LLAMACPP_Q4 = "llama.cpp Q8_0", "llama.cpp Q4_0"
CT2, CT2_INT8, ORT_GENAI = "CTranslate2 fp32", "CTranslate2 int8", "ORT GenAI fp32"
OPENVINO, OPENVINO_BF16 = "OpenVINO fp32", "OpenVINO bf16"
NUM_LABELS = 5  # classes of every classifier


class ContenderInfo(NamedTuple):
    """What a contender needs, and how it is started.

    packages: modules that it imports, each with the package that installs it.
    program: another need: "--llama2c", the program that this flag names, or "c++", a compiler.
    kind: the class ("module.Class") that computes with it in a process of its own. Without one it computes in the
    process that measures; llama2.c is a program.
    dtype: the number format of its file, or of its products where it has no file; empty: float32.
    head_multiple: the width of a head must be a multiple of this.
    """

    packages: dict[str, str] = {}
    program: str = ""
    kind: str = ""
    dtype: str = ""
    head_multiple: int = 1


TRANSFORMERS = {"transformers": "transformers"}
LLAMACPP_PACKAGES = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
CT2_PACKAGES = {"ctranslate2": "ctranslate2"}
OPENVINO_PACKAGES = {"openvino": "openvino"}
ORT_PACKAGES = {"onnxruntime_genai": "onnxruntime-genai", "onnx_ir": "onnx-ir", "tokenizers": "tokenizers"}
CONTENDERS = {
    OURS: ContenderInfo(),
    PLAIN_PATH: ContenderInfo(),
    ONE_BY_ONE: ContenderInfo(),
    COURSE: ContenderInfo(),
    LLAMA2C: ContenderInfo(program="--llama2c"),
    HF: ContenderInfo(TRANSFORMERS),
    HF_BF16: ContenderInfo(TRANSFORMERS, dtype="bf16"),
    COMPILED: ContenderInfo(TRANSFORMERS, program="c++", kind="benchmarks.classifiers.Compiled"),
    LLAMACPP: ContenderInfo(LLAMACPP_PACKAGES, kind="benchmarks.decoders.LlamaCpp", dtype="f32"),
    LLAMACPP_F16: ContenderInfo(LLAMACPP_PACKAGES, kind="benchmarks.decoders.LlamaCpp", dtype="f16"),
    LLAMACPP_Q8: ContenderInfo(LLAMACPP_PACKAGES, kind="benchmarks.decoders.LlamaCpp", dtype="q8_0"),
    LLAMACPP_Q4: ContenderInfo(LLAMACPP_PACKAGES, kind="benchmarks.decoders.LlamaCpp", dtype="q4_0"),
    CT2: ContenderInfo(CT2_PACKAGES, kind="benchmarks.decoders.CTranslate2", dtype="float32"),
    CT2_INT8: ContenderInfo(CT2_PACKAGES, kind="benchmarks.decoders.CTranslate2", dtype="int8"),
    ORT_GENAI: ContenderInfo(
        TRANSFORMERS | ORT_PACKAGES, kind="benchmarks.decoders.OrtGenAI", dtype="fp32", head_multiple=16
    ),
    OPENVINO: ContenderInfo(OPENVINO_PACKAGES, kind="benchmarks.classifiers.OpenVino", dtype="f32"),
    OPENVINO_BF16: ContenderInfo(OPENVINO_PACKAGES, kind="benchmarks.classifiers.OpenVino", dtype="bf16"),
}


class Work(NamedTuple):
    """What a line of the table times, and the contenders that it is compared with.

    shape: rows x length of a batch. attention: of ours and of all others. texts: "padded" where they differ in length.
    goal: the fraction of the machine's limit aimed at. Decoding one text waits for memory, all else for arithmetic.
    """

    title: str
    against: tuple[str, ...]
    precision: str = "fp32"
    shape: str = ""
    attention: str = "causal"
    goal: float | None = None
    texts: str = "no padding"


class BenchmarkRow(NamedTuple):
    """A measurement that `--rows` names. measure: the function "module.function" that fills the lines of `works`."""

    measure: str
    works: tuple[Work, ...] = ()


DECODE_FP32 = Work("decode, fp32", (LIMIT, PLAIN_PATH, LLAMA2C, LLAMACPP, CT2, ORT_GENAI, HF, COURSE), goal=0.9)
DECODE_INT8 = Work("decode, int8", (LIMIT, PLAIN_PATH, LLAMA2C, LLAMACPP_Q8, CT2_INT8), "int8", goal=0.7)
DECODE_BF16 = Work("decode, bf16", (LIMIT, PLAIN_PATH, LLAMA2C, LLAMACPP_F16), "bf16", goal=0.85)
DECODE_INT4 = Work("decode, int4, 135M", (LIMIT, PLAIN_PATH, LLAMACPP_Q4), "int4", goal=0.7)
DECODE_TOGETHER = Work("decode, 16 together, fp32", (LIMIT, PLAIN_PATH, ONE_BY_ONE), goal=0.6)
RECOMPUTE = Work("bidirectional generate, fp32", (LIMIT, PLAIN_PATH, COURSE), attention="bidirectional", goal=0.85)
FIRST_RUNS = tuple(
    Work(f"generate, {when}, {model}", (PLAIN_PATH,))
    for model in ("bundled model", "stories42M's shape")
    for when in ("first run", "later run")
)
FORWARD = tuple(
    Work(f"forward {shape}, {precision}", (LIMIT, PLAIN_PATH, HF, *more), precision, shape, goal=goal)
    for precision, more, goal in (
        ("fp32", (COMPILED, OPENVINO), 0.9),
        ("bf16", (HF_BF16, COMPILED, OPENVINO_BF16), 0.7),
    )
    for shape in ("10x45", "64x45")
)
# Like with like: against the course's way bidirectional, against Hugging Face causal.
TRAIN_FP32 = tuple(
    Work(f"training step {shape}, fp32", against, "fp32", shape, attention, goal=0.9)
    for shape in ("80x50", "10x300")
    for attention, against in (("bidirectional", (LIMIT, PLAIN_PATH, COURSE)), ("causal", (HF, COMPILED)))
)
TRAIN_BF16 = tuple(
    Work(f"training step {shape}, bf16", (LIMIT, PLAIN_PATH, HF, HF_BF16, COMPILED), "bf16", shape, goal=goal)
    for shape, goal in (("80x50", 0.7), ("10x300", 0.6))  # more of the second is attention's softmax
)
EPOCH_CAUSAL = Work("SST epoch, causal, bf16, buckets", (COURSE, HF_BF16), "bf16")
EPOCH_BIDIRECTIONAL = Work("SST epoch, bidirectional, fp32", (COURSE,), attention="bidirectional")
MEMORY = (
    Work("peak memory 80x50, bidirectional, fp32", (COURSE,), "fp32", "80x50", "bidirectional"),
    Work("peak memory 80x50, causal, bf16", (COURSE, HF_BF16), "bf16", "80x50"),
)
BERT_CLASSIFY = tuple(
    Work(f"BERT, classify {shape}, {texts}", (PLAIN_PATH, HF, OPENVINO, OPENVINO_BF16), shape=shape, texts=texts)
    for shape in ("32x40", "8x256", "4x512")
    for texts in ("no padding", "padded")
)
BERT_TRAIN = tuple(
    work._replace(title=work.title.replace("classify", "step"), against=(PLAIN_PATH, HF)) for work in BERT_CLASSIFY
)
LARGE = tuple(
    Work(f"large model, {task}, {precision}", (against,), precision)
    for task in ("generate", "perplexity", "prompt")
    for precision, against in (("fp32", HF), ("bf16", HF_BF16), ("int8", HF_BF16), ("int4", HF_BF16))
)
ROWS: dict[str, BenchmarkRow] = {
    "decode-fp32": BenchmarkRow("decoding.decode", (DECODE_FP32,)),
    "decode-int8": BenchmarkRow("decoding.decode", (DECODE_INT8, DECODE_BF16)),
    "decode-int4": BenchmarkRow("decoding.decode_int4", (DECODE_INT4,)),
    "decode-together": BenchmarkRow("decoding.decode", (DECODE_TOGETHER,)),
    "generate-bidirectional": BenchmarkRow("decoding.decode", (RECOMPUTE,)),
    "busy": BenchmarkRow("decoding.busy", (Work("decode, fp32, one core busy", (PLAIN_PATH,)),)),
    "first-run": BenchmarkRow("processes.first_run", FIRST_RUNS),
    "forward": BenchmarkRow("learning.forward", FORWARD),
    "train-fp32": BenchmarkRow("learning.train", TRAIN_FP32),
    "train-bf16": BenchmarkRow("learning.train", TRAIN_BF16),
    "epoch-causal": BenchmarkRow("epoch.epochs", (EPOCH_CAUSAL,)),
    "epoch-bidirectional": BenchmarkRow("epoch.epochs", (EPOCH_BIDIRECTIONAL,)),
    "memory": BenchmarkRow("processes.peak_memory", MEMORY),
    "bert-classify": BenchmarkRow("learning.bert_forward", BERT_CLASSIFY),
    "bert-train": BenchmarkRow("learning.bert_train", BERT_TRAIN),
    "large": BenchmarkRow("processes.large", LARGE),
    "context": BenchmarkRow("growth.context"),  # these two fill a table of their own: how cost grows
    "batches": BenchmarkRow("growth.batches"),
}
