"""A real web server on this machine that can be told to misbehave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What the server gives, and what it was asked.

    ``drops``: for each coming request, after how many bytes to close the connection. ``statuses``: for
    each coming request, a refusal. ``gate``: when given, a request sends half of the bytes and waits for it.
    """

    content: bytes
    url: str = ""
    drops: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    gate: threading.Event | None = None
    half_sent: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)


@contextmanager
def serve(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, site)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # closing the server waits for their ends

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that was killed

    with Server(("127.0.0.1", 0), Handler) as server:
        site.url = f"http://127.0.0.1:{server.server_address[1]}/file.bin"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield site
        finally:
            if site.gate is not None:
                site.gate.set()
            server.shutdown()
            thread.join()


def _answer(request: BaseHTTPRequestHandler, site: Site) -> None:
    site.asked.append(request.path)
    if site.statuses:
        request.send_error(site.statuses.pop(0))
        return
    request.send_response(200)
    body = site.content
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if site.drops:
        body = body[: site.drops.pop(0)]
    if site.gate is not None:
        half = len(body) // 2
        request.wfile.write(body[:half])
        request.wfile.flush()
        site.half_sent.set()
        site.gate.wait(timeout=60)
        body = body[half:]
    request.wfile.write(body)
