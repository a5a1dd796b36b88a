"""Names of lines and contenders, and the goal of each line as a fraction of the machine's limit. Needs no PyTorch."""

from __future__ import annotations

OURS, PLAIN_PATH, ONE_BY_ONE = "min-llama", "plain path", "one after another"
COURSE, LLAMA2C = "course's way", "llama2.c"
HF, HF_BF16 = "HF transformers", "HF, bf16"  # in float32, which is its default; in bfloat16
LLAMACPP, LLAMACPP_F16, LLAMACPP_Q8 = "llama.cpp f32", "llama.cpp f16", "llama.cpp Q8_0"
LLAMACPP_Q4 = "llama.cpp Q4_0"
LLAMACPP_DTYPES = {  # of the weights in its file
    LLAMACPP: "f32",
    LLAMACPP_F16: "f16",
    LLAMACPP_Q8: "q8_0",
    LLAMACPP_Q4: "q4_0",
}
COMPILED = "HF, torch.compile"  # in the precision of the line
OPENVINO, OPENVINO_BF16 = "OpenVINO fp32", "OpenVINO bf16"
OPENVINO_TYPES = {OPENVINO: "f32", OPENVINO_BF16: "bf16"}  # of its products
CT2, CT2_INT8 = "CTranslate2 fp32", "CTranslate2 int8"
ORT_GENAI = "ORT GenAI fp32"
CT2_TYPES = {CT2: "float32", CT2_INT8: "int8"}  # what it computes in
LIMIT = "machine's limit"
LARGE_TASKS = ("generate", "perplexity", "prompt")
NUM_LABELS = 5  # classes of every classifier

# A measurement, named on the command line, fills one or more lines of the table; each line has several contenders.
LINES: dict[str, dict[str, tuple[str, ...]]] = {
    "decode-fp32": {"decode, fp32": (LIMIT, PLAIN_PATH, LLAMA2C, LLAMACPP, CT2, ORT_GENAI, HF, COURSE)},
    "decode-int8": {
        "decode, int8": (LIMIT, PLAIN_PATH, LLAMA2C, LLAMACPP_Q8, CT2_INT8),
        "decode, bf16": (LIMIT, PLAIN_PATH, LLAMA2C, LLAMACPP_F16),
    },
    "decode-int4": {"decode, int4, 135M": (LIMIT, PLAIN_PATH, LLAMACPP_Q4)},
    "decode-together": {"decode, 16 together, fp32": (LIMIT, PLAIN_PATH, ONE_BY_ONE)},
    "generate-bidirectional": {"bidirectional generate, fp32": (LIMIT, PLAIN_PATH, COURSE)},
    "busy": {"decode, fp32, one core busy": (PLAIN_PATH,)},
    "first-run": {
        f"generate, {when}, {model}": (PLAIN_PATH,)
        for model in ("bundled model", "stories42M's shape")
        for when in ("first run", "later run")
    },
    "forward": {
        f"forward {shape}, {precision}": (LIMIT, PLAIN_PATH, *theirs)
        for precision, theirs in (
            ("fp32", (HF, COMPILED, OPENVINO)),
            ("bf16", (HF, HF_BF16, COMPILED, OPENVINO_BF16)),
        )
        for shape in ("10x45", "64x45")
    },
    "train-fp32": {
        f"training step {shape}, fp32": (LIMIT, PLAIN_PATH, COURSE, HF, COMPILED) for shape in ("80x50", "10x300")
    },
    "train-bf16": {
        f"training step {shape}, bf16": (LIMIT, PLAIN_PATH, HF, HF_BF16, COMPILED) for shape in ("80x50", "10x300")
    },
    "epoch-causal": {"SST epoch, causal, bf16, buckets": (COURSE, HF)},
    "epoch-bidirectional": {"SST epoch, bidirectional, fp32": (COURSE,)},
    "memory": {  # ours / theirs: lower is better
        "peak memory 80x50, bidirectional, fp32": (COURSE,),
        "peak memory 80x50, causal, bf16": (COURSE, HF),
    },
    **{
        name: {
            f"BERT, {what} {shape}, {texts}": (PLAIN_PATH, HF, *more)
            for shape in ("32x40", "8x256", "4x512")
            for texts in ("no padding", "padded")
        }
        for name, what, more in (("bert-classify", "classify", (OPENVINO, OPENVINO_BF16)), ("bert-train", "step", ()))
    },
    "large": {
        f"{what}, {task}, {precision}": (against,)
        for task in LARGE_TASKS
        for precision, against in (("fp32", HF), ("bf16", HF_BF16), ("int8", HF_BF16), ("int4", HF_BF16))
        for what in ("large model", "large model's memory")
    },
    "context": {},  # these two fill a table of their own: how cost grows
    "batches": {},
}
# Fractions of what this machine can do at best in the same run. One text waits for memory, the others for arithmetic.
GOALS: dict[str, float] = {
    "decode, fp32": 0.9,
    "decode, int8": 0.7,
    "decode, bf16": 0.85,
    "decode, int4, 135M": 0.7,
    "decode, 16 together, fp32": 0.6,
    "bidirectional generate, fp32": 0.85,
    **{work: 0.9 if work.endswith("fp32") else 0.7 for work in LINES["forward"]},
    **{work: 0.9 for work in LINES["train-fp32"]},
    "training step 80x50, bf16": 0.7,
    "training step 10x300, bf16": 0.6,  # more of it is attention, whose softmax is no product
}
FASTER = 1.2  # what fewer bits must win over float32 by this machine's limits before a row of them has a goal
NOISE = 0.97  # a median below it is slower, also where some round was not
