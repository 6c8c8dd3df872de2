"""One studio: its options and parts, its application (page, routes of ``/api``, errors), and its server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from lockstep.errors import LockstepError, UsageError
from lockstep.rundir.files import plain
from lockstep.rundir.folder import versions
from lockstep.studio.access import Guard, Sessions
from lockstep.studio.commands import Starts
from lockstep.studio.forms import Forms
from lockstep.studio.home import Home
from lockstep.studio.index import RunIndex
from lockstep.studio.live import Hub
from lockstep.studio.planner import Planner
from lockstep.studio.runs import Runs
from lockstep.studio.schemas import ApiError, body_of, malformed, status_of
from lockstep.studio.settings import OfferedTasks, SavedConfigs

STATIC = Path(__file__).parent / "static"
HOST = "127.0.0.1"
#: The port unless --port is given or the port is taken.
DEFAULT_PORT = 8756
_MAX_MESSAGE_BYTES = 64 << 10
#: How long answers may take after Ctrl-C.
GRACE_S = 2.0


@dataclass(frozen=True)
class Options:
    """Options from the command line."""

    runs_dir: Path
    #: The page can start no others.
    tasks: OfferedTasks
    #: Flags of ``lockstep train`` and the setting of each.
    flags: Mapping[str, str]
    #: How long a stopped run may take to save a checkpoint and end.
    kill_after_s: float = 60.0
    #: Makes plans; the command has started it already.
    planner: Planner = field(default_factory=Planner)


class Studio:
    """State of one server; everything that must outlive it is in files."""

    def __init__(self, options: Options, detect: Any) -> None:
        self.options = options
        self.home = Home(options.runs_dir)
        self.home.make()
        self.starts = Starts(self.home)
        self.index = RunIndex(self.home, self.starts)
        self.saved = SavedConfigs(self.home, options.tasks)
        self.forms = Forms(self.home, self.index, options.planner, options.tasks, options.flags, detect)
        self.runs = Runs(self.home, self.index, self.starts, self.forms, options.kill_after_s)

    def hello(self) -> dict[str, Any]:
        """Who answers; first message of every WebSocket."""
        return {"version": versions()["lockstep"], "now": time.time()}

    def about(self) -> dict[str, Any]:
        return {
            **self.hello(),
            "runs_dir": str(self.home.runs_dir),
            "kill_after_s": self.options.kill_after_s,
            "host": socket.gethostname(),
        }

    def first_answer(self) -> dict[str, Any]:
        devices = self.forms.list_devices()
        names = list(self.options.tasks)
        return {"studio": self.about(), "devices": devices, "schema": self.forms.schema, "tasks": names}


class Server:
    """One studio on one port. ``url`` holds the token."""

    def __init__(
        self, options: Options, *, port: int | None, detect: Callable[..., Any], new_token: bool = False
    ) -> None:
        """Take the port; answers begin with :meth:`run`. ``detect(refresh=…)`` gives the machine's devices.

        ``port``: 0 lets the system choose; ``None`` takes the usual one, or any if it is taken. ``new_token`` ends
        every session. Raises :class:`UsageError` for a port that is taken, :class:`StorageError`.
        """
        self._socket = _listen(port)
        try:
            self.port: int = self._socket.getsockname()[1]
            self.studio = Studio(options, detect)
            self.token = self.studio.home.token(new=new_token)
        except BaseException:
            self._socket.close()
            raise
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                _make_app(self.studio, self.port),
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
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/#token={self.token}"

    def write_door(self) -> str:
        """Write a file that leads to :attr:`url`, for a browser's command line; return its address."""
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
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Waits ``GRACE_S`` seconds for answers at its end, then closes open connections: a peer may never read."""

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


def _make_app(studio: Studio, port: int) -> Any:
    hub = Hub(studio.index, studio.hello)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        # A list of many runs takes a while: read it before the first request.
        reading = asyncio.create_task(asyncio.to_thread(studio.index.summaries))
        yield
        studio.options.planner.close()
        await reading

    app = FastAPI(lifespan=life, openapi_url=None, redirect_slashes=False)
    app.include_router(_routes(studio, hub))
    _add_pages(app, studio)
    _add_errors(app)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=5)
    return Guard(app, sessions=Sessions(studio.home, port), cookie=f"lockstep_studio_{port}")


class _Modules(StaticFiles):
    """The page's files below an address that changes with them: a browser asks for each once."""

    def file_response(self, *arguments: Any, **keywords: Any) -> Response:
        answer = super().file_response(*arguments, **keywords)
        answer.headers["cache-control"] = "private, max-age=31536000, immutable"
        return answer


def _add_pages(app: FastAPI, studio: Studio) -> None:
    files = sorted(file for file in STATIC.rglob("*.*") if file.suffix in {".js", ".css"})
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    modules = [file.relative_to(STATIC).as_posix() for file in files if file.suffix == ".js"]
    preloads = [f'<link rel="modulepreload" href="static/{name}" />' for name in modules if name != "app/enter.js"]
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    text = text.replace("<!-- modules -->", "".join(preloads)).replace('"static/', f'"static-{digest}/')

    @app.get("/", include_in_schema=False)
    def index() -> Response:
        # Its first answer is in the page, as text that no browser takes for markup.
        first = json.dumps(plain(studio.first_answer())).replace("&", "&amp;").replace("<", "&lt;")
        return HTMLResponse(text.replace('<template id="first">', f'<template id="first">{first}'))

    app.mount(f"/static-{digest}", _Modules(directory=STATIC))
    app.mount("/static", StaticFiles(directory=STATIC))


def _add_errors(app: FastAPI) -> None:
    def answer(error: LockstepError) -> Response:
        return JSONResponse(body_of(error), status_of(error))

    @app.exception_handler(LockstepError)
    async def refused(request: Request, error: LockstepError) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problems = error.errors()
        if any(problem["type"] == "json_invalid" for problem in problems):
            return answer(ApiError("INVALID_JSON", 400, "the body is not JSON", fix="send a JSON object"))
        return answer(malformed(problems))

    @app.exception_handler(HTTPException)
    async def by_status(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return answer(ApiError("NOT_FOUND", 404, f"there is no {request.url.path[:200]}", fix="check the address"))
        code = {405: "METHOD_NOT_ALLOWED", 400: "INVALID_JSON"}.get(error.status_code, "INVALID_REQUEST")
        return answer(ApiError(code, error.status_code, str(error.detail), fix="check the request"))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return answer(LockstepError("internal error of the studio", why=type(error).__name__, fix="see its terminal"))


def _ok(data: Any, status: int = 200) -> Response:
    content = json.dumps({"status": "ok", "data": plain(data)}, separators=(",", ":"), ensure_ascii=False)
    return Response(content.encode("utf-8", "replace"), status, media_type="application/json")


def _routes(studio: Studio, hub: Hub) -> APIRouter:
    """Bind all routes to one studio; most call a method, whose parameters are the route's, and answer its result."""
    router = APIRouter(prefix="/api")
    forms = studio.forms
    runs = studio.runs
    saved = studio.saved
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("GET", "/studio", studio.about),
        ("GET", "/page", studio.first_answer),
        ("GET", "/devices", forms.list_devices),
        ("GET", "/tasks", forms.tasks),
        ("POST", "/tasks", forms.add_task),
        ("GET", "/tasks/files", forms.task_files),
        ("GET", "/schema", lambda: forms.schema),
        ("POST", "/plan", forms.plan),
        ("POST", "/preview", forms.preview),
        ("GET", "/configs", saved.list),
        ("GET", "/configs/{name}", saved.load),
        ("PUT", "/configs/{name}", saved.save),
        ("DELETE", "/configs/{name}", saved.delete),
        ("GET", "/settings", runs.settings),
        ("GET", "/runs", studio.index.listed),
        ("START", "/runs", runs.start),
        ("GET", "/runs/{name}", runs.detail),
        ("PATCH", "/runs/{name}", runs.label),
        ("DELETE", "/runs/{name}", runs.delete),
        ("START", "/runs/{name}/resume", runs.resume),
        ("START", "/runs/{name}/stop", runs.stop),
        ("POST", "/runs/{name}/duplicate", runs.duplicate),
        ("GET", "/compare", runs.compare),
        ("GET", "/runs/{name}/log", runs.log),
        ("GET", "/runs/{name}/files", runs.files),
        ("GET", "/runs/{name}/file", runs.file),
        ("GET", "/runs/{name}/rows", hub.rows),
        ("GET", "/runs/{name}/confused", runs.confused),
    ]
    for method, path, function in routes:
        methods, status = (["POST"], 202) if method == "START" else ([method], 200)
        router.add_api_route(path, _answering(function, status), methods=methods, response_model=None)
    router.add_api_websocket_route("/live", hub.serve)
    return router


def _answering(function: Callable[..., Any], status: int) -> Callable[..., Response]:
    @functools.wraps(function)
    def answer(*arguments: Any, **keywords: Any) -> Response:
        result = function(*arguments, **keywords)
        return result if isinstance(result, Response) else _ok(result, status)

    return answer
