from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece

from tokenizer import Tokenizer
from utils import UserError

TEXT = "A warm little film, naïve — 電影 \U0001f3ac"


def test_encode_frames_what_sentencepiece_gives(tokenizer: Tokenizer, tiny_tokenizer: Path):
    ids = sentencepiece.SentencePieceProcessor(model_file=str(tiny_tokenizer)).encode(TEXT)
    assert tokenizer.encode(TEXT, bos=False, eos=False) == ids
    assert tokenizer.encode(TEXT, bos=True, eos=False) == [1, *ids]
    assert tokenizer.encode(TEXT, bos=True, eos=True) == [1, *ids, 2]
    assert tokenizer.encode_batch([TEXT, "a"], bos=True, eos=True) == [
        [1, *ids, 2],
        tokenizer.encode("a", bos=True, eos=True),
    ]


def test_decode_undoes_encode_and_drops_special_tokens(tokenizer: Tokenizer):
    assert tokenizer.decode(tokenizer.encode(TEXT, bos=True, eos=True)) == TEXT


def test_special_ids(tokenizer: Tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    assert tokenizer.sp_model.id_to_piece(tokenizer.pad_id) == "<0x00>"
    assert tokenizer.n_words == tokenizer.sp_model.vocab_size()


def test_the_special_tokens_may_be_the_first_pieces(tmp_path: Path):
    ids = {"bos_id": 0, "eos_id": 1, "unk_id": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a warm film"]), model_prefix=str(tmp_path / "a"), vocab_size=11, minloglevel=2, **ids
    )
    tokenizer = Tokenizer(None, tmp_path / "a.model")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1) and tokenizer.encode("a", bos=True, eos=True)[0] == 0


def test_max_len_counts_no_special_tokens(tiny_tokenizer: Path):
    whole = Tokenizer(None, tiny_tokenizer).encode(TEXT, bos=True, eos=True)
    cut = Tokenizer(5, tiny_tokenizer).encode(TEXT, bos=True, eos=True)
    assert cut == [*whole[:6], 2]


def test_the_default_is_tokenizer_model_in_the_current_folder(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert Tokenizer().encode(TEXT, bos=False, eos=False) == Tokenizer(None, tiny_tokenizer).encode(TEXT, False, False)


def test_a_missing_model_is_refused_by_name(tmp_path: Path):
    with pytest.raises(UserError, match=r"absent\.model"):
        Tokenizer(tokenizer_model=tmp_path / "absent.model")


def test_the_llama_2_tokenizer(assets: Path):
    tokenizer = Tokenizer(tokenizer_model=assets / "tokenizer.model")
    assert (tokenizer.n_words, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (32000, 1, 2, 3)
    assert tokenizer.encode("good", bos=False, eos=False) == [1781]
    assert tokenizer.encode("This movie is ", bos=False, eos=False)[-1] == 29871  # the dangling space of the prompt
