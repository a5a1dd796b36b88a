"""Words that are found in the training data, against a search that scores every assignment by itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sentencepiece
import torch
from conftest import SENTENCES, random_llama
from steps import two_processes_as_one
from test_methods import ADVANCED
from test_prompt_finetune import ids_of
from torch import nn

from advanced import choose, create_head
from advanced.auto_words import AutoWords, best_assignment
from engine import families, runs
from engine.data import Example
from engine.storage import load_tensors
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError

NAMES = ["bad", "good", "odd"]
EXAMPLES = [Example(text, label) for text, label in zip(SENTENCES, (0, 1, 2, 0, 1, 2, 0, 1, 1, 0), strict=True)]


@pytest.fixture(scope="module")
def words_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Has most words of the sentences as one token."""
    path = tmp_path_factory.mktemp("words") / "words"
    texts = iter([text.lower() for text in SENTENCES] * 5)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=str(path), vocab_size=540, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return Tokenizer(tokenizer_model=path.with_suffix(".model"))


@pytest.fixture(params=["bidirectional", "causal"])
def llama(request: pytest.FixtureRequest, words_tokenizer: Tokenizer) -> Llama:
    return random_llama(attention=request.param, max_seq_len=128, vocab_size=words_tokenizer.n_words)


def head(llama: Llama, tokenizer: Tokenizer, examples: Sequence[Example] = EXAMPLES, **settings) -> AutoWords:
    model = create_head("auto-words", settings, llama, tokenizer, NAMES).eval()
    model.learn(examples, 0)
    return model


def slowly(llama: Llama, tokenizer: Tokenizer, candidates: int) -> tuple[list[str], int]:
    """The words of the best assignment, and the number of right answers: a pass for a sentence, no vectors."""
    pieces = {number: tokenizer.sp_model.id_to_piece(number) for number in range(tokenizer.n_words)}
    words = {
        number: piece[1:]
        for number, piece in pieces.items()
        if piece[0] == "▁" and piece[1:].isalpha() and tokenizer.sp_model.encode(piece[1:]) == [number]
    }
    given = [torch.tensor([ids_of(tokenizer, each.sentence, "It was")]) for each in EXAMPLES]
    log_probs = [llama(ids)[0][0, -1].log_softmax(-1) for ids in given]
    score = dict.fromkeys(itertools.product(range(3), words), 0.0)
    for row, each in zip(log_probs, EXAMPLES, strict=True):
        for word in words:
            score[each.label, word] += float(row[word])
    best = [sorted(words, key=lambda word, label=label: -score[label, word])[:candidates] for label in range(3)]
    found = []
    for chosen in itertools.product(*best):
        if len(set(chosen)) == 3:
            answers = [max(range(3), key=lambda label, row=row: row[chosen[label]]) for row in log_probs]
            right = sum(answer == each.label for answer, each in zip(answers, EXAMPLES, strict=True))
            found.append((right, sum(score[label, word] for label, word in enumerate(chosen)), chosen))
    right, _, chosen = max(found)
    return [words[word] for word in chosen], right


@pytest.mark.parametrize("candidates", [3, 6])
@torch.inference_mode()
def test_the_words_are_those_of_a_search_through_everything(llama: Llama, words_tokenizer: Tokenizer, candidates: int):
    tokenizer = words_tokenizer
    model = head(llama, tokenizer, candidates=candidates)
    assert len(model.all_words()) > 40
    words, right = slowly(llama, tokenizer, candidates)
    assert model.words == words and model.settings["words"] == "+".join(words)
    pairs = ", ".join(f"{name}: {word}" for name, word in zip(NAMES, words, strict=True))
    assert model.remark == f"auto-words: {pairs}; with them {right} of 10 training sentences are right so far"
    assert all(len(ids) == 1 for ids in model.word_ids) and model.prompt_suffix == "It was" and model.room == 0
    answers = model(tokens_of(model, tokenizer)).argmax(-1).tolist()
    assert sum(map(int.__eq__, answers, (each.label for each in EXAMPLES))) == right > 3


def tokens_of(model: nn.Module, tokenizer: Tokenizer) -> torch.Tensor:
    dataset = families.encode_for(model, tokenizer, EXAMPLES)
    return dataset.collate_fn([dataset[place] for place in range(len(dataset))])["token_ids"]


def test_other_labels_find_other_words(llama: Llama, words_tokenizer: Tokenizer):
    turned = [Example(each.sentence, (each.label + 1) % 3) for each in EXAMPLES]
    words = head(llama, words_tokenizer).words
    assert head(llama, words_tokenizer, turned).words == [words[-1], *words[:-1]]


def test_between_equally_good_words_the_likelier_ones_are_taken():
    """Two classes with the same two candidates: the first class could have its favourite, at a higher price."""
    places, scores = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.0, -0.1], [0.0, -5.0]])
    assert best_assignment(torch.zeros(2, 2), places, scores, torch.tensor([0, 1])) == ([1, 0], 1)


def test_what_cannot_be_searched_is_refused(llama: Llama, words_tokenizer: Tokenizer):
    tokenizer = words_tokenizer
    with pytest.raises(UserError, match="candidates=200 of 3 classes are too many; at most 100$"):
        head(llama, tokenizer, candidates=200)
    with pytest.raises(UserError, match="there is none of the class odd"):
        head(llama, tokenizer, EXAMPLES[:2])
    with pytest.raises(UserError, match="candidates=1 are too few: the classes have the same words"):
        head(llama, tokenizer, [Example(SENTENCES[0], label) for label in range(3)], candidates=1)
    with pytest.raises(UserError, match="auto-words: it finds its words; prompt-finetune takes some"):
        choose("auto-words", ["words=a+b"])


@pytest.mark.parametrize("option", ["prompt", "finetune"])
def test_the_driver_prints_the_words_and_saves_them(
    tmp_path: Path, drive: Callable, classify_flags: Callable, option: str
):
    flags = [*classify_flags(option), *ADVANCED, "--method", "auto-words", "--attention", "causal"]
    flags += ["--epochs", 2, "--lr", 0.01, "--model_out", "worded.pt"] if option == "finetune" else []
    out = drive(*flags)
    (bad, good, right), *more = re.findall(r"^auto-words: bad: (\w+), good: (\w+); with them (\d+) of 24", out, re.M)
    assert not more and int(right) >= 12
    lines = (tmp_path / "films-dev-advanced-output.txt").read_text().splitlines()
    assert all(line.endswith(" It was") for line in lines)
    if option == "prompt":
        return
    model, about = runs.load_classifier(tmp_path / "worded.pt")
    assert model.words == [bad, good] and about.identity["methods"]["auto-words"]["words"] == ""
    sentences = [line[6:].removesuffix(" It was") for line in lines]
    predicted = [each.label for each in runs.predict(model, about, sentences)]
    assert predicted == [int(line[0]) for line in lines]
    record = load_tensors(tmp_path / "worded.pt")
    assert record["model_config"]["head_settings"]["words"] == f"{bad}+{good}"


def test_another_question_is_asked_while_it_searches(drive: Callable, classify_flags: Callable, tmp_path: Path):
    flags = [*classify_flags("prompt"), *ADVANCED, "--method", "auto-words", "--attention", "causal"]
    drive(*flags, "--question", "So {labels}? It is ")
    lines = (tmp_path / "films-dev-advanced-output.txt").read_text().splitlines()
    assert all(line.endswith(" So bad or good? It is") for line in lines)
    with pytest.raises(UserError, match="give that or a question, not both"):
        drive(*flags, "--question", "So?", "--method-args", "template=Well")


@pytest.mark.slow
def test_two_processes_that_share_the_model_train_as_one(tmp_path: Path, classify_flags: Callable):
    flags = [*classify_flags("finetune"), *ADVANCED, "--attention", "causal", "--epochs", "2", "--lr", "0.01"]
    done = two_processes_as_one(tmp_path, [*flags, "--method", "auto-words"])
    assert "auto-words: bad: " in done.stdout
