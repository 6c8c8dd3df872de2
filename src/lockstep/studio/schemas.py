"""Bodies of the API's requests, and its errors: one shape, and the HTTP status of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lockstep.errors import LockstepError, RunFolderError, StorageError, UsageError

_MAX_DEPTH = 20
#: The setting that an error of this code is about.
_SETTINGS = {"GPU_NOT_AVAILABLE": "hardware.selected_devices", "PRECISION_NOT_AVAILABLE": "hardware.precision"}


def _check_text(value: Any, depth: int = 0) -> None:
    """Refuse text that no file name, command or UTF-8 file can hold."""
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, str) and ("\0" in value or any(0xD800 <= ord(character) <= 0xDFFF for character in value)):
        raise ValueError("a text holds characters that cannot be stored")
    if isinstance(value, Mapping | list):
        for item in value if isinstance(value, list) else [*value.keys(), *value.values()]:
            _check_text(item, depth + 1)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        _check_text(value)
        return value


_Stripped = BeforeValidator(lambda value: " ".join(value.split()) if isinstance(value, str) else value)

#: In an address.
RunName = Annotated[str, Field(description="the run's id, or the name of its folder")]
#: Without a text: no name.
Name = Annotated[Annotated[str, _Stripped, Field(max_length=200)] | None, AfterValidator(lambda name: name or None)]
Tag = Annotated[str, _Stripped, Field(min_length=1, max_length=40)]
Devices = Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=1024)]


class PlanBody(_Body):
    """A task of the list and the settings that differ from the defaults, nested as in a configuration file."""

    task: str = Field(max_length=1000)
    config: dict[str, Any] = Field(default_factory=dict)
    name: Name = None


class StartBody(PlanBody):
    """``id``: chosen by the page, so that a repeated click does not start a second run."""

    tags: list[Tag] = Field(default_factory=list, max_length=20)
    id: str | None = Field(None, pattern=r"^run-[0-9a-f]{8}$")


class LabelBody(_Body):
    """Missing fields stay as they are; a name of ``null`` or nothing removes the name."""

    name: Name = None
    tags: list[Tag] | None = Field(None, max_length=20)


class ResumeBody(_Body):
    devices: Devices | None = None
    rescale_batch: bool = False
    epochs: int | None = Field(None, ge=1)
    max_steps: int | None = Field(None, ge=1)


class TaskBody(_Body):
    """``path``: ``file.py:Class``, in the folder in which the studio was started or in one of its folders."""

    path: str = Field(max_length=1000)


class ApiError(UsageError):
    """An error of the API with a code and an HTTP status."""

    def __init__(self, code: str, status: int, message: str, *, why: str = "", fix: str = "reload the page") -> None:
        super().__init__(message, why=why, fix=fix)
        self.code = code
        self.status = status


def status_of(error: LockstepError) -> int:
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, RunFolderError | StorageError):
        return 409 if isinstance(error, RunFolderError) else 507
    return 422 if error.exit_code == UsageError.exit_code else 500


def problem_of(error: LockstepError) -> dict[str, Any]:
    """Return the JSON of an error, with the problem of each of its settings, by key."""
    setting = _SETTINGS.get(error.code)
    return {**error.as_dict(), "settings": {setting: error.what} if setting else dict(error.settings)}


def body_of(error: LockstepError) -> dict[str, Any]:
    return {"status": "error", **error.as_dict()}


def malformed(problems: Sequence[Any]) -> ApiError:
    """Make the error for a body or a message that pydantic refuses; ``problems``: its ``errors()``."""
    reasons = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems[:5]]
    reason = "; ".join(reasons)[:500]
    return ApiError("INVALID_REQUEST", 422, "the request is malformed", why=reason, fix="see docs/studio.md")


def run_not_found(name: str) -> ApiError:
    fix = "reload the list; the folder may have been removed"
    return ApiError("RUN_NOT_FOUND", 404, f"there is no run {name[:100]!r}", fix=fix)


def in_progress(name: str, state: str = "it is still running") -> ApiError:
    fix = "stop it first, or wait until it has ended"
    return ApiError("TRAINING_IN_PROGRESS", 409, f"run {name}: {state}", fix=fix)


def not_allowed(key: str, reason: str) -> ApiError:
    fix = "leave it out, or start this run from a terminal"
    return ApiError("SETTING_NOT_ALLOWED", 422, f"{key} cannot be set from the page", why=reason, fix=fix)
