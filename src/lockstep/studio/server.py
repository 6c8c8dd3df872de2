"""Running the studio: a socket on this machine, its address, and its end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from lockstep.errors import UsageError
from lockstep.studio.app import make_app
from lockstep.studio.studio import Options, Studio

HOST = "127.0.0.1"
#: Where the studio is unless --port says otherwise or somebody else is there.
DEFAULT_PORT = 8756
_MAX_MESSAGE_BYTES = 64 << 10


class Server:
    """One studio on one port. ``url`` holds the token."""

    def __init__(self, options: Options, *, port: int | None, detect: Callable[..., Any]) -> None:
        """Take the port and make what the studio keeps; answers begin with :meth:`run`.

        Args:
            port: 0 lets the system choose; ``None`` takes the usual one, or any if it is taken.
            detect: ``detect(refresh=…)`` gives the machine's devices.

        Raises:
            UsageError: the port is taken. StorageError: the runs folder cannot be written.
        """
        self._socket = _listen(port)
        try:
            self.port: int = self._socket.getsockname()[1]
            self.studio = Studio(options, detect)
            self.token = self.studio.home.token()
        except BaseException:
            self._socket.close()
            raise
        app = make_app(self.studio, token=self.token, cookie=f"lockstep_studio_{self.port}")
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                ws="websockets-sansio",
                ws_max_size=_MAX_MESSAGE_BYTES,
                ws_per_message_deflate=False,  # on one machine, bytes are cheaper than time
                http="h11",
                lifespan="on",
                timeout_graceful_shutdown=3,
                server_header=False,
            )
        )

    @property
    def base(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.base}/?token={self.token}"

    @property
    def started(self) -> bool:
        return self._uvicorn.started

    def run(self) -> None:
        """Answer until :meth:`stop`, SIGINT or SIGTERM; runs go on."""
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End :meth:`run`; may be called from another thread."""
        self._uvicorn.should_exit = True


def _listen(port: int | None) -> socket.socket:
    with contextlib.ExitStack() as cleanup:
        listener = cleanup.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for candidate in _candidates(port):
            try:
                listener.bind((HOST, candidate))
                break
            except (OSError, OverflowError):
                continue
        else:
            raise UsageError(
                f"port {port} is taken",
                why="another program answers there, maybe another studio",
                fix="choose another --port, or leave it out",
            )
        cleanup.pop_all()
        return listener
    raise AssertionError


def _candidates(port: int | None) -> Iterator[int]:
    yield DEFAULT_PORT if port is None else port
    if port is None:
        yield 0
