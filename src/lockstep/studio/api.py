"""The routes of ``/api``: HTTP on one side, :class:`lockstep.studio.studio.Studio` on the other."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, WebSocket
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from lockstep.config.load import merge
from lockstep.errors import LockstepError
from lockstep.studio import bench, details
from lockstep.studio.access import REPORT_CSP
from lockstep.studio.live import Hub
from lockstep.studio.problems import ApiError
from lockstep.studio.schemas import (
    DoctorBody,
    EvaluateBody,
    ExportBody,
    LabelBody,
    PlanBody,
    ResumeBody,
    ScalingBody,
    StartBody,
    YamlBody,
)
from lockstep.studio.settings import command_text
from lockstep.studio.studio import Studio
from lockstep.telemetry.files import plain
from lockstep.telemetry.lookup import or_else

RunName = Annotated[str, Path(description="the run's id, or the name of its folder")]


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
    _machine_routes(router, studio)
    _planning_routes(router, studio)
    _run_routes(router, studio)
    _number_routes(router, studio)
    _job_routes(router, studio)

    @router.websocket("/live")
    async def live(socket: WebSocket) -> None:
        await hub.serve(socket)

    return router


def _machine_routes(router: APIRouter, studio: Studio) -> None:
    @router.get("/studio", summary="Version, folder and start of this studio")
    def about() -> Response:
        return ok(studio.about())

    @router.get("/page", summary="What the page needs first: studio, devices, schema and names of tasks, in one answer")
    def page() -> Response:
        return ok(studio.first_answer())

    @router.get("/devices", summary="The devices of this machine")
    def devices(refresh: bool = False) -> Response:
        return ok(studio.forms.list_devices(refresh=refresh))

    @router.get("/tasks", summary="The tasks that can be started, with their settings")
    def tasks() -> Response:
        return ok(studio.forms.tasks())

    @router.get("/schema", summary="JSON schema and defaults of all settings")
    def schema() -> Response:
        return ok(studio.forms.schema)


def _planning_routes(router: APIRouter, studio: Studio) -> None:
    @router.post("/plan", summary="The plan, with every label of the hardware section")
    def plan(body: PlanBody) -> Response:
        return ok(studio.forms.plan(body))

    @router.post("/preview", summary="The same settings as a command and as YAML")
    def preview(body: PlanBody) -> Response:
        return ok(studio.forms.preview(studio.forms.wanted(body)))

    @router.get("/configs", summary="Saved configurations")
    def configs() -> Response:
        return ok(studio.saved.list())

    @router.post("/configs/parse", summary="A configuration file's text as settings")
    def parse(body: YamlBody) -> Response:
        return ok(studio.saved.parse(body.yaml))

    @router.get("/configs/{name}", summary="One saved configuration")
    def load(name: str) -> Response:
        return ok(studio.saved.load(name))

    @router.put("/configs/{name}", summary="Save a configuration")
    def save(name: str, body: PlanBody) -> Response:
        return ok(studio.saved.save(name, body))

    @router.delete("/configs/{name}", summary="Delete a saved configuration")
    def forget(name: str) -> Response:
        return ok(studio.saved.delete(name))


def _run_routes(router: APIRouter, studio: Studio) -> None:
    @router.get("/runs", summary="All runs, newest first")
    def runs() -> Response:
        runs = studio.index.encoded()
        problems = json.dumps(studio.index.problems()).encode()
        content = b'{"status":"ok","data":{"runs":%b,"problems":%b}}' % (runs, problems)
        return Response(content, media_type="application/json")

    @router.get("/settings", summary="By run, the settings that differ between runs")
    def run_settings() -> Response:
        return ok(studio.runs.settings())

    @router.post("/runs", status_code=202, summary="Start a run")
    def start(body: StartBody) -> Response:
        return ok(studio.runs.start(body), 202)

    @router.get("/runs/{name}", summary="One run in full")
    def detail(name: RunName) -> Response:
        return ok(studio.runs.detail(name))

    @router.patch("/runs/{name}", summary="Rename a run, or change its tags")
    def label(name: RunName, body: LabelBody) -> Response:
        return ok(studio.runs.label(name, body))

    @router.delete("/runs/{name}", summary="Delete a run that has ended")
    def delete(name: RunName) -> Response:
        return ok(studio.runs.delete(name))

    @router.post("/runs/{name}/stop", status_code=202, summary="Stop a run after saving a checkpoint")
    async def stop(name: RunName) -> Response:
        return ok(await studio.stops.stop(name), 202)

    @router.post("/runs/{name}/resume", status_code=202, summary="Resume a run, on the same or different devices")
    def resume(name: RunName, body: ResumeBody) -> Response:
        return ok(studio.runs.resume(name, body), 202)

    @router.post("/runs/{name}/resume/preview", summary="The command that would resume a run")
    def resume_preview(name: RunName, body: ResumeBody) -> Response:
        words = studio.runs.resume_words(name, body)
        return ok({"command": command_text(words), "argv": ["lockstep", *words]})

    @router.post("/runs/{name}/duplicate", summary="The settings of a run, to start another one")
    def duplicate(name: RunName) -> Response:
        return ok(studio.runs.duplicate(name))

    @router.get("/compare", summary="Compare runs: results, settings and plans")
    def compare(run: Annotated[list[str], Query(min_length=1, max_length=20)]) -> Response:
        return ok(
            details.compare([studio.index.run(name) for name in run], [studio.index.summary(name) for name in run])
        )


def _number_routes(router: APIRouter, studio: Studio) -> None:
    @router.get("/runs/{name}/metrics", summary="Rows of metrics.json, one an epoch, and of evaluations.jsonl")
    def metrics(name: RunName) -> Response:
        run = studio.index.run_folder(name)
        return ok({"epochs": or_else(run.epochs, []), "evaluations": or_else(run.evaluations, [])})

    @router.get("/runs/{name}/log", summary="The end of one of the run's logs")
    def log(
        name: RunName,
        file: Annotated[str | None, Query(alias="name")] = None,
        tail: Annotated[int, Query(ge=1, le=5000)] = 200,
    ) -> Response:
        return ok(studio.runs.log(name, file, tail))

    @router.get("/runs/{name}/files", summary="The files of the run's folder")
    def files(name: RunName) -> Response:
        return ok({"files": studio.runs.files(name)})

    @router.get("/runs/{name}/file", summary="One file of the run's folder, to download")
    def file(name: RunName, path: Annotated[str, Query(max_length=1000)]) -> Response:
        found = studio.runs.file(name, path)
        kind = {".png": "image/png", ".wav": "audio/wav"}.get(found.suffix, "application/octet-stream")
        how = "attachment" if kind == "application/octet-stream" else "inline"
        headers = {
            "content-security-policy": REPORT_CSP,
            "content-disposition": f"{how}; filename*=UTF-8''{quote(found.name)}",
        }
        return StreamingResponse(details.content_of(found), media_type=kind, headers=headers)


def _job_routes(router: APIRouter, studio: Studio) -> None:
    @router.post("/runs/{name}/evaluate", status_code=202, summary="Compute the metrics of a checkpoint")
    def evaluate(name: RunName, body: EvaluateBody) -> Response:
        folder = str(studio.index.run(name).path)
        words = ["evaluate", folder, "--split", body.split, "--checkpoint", body.checkpoint, "--json"]
        words += ["--devices", body.device] if body.device else []
        return ok(studio.begin_job("evaluate", words, run=name), 202)

    @router.post("/runs/{name}/export", status_code=202, summary="Write weights and program")
    def export(name: RunName, body: ExportBody) -> Response:
        words = ["export", str(studio.index.run(name).path), "--checkpoint", body.checkpoint, "--json"]
        words += [] if body.program else ["--no-program"]
        return ok(studio.begin_job("export", words, run=name), 202)

    @router.post("/runs/{name}/report", status_code=202, summary="Draw the run's report")
    def report(name: RunName) -> Response:
        return ok(studio.begin_job("report", ["report", str(studio.index.run(name).path), "--json"], run=name), 202)

    @router.get("/jobs/{name}/report", summary="The report that a job has drawn: one HTML page without scripts")
    def drawn(name: str) -> Response:
        page = studio.jobs.report(name)
        return Response(page, media_type="text/html", headers={"content-security-policy": REPORT_CSP})

    @router.get("/doctor", summary="The newest check of this machine")
    def findings() -> Response:
        return ok(next((job for job in studio.jobs.all() if job["kind"] == "doctor"), None))

    @router.post("/doctor", status_code=202, summary="Check this machine")
    def doctor(body: DoctorBody) -> Response:
        words = ["doctor", "--json", "--runs-dir", str(studio.home.runs_dir)]
        words += ["--quick"] if body.quick else []
        words += _devices_flag(studio, body.devices)
        return ok(studio.begin_job("doctor", words), 202)

    @router.get("/scaling", summary="Benchmarks over numbers of devices")
    def scaling() -> Response:
        jobs = [job for job in studio.jobs.all() if job["kind"] == "scaling"]
        available = "bench" in studio.options.verbs
        return ok({"available": available, "reports": bench.list_reports(studio.home), "jobs": jobs})

    @router.post("/scaling", status_code=202, summary="Start a scaling benchmark")
    def measure(body: ScalingBody) -> Response:
        studio.forms.check_devices(body.devices)
        config = merge(body.config, {"hardware": {"selected_devices": body.devices}})
        wanted = studio.forms.startable(PlanBody(task=body.task, config=config))
        words = ["bench", "scaling", wanted.task, "--runs-dir", str(studio.home.runs_dir), "--json"]
        return ok(studio.begin_job("scaling", words, config=wanted.mapping()), 202)

    @router.get("/jobs", summary="Jobs started here, newest first")
    def jobs() -> Response:
        return ok({"jobs": studio.jobs.all()})

    @router.get("/jobs/{name}", summary="One job")
    def job(name: str) -> Response:
        return ok(studio.jobs.read(name))

    @router.post("/jobs/{name}/stop", summary="Stop a job")
    def stop_job(name: str) -> Response:
        return ok(studio.jobs.stop(name))


def _devices_flag(studio: Studio, devices: list[str] | None) -> list[str]:
    if devices is None:
        return []
    studio.forms.check_devices(devices)
    return ["--devices", ",".join(devices)]


def unknown_address(request: Request) -> LockstepError:
    """The error for addresses without a route."""
    return ApiError("NOT_FOUND", 404, f"there is no {request.url.path[:200]}", fix="/docs lists the addresses")
