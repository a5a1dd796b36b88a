"""What a served page asks of a model: the questions of page/live/worker.js, answered by `llama.py` itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.context import KVCache, rotate, why_no_context
from engine.decoding import Sampling, drop, likeliest, logits_after
from explore.broken import Switches, broken, read_broken
from explore.decision import MOST_TOKENS, TEXTS_AT_ONCE, neighbours_together, occluded, occlusion_starts, probabilities
from explore.inspected import InspectedModel, to_bytes, whole_in_units
from explore.look import ForwardRecord, lenses
from utils import UserError

CANDIDATES, NEXT_SHOWN, QUERIES_SHOWN = 8, 12, 32  # as in page/live/
ATTENTION_BYTES = 8_000_000
RECORD_BYTES = 500_000_000  # of the attention that one reading keeps: it grows with the square of the length
MOST_LETTERS = 200_000  # of a text that is asked about


class Reading(NamedTuple):
    """The last text that was read for one use."""

    ids: list[int]
    switches: Switches
    record: ForwardRecord


class PageAnswers:
    """Answers questions about one model, one at a time. Raises `ValueError` or `UserError` for what
    cannot be answered."""

    kinds = ("read", "next", "written", "numbers", "perplexity", "occlusion")

    def __init__(self, inspected: InspectedModel):
        self.inspected, self.llama = inspected, inspected.llama
        self.readings: dict[str, Reading] = {}
        self.caches: dict[str, tuple[Switches, list[int], KVCache]] = {}

    @torch.inference_mode()
    def answer(self, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        """The answer as plain values; bytes stay bytes."""
        if kind not in self.kinds or not isinstance(given, dict):
            raise ValueError("no such question")
        return getattr(self, f"_{kind}")(given)

    # --------------------------------------------------------------------------------------- what is asked about

    def _ids(self, given: dict[str, Any]) -> list[int]:
        """All ids of a text and of the tokens behind it."""
        added, size = given.get("added", []), self.llama.config.vocab_size
        if not isinstance(added, list) or not all(type(id) is int and 0 <= id < size for id in added):
            raise ValueError("added: token ids are missing")
        return [*self.inspected.encode(text_of(given)), *added]

    def _window(self, given: dict[str, Any]) -> list[int]:
        """The last ids, as many as the model reads; a classifier has cut its text by itself, or reads it whole."""
        ids, limit = self._ids(given), self.llama.config.max_seq_len
        if self.inspected.classifier is None:
            return ids[-limit:]
        if len(ids) > max(MOST_TOKENS, limit):
            raise UserError(f"the text has {len(ids)} tokens; the page takes {max(MOST_TOKENS, limit)} at most")
        return ids

    def _recorded(self, given: dict[str, Any]) -> list[int]:
        """The ids that a reading is of: the last ones, no more than the model reads and `RECORD_BYTES` hold."""
        config = self.llama.config
        return self._window(given)[-math.isqrt(RECORD_BYTES // (4 * config.n_layers * config.n_heads)) :]

    def _reading(self, given: dict[str, Any], ids: list[int]) -> Reading:
        use, switches = str(given.get("use"))[:20], switches_of(given)
        kept = self.readings.get(use)
        if kept is None or (kept.ids, kept.switches) != (ids, switches):
            if len(self.readings) > 8:  # the page has fewer uses
                self.readings.clear()
            kept = self.readings[use] = Reading(ids, switches, read_broken(self.llama, ids, switches))
        return kept

    # ------------------------------------------------------------------------------------------------ questions

    def _read(self, given: dict[str, Any]) -> dict[str, Any]:
        ids = self._recorded(given)
        if not ids:
            return {"ids": ids, "bad": []}
        reading = self._reading(given, ids)
        record, config = reading.record, self.llama.config
        with broken(self.llama, reading.switches):
            layers = lenses(self.llama, record, ids, CANDIDATES)
        sizes = [state.float().norm(dim=-1) for state in record.states]
        shown = min(len(ids), int(math.sqrt(ATTENTION_BYTES / (config.n_layers * config.n_heads))))
        pieces = {*ids}.union(*(layer.ids.flatten().tolist() for layer in layers))
        lens = [
            {"ids": layer.ids.flatten().tolist(), "p": numbers(layer.probabilities), "norm": numbers(size),
             "next": numbers(layer.next_probability), "rank": layer.next_rank.tolist()}
            for layer, size in zip(layers, sizes, strict=True)
        ]  # fmt: skip
        return {
            "ids": ids, "first": len(self._ids(given)) - len(ids),
            "pieces": {id: self.inspected.piece(id) for id in pieces},
            "record": {"lens": lens, "shown": shown, "attention": attention_bytes(record, shown)},
            "queries": query_bytes(record, reading.switches), "probabilities": self._decision(given, reading.switches),
        }  # fmt: skip

    def _decision(self, given: dict[str, Any], switches: Switches) -> list[float] | None:
        model = self.inspected.classifier
        if model is None:
            return None
        with broken(self.llama, switches):
            return numbers(probabilities(model(self._tensor(self._window(given)))[0]))

    def _occlusion(self, given: dict[str, Any]) -> dict[str, Any]:
        """A part of it: a new text need not wait for the rest. next: "first" of the next part, None at the end."""
        ids, model, shown = self._window(given), self.inspected.classifier, len(self._recorded(given))
        together = neighbours_together(len(ids))
        starts = occlusion_starts(len(ids), together)
        first = whole_number(given.get("first", 0), len(starts) + 1)
        end = first + TEXTS_AT_ONCE
        with broken(self.llama, switches_of(given)):
            tokens = self._tensor(ids)
            lost = occluded(model, tokens, model(tokens)[0], together, starts[first:end])  # s c
        part = numbers(lost[len(ids) - shown :])
        return {"occlusion": part, "together": together, "next": end if end < len(starts) else None}

    def _next(self, given: dict[str, Any]) -> dict[str, Any]:
        ids = self._window(given)
        if not ids:
            return {}
        logits = self._last_logits(str(given.get("use"))[:20], ids, switches_of(given))  # 1 v
        if not torch.isfinite(logits).all():
            return {"broken": True}
        sampling = sampling_of(given)
        best, most = likeliest(logits)
        plain = logits.float().softmax(-1)[0]
        p = F.one_hot(best[0, 0], logits.shape[-1]).float()
        if sampling.temperature:
            p = ((drop(logits, sampling).double() - most) / sampling.temperature).softmax(-1)[0]  # 1e-50 is no float32
        random = bounded_number(given.get("random", 0), 0.0, 1.0)
        id = int(best) if not sampling.temperature else int((p.double().cumsum(0) <= random * float(p.sum())).sum())
        id = min(id, int(p.nonzero()[-1]))
        top = plain.topk(min(NEXT_SHOWN, len(plain))).indices.tolist()
        rows = [{"id": each, "piece": self.inspected.piece(each), "plain": float(plain[each]), "p": float(p[each])}
                for each in top]  # fmt: skip
        return {
            "id": id,
            "piece": self.inspected.piece(id),
            "p": float(plain[id]),
            "top": rows,
            "kept": int((p > 0).sum()),
        }

    def _last_logits(self, use: str, ids: list[int], switches: Switches) -> torch.Tensor:
        """1 v. A causal model computes only what is new behind a text that it has read."""
        with broken(self.llama, switches):
            if not self.llama.config.is_causal or why_no_context(self.llama) is not None:
                return logits_after(self.llama, self._tensor(ids))
            kept = self.caches.pop(use, None)  # code that raises leaves half a token in a cache
            is_longer = kept is not None and kept[0] == switches and kept[1] == ids[: len(kept[1])] != ids
            cache = kept[2] if is_longer and len(ids) <= kept[2].shape[3] else None
            if cache is None:
                room = min(self.llama.config.max_seq_len, max(256, 2 * len(ids)))
                cache = KVCache(self.llama, 1, room)
            logits = logits_after(self.llama, self._tensor(ids), cache)
            self.caches = {**dict([*self.caches.items()][-4:]), use: (switches, ids, cache)}
            return logits

    def _written(self, given: dict[str, Any]) -> dict[str, Any]:
        ids = self._ids({**given, "added": []})
        if self.inspected.tokenizer is None:
            return {"text": "".join(f" {id}" for id in self._ids(given)[len(ids) :])}
        decode = self.inspected.tokenizer.decode
        return {"text": decode(self._ids(given))[len(decode(ids)) :]}

    def _perplexity(self, given: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self.inspected.tokenizer
        ids = self._ids(given) if tokenizer is None else tokenizer.encode_all(text_of(given))
        if not ids:
            return {"tokens": 0}
        bos, nats, length = 0 if tokenizer is None else tokenizer.bos_id, 0.0, self.llama.config.max_seq_len
        for start in range(0, len(ids), length):
            targets = ids[start : start + length]
            with broken(self.llama, switches_of(given)):
                tokens = self._tensor([bos, *targets[:-1]])
                logits, _ = self.llama(tokens, targets=tokens)  # 1 s v
            nats += float(F.cross_entropy(logits[0].float(), self._tensor(targets)[0], reduction="sum"))
        value = math.exp(min(nats / len(ids), 700.0))
        return {"tokens": len(ids), "value": None if math.isnan(value) else value}

    def _numbers(self, given: dict[str, Any]) -> dict[str, Any]:
        """See `Reading.numbers` in page/live/reading.js."""
        ids, config = self._recorded(given), self.llama.config
        limits = {"layer": config.n_layers, "head": config.n_heads, "query": len(ids), "key": len(ids)}
        layer, head, query, key = (whole_number(given.get(name), limit) for name, limit in limits.items())
        reading = self._reading(given, ids)
        switches = reading.switches
        attention, state = self.llama.layers[layer].attention, reading.record.states[layer]
        with broken(self.llama, switches):
            x = self.llama.layers[layer].attention_norm(state)  # s D
            is_hidden = self.llama.config.is_causal and key > query
            seen = query + 1 if self.llama.config.is_causal else len(ids)
        key_head = head // attention.n_rep
        if {"heads", "repeat"} & {*switches.breaks}:
            key_head = 0 if "heads" in switches.breaks else head % config.n_kv_heads
        plain = [linear(x[None])[0].unflatten(-1, (-1, config.head_dim))[:, number] for linear, number in
                 ((attention.compute_query, head), (attention.compute_key, key_head))]  # fmt: skip
        late = int("position" in switches.breaks)
        turned = [self._turned(each, first, switches) for each, first in zip(plain, (late, 0), strict=True)]  # s d
        products = turned[1] @ turned[0][query]  # t
        divisor = 1.0 if "scores" in switches.breaks else math.sqrt(config.head_dim)
        places = {"query": query, "key": key}
        values = [{name: numbers(each[at]) for each, (name, at) in zip(both, places.items(), strict=True)}
                  for both in (plain, turned)]  # fmt: skip
        weight = float(reading.record.attention[layer][head, query, key])
        expected = 0.0 if is_hidden else float((products[:seen] / divisor).softmax(-1)[key])
        is_switched = f"{layer + 1}" in switches.off or f"{layer + 1}.{head + 1}" in switches.uniform
        return {
            "plain": values[0], "rotated": values[1], "product": finite(float(products[key])), "divisor": divisor,
            "score": finite(float(products[key]) / divisor), "keyHead": key_head,
            "of": [config.n_heads, config.n_kv_heads], "weight": finite(weight), "isHidden": is_hidden,
            "isOther": is_switched or abs(weight - expected) > 1e-3,
        }  # fmt: skip

    def _turned(self, x: torch.Tensor, first: int, switches: Switches) -> torch.Tensor:
        """One head's vectors after the rotation; first: the position of the first one. x: s d -> s d"""
        config, has_halves = self.llama.config, "halves" in switches.breaks
        x = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if has_halves else x
        angles = (config.head_dim, config.max_seq_len, config.rope_theta, config.rope_scaling)
        turned = rotate(x[None, :, None], first, *angles)[0, :, 0]
        return turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if has_halves else turned

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[*ids]], device=next(self.llama.parameters()).device)  # 1 s


# --------------------------------------------------------------------------------------------------- plain values


def text_of(given: dict[str, Any]) -> str:
    """The text; half a surrogate pair in it becomes a question mark."""
    text = given.get("text")
    if not isinstance(text, str) or len(text) > MOST_LETTERS:
        raise ValueError(f"a text of at most {MOST_LETTERS} letters is missing")
    return text.encode("utf-8", "replace").decode()


def switches_of(given: dict[str, Any]) -> Switches:
    said = given.get("switches") or {}
    names = ("breaks", "off", "uniform")
    if not isinstance(said, dict) or any(not isinstance(said.get(name, []), list) for name in names):
        raise ValueError("switches: lists of names are missing")
    if said.get("attention") not in (None, "causal", "bidirectional"):
        raise ValueError("attention is causal or bidirectional")
    return Switches(said.get("attention"), *(tuple(map(str, said.get(name, []))) for name in names))


def sampling_of(given: dict[str, Any]) -> Sampling:
    said = given.get("sampling") or {}
    if not isinstance(said, dict):
        raise ValueError("sampling: settings are missing")
    top_k = said.get("topK")
    return Sampling(
        bounded_number(said.get("temperature", 1.0), 0.0, 1e6),
        None if not top_k else whole_number(top_k, 2**31),
        top_p=None if not said.get("topP") else bounded_number(said["topP"], 0.0, 1.0),
        min_p=None if not said.get("minP") else bounded_number(said["minP"], 0.0, 1.0),
    )


def whole_number(value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"a whole number from 0 to below {limit} is missing")
    return value


def bounded_number(value: Any, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(f"a number from {least} to {most} is missing")
    return float(value)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def numbers(values: torch.Tensor) -> list[float | None]:
    """As a flat list; what is not finite becomes None."""
    return [finite(value) for value in values.float().flatten().tolist()]


def attention_bytes(record: ForwardRecord, shown: int) -> bytes:
    """L h s t, see `inspected.to_bytes`."""
    return to_bytes(torch.stack(record.attention)[..., :shown, :shown].nan_to_num()).cpu().numpy().tobytes()


def query_bytes(record: ForwardRecord, switches: Switches) -> dict[str, Any]:
    """As `inspected.page_of_queries`, not packed."""
    both = torch.stack([each[:, :QUERIES_SHOWN] for each in record.queries[0]]).nan_to_num()  # 2 h s d
    if "halves" in switches.breaks:  # `broken` has put the halves beside each other
        both = both.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    whole, unit = whole_in_units(both)
    return {"shown": whole.shape[2], "unit": unit, "data": whole.cpu().numpy().tobytes()}
