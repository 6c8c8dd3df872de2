"""Running the studio: a socket on this machine, its address, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from lockstep.errors import UsageError
from lockstep.studio.app import make_app
from lockstep.studio.studio import Options, Studio

HOST = "127.0.0.1"
#: The port unless --port is given or the port is taken.
DEFAULT_PORT = 8756
_MAX_MESSAGE_BYTES = 64 << 10
#: How long answers may take after Ctrl-C.
GRACE_S = 2.0
#: How often the date of answers is renewed.
TICK_S = 1.0


class Server:
    """One studio on one port. ``url`` holds the token."""

    def __init__(
        self, options: Options, *, port: int | None, detect: Callable[..., Any], new_token: bool = False
    ) -> None:
        """Take the port and make what the studio keeps; answers begin with :meth:`run`.

        Args:
            port: 0 lets the system choose; ``None`` takes the usual one, or any if it is taken.
            detect: ``detect(refresh=…)`` gives the machine's devices.
            new_token: end every session and replace the token.

        Raises:
            UsageError: the port is taken. StorageError: the runs folder cannot be written.
        """
        self._socket = _listen(port)
        try:
            self.port: int = self._socket.getsockname()[1]
            self.studio = Studio(options, detect)
            self.token = self.studio.home.token(new=new_token)
        except BaseException:
            self._socket.close()
            raise
        app = make_app(self.studio, self.port)
        self._uvicorn = _Uvicorn(
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
        return f"{self.base}{self.studio.options.base_path}/#token={self.token}"

    def write_door(self) -> str:
        """The address of a file that leads to :attr:`url`, for a browser's command line. Raises StorageError."""
        return self.studio.home.write_door(self.url).as_uri()

    @property
    def started(self) -> bool:
        return self._uvicorn.started

    def run(self) -> None:
        """Answer until :meth:`stop`, SIGINT or SIGTERM; runs continue."""
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End :meth:`run`; may be called from another thread."""
        self._uvicorn.end()


class _Uvicorn(uvicorn.Server):
    """Is woken by its end: to look ten times a second whether it should end takes 0.2 % of a core.

    Waits ``GRACE_S`` seconds for answers at its end, then closes what is open: a peer may never read.
    """

    _wake: Callable[[], object] = staticmethod(lambda: None)

    async def main_loop(self) -> None:
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._wake()

    def end(self) -> None:
        """As a signal would; may be called from another thread."""
        self.should_exit = True
        self._wake()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        abort = asyncio.get_running_loop().call_later(GRACE_S, self._abort)
        await super().shutdown(sockets)
        abort.cancel()

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _listen(port: int | None) -> socket.socket:
    """It listens at once: an early browser waits for the answer."""
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        with contextlib.suppress(OSError, OverflowError):
            return socket.create_server((HOST, candidate))
    raise UsageError(
        f"port {port} is taken",
        why="another program answers there, maybe another studio",
        fix="choose another --port, or leave it out",
    )
