"""The options of `bert.run` for a single text: hidden states, tokens for masks, whether one text follows another."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import torch
from torch import nn

from bert.heads import BertForMaskedLM, BertForPreTraining
from bert.load import check_pairs, load_bert, load_model, load_tokenizer
from bert.model import Bert
from bert.wordpiece import Encoding, WordPiece
from engine.storage import save_tensors
from utils import UserError, choose_device, short_repr

SHOWN_TOKENS = 40  # the rest is counted


def encode(args: Namespace) -> None:
    """Show the tokens of a text, or of two segments, and write their hidden states to a file."""
    encoder, tokenizer = load_bert(args.pretrained_model_path), load_tokenizer(args.pretrained_model_path)
    print(f"load model from {args.pretrained_model_path}")
    encoding = read(args, encoder, tokenizer)
    for id, segment in [*zip(encoding.ids, encoding.segment_ids, strict=True)][:SHOWN_TOKENS]:
        print(f"{id:6}  {segment}  {short_repr(tokenizer.pieces[id])[1:-1]}")
    if (rest := len(encoding.ids) - SHOWN_TOKENS) > 0:
        print(f"and {rest} more")
    ids, segments, (hidden, pooled) = ask(args, encoder, encoding)  # 1 s, 1 s, 1 s D, 1 D
    print(f"hidden states: {hidden.shape[1]} tokens of {hidden.shape[2]} numbers")
    parts = {"input_ids": ids, "segment_ids": segments, "hidden_states": hidden, "pooled": pooled}
    save_tensors(args.output, {name: part.clone().cpu() for name, part in parts.items() if part is not None})
    print(f"wrote {args.output}")


def fill_mask(args: Namespace) -> None:
    """The likeliest tokens at each [MASK], each seen by itself: the others stay masks."""
    model, tokenizer = with_head(args, BertForMaskedLM, "masked_lm", "masked tokens")
    encoding = read(args, model.encoder, tokenizer)
    places = [place for place, id in enumerate(encoding.ids) if id == tokenizer.mask_id]
    if not places:
        raise UserError("--text has no [MASK] to be filled" + " in the part that is read" * ("[MASK]" in args.text))
    *_, words = ask(args, model, encoding)  # 1 s v
    for number, place in enumerate(places, start=1):
        print(f"[MASK] {number} of {len(places)}")
        best = words[0, place].topk(min(args.top, words.shape[-1]))
        for score, id in zip(best.values.exp().tolist(), best.indices.tolist(), strict=True):
            piece = tokenizer.pieces[id] if id < len(tokenizer) else f"token {id}"
            print(f"{score:.4f}  {short_repr(piece)[1:-1]}")


def next_sentence(args: Namespace) -> None:
    """Whether --text_b follows --text, and how probable that answer is."""
    model, tokenizer = with_head(args, BertForPreTraining, "next_sentence", "next sentences")
    encoding = read(args, model.encoder, tokenizer)
    *_, (found, _) = ask(args, model, encoding)  # 1 2
    probability, answer = found[0].exp().max(dim=-1)
    print(f"{('IsNext', 'NotNext')[int(answer)]} {float(probability):.4f}")


# ------------------------------------------------------------------------------------------------------ parts


def with_head(args: Namespace, make: Callable[[Bert], nn.Module], part: str, what: str) -> tuple[nn.Module, WordPiece]:
    """The model with a trained head, and its tokenizer. Raises `UserError` for a directory without such a head.

    make: as `load_model`. part: the name of the head's module. what: its name for the user.
    """
    model, new = load_model(args.pretrained_model_path, make)
    if part in new:
        raise UserError(f"{args.pretrained_model_path} has no head for {what}; name a directory that has one")
    print(f"load model from {args.pretrained_model_path}")
    return model, load_tokenizer(args.pretrained_model_path)


def read(args: Namespace, encoder: Bert, tokenizer: WordPiece) -> Encoding:
    """The text, or both, cut to the limits of the model and of --max_sentence_len; prints a line if it cuts."""
    limit, second = encoder.config.max_seq_len, getattr(args, "text_b", None)
    most = limit if args.max_sentence_len is None else min(limit, args.max_sentence_len + (3 if second else 2))
    if second:
        check_pairs(encoder, args.pretrained_model_path)
    whole = tokenizer.encode_pair(args.text, second)
    encoding = tokenizer.encode_pair(args.text, second, most)
    if len(encoding.ids) < len(whole.ids):
        print(f"{len(whole.ids)} tokens, of which {len(encoding.ids)} are read")
    return encoding


def ask(args: Namespace, model: nn.Module, encoding: Encoding) -> tuple:
    """The ids and segments on the device, 1 s each, and the output of the model for them."""
    device = choose_device(args.device, args.use_gpu)
    ids, segments = (torch.tensor([each], device=device) for each in (encoding.ids, encoding.segment_ids))
    with torch.inference_mode():
        return ids, segments, model.to(device)(ids, segments, torch.ones_like(ids))  # [PAD] in a text is no padding
