"""The routes of ``/api``: HTTP on one side, :class:`lockstep.studio.studio.Studio` on the other."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, WebSocket
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from lockstep.studio.access import REPORT_CSP
from lockstep.studio.details import content_of
from lockstep.studio.live import Hub
from lockstep.studio.schemas import RunName
from lockstep.studio.studio import Studio
from lockstep.telemetry.files import plain


class Envelope(BaseModel):
    """A successful answer."""

    status: Literal["ok"] = "ok"
    data: Any


class Problem(BaseModel):
    """An error."""

    status: Literal["error"] = "error"
    code: str
    message: str
    why: str
    fix: str


def ok(data: Any, status: int = 200) -> Response:
    """``data`` in the envelope."""
    content = json.dumps({"status": "ok", "data": plain(data)}, separators=(",", ":"), ensure_ascii=False)
    return Response(content.encode("utf-8", "replace"), status, media_type="application/json")


def make_router(studio: Studio, hub: Hub) -> APIRouter:
    """All routes, bound to one studio."""
    router = APIRouter(
        prefix="/api",
        responses={200: {"model": Envelope}, "4XX": {"model": Problem}, "5XX": {"model": Problem}},
        default_response_class=Response,
    )
    _data_routes(router, studio)
    _other_routes(router, studio)

    @router.websocket("/live")
    async def live(socket: WebSocket) -> None:
        await hub.serve(socket)

    return router


def _data_routes(router: APIRouter, studio: Studio) -> None:
    """Those that answer with what a method returns; its parameters are those of the route."""
    forms, runs, saved, jobs = studio.forms, studio.runs, studio.saved, studio.jobs
    routes: list[tuple[str, str, Callable[..., Any], str]] = [
        ("GET", "/studio", studio.about, "Version, folder and start of this studio"),
        ("GET", "/page", studio.first_answer, "What the page needs first: studio, devices, schema and names of tasks"),
        ("GET", "/devices", forms.list_devices, "The devices of this machine"),
        ("GET", "/tasks", forms.tasks, "The tasks that can be started, with their settings"),
        ("GET", "/schema", forms.schema, "JSON schema and defaults of all settings"),
        ("POST", "/plan", forms.plan, "The plan, with every label of the hardware section"),
        ("POST", "/preview", forms.preview, "The same settings as a command and as YAML"),
        ("GET", "/configs", saved.list, "Saved configurations"),
        ("POST", "/configs/parse", saved.parse, "A configuration file's text as settings"),
        ("GET", "/configs/{name}", saved.load, "One saved configuration"),
        ("PUT", "/configs/{name}", saved.save, "Save a configuration"),
        ("DELETE", "/configs/{name}", saved.delete, "Delete a saved configuration"),
        ("GET", "/settings", runs.settings, "By run, the settings that differ between runs"),
        ("GET", "/runs", studio.index.listed, "All runs, newest first"),
        ("START", "/runs", runs.start, "Start a run"),
        ("GET", "/runs/{name}", runs.detail, "One run in full"),
        ("PATCH", "/runs/{name}", runs.label, "Rename a run, or change its tags"),
        ("DELETE", "/runs/{name}", runs.delete, "Delete a run that has ended"),
        ("START", "/runs/{name}/resume", runs.resume, "Resume a run, on the same or different devices"),
        ("POST", "/runs/{name}/resume/preview", runs.resume_preview, "The command that would resume a run"),
        ("POST", "/runs/{name}/duplicate", runs.duplicate, "The settings of a run, to start another one"),
        ("GET", "/runs/{name}/metrics", runs.metrics, "Rows of metrics.json, one an epoch, and of evaluations.jsonl"),
        ("GET", "/compare", runs.compare, "Compare runs: results, settings and plans"),
        ("GET", "/runs/{name}/log", runs.log, "The end of one of the run's logs"),
        ("GET", "/runs/{name}/files", runs.files, "The files of the run's folder"),
        ("START", "/runs/{name}/evaluate", runs.evaluate, "Compute the metrics of a checkpoint"),
        ("START", "/runs/{name}/export", runs.export, "Write weights and program"),
        ("START", "/runs/{name}/report", runs.report, "Draw the run's report"),
        ("GET", "/doctor", studio.newest_doctor, "The newest check of this machine"),
        ("START", "/doctor", studio.doctor, "Check this machine"),
        ("GET", "/scaling", studio.scaling, "Benchmarks over numbers of devices"),
        ("START", "/scaling", studio.measure_scaling, "Start a scaling benchmark"),
        ("GET", "/jobs", jobs.listed, "Jobs started here, newest first"),
        ("GET", "/jobs/{name}", jobs.read, "One job"),
        ("POST", "/jobs/{name}/stop", jobs.stop, "Stop a job"),
    ]
    for method, path, function, summary in routes:
        starts = method == "START"
        status = 202 if starts else 200
        router.add_api_route(
            path,
            _answering(function, status),
            methods=["POST" if starts else method],
            status_code=status,
            summary=summary,
            response_model=None,
        )


def _answering(function: Callable[..., Any], status: int) -> Callable[..., Response]:
    @functools.wraps(function)
    def answer(*given: Any, **named: Any) -> Response:
        return ok(function(*given, **named), status)

    return answer


def _other_routes(router: APIRouter, studio: Studio) -> None:
    @router.post("/runs/{name}/stop", status_code=202, summary="Stop a run after saving a checkpoint")
    async def stop(name: RunName) -> Response:
        return ok(await studio.runs.stop(name), 202)

    @router.get("/runs/{name}/file", summary="One file of the run's folder, to download")
    def file(name: RunName, path: Annotated[str, Query(max_length=1000)]) -> Response:
        found = studio.runs.file(name, path)
        kind = {".png": "image/png", ".wav": "audio/wav"}.get(found.suffix, "application/octet-stream")
        how = "attachment" if kind == "application/octet-stream" else "inline"
        headers = {
            "content-security-policy": REPORT_CSP,
            "content-disposition": f"{how}; filename*=UTF-8''{quote(found.name)}",
        }
        return StreamingResponse(content_of(found), media_type=kind, headers=headers)

    @router.get("/jobs/{name}/report", summary="The report that a job has drawn: one HTML page without scripts")
    def report(name: str) -> Response:
        page = studio.jobs.report(name)
        return Response(page, media_type="text/html", headers={"content-security-policy": REPORT_CSP})
