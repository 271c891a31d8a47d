"""A recording proxy: what a client sent and what the server answered, which the client sees as it comes."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOP_BY_HOP = {"connection", "host", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Exchange:
    """A request and its answer."""

    method: str
    path: str
    request: bytes
    status: int
    answer: bytes
    """What came of it before the client or the server closed."""

    def __str__(self) -> str:
        sent, got = (body.decode("utf-8", "replace") for body in (self.request, self.answer))
        return f"{self.method} {self.path}\n{sent}\n--> {self.status}\n{got}"


@contextmanager
def recording(server_url: str, into: list[Exchange]) -> Iterator[str]:
    """Pass requests on to the server until the block is left; gives the URL to send them to."""
    upstream = urlsplit(server_url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            line = http.client.HTTPConnection(upstream, timeout=120)
            line.request(self.command, self.path, body, headers)
            reply = line.getresponse()
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            answer = b""
            try:
                while piece := reply.read1(65536):
                    answer += piece
                    self.wfile.write(piece)
            finally:
                into.append(Exchange(self.command, self.path, body, reply.status, answer))
                line.close()
                self.close_connection = True

        do_GET = do_POST = do_HEAD = do_OPTIONS = do_DELETE = pass_on

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
