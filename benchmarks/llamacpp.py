"""llama.cpp (github.com/ggml-org/llama.cpp) as a contender, through llama-cpp-python, which is imported when needed."""

from __future__ import annotations

import ctypes
from itertools import islice

from benchmarks.apart import LibraryModel
from benchmarks.llama2c import FIRST_BYTE_ID, SPACE_ID, make_pieces
from convert import gguf
from convert.vocabulary import BYTE, CONTROL, NORMAL, SPACE_PIECE, UNKNOWN, Vocabulary


def made_up_vocabulary(size: int) -> Vocabulary:
    """Pieces for a model of random weights, which speaks no language: those that llama2.c is given."""
    pieces = [piece.decode().replace(" ", SPACE_PIECE) for piece in make_pieces(size)]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * (SPACE_ID - FIRST_BYTE_ID)]
    types += [NORMAL] * (size - len(types))
    return Vocabulary(pieces, [0.0] * size, types, unk_id=0, bos_id=1, eos_id=2, adds_space=True)


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
