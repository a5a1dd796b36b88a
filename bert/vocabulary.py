"""Train a WordPiece vocabulary on text, with the tokenizers library.

    python -m bert.vocabulary --text F [F ...] --out DIR/vocab.txt [--vocab_size 4096] [--cased]

Beside vocab.txt lies tokenizer_config.json, which says whether it is cased: every command that takes a directory of a
BERT reads both, and so does transformers. A file that is there already is never overwritten. How a vocabulary is
learned, and that the library counts pairs where the paper asks for the likelihood, is told in `bert/tokenizers.md`.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from bert.wordpiece import CONTINUED, SPECIAL, WordPiece
from convert.directory import TOKENIZER_CONFIG, VOCABULARY
from engine.programs import ArgumentParser, check_new, input_file, run_main
from utils import UserError

LEAST_SEEN = 2  # a rarer pair becomes no piece: a pair that was seen once is no evidence of other texts


def train_vocabulary(lines: Iterable[str], vocab_size: int, lower_case: bool = True) -> WordPiece:
    """A vocabulary of exactly this size: special tokens ([PAD] is id 0), characters, then pieces as they were learned.

    A character has a piece of its own and, where it was seen inside of a word, one with ## in front. The same lines
    give the same vocabulary, whatever the process. Raises `UserError` for lines without a word, a size that has no room
    for their characters, or one that is larger than what can be learned of them.
    """
    lines = list(lines)  # which are read twice
    # The library numbers the characters inside of words in the order of a hash table, another one in each process, and
    # of two pairs that are equally frequent takes that of the lower numbers. So a first training, without room for any
    # pair, says which characters there are; the second is given them in order, as if they were special tokens.
    alphabet = {*_learn(lines, 0, SPECIAL, lower_case)} - {*SPECIAL}
    if not alphabet:
        raise UserError("the text has no words to learn a vocabulary of")
    given = [*SPECIAL, *sorted(alphabet, key=lambda piece: (piece.startswith(CONTINUED), piece))]
    does_not_fit = f"--vocab_size {vocab_size} does not fit the text; it must be"
    if vocab_size < len(given):
        raise UserError(f"{does_not_fit} at least {len(given)}, for each of the text's characters takes a piece or two")
    # Each pair that is merged makes the text shorter, and normalising makes it at most four times as long. The library
    # sets memory aside for as many pieces as it is asked for, and ends the process where there is not so much.
    most = len(given) + 4 * sum(map(len, lines))
    pieces = _learn(lines, min(vocab_size, most), given, lower_case)
    if len(pieces) < vocab_size:
        raise UserError(f"{does_not_fit} at most {len(pieces)}: no other piece is seen {LEAST_SEEN} times")
    return WordPiece(pieces, lower_case)


def _learn(lines: Sequence[str], vocab_size: int, given: Sequence[str], lower_case: bool) -> list[str]:
    """The library's vocabulary of so many pieces, or more where there are more characters, which begins as given."""
    library = tokenizers()
    model = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    model.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)  # both do what `basic.py` does
    model.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=LEAST_SEEN, special_tokens=[*given],
        continuing_subword_prefix=CONTINUED, show_progress=False,
    )  # fmt: skip
    try:
        model.train_from_iterator(lines, trainer)
    except UnicodeEncodeError:
        raise UserError("the text is not UTF-8: it holds half of a surrogate pair") from None
    ids = model.get_vocab(with_added_tokens=False)
    return sorted(ids, key=ids.get)


def tokenizers() -> ModuleType:
    """The library that trains. Raises `UserError` where it is not installed."""
    try:
        return importlib.import_module("tokenizers")
    except ModuleNotFoundError:
        raise UserError("training a WordPiece vocabulary needs a package: pip install tokenizers") from None


# ---------------------------------------------------------------------------------------------------- the command


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m bert.vocabulary", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--text", nargs="+", required=True, metavar="FILE", help="texts, or data files, whose labels are dropped")
    add("--out", required=True, metavar="DIR/vocab.txt", help="the vocabulary")
    add("--vocab_size", type=int, default=4096, help="how many pieces, special tokens and characters included")
    add("--cased", action="store_true", help="tell case and accents apart")
    return parser.parse_args(argv)


def check_args(args: Namespace) -> None:
    """Raises `UserError` naming the flag; turns the names of files into paths."""
    if not len(SPECIAL) < args.vocab_size < 2**31:
        raise UserError(f"--vocab_size {args.vocab_size}: must be from {len(SPECIAL) + 1} to 2^31 - 1")
    args.text = [input_file("--text", name) for name in args.text]
    for index, path in enumerate(args.text):
        if Path(path).resolve() in {Path(other).resolve() for other in args.text[:index]}:
            raise UserError(f"--text names {path} twice, so that its words would count twice")
    args.out = Path(args.out)
    if args.out.name != VOCABULARY:
        raise UserError(f"--out {args.out}: the name must be {VOCABULARY}, as in every directory of a BERT")
    for path in (args.out, args.out.with_name(TOKENIZER_CONFIG)):
        check_new(path, "--out")
    tokenizers()


def main() -> None:
    args = get_args()
    check_args(args)
    from engine.text.runs import read_documents

    documents = [document for path in args.text for document in read_documents(path)]
    vocabulary = train_vocabulary(documents, args.vocab_size, lower_case=not args.cased)
    vocabulary.save(args.out.parent)
    kind = "uncased" if vocabulary.lower_case else "cased"
    print(f"save the vocabulary to {args.out} ({len(vocabulary)} pieces, {kind}, of {len(documents)} documents)")


if __name__ == "__main__":
    sys.exit(run_main(main))
