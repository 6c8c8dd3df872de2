"""Bodies of the API's requests, and its errors: one shape, and the HTTP status of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lockstep.errors import LockstepError, RunFolderError, StorageError, UsageError

_MAX_DEPTH = 20


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
Name = Annotated[str, _Stripped, Field(max_length=200)]
Tag = Annotated[str, _Stripped, Field(min_length=1, max_length=40)]
Devices = Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=1024)]
Checkpoint = Annotated[str, Field(pattern=r"^(best|last|[0-9]{1,12})$")]


class PlanBody(_Body):
    """A task of the list and the settings that differ from the defaults, nested as in a configuration file."""

    task: str = Field(max_length=1000)
    config: dict[str, Any] = Field(default_factory=dict)
    name: Name | None = None


class StartBody(PlanBody):
    """``id``: chosen by the page, so that a repeated click does not start a second run."""

    tags: list[Tag] = Field(default_factory=list, max_length=20)
    id: str | None = Field(None, pattern=r"^run-[0-9a-f]{8}$")


class LabelBody(_Body):
    """What is not given stays as it is; a name of ``null`` or nothing removes the name."""

    name: Name | None = None
    tags: list[Tag] | None = Field(None, max_length=20)
    notes: str = Field("", max_length=10_000)
    pinned: bool = False


class ResumeBody(_Body):
    devices: Devices | None = None
    rescale_batch: bool = False
    epochs: int | None = Field(None, ge=1)
    max_steps: int | None = Field(None, ge=1)


class EvaluateBody(_Body):
    split: Literal["test", "val"] = "test"
    checkpoint: Checkpoint = "best"
    device: str | None = Field(None, pattern=r"^(cpu|gpu:[0-9]{1,4})$")


class ExportBody(_Body):
    checkpoint: Checkpoint = "best"
    program: bool = True


class TaskBody(_Body):
    """``path``: ``file.py`` or ``file.py:Class``, below the folder in which the studio was started."""

    path: str = Field(max_length=1000)


class YamlBody(_Body):
    yaml: str = Field(max_length=256 << 10)


class DoctorBody(_Body):
    """``quick``: look only, start no ranks."""

    devices: Devices | None = None
    quick: bool = True


class ScalingBody(_Body):
    task: str = Field(max_length=1000)
    devices: Devices = Field(min_length=1)
    config: dict[str, Any] = Field(default_factory=dict)


class ApiError(UsageError):
    """An error of the API, with its own code and HTTP status."""

    def __init__(self, code: str, status: int, what: str, *, why: str = "", fix: str = "reload the page") -> None:
        super().__init__(what, why=why, fix=fix)
        self.code = code
        self.status = status


def status_of(error: LockstepError) -> int:
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, RunFolderError | StorageError):
        return 409 if isinstance(error, RunFolderError) else 507
    return 422 if error.exit_code == UsageError.exit_code else 500


def body_of(error: LockstepError) -> dict[str, Any]:
    return {"status": "error", **error.as_dict()}


def run_not_found(name: str) -> ApiError:
    fix = "reload the list; the folder may have been removed"
    return ApiError("RUN_NOT_FOUND", 404, f"there is no run {name[:100]!r}", fix=fix)


def in_progress(name: str, what: str = "it is still running") -> ApiError:
    return ApiError("TRAINING_IN_PROGRESS", 409, f"run {name}: {what}", fix="stop it first, or wait until it has ended")


def not_allowed(key: str, why: str) -> ApiError:
    fix = "leave it out, or start this run from a terminal"
    return ApiError("SETTING_NOT_ALLOWED", 422, f"{key} cannot be set from the page", why=why, fix=fix)
