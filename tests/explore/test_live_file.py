"""`--live` and `--serve` as flags: what is refused in one line, the size of the page, the lines that switches name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, random_llama
from error_helpers import check_one_error
from pages import Trained, data_of, trained  # noqa: F401
from test_live_model import classifier_of

import rope
from classifier import LlamaEmbeddingClassifier
from explore import __main__ as program
from explore import live
from explore.broken import BREAKS
from explore.inspected import InspectedModel
from explore.live import in_8_bits, live_page, page_of_break
from explore.page import LIVE_SCRIPTS, PAGE_FOLDER, WORKER_SCRIPTS
from llama import Attention, FeedForward, RMSNorm
from tokenizer import Tokenizer
from utils import UserError

BUNDLED = ROOT / "checkpoints" / "minllama1M.pt"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--live"], "--out PAGE.html is missing"),
        (["--bits", "8", "--out", "p.html"], "--bits is for the weights of --live"),
        (["--live", "--bits", "4", "--out", "p.html"], "--bits"),
        (["--serve", "--out", "p.html"], "--out is for a page that is written"),
        (["--serve", "--bits", "8"], "--bits is for a page that is written"),
        (["--serve", "65536"], "--serve 65536: a port is from 0"),
        (["--serve", "-1"], "--serve -1: a port is from 0"),
        (["--serve", "x"], "--serve"),
        (["--live", "--data", "x", "--out", "p.html"], "--data is for a page that is drawn once"),
        (["--live", "--text", "a", "--text", "b", "--out", "p.html"], "--text is for a page that is drawn once"),
    ],
)
def test_flags_that_do_not_belong_together(flags: list[str], words: str, call: Callable, tmp_path: Path):
    status, _, err = call(BUNDLED, *flags, main=program.main)
    check_one_error(status, err, words)
    assert not [*tmp_path.iterdir()]


def test_a_run_has_no_live_page(trained: Trained, call: Callable):
    status, _, err = call(trained.log, "--live", "--out", "p.html", main=program.main)
    check_one_error(status, err, "a live page is of a model")


def test_a_model_that_is_too_large(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    """It says what helps: 8 bits, if these would do, and the server in any case."""
    inspected = InspectedModel("random", random_llama(), tokenizer)
    size = sum(tensor.numel() for tensor in live.tensors_of(inspected).values()) * 8 // 3  # letters of base64, 16 bits
    monkeypatch.setattr(live, "MAX_LIVE_BYTES", size * 3 // 4)
    with pytest.raises(UserError, match="use --serve, which leaves the weights here, or --bits 8"):
        live_page(inspected, "a", 16, "p.html")
    live_page(inspected, "a", 8, "p.html")
    monkeypatch.setattr(live, "MAX_LIVE_BYTES", size // 4)
    for bits in (16, 8):
        with pytest.raises(UserError, match="use --serve, which leaves the weights here$"):
            live_page(inspected, "a", bits, "p.html")


def test_a_model_with_layer_norm_is_for_the_server(tokenizer: Tokenizer):
    with pytest.raises(UserError, match="random has LayerNorm, which the page cannot compute; use --serve"):
        live_page(InspectedModel("random", random_llama(norm="layer"), tokenizer), "a", 16, "p.html")


EDITS = {
    "llama.py": {
        "gelu": (FeedForward, "forward", lambda self, x: self.w2(F.gelu(self.w1(x)) * self.w3(x))),
        "sum": (RMSNorm, "_norm", lambda self, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)),
        "eps": (RMSNorm, "_norm", lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)),
        "scores": (Attention, "compute_query_key_value_scores",
                   lambda self, q, k, v, mask=None: own_scores(self, q * self.head_dim**0.5, k, v, mask)),
        "heads": (torch.Tensor, "repeat_interleave", lambda x, count, dim: x.repeat(1, count, 1, 1)),
        "rope": (rope, "frequencies", lambda *given: 2 * own_frequencies(*given)),
    },
    "classifier.py": {
        "scale": (LlamaEmbeddingClassifier, "forward", lambda self, ids: own_decision(self, ids) * 2),
    },
}  # fmt: skip
own_scores, own_decision = Attention.compute_query_key_value_scores, LlamaEmbeddingClassifier.forward
own_frequencies = rope.frequencies


@pytest.mark.parametrize(("file", "edit"), [(file, edit) for file, edits in EDITS.items() for edit in edits])
def test_edited_code_is_for_the_server(file: str, edit: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    """The page has code of its own, and nobody's edit is ignored."""
    inspected = classifier_of("linear", "causal", tokenizer)
    live_page(inspected, "a", 8, "p.html")
    monkeypatch.setattr(*EDITS[file][edit])
    rope.rope_table.cache_clear()
    try:
        with pytest.raises(UserError, match=f"^{file} computes other numbers than the page would.*use --serve"):
            live_page(inspected, "a", 8, "p.html")
    finally:
        rope.rope_table.cache_clear()


def test_8_bits_are_half_the_size_and_near(tokenizer: Tokenizer):
    inspected = InspectedModel("random", random_llama(), tokenizer)
    whole, half = (len(live_page(inspected, "a", bits, "p.html")[1]) for bits in (16, 8))
    assert 0.5 < half / whole < 0.65
    matrix = torch.randn(7, 50)
    numbers, units = in_8_bits(matrix)
    assert ((numbers * units - matrix).abs() <= units / 2 + 1e-6).all() and numbers.abs().amax(-1).eq(127).all()


def test_every_switch_names_its_line_and_page():
    for name, each in BREAKS.items():
        named = page_of_break(name, each, str(ROOT / "page.html"))
        lines = (ROOT / each.file).read_text("utf-8").splitlines()
        assert each.code in lines[named["line"] - 1] and named["is_link"]
        assert (ROOT / named["link"]).is_file() and named["link"].startswith("docs/components/")
    assert page_of_break("mask", BREAKS["mask"], "/elsewhere/p.html")["is_link"] is False


def test_the_scripts_are_short_and_all_are_used():
    names = {path.stem for path in (PAGE_FOLDER / "live").glob("*.js")}
    assert names == {*LIVE_SCRIPTS, *WORKER_SCRIPTS}
    for path in PAGE_FOLDER.rglob("*.js"):
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= 320 and "</script" not in text and "http" not in text


def test_a_text_in_the_page_stays_a_text(call: Callable, tmp_path: Path):
    hostile = "</script><!-- <!--held--> <!--data--> \u2028"
    status, _, err = call(BUNDLED, "--live", "--text", hostile, "--out", "p.html", main=program.main)
    assert (status, err) == (0, "")
    assert data_of(tmp_path / "p.html")["live"]["text"] == hostile
    assert (tmp_path / "p.html").read_text("utf-8").count("</script>") == 4
    assert json.loads(json.dumps(data_of(tmp_path / "p.html")["model"]))["n_layers"] == 4
