"""`--serve`: the server answers as the page's own thread does, and nothing but its own page gets an answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chromium import Browser, browsing
from conftest import ROOT, SENTENCES, hear_interrupts
from test_live_model import TEXT, classifier_of
from test_live_page import BUNDLED, continued
from thread import Thread, occlusion_in_parts, rounded, thread_of

from explore import served
from explore.broken import BREAKS
from explore.inspected import InspectedModel
from explore.serve import MOST_BYTES, MOST_WAITING, LiveServer, serve
from explore.served import PageAnswers
from tokenizer import Tokenizer
from utils import UserError


@pytest.fixture(scope="module")
def bundled() -> InspectedModel:
    return rounded(InspectedModel.open(str(BUNDLED)))


@pytest.fixture(scope="module")
def thread(bundled: InspectedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thread]:
    with thread_of(bundled, tmp_path_factory.mktemp("thread")) as found:
        yield found


def same(ours: Any, theirs: Any, where: str = "answer") -> None:
    """Both answers have the same names and, but for rounding, the same numbers; NaN is None in one of them."""
    if isinstance(ours, bytes):
        ours = list(memoryview(ours).cast("h") if where.endswith("data") else ours)
        if where.endswith("data"):
            theirs = list(memoryview(bytes(theirs)).cast("h"))
        assert len(ours) == len(theirs) and max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 30, where
    elif isinstance(ours, dict):
        assert {str(key) for key in ours} == {str(key) for key in theirs}, where
        for key, value in ours.items():
            same(value, theirs[str(key)], f"{where}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for one, other in zip(ours, theirs, strict=True):
            same(one, other, where)
    elif isinstance(ours, float) and theirs != "NaN":
        assert float(theirs) == pytest.approx(ours, rel=2e-2, abs=2e-3), where
    else:
        assert ours == theirs or (ours is None and theirs == "NaN"), where


SWITCHES = (
    {},
    {"breaks": ["scores", "halves"]},
    {"attention": "bidirectional"},
    {"off": ["2", "1.3"], "uniform": ["4.1"]},
)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_it_answers_as_the_thread_of_a_page(bundled: InspectedModel, thread: Thread, switches: dict):
    answers = PageAnswers(bundled)
    given = dict(text=TEXT, added=[300, 7], switches=switches)
    sampled = dict(sampling=dict(temperature=1.3, topK=50, topP=0.9, minP=0.01), random=0.37)
    asked = {
        "next": [
            given | dict(sampling={"temperature": 0}, random=0),
            given | sampled,
            given | dict(sampling={"temperature": 1e-50}, random=0.37),  # which is no float32
        ],
        "written": [given],
        "numbers": [
            given | dict(layer=layer, head=head, query=5, key=key) for layer, head, key in ((0, 3, 2), (3, 1, 5))
        ],
        "perplexity": [given | {"bos": 1}],
    }
    for kind, each in asked.items():
        for one in each:
            same(answers.answer(kind, one), thread.ask(kind, **one), kind)
    ours, theirs = answers.answer("read", given), thread.ask("read", **given)
    assert ours["ids"] == theirs["ids"] and ours["first"] == theirs["first"] == 0
    for one, other in zip(ours["record"]["lens"], theirs["record"]["lens"], strict=True):
        same({name: one[name] for name in ("p", "next", "norm")}, {name: other[name] for name in ("p", "next", "norm")})
        assert sum(a != b for a, b in zip(one["ids"], other["ids"], strict=True)) < 6  # equal ones may change places
    same(ours["queries"]["data"], theirs["queries"]["data"], "data")
    assert len(ours["record"]["attention"]) == len(theirs["record"]["attention"])


@pytest.mark.parametrize("name", BREAKS)
def test_every_switch(bundled: InspectedModel, thread: Thread, name: str):
    given = dict(text="Once upon a time", added=[], switches={"breaks": [name]})
    greedy = given | dict(sampling={"temperature": 0}, random=0)
    same(PageAnswers(bundled).answer("next", greedy), thread.ask("next", **greedy), name)
    pair = given | dict(use="right", layer=1, head=2, query=4, key=3)
    if name != "norm":  # NaN beyond the first layer
        same(PageAnswers(bundled).answer("numbers", pair), thread.ask("numbers", **pair), name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "label words"])
def test_classifiers(kind: str, tokenizer: Tokenizer, tmp_path: Path):
    inspected = classifier_of(kind, "causal", tokenizer)
    given = dict(text="A warm little film.", added=[], switches={"breaks": ["gelu"]}, use="right")
    with thread_of(inspected, tmp_path) as found:
        answers = PageAnswers(inspected)
        same(answers.answer("read", given)["probabilities"], found.ask("read", **given)["probabilities"])
        asked = (lambda kind, **given: answers.answer(kind, given)), found.ask
        same(*(list(occlusion_in_parts(ask, **given)) for ask in asked))


@pytest.mark.slow
def test_a_long_text_is_made_with_a_cache(bundled: InspectedModel):
    answers, added = PageAnswers(bundled), []
    for _ in range(270):  # past max_seq_len
        given = dict(text=SENTENCES[0], added=added, switches={}, sampling={"temperature": 0}, random=0)
        added = [*added, answers.answer("next", given)["id"]]
    start = torch.tensor([bundled.encode(SENTENCES[0])])
    assert bundled.llama.generate(start, 270, 0.0)[0, start.shape[1] :].tolist() == added


def test_a_long_text_is_read_as_far_as_its_attention_can_be_kept(bundled: InspectedModel, monkeypatch):
    config = bundled.llama.config
    monkeypatch.setattr(served, "RECORD_BYTES", 4 * config.n_layers * config.n_heads * 20**2)
    answers, given = PageAnswers(bundled), dict(text="The film was slow. " * 9, added=[])
    ids = bundled.encode(given["text"])
    read = answers.answer("read", given)
    assert read["ids"] == ids[-20:] and read["first"] == len(ids) - 20
    assert answers.readings["None"].record.attention[0].shape == (config.n_heads, 20, 20)
    assert answers.answer("numbers", given | dict(layer=0, head=0, query=19, key=3))["weight"] > 0
    with pytest.raises(ValueError, match="from 0 to below 20"):
        answers.answer("numbers", given | dict(layer=0, head=0, query=20, key=3))


def test_a_layer_that_is_off_twice_or_is_not_there_is_no_other_layer(bundled: InspectedModel):
    def read(*off: object) -> dict:
        return PageAnswers(bundled).answer("read", {"text": "Once upon a time", "switches": {"off": [*off]}})

    assert read("2", "2") == read("2") != read()
    assert read("0", "99", "01", "\u0662", "1.9", None) == read()  # U+0662 is a 2 as well


# ------------------------------------------------------------------------------------------------- over HTTP


@contextlib.contextmanager
def serving(open_model: Callable[[], tuple[InspectedModel, str]]) -> Iterator[LiveServer]:
    """A server in a thread of its own."""
    kept: list[LiveServer] = []
    with pytest.MonkeyPatch.context() as patch:
        begin = LiveServer.__init__

        def noted(self: LiveServer, port: int) -> None:
            begin(self, port)
            kept.append(self)

        patch.setattr(LiveServer, "__init__", noted)
        ready = threading.Event()
        original = LiveServer.serve_forever

        def forever(self: LiveServer, *more: Any) -> None:
            ready.set()
            original(self, *more)

        patch.setattr(LiveServer, "serve_forever", forever)
        runner = threading.Thread(target=serve, args=(open_model, 0), daemon=True)
        runner.start()
        assert ready.wait(60)
    yield kept[0]
    kept[0].shutdown()
    runner.join(10)
    assert not runner.is_alive()


@pytest.fixture(scope="module")
def server(bundled: InspectedModel) -> Iterator[LiveServer]:
    with serving(lambda: (bundled, TEXT)) as found:
        yield found


def request(server: LiveServer, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    sent = {"Host": f"127.0.0.1:{server.server_port}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in (({"Content-Length": str(len(body))} if body else {}) | sent).items():
        connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def ask(server: LiveServer, body: bytes, **headers: str) -> tuple[int, bytes]:
    return request(server, "POST", f"/{server.secret}/ask", body, **{"Content_Type": "application/json"} | headers)


QUESTION = json.dumps({"kind": "written", "given": {"text": "a", "added": [300]}}).encode()


def test_a_foreign_request_gets_nothing(server: LiveServer):
    secret, port = server.secret, server.server_port
    assert request(server, "GET", f"/{secret}/")[0] == 200
    assert request(server, "GET", f"/{secret}/", Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert request(server, "GET", f"/{secret}/", Host=host)[0] == 403, host
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"):
        assert ask(server, QUESTION, Origin=origin)[0] == 403, origin
    assert ask(server, QUESTION, Origin=f"http://127.0.0.1:{port}")[0] == 200
    names = ("", "x/", "/../etc/passwd", "/llama.py", "/%2e%2e/llama.py", "//", "/?a=b")
    for path in ("/", "/ask", "/etc/passwd", f"/{secret[:-1]}/", *(f"/{secret}{name}" for name in names)):
        status, body = request(server, "GET", path)
        assert (status, json.loads(body)) == (404, {"failed": "nothing here"}), path
    for method in ("PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "<b>"):
        status, body = request(server, method, f"/{secret}/")
        assert (status, body) == (501, b"" if method == "HEAD" else b'{"failed": "Not Implemented"}'), method


def spoken(server: LiveServer, sent: bytes) -> bytes:
    """What the server answers to these bytes before it ends the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_bytes_that_are_no_request_get_one_line(server: LiveServer):
    host, path = f"Host: 127.0.0.1:{server.server_port}\r\n".encode(), f"/{server.secret}/".encode()
    for line, headers, status, words in (
        (b"GET " + path, host + b"Host: evil.example\r\n", b"403", b"this server answers its own page alone"),
        (b"GET http://127.0.0.1" + path, host, b"404", b"nothing here"),
        (b"GET /\xff\xfe", host, b"404", b"nothing here"),
        (b"GET " + path, b"Host: \xff\r\n", b"403", b"this server answers its own page alone"),
        (b"GET " + path + b"%0d%0aX:", host, b"404", b"nothing here"),
        (b"GET /" + b"a" * 70_000, host, b"414", b"URI Too Long"),
        (b"GET " + path, host + b"X: 1\r\n" * 200, b"431", b"Request Header Fields Too Large"),
        (b"<script>\xff " + path, host, b"501", b"Not Implemented"),
        (b"GET a b c", host, b"400", b"Bad Request"),
    ):
        with contextlib.suppress(ConnectionResetError):  # it is closed before all of it is read
            head, _, body = spoken(server, line + b" HTTP/1.1\r\n" + headers + b"\r\n").partition(b"\r\n\r\n")
            assert status in head.split(b"\r\n")[0] and b"script" not in head and b"X:" not in head, line[:40]
            assert words.lower() in body.lower() and set(json.loads(body)) == {"failed"}, line[:40]
    assert b"{" in spoken(server, b"\x16\x03\x01\0\xa5\x01\r\n")  # HTTPS
    with contextlib.ExitStack() as opened:  # half a request each, and the server goes on
        for _ in range(60):
            connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
            opened.enter_context(connection).sendall(b"GET /")
        assert ask(server, QUESTION)[0] == 200


def test_connections_that_wait_are_bounded_and_the_oldest_are_ended(server: LiveServer):
    with contextlib.ExitStack() as opened:
        address = ("127.0.0.1", server.server_port)
        idle = [opened.enter_context(socket.create_connection(address, timeout=20)) for _ in range(MOST_WAITING + 40)]
        assert ask(server, QUESTION)[0] == 200
        assert all(connection.recv(1) == b"" for connection in idle[:40])  # ended
        idle[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b"403" in idle[-1].recv(100)  # the youngest still get an answer
    assert len(server.waiting) <= MOST_WAITING


def test_the_smallest_numbers_give_numbers(server: LiveServer):
    tiny = {"temperature": 5e-324, "topP": 5e-324, "minP": 5e-324}
    status, answer = ask(server, json.dumps({"kind": "next", "given": {"text": "a", "sampling": tiny}}).encode())
    assert status == 200 and b"NaN" not in answer and json.loads(answer)["kept"] == 1


def test_a_hostile_question_gets_one_line(server: LiveServer):
    huge, deep = b" " * (MOST_BYTES + 1), b"[" * 100_000
    read = (
        {"text": 5}, {"text": "a", "added": [-1]}, {"text": "a", "added": [99999999]}, {"text": "a", "switches": 5},
        {"text": "a", "switches": {"breaks": ["x"]}}, {"text": "a", "switches": {"attention": "all"}}, [], None,
    )  # fmt: skip
    asked = [("read", given) for given in read] + [
        (kind, {}) for kind in ("answer", "_read", "__class__", ["read"], None)
    ]
    asked += [("next", {"text": "a", "random": float("nan")}), ("next", {"text": "a", "sampling": {"temperature": -1}})]
    asked += [("numbers", {"text": "a", "layer": layer}) for layer in (1e9, -1, 99, None, True)]
    asked += [("perplexity", {}), ("perplexity", {"text": "a" * 200_001}), ("occlusion", {"text": "a"})]
    bodies = [json.dumps({"kind": kind, "given": given}).encode() for kind, given in asked]
    bodies += [b"", b"{", b"[]", b"null", b"1", deep, b"\xff"]
    for body in bodies:
        status, answer = ask(server, body)
        assert status in (400, 413) and set(json.loads(answer)) == {"failed"} and b"Traceback" not in answer, body[:60]
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is closed before all of it is sent
        assert ask(server, huge)[0] == 413
    assert ask(server, QUESTION, Content_Type="text/plain")[0] == 415
    assert ask(server, QUESTION, Content_Length="-1")[0] == ask(server, QUESTION, Content_Length="9" * 30)[0] == 413
    assert ask(server, json.dumps({"kind": "written", "given": {"text": "\ud800", "added": []}}).encode())[0] == 200
    assert ask(server, QUESTION)[0] == 200  # it goes on


def test_the_page_behind_the_address(server: LiveServer, bundled: InspectedModel):
    status, body = request(server, "GET", f"/{server.secret}/")
    assert status == 200 and b'id="weights"' not in body and len(body) < 300_000
    assert b"connect-src 'self'" in body and b"http" not in body.split(b"Content-Security-Policy")[1].split(b">")[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


def test_a_browser_works_with_it(browser: Browser, server: LiveServer, bundled: InspectedModel):
    browser.errors.clear()
    browser.tab.goto(f"{server.address}#text=Once+upon+a+time&temperature=0&steps=6")
    browser.wait("byId('live').dataset.compared !== undefined && byId('live').dataset.opened !== undefined")
    assert browser.value("byId('live-generated').textContent") == continued(bundled, "Once upon a time", 6)
    browser.tab.locator("#live-text").fill("The film was")
    browser.wait("byId('live').dataset.compared === JSON.stringify(['The film was', live.switches])")
    browser.click("#mistakes input[value=norm]")
    browser.wait("byId('live').dataset.compared === JSON.stringify(['The film was', live.switches])")
    browser.wait("byId('live-kept').textContent.includes('NaN')")
    assert browser.errors == []


# ------------------------------------------------------------------------------------------------- as a program


def test_ctrl_c_ends_it(tmp_path: Path):
    command = [sys.executable, "-m", "explore", str(BUNDLED), "--serve"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=hear_interrupts, **pipes) as process,
        contextlib.ExitStack() as ended,
    ):
        ended.callback(process.kill)  # else the block would wait for it, whatever fails
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        port, secret = address.split(":")[2].split("/")[:2]
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        connection.request("GET", f"/{secret}/")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0 and process.stderr.read() == "ended\n"


@pytest.mark.slow
def test_a_port_that_is_taken(server: LiveServer):
    with pytest.raises(UserError, match=f"--serve {server.server_port}: cannot listen"):
        LiveServer(server.server_port)
