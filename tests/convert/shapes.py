"""Random models of the shapes that one meets, made by transformers, and vocabularies for them, made by tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from conftest import SENTENCES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
HF_SHAPES = {  # as small as their heads, groups, ties and angles allow
    "smollm": dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, bos=0),
    "tinyllama": dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False),
    "llama3": dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    | dict(rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5),
    "linear": dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4)
    | dict(rope_parameters={"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0}),
}


def hf_llama(shape: str = "tinyllama", seed: int = 0, **changes) -> transformers.LlamaForCausalLM:
    """Two random layers. Matrices are wide enough to matter, norms stand away from 1."""
    settings = {"vocab_size": 300, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 128}
    settings |= {**HF_SHAPES[shape], **changes}
    ids = {f"{name}_token_id": settings.pop(name, number) for name, number in (("bos", 1), ("eos", 2))}
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, **ids))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2 if parameter.dim() > 1 else 0.1)
            if "norm" in name:
                parameter.add_(1.0)
    return model.eval()


def save(folder: Path, model: transformers.PreTrainedModel, **how) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def rewrite(file: Path, **settings) -> None:
    """Change what a JSON file says; None takes a setting out."""
    known = {**json.loads(file.read_text()), **settings}
    file.write_text(json.dumps({name: value for name, value in known.items() if value is not None}))


def bytes_of_text(folder: Path, begins: bool = False, size: int = 300) -> Path:
    """A byte-level BPE as GPT-2's, SmolLM's and Llama 3's: every id, 3 as well, may be a piece of a text.

    begins: whether its template puts bos in front, as Llama 3's does.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|begin|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    how = dict(special_tokens=special, initial_alphabet=letters, show_progress=False)
    trainer = trainers.BpeTrainer(vocab_size=size, **how)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    if begins:
        bos = ("<|begin|>", 1)
        tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[bos])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def greedy(model: transformers.LlamaForCausalLM, ids: list[int], new: int) -> list[int]:
    """What transformers adds, whatever it is: eos as well."""
    model.generation_config.eos_token_id = None
    return model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)[0].tolist()
