"""An S3 server on this machine (moto's) that can be told to misbehave."""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "bucket"
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>as told</Message></Error>"
_CODES = {403: "AccessDenied", 503: "SlowDown"}


@dataclass
class Storage:
    """What the server does to requests, and which ones it has answered.

    ``status``: it refuses all of them with this one. ``cuts``: how many of the next uploads it cuts in the middle.
    ``pause_s``: it answers so much later. ``puts``: keys and contents of successful uploads, in their order.
    """

    url: str = ""
    status: int = 0
    cuts: int = 0
    pause_s: float = 0.0
    refused: int = 0
    puts: list[tuple[str, bytes]] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Whether a file of a mirror at ``run`` has been uploaded."""
        return f"run/{name}" in dict(self.puts)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process finds the server."""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        return {**keys, "FSSPEC_S3_ENDPOINT_URL": self.url, "no_proxy": "127.0.0.1"}


class _Faulty:
    def __init__(self, storage: Storage) -> None:
        self._storage, self._moto = storage, DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: Mapping[str, Any], respond: Any) -> Iterable[bytes]:
        storage, method, path = self._storage, environ["REQUEST_METHOD"], environ["PATH_INFO"]
        time.sleep(storage.pause_s)
        if method == "PUT" and storage.cuts:
            storage.cuts -= 1
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return [b""]
        if storage.status:
            storage.refused += 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            respond(f"{storage.status} as told", [("Content-Type", "application/xml")])
            return [b"" if method == "HEAD" else _ERROR.format(code=_CODES[storage.status]).encode()]
        statuses: list[str] = []

        def noted(status: str, *more: Any) -> Any:
            statuses.append(status)
            return respond(status, *more)

        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        answer = list(self._moto({**environ, "wsgi.input": io.BytesIO(body)}, noted))
        if method == "PUT" and statuses[0].startswith("200"):
            storage.puts.append((path.removeprefix(f"/{BUCKET}/"), body))
        return answer


@contextmanager
def serve() -> Iterator[Storage]:
    """A server with one bucket, until the end of the block."""
    import urllib.request

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    storage = Storage()
    server = make_server("127.0.0.1", 0, _Faulty(storage), threaded=True)
    storage.url = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        # Moto's buckets belong to the process: those of servers before would still be there.
        opener.open(urllib.request.Request(f"{storage.url}/moto-api/reset", method="POST")).close()
        opener.open(urllib.request.Request(f"{storage.url}/{BUCKET}", method="PUT")).close()
        yield storage
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
