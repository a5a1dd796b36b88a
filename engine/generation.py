"""`--option generate`: the text after one prompt at several temperatures, or after each prompt of a file."""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.columns import has_columns
from engine.files import temperature_path, texts_to_write
from engine.reports import load_llama, naming_the_flag, opened_output, print_count
from engine.stream import shown_before_waiting
from engine.tables import TableWriter, names_of_rows, read_rows
from utils import atomic_write, short_repr, warn

if TYPE_CHECKING:
    import torch

    from engine.plan import ComputeSettings
    from llama import Llama
    from tokenizer import Tokenizer

SAMPLING = ("top_k", "top_p", "epsilon", "min_p", "repetition_penalty")
NO_CUDA_GRAPHS = (
    "--cuda_graphs: decoding through CUDA graphs was never tried on a GPU and is gone; "
    "the text is generated without them"
)
OUTPUT_FLAGS = {0.0: "--generated_sentence_low_temp_out", 1.0: "--generated_sentence_high_temp_out"}
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
COLUMNS_OF_TEXTS = ("prompt", "temperature", "text")  # of --output
GATHERED = 50  # batches of prompts to collect before prompts of equal length are decoded together


class PromptDecoder(NamedTuple):
    """Continues prompts. generator: decodes. search: replaces the generator at temperature 0; None: it does not.

    stop_ids: the tokens that end a text; empty for the model of a checkpoint.
    """

    llama: Llama
    tokenizer: Tokenizer
    generator: Any
    search: Any
    max_new_tokens: int
    settings: dict[str, Any]
    stop_ids: tuple[int, ...]

    @classmethod
    def of(cls, args: Namespace, compute: ComputeSettings, texts: int) -> PromptDecoder:
        """Load the model and choose its decoder. texts: how many texts will be decoded one after the other."""
        from engine.runs import generator_of, search_of

        if args.cuda_graphs:
            warn(NO_CUDA_GRAPHS)
        llama, tokenizer = load_llama(args, compute)
        generator = generator_of(llama, compute, texts * args.max_new_tokens)
        with naming_the_flag():
            search = search_of(llama, generator, args.beam, args.contrastive)
        settings = {name: getattr(args, name) for name in SAMPLING}
        stop_ids = () if args.ignore_eos else getattr(llama, "stop_ids", ())
        return cls(llama, tokenizer, generator, search, args.max_new_tokens, settings, stop_ids)

    def continued(self, idx: torch.Tensor, temperature: float, **how: Any) -> list[list[int]]:
        """Continue each row, to its end. idx: b s -> b rows of ids. how: further arguments of `Llama.generate`"""
        length = idx.shape[1]
        return [up_to_stop(row, length, self.stop_ids) for row in self._rows(idx, temperature, how).tolist()]

    def _rows(self, idx: torch.Tensor, temperature: float, how: dict[str, Any]) -> torch.Tensor:
        from engine.sampling import Sampling, chooser

        if self.search is not None and temperature == 0.0:
            penalty = self.settings["repetition_penalty"]
            how = {"stop_ids": self.stop_ids, "repetition_penalty": penalty}
            return self.search.generate(idx, self.max_new_tokens, **how)
        sampling = Sampling(temperature, **self.settings)
        choose = None if sampling.is_plain else chooser(sampling)
        how |= {"temperature": temperature, "choose": choose, "stop_ids": self.stop_ids}
        return self.generator.generate(idx, self.max_new_tokens, **how)


def up_to_stop(ids: list[int], length: int, stop_ids: Collection[int]) -> list[int]:
    """The ids of a text, whose prompt has `length` tokens, up to the token that ends it, which may be repeated."""
    end = next((place for place in range(length, len(ids)) if ids[place] in stop_ids), len(ids))
    return ids[: end + 1]


def generate(
    llama: Llama, tokenizer: Tokenizer, prompt: str, max_new_tokens: int = 75, temperature: float = 0.0
) -> str:
    """The prompt with the model's continuation.

    llama, tokenizer: as `families.load_llama` returns them. At a temperature above 0, tokens are drawn with PyTorch's
    global random generator.
    """
    import torch

    ids = torch.tensor([tokenizer.encode(prompt, bos=True, eos=False)], device=next(llama.parameters()).device)  # 1 s
    stop_ids = getattr(llama, "stop_ids", ())  # a directory names some, a checkpoint none
    return tokenizer.decode(llama.generate(ids, max_new_tokens, temperature, stop_ids=stop_ids)[0].tolist())


def continue_prompt(args: Namespace, compute: ComputeSettings) -> None:
    """Continue the prompt at temperature 0, at 1 and at `--temperature`; print texts as they grow; write every text."""
    import torch

    decoder = PromptDecoder.of(args, compute, 2 if args.num_samples == 1 else 1)  # several samples are decoded together
    tokenizer = decoder.tokenizer
    ids = tokenizer.encode(args.prompt, bos=True, eos=False)
    warn_of_changes(args.prompt, ids, tokenizer, decoder.llama.config.max_seq_len)
    prompt_ids = torch.tensor([ids], device=compute.device)  # 1 s
    low, *samples = texts_to_write(args)
    outputs: dict[float, list[Path | None]] = {0.0: [low], 1.0: samples}
    if args.temperature is not None:
        outputs[args.temperature] = [temperature_path(args)]
    for temperature, paths in outputs.items():
        print(f"Temperature is {temperature}")
        stream = TextStream(tokenizer, prompt_ids[0].tolist())
        on_token = stream if len(paths) == 1 else None
        rows = decoder.continued(prompt_ids.expand(len(paths), -1), temperature, on_token=on_token)
        sentences = [tokenizer.decode(ids) for ids in rows]
        print("\n".join([sentences[0].removeprefix(stream.shown), *sentences[1:]]))
        print("---------------")
        for path, sentence in zip(paths, sentences, strict=True):
            if path is None:
                print(
                    f"Not written: the prompt is not the assignment's, and {OUTPUT_FLAGS[temperature]} names no file."
                )
                continue
            with atomic_write(path) as file:
                file.write(sentence)
            print(f"Wrote generated sentence to {path}.")


def continue_each(args: Namespace, compute: ComputeSettings) -> None:
    """Continue every prompt of a file or of standard input; write one line of JSON for each, in the same order."""
    prompts, rows = read_rows(args.prompt_file, args.columns)
    is_table = args.output is not None and has_columns(args.output)
    kept = rows if is_table and rows else ()
    beside = [{name: row[name] for name in row if name != args.columns.text} for row in kept]
    names = [*COLUMNS_OF_TEXTS, *names_of_rows(beside, COLUMNS_OF_TEXTS, args.prompt_file)]
    decoder, temperature = PromptDecoder.of(args, compute, args.batch_size), args.temperature or 0.0
    with opened_output(args.output) as file:
        table, left = TableWriter(file, args.output if is_table else "lines.jsonl", names), iter(beside)
        count = 0
        for prompt, text in texts_of(args, decoder, prompts, temperature, compute):
            table.write({"prompt": prompt, "temperature": temperature, "text": text, **next(left, {})})
            count += 1
            if not getattr(file, "has_reader", True):  # the program that reads the output has ended
                break
    print_count(count, "texts", args.output)


def texts_of(
    args: Namespace,
    decoder: PromptDecoder,
    prompts: Iterable[str | None],
    temperature: float,
    compute: ComputeSettings,
) -> Iterator[tuple[str, str]]:
    """Yield each prompt with its text; prompts are read while they arrive, None says that none has arrived yet."""
    waiting: list[str] = []
    too_long = 0
    for prompt in itertools.chain(shown_before_waiting(prompts), [None]):
        if prompt is not None:
            waiting.append(prompt)
            if len(waiting) < GATHERED * args.batch_size:
                continue
        ids = [decoder.tokenizer.encode(each, bos=True, eos=False) for each in waiting]
        too_long += sum(len(each) > decoder.llama.config.max_seq_len for each in ids)
        yield from zip(waiting, decode_all(decoder, ids, temperature, args.batch_size, compute), strict=True)
        waiting = []
    if too_long:
        limit = decoder.llama.config.max_seq_len
        which = "one prompt is" if too_long == 1 else f"{too_long} prompts are"
        warn(f"{which} longer than max_seq_len={limit} tokens; the model sees the last {limit}")


def decode_all(
    decoder: PromptDecoder, prompts: list[list[int]], temperature: float, batch_size: int, compute: ComputeSettings
) -> list[str]:
    """The texts for prompts of any length. Prompts of equal length are decoded together, so none is padded."""
    import torch

    texts = [""] * len(prompts)
    for batch in batches_of_one_length(prompts, batch_size):
        idx = torch.tensor([prompts[number] for number in batch], device=compute.device)  # b s
        for number, row in zip(batch, decoder.continued(idx, temperature), strict=True):
            texts[number] = decoder.tokenizer.decode(row)
    return texts


def batches_of_one_length(prompts: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    """Batches of prompts of equal length, as indices into `prompts`."""
    by_length: dict[int, list[int]] = {}
    for number, ids in enumerate(prompts):
        by_length.setdefault(len(ids), []).append(number)
    for _, numbers in sorted(by_length.items()):
        for first in range(0, len(numbers), batch_size):
            yield numbers[first : first + batch_size]


def warn_of_changes(prompt: str, ids: list[int], tokenizer: Tokenizer, limit: int) -> None:
    """Warn if the model does not continue exactly the given prompt: it is too long, or the tokenizer changes it."""
    if len(ids) > limit:
        warn(f"--prompt is {len(ids)} tokens long, of which the model sees the last {limit} (max_seq_len)")
    if tokenizer.max_len is None and (text := tokenizer.decode(ids)) != prompt:
        warn(f"the tokenizer changes --prompt, white space for instance; the text begins {short_repr(text)}")


class TextStream:
    """Prints a text while its tokens arrive. shown: the part that is printed already, a beginning of the final text."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int]):
        self.tokenizer = tokenizer
        self.ids = ids
        self.shown = ""

    def __call__(self, new_ids: torch.Tensor) -> None:
        """Print the text that a new token completes. new_ids: 1 1"""
        self.ids.append(int(new_ids))
        text = self.tokenizer.decode(self.ids)
        # a `tokenizer.json` reads byte tokens in a row anew, from the first, if they are no text: wait for their end
        if not hasattr(self.tokenizer, "sp_model") and BYTE_PIECE.fullmatch(self.tokenizer.piece(self.ids[-1])):
            return
        # a character of several byte tokens is complete only with its last byte: wait for it
        if text.startswith(self.shown) and not text.endswith("\ufffd"):
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text
