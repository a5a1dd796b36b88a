"""The page as a file: it asks no network, nothing in a text can break it, and what cannot be shown is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SENTENCES, random_llama, save_checkpoint
from pages import Trained, data_of, trained  # noqa: F401

from engine.data import create_data, pack
from engine.runs import load_classifier, predict
from engine.tasks import confusion
from explore import page as pages_module
from explore.__main__ import get_args, main
from explore.decision import decide
from explore.page import MAX_PAGE_BYTES, PAGE_FOLDER, SCRIPTS, as_script, render, write_page
from explore.trained import page_of_result, page_of_results
from utils import UserError

VOID = {"meta", "link", "br", "input", "hr", "img"}
HOSTILE = (
    "</script><script>document.title = 'broken'</script>", "<!-- <script>", "]]> & <b>bold</b> \"quoted\" 'twice'",
    "\u2028 and \u2029 end lines", "שלום 👩‍👩‍👧 🐐 مرحبا", "\\u003c \\n {{}} <!--script--> <!--data-->",
    'src="http://x.example" href=http://y',
)  # fmt: skip


class Outline(HTMLParser):
    """The elements of a page, and whether they are closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.elements if name in attributes]


def explore(out: Path, *flags: object) -> dict[str, Any]:
    """Run the command in this process. Returns the figures in the page that it writes to `out`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["explore", "--out", str(out), *map(str, flags)])
        main()
    return data_of(out)


# -------------------------------------------------------------------------------------------------- the file


def test_the_page_needs_no_other_file_and_no_network(trained: Trained):
    text = trained.page.read_text("utf-8")
    outline = Outline(text)
    assert outline.attributes("src") == []
    assert all(target.startswith(("#", "data:")) for target in outline.attributes("href"))
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", text)
    (policy,) = [each["content"] for _, each in outline.elements if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "http" not in policy and "*" not in policy
    assert trained.page.stat().st_size < MAX_PAGE_BYTES <= 5_000_000


def test_the_page_can_be_read_by_machines_that_read_aloud(trained: Trained):
    outline = Outline(trained.page.read_text("utf-8"))
    ids = outline.attributes("id")
    assert len(set(ids)) == len(ids)
    assert all(name in ids for each in outline.attributes("aria-labelledby") for name in each.split())
    tags = [tag for tag, _ in outline.elements]
    assert tags.count("h1") == 1 and tags.count("main") == 1 and tags.count("title") == 1
    assert outline.elements[1][1] | outline.elements[0][1] == {"lang": "en"}
    assert [each for each in outline.attributes("href") if each.startswith("#")][0] == "#main"  # what one can skip to
    for tag, attributes in outline.elements:
        assert tag != "section" or "aria-labelledby" in attributes
        assert tag != "img" or "alt" in attributes
        assert attributes.get("tabindex", "0") in ("0", "-1")  # the order is that of the page


def test_no_number_is_written_that_no_browser_reads():
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_script({"loss": float("nan")})


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_ends_the_script_that_it_stands_in(text: str):
    script = as_script({"text": text})
    assert "<" not in script and "\u2028" not in script and json.loads(script) == {"text": text}
    content = {"run": {"name": text, "runs": []}}
    rendered = render(content)
    assert json.loads(re.search(r'id="data">(.*?)</script>', rendered, re.DOTALL)[1]) == content
    assert [tag for tag, _ in Outline(rendered).elements].count("script") == 2


def test_every_part_of_the_program_is_on_the_page_and_a_large_page_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert {path.stem for path in PAGE_FOLDER.glob("*.js")} == set(SCRIPTS)
    rendered = render(content := {"run": {"name": "x", "runs": []}})
    assert "<!--" not in rendered.replace("<!doctype", "")
    assert all((PAGE_FOLDER / f"{name}.js").read_text("utf-8") in rendered for name in SCRIPTS)
    monkeypatch.setattr(pages_module, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(UserError, match="fewer or shorter"):
        write_page(str(tmp_path / "x.html"), content)
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------------------ what it is made of


def test_the_page_of_a_run_has_the_model_its_decisions_and_the_run(trained: Trained):
    content = data_of(trained.page)
    assert content["model"]["label_names"] == ["bad", "good"] and content["model"]["attention"] == "causal"
    (run,) = content["run"]["runs"]
    flags = {"epochs": 2, "lr": 1e-4, "batch_size": 10, "attention": "causal"}
    assert flags.items() <= run["settings"].items() and None not in run["settings"].values()
    errors = [(each["sentence"], each["label"]) for each in run["judged"][0]["errors"]]
    assert [(each["text"], each["gold"]) for each in content["texts"][:2]] == errors[:2]  # of dev
    assert run["steps"] == 6 and [each["epoch"] for each in run["epochs"]] == [0, 1]
    model, about = load_classifier(trained.model)
    assert content["model"]["parameters"] == sum(each.numel() for each in model.parameters())  # the head's, too
    for text in content["texts"]:
        (prediction,) = predict(model, about, [text["text"]])
        assert text["decision"]["probabilities"] == pytest.approx(prediction.probabilities, rel=1e-3)
        found = decide(model, model.llama.tok_embeddings, text["ids"])
        stored = [None if value is None else pytest.approx(value, rel=1e-3) for value in text["decision"]["occlusion"]]
        assert stored == [None if value != value else value for value in found.occlusion.flatten().tolist()]
        assert text["decision"]["gradient"] == pytest.approx(found.gradient.flatten().tolist(), rel=2e-3, abs=1e-6)


def test_data_are_judged_and_their_worst_errors_shown_first(trained: Trained, films: dict[str, Path], tmp_path: Path):
    content = explore(tmp_path / "p.html", trained.model, "--data", films["train"], "--count", 4)
    (judged,) = content["run"]["runs"][0]["judged"]
    model, about = load_classifier(trained.model)
    examples = create_data(films["train"])
    found = [*predict(model, about, [example.sentence for example in examples])]
    labels, said = [example.label for example in examples], [prediction.label for prediction in found]
    assert judged["confusion"] == confusion(labels, said, 2) and sum(map(sum, judged["confusion"])) == 24
    of_gold = {index: found[index].probabilities[label] for index, label in enumerate(labels) if label != said[index]}
    worst = sorted(of_gold, key=of_gold.get)
    assert len(worst) > 2
    assert [error["index"] for error in judged["errors"]] == worst
    assert [text["text"] for text in content["texts"][:2]] == [examples[index].sentence for index in worst[:2]]
    assert [text["gold"] for text in content["texts"][:2]] == [labels[index] for index in worst[:2]]
    others = [example.sentence for index, example in enumerate(examples) if index not in worst[:2]]
    assert [text["text"] for text in content["texts"][2:]] == others[:2]


def test_labels_of_a_file_with_columns_count_as_those_of_lines(
    trained: Trained, films: dict[str, Path], tmp_path: Path
):
    lines = explore(tmp_path / "p.html", trained.model, "--data", films["train"])
    rows = [{"review": each.sentence, "stars": each.label} for each in create_data(films["train"])]
    (tmp_path / "own.jsonl").write_text(
        "\n".join(map(json.dumps, [*rows, {"review": None, "stars": 1}])), encoding="utf-8"
    )
    flags = "--text-column", "review", "--label-column", "stars", "--skip_empty"
    columns = explore(tmp_path / "p.html", trained.model, "--data", tmp_path / "own.jsonl", *flags)
    assert columns["texts"] == lines["texts"]
    (judged,), (of_lines,) = (content["run"]["runs"][0]["judged"] for content in (columns, lines))
    assert judged | {"split": ""} == of_lines | {"split": ""} and sum(map(sum, judged["confusion"])) == len(rows)


def test_data_without_gold_labels_are_shown_and_not_judged(trained: Trained, films: dict[str, Path], tmp_path: Path):
    lines = [f"-1{line[1:]}" for line in films["test"].read_text("utf-8").splitlines()]
    (tmp_path / "blind.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    content = explore(tmp_path / "p.html", trained.model, "--data", tmp_path / "blind.txt", "--count", 2)
    assert [text["text"] for text in content["texts"]] == [line.partition(" ||| ")[2] for line in lines[:2]]
    assert {text["gold"] for text in content["texts"]} == {None} and "run" not in content


def test_a_checkpoint_alone(
    tiny_checkpoint: Path, films: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "s.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    flags = "--data", tmp_path / "s.txt", "--count", 3, "--attention", "causal"
    content = explore(tmp_path / "p.html", tiny_checkpoint, *flags)
    assert [text["text"] for text in content["texts"]] == [*SENTENCES[:3]] and "run" not in content
    assert content["model"]["attention"] == "causal" and "decision" not in content["texts"][0]
    assert capsys.readouterr().out == f"wrote {tmp_path / 'p.html'}\n"
    content = explore(tmp_path / "q.html", tiny_checkpoint, "--data", films["test"], "--count", 2)
    assert len(content["texts"]) == 2 and "run" not in content  # labels that a checkpoint cannot predict


def test_a_checkpoint_without_a_tokenizer_reads_ids(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = shutil.copy(tiny_checkpoint, tmp_path / "alone.pt")
    monkeypatch.setattr("explore.inspected.find_asset", lambda name: None)
    content = explore(tmp_path / "p.html", alone, "--text", "1 270 271", "--attention", "causal")
    assert content["texts"][0]["ids"] == [1, 270, 271] and content["model"]["attention"] == "causal"


def test_a_log_dir_alone_and_beside_a_model(trained: Trained, tmp_path: Path):
    alone = explore(tmp_path / "a.html", trained.log / "metrics.jsonl")
    beside = explore(tmp_path / "b.html", trained.model, "--run", trained.log, "--text", "a film")
    assert "texts" not in alone and alone["run"] == beside["run"] and beside["texts"][0]["text"] == "a film"
    of_run = data_of(trained.page)["run"]["runs"][0]
    assert alone["run"]["runs"][0] | {"name": ""} == of_run | {"name": ""}


def test_a_run_beside_a_model_takes_nothing_from_its_data(trained: Trained, films: dict[str, Path], tmp_path: Path):
    flags = trained.model, "--data", films["dev"], "--count", 1
    (judged,) = explore(tmp_path / "p.html", *flags)["run"]["runs"]
    first, second = explore(tmp_path / "p.html", *flags, "--run", trained.log)["run"]["runs"]
    assert first == judged and second["steps"] == 6
    of_dev = {key: value for key, value in second["judged"][0].items() if key != "split"}
    assert of_dev.items() <= first["judged"][0].items()  # the same model on the same sentences


def test_results_of_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three classes, four sentences, three runs, the hardest sentences first; a run of other data has its scores."""
    (tmp_path / "dev.txt").write_text("".join(f"{label} ||| text {label}{n}\n" for n, label in enumerate((0, 1, 2, 2))))
    (tmp_path / "names.json").write_text('["poor", "fair", "fine"]')
    found = {True: tmp_path / "names.json", False: tmp_path / "dev.txt"}
    monkeypatch.setattr("explore.trained.find_asset", lambda name: str(found["mapping" in name]))
    result = {"row": "plain", "data": "few", "shots": 4, "method": "", "arguments": [], "epoch": 1}
    result |= {"settings": {"hold_out": 0.1}, "epoch_scores": [0.5, 0.75], "train_losses": [1.0, 0.5]}
    scores = {"accuracy": 0.5, "macro_f1": 0.4}
    said = [[0, 0, 1, 2], [0, 2, 0, 2], [2, 2, 0, 2], [0, 1, 2]]
    results = [
        {**result, "seed": seed, "dev": scores | {"predictions": pack(predictions)}}
        for seed, predictions in enumerate(said)
    ]
    results[3] |= {"shots": None, "settings": {}}
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(each) + "\n" for each in results))
    content = explore(tmp_path / "p.html", tmp_path / "r.jsonl")["run"]
    runs, judged = content["runs"], [run["judged"][0] for run in content["runs"]]
    assert [run["name"] for run in runs[:3]] == [f"plain, few (4 a class), seed {seed}" for seed in range(3)]
    assert runs[3]["name"] == "plain, few (all), seed 3"
    assert [run["chosen_on"] for run in runs[2:]] == ["held-out sentences", "dev"]
    finished = page_of_result({**results[0], "settings": {"epochs": 1}})["epochs"]  # a method changed the model then
    assert [each["is_finish"] for each in runs[0]["epochs"] + finished] == [False, False, False, True]
    epochs = [(each["epoch"], each["train_loss"], each["dev_score"], each["is_best"]) for each in runs[0]["epochs"]]
    assert epochs == [(0, 1.0, 0.5, False), (1, 0.5, 0.75, True)]
    assert judged[0]["majority"] == 0.5 and judged[0]["confusion"] == [[1, 0, 0], [1, 0, 0], [0, 1, 1]]
    assert judged[3] == {"split": "dev", **scores}
    shown = ("sentence", "label", "prediction", "wrong", "runs")
    assert [tuple(each[name] for name in shown) for each in content["hard"]] == [
        ("text 11", "fair", "fine", 3, 3), ("text 22", "fine", "poor", 3, 3), ("text 00", "poor", "fine", 1, 3)
    ]  # fmt: skip
    with pytest.raises(UserError, match="no run that was judged"):
        page_of_results([result], "x")
    results[0].pop("settings")
    with pytest.raises(UserError, match="the result a has no 'settings'"):
        page_of_results([results[0] | {"key": "a"}], "x")


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["{model}", "--text", " "], "holds no text"), (["{model}", "--text", "a \udcff"], "not UTF-8"),
        (["{model}", "--text", "a", "--data", "x"], "give one"), (["{model}", "--data", "absent"], "does not exist"),
        (["absent.pt"], "MODEL absent.pt does not exist"), (["{model}", "--count", "0"], "from 1 to 20"),
        (["{log}", "--text", "a"], "is for a model"), (["{model}", "--run", "absent"], "neither a folder"),
        (["{model}", "--attention", "causal"], "has its own tokenizer and attention"), (["{folder}"], "is a folder"),
        (["{tiny}", "--text", "slow " * 2000], "1024 at most"), (["{lines}"], "line 1 is not a result: 'data' of"),
        (["{log}", "--out", "p.txt"], "must end in .html"), (["{log}", "--out", "absent/p.html"], "does not exist"),
        (["{bert}"], "'bert'"), (["{page}"], "cannot load"), (["{nan}"], "not all numbers are finite"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(trained: Trained, tiny_checkpoint: Path, tmp_path: Path, flags: list[str], why: str):
    (tmp_path / "folder").mkdir()
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "lines.jsonl").write_text('{"row": "plain"}\n')
    (tmp_path / "page.pt").write_text("<html>")
    llama = random_llama()
    with torch.no_grad():
        llama.layers[0].feed_forward.w1.weight[0, 0] = torch.nan
    save_checkpoint(tmp_path / "nan.pt", llama)
    paths = {path.stem: path for path in tmp_path.iterdir()}
    named = [flag.format(model=trained.model, log=trained.log, tiny=tiny_checkpoint, **paths) for flag in flags]
    with pytest.raises(UserError, match=re.escape(why)):
        explore(tmp_path / "p.html", *named)
    assert not (tmp_path / "p.html").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_to_is_named(trained: Trained, tmp_path: Path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="not writable"):
            explore(tmp_path / "p.html", trained.log)
    finally:
        tmp_path.chmod(0o700)


def test_no_input_is_written_over(trained: Trained, tiny_checkpoint: Path, tmp_path: Path):
    (data := tmp_path / "texts.html").write_text("a film\n")
    shutil.copy(tiny_checkpoint, model := tmp_path / "model.html")
    before = model.read_bytes()
    for flags, out in (([model], model), ([trained.model, "--data", data], tmp_path / "." / "texts.html")):
        with pytest.raises(UserError, match="is also an input; give it a name of its own"):
            explore(out, *flags)
    assert model.read_bytes() == before and data.read_text() == "a film\n"


def test_mistakes_are_found_without_pytorch(tmp_path: Path):
    code = "import sys, explore.__main__ as it; it.check_args(it.get_args()); assert 'torch' not in sys.modules"
    assert get_args(["m", "--out", "p.html"]).count == 6
    root = Path(pages_module.__file__).parent.parent
    command = [sys.executable, "-c", code, str(root / "checkpoints/minllama1M.pt"), "--out", str(tmp_path / "p.html")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scheme", ["bytes", "words", None])
def test_a_directory_of_hugging_face(tmp_path: Path, scheme: str | None):
    """With a `tokenizer.json` its tokens are shown as text; without one texts are ids."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    folder = tmp_path / "hf"
    shape = dict(vocab_size=300, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    config = transformers.LlamaConfig(**shape, num_hidden_layers=1, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    text = "1 270 271"
    if scheme:
        save_tokenizer(folder, scheme)
        text = "a warm \u00e9clair"
    content = explore(tmp_path / "p.html", folder, "--text", text)
    shown = [content["pieces"][str(id)] for id in content["texts"][0]["ids"]]
    assert content["model"]["attention"] == "causal"
    spoken = {"bytes": "a\u2581warm\u2581", "words": "\u2581a\u2581warm\u2581"}
    assert "".join(shown).startswith(spoken[scheme]) if scheme else shown == ["1", "270", "271"]
    assert all(content["pieces"][str(id)] for layer in content["texts"][0]["semantics"]["causal"]["lens"]
               for id in layer["ids"])  # also of the rows of the matrix that are no piece  # fmt: skip


def save_tokenizer(folder: Path, scheme: str) -> None:
    """Train a `tokenizer.json` whose pieces are of "bytes", as GPT-2's are, or of "words", as Llama's are."""
    tokenizers = pytest.importorskip("tokenizers")
    parts, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    made, alphabet = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>")), ["\u2581"]
    made.pre_tokenizer, made.decoder = parts.Metaspace(), decoders.Metaspace()
    if scheme == "bytes":
        made, alphabet = tokenizers.Tokenizer(tokenizers.models.BPE()), parts.ByteLevel.alphabet()
        made.pre_tokenizer, made.decoder = parts.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["a warm film and an \u00e9clair", "warm warm film"], trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
