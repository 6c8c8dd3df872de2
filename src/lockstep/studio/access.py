"""Access control: the Host, the Origin and the token of every request, HTTP and WebSocket."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from lockstep.studio.pages import message_page
from lockstep.studio.problems import ApiError, body_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 1 << 20
#: Other pages can neither read nor frame the studio, and no text is run as a script.
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
#: A run's report contains its style and pictures; it may do nothing else, also not as this site (sandbox).
REPORT_CSP = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; sandbox"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_LOCKED = (
    "Open the address that `lockstep studio` printed when it started, the one with ?token=…, once in this browser. "
    "The browser remembers it."
)


class Guard:
    """ASGI middleware around the whole application.

    Args:
        token: what the start URL, the cookie or an ``Authorization: Bearer`` header must hold.
        cookie: the cookie's name; cookies are shared between ports, so the name contains the port.
    """

    def __init__(self, app: ASGIApp, *, token: str, cookie: str) -> None:
        self._app = app
        self._token = token
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            _check_place(headers)
            if scope["type"] == "http" and scope["path"] == "/" and self._token_in(scope["query_string"]):
                await self._welcome(send)
                return
            self._check_token(headers)
            if scope["type"] == "http":
                _check_body(scope["method"], headers)
        except ApiError as error:
            await _refuse(scope, send, error)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in present]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _token_in(self, query: bytes) -> bool:
        given = parse_qs(query.decode("latin-1")).get("token", [""])[0]
        return self._is_token(given)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _check_token(self, headers: Mapping[str, str]) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        morsel = cookies.get(self._cookie)
        if morsel is None or not self._is_token(morsel.value):
            raise ApiError(
                "UNAUTHORISED",
                401,
                "the studio's token is missing or wrong",
                fix="open the address that `lockstep studio` printed when it started",
            )

    async def _welcome(self, send: Send) -> None:
        # A page that refreshes, not a redirect: after a click on a link elsewhere, a browser would not send a
        # SameSite=Strict cookie with the redirected request.
        cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/; Max-Age=31536000"
        await _answer(send, 200, message_page([], url="/").encode(), "text/html; charset=utf-8", {"set-cookie": cookie})


def _check_place(headers: Mapping[str, str]) -> None:
    """Refuse names bound to this address (DNS rebinding), and pages of other sites."""
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        name = None
    if name not in _LOOPBACK or "@" in host:
        raise ApiError(
            "FOREIGN_HOST", 400, "the studio answers on this machine only", fix="use the address that it printed"
        )
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        raise ApiError("FOREIGN_ORIGIN", 403, "another site may not use the studio", fix="use the studio's own page")
    # Other ports of this machine are the same site to a browser, and get the cookie.
    elsewhere = headers.get("sec-fetch-site") in {"cross-site", "same-site"}
    if origin is None and elsewhere and headers.get("sec-fetch-mode") != "navigate":
        raise ApiError("FOREIGN_ORIGIN", 403, "another site may not use the studio", fix="use the studio's own page")


def _check_body(method: str, headers: Mapping[str, str]) -> None:
    if method in {"GET", "HEAD", "OPTIONS"}:
        return
    length = headers.get("content-length")
    if length is None and "transfer-encoding" in headers:
        raise ApiError("INVALID_REQUEST", 411, "the request has no length", fix="send Content-Length")
    if length is not None and (not length.isdigit() or int(length) > MAX_BODY_BYTES):
        raise ApiError("BODY_TOO_LARGE", 413, f"a request is at most {MAX_BODY_BYTES} bytes", fix="send less")


async def _refuse(scope: Scope, send: Send, error: ApiError) -> None:
    wants_page = scope["type"] == "http" and scope["path"] == "/" and error.status == 401
    if wants_page:
        body, kind = message_page([_LOCKED]).encode(), "text/html; charset=utf-8"
    else:
        body, kind = json.dumps(body_of(error)).encode(), "application/json"
    if scope["type"] == "websocket":
        await _answer(send, error.status, body, kind, {}, prefix="websocket.")
    else:
        await _answer(send, error.status, body, kind, {})


async def _answer(
    send: Send, status: int, body: bytes, kind: str, more: Mapping[str, str], *, prefix: str = ""
) -> None:
    headers = {**HEADERS, "content-type": kind, "content-length": str(len(body)), "cache-control": "no-store", **more}
    start: dict[str, Any] = {
        "type": f"{prefix}http.response.start",
        "status": status,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }
    await send(start)
    await send({"type": f"{prefix}http.response.body", "body": body})
