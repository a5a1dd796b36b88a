"""What Hugging Face calls the settings and tensors of a BERT and of a DistilBERT, and their names here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bert.config import BertConfig
from utils import short_repr

# Names within a layer, and around the layers. Each stands for a weight and, but for embeddings, a bias.
BERT_LAYER = {
    "attention.compute_query": "attention.self.query",
    "attention.compute_key": "attention.self.key",
    "attention.compute_value": "attention.self.value",
    "attention.compute_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.w1": "intermediate.dense",
    "feed_forward.w2": "output.dense",
    "ffn_norm": "output.LayerNorm",
}
DISTILBERT_LAYER = {
    "attention.compute_query": "attention.q_lin",
    "attention.compute_key": "attention.k_lin",
    "attention.compute_value": "attention.v_lin",
    "attention.compute_output": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "feed_forward.w1": "ffn.lin1",
    "feed_forward.w2": "ffn.lin2",
    "ffn_norm": "output_layer_norm",
}
EMBEDDINGS = {
    "embeddings.tokens": "embeddings.word_embeddings",
    "embeddings.positions": "embeddings.position_embeddings",
    "embeddings.segments": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}
BERT_HEADS = {
    "pooler": "pooler.dense",
    "masked_lm.transform": "cls.predictions.transform.dense",
    "masked_lm.norm": "cls.predictions.transform.LayerNorm",
    "masked_lm.decoder": "cls.predictions.decoder",
    "next_sentence": "cls.seq_relationship",
    "classifier": "classifier",
    "span": "qa_outputs",
}
DISTILBERT_HEADS = {
    "masked_lm.transform": "vocab_transform",
    "masked_lm.norm": "vocab_layer_norm",
    "masked_lm.decoder": "vocab_projector",
    "transform": "pre_classifier",
    "classifier": "classifier",
    "span": "qa_outputs",
}
HEADS = {name.partition(".")[0] for name in (*BERT_HEADS, *DISTILBERT_HEADS)} - {"pooler"}
LEFT_OVER = ("embeddings.position_ids", "embeddings.token_type_ids")  # counters that older versions saved as well

BERT_SETTINGS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "n_segments": "type_vocab_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "head_dropout": "classifier_dropout",
    "layer_norm_eps": "layer_norm_eps",
    "pad_id": "pad_token_id",
}
DISTILBERT_SETTINGS = {
    "vocab_size": "vocab_size",
    "dim": "dim",
    "n_layers": "n_layers",
    "n_heads": "n_heads",
    "hidden_dim": "hidden_dim",
    "max_seq_len": "max_position_embeddings",
    "activation": "activation",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "head_dropout": "seq_classif_dropout",
    "pad_id": "pad_token_id",
}


@dataclass(frozen=True)
class Layout:
    """One of the two formats. defaults: of settings that a `config.json` leaves out, where they are not `BertConfig`'s.

    Settings and defaults go from our names; `tensors` and `layer` too, without `.weight` and `.bias`.
    """

    name: str  # model_type in `config.json`; in front of the names of a model with a head
    layers: str  # in front of a layer's number
    layer: Mapping[str, str]
    tensors: Mapping[str, str]
    settings: Mapping[str, str]
    defaults: Mapping[str, Any]
    prefix: str  # of the names of classes

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
        """The config that a `config.json` describes. Raises `ValueError` for what no model here computes."""
        for name, plain in PLAIN.items():
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
        """What a message says of our settings and tensors, of theirs, which the reader can look up in the file."""

        def tensor(found: re.Match) -> str:
            try:
                return self.theirs(found[0])
            except KeyError:
                return found[0]

        message = re.sub(r"\b([a-z_]+)(?==)", lambda found: self.settings.get(found[1], found[1]), message)
        return re.sub(r"[\w.]+\.(weight|bias)\b", tensor, message)

    def config_json(self, config: BertConfig) -> dict[str, Any]:
        """What a `config.json` says of a config."""
        settings = {theirs: getattr(config, ours) for ours, theirs in self.settings.items()}
        return {"model_type": self.name, **settings, "sinusoidal_pos_embds": config.positions == "sinusoidal"}


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in names.items()}


# what `config.json` may say that would change what is computed, with the value under which it does not
PLAIN = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
BERT = Layout(
    name="bert",
    layers="encoder.layer.",
    layer=BERT_LAYER,
    tensors=EMBEDDINGS | BERT_HEADS,
    settings=BERT_SETTINGS,
    defaults={"hidden_dim": 3072},
    prefix="Bert",
)
DISTILBERT = Layout(
    name="distilbert",
    layers="transformer.layer.",
    layer=DISTILBERT_LAYER,
    tensors=EMBEDDINGS | DISTILBERT_HEADS,
    settings=DISTILBERT_SETTINGS,
    defaults={"hidden_dim": 3072, "n_layers": 6, "n_segments": 0, "head_dropout": 0.2},
    prefix="DistilBert",
)


def layout_of(config: BertConfig) -> Layout:
    """In which format a model is written: a DistilBERT has neither segments nor a pooler, and no other LayerNorm."""
    is_distilled = not config.n_segments and not config.has_pooler and config.layer_norm_eps == 1e-12
    return DISTILBERT if is_distilled else BERT
