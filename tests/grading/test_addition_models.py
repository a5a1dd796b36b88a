"""The trained models of additions, read in a box: right ones, lies in the JSON beside them, files that hold code."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from conftest import ROOT
from judging import student  # noqa: F401
from test_box import box, nothing_left  # noqa: F401

from config import LlamaConfig
from grading import addition_models
from grading.addition import BEST, CAPACITY_LIMIT, Experiment, contradictions
from grading.addition_models import LETTERS, LanguageModel, Unfit, check_models, continued, draw_problems, parameters_of
from grading.answers import Wrong, saved_model
from grading.box import BoxedStudent, InBox
from grading.judge import Judgement, examine, grade_of
from grading.sandbox import Box
from grading.settings import Settings
from handout.editions import text_of
from llama import Llama, load_pretrained

FOUR = ["1249+7996=9245", "3213+2675=5888", "9999+9999=19998", "5120+5970=11090"]
ABLATIONS = [f"ablation_{number}" for number in range(1, 6)]


def shape_of(dim: int, n_layers: int = 1) -> dict:
    """What addition_run.py of spring 2026 saves as model_config.json."""
    return {
        "vocab_size": 13, "dim": dim, "dropout": 0.0, "n_layers": n_layers, "n_heads": 4, "n_kv_heads": 2,
        "max_seq_len": 20, "layer_norm_eps": 1e-5, "multiple_of": 32, "hidden_dim": None,
        "position_embedding_type": "rotary", "use_cache": True,
    }  # fmt: skip


def llama_of(shape: dict) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**shape, norm="layer", attention="causal"))


def learn(model: Llama, problems: list[str]) -> torch.optim.Optimizer:
    """Learn these answers, and an end after each, by heart."""
    rows = [[0, *map(LETTERS.index, problem), 0, 0][:17] for problem in problems]
    tokens = torch.tensor([row + [0] * (17 - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200 if problems else 0):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1], tokens[:, 1:])[0]
        torch.nn.functional.cross_entropy(logits[:, 10:].flatten(0, 1), tokens[:, 11:].flatten()).backward()
        optimizer.step()
    return optimizer


def save_experiment(place: Path, dim: int, problems: list[str], **summary: object) -> None:
    """The files that addition_run.py writes for one model: `train`, and then `test`, which writes the summary."""
    place.mkdir(parents=True)
    shape = shape_of(dim)
    model = llama_of(shape)
    optimizer, size = learn(model, problems), sum(one.numel() for one in model.parameters())
    samples = math.ceil(CAPACITY_LIMIT / (6 * size * 10))
    training = {"capacity": CAPACITY_LIMIT, "n_epochs": 10, "batch_size": 1024, "save_dir": str(place)}
    training |= {"model_parameters": size, "train_samples": samples}
    saved = {"model": model.state_dict(), "optim": optimizer.state_dict(), "args": shape, "model_config": training}
    saved |= {"system_rng": random.getstate(), "numpy_rng": numpy.random.get_state()}
    torch.save({**saved, "torch_rng": torch.random.get_rng_state()}, place / "best_model.pth")
    found = {"model_config": shape, "num_params": size, "accuracy": 1.0 if problems else 0.0, **summary}
    for name, content in (("model_config", shape), ("training_config", training), ("experiment_summary", found)):
        (place / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six honest models: the best one knows `FOUR`, the others nothing."""
    folder = tmp_path_factory.mktemp("trained") / "addition_models"
    save_experiment(folder / BEST, 16, FOUR)
    for name in ABLATIONS:
        save_experiment(folder / name, 8, [])
    return folder


class Call:
    """Pickled, it is a call of `os.mkdir`."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def edit(name: str, **values: object) -> Callable[[Path], object]:
    def change(place: Path) -> None:
        (place / name).write_text(json.dumps({**json.loads((place / name).read_text()), **values}))

    return change


def of_another_model(place: Path) -> None:
    torch.save({"model": torch.nn.Linear(3, 2).state_dict()}, place / "best_model.pth")


CASES = {  # what is done to the folder of the best model; codes; what is said
    "honest": (lambda place: None, [], ""),
    "accuracy of an ablation": (
        lambda place: edit("experiment_summary.json", accuracy=0.9)(place.parent / "ablation_3"), ["E086-claims"],
        "experiment_summary.json says accuracy 0.9; it is 0.0"),
    "size": (edit("experiment_summary.json", num_params=99), ["E086-claims"], "says num_params 99; it is "),
    "size in training": (edit("training_config.json", model_parameters=99), ["E086-claims"], "model_parameters 99"),
    "steps": (edit("training_config.json", train_samples=1024), ["E086-claims"],
              "means 10 steps; the optimizer made 200"),
    "no number": (edit("experiment_summary.json", accuracy="all"), ["E086-claims"], "accuracy all"),
    "endless number": (edit("experiment_summary.json", accuracy=10**400), ["E086-claims"], "it is 1.0"),
    "more operations": (edit("training_config.json", n_epochs=11, capacity=CAPACITY_LIMIT * 11 // 10),
                        ["E084-capacity"], "more than 5,808,844,800,000 operations: best_model"),
    "too large": (lambda place: os.truncate(place / "best_model.pth", 1 << 26), ["E083-model"], "67,108,864 bytes"),
    "another model": (of_another_model, ["E083-model"], "no first layer"),
    "other heads": (edit("model_config.json", n_heads=3), ["E083-model"], "3 heads"),
    "no training": (lambda place: (place / "training_config.json").unlink(), ["E083-model"], "is missing"),
    "code": (lambda place: torch.save({"model": Call(Path("/tmp/called"))}, place / "best_model.pth"),
             ["E083-model"], "it would call posix.mkdir"),
    "no tensors": (lambda place: (place / "best_model.pth").write_bytes(b"tensors"), ["E083-model"], "no file of"),
    "a link": (lambda place: ((place / "best_model.pth").unlink(),
                              (place / "best_model.pth").symlink_to("/etc/passwd")), [], ""),  # it is not followed
}  # fmt: skip


@pytest.mark.slow
def test_what_is_said_of_the_models(models: Path, box: Box, nothing_left: Path, tmp_path: Path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(addition_models, "draw_problems", lambda drawer: FOUR)
    (tmp_path / "empty").mkdir()
    with BoxedStudent(tmp_path / "empty", box=box) as reader:
        for name, (change, codes, said) in CASES.items():
            folder = tmp_path / name / "addition_models"
            shutil.copytree(models, folder)
            change(folder / BEST)
            executed = [*check_models(reader, folder, random.Random(0))]
            assert [one.code for one in executed if not one.passed] == codes, (name, executed)
            assert not codes or said in next(one.message for one in executed if one.code), (name, executed)
            assert all(one.message.endswith("% of drawn problems") for one in executed if one.passed), executed
    assert not Path("/tmp/called").exists()


@pytest.mark.slow
def test_a_submission_with_models_has_its_grade(models: Path, student: Path, box: Box, nothing_left, monkeypatch):  # noqa: F811
    """In the box the best model solves the four problems that it knows, and of drawn ones none."""
    for path in student.glob("*.py"):
        path.write_text(text_of(path.name, "cmu2026"), encoding="utf-8")
    shutil.copytree(models, student / "addition_models")
    settings = Settings("cmu2026", gold=str(student))
    drawn = draw_problems(random.Random(0))[:50]
    for problems, codes, letter in ((FOUR, set(), "A"), (drawn, {"E082-addition", "E086-claims"}, "A-")):
        monkeypatch.setattr(addition_models, "draw_problems", lambda drawer, problems=problems: problems)
        judgement = examine(student, "alice", settings, run_code=InBox(box))
        judgement.findings = [one for one in judgement.findings if one.code > "E08"]
        assert {one.code for one in judgement.findings} == codes, judgement.findings
        assert grade_of(judgement.findings, judgement, settings).letter == letter
        assert [one.passed for one in judgement.parts if "ablation" in one.part] == [True] * 5


def test_without_running_code_the_models_are_open():
    found = grade_of([], Judgement(was_read=True), Settings("cmu2026"))
    assert found.status == "provisional"
    assert found.open[:2] == ["the student's code was not run", "the models in addition_models/ were not judged"]


def test_of_several_files_of_weights_the_first_by_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (place := tmp_path / "addition_models" / BEST).mkdir(parents=True)
    (place / "training_config.json").write_text('{"train_samples": 1, "n_epochs": 1, "batch_size": 1}')
    (place / "model_config.json").write_text('{"n_heads": 1}')
    for name in ("b.pth", "a.pth"):
        (place / name).touch()
        os.truncate(place / name, 1 << 26)
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: sorted(listed(folder), reverse=True))
    (found,) = check_models(None, place.parent, random.Random(0))
    assert found.message.startswith("a.pth has 67,108,864 bytes")


def test_a_file_that_holds_code_is_not_obeyed(tmp_path: Path):
    torch.save({"model": Call(tmp_path / "called")}, tmp_path / "code.pth")
    raw = (tmp_path / "code.pth").read_bytes()
    with pytest.raises(Wrong, match=r"it would call posix\.mkdir"):
        saved_model(torch.frombuffer(bytearray(raw + bytes(-len(raw) % 8)), dtype=torch.int64), len(raw))
    assert not (tmp_path / "called").exists()


def test_heads_that_fit_nothing_are_told():
    for rows, dim, n_heads in ((0, 0, 1), (0, 8, 2), (8, 8, 3), (8, 6, 2), (6, 8, 2), (16, 8, 2)):
        with pytest.raises(Unfit, match=f"{n_heads} heads, which do not fit its {dim} and {rows} rows"):
            continued({"layers.0.attention.compute_key.weight": torch.zeros(rows, dim)}, n_heads, [])


@pytest.mark.parametrize("dim, n_layers", [(8, 1), (24, 2)])
def test_a_model_here_writes_what_llama_py_writes(dim: int, n_layers: int):
    model = llama_of(shape_of(dim, n_layers)).eval()
    for one in model.parameters():
        torch.nn.init.normal_(one, std=0.5)
    weights, prompts = model.state_dict(), [problem[:10] for problem in draw_problems(random.Random(0))[:40]]
    tokens = torch.tensor([[0, *map(LETTERS.index, prompt)] for prompt in prompts])
    texts = ["".join(LETTERS[one] for one in row) for row in model.generate(tokens, 6, temperature=0.0).tolist()]
    written = continued(weights, 4, prompts)
    assert written == [text[1:].partition(LETTERS[0])[0] for text in texts] and len(set(written)) > 20
    assert parameters_of(weights) == sum(one.numel() for one in model.parameters())
    mask = torch.ones(20, 20)  # that the course's modules keep
    assert parameters_of({**weights, "layers.0.attention.causal_mask": mask}) == parameters_of(weights)
    other = {**weights, "tok_embeddings.weight": weights["output.weight"] + 1}
    assert parameters_of(other) == parameters_of(weights) + 13 * dim
    for name, tensor in (("layers.0.ffn_norm.bias", torch.ones(9, 1, 1)), ("layers.7.x.weight", torch.ones(1))):
        with pytest.raises(Unfit, match="no Llama of additions"):
            parameters_of({**weights, name: tensor})


def test_the_bundled_model_is_continued_as_llama_py_does():
    """With RMSNorms and weights that were trained."""
    llama = load_pretrained(ROOT / "checkpoints" / "minllama1M.pt", attention="causal")
    idx = torch.tensor([[1, 300, 20, 77, 500], [1, 8, 9, 10, 11]])
    model = LanguageModel(llama.state_dict(), llama.config.n_layers, llama.config.dim // llama.config.n_heads)
    assert torch.equal(model.continued(idx, 12), llama.generate(idx, 12, 0.0))


def test_claims_near_what_was_measured_are_honest():
    training = {"train_samples": 1000, "n_epochs": 10, "batch_size": 300, "model_parameters": 500}
    training["capacity"] = 29_999_000
    one = Experiment(500, 30_000_000, 0.93, 40)
    assert [*contradictions(one, training, {"accuracy": 0.95, "num_params": 500})] == []
    assert [*contradictions(one, training, {})] == []
    assert len([*contradictions(one._replace(accuracy=0.97), training, {"accuracy": 1.0})]) == 1
    assert len([*contradictions(one._replace(steps=41), training, {})]) == 1
    assert len([*contradictions(one._replace(accuracy=0.9995), training, {"accuracy": 1.0})]) == 0
    assert len([*contradictions(one, training, {"accuracy": float("nan")})]) == 1
