"""BERT as one of the kinds of models that `engine.runs` fine-tunes (see `engine.families`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bert.config import BertConfig
from bert.heads import BertForSequenceClassification
from bert.load import SIZES, load_bert, load_tokenizer
from bert.model import Bert
from bert.wordpiece import WordPiece
from engine.data import Example
from engine.families import ModelFamily, part_of, require_shapes
from engine.plan import Plan
from engine.tasks import Sentences
from engine.weights import shape_errors_of


class BertSentences(Sentences):
    """As a BERT reads them: [CLS], sentence, [SEP]. What is longer than the model is cut; [SEP] stays.

    A [PAD] that a sentence writes out is taken for padding, which no token sees; transformers' tokenizer, with its
    mask, shows it. (Spans, pre-training and the options for single texts tell the two apart.)
    """

    def __init__(self, examples: Sequence[Example], tokenizer: WordPiece, max_seq_len: int):
        self.labels = [example.label for example in examples]
        self.sentences = [example.sentence for example in examples]
        self.pad_id = tokenizer.pad_id
        wanted = math.inf if tokenizer.max_len is None else tokenizer.max_len + 2
        most = min(max_seq_len, wanted)
        whole = [tokenizer.encode(sentence) for sentence in self.sentences]
        self.is_too_long = [min(len(ids), wanted) > max_seq_len for ids in whole]
        self.token_ids = [ids if len(ids) <= most else [*ids[: most - 1], tokenizer.sep_id] for ids in whole]


class BertFamily(ModelFamily):
    """The models of `bert/model.py`, from Hugging Face's directories. The plan's tokenizer is the directory's."""

    name = "bert"

    def load(self, plan: Plan) -> tuple[Bert, WordPiece]:
        encoder, tokenizer = load_bert(plan.checkpoint.path), load_tokenizer(plan.checkpoint.path)
        tokenizer.max_len = plan.max_sentence_len
        return encoder, tokenizer

    def reopen(self, saved: dict[str, Any], path: str) -> tuple[Bert, WordPiece]:
        config = BertConfig(**saved["model_config"]["model_args"])
        require_shapes(shape_errors_of(part_of(saved["model"], "encoder"), config, Bert, SIZES))
        tokenizer = WordPiece.from_bytes(saved["tokenizer"].numpy().tobytes(), path)
        tokenizer.max_len = saved["max_sentence_len"]
        return Bert(config), tokenizer

    def make_classifier(
        self,
        settings: dict[str, Any],
        pretrained: Bert,
        tokenizer: WordPiece,
        label_names: Sequence[str],
        option: str = "finetune",
    ) -> BertForSequenceClassification:
        model = BertForSequenceClassification(pretrained, settings["num_labels"])
        model.dropout.p = settings["hidden_dropout_prob"]
        return model

    def encode(
        self, model: BertForSequenceClassification, tokenizer: WordPiece, examples: Sequence[Example]
    ) -> BertSentences:
        return BertSentences(examples, tokenizer, model.encoder.config.max_seq_len)


FAMILY = BertFamily()
