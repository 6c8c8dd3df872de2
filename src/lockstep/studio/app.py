"""The web application: guard, API, page and its documentation."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from lockstep.errors import LockstepError
from lockstep.report.page import render
from lockstep.studio import bundle
from lockstep.studio.access import Guard, Sessions
from lockstep.studio.api import make_router
from lockstep.studio.live import Hub
from lockstep.studio.problems import ApiError, body_of, status_of
from lockstep.studio.studio import Studio
from lockstep.telemetry.files import plain
from lockstep.telemetry.records import versions


def make_app(studio: Studio, port: int) -> Any:
    """The ASGI application of one studio."""
    hub = Hub(studio.index, studio.jobs, studio.hello)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        # A list of many runs takes a while: read it before the first request.
        reading = asyncio.create_task(asyncio.to_thread(studio.index.summaries))
        warming = asyncio.create_task(asyncio.to_thread(studio.forms.warm)) if studio.options.warm else reading
        async with hub.running():
            yield
        studio.planner.close()
        studio.forms.close()
        await asyncio.gather(reading, warming)

    app = FastAPI(
        title="Lockstep studio",
        version=versions()["lockstep"],
        docs_url=None,
        redoc_url=None,
        lifespan=life,
        redirect_slashes=False,
    )
    app.include_router(make_router(studio, hub))
    _pages(app, studio)
    _problems(app)
    options = studio.options
    sessions = Sessions(studio.home, port)
    cookie = f"lockstep_studio_{port}"
    return Guard(app, sessions=sessions, cookie=cookie, base=options.base_path, hosts=options.trusted_hosts)


def _pages(app: FastAPI, studio: Studio) -> None:
    page = {"app/page.js": bundle.script(), "styles/page.css": bundle.styles()}
    text = (bundle.STATIC / "index.html").read_text(encoding="utf-8")
    for name, content in page.items():
        text = text.replace(f"static/{name}", f"static/{name}?{bundle.version(content)}")

    @app.get("/", include_in_schema=False)
    def index() -> Response:
        # What the page would ask for first is in it, as text that no browser takes for markup.
        first = json.dumps(plain(studio.first_answer())).replace("&", "&amp;").replace("<", "&lt;")
        return HTMLResponse(text.replace('<template id="first">', f'<template id="first">{first}'))

    def bundled(request: Request) -> Response:
        name = request.url.path.removeprefix("/static/")
        kind = "text/javascript" if name.endswith(".js") else "text/css"
        return Response(page[name], media_type=kind, headers={"cache-control": "private, max-age=31536000, immutable"})

    for name in page:
        app.add_api_route(f"/static/{name}", bundled, include_in_schema=False)

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        return HTMLResponse(render(__package__, "api.html", rows=_described(app.openapi())))

    @app.get("/favicon.ico", include_in_schema=False)
    def icon() -> Response:
        # Requested by pages without an icon: reports, /docs, the welcome page.
        return FileResponse(bundle.STATIC / "icon.svg", media_type="image/svg+xml")

    app.mount("/static", StaticFiles(directory=bundle.STATIC, check_dir=False))


def _described(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """The routes of the OpenAPI document: address, what it does, fields of the body, parameters."""
    rows: list[tuple[str, ...]] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = body.get("$ref", "").rpartition("/")[2]
            fields = document["components"]["schemas"].get(name, {}).get("properties", {})
            query = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
            rows.append((f"{method.upper()} {path}", operation.get("summary", ""), ", ".join(fields), ", ".join(query)))
    return rows


def _problems(app: FastAPI) -> None:
    def answer(error: LockstepError) -> Response:
        return JSONResponse(body_of(error), status_of(error))

    async def refused(request: Request, error: Any) -> Response:
        # A report opens in a separate tab: the error is a page there.
        if request.headers.get("sec-fetch-dest") == "document":
            lines = [error.what, error.why, f"Fix: {error.fix}" if error.fix else ""]
            return HTMLResponse(
                render(__package__, "message.html", lines=list(filter(None, lines)), url=""), status_of(error)
            )
        return answer(error)

    async def malformed(request: Request, error: Any) -> Response:
        problems = error.errors()
        if any(problem["type"] == "json_invalid" for problem in problems):
            return answer(ApiError("INVALID_JSON", 400, "the body is not JSON", fix="send a JSON object"))
        why = "; ".join(f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in problems[:5])
        return answer(ApiError("INVALID_REQUEST", 422, "the request is malformed", why=why, fix="see /docs"))

    async def by_status(request: Request, error: Any) -> Response:
        if error.status_code == 404:
            what = f"there is no {request.url.path[:200]}"
            return answer(ApiError("NOT_FOUND", 404, what, fix="/docs lists the addresses"))
        code = {405: "METHOD_NOT_ALLOWED", 400: "INVALID_JSON"}.get(error.status_code, "INVALID_REQUEST")
        return answer(ApiError(code, error.status_code, str(error.detail), fix="see /docs"))

    async def failed(request: Request, error: Any) -> Response:
        return answer(LockstepError("internal error of the studio", why=type(error).__name__, fix="see its terminal"))

    handlers: dict[Any, Callable[..., Any]] = {
        LockstepError: refused,
        RequestValidationError: malformed,
        HTTPException: by_status,
        Exception: failed,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
