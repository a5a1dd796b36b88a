"""CTranslate2 (github.com/OpenNMT/CTranslate2) as a contender; the package ctranslate2 is imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.apart import LibraryModel
from benchmarks.llama2c import EOS_ID


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
