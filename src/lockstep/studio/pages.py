"""Pages that the server renders itself: messages, errors and the description of the API. No script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.errors import LockstepError
from lockstep.report.page import render


def message_page(lines: Sequence[str], url: str = "") -> str:
    """Paragraphs; with ``url``, the browser continues there."""
    return render(__package__, "message.html", lines=lines, url=url)


def enter_page(problem: str) -> str:
    """The page that exchanges the token, from the address or from its field, for a session."""
    return render(__package__, "enter.html", problem=problem)


def error_page(error: LockstepError) -> str:
    lines = [error.what, error.why, f"Fix: {error.fix}" if error.fix else ""]
    return message_page([line for line in lines if line])


def api_page(document: dict[str, Any]) -> str:
    """The OpenAPI document as a table."""
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = body.get("$ref", "").rpartition("/")[2]
            fields = document["components"]["schemas"].get(name, {}).get("properties", {})
            query = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
            rows.append((f"{method.upper()} {path}", operation.get("summary", ""), ", ".join(fields), ", ".join(query)))
    return render(__package__, "api.html", rows=rows)
