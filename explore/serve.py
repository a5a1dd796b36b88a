"""`python -m explore MODEL --serve`: the live page with PyTorch behind it, on this machine alone.

The server listens on 127.0.0.1. Its address holds a secret, and it answers only requests that name this host and, if a
page sends them, come from its own page: another page in the same browser can neither guess the secret nor borrow the
reader's connection (DNS rebinding). It has one page and one kind of question, and reads no file on a request.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from utils import UserError, one_line

if TYPE_CHECKING:
    from explore.inspected import InspectedModel

HOST = "127.0.0.1"
MOST_BYTES = 1_000_000  # of a question
WAIT_SECONDS = 30  # for the next bytes of a request
MOST_WAITING = 64  # connections whose request is not read yet
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """page: the HTML as bytes. answer: kind and values of a question -> plain values; one call at a time."""

    daemon_threads = True
    request_queue_size = 64  # connections that wait to be taken, so that many at once are not kept waiting
    page: bytes
    answer: Callable[[str, Any], Any]

    def __init__(self, port: int):
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise UserError(f"--serve {port}: cannot listen on {HOST} ({error.strerror})") from None
        self.secret, self.lock = secrets.token_urlsafe(24), threading.Lock()
        self.waiting: dict[socket.socket, None] = {}  # the oldest first

    def process_request(self, request: socket.socket, client_address: Any) -> None:
        """Read a request in a thread of its own. Of too many that only wait, the oldest connection is ended."""
        self.waiting[request] = None
        if len(self.waiting) > MOST_WAITING:
            oldest = list(self.waiting)[0]
            self.waiting.pop(oldest, None)
            with contextlib.suppress(OSError):  # it has ended by itself meanwhile
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.waiting.pop(request, None)
        super().shutdown_request(request)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.secret}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a tab ends its connection: nobody needs a traceback of that."""


class Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "min-llama", ""
    timeout = WAIT_SECONDS

    def do_GET(self) -> None:
        if self._is_allowed("/"):
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        if not self._is_allowed("/ask"):
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and int(length[:9]) <= MOST_BYTES and len(length) < 9):
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {MOST_BYTES} bytes")
            return
        if self.headers.get_content_type() != "application/json":  # which a form of another page cannot send
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a question is JSON")
            return
        try:
            asked = json.loads(self.rfile.read(int(length)))
            self.server.waiting.pop(self.request, None)
            with self.server.lock:
                answer = self.server.answer(asked["kind"], asked["given"])
        except (UserError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._refuse(
                HTTPStatus.BAD_REQUEST, one_line(str(error)) if isinstance(error, UserError) else "no such question"
            )
        except Exception as error:  # whatever the model's code raises; the server goes on
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {one_line(str(error))}")
        else:
            self._send(HTTPStatus.OK, json.dumps(answer, default=as_text).encode(), "application/json")

    def _is_allowed(self, path: str) -> bool:
        """Whether the request names this host, comes from no other page and knows the secret; else it is refused."""
        hosts = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        named, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        if named not in [[host] for host in hosts] or origins not in [[], *([f"http://{host}"] for host in hosts)]:
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers its own page alone")
            return False
        if not hmac.compare_digest(self.path.encode(), f"/{self.server.secret}{path}".encode()):
            self._refuse(HTTPStatus.NOT_FOUND, "nothing here")
            return False
        return True

    def send_error(self, code: int, *_: Any) -> None:
        """What the standard library refuses, for example a method: in one line too, without the reader's own words."""
        status = HTTPStatus(code)
        self._refuse(status, status.phrase)

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self.close_connection = True
        self._send(status, json.dumps({"failed": words}).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """The terminal shows the address, not every key."""


def as_text(value: Any) -> dict[str, str]:
    """Bytes in JSON."""
    return {"bytes": base64.b64encode(value).decode()}


def serve(open_model: Callable[[], tuple[InspectedModel, str]], port: int) -> None:
    """Serve a model until Ctrl-C. open_model: loads it; returns it with the text to begin with.

    The address is printed at once; the first page waits until the model is loaded.
    """
    with LiveServer(port) as server:
        print(f"{server.address}  (Ctrl-C ends it)", flush=True)
        inspected, text = open_model()
        from explore.inspected import page_of_rope
        from explore.live import live_of
        from explore.page import render
        from explore.served import PageAnswers

        live = live_of(inspected, text, None) | {"address": f"/{server.secret}/ask"}
        live["classifier"] = None if inspected.classifier is None else {}
        content = {"model": inspected.facts(), "rope": page_of_rope(inspected.llama), "pieces": {}, "live": live}
        server.page, server.answer = render(content).encode(errors="replace"), PageAnswers(inspected).answer
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", file=sys.stderr, flush=True)
            os._exit(0)  # a thread that ends in PyTorch while the interpreter is taken down ends in an abort
