"""ONNX Runtime GenAI (github.com/microsoft/onnxruntime-genai) as a contender, imported when needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.apart import LibraryModel
from benchmarks.faults import ending_of
from convert import hugging_face

BUILDER = "onnxruntime_genai.models.builder"


class OrtGenAI:
    """Its `Generator` on the same weights, in an ONNX file that its own builder writes. `model.dtype`: fp32."""

    def __init__(self, model: LibraryModel):
        import onnxruntime_genai

        source, built = model.folder / "genai-source", model.folder / "genai"
        if not built.exists():
            hugging_face.write(source, model.state, model.config)
            save_tokenizer(source, model.config.vocab_size)
            flags = ["-i", source, "-o", built, "-p", model.dtype, "-e", "cpu", "-c", model.folder / "genai-cache"]
            done = subprocess.run([sys.executable, "-m", BUILDER, *map(str, flags)], capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"its builder {ending_of(done)}")
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
