"""A model and some texts as plain values for the page."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from config import ATTENTION_KINDS
from engine.data import NO_GOLD_LABEL, Example
from engine.families import encode_for, load_llama
from engine.methods import pretrained_of
from engine.programs import input_file, is_gguf, tokenizer_name
from engine.runs import SavedRun, load_classifier
from engine.storage import load_tensors
from engine.tasks import WithProbabilities, worst_errors
from engine.weights import load_llama_model
from explore.decision import Decision, decide, probabilities
from explore.look import ForwardRecord, Lens, lenses, match_at_distance, read, read_both, rotated
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError, find_asset, shorten, warn

CANDIDATES = 5  # likeliest next tokens that are shown
ATTENTION_BYTES = 2_600_000  # the most that the attention of all texts may take on the page
QUERIES_SHOWN = 32  # first tokens of a text whose queries are shown
ROPE_POSITIONS = 128  # first positions whose RoPE angles are shown
MAX_TOKENS = 1024  # tokens of the longest text


@dataclass
class InspectedModel:
    """A Llama, with its tokenizer and its classifier.

    tokenizer: None: texts are token ids. classifier: token ids -> log-probabilities over `label_names`; None: the model
    only continues texts. about: the classifier's saved settings.
    """

    name: str
    llama: Llama
    tokenizer: Tokenizer | None
    classifier: nn.Module | None = None
    label_names: tuple[str, ...] = ()
    about: SavedRun | None = None

    @classmethod
    def open(cls, path: str, tokenizer: str | None = None, attention: str | None = None) -> InspectedModel:
        """Load a checkpoint, a Hugging Face directory, or a classifier with its own tokenizer. Raises `UserError`."""
        if is_classifier(path):
            if tokenizer or attention:
                raise UserError(f"{path} is a fine-tuned classifier, which has its own tokenizer and attention")
            return cls._of_classifier(path)
        name = tokenizer_name(path, tokenizer)
        if tokenizer is None and find_asset(name) is None:
            return cls(Path(path).name, load_llama_model(path, attention=attention), None)
        return cls(Path(path).name, *load_llama(path, input_file("--tokenizer", name), attention))

    @classmethod
    def _of_classifier(cls, path: str) -> InspectedModel:
        model, about = load_classifier(path)
        llama = pretrained_of(model)
        if not isinstance(llama, Llama):
            what = f"a fine-tuned {type(llama).__name__}, and the page shows what a Llama computes"
            raise UserError(f"{path} is {what}; name the --log_dir of its run to see that")
        return cls(Path(path).name, llama, about.tokenizer, model, about.label_names, about)

    def encode(self, text: str) -> list[int]:
        """The token ids as the classifier reads them; else with bos and without eos. Raises `UserError`."""
        if self.classifier is not None:
            return encode_for(self.classifier, self.tokenizer, [Example(text, NO_GOLD_LABEL)]).token_ids[0]
        if self.tokenizer is not None:
            return self.tokenizer.encode(text, bos=True, eos=False)
        words, count = text.split(), self.llama.config.vocab_size
        if not all(word.isascii() and word.isdecimal() and int(word[:10]) < count for word in words):
            raise UserError(f"without a tokenizer, texts are token ids from 0 to {count - 1}; or name a --tokenizer")
        return [int(word) for word in words]

    def sample_text(self, words: str) -> str:
        """A text to begin with: these words, or, without a tokenizer, a token id."""
        return words if self.tokenizer is not None else "1"

    def piece(self, id: int) -> str:
        """A token as text; its first letter may be the space before a word."""
        if self.tokenizer is None or id >= self.tokenizer.n_words:  # the embedding may have more rows than pieces
            return str(id)
        return self.tokenizer.piece(id)

    def facts(self) -> dict[str, Any]:
        """The model's shape and names, which stand at the top of the page."""
        config = self.llama.config
        names = ("attention", "n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "vocab_size", "max_seq_len")
        facts = {name: getattr(config, name) for name in names}
        facts["parameters"] = sum(parameter.numel() for parameter in (self.classifier or self.llama).parameters())
        return facts | {"name": self.name, "rope_theta": config.rope_theta, "label_names": [*self.label_names]}


def is_classifier(path: str) -> bool:
    """Whether the file is a fine-tuned classifier. Raises `UserError` if it cannot be read."""
    if Path(path).is_dir() or is_gguf(path):
        return False
    saved = load_tensors(path, warns=False)
    return isinstance(saved, dict) and "model_config" in saved


# ------------------------------------------------------------------------------------------------------- texts


class InspectedText(NamedTuple):
    """A text on the page. gold: its label, if known. note: the reason why it was chosen."""

    text: str
    gold: int | None = None
    note: str = ""


def examples_of(
    sentences: Sequence[str], labels: Sequence[int], result: WithProbabilities, count: int
) -> list[InspectedText]:
    """`count` sentences of a data file: at most half of them the classifier's worst errors, then the file's first."""
    worst = [error["index"] for error in worst_errors(sentences, result)[: count // 2]]
    others = [index for index in range(len(sentences)) if index not in worst][: count - len(worst)]
    notes = {**dict.fromkeys(worst, "among the worst errors"), **dict.fromkeys(others, "")}
    return [InspectedText(sentences[index], labels[index], note) for index, note in notes.items()]


def page_of_model(
    inspected: InspectedModel, texts: Sequence[InspectedText], other: InspectedModel | None = None
) -> dict[str, Any]:
    """Plain values for the page. other: a second model, which stands in the place of the other kind of attention.

    Raises `UserError` for a text that is too short or too long, and for a model that the first cannot stand beside.
    """
    pieces: dict[int, str] = {}
    shown = [page_of_text(inspected, text, ATTENTION_BYTES // len(texts), pieces, other) for text in texts]
    page = {"model": inspected.facts(), "texts": shown, "pieces": pieces, "rope": page_of_rope(inspected.llama)}
    if other is not None:
        both = zip(("first", "second"), (inspected, other), strict=True)
        page["columns"] = {key: {"title": each.name, "remark": each.llama.config.attention} for key, each in both}
    return page


def check_beside(inspected: InspectedModel, other: InspectedModel, ids: Sequence[int]) -> None:
    """Raises `UserError` if two models have no common figure of a text."""
    one, two = ((config.n_layers, config.n_heads) for config in (inspected.llama.config, other.llama.config))
    if one != two:
        shapes = "{} layers of {} heads, but {} has {} of {}".format(*two, inspected.name, *one)
        raise UserError(f"--beside {other.name} has {shapes}; both need the same shape")
    check_pieces(inspected, other, ids)


def check_pieces(inspected: InspectedModel, other: InspectedModel, ids: Collection[int]) -> None:
    """Raises `UserError` if an id, of a text or of what a model predicts, is not the same token for both models."""
    fewest = min(each.llama.config.vocab_size for each in (inspected, other))
    if max(ids) >= fewest or any(other.piece(id) != inspected.piece(id) for id in ids):
        raise UserError(f"--beside {other.name} has other tokens than {inspected.name}")


def page_of_text(
    inspected: InspectedModel, text: InspectedText, room: int, pieces: dict[int, str], other: InspectedModel | None
) -> dict[str, Any]:
    """room: the most bytes for its attention. pieces: all tokens on the page by id; those of this text are added."""
    ids = inspected.encode(text.text)
    if len(ids) < 2:
        raise UserError("a text needs at least one token beside the one that begins it")
    if len(ids) > (limit := inspected.llama.config.max_seq_len):
        warn(f"the text {shorten(text.text, 40)!r} has {len(ids)} tokens, and the model was made for {limit}")
    if len(ids) > MAX_TOKENS:
        raise UserError(
            f"the text {shorten(text.text, 40)!r} has {len(ids)} tokens; the page takes {MAX_TOKENS} at most"
        )
    if other is None:
        llamas, records = dict.fromkeys(ATTENTION_KINDS, inspected.llama), read_both(inspected.llama, ids)
    else:
        check_beside(inspected, other, ids)
        llamas = {"first": inspected.llama, "second": other.llama}
        records = {name: read(llama, ids, llama.config.attention) for name, llama in llamas.items()}
    semantics: dict[str, Any] = {name: None for name in records}
    for name, record in records.items():
        if record is not None:
            semantics[name] = {"lens": [page_of_lens(each) for each in lenses(llamas[name], record, ids, CANDIDATES)]}
    shown = add_attention(records, semantics, room)
    named = {*ids}.union(*(layer["ids"] for each in semantics.values() if each for layer in each["lens"]))
    if other is not None:
        check_pieces(inspected, other, named)
    pieces |= {id: inspected.piece(id) for id in named}
    own = records[inspected.llama.config.attention if other is None else "first"]
    page = {
        "text": text.text, "gold": text.gold, "note": text.note, "ids": ids, "shown": shown,
        "semantics": semantics, "queries": page_of_queries(own, min(len(ids), QUERIES_SHOWN)),
    }  # fmt: skip
    if inspected.classifier is not None:
        page["decision"] = page_of_decision(decide(inspected.classifier, inspected.llama.tok_embeddings, ids))
    return page


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
    """As a flat list of numbers, rounded to four significant digits; NaN becomes None."""
    return [None if value != value else float(f"{value:.4g}") for value in values.flatten().tolist()]


# ------------------------------------------------------------------------------------------------- packed values


def add_attention(records: dict[str, ForwardRecord | None], semantics: dict[str, Any], room: int) -> int:
    """Add the weights among the first tokens, as many as fit into `room` bytes. Returns the number of tokens."""
    present = {name: record for name, record in records.items() if record is not None}
    for shown in lengths(len(next(iter(present.values())).logits)):
        texts = {name: pack_attention(record, shown) for name, record in present.items()}
        if sum(map(len, texts.values())) <= room:
            break
    for name, text in texts.items():
        semantics[name]["attention"] = text
    return shown


def lengths(most: int) -> Iterator[int]:
    """From `most` down to about 8, each about nine tenths of the one before."""
    while most > 8:
        yield most
        most = most * 9 // 10
    yield most


def pack_attention(record: ForwardRecord, shown: int) -> str:
    """L h s t as bytes, in zlib's format and base64."""
    weights = torch.stack(record.attention)[..., :shown, :shown]
    return packed(to_bytes(weights).numpy().tobytes())


def to_bytes(weights: torch.Tensor) -> torch.Tensor:
    """The square roots of weights from 0 to 1, in 255 steps: the error of a weight is at most 0.004, less if small."""
    return (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)


def page_of_queries(record: ForwardRecord, shown: int) -> dict[str, Any]:
    """The first layer's queries before and after the rotation: whole numbers 2 h s d, in units of `unit`."""
    both = torch.stack([each[:, :shown] for each in record.queries[0]])  # 2 h s d
    whole, unit = whole_in_units(both)
    return {"shown": shown, "unit": unit, "data": packed(whole.numpy().tobytes())}


def whole_in_units(values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Values as whole numbers of 16 bits, and the unit that these are multiples of."""
    unit = values.abs().max().clamp(min=1e-9) / 32767
    return (values / unit).round().to(torch.int16), float(unit)


def page_of_rope(llama: Llama) -> dict[str, Any]:
    """Rotated pairs and matches at the first positions; they are the same for every text."""
    config = llama.config
    pairs, match = rotated(config, ROPE_POSITIONS), match_at_distance(config, ROPE_POSITIONS)
    return {
        "head_dim": config.head_dim,
        "theta": config.rope_theta,
        "positions": ROPE_POSITIONS,
        # digits that count, not places: the sine of a slow pair is tiny, and the page reads its period from it
        "turned": [float(f"{value:.6g}") for value in pairs.flatten().tolist()],
        "match": [round(value, 5) for value in match.tolist()],
    }


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()
