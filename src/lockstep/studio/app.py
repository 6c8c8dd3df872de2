"""The web application: guard, API, page and its documentation."""

from __future__ import annotations

import asyncio
import contextlib
import html
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from lockstep.errors import LockstepError
from lockstep.studio.access import Guard
from lockstep.studio.api import make_router, unknown_address
from lockstep.studio.live import Hub
from lockstep.studio.problems import ApiError, body_of, status_of
from lockstep.studio.studio import Studio
from lockstep.telemetry.records import versions

STATIC = Path(__file__).parent / "static"


def make_app(studio: Studio, *, token: str, cookie: str) -> Any:
    """The ASGI application of one studio."""
    hub = Hub(studio.index, studio.jobs, studio.hello)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        # The first list of many runs should not wait for the first reader.
        reading = asyncio.create_task(asyncio.to_thread(studio.index.summaries))
        async with hub.running():
            yield
        await reading
        studio.planner.close()

    app = FastAPI(
        title="Lockstep studio",
        version=versions()["lockstep"],
        docs_url=None,
        redoc_url=None,
        lifespan=life,
        redirect_slashes=False,
    )
    app.include_router(make_router(studio, hub))
    _pages(app)
    _problems(app)
    return Guard(app, token=token, cookie=cookie)


def _pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    def index() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        return HTMLResponse(describe_api(app.openapi()))

    @app.get("/favicon.ico", include_in_schema=False)
    def icon() -> Response:
        # Asked for by pages that name no icon: reports, /docs, the first page of all.
        return FileResponse(STATIC / "icon.svg", media_type="image/svg+xml")

    app.mount("/static", StaticFiles(directory=STATIC, check_dir=False))


def _problems(app: FastAPI) -> None:
    def answer(error: LockstepError) -> Response:
        return JSONResponse(body_of(error), status_of(error))

    async def refused(request: Request, error: Any) -> Response:
        # A report opens in a tab of its own, where a person reads the refusal.
        if request.headers.get("sec-fetch-dest") == "document":
            return HTMLResponse(_problem_page(error), status_of(error))
        return answer(error)

    async def malformed(request: Request, error: Any) -> Response:
        problems = error.errors()
        if any(problem["type"] == "json_invalid" for problem in problems):
            return answer(ApiError("INVALID_JSON", 400, "the body is not JSON", fix="send a JSON object"))
        why = "; ".join(f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in problems[:5])
        return answer(
            ApiError("INVALID_REQUEST", 422, "the request is not of the right form", why=why, fix="see /docs")
        )

    async def by_status(request: Request, error: Any) -> Response:
        if error.status_code == 404:
            return answer(unknown_address(request))
        code = {405: "METHOD_NOT_ALLOWED", 400: "INVALID_JSON"}.get(error.status_code, "INVALID_REQUEST")
        return answer(ApiError(code, error.status_code, str(error.detail), fix="see /docs"))

    async def failed(request: Request, error: Any) -> Response:
        return answer(LockstepError("the studio made a mistake", why=type(error).__name__, fix="see its terminal"))

    handlers: dict[Any, Callable[..., Any]] = {
        LockstepError: refused,
        RequestValidationError: malformed,
        HTTPException: by_status,
        Exception: failed,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _problem_page(error: LockstepError) -> str:
    lines = [error.what, error.why, f"Fix: {error.fix}" if error.fix else ""]
    body = "".join(f"<p>{html.escape(line)}</p>" for line in lines if line)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Lockstep studio</title>'
        f"<main><h1>Lockstep studio</h1>{body}</main></html>"
    )


def describe_api(document: dict[str, Any]) -> str:
    """The OpenAPI document as a page: no script, nothing from elsewhere."""
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = body.get("$ref", "").rpartition("/")[2]
            fields = document["components"]["schemas"].get(name, {}).get("properties", {})
            query = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
            cells = (f"{method.upper()} {path}", operation.get("summary", ""), ", ".join(fields), ", ".join(query))
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Lockstep studio: API</title><main>'
        "<h1>Lockstep studio: API</h1><p>Answers are <code>{status: ok, data}</code> or <code>{status: error, code, "
        'message, why, fix}</code>. The whole description is <a href="/openapi.json">openapi.json</a>; live '
        "values come over the WebSocket <code>/api/live</code> (docs/studio.md).</p><table><thead><tr><th>address</th>"
        "<th>what it does</th><th>body</th><th>query</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></main></html>"
    )
