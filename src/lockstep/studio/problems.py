"""Errors of the API: one shape, and the HTTP status of each kind."""

from __future__ import annotations

from typing import Any

from lockstep.errors import LockstepError, RunFolderError, StorageError, UsageError


class ApiError(UsageError):
    """An error of the API, with its own code and HTTP status."""

    def __init__(self, code: str, status: int, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what, why=why, fix=fix)
        self.code = code
        self.status = status


def status_of(error: LockstepError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, RunFolderError):
        return 409
    if isinstance(error, StorageError):
        return 507
    return 422 if error.exit_code == UsageError.exit_code else 500


def body_of(error: LockstepError) -> dict[str, Any]:
    """The error in the API's one shape."""
    return {"status": "error", **error.as_dict()}


def run_not_found(name: str) -> ApiError:
    fix = "reload the list; the folder may have been removed"
    return ApiError("RUN_NOT_FOUND", 404, f"there is no run {name[:100]!r}", fix=fix)


def in_progress(name: str, what: str = "it is still running") -> ApiError:
    return ApiError("TRAINING_IN_PROGRESS", 409, f"run {name}: {what}", fix="stop it first, or wait until it has ended")


def not_allowed(key: str, why: str) -> ApiError:
    fix = "leave it out, or start this run from a terminal"
    return ApiError("SETTING_NOT_ALLOWED", 422, f"{key} cannot be set from the page", why=why, fix=fix)
