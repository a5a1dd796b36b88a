"""Beam search and contrastive search against searches that are slow and plain: one text, everything computed anew."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import asset, choosing, random_llama
from error_helpers import TEXT_FLAGS

from advanced.decoding import Beams, BeamSearch, ContrastiveSearch
from engine import runs
from engine.arguments import check_args
from engine.decoding import Decoder, continue_texts, penalize_repeats
from engine.flags import get_args
from engine.programs import NeedsCausal
from engine.weights import load_llama_model
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError

PROMPTS = [[1, 45, 299, 7, 7, 120, 33], [1, 9], [1, 260, 14, 3, 88], [1]]
NEW = 12


def causal(seed: int = 0, **changes) -> Llama:
    return random_llama(seed, gain=8.0, attention="causal", **changes)


def prompts(rows: int = 3, seed: int = 0, vocab: int = 300) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, 5), generator=torch.Generator().manual_seed(seed))


def stop_tokens(model: Llama, idx: torch.Tensor, count: int = 3) -> list[int]:
    """Some that the likeliest texts hold, so that searches meet them."""
    found = BeamSearch(Decoder(model), 4).generate(idx, NEW)[:, idx.shape[1] + 2 :: 4].flatten().tolist()
    return sorted(set(found))[:count]


@torch.no_grad()
def log_probs(model: Llama, ids: list[int]) -> list[float]:
    """Of each token after a text, nothing being kept from earlier."""
    seen = torch.tensor([ids[-model.config.max_seq_len :]])
    return model(seen)[0][0, -1].double().log_softmax(-1).tolist()


def slow_beams(model: Llama, prompt: list[int], beams: int, new: int, alpha: float, stops: list[int]) -> list[int]:
    """What advanced/decoding.py says of a beam search, with lists."""
    going_on, ended = [(0.0, [])], []
    for _ in range(new):
        candidates = [
            (score + each, [*text, token])
            for score, text in going_on
            for token, each in enumerate(log_probs(model, prompt + text))
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        ended += [(score, text) for score, text in candidates[:beams] if text[-1] in stops]
        going_on = [(score, text) for score, text in candidates if text[-1] not in stops][:beams]
        if len(ended) >= beams:
            break
    complete = ended if len(ended) >= beams else ended + going_on
    return max(complete, key=lambda found: found[0] / len(found[1]) ** alpha)[1]


def without_repeats(new: list[int], stops: list[int]) -> list[int]:
    """Up to the first stop token."""
    first = next((place for place, token in enumerate(new) if token in stops), len(new))
    assert len(set(new[first:])) <= 1  # which is repeated
    return new[: first + 1]


# ------------------------------------------------------------------------------------------------- beam search


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
@pytest.mark.parametrize(("attention", "max_seq_len"), [("causal", 64), ("causal", 9), ("bidirectional", 64)])
def test_beams_are_those_of_the_slow_search(attention: str, max_seq_len: int, alpha: float):
    model = random_llama(3, gain=8.0, attention=attention, max_seq_len=max_seq_len, vocab_size=60)
    idx = prompts(vocab=60)
    for beams, stops in ((2, []), (4, stop_tokens(model, idx)), (3, [stop_tokens(model, idx)[0]])):
        texts = BeamSearch(Decoder(model), beams, alpha).generate(idx, NEW, stop_ids=stops)
        slow = [slow_beams(model, prompt, beams, NEW, alpha, stops) for prompt in idx.tolist()]
        assert [without_repeats(text, stops) for text in texts[:, 5:].tolist()] == slow
        assert texts.shape[1] == 5 + max(map(len, slow))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("stops", [[], [2]])
def test_enough_beams_find_the_best_of_all_texts(stops: list[int], alpha: float):
    """Of five tokens there are 125 texts of length 3, fewer where one ends them."""

    def complete(model: Llama, prompt: list[int], new: list[int], total: float) -> list[tuple[float, list[int]]]:
        if len(new) == 3 or (new and new[-1] in stops):
            return [(total / len(new) ** alpha, new)]
        following = enumerate(log_probs(model, prompt + new))
        return [text for token, each in following for text in complete(model, prompt, [*new, token], total + each)]

    lengths = set()
    for seed in range(6):
        model, prompt = causal(seed, vocab_size=5), [1, 4, 0]
        found = (
            BeamSearch(Decoder(model), 25, alpha).generate(torch.tensor([prompt]), 3, stop_ids=stops)[0, 3:].tolist()
        )
        texts = complete(model, prompt, [], 0.0)
        assert found == max(texts)[1] and len(texts) == (1 + 4 + 16 * 5 if stops else 125)
        lengths.add(len(found))
    assert len(lengths) == (2 if stops and alpha == 1.0 else 1), lengths


def test_one_beam_and_contrast_without_a_penalty_or_a_choice_are_greedy_decoding():
    for model in (causal(), causal(max_seq_len=9), random_llama(gain=8.0)):
        searches = [BeamSearch(Decoder(model), 1)]
        if model.config.is_causal:
            searches += [ContrastiveSearch(model, *how) for how in ((0.0, 5), (0.7, 1), (0.0, 1))]
        for stops in ([], stop_tokens(model, prompts())):
            expected = continue_texts(model, prompts(), NEW, temperature=0.0, stop_ids=stops)
            for search in searches:
                assert torch.equal(search.generate(prompts(), NEW, stop_ids=stops), expected)
    text = ContrastiveSearch(causal(), 0.6, 4).generate(prompts(), NEW)
    assert not torch.equal(text, causal().generate(prompts(), NEW, temperature=0.0))


def test_beams_find_likelier_texts_than_greedy_decoding():
    model = causal()
    greedy, best = model.generate(prompts(8), NEW, 0.0), BeamSearch(Decoder(model), 5).generate(prompts(8), NEW)
    gains = []
    for texts in zip(greedy.tolist(), best.tolist(), strict=True):
        ours = [sum(log_probs(model, text[:end])[text[end]] for end in range(5, 5 + NEW)) for text in texts]
        gains.append(ours[1] - ours[0])
    assert sum(gains) > 1.0 and sum(gain > 1e-3 for gain in gains) >= 4


def test_a_cache_changes_no_beam():
    for model in (causal(), causal(max_seq_len=9), causal(n_kv_heads=2)):
        texts = [
            BeamSearch(Decoder(model), 4).generate(prompts(), 30, use_cache=use_cache) for use_cache in (True, False)
        ]
        assert torch.equal(*texts)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_beams_are_those_of_transformers(alpha: float):
    """With early_stopping=True, which ends a search when N texts have ended; its length_penalty is alpha."""
    to_hf = pytest.importorskip("reference").to_hf  # which needs transformers
    for seed in range(3):
        model, idx = causal(seed), prompts(seed=seed)
        hf = to_hf(model.state_dict(), model.config)
        for beams, stops in ((2, []), (4, []), (3, stop_tokens(model, idx)), (5, stop_tokens(model, idx, 1))):
            settings = dict(num_beams=beams, length_penalty=alpha, early_stopping=True, do_sample=False)
            theirs = hf.generate(idx, max_new_tokens=NEW, eos_token_id=stops or None, pad_token_id=0, **settings)
            ours = BeamSearch(Decoder(model), beams, alpha).generate(idx, NEW, stop_ids=stops)
            for mine, its in zip(ours[:, 5:].tolist(), theirs[:, 5:].tolist(), strict=True):
                first = next((place for place, token in enumerate(its) if token in stops), len(its))
                assert without_repeats(mine, stops) == its[: first + 1]


def test_as_many_beams_as_there_are_tokens_and_more():
    """At first there are fewer beginnings than beams, also where each could end in several ways."""
    for seed in range(4):
        model = causal(seed, vocab_size=5)
        for beams, stops in itertools.product((5, 7, 30), ([], [0, 3])):
            text = BeamSearch(Decoder(model), beams).generate(torch.tensor([[1, 2]]), 4, stop_ids=stops)[0, 2:].tolist()
            assert without_repeats(text, stops) == slow_beams(model, [1, 2], beams, 4, 1.0, stops)


def test_a_beam_goes_on_where_every_stop_token_is_likelier_than_what_goes_on():
    """In all beams at once, and so the candidates are many that end before the first that does not."""
    beams, logits = Beams(BeamSearch(Decoder(causal()), 3), torch.tensor([[1, 5]]), [7, 8]), torch.zeros(1, 20)
    tokens, rows = beams.choose(logits, torch.tensor([[1, 5]]))
    idx = torch.cat((torch.tensor([[1, 5]])[rows], tokens), dim=1)
    logits = torch.zeros(3, 20)
    logits[:, [7, 8]] = 5.0
    before, going_on = beams.scores.clone(), logits.double().log_softmax(-1)[0, 0]
    tokens, _ = beams.choose(logits, idx)
    torch.testing.assert_close(beams.scores, before + going_on)
    assert len(beams.ended[0]) == 3


def test_a_search_ends_when_every_text_has_ended():
    model, lengths = causal(), []
    for idx in (prompts(4), *prompts(4).split(1)):
        steps: list[torch.Tensor] = []
        BeamSearch(Watched(model, steps), 2).generate(idx, 40, stop_ids=range(100, 300))
        lengths.append(len(steps))
    assert lengths[0] == max(lengths[1:]) < 40


class Watched:
    """A generator of which every new column of tokens is noted."""

    def __init__(self, model: Llama, steps: list[torch.Tensor]):
        self.model, self.steps = model, steps

    def generate(self, *args, **settings) -> torch.Tensor:
        return continue_texts(self.model, *args, on_token=self.steps.append, **settings)


def test_nothing_is_searched_where_no_token_is_wanted():
    for search in (BeamSearch(Decoder(causal()), 3), ContrastiveSearch(causal(), 0.5, 3)):
        assert torch.equal(search.generate(prompts(), 0), prompts())


# ------------------------------------------------------------------------------------------- contrastive search


@torch.no_grad()
def slow_contrast(
    model: Llama, prompt: list[int], alpha: float, candidates: int, new: int, penalty: float = 1.0
) -> list[int]:
    """Equation 5, token by token and candidate by candidate."""
    ids = list(prompt)
    for _ in range(new):
        logits = model(torch.tensor([ids[-model.config.max_seq_len :]]))[0][:, -1]
        logits = penalize_repeats(logits, torch.tensor([ids]), penalty)[0]
        probs, scores = logits.softmax(-1), {}
        for candidate in logits.argsort(descending=True)[:candidates].tolist():
            h = model(torch.tensor([[*ids, candidate][-model.config.max_seq_len :]]))[1][0]  # s D
            cosines = [torch.cosine_similarity(h[-1], each, dim=0).item() for each in h[:-1]]
            scores[candidate] = (1 - alpha) * probs[candidate].item() - alpha * max(cosines)
        ids.append(max(scores, key=scores.get))
    return ids


@pytest.mark.parametrize("max_seq_len", [64, 9, 4])
@pytest.mark.parametrize(("alpha", "candidates"), [(0.6, 4), (0.1, 8), (1.0, 3), (0.5, 999)])
def test_contrastive_search_is_equation_5(alpha: float, candidates: int, max_seq_len: int):
    vocab = 12 if candidates == 999 else 300
    model, idx = causal(max_seq_len=max_seq_len, vocab_size=vocab), prompts(2, vocab=vocab)
    slow = [slow_contrast(model, prompt, alpha, candidates, NEW) for prompt in idx.tolist()]
    assert ContrastiveSearch(model, alpha, candidates).generate(idx, NEW).tolist() == slow
    assert ContrastiveSearch(model, alpha, candidates).generate(idx, NEW, use_cache=False).tolist() == slow


def test_a_contrastive_text_can_be_watched_and_a_stop_token_ends_it():
    model, seen = causal(), []
    free = ContrastiveSearch(model, 0.6, 4).generate(prompts(1), NEW, on_token=seen.append)
    assert torch.equal(torch.cat(seen, dim=1), free[:, 5:])
    stop = free[0, 9].item()
    assert stop not in free[0, 5:9]
    assert torch.equal(ContrastiveSearch(model, 0.6, 4).generate(prompts(1), NEW, stop_ids=[stop]), free[:, :10])


def test_each_step_is_one_pass_over_the_candidates():
    model, shapes = causal(), []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    ContrastiveSearch(model, 0.6, 4).generate(prompts(2), 5)
    assert shapes == [(2, 5)] + [(8, 1)] * 5
    shapes.clear()
    BeamSearch(Decoder(model), 3).generate(prompts(2), 5)
    assert shapes == [(2, 5)] + [(6, 1)] * 4


def test_a_bidirectional_model_is_refused():
    with pytest.raises(NeedsCausal, match="hidden states"):
        ContrastiveSearch(random_llama(), 0.6, 4)


# --------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("penalty", [1.4, 0.8])
def test_a_repetition_penalty_changes_what_is_searched(penalty: float):
    model = causal()
    expected = continue_texts(model, prompts(), NEW, choose=choosing(0.0, repetition_penalty=penalty))
    assert not torch.equal(expected, model.generate(prompts(), NEW, 0.0))
    for search in (BeamSearch(Decoder(model), 1), ContrastiveSearch(model, 0.0, 3)):
        assert torch.equal(search.generate(prompts(), NEW, repetition_penalty=penalty), expected)
    text = ContrastiveSearch(model, 0.6, 4).generate(prompts(1), NEW, repetition_penalty=penalty)[0].tolist()
    assert text == slow_contrast(model, prompts(1)[0].tolist(), 0.6, 4, NEW, penalty)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda model: BeamSearch(Decoder(model), 0), "beams"),
        (lambda model: BeamSearch(Decoder(model), 2, -0.5), "alpha"),
        (lambda model: BeamSearch(Decoder(model), 2, math.nan), "alpha"),
        (
            lambda model: BeamSearch(Decoder(model), 2).generate(prompts(), 3, repetition_penalty=0.0),
            "repetition_penalty",
        ),
        (lambda model: ContrastiveSearch(model, -0.1, 2), "alpha"),
        (lambda model: ContrastiveSearch(model, 1.1, 2), "alpha"),
        (lambda model: ContrastiveSearch(model, math.nan, 2), "alpha"),
        (lambda model: ContrastiveSearch(model, 0.5, 0), "candidates"),
    ],
)
def test_impossible_settings_are_refused(make: Callable, word: str):
    with pytest.raises(ValueError, match=word):
        make(causal())


def test_a_damaged_model_is_reported():
    model = causal()
    with torch.no_grad():
        model.norm.weight[3] = math.nan
    for search in (BeamSearch(Decoder(model), 3), ContrastiveSearch(model, 0.6, 3)):
        with pytest.raises(UserError, match="not finite"):
            search.generate(prompts(), 3)


# ------------------------------------------------------------------------------------------------ run_llama.py


def files_of(folder: Path) -> tuple[str, str]:
    return tuple((folder / f"generated-sentence-temp-{each}.txt").read_text(encoding="utf-8") for each in (0, 1))


def test_flags_make_the_text_at_temperature_0(drive: Callable, tiny_checkpoint: Path, tmp_path: Path):
    flags = ["--pretrained-model-path", tiny_checkpoint, "--attention", "causal", "--max_new_tokens", 20]
    flags += ["--prompt", "A film", *TEXT_FLAGS]
    model = load_llama_model(tiny_checkpoint, attention="causal")
    its = Tokenizer(tokenizer_model=tiny_checkpoint.with_suffix(".model"))
    idx = torch.tensor([its.encode("A film", bos=True, eos=False)])
    drive(*flags)
    greedy, sampled = files_of(tmp_path)
    searches = (
        ([], lambda **penalty: continue_texts(model, idx, 20, choose=choosing(0.0, **penalty))),
        (["--beam", 4], lambda **penalty: BeamSearch(Decoder(model), 4).generate(idx, 20, **penalty)),
        (["--contrastive", "0.6,5"], lambda **penalty: ContrastiveSearch(model, 0.6, 5).generate(idx, 20, **penalty)),
    )
    for (more, search), penalty in itertools.product(searches, (None, 1.5)):
        out = drive(*flags, *more, *(["--repetition_penalty", penalty] if penalty else []))
        expected = its.decode(search(repetition_penalty=penalty)[0].tolist())
        found, drawn = files_of(tmp_path)
        assert found == expected and (found == greedy) == (not more and not penalty)
        assert drawn == sampled or penalty
        assert f"Temperature is 0.0\n{expected}\n---------------\n" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--beam", "2", "--contrastive", "0.6,5"], "--beam and --contrastive"),
        (["--beam", "2", "--option", "prompt"], "--beam is for --option generate, not for prompt"),
        (["--contrastive", "0.6,5", "--option", "perplexity"], "--contrastive is for --option generate"),
        (["--contrastive", "0.6"], "--contrastive: must be a number and a whole number, as in 0.6,5"),
        (["--contrastive", "0.6,5,"], "--contrastive: must be"),
        (["--contrastive", "1.5,5"], "--contrastive 1.5,5: ALPHA must be from 0 to 1"),
        (["--contrastive", "nan,5"], "--contrastive nan,5: ALPHA"),
        (["--contrastive", "0.6,0"], "--contrastive 0.6,0: ALPHA .* K from 1"),
        (["--contrastive", "0.6,5", "--attention", "bidirectional"], "hidden states .*; add --attention causal"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    drive: Callable, tiny_checkpoint: Path, tmp_path: Path, flags: list[str], words: str
):
    with pytest.raises(UserError, match=words):
        drive("--pretrained-model-path", tiny_checkpoint, *flags)
    assert not list(tmp_path.iterdir())


def test_a_search_that_the_attention_rules_out_is_refused_before_anything_is_loaded():
    flags = ["--option", "generate", "--contrastive", "0.6,5", "--attention"]
    check_args(get_args([*flags, "causal"]), find=lambda args: True)
    with pytest.raises(UserError, match="hidden states that stay.*; add --attention causal"):
        check_args(get_args([*flags, "bidirectional"]), find=lambda args: True)


@pytest.mark.parametrize("flags", [["--beam", "2"], ["--contrastive", "0.6,5"]])
def test_without_the_folder_a_search_is_an_error(
    drive: Callable, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
):
    monkeypatch.setattr("engine.programs.import_folder", lambda name: None)
    with pytest.raises(UserError, match=f"{flags[0]} needs the folder advanced/"):
        drive("--pretrained-model-path", tiny_checkpoint, *flags)
    with pytest.raises(UserError, match="a method needs the folder advanced/"):
        runs.search_of(causal(), Decoder(causal()), beams=2)
    assert not list(tmp_path.iterdir())


def test_a_trained_model_repeats_itself_less(assets: Path):
    model = load_llama_model(asset(assets, "stories260K.pt"), attention="causal")
    its = Tokenizer(tokenizer_model=asset(assets, "tok512.model"))
    idx = torch.tensor([its.encode("Once upon a time", bos=True, eos=False)])
    greedy = model.generate(idx, 100, 0.0)[0].tolist()
    contrastive = ContrastiveSearch(model, 0.6, 5).generate(idx, 100)[0].tolist()
    penalized = continue_texts(model, idx, 100, choose=choosing(0.0, repetition_penalty=1.3))[0].tolist()

    def distinct(ids: list[int]) -> int:
        """How many different pairs of neighbours a text has."""
        return len({*itertools.pairwise(ids)})

    assert distinct(contrastive) > distinct(greedy) < distinct(penalized)
    totals = []
    for text in (greedy, BeamSearch(Decoder(model), 4).generate(idx, 100)[0].tolist()):
        totals.append(sum(log_probs(model, text[:end])[text[end]] for end in range(idx.shape[1], len(text))))
    assert totals[1] > totals[0]
