"""Training text of a language model: files as documents, documents as one row of tokens, and training a tokenizer.

Shapes: b batch, s position.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece
import torch
from torch.utils.data import DataLoader, Sampler

from engine.batches import TextWindows
from engine.columns import USUAL, Columns, check_format, has_columns, read_texts
from engine.data import SEPARATOR, create_data
from tokenizer import Tokenizer
from utils import UserError, read_text


def read_documents(path: str, columns: Columns = USUAL) -> list[str]:
    """The documents of a file, each of one or more lines.

    In a file with columns each text is a document, and in a data file of the assignment each line, without its label.
    In any other text, blank lines separate the documents. Raises `UserError` if there is no document.
    """
    if has_columns(path):
        return read_texts(path, columns)
    check_format(path)
    text = read_text(path)
    lines = [line for line in text.split("\n") if line.strip()]
    if lines and all(SEPARATOR in line for line in lines):
        return [example.sentence for example in create_data(path, is_test=True, skip_empty=columns.skip_empty)]
    documents, block = [], []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            block.append(line.strip())
        elif block:
            documents.append("\n".join(block))
            block = []
    if not documents:
        raise UserError(f"{path} holds no text")
    return documents


def hold_out(documents: Sequence[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Documents to train on, and held-out documents, both in their order; a single document is cut near its end."""
    if len(documents) == 1:
        lines = documents[0].split("\n")
        if len(lines) < 2:
            raise UserError("the text has one line, of which nothing can be held out")
        cut = max(1, len(lines) - max(1, round(share * len(lines))))
        return ["\n".join(lines[:cut])], ["\n".join(lines[cut:])]
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    held = {*order[: min(len(documents) - 1, max(1, round(share * len(documents))))]}
    parts = [[text for place, text in enumerate(documents) if (place in held) == wanted] for wanted in (False, True)]
    return parts[0], parts[1]


def pack(documents: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """All documents as one row of token ids, each between bos and eos. A space joins the lines of a document."""
    texts = [" ".join(document.split("\n")) for document in documents]
    return [token for ids in tokenizer.encode_batch(texts, bos=True, eos=True) for token in ids]


class Passes(Sampler[list[int]]):
    """Batches of windows for one epoch of `steps` batches: pass after pass over all windows, each in a new order.

    The order depends only on the seed and the number of the pass, so a resumed run continues in the same order.
    """

    def __init__(self, windows: int, batch_size: int, steps: int, seed: int):
        self.windows, self.batch_size, self.steps, self.seed = windows, batch_size, steps, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        first = self.epoch * self.steps * self.batch_size  # counted over all epochs
        for start in range(first, first + self.steps * self.batch_size, self.batch_size):
            yield [self._drawn(place) for place in range(start, start + self.batch_size)]

    def _drawn(self, place: int) -> int:
        number, index = divmod(place, self.windows)
        if number != getattr(self, "_number", None):
            generator = torch.Generator().manual_seed(self.seed * 100_003 + number)
            self._number, self._order = number, torch.randperm(self.windows, generator=generator).tolist()
        return self._order[index]


def training_batches(
    token_ids: Sequence[int], tokenizer: Tokenizer, length: int, batch_size: int, steps: int, seed: int
) -> DataLoader:
    """A loader of `steps` batches per epoch: token_ids and targets, b s each. Only windows of full length are drawn.

    Raises `UserError` if the text is shorter than one window.
    """
    windows = TextWindows(token_ids, tokenizer.bos_id, length)
    whole = len(token_ids) // length
    if whole < 1:
        raise UserError(f"the text has {len(token_ids)} tokens, fewer than one window of {length}")
    batches = Passes(whole, batch_size, steps, seed)
    return DataLoader(windows, batch_sampler=batches, collate_fn=windows.collate_fn)


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> bytes:
    """Train a SentencePiece model like Llama's: BPE, bytes for unknown characters, `<0x00>` is id 3, digits are single.

    It runs in one thread, so that the same lines give the same bytes. Raises `UserError` if the text is too short for
    this size of vocabulary, or has too many different characters for it.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            required_chars="".join(map(chr, range(33, 127))),
            byte_fallback=True,
            split_digits=True,
            add_dummy_prefix=True,
            remove_extra_whitespaces=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:  # its text names source lines of SentencePiece
        most = re.search(r"<= (\d+)", str(error))
        what = f"at most {most[1]}" if most else "larger: each of the text's characters takes a piece"
        raise UserError(f"--vocab_size {vocab_size} does not fit the text; it must be {what}") from None
    return model.getvalue()
