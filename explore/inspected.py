"""The model that a page is about, and what the page says of it and of some texts."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.data import NO_GOLD_LABEL, Example
from engine.families import encode_for, load_llama
from engine.methods import pretrained_of
from engine.outcome import WithProbabilities
from engine.programs import tokenizer_name
from engine.saved import SavedRun, load_classifier
from explore.decision import Decision, decide, probabilities
from explore.look import ForwardRecord, Lens, lenses, match_at_distance, readings, turned
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError, find_asset, shorten, warn

CANDIDATES = 5  # of the next token
ROOM = 2_600_000  # bytes of the page that attention may take
TURNED = 32  # tokens of a text whose queries are shown
POSITIONS = 128  # of which RoPE's angles are shown
MOST = 1024  # tokens of a text that is read


@dataclass
class InspectedModel:
    """A Llama, and what is needed to read texts with it.

    classifier: token ids -> log-probabilities over `label_names`; None where the model only continues texts. tokenizer:
    None where there is none; texts are then token ids.
    """

    name: str
    llama: Llama
    tokenizer: Tokenizer | None
    classifier: nn.Module | None = None
    label_names: tuple[str, ...] = ()
    about: SavedRun | None = None

    @classmethod
    def open(cls, path: str, tokenizer: str | None = None, attention: str | None = None) -> InspectedModel:
        """A checkpoint or Hugging Face directory; or a classifier with its own tokenizer. Raises `UserError`."""
        if is_classifier(path):
            if tokenizer or attention:
                raise UserError(f"{path} is a fine-tuned classifier, which has its own tokenizer and attention")
            return cls._of_classifier(path)
        named = tokenizer_name(path, tokenizer)
        found = find_asset(named)
        if found is None and tokenizer is not None:
            raise UserError(f"--tokenizer {tokenizer} does not exist")
        if found is None:
            from engine.weights import load_pretrained

            return cls(Path(path).name, load_pretrained(path, attention=attention), None)
        return cls(Path(path).name, *load_llama(path, found, attention))

    @classmethod
    def _of_classifier(cls, path: str) -> InspectedModel:
        model, about = load_classifier(path)
        llama = pretrained_of(model)
        if not isinstance(llama, Llama):
            what = f"a fine-tuned {type(llama).__name__}, and the page shows what a Llama computes"
            raise UserError(f"{path} is {what}; name the --log_dir of its run to see that")
        return cls(Path(path).name, llama, about.tokenizer, model, about.label_names, about)

    def encode(self, text: str) -> list[int]:
        """As the classifier reads it, or as the language model does: bos, and no eos. Raises `UserError`."""
        if self.classifier is not None:
            return encode_for(self.classifier, self.tokenizer, [Example(text, NO_GOLD_LABEL)]).token_ids[0]
        if self.tokenizer is not None:
            return self.tokenizer.encode(text, bos=True, eos=False)
        words, most = text.split(), self.llama.config.vocab_size
        if not all(word.isascii() and word.isdecimal() and int(word[:10]) < most for word in words):
            raise UserError(f"without a tokenizer, texts are token ids from 0 to {most - 1}; or name a --tokenizer")
        return [int(word) for word in words]

    def piece(self, id: int) -> str:
        """A token as it is shown: the space before a word is its first letter."""
        if self.tokenizer is None or id >= self.tokenizer.n_words:  # of a matrix with more rows than pieces
            return str(id)
        return self.tokenizer.piece(id)

    def facts(self) -> dict[str, Any]:
        """What the head of the page says of the model."""
        config = self.llama.config
        names = ("attention", "n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "vocab_size", "max_seq_len")
        facts = {name: getattr(config, name) for name in names}
        facts["parameters"] = sum(parameter.numel() for parameter in self.llama.parameters())
        return facts | {"name": self.name, "rope_theta": config.rope_theta, "label_names": [*self.label_names]}


def is_classifier(path: str) -> bool:
    """Whether a file says that it is a fine-tuned classifier. Raises `UserError` where it cannot be read."""
    from engine.storage import load_tensors

    if Path(path).is_dir():
        return False
    saved = load_tensors(path, warns=False)
    return isinstance(saved, dict) and "model_config" in saved


# ------------------------------------------------------------------------------------------------------- texts


class InspectedText(NamedTuple):
    """What is looked at. gold: its label, if that is known. note: why it is shown."""

    text: str
    gold: int | None = None
    note: str = ""


def examples_of(
    sentences: Sequence[str], labels: Sequence[int], result: WithProbabilities, count: int
) -> list[InspectedText]:
    """Some sentences that a classifier was asked for: first its worst errors, then others from the beginning."""
    from engine.outcome import worst_errors

    worst = [error["index"] for error in worst_errors(sentences, result)[: count // 2]]
    others = [index for index in range(len(sentences)) if index not in worst][: count - len(worst)]
    notes = {**dict.fromkeys(worst, "among the worst errors"), **dict.fromkeys(others, "")}
    return [InspectedText(sentences[index], labels[index], note) for index, note in notes.items()]


def page_of_model(inspected: InspectedModel, texts: Sequence[InspectedText]) -> dict[str, Any]:
    """Plain values for the page. Raises `UserError` for a text that cannot be read."""
    pieces: dict[int, str] = {}
    shown = [page_of_text(inspected, text, ROOM // len(texts), pieces) for text in texts]
    return {"model": inspected.facts(), "texts": shown, "pieces": pieces, "rope": page_of_rope(inspected.llama)}


def page_of_text(inspected: InspectedModel, text: InspectedText, room: int, pieces: dict[int, str]) -> dict[str, Any]:
    """room: bytes that its attention may take. pieces: of all ids on the page; those of this text are added."""
    ids = inspected.encode(text.text)
    if len(ids) < 2:
        raise UserError("a text needs at least one token beside the one that begins it")
    if len(ids) > (limit := inspected.llama.config.max_seq_len):
        warn(f"the text {shorten(text.text, 40)!r} has {len(ids)} tokens, and the model was made for {limit}")
    if len(ids) > MOST:
        raise UserError(f"the text {shorten(text.text, 40)!r} has {len(ids)} tokens; the page takes {MOST} at most")
    read = readings(inspected.llama, ids)
    semantics = {name: each and page_of_reading(inspected.llama, each, ids) for name, each in read.items()}
    shown = fit_attention(read, semantics, room)
    named = {*ids}.union(*(layer["ids"] for each in semantics.values() if each for layer in each["lens"]))
    pieces |= {id: inspected.piece(id) for id in named}
    own = read[inspected.llama.config.attention]
    page = {
        "text": text.text, "gold": text.gold, "note": text.note, "ids": ids, "shown": shown,
        "semantics": semantics, "queries": page_of_queries(own, min(len(ids), TURNED)),
    }  # fmt: skip
    if inspected.classifier is not None:
        page["decision"] = page_of_decision(decide(inspected.classifier, inspected.llama.tok_embeddings, ids))
    return page


def page_of_reading(llama: Llama, reading: ForwardRecord, ids: Sequence[int]) -> dict[str, Any]:
    """All but the attention, of which the page may not have room for everything."""
    return {"lens": [page_of_lens(each) for each in lenses(llama, reading, ids, CANDIDATES)]}


def page_of_lens(lens: Lens) -> dict[str, Any]:
    """Flat lists of s k and s - 1 values."""
    return {
        "ids": lens.ids.flatten().tolist(),
        "p": brief(lens.probabilities),
        "next": brief(lens.next_probability),
        "rank": lens.next_rank.tolist(),
    }


def page_of_decision(decision: Decision) -> dict[str, Any]:
    return {
        "probabilities": brief(probabilities(decision.log_probabilities)),
        "occlusion": brief(decision.occlusion),
        "together": decision.together,
        "gradient": brief(decision.gradient),
    }


def brief(values: torch.Tensor) -> list[float | None]:
    """As flat numbers with four digits that count; None for NaN."""
    return [None if value != value else float(f"{value:.4g}") for value in values.flatten().tolist()]


# -------------------------------------------------------------------------------- what is stored in few bytes


def fit_attention(read: dict[str, ForwardRecord | None], semantics: dict[str, Any], room: int) -> int:
    """Add the weights among as many of the first tokens as there is room for, and return how many these are."""
    present = {name: reading for name, reading in read.items() if reading is not None}
    for shown in lengths(len(next(iter(present.values())).logits)):
        packed = {name: pack_attention(reading, shown) for name, reading in present.items()}
        if sum(map(len, packed.values())) <= room:
            break
    for name, text in packed.items():
        semantics[name]["attention"] = text
    return shown


def lengths(most: int) -> Iterator[int]:
    """Each about nine tenths of the one before."""
    while most > 8:
        yield most
        most = most * 9 // 10
    yield most


def pack_attention(reading: ForwardRecord, shown: int) -> str:
    """L h s t as bytes, in zlib's format and base64."""
    weights = torch.stack(reading.attention)[..., :shown, :shown]
    return packed(to_bytes(weights).numpy().tobytes())


def to_bytes(weights: torch.Tensor) -> torch.Tensor:
    """Weights from 0 to 1 as their square roots in 255 steps: small ones are told apart, none is off by over 0.004."""
    return (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)


def page_of_queries(reading: ForwardRecord, shown: int) -> dict[str, Any]:
    """The first layer's queries before and after they are turned: two times h s d whole numbers, times `unit`."""
    both = torch.stack([each[:, :shown] for each in reading.queries[0]])  # 2 h s d
    unit = both.abs().max().clamp(min=1e-9) / 32767
    whole = (both / unit).round().to(torch.int16)
    return {"shown": shown, "unit": float(unit), "data": packed(whole.numpy().tobytes())}


def page_of_rope(llama: Llama) -> dict[str, Any]:
    """Angles and matches at the first positions, whichever the text is."""
    config = llama.config
    angles, match = turned(config, POSITIONS), match_at_distance(config, POSITIONS)
    return {
        "head_dim": config.head_dim,
        "theta": config.rope_theta,
        "positions": POSITIONS,
        "turned": [round(value, 5) for value in angles.flatten().tolist()],
        "match": [round(value, 5) for value in match.tolist()],
    }


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()
