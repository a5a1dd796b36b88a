"""What `engine` offers to those who use it from Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, random_llama

import engine
from engine.families import OtherVocabulary
from tokenizer import Tokenizer
from utils import UserError

BUNDLED = ROOT / "checkpoints/minllama1M.pt"


def test_importing_the_package_imports_nothing():
    code = "import sys; import engine; print(engine.__all__, {'torch', 'numpy', 'utils'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['generate', 'load_classifier', 'load_llama', 'predict'] set()\n"
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        engine.train  # noqa: B018


@pytest.mark.parametrize("name", engine.__all__)
def test_every_name_is_there(name: str):
    assert callable(getattr(engine, name)) and getattr(engine, name).__doc__


def test_a_checkpoint_finds_its_tokenizer(tiny_checkpoint: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch):
    llama, tokenizer = engine.load_llama(tiny_checkpoint)
    assert llama.config.attention == "bidirectional" and Path(tokenizer.model_path).name == "tiny.model"
    assert engine.load_llama(tiny_checkpoint, attention="causal")[0].config.is_causal

    monkeypatch.chdir(tmp_path)  # no .model file beside it: tokenizer.model in the current folder
    shutil.copy(tiny_checkpoint, "alone.pt")
    shutil.copy(tiny_tokenizer, "tokenizer.model")
    assert engine.load_llama("alone.pt")[1].model_path == "tokenizer.model"
    with pytest.raises(OtherVocabulary, match="alone.pt has a vocabulary of 300"):
        engine.load_llama("alone.pt", BUNDLED.with_suffix(".model"))
    with pytest.raises(UserError, match="nowhere.pt does not exist"):
        engine.load_llama("nowhere.pt")


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_a_text_is_the_prompt_and_the_likeliest_tokens(tiny_checkpoint: Path, attention: str):
    llama, tokenizer = engine.load_llama(tiny_checkpoint, attention=attention)
    ids = tokenizer.encode("A film", bos=True, eos=False)
    for _ in range(12):
        ids.append(int(llama(torch.tensor([ids]))[0][0, -1].argmax()))
    assert engine.generate(llama, tokenizer, "A film", max_new_tokens=12) == tokenizer.decode(ids)


def test_texts_at_a_temperature_follow_the_seed(tiny_tokenizer: Path):
    llama, tokenizer = random_llama(), Tokenizer(tokenizer_model=tiny_tokenizer)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(engine.generate(llama, tokenizer, "A film", 20, temperature=1.0))
    assert texts[0] == texts[1] != texts[2] and texts[0] != engine.generate(llama, tokenizer, "A film", 20)
