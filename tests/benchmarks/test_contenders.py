"""The contenders: the course's way computes what the package does; other programs and whole processes; their data."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.attention
import torch.utils.flop_counter
from conftest import asset, random_llama
from error_helpers import ROOT

from benchmarks import alone, decoders, epoch, peers, processes, report, table
from benchmarks.apart import Apart, LibraryModel
from benchmarks.bench import Line, absent_contenders
from benchmarks.decoders import LlamaCpp, made_up_vocabulary
from benchmarks.decoding import compare_ids, one_core_busy
from benchmarks.epoch import FixedBatches, make_epoch, sampled
from benchmarks.peers import Peers
from benchmarks.sentences import (
    SST_LENGTHS,
    SST_SIZES,
    IdTokenizer,
    find_tokenizers,
    length_at,
    load_sentences,
    random_sentences,
)
from bert.heads import BertForSequenceClassification
from bert.model import Bert
from classifier import LlamaZeroShotClassifier
from config import LlamaConfig
from convert.llama2c import content_of, content_of_tokenizer
from convert.vocabulary import BYTE, CONTROL, NORMAL, SPACE_PIECE, UNKNOWN
from engine.data import create_data
from engine.flags import PREFIX
from engine.tasks import EncodingRules
from engine.weights import load_llama_model
from fast.attention import FusedAttention
from llama import Attention
from tokenizer import Tokenizer
from utils import UserError


@pytest.fixture
def contenders() -> Peers:
    return Peers(random_llama(attention="causal"))


# -------------------------------------------------------------------------------------------- the course's way


def test_the_courses_batches_are_padded_and_tokenised_as_ours():
    data = random_sentences(300, {"train": 9, "dev": 4})
    batch = epoch.collate(data.tokenizer, list(data.train[:3]))
    lengths = [len(example.sentence.split()) + 1 for example in data.train[:3]]
    assert batch["token_ids"].shape == (3, max(lengths))
    for row, example, length in zip(batch["token_ids"].tolist(), data.train, lengths, strict=False):
        assert row == [1, *map(int, example.sentence.split())] + [3] * (max(lengths) - length)
    assert batch["labels"].tolist() == [example.label for example in data.train[:3]]


def test_the_courses_evaluation_counts():
    class Answers(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return torch.tensor([[0.0, 1.0], [1.0, 0.0]])

    loader = [{"token_ids": torch.zeros(2, 1), "labels": torch.tensor(labels)} for labels in ([1, 0], [0, 0])]
    accuracy, f1 = epoch.evaluate(Answers(), loader)
    assert accuracy == 0.75
    assert f1 == pytest.approx((4 / 5 + 2 / 3) / 2)  # 2 tp / (2 tp + fp + fn), for class 0 and for class 1


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_all_classifiers_agree(attention: str, contenders: Peers):
    tokens = torch.randint(4, 300, (3, 12))
    ours = peers.classify(contenders.classifier(table.PLAIN_PATH, attention=attention), tokens)
    course = peers.classify(contenders.classifier(table.COURSE, attention=attention), tokens)
    torch.testing.assert_close(course, ours, atol=1e-4, rtol=0)
    assert contenders.state["output.weight"].equal(random_llama(attention="causal").output.weight)


def test_only_ours_is_given_kernels_and_only_the_plain_path_fused_attention(
    monkeypatch: pytest.MonkeyPatch, contenders: Peers
):
    """What `accelerate` is given is bare, and so is the course's way: as the root modules compute it."""
    page = {type(module) for module in random_llama().modules()}
    fused = page - {Attention} | {FusedAttention}
    for name, kinds in ((table.PLAIN_PATH, fused), (table.COURSE, page)):
        assert {type(module) for module in contenders.llama(name).modules()} == kinds
        assert {type(module) for module in contenders.classifier(name).llama.modules()} == kinds
    given = []
    monkeypatch.setattr("fast.accelerate", lambda model, *_, **__: given.append(model) or [])
    contenders.decoder()
    contenders.classifier(table.OURS)
    assert len(given) == 2
    assert not any(isinstance(module, FusedAttention) for model in given for module in model.modules())


def test_the_weights_of_one_contender_are_not_anothers(contenders: Peers):
    model = contenders.classifier(table.PLAIN_PATH)
    optimizer = peers.optimizer(table.OURS, model)
    for _ in range(2):
        peers.train_step(model, optimizer, contenders.batch(3, 12))
    assert model.llama.output.weight is model.llama.tok_embeddings.weight
    assert not torch.equal(model.llama.output.weight, contenders.llama(table.PLAIN_PATH).output.weight)
    assert torch.equal(contenders.llama(table.PLAIN_PATH).output.weight, random_llama(attention="causal").output.weight)


def test_an_epoch_of_the_course_is_an_epoch_of_ours(contenders: Peers):
    """The same batches, no dropout, the same semantics: the same weights at the end."""
    data = random_sentences(300, {"train": 30, "dev": 9})
    models = [contenders.classifier(name, attention="bidirectional") for name in (table.PLAIN_PATH, table.COURSE)]
    for model in models:
        model.dropout.p = 0.0
    torch.manual_seed(5)
    ours = make_epoch(table.OURS, models[0], data, 8, 1, EncodingRules())
    torch.manual_seed(5)
    theirs = make_epoch(table.COURSE, models[1], data, 8, 1, EncodingRules())
    batches, their_batches = (each.loaders[0].batch_sampler.batches for each in (ours, theirs))
    assert batches == their_batches and sorted(sum(batches, [])) == list(range(30))
    seconds = [contender.run() for contender in (ours, theirs)]
    assert seconds == [sum(ours.parts), sum(theirs.parts)]
    assert min(seconds) > 0.0 and theirs.parts[-1] == 0.0 < min(ours.parts)
    before = contenders.classifier(table.PLAIN_PATH, attention="bidirectional").state_dict()
    trained, course_trained = (model.state_dict() for model in models)
    for name, tensor in trained.items():
        torch.testing.assert_close(course_trained[name], tensor, atol=1e-5, rtol=0)
    assert (trained["classifier_head.weight"] - before["classifier_head.weight"]).abs().max() > 4e-5


# --------------------------------------------------------------------------------------------- Hugging Face


def test_hf_reads_the_last_real_token_as_ours_does(contenders: Peers):
    pytest.importorskip("transformers")
    tokens = torch.randint(4, 300, (3, 12))
    tokens[0, 5:] = tokens[2, 11:] = 3  # padding
    ours = peers.classify(contenders.classifier(table.PLAIN_PATH), tokens)
    theirs = peers.classify(contenders.classifier(table.HF), tokens)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
    lower = peers.classify(contenders.classifier(table.HF_BF16, "bf16", trains=True), tokens)
    assert lower.dtype == torch.float32 and 0 < (lower - ours).abs().max() < 0.2


def test_hf_in_bfloat16_turns_by_the_angles_that_it_is_made_with(contenders: Peers):
    """`Module.to` would round the frequencies as well, and with them every angle."""
    pytest.importorskip("transformers")
    exact, rounded = contenders.llama(table.HF), contenders.llama(table.HF_BF16, dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in rounded.parameters())
    for plain, buffer in zip(exact.buffers(), rounded.buffers(), strict=True):
        assert torch.equal(plain, buffer) and plain.dtype == buffer.dtype
    assert rounded.lm_head.weight is rounded.model.embed_tokens.weight


def test_no_optimizer_decays_weights():
    for name in (table.OURS, table.PLAIN_PATH, table.COURSE, table.HF, table.HF_BF16):
        model = torch.nn.Linear(2, 2)
        before = model.weight.detach().clone()
        model.weight.grad = torch.zeros_like(model.weight)
        peers.optimizer(name, model).step()
        assert torch.equal(model.weight, before)


def test_hf_generates_what_ours_does(contenders: Peers):
    pytest.importorskip("transformers")
    prompt = torch.tensor([[1, 17, 240, 33]])
    ours = contenders.llama(table.PLAIN_PATH).generate(prompt, 30, temperature=0.0)
    assert torch.equal(peers.generate_with_hf(contenders.llama(table.HF), prompt, 30), ours)


# ------------------------------------------------------------------------------------------- other contenders


def test_hf_finds_the_likeliest_labels_that_ours_does(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In batches with padding before the text, where ours here has none."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    config = LlamaConfig.from_preset("tiny", tied=False, attention="causal", max_seq_len=512)
    folder = processes.write_large(tmp_path / "model", config, tiny_tokenizer)
    tokenizer = Tokenizer(tokenizer_model=tiny_tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = ["bad", "mix", "fun"]  # so short that no sum over pieces is always the least
    monkeypatch.setattr("engine.data.read_label_names", lambda path: names)
    ours = LlamaZeroShotClassifier(
        SimpleNamespace(num_labels=len(names)), tokenizer, names, llama=load_llama_model(folder)
    )
    for model in (theirs, ours.llama):
        for parameter in model.parameters():
            parameter.data.mul_(20.0 if parameter.dim() > 1 else 1.0)  # or one label is the likeliest of all sentences
    found = {}
    with torch.inference_mode():
        for split in alone.SPLITS:
            texts = [f"{each.sentence} {ours.prompt_suffix}" for each in create_data(folder / f"{split}.txt")]
            ids = [torch.tensor([tokenizer.encode(text, bos=True, eos=False)]) for text in texts]
            found[split] = [int(ours(each).argmax()) for each in ids]
            assert alone.ask_transformers(theirs, tokenizer, folder / f"{split}.txt") == found[split]
    assert len({label for labels in found.values() for label in labels}) > 1 and len(found["dev"]) == processes.ASKED


def test_large_models_continue_the_same_text(tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    folder = processes.write_large(
        tmp_path / "model", LlamaConfig.from_preset("tiny", attention="causal"), tiny_tokenizer
    )
    prompts = []
    model = SimpleNamespace(generate=lambda ids, **settings: prompts.append(ids[0].tolist()))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *args, **settings: model)
    alone.use_transformers("generate", "float32", str(folder))
    assert "--prompt" not in processes.our_command("generate", "fp32", folder)
    assert prompts == [Tokenizer(tokenizer_model=tiny_tokenizer).encode(PREFIX, bos=True, eos=False)] * 2


def test_ids_are_compared_in_words():
    assert compare_ids([[1, 5, 6]], [[1, 5, 6]], 1) == "identical ids"
    assert compare_ids([[1, 5, 6], [1, 7, 8]], [[1, 5, 9], [1, 7, 8]], 1) == "3 of 4 ids equal"
    ours, theirs = [[1, 5, 2, 6]], [[1, 5, 9, 9]]
    assert compare_ids(ours, theirs, 1, ends=True) == "identical ids up to eos, position 2"
    assert compare_ids(ours, theirs, 1) == "1 of 3 ids equal"
    assert compare_ids([[1, 5, 2, 6]], [[1, 4, 9, 9]], 1, ends=True) == "0 of 3 ids equal"


def both_ids(kind: type, dtype: str, folder: Path, **shape: float) -> tuple[list[list[int]], list[list[int]]]:
    """Ours and another library's second answer: nothing of the first may be left."""
    model = random_llama(attention="causal", seed=1, gain=8.0, **shape)
    prompt = torch.tensor([[1, 259, 270, 281, 292]])
    ours = model.generate(prompt, 30, temperature=0.0).tolist()
    contender = kind(LibraryModel(folder, model.state_dict(), model.config, 1, dtype))
    contender.generate(prompt.flip(1)[0].tolist(), 5)
    theirs = [prompt[0].tolist() + contender.generate(prompt[0].tolist(), 30)]
    assert len(set(ours[0])) > 10 and len(theirs[0]) == 35
    return ours, theirs


def test_the_vocabulary_for_llama_cpp_has_a_type_for_each_piece():
    vocabulary = made_up_vocabulary(300)
    assert len(vocabulary.pieces) == len(vocabulary.types) == len(vocabulary.scores) == 300
    assert [vocabulary.types.count(kind) for kind in (UNKNOWN, CONTROL, BYTE, NORMAL)] == [1, 2, 256, 41]
    assert vocabulary.types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE] and vocabulary.pieces[259] == SPACE_PIECE


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_llama_cpp_says_the_same_ids(dtype: str, tmp_path: Path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    ours, theirs = both_ids(LlamaCpp, dtype, tmp_path, max_seq_len=256)
    assert theirs == ours or dtype != "f32"


@pytest.mark.parametrize("compute_type", ["float32", "int8"])
def test_ctranslate2_says_the_same_ids(compute_type: str, tmp_path: Path):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    from benchmarks.decoders import CTranslate2

    ours, theirs = both_ids(CTranslate2, compute_type, tmp_path, rope_theta=500.0)
    assert compare_ids(ours, theirs, 5, ends=True).startswith("identical") or compute_type != "float32"


@pytest.mark.slow
def test_onnx_runtime_genai_says_the_same_ids(tmp_path: Path):
    for package in ("onnxruntime_genai", "onnx_ir", "transformers", "tokenizers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from benchmarks.decoders import OrtGenAI

    ours, theirs = both_ids(OrtGenAI, "fp32", tmp_path, n_heads=2, n_kv_heads=1)  # heads of 16, as its kernel wants
    assert compare_ids(ours, theirs, 5, ends=True).startswith("identical")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("f32", 1e-5), ("bf16", 0.2)])
def test_openvino_classifies_as_ours_does(precision: str, tolerance: float, contenders: Peers, tmp_path: Path):
    pytest.importorskip("openvino", reason="openvino is not installed")
    from benchmarks.classifiers import OpenVino
    from benchmarks.encoders import QUICK_BERT, make_batch

    tokens, llama = torch.randint(4, 300, (3, 31)), contenders.classifier(table.PLAIN_PATH)
    bert, batch = BertForSequenceClassification(Bert(QUICK_BERT), 5).eval(), make_batch(4, 30, 300, is_padded=True)
    for model, config, given in (
        (llama, contenders.config, (tokens,)),
        (bert, QUICK_BERT, batch.inputs),
    ):
        library = OpenVino(LibraryModel(tmp_path, model.state_dict(), config, 1, precision))
        theirs = library.classify(*(each.numpy() for each in given if each is not None))
        with torch.inference_mode():
            torch.testing.assert_close(torch.from_numpy(theirs), model(*given), atol=tolerance, rtol=0)


@pytest.mark.slow
def test_a_traced_classifier_answers_as_ours_does_and_learns(contenders: Peers, tmp_path: Path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from benchmarks.classifiers import Compiled

    tokens, ours = torch.randint(4, 300, (3, 31)), contenders.classifier(table.PLAIN_PATH)
    given = LibraryModel(tmp_path, ours.state_dict(), contenders.config, torch.get_num_threads(), "fp32")
    for dtype, tolerance in (("fp32", 1e-4), ("bf16", 0.2), ("autocast", 0.2)):
        library = Compiled(given._replace(dtype=dtype))
        theirs = torch.from_numpy(library.classify(tokens.numpy()))
        torch.testing.assert_close(theirs, peers.classify(ours, tokens), atol=tolerance, rtol=0)
    library.train_step(tokens.numpy(), np.array([0, 1, 4]))
    assert not np.array_equal(library.classify(tokens.numpy()), theirs.numpy())


class Elsewhere:
    """Answers with the number of its process, and fails where it is told to."""

    def __init__(self, model: LibraryModel):
        if model.dtype == "absent":
            raise ImportError("no such library")
        self.weight = int(model.state["weight"])

    def generate(self, prompt: list[int], new: int) -> list[int]:
        if new == 0:
            os._exit(3)
        return [self.weight, os.getpid()]


@pytest.mark.slow
def test_a_library_computes_in_a_process_of_its_own(tmp_path: Path):
    model = LibraryModel(tmp_path, {"weight": torch.tensor(7)}, LlamaConfig.from_preset("tiny"), 1, "f32")
    kind = f"{__name__}.Elsewhere"
    library = Apart(kind, model)
    assert library.generate(torch.tensor([[1, 2]]), 5).tolist() == [[1, 2, 7, library.process.pid]]
    with pytest.raises(RuntimeError, match="status 3"):
        library.generate(torch.tensor([[1]]), 0)
    with pytest.raises(RuntimeError, match="ImportError: no such library"):
        Apart(kind, model._replace(dtype="absent"))
    library = Apart(kind, model)
    library.close()
    assert library.process.exitcode == 0


def test_who_is_absent_says_why_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    config = LlamaConfig.from_preset("stories42M")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "llama_cpp" else object())
    monkeypatch.setenv("CXX", sys.executable)  # a compiler, as far as is looked at
    absent, why = absent_contenders(config, has_llama2c=True), "llama-cpp-python is not installed"
    names = (table.LLAMACPP, table.LLAMACPP_F16, table.LLAMACPP_Q8, table.LLAMACPP_Q4)
    assert absent == dict.fromkeys(names, f"{why}: pip install llama-cpp-python")
    line = Line("decode, fp32", table.LLAMACPP, note=absent[table.LLAMACPP])
    assert report.cells(line)[-1] == f"not measured: {why}: pip install llama-cpp-python"
    assert absent_contenders(config, has_llama2c=False)[table.LLAMA2C] == "no --llama2c"
    tiny = absent_contenders(LlamaConfig.from_preset("tiny"), has_llama2c=True)
    assert tiny.keys() - absent.keys() == {table.ORT_GENAI} and "multiple of 16" in tiny[table.ORT_GENAI]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    why = absent_contenders(config, has_llama2c=True)[table.LLAMACPP]
    assert why == "llama-cpp-python and gguf are not installed: pip install llama-cpp-python gguf"


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("CXX", "no-such-compiler")
    absent = absent_contenders(LlamaConfig.from_preset("stories42M"), has_llama2c=True)
    assert absent == {table.COMPILED: "no C++ compiler (no-such-compiler)"}


def test_the_other_process_lives_as_long_as_the_block():
    with one_core_busy() as child:
        assert child.poll() is None
    assert child.poll() is not None


# ------------------------------------------------------------------------------------------- whole processes


FAKE_DRIVER = """
import pathlib, sys
import module
kernels = sys.argv[sys.argv.index("--kernels") + 1]
was = pathlib.Path("was-here").exists()
pathlib.Path("was-here").touch()
pathlib.Path("generated-sentence-temp-0.txt").write_text(f"{kernels} {was} {pathlib.Path('extra.txt').exists()}")
sys.exit("no such thing" if pathlib.Path("fails").exists() else 0)
"""


def test_a_first_run_is_in_a_fresh_copy_and_a_later_one_in_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root, folder, extra = tmp_path / "root", tmp_path / "copies", tmp_path / "extra.txt"
    root.mkdir()
    folder.mkdir()
    extra.touch()
    (root / "run_llama.py").write_text(FAKE_DRIVER)
    (root / "module.py").touch()
    monkeypatch.setattr(processes, "ROOT", root)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    copies = processes.Copies(folder, ["run_llama.py", "module.py"], [extra], threads=1)
    for _ in range(2):
        assert copies.first(table.OURS) > 0.0
        assert copies.texts[table.OURS] == "auto False True"
        assert list(copies.copies[table.OURS].glob("__pycache__/module*.pyc"))  # what a first run leaves to a later
    copies.later(table.OURS)
    assert copies.texts[table.OURS] == "auto True True"
    copies.first(table.PLAIN_PATH)
    assert copies.texts[table.PLAIN_PATH] == "plain False True" and len(list(folder.iterdir())) == 2
    (copies.copies[table.PLAIN_PATH] / "fails").touch()
    with pytest.raises(UserError, match="plain.*no such thing"):
        copies.later(table.PLAIN_PATH)
    assert not list(root.rglob("__pycache__"))


def test_what_is_copied_is_what_git_tracks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tracked = processes.tracked_files()
    if not tracked:
        pytest.skip("this folder is no git repository")
    assert {"run_llama.py", "checkpoints/minllama1M.pt", "fast/apply.py"} <= set(tracked)
    assert not any("__pycache__" in name or name.startswith(".venv") for name in tracked)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    assert processes.tracked_files() == []


def test_a_tokenizer_must_fit_the_model(tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer.read_bytes())
    monkeypatch.setenv("MINLLAMA_ASSETS", str(tmp_path))
    assert find_tokenizers(300) == [tmp_path / "tokenizer.model"] and find_tokenizers(301) == []


# --------------------------------------------------------------------------------------------------- sampling


def test_a_sample_of_batches_has_every_size_in_proportion():
    lengths = [1 + index % 100 for index in range(8000)]
    order = list(range(8000))
    random.Random(0).shuffle(order)
    order.sort(key=lambda index: lengths[index] // 10)  # batches of like length, as buckets make them
    batches = [order[start : start + 80] for start in range(0, 8000, 80)]
    chosen = sampled(batches, lengths, 20, random.Random(1))
    assert len(chosen) == 5 and all(batch in batches for batch in chosen)
    longest = sorted(max(lengths[index] for index in batch) for batch in chosen)
    assert all(0 <= longest[step] - 20 * step <= 21 for step in range(5))
    assert sorted(sampled(batches, lengths, 1, random.Random(1))) == sorted(batches)
    assert len(sampled(batches, lengths, 1000, random.Random(1))) == 1


def test_a_pass_is_timed_from_the_first_batch_to_after_the_last():
    batches = FixedBatches([[1, 2], [3]], 2)
    passing = iter(batches)
    assert [next(passing), next(passing)] == [[1, 2], [3]] and batches.seconds == []
    assert next(passing, None) is None and len(batches.seconds) == 1


def test_a_process_does_not_count_its_parents_memory():
    """The parent holds PyTorch; the child imports next to nothing and then 100 MB."""
    code = "from benchmarks.alone import own_peak; a = own_peak(); x = bytearray(10**8); print(a, own_peak())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 4e6 < before < 6e7 and 0.9e8 < after - before < 1.3e8


# ------------------------------------------------------------------------------------------------------ data


def test_random_sentences_have_ssts_lengths():
    data = random_sentences(32000, {"train": 4000, "dev": 7})
    lengths = sorted(len(ids) for ids in data.tokenizer.encode_batch([e.sentence for e in data.train], True, False))
    for share, length in SST_LENGTHS[2:-1]:
        assert abs(lengths[round(share * 3999)] - length) <= 1 + 0.06 * length
    assert 3 <= lengths[0] and lengths[-1] <= 93 and len(data.dev) == 7
    assert [length_at(share) for share, _ in SST_LENGTHS] == [length for _, length in SST_LENGTHS]
    assert data.train == random_sentences(32000, {"train": 4000, "dev": 7}).train


def test_an_id_tokenizer_frames_ids():
    assert IdTokenizer().encode("17 4", bos=True, eos=True) == [1, 17, 4, 2]


def test_lengths_are_those_of_the_real_data(assets: Path):
    asset(assets, "data/sst-train.txt")
    data = load_sentences(32000)
    assert data.source.startswith("SST") and data.train == create_data(assets / "data/sst-train.txt")
    assert {"train": len(data.train), "dev": len(data.dev)} == SST_SIZES
    lengths = sorted(map(len, data.tokenizer.encode_batch([e.sentence for e in data.train], True, False)))
    assert [(share, lengths[round(share * (len(lengths) - 1))]) for share, _ in SST_LENGTHS] == list(SST_LENGTHS)
    assert load_sentences(300).source.startswith("random")


# -------------------------------------------------------------------------------------------------- llama2.c


def test_a_model_file_read_back(tmp_path: Path):
    """Read with NumPy by the layout that llama2.c documents; grouped-query, so that no two kinds have one shape."""
    model = random_llama(attention="causal", layer_norm_eps=1e-5, hidden_dim=40)
    state, config = model.state_dict(), model.config
    (tmp_path / "model.bin").write_bytes(b"".join(content_of(state, config)))
    raw = (tmp_path / "model.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("=7i", raw[:28])
    assert (dim, hidden, layers, heads, kv_heads, vocab, length) == (32, 40, 2, 4, 2, 300, 64)
    numbers, at = np.frombuffer(raw[28:], dtype=np.float32), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        at += int(np.prod(shape))
        return torch.from_numpy(numbers[at - int(np.prod(shape)) : at].reshape(shape).copy())

    head_size, kv_dim = dim // heads, dim // heads * kv_heads
    assert torch.equal(take(vocab, dim), state["tok_embeddings.weight"])
    kinds = [("attention_norm", (dim,)), ("attention.compute_query", (dim, dim))]
    kinds += [("attention.compute_key", (kv_dim, dim)), ("attention.compute_value", (kv_dim, dim))]
    kinds += [("attention.compute_output", (dim, dim)), ("ffn_norm", (dim,)), ("feed_forward.w1", (hidden, dim))]
    kinds += [("feed_forward.w2", (dim, hidden)), ("feed_forward.w3", (hidden, dim))]
    for name, shape in kinds:
        for layer, matrix in enumerate(take(layers, *shape)):
            assert torch.equal(matrix, state[f"layers.{layer}.{name}.weight"]), name
    assert torch.equal(take(dim), state["norm.weight"])
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, head_size, 2) / head_size))
    torch.testing.assert_close(take(*angles.shape), torch.from_numpy(np.cos(angles)).float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(take(*angles.shape), torch.from_numpy(np.sin(angles)).float(), atol=1e-5, rtol=0)
    assert at == len(numbers)


@pytest.mark.parametrize("changes", [{"rope_theta": 500.0}, {"layer_norm_eps": 1e-6}, {"attention": "bidirectional"}])
def test_what_llama2c_cannot_compute_is_not_exported(changes: dict):
    model = random_llama(**{"attention": "causal", **changes})
    with pytest.raises(UserError, match="llama2.c"):
        list(content_of(model.state_dict(), model.config))


@pytest.mark.parametrize("vocab_size", [300, 32000])
def test_a_vocabulary_read_back(vocab_size: int):
    pieces = decoders.make_pieces(vocab_size)
    raw, at, read = b"".join(content_of_tokenizer(pieces, [0.0] * vocab_size)), 4, []
    while at < len(raw):
        _, length = struct.unpack_from("=fi", raw, at)
        read.append(raw[at + 8 : at + 8 + length])
        at += 8 + length
    assert read == pieces and len(set(pieces)) == vocab_size
    assert struct.unpack_from("=i", raw) == (max(map(len, pieces)),)
    letters = b"".join(pieces[decoders.SPACE_ID :]).decode()
    assert len(letters) == vocab_size - decoders.SPACE_ID  # one character each, so none is a merge of others


def test_what_is_printed_for_ids():
    pieces = decoders.make_pieces(300)
    letter = pieces[270]
    ids = [1, 259, 270, 3 + ord("a"), 3 + 7, 3 + 200, 3 + ord("\n"), 259, 270, 1, 259]
    assert decoders.printed_text(ids, pieces) == letter + b"a\n " + letter + b"<s>"


def test_a_comparison_of_texts_names_where_it_ends():
    program = object.__new__(decoders.Llama2C)
    program.pieces = decoders.make_pieces(300)
    program.text = program.pieces[270] + program.pieces[271]
    assert program.compare([1, 259, 270, 271]) == "identical text"
    assert program.compare([1, 259, 270, 271, 1, 280]) == "identical text up to bos, position 4"
    assert program.compare([1, 259, 270, 272]) == "DIFFERENT text after 1 characters"


def test_llama2c_says_the_same_text(tmp_path: Path):
    if not os.environ.get("MINLLAMA_LLAMA2C"):
        pytest.skip("MINLLAMA_LLAMA2C names no compiled llama2.c")
    model = random_llama(attention="causal", layer_norm_eps=1e-5, seed=1, gain=8.0)
    binary = decoders.find_program(os.environ["MINLLAMA_LLAMA2C"])
    program = decoders.Llama2C(binary, tmp_path, model.state_dict(), model.config, threads=1)
    prompt = [1, 259, 270, 281, 292]
    assert program.generate(prompt, 40) > 0.0
    ids = model.generate(torch.tensor([prompt]), 40, temperature=0.0)[0].tolist()
    assert program.compare(ids).startswith("identical text") and len(set(ids[5:])) > 5
    assert program.compare([*ids[:20], 260, *ids[21:]]).startswith("DIFFERENT") or ids[20] == 260
