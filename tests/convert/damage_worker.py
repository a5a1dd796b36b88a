"""Convert damaged models, and say how that ended: run as `damage_worker.py FOLDER FIRST LAST`, prints JSON.

FOLDER holds what `prepare` made. Case n is the same on every machine. Address space is limited, so that whoever
believes a lying header runs out of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import resource
import shutil
import struct
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Place = tuple[int, int]  # of a number in a file: its offset and its length in bytes
ROOM = 3 * 2**30  # bytes beside what is taken once everything is imported
HUGE = ("-1", "0", "2147483647", "1e999", "9" * 30, "9" * 5000, "99999999999", "null", '"x"', "[]", "[[[[]]]]", "true")
DAMAGED_KINDS = {  # which files are damaged, and the flags that read them
    "safetensors": (("model.safetensors", "config.json"), ()),
    "shards": (("model.safetensors.index.json", "model-00001-of-00002.safetensors", "config.json"), ()),
    "pickled": (("pytorch_model.bin", "config.json"), ()),
    "json": (("tokenizer.json", "tokenizer_config.json"), ()),
    "sentencepiece": (("tokenizer.model",), ()),
    "llama2c": (("model.bin",), ("--from", "llama2c")),
    "gguf": (("model.gguf",), ()),
    "gguf of bytes": (("model.gguf",), ()),
    "adapter": (("adapter_model.safetensors", "adapter_config.json"), ()),
}


def damaged(content: bytes, rng: random.Random, places: Sequence[Sequence[Place]] = ()) -> tuple[str, bytes]:
    """What was done to the bytes, and what they are now. places: those of a GGUF file (`places_in`)."""
    way = rng.choice(("flipped", "flipped at the beginning", "cut", "lying", "lying", "doubled", "zeroed"))
    raw = bytearray(content)
    if way == "flipped" or way == "flipped at the beginning":
        end = len(raw) if way == "flipped" else min(len(raw), 600)
        for _ in range(rng.choice((1, 3, 20))):
            raw[rng.randrange(end)] = rng.randrange(256)
    elif way == "cut":
        del raw[rng.randrange(len(raw)) :]
    elif way == "doubled":
        at = rng.randrange(len(raw))
        raw[at:at] = raw[: rng.randrange(1, 2000)]
    elif way == "zeroed":
        at = rng.randrange(len(raw))
        raw[at : at + 300] = bytes(len(raw[at : at + 300]))
    else:
        raw = bytearray(lying_at(rng.choice(places), content, rng) if places else lying(content, rng))
    return way, bytes(raw)


def lying(content: bytes, rng: random.Random) -> bytes:
    """A number of the header, or of the text, is another one."""
    numbers = [found.span() for found in re.finditer(rb"(?<=[\[:, ])[0-9]+(?=[\],}\s])", content[:100_000])]
    if numbers and rng.random() < 0.8:
        start, end = rng.choice(numbers)
        changed = content[:start] + rng.choice(HUGE).encode() + content[end:]
        length = struct.unpack_from("<Q", content)[0]
        if length < len(content):  # of safetensors' header, which otherwise would be a text cut short
            return struct.pack("<Q", length + len(changed) - len(content)) + changed[8:]
        return changed
    at = 4 * rng.randrange(min(len(content) // 4, 10))
    number = rng.choice((0, 1, -1, 2**31 - 1, -(2**31), 10**6, 2**20, rng.randrange(2**31)))
    return content[:at] + struct.pack("<i", number) + content[at + 4 :]


def lying_at(places: Sequence[Place], content: bytes, rng: random.Random) -> bytes:
    """One of these numbers is another one."""
    at, size = rng.choice(places)
    top = 256**size
    old = int.from_bytes(content[at : at + size], "little")
    number = rng.choice((0, 1, old - 1, old + 1, 2 * old, 10**6, top // 2, top - 1, top - old, rng.randrange(top)))
    return content[:at] + (number % top).to_bytes(size, "little") + content[at + size :]


@cache
def places_in(file: Path) -> list[list[Place]]:
    """Where a GGUF file says a count, a length, a type or an offset: of its tensors, of its settings, of all."""
    from gguf import GGUFReader

    reader, groups = GGUFReader(file), []
    for fields in ([tensor.field for tensor in reader.tensors], reader.fields.values()):
        found = []
        for field in fields:
            at = field.offset
            for part in field.parts:
                size = part.dtype.itemsize
                found += [(at + k, size) for k in range(0, part.nbytes, size) if part.dtype.kind == "u" and size > 1]
                at += part.nbytes
        groups.append(found)
    return [*groups, [(4 * k, 4) for k in range(6)]]  # magic, version, both counts


def run_case(folder: Path, number: int) -> dict[str, object]:
    """Damage a file of a copy, and convert it."""
    from convert.__main__ import main
    from engine.programs import run_main

    rng = random.Random(number)
    kind = [*DAMAGED_KINDS][number % len(DAMAGED_KINDS)]
    files, flags = DAMAGED_KINDS[kind]
    case = folder / "case"
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(folder / kind, case / "model")
    file = case / "model" / rng.choice(files)
    places = places_in(folder / kind / file.name) if file.suffix == ".gguf" else ()
    way, content = damaged(file.read_bytes(), rng, places)
    file.write_bytes(content)
    model = file if kind.startswith(("llama2c", "gguf")) else case / "model"
    beside = ("--tokenizer", str(folder / "sentencepiece/tokenizer.model")) if kind == "llama2c" else ()
    sys.argv = ["convert", str(model), str(case / "out"), "--to", "hf", *flags, *beside]
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(told):
        try:
            status: object = run_main(main)
        except BaseException as error:  # a defect
            status = f"{type(error).__name__}: {error}"[:300]
    left = sorted(path.name for path in case.iterdir())
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("warning: ")]
    return {"case": number, "kind": f"{kind}, {file.name} {way}", "status": status, "lines": lines, "left": left}


def prepare(folder: Path, tokenizer: Path) -> None:
    """One model in every way of storing it."""
    import torch
    from conversions import vocabulary_in
    from safetensors.torch import load_file, save_file
    from shapes import bytes_of_text, hf_llama, save

    from convert import gguf
    from convert.directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS, write_model
    from convert.llama2c import content_of
    from engine.weights import load_llama_model

    shape = dict(hidden_size=32, num_attention_heads=4, intermediate_size=48, rms_norm_eps=1e-5)
    model = hf_llama(**shape)
    for kind in ("safetensors", "shards", "pickled", "json", "sentencepiece"):
        save(folder / kind, model)
    for kind in ("safetensors", "shards", "pickled", "sentencepiece"):
        shutil.copy(tokenizer, folder / kind / "tokenizer.model")
    bytes_of_text(folder / "json")
    tensors = load_file(folder / "pickled/model.safetensors")
    torch.save({name: tensor.clone() for name, tensor in tensors.items()}, folder / "pickled/pytorch_model.bin")
    (folder / "pickled/model.safetensors").unlink()
    (folder / "shards/model.safetensors").unlink()
    placed = {}
    for part in (0, 1):
        half = dict(sorted(tensors.items())[part::2])
        name = f"model-0000{part + 1}-of-00002.safetensors"
        save_file(half, folder / "shards" / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(half, name)
    (folder / "shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    name, draw = "base_model.model.model.layers.1.self_attn.v_proj.lora_", torch.Generator().manual_seed(0)
    factors = {"A.weight": (3, 32), "B.weight": (16, 3), "magnitude_vector": (16,)}
    drawn = {f"{name}{kind}": torch.rand(shape, generator=draw) for kind, shape in factors.items()}
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_dora": True, "alpha_pattern": {"v_proj": 8}}
    settings["base_model_name_or_path"] = str(folder / "safetensors")
    write_model(folder / "adapter", settings, drawn, names=(ADAPTER_CONFIG, ADAPTER_WEIGHTS[0]))
    (folder / "llama2c").mkdir()
    ours = load_llama_model(folder / "safetensors")
    (folder / "llama2c/model.bin").write_bytes(b"".join(content_of(ours.state_dict(), ours.config)))
    (folder / "gguf").mkdir()
    gguf.write(folder / "gguf/model.gguf", ours.state_dict(), ours.config, vocabulary_in(tokenizer), "q8_0")
    (folder / "gguf of bytes").mkdir()
    write_of_bytes(folder / "gguf of bytes/model.gguf", folder / "gguf/model.gguf", folder / "json/tokenizer.json")


def write_of_bytes(file: Path, like: Path, tokenizer: Path) -> None:
    """A GGUF file's model with a byte-level vocabulary, as SmolLM2's is."""
    from conversions import finish
    from gguf import GGUFReader, GGUFWriter

    reader, writer = GGUFReader(like), GGUFWriter(file, "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    model = json.loads(tokenizer.read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3 if number < 2 else 1 for number in range(len(model["vocab"]))])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


def most_memory() -> int:
    """In KB. What `getrusage` says would begin with that of the process that started this one."""
    return int(re.search(r"VmHWM:\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])


def main() -> None:
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, str(ROOT))
    import gguf  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch

    from engine import families  # noqa: F401

    torch.set_num_threads(1)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    before = most_memory()
    cases = [run_case(folder, number) for number in range(first, last)]
    print(json.dumps({"cases": cases, "grown": most_memory() - before}))


if __name__ == "__main__":
    main()
