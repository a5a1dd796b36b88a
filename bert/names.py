"""What Hugging Face calls the settings and tensors of a BERT and of a DistilBERT, and their names here.

What transformers has no model for, such as the BERT of textbooks, is written in the same kind of directory with the
names that everything has here; its model_type tells transformers that the model is none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bert.config import BertConfig
from utils import short_repr

# Our name of a weight and its bias, that in a BERT, that in a DistilBERT; None where it has no such tensor.
LAYER_TENSORS = (
    ("attention.compute_query", "attention.self.query", "attention.q_lin"),
    ("attention.compute_key", "attention.self.key", "attention.k_lin"),
    ("attention.compute_value", "attention.self.value", "attention.v_lin"),
    ("attention.compute_output", "attention.output.dense", "attention.out_lin"),
    ("attention_norm", "attention.output.LayerNorm", "sa_layer_norm"),
    ("feed_forward.w1", "intermediate.dense", "ffn.lin1"),
    ("feed_forward.w2", "output.dense", "ffn.lin2"),
    ("ffn_norm", "output.LayerNorm", "output_layer_norm"),
)
EMBEDDING_TENSORS = (
    ("embeddings.tokens", "embeddings.word_embeddings", "embeddings.word_embeddings"),
    ("embeddings.positions", "embeddings.position_embeddings", "embeddings.position_embeddings"),
    ("embeddings.segments", "embeddings.token_type_embeddings", "embeddings.token_type_embeddings"),
    ("embeddings.norm", "embeddings.LayerNorm", "embeddings.LayerNorm"),
)
HEAD_TENSORS = (
    ("pooler", "pooler.dense", None),
    ("masked_lm", None, None),  # the plain head
    ("masked_lm.transform", "cls.predictions.transform.dense", "vocab_transform"),
    ("masked_lm.norm", "cls.predictions.transform.LayerNorm", "vocab_layer_norm"),
    ("masked_lm.decoder", "cls.predictions.decoder", "vocab_projector"),
    ("next_sentence", "cls.seq_relationship", None),
    ("transform", None, "pre_classifier"),
    ("classifier", "classifier", "classifier"),
    ("span", "qa_outputs", "qa_outputs"),
)
HEAD_PARTS = {ours.partition(".")[0] for ours, *_ in HEAD_TENSORS} - {"pooler"}
COUNTERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # older versions saved them beside the weights

CONFIG_FIELDS = (  # of `BertConfig`, and the names of the same settings in the two kinds of `config.json`
    ("vocab_size", "vocab_size", "vocab_size"),
    ("dim", "hidden_size", "dim"),
    ("n_layers", "num_hidden_layers", "n_layers"),
    ("n_heads", "num_attention_heads", "n_heads"),
    ("hidden_dim", "intermediate_size", "hidden_dim"),
    ("max_seq_len", "max_position_embeddings", "max_position_embeddings"),
    ("n_segments", "type_vocab_size", None),
    ("first_segment", None, None),
    ("embedding_norm", None, None),
    ("plain_heads", None, None),
    ("activation", "hidden_act", "activation"),
    ("dropout", "hidden_dropout_prob", "dropout"),
    ("attention_dropout", "attention_probs_dropout_prob", "attention_dropout"),
    ("head_dropout", "classifier_dropout", "seq_classif_dropout"),
    ("layer_norm_eps", "layer_norm_eps", None),
    ("pad_id", "pad_token_id", "pad_token_id"),
)
# Settings of a `config.json` that would change what is computed, each with the value that changes nothing.
FIXED_SETTINGS = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


@dataclass(frozen=True)
class Layout:
    """One of the three formats. Every mapping goes from our names to theirs.

    name: the model_type in `config.json`, and what stands before the names of a model with a head. prefix: of the names
    of classes. layers: what stands before a layer's number. layer, tensors: without `.weight` and `.bias`. defaults: of
    settings that a `config.json` leaves out, where they differ from those of `BertConfig`.
    """

    name: str
    prefix: str
    layers: str
    layer: Mapping[str, str]
    tensors: Mapping[str, str]
    settings: Mapping[str, str]
    defaults: Mapping[str, Any]

    def ours(self, name: str) -> str:
        """Our name for a tensor of a file, of any age; an unknown one stays as it is."""
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name.removeprefix(f"{self.name}."))
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        name = {"cls.predictions.bias": "cls.predictions.decoder.bias"}.get(name, name)
        body, _, kind = name.rpartition(".")
        if found := re.fullmatch(rf"{re.escape(self.layers)}(\d+)\.(.+)", body):
            part = _inverse(self.layer).get(found[2])
            return f"layers.{found[1]}.{part}.{kind}" if part else name
        part = _inverse(self.tensors).get(body)
        return f"{part}.{kind}" if part else name

    def theirs(self, name: str) -> str:
        """The inverse, in the newest way of naming, without the prefix. Raises `KeyError`."""
        body, _, kind = name.rpartition(".")
        if found := re.fullmatch(r"layers\.(\d+)\.(.+)", body):
            return f"{self.layers}{found[1]}.{self.layer[found[2]]}.{kind}"
        theirs = f"{self.tensors[body]}.{kind}"
        return {"cls.predictions.decoder.bias": "cls.predictions.bias"}.get(theirs, theirs)

    def config(self, settings: Mapping[str, Any], has_pooler: bool) -> BertConfig:
        """The config of a `config.json`. Raises `ValueError` for a setting that no model here computes."""
        for name, plain in FIXED_SETTINGS.items():
            if settings.get(name, plain) not in (plain, None):
                raise ValueError(f"{name}={short_repr(settings[name])}: no model here computes that")
        fields = dict(self.defaults)
        fields |= {ours: settings[theirs] for ours, theirs in self.settings.items() if theirs in settings}
        fields["positions"] = "sinusoidal" if settings.get("sinusoidal_pos_embds") else "learned"
        if fields.get("pad_id", 0) is None:
            fields["pad_id"] = 0
        try:
            return BertConfig(has_pooler=has_pooler, **fields)
        except ValueError as error:
            raise ValueError(self.in_their_words(str(error))) from None

    def in_their_words(self, message: str) -> str:
        """A message with their names of settings and tensors for ours: the reader can look them up in the file."""

        def tensor(found: re.Match) -> str:
            try:
                return self.theirs(found[0])
            except KeyError:
                return found[0]

        message = re.sub(r"\b([a-z_]+)(?==)", lambda found: self.settings.get(found[1], found[1]), message)
        return re.sub(r"[\w.]+\.(weight|bias)\b", tensor, message)

    def config_json(self, config: BertConfig) -> dict[str, Any]:
        """The content of a `config.json` for a config."""
        settings = {theirs: getattr(config, ours) for ours, theirs in self.settings.items()}
        return {"model_type": self.name, **settings, "sinusoidal_pos_embds": config.positions == "sinusoidal"}


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in names.items()}


def _layout(column: int, name: str, prefix: str, layers: str, **defaults: Any) -> Layout:
    """The format of this column in the tables above."""
    tables = LAYER_TENSORS, EMBEDDING_TENSORS + HEAD_TENSORS, CONFIG_FIELDS
    names = ({row[0]: row[column] for row in table if row[column] is not None} for table in tables)
    return Layout(name, prefix, layers, *names, defaults={"hidden_dim": 3072, **defaults})


BERT = _layout(1, "bert", "Bert", "encoder.layer.")
DISTILBERT = _layout(
    2, "distilbert", "DistilBert", "transformer.layer.", n_layers=6, n_segments=0, head_dropout=0.2
)  # fmt: skip
TEXTBOOK = _layout(0, "textbook-bert", "TextbookBert", "layers.")


def layout_of(config: BertConfig) -> Layout:
    """In which format a model is written: a DistilBERT has neither segments nor a pooler, and no other LayerNorm."""
    if config.first_segment or config.plain_heads or not config.embedding_norm:
        return TEXTBOOK
    is_distilled = not config.n_segments and not config.has_pooler and config.layer_norm_eps == 1e-12
    return DISTILBERT if is_distilled else BERT
