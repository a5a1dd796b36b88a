"""Other programs that continue a text: llama2.c, llama.cpp, CTranslate2 and ONNX Runtime GenAI.

Nothing of them is here. llama2.c's compiled `run` is named by `--llama2c`; the others are Python packages, which are
imported when they are needed, in a process of their own. Each class writes our weights in its program's file format.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.apart import LibraryModel, run_python
from config import LlamaConfig
from convert import gguf, hugging_face
from convert.llama2c import content_of, content_of_tokenizer
from convert.vocabulary import BYTE, CONTROL, NORMAL, SPACE_PIECE, UNKNOWN, Vocabulary
from utils import UserError, atomic_write

SPECIAL_PIECES = (b"<unk>", b"<s>", b"</s>")
FIRST_BYTE_ID = len(SPECIAL_PIECES)
SPACE_ID = FIRST_BYTE_ID + 256  # llama2.c puts a space before every prompt
LETTERS = (range(0x4E00, 0xA000), range(0xAC00, 0xD7A4), range(0x20000, 0x2A6E0))  # Chinese and Korean characters
BOS_ID, EOS_ID = 1, 2
SPEED = re.compile(r"achieved tok/s: *(\S+)")
BUILDER = "onnxruntime_genai.models.builder"


# --------------------------------------------------------------------------------------------------------- a vocabulary


def make_pieces(vocab_size: int) -> list[bytes]:
    """A vocabulary in which a text is one sequence of ids: special ids, bytes, a space, then one letter per id.

    A model of random weights speaks no language, so that any vocabulary fits; with this one no two pieces merge, and
    equal texts mean equal ids (but for unprintable bytes, which llama2.c does not print).
    """
    letters = (chr(code).encode() for code in chain(*LETTERS))
    pieces = [*SPECIAL_PIECES, *(f"<0x{byte:02X}>".encode() for byte in range(256)), b" "]
    pieces += islice(letters, vocab_size - len(pieces))
    if len(pieces) != vocab_size:
        raise ValueError(f"no vocabulary of {vocab_size} pieces")
    return pieces


def made_up_vocabulary(size: int) -> Vocabulary:
    """Pieces for a model of random weights, which speaks no language: those that llama2.c is given."""
    pieces = [piece.decode().replace(" ", SPACE_PIECE) for piece in make_pieces(size)]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * (SPACE_ID - FIRST_BYTE_ID)]
    types += [NORMAL] * (size - len(types))
    return Vocabulary(pieces, [0.0] * size, types, unk_id=0, bos_id=1, eos_id=2, adds_space=True)


# ------------------------------------------------------------------------------- llama2.c, github.com/karpathy/llama2.c


def find_program(path: str | os.PathLike) -> Path:
    """The `run` program: `path` itself, or in the folder `path`. Raises `UserError` where it is not."""
    program = Path(path) / "run" if Path(path).is_dir() else Path(path)
    if not program.is_file() or not os.access(program, os.X_OK):
        raise UserError(f"--llama2c {path}: {program} is not a program; compile llama2.c's run.c and name the result")
    return program.resolve()


def printed_text(ids: Sequence[int], pieces: Sequence[bytes]) -> bytes:
    """What llama2.c prints for `ids`, whose first is bos and is not printed."""
    text = b""
    for before, now in zip(ids, ids[1:], strict=False):
        piece = pieces[now]
        if before == BOS_ID:
            piece = piece.removeprefix(b" ")
        if FIRST_BYTE_ID <= now < SPACE_ID:
            byte = now - FIRST_BYTE_ID
            piece = bytes([byte]) if 0x20 <= byte < 0x7F or byte in b"\t\n\v\f\r" else b""
        text += piece
    return text


class Llama2C:
    """The program with a model exported for it into `folder`."""

    def __init__(self, program: Path, folder: Path, state: dict[str, torch.Tensor], config: LlamaConfig, threads: int):
        self.program, self.threads = program, threads
        self.model_path, self.tokenizer_path = folder / "model.bin", folder / "tokenizer.bin"
        self.pieces = make_pieces(config.vocab_size)
        self.text = b""
        with atomic_write(self.model_path, "wb") as file:
            file.writelines(content_of(state, config))
        with atomic_write(self.tokenizer_path, "wb") as file:
            file.writelines(content_of_tokenizer(self.pieces, [0.0] * len(self.pieces)))

    def generate(self, prompt: Sequence[int], new: int) -> float:
        """Continue `prompt` by `new` tokens at temperature 0; returns the seconds that it says a token took.

        prompt: ids, bos and the space first. Its clock runs from after the first position to the end, counts the other
        positions of the prompt as tokens, and has milliseconds: a run that took less counts as one. Keeps `text`.
        Raises `UserError` if the program fails.
        """
        positions = len(prompt) + new - 1
        prompt_text = b"".join(self.pieces[token] for token in prompt[2:])
        command = [self.program, self.model_path, "-z", self.tokenizer_path, "-t", "0", "-n", str(positions)]
        env = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        done = subprocess.run([*command, "-i", prompt_text], capture_output=True, env=env)
        speed = SPEED.search(done.stderr.decode(errors="replace"))
        if done.returncode != 0 or speed is None:
            raise UserError(f"--llama2c: {self.program} failed: {done.stderr.decode(errors='replace')[-200:]}")
        self.text = done.stdout.removesuffix(b"\n")
        return max(1.0 / float(speed[1]), 0.001 / positions)

    def compare(self, ids: Sequence[int]) -> str:
        """Whether the text of the last run is that of `ids`, in words. The program stops before a bos token."""
        stopped = list(ids).index(BOS_ID, 1) if BOS_ID in ids[1:] else len(ids)
        expected = printed_text(ids[:stopped], self.pieces)
        if self.text == expected:
            return "identical text" if stopped == len(ids) else f"identical text up to bos, position {stopped}"
        same = len(os.path.commonprefix([self.text.decode(errors="replace"), expected.decode(errors="replace")]))
        return f"DIFFERENT text after {same} characters"


# ----------------------------------------------------------------------------- llama.cpp, github.com/ggml-org/llama.cpp


class LlamaCpp:
    """llama.cpp with the model in a file of `model.dtype`. Keys and values are float32, as ours."""

    def __init__(self, model: LibraryModel):
        import llama_cpp

        path = model.folder / f"{model.dtype}.gguf"
        written = model.folder / "f32.gguf" if model.dtype == "q4_0" else path
        vocabulary = made_up_vocabulary(model.config.vocab_size)
        gguf.write(written, model.state, model.config, vocabulary, written.stem)
        if written != path:  # our writer has no 4 bits
            settings = llama_cpp.llama_model_quantize_default_params()
            settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
            llama_cpp.llama_model_quantize(bytes(written), bytes(path), ctypes.byref(settings))
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=model.config.max_seq_len,
            n_threads=model.threads,
            n_threads_batch=model.threads,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            verbose=False,
        )

    def generate(self, prompt: list[int], new: int) -> list[int]:
        """The most likely `new` ids; no token ends them."""
        self.model.reset()  # else llama.cpp would take the prompt of the round before as already computed
        return list(islice(self.model.generate(prompt, temp=0.0), new))


# -------------------------------------------------------------------------- CTranslate2, github.com/OpenNMT/CTranslate2


class CTranslate2:
    """CTranslate2's Generator on the same weights. `model.dtype`: float32, or int8, to which it rounds when loading."""

    def __init__(self, model: LibraryModel):
        import ctranslate2

        path = model.folder / "ctranslate2"
        self.pieces = [f"<{token}>" for token in range(model.config.vocab_size)]
        if not path.exists():
            save_model(path, model, self.pieces)
        self.generator = ctranslate2.Generator(
            str(path), device="cpu", compute_type=model.dtype, inter_threads=1, intra_threads=model.threads
        )

    def generate(self, prompt: list[int], new: int) -> list[int]:
        """The most likely `new` ids, without eos, which would end them."""
        (answer,) = self.generator.generate_batch(
            [[self.pieces[token] for token in prompt]],
            max_length=new,
            min_length=new,
            include_prompt_in_result=False,
        )
        return answer.sequences_ids[0]


def save_model(path: Path, model: LibraryModel, pieces: list[str]) -> None:
    """Write a model folder in float32. CTranslate2 rotates interleaved pairs as ours does: no matrix is permuted."""
    from ctranslate2.specs import TransformerDecoderModelSpec
    from ctranslate2.specs.common_spec import Activation

    config = model.config
    spec = TransformerDecoderModelSpec.from_config(
        config.n_layers,
        config.n_heads,
        activation=Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,  # all of a head
        rotary_interleave=True,
        rotary_base=config.rope_theta,
        num_heads_kv=config.n_kv_heads,
    )
    _fill(spec.decoder, model.state)
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    # the default names are not in this vocabulary
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = pieces[: EOS_ID + 1]
    spec.register_vocabulary(pieces)
    spec.validate()
    spec.optimize(quantization=None)
    path.mkdir()
    spec.save(str(path))


def _fill(decoder: Any, state: dict[str, torch.Tensor]) -> None:
    """The weights at their places, as NumPy arrays."""

    def weight(name: str) -> Any:
        return state[f"{name}.weight"].float().numpy()

    decoder.scale_embeddings = False
    decoder.embeddings.weight = weight("tok_embeddings")
    decoder.projection.weight = weight("output")
    decoder.layer_norm.gamma = weight("norm")
    for index, layer in enumerate(decoder.layer):
        attention, feed_forward = f"layers.{index}.attention", f"layers.{index}.feed_forward"
        heads = (state[f"{attention}.compute_{kind}.weight"].float() for kind in ("query", "key", "value"))
        layer.self_attention.layer_norm.gamma = weight(f"layers.{index}.attention_norm")
        layer.self_attention.linear[0].weight = torch.cat(list(heads)).numpy()
        layer.self_attention.linear[1].weight = weight(f"{attention}.compute_output")
        layer.ffn.layer_norm.gamma = weight(f"layers.{index}.ffn_norm")
        layer.ffn.linear_0.weight = weight(f"{feed_forward}.w1")
        layer.ffn.linear_0_noact.weight = weight(f"{feed_forward}.w3")
        layer.ffn.linear_1.weight = weight(f"{feed_forward}.w2")


# ----------------------------------------------------------- ONNX Runtime GenAI, github.com/microsoft/onnxruntime-genai


class OrtGenAI:
    """Its `Generator` on the same weights, in an ONNX file that its own builder writes. `model.dtype`: fp32."""

    def __init__(self, model: LibraryModel):
        import onnxruntime_genai

        source, built = model.folder / "genai-source", model.folder / "genai"
        if not built.exists():
            hugging_face.write(source, model.state, model.config)
            save_tokenizer(source, model.config.vocab_size)
            flags = ["-i", source, "-o", built, "-p", model.dtype, "-e", "cpu", "-c", model.folder / "genai-cache"]
            run_python("its builder", ["-m", BUILDER, *flags], model.threads)
        config = onnxruntime_genai.Config(str(built))
        settings = {"intra_op_num_threads": model.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": settings}}}))
        self.make_settings, self.make_generator = onnxruntime_genai.GeneratorParams, onnxruntime_genai.Generator
        self.model = onnxruntime_genai.Model(config)

    def generate(self, prompt: list[int], new: int) -> list[int]:
        """The most likely `new` ids, without eos, which would end them."""
        length, settings = len(prompt) + new, self.make_settings(self.model)
        settings.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = self.make_generator(self.model, settings)
        generator.append_tokens(np.array([prompt], dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return generator.get_sequence(0).tolist()[len(prompt) :]


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A vocabulary of made-up words, for a model of random weights: the builder asks for one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"<{token}>": token for token in range(vocab_size)}, unk_token="<0>"))
    special = {"unk_token": "<0>", "bos_token": "<1>", "eos_token": "<2>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
