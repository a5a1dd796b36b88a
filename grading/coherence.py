"""Whether a generated text is one: bits per character by a TinyStories checkpoint, distinct trigrams, known words.

python -m grading.coherence --checkpoint X.pt --tokenizer X.model --calibrate    once for each checkpoint
python -m grading.coherence --checkpoint X.pt --tokenizer X.model FILE ...       verdicts on texts
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grading.editions import LABEL_NAMES, TEXT_PROMPT
from grading.judge import BROKEN, COHERENT, NOT_JUDGED, UNCLEAR, TextJudge, Verdict, distinct_trigrams
from grading.programs import (
    ROOT,
    GradingError,
    GradingParser,
    atomic_write,
    check_writable,
    find_asset,
    find_own,
    read_text,
    run_main,
    whole_number,
)

if TYPE_CHECKING:
    from grading.calibration_texts import Sample
    from grading.language_model import LanguageModel

VERDICTS = (COHERENT, BROKEN, UNCLEAR, NOT_JUDGED)
LEAST_WORDS = 5  # after the prompt
# Below the first, a text is broken; below the second, a person looks at it. Good texts of a small model repeat
# sentences (0.22 at temperature 0), and have names and words that no list has.
TRIGRAMS, KNOWN = (0.2, 0.5), (0.5, 0.7)
GOOD, EACH_BROKEN = 200, 20  # samples of a split
MOST_COHERENT = 0.05  # of the broken samples
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
WORD_LISTS = ("data/films-train.txt", *(f"checkpoints/{name}.json" for name in ("story_words", "film_words", "names")))


class Coherence(NamedTuple):
    """The verdict on a text, one of `VERDICTS`, and its figures.

    bits: per character of the continuation; None without a model. trigrams: the share of the trigrams of words that
    are distinct. known: the share of the words that are in a list. reason: one line.
    """

    verdict: str
    bits: float | None
    trigrams: float
    known: float
    reason: str


@dataclass(frozen=True)
class Limits:
    """Bits per character up to which a text is coherent, and above which it is broken, for one checkpoint."""

    sha256: str
    coherent: float
    broken: float
    seed: int


@dataclass(frozen=True)
class CoherenceJudge:
    """words: those that count as known. model, limits: None judges by words alone."""

    words: frozenset[str]
    model: LanguageModel | None = None
    limits: Limits | None = None

    @classmethod
    def load(
        cls, checkpoint: str | os.PathLike, tokenizer: str | os.PathLike, data_dir: str | os.PathLike | None = None
    ) -> CoherenceJudge:
        """Raises `GradingError` if a file is absent or damaged, or the checkpoint is not calibrated."""
        from grading.language_model import LanguageModel

        model, path = LanguageModel.load(checkpoint, tokenizer), limits_path(checkpoint)
        try:
            limits = Limits(**json.loads(read_text(path))["limits"])
        except (ValueError, TypeError, KeyError):
            fault = "is damaged" if path.is_file() else "does not exist"
            raise GradingError(f"{path} {fault}; python -m grading.coherence --calibrate writes it") from None
        if limits.sha256 != digest(checkpoint):
            raise GradingError(f"{path} is of another {Path(checkpoint).name}; calibrate again")
        return cls(known_words(data_dir), model, limits)


def limits_path(checkpoint: str | os.PathLike) -> Path:
    """The file of a checkpoint's limits, beside it."""
    return Path(f"{find_asset(checkpoint) or checkpoint}.coherence.json")


def digest(checkpoint: str | os.PathLike) -> str:
    return hashlib.sha256(Path(find_asset(checkpoint)).read_bytes()).hexdigest()


def words_of(text: str) -> list[str]:
    return [word.lower().replace("’", "'") for word in WORD.findall(text)]


@lru_cache
def known_words(data_dir: str | os.PathLike | None = None) -> frozenset[str]:
    """The words of the bundled data, and of the course's data in a folder: some 2,000 and 29,000."""
    paths = [find_own(name) for name in WORD_LISTS]
    course = [f"{name}-{split}.txt" for name in LABEL_NAMES for split in ("train", "dev")]
    paths += [Path(data_dir or ROOT / "data", name) for name in course]
    return frozenset(word for path in paths if path and path.is_file() for word in words_of(read_text(path)))


def prompt_end(text: str, prompt: str) -> int | None:
    """Where a text goes on after its prompt, white space aside; None if it does not begin with it."""
    found = re.match(r"\s*" + r"\s+".join(map(re.escape, prompt.split())), text)
    return found and found.end()


def judge_text(text: str, prompt: str, judge: CoherenceJudge | None = None, *, is_drawn: bool = False) -> Coherence:
    """Judge a student's text, its prompt included. judge: None judges by words alone.

    is_drawn: the text was drawn at temperature 1. Then it is broken if it is no text at all, and else not judged.
    """
    judge, start = judge or CoherenceJudge(known_words()), prompt_end(text, prompt)
    begin, bits = start or 0, None
    words = words_of(text[begin:])
    distinct = distinct_trigrams(words)
    known = sum(word in judge.words for word in words) / max(1, len(words))
    if judge.model and text[begin:].strip():
        bits = judge.model.bits(text.rstrip(), begin)
    faults, doubts = [], ["it does not begin with the prompt"] if start is None else []
    if len(words) < LEAST_WORDS:
        faults.append(f"{len(words)} words after the prompt")
    elif known < KNOWN[1]:
        (faults if known < KNOWN[0] else doubts).append(f"{known:.0%} of its words are known")
    if not is_drawn and distinct < TRIGRAMS[1]:
        (faults if distinct < TRIGRAMS[0] else doubts).append(f"{distinct:.0%} of its trigrams are distinct")
    if not is_drawn and bits is not None and bits > judge.limits.coherent:
        (faults if bits > judge.limits.broken else doubts).append(f"{bits:.2f} bits a character")
    reasons = faults + doubts
    if faults:
        verdict = BROKEN
    elif is_drawn or (bits is None and not doubts):
        verdict, reasons = NOT_JUDGED, ["drawn at temperature 1" if is_drawn else "no checkpoint judges it", *reasons]
    else:
        verdict = UNCLEAR if doubts else COHERENT
    return Coherence(verdict, bits, distinct, known, "; ".join(reasons))


def make_judge(checkpoint: str, tokenizer: str) -> TextJudge:
    """What `python -m grading` asks of each text at temperature 0. Raises as `CoherenceJudge.load` does."""
    import torch

    if not tokenizer:
        raise GradingError("judge.tokenizer is needed beside judge.checkpoint")
    torch.set_num_threads(1)  # the processes share the processors
    judge = CoherenceJudge.load(checkpoint, tokenizer)

    def verdict(text: str, prompt: str) -> Verdict:
        found = judge_text(text, prompt, judge)
        figures = {"bits a character": found.bits, "distinct trigrams": found.trigrams, "known words": found.known}
        return Verdict(found.verdict, {name: value for name, value in figures.items() if value is not None})

    return verdict


# ------------------------------------------------------------------------------------------------- calibration


def calibrate(model: LanguageModel, sha256: str, seed: int) -> tuple[CoherenceJudge, list[Sample]]:
    """A judge with limits from one half of the samples, and the other half. Raises `GradingError` if none separate.

    Broken is what has more bits than the lowest twentieth of the broken samples, loops aside. Coherent is up to a
    quarter of the way, as a ratio, from the largest value of a good sample to that.
    """
    from grading.calibration_texts import WRITTEN, Sample, TextWriter

    writer = TextWriter(model, seed)
    (good, broken), (held_good, held_broken) = ((good, writer.broken(EACH_BROKEN, good))
                                                for good in (writer.good(GOOD) for _ in range(2)))  # fmt: skip
    by_people = [Sample("by a person", f"{TEXT_PROMPT} {text}", TEXT_PROMPT) for text in WRITTEN]
    highest = max(model.bits(one.text, len(one.prompt)) for one in good + by_people)
    words = CoherenceJudge(known_words())
    other = [one for one in broken if judge_text(one.text, one.prompt, words).trigrams >= TRIGRAMS[1]]
    lowest = sorted(model.bits(one.text, len(one.prompt)) for one in other)[len(other) // 20]
    if lowest < 1.2 * highest:
        raise GradingError(
            f"this checkpoint cannot judge texts: a good one has {highest:.2f} bits a character, a broken one "
            f"{lowest:.2f}; take a TinyStories checkpoint, such as stories42M.pt"
        )
    limits = Limits(sha256, round(highest**0.75 * lowest**0.25, 3), round(lowest, 3), seed)
    return CoherenceJudge(words.words, model, limits), held_good + held_broken


def count_verdicts(judge: CoherenceJudge, samples: Iterable[Sample]) -> dict[str, Counter[str]]:
    """How often each verdict is given, for each kind of samples."""
    table: dict[str, Counter[str]] = {}
    for one in samples:
        table.setdefault(one.kind, Counter())[judge_text(one.text, one.prompt, judge).verdict] += 1
    return table


def report(table: dict[str, Counter[str]]) -> bool:
    """Print the verdicts on the held-out samples; whether they are as good as is asked for."""
    print(f"{'held out':28}" + "".join(f"{verdict:>12}" for verdict in VERDICTS[:3]))
    sums = {True: Counter(), False: Counter()}
    for kind, counts in table.items():
        sums[kind.startswith("good")] += counts
        print(f"{kind:28}" + "".join(f"{counts[verdict]:>12}" for verdict in VERDICTS[:3]))
    good, broken = sums[True], sums[False]
    taken, share = good[BROKEN], 1 - broken[COHERENT] / broken.total()
    print(f"good texts called broken: {taken} of {good.total()} (allowed: 0)")
    print(f"broken texts not called coherent: {share:.1%} of {broken.total()} (asked for: {1 - MOST_COHERENT:.0%})")
    return taken == 0 and share >= 1 - MOST_COHERENT


# ---------------------------------------------------------------------------------------------------- the program


def main() -> int:
    parser = GradingParser(prog="python -m grading.coherence", description="Judge whether generated texts are texts.")
    parser.add_argument("files", nargs="*", metavar="FILE", help="texts to judge, with the prompt that they begin with")
    parser.add_argument("--checkpoint", help="a TinyStories checkpoint")
    parser.add_argument("--tokenizer", help="its SentencePiece model")
    parser.add_argument("--prompt", default=TEXT_PROMPT, help="what the texts continue")
    parser.add_argument("--data", metavar="DIR", help="the course's data, whose words are known as well")
    parser.add_argument("--drawn", action="store_true", help="the texts were drawn at temperature 1")
    parser.add_argument("--calibrate", action="store_true", help="write the checkpoint's limits beside it")
    parser.add_argument("--seed", type=whole_number, default=1, help="of the texts that --calibrate writes")
    args = parser.parse_args()
    if args.calibrate or args.checkpoint or args.tokenizer:
        if not (args.checkpoint and args.tokenizer):
            raise GradingError("give --checkpoint and --tokenizer together")
    elif not args.files:
        raise GradingError("give a text to judge, or --calibrate (see --help)")
    if args.calibrate:
        return run_calibration(args)
    judge = CoherenceJudge(known_words(args.data))
    if args.checkpoint:
        judge = CoherenceJudge.load(args.checkpoint, args.tokenizer, args.data)
    found = [judge_text(read_text(path), args.prompt, judge, is_drawn=args.drawn) for path in args.files]
    print(f"{'verdict':12}{'bits':>6}{'trigrams':>10}{'known':>7}  file")
    for path, one in zip(args.files, found, strict=True):
        bits = "" if one.bits is None else f"{one.bits:.2f}"
        print(f"{one.verdict:12}{bits:>6}{one.trigrams:>10.2f}{one.known:>7.2f}  {path}: {one.reason or 'no fault'}")
    return int(any(one.verdict in (BROKEN, UNCLEAR) for one in found))


def run_calibration(args: argparse.Namespace) -> int:
    """Write the limits only if the held-out samples are judged well enough."""
    import torch

    from grading.language_model import LanguageModel

    torch.set_num_threads(1)  # threads only wait for one another in products as small as these
    model, path = LanguageModel.load(args.checkpoint, args.tokenizer), limits_path(args.checkpoint)
    check_writable(path, "--calibrate:")
    judge, held_out = calibrate(model, digest(args.checkpoint), args.seed)
    table = count_verdicts(judge, held_out)
    coherent, broken = judge.limits.coherent, judge.limits.broken
    print(f"seed {args.seed}: coherent up to {coherent}, broken above {broken} bits a character")
    if not report(table):
        print("not calibrated: the checkpoint does not tell good texts from broken ones well enough")
        return 1
    with atomic_write(path) as file:
        file.write(json.dumps({"limits": asdict(judge.limits), "held out": table}, indent=1).encode() + b"\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
