"""Copies among submissions are found under every disguise, and people who wrote alone are not."""

import ast
import os
import random
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from disguise import DISGUISES, disguised
from error_helpers import check_one_error

from grading import similar
from grading.programs import run_main
from grading.similar import THRESHOLDS, Pair, all_pairs, plain

HOLES = {"_norm", "compute_query_key_value_scores", "forward", "generate", "apply_rotary_emb", "step", "_update",
         "_rotate_pairs"}  # fmt: skip
# The same two holes, as two others might write them.
VARIANTS = {
    "optimizer.py": (
        """
class AdamW(Optimizer):
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("Adam does not support sparse gradients")
                s = self.state[p]
                if "t" not in s:
                    s["t"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["t"] += 1
                s["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                size = group["lr"] * math.sqrt(1 - b2 ** s["t"]) / (1 - b1 ** s["t"])
                p.data.addcdiv_(s["m"], s["v"].sqrt().add_(group["eps"]), value=-size)
                p.data.add_(p.data, alpha=-group["lr"] * group["weight_decay"])
        return loss
""",
        """
class AdamW(Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        live = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for group, param in live:
            memory = self.state[param]
            count = memory["count"] = memory.get("count", 0) + 1
            beta1, beta2 = group["betas"]
            first = memory["first"] = torch.lerp(param.grad, memory.get("first", 0 * param), beta1)
            second = memory["second"] = torch.lerp(param.grad ** 2, memory.get("second", 0 * param), beta2)
            if group["correct_bias"]:
                first, second = first / (1 - beta1**count), second / (1 - beta2**count)
            param -= group["lr"] * (first / (second**0.5 + group["eps"]) + group["weight_decay"] * param)
        return loss
""",
    ),
    "rope.py": (
        """
def apply_rotary_emb(query, key, head_dim, max_seq_len, theta=10000.0):
    _, seqlen, _, _ = query.shape
    device = query.device
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim))
    angles = torch.outer(torch.arange(seqlen, device=device).float(), freqs)
    cos, sin = angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]
    outs = []
    for x in (query, key):
        real, imag = x.float().reshape(x.shape[:-1] + (-1, 2)).unbind(-1)
        outs.append(torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1).flatten(3).type_as(x))
    return tuple(outs)
""",
        """
def apply_rotary_emb(query, key, head_dim, max_seq_len, theta=10000.0):
    inv = torch.pow(theta, -torch.arange(head_dim // 2, device=query.device) * 2.0 / head_dim)
    position = torch.arange(query.size(1), device=query.device).unsqueeze(1)
    turn = torch.polar(torch.ones_like(position * inv), position * inv).unsqueeze(1)
    def spin(t):
        pairs = torch.view_as_complex(t.float().view(*t.shape[:-1], head_dim // 2, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).to(t.dtype)
    return spin(query), spin(key)
""",
    ),
}


def hand_out(code: str) -> str:
    """A file of this package with nothing in its holes."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in HOLES:
            node.body = ast.parse("raise NotImplementedError").body
    return ast.unparse(tree)


@pytest.fixture(scope="module")
def own() -> dict[str, str]:
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in THRESHOLDS}


@pytest.fixture
def course(tmp_path: Path, own: dict[str, str]) -> Path:
    """A folder with a hand-out, and submissions of two people who worked alone."""
    pytest.importorskip("copydetect")
    write(tmp_path / "handouts" / "ours", {name: hand_out(code) for name, code in own.items()})
    for number, who in enumerate(("ada", "bo")):
        sources = {name: variants[number] for name, variants in VARIANTS.items()}
        sources["llama.py"] = hand_out(own["llama.py"]) + sources["optimizer.py"]  # which nearly all is handed out
        write(tmp_path / "in" / who, sources)
    return tmp_path


def write(folder: Path, sources: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, code in sources.items():
        (folder / name).write_text(code, encoding="utf-8")


def run(monkeypatch: pytest.MonkeyPatch, course: Path, *words: object) -> int:
    given = (course / "in", "--handouts", course / "handouts", "--out", course, *words)
    monkeypatch.setattr(sys, "argv", ["similar", *map(str, given)])
    return run_main(similar.main)


# ------------------------------------------------------------------------------------------------------- findings


def test_people_who_worked_alone_are_not_found(course, monkeypatch, capsys):
    """Of one another, and of this package, which is a public solution; nor those who wrote next to nothing."""
    for who in ("cy", "di"):
        write(course / "in" / who, {"rope.py": (course / "handouts/ours/rope.py").read_text() + "\nlimit = 2048\n"})
    assert run(monkeypatch, course) == 0
    assert capsys.readouterr().out.startswith("0 pairs to look at, of 4 submissions and 1 public solutions")


@pytest.mark.parametrize("kind", DISGUISES)
def test_disguised_copies_are_found(course, own, monkeypatch, capsys, kind):
    """Of this package in a zip, of a public solution, and of another submission."""
    draw = random.Random(0)
    with zipfile.ZipFile(course / "in" / "eve.ZIP", "w") as archive:
        for name, code in own.items():
            archive.writestr(f"eve/{name}", disguised(code, kind, draw))
    public = {name: variants[0] for name, variants in VARIANTS.items()}
    write(course / "public" / "someone", {name: disguised(code, kind, draw) for name, code in public.items()})
    write(course / "in" / "bo2", {"rope.py": disguised(VARIANTS["rope.py"][1], kind, draw)})
    assert run(monkeypatch, course, "--public", course / "public", "--threshold", "rope.py=1") == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    expected = {(name, "eve.ZIP, public: this package") for name in THRESHOLDS if name != "classifier.py"}
    expected |= {(name, "ada, public: someone") for name in VARIANTS} | {("rope.py", "bo, bo2")}
    assert {tuple(line.split(maxsplit=2)[1:]) for line in lines} == expected
    assert all(line.startswith("1.00") for line in lines)


def test_uploads_of_one_student_are_no_pair(course, monkeypatch, capsys):
    for name in ("zoe_12_77_hw", "zoe_LATE_12_78_hw-1", "yan_13_79_hw"):
        write(course / "in" / name, {"rope.py": VARIANTS["rope.py"][1]})
    (course / "in" / "xi_14_80_hw.rar").write_bytes(b"Rar!\x1a\7\0")
    assert run(monkeypatch, course) == 0
    out, err = capsys.readouterr()
    pairs = [line.split(maxsplit=2)[2] for line in out.splitlines()[:-1]]
    assert [pair for pair in pairs if pair.count("zoe") == 2] == [] and len(pairs) == 5, pairs
    assert "xi_14_80_hw.rar is left out: not a zip archive: it is of the kind RAR" in err


def test_a_file_without_a_threshold_is_no_evidence(course, own, monkeypatch, capsys):
    write(course / "in" / "us", own)
    for flags, found in (((), 3), (("--threshold", "rope.py=none"), 2)):
        assert run(monkeypatch, course, *flags) == 0
        *lines, _ = capsys.readouterr().out.splitlines()
        assert len(lines) == found and any("rope.py" in line for line in lines) == (found == 3)


def test_hostile_names_and_code_are_escaped(course, own, monkeypatch):
    hostile = own["optimizer.py"] + '\nCODE = "</pre><script>alert(1)</script>"\n'
    for name in ("<script>alert(2)<", "&other"):
        write(course / "in" / name, {"optimizer.py": hostile})
    assert run(monkeypatch, course) == 0
    page = (course / "similar.html").read_text(encoding="utf-8")
    assert "alert(1)" in page and "alert(2)" in page and "<script" not in page
    assert "<mark>" in page and similar.WALL not in page


# -------------------------------------------------------------------------------------------------- what is compared


@pytest.mark.parametrize("kind", DISGUISES)
def test_disguises_change_the_file_and_not_what_it_does(own, kind):
    """Reformatting is undone entirely; the other two keep every statement."""
    for code in own.values():
        copy = disguised(code, kind, random.Random(3))
        assert copy != code and "\n" in copy
        if kind == "reformatted":
            assert plain(copy) == plain(code) and copy.count("\n") > code.count("\n")
        counts = [
            sorted(type(node).__name__ for node in ast.walk(ast.parse(text))) for text in (plain(copy), plain(code))
        ]
        assert counts[0] == counts[1]


def test_large_files_links_and_what_macos_adds_are_not_read(tmp_path):
    (tmp_path / "rope.py").write_text("x" * (similar.MAX_SOURCE + 1))
    write(tmp_path / "deep", {"optimizer.py": "deep", "llama.py": "deep"})
    write(tmp_path / "__MACOSX", {"classifier.py": "x"})
    (tmp_path / "optimizer.py").symlink_to("/etc/passwd")
    (tmp_path / "llama.py").write_text("high")
    assert similar.read_sources(tmp_path) == {"llama.py": "high", "optimizer.py": "deep"}


def test_the_most_alike_come_first_and_equal_ones_by_name():
    shares = {("b", "c"): 0.5, ("a", "c"): 0.9, ("a", "b"): 0.5}

    class Shares:
        def pair(self, file, first, second):
            return Pair(file, shares[first[0], second[0]], first[0], second[0], ())

    pairs = all_pairs(Shares(), {"y.py": dict.fromkeys("abc"), "x.py": dict.fromkeys("ab")}, {})
    assert [(pair.file, pair.first + pair.second) for pair in pairs] == [
        ("y.py", "ac"), ("x.py", "ab"), ("y.py", "ab"), ("y.py", "bc")
    ]  # fmt: skip


def test_docstrings_are_left_out():
    assert "doc" not in plain('"""A doc."""\nclass A:\n    """Its doc."""\n\n    def f():\n        """A doc."""')


@pytest.mark.parametrize("code", ["def f(:", "x = 1\0", "(" * 5000, "", '"""Only this."""', f"import  a{'.a' * 2000}"])
def test_any_text_is_compared(code: str):
    """What is no Python stays as it is, and so does what takes its parser gigabytes; a copy is the file itself."""
    assert plain(code) in (code, "", "pass")
    for kind in DISGUISES:
        assert isinstance(disguised(code, kind, random.Random(0)), str)


def test_errors_are_one_line(course, monkeypatch, capsys):
    (course / "in" / "broken.zip").write_bytes(b"no zip")
    for said in ("not a zip archive", "more than 100 MB are not read"):
        assert run(monkeypatch, course) == 0
        assert f"broken.zip is left out: {said}" in capsys.readouterr().err.replace("1099511.6 MB; ", "")
        os.truncate(course / "in" / "broken.zip", 1 << 40)
    for flags, said in (
        (("--threshold", "llama.py=2"), "--threshold llama.py=2"),
        (("--threshold", "x.py=0.5"), "--threshold x.py=0.5"),
        (("--public", course / "absent"), "absent does not exist"),
        (("--handouts", course / "empty"), "holds no folder or zip"),
    ):
        (course / "empty").mkdir(exist_ok=True)
        check_one_error(run(monkeypatch, course, *flags), capsys.readouterr().err, said)


def test_an_absent_library_is_one_sentence(monkeypatch, capsys, tmp_path):
    write(tmp_path / "handouts" / "one", {"rope.py": "x = 1"})
    monkeypatch.setitem(sys.modules, "copydetect", None)
    check_one_error(run(monkeypatch, tmp_path), capsys.readouterr().err, "copydetect is not installed; pip install")
