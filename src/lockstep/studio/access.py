"""Access control: the Host, the Origin and the session of every request, HTTP and WebSocket."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Mapping
from functools import partial
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from lockstep.lab.report.page import render
from lockstep.studio.home import Home
from lockstep.studio.schemas import ApiError, body_of

MAX_BODY_BYTES = 1 << 20
#: Other pages can neither read nor frame the studio, and no text is run as a script.
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_NOT_KEPT = {"cache-control": "no-store"}
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
#: Files of the page that asks for the token, which shows nothing of a run.
_PUBLIC = {"/static/app/enter.js", "/static/styles/base.css", "/static/vendor/inter.woff2"}
SESSION_S = 30 * 86_400
#: In a WebSocket's scope: raises :class:`ApiError` once a new token has ended its session.
CHECK = "lockstep.check_session"


class Sessions:
    """Browsers that have shown the token. A session is its last second with a signature by the token, for this port."""

    def __init__(self, home: Home, port: int) -> None:
        self._home = home
        self._port = port

    def is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode("utf-8", "replace"), self._home.token().encode())

    def begin(self) -> str:
        return self._signed(str(int(time.time() + SESSION_S)))

    def knows(self, session: str) -> bool:
        end = session.partition(".")[0]
        return secrets.compare_digest(session.encode(), self._signed(end).encode()) and int(end) > time.time()

    def _signed(self, end: str) -> str:
        return f"{end}.{hmac.new(self._home.token().encode(), f'{self._port} {end}'.encode(), 'sha256').hexdigest()}"


class Guard:
    """ASGI middleware: a browser exchanges the token for a session, scripts send it as ``Authorization: Bearer``.

    ``cookie`` holds the session; cookies are shared between ports, so its name contains the port.
    """

    def __init__(self, app: ASGIApp, *, sessions: Sessions, cookie: str) -> None:
        self._app = app
        self._sessions = sessions
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"].endswith("http.response.start"):
                present = {name for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in present]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        answer = await self._answer(connection, receive) or self._app
        await answer({**scope, CHECK: partial(self._check_session, connection)}, receive, send_with_headers)

    async def _answer(self, connection: HTTPConnection, receive: Receive) -> ASGIApp | None:
        """Return a refusal, or an answer that needs no session; ``None``: the application answers."""
        method = connection.scope.get("method")
        path = connection.scope["path"]
        try:
            _check_place(connection.headers)
            if method is not None:
                _check_body(method, connection.headers)
            if path == "/api/session":
                request = Request(connection.scope, receive)
                return await self._begin_session(request) if method == "POST" else self._has_session(connection)
            if path not in _PUBLIC:
                self._check_session(connection)
        except ApiError as error:
            if method is None:
                return WebSocketClose()  # 403, since uvicorn takes any other status for a handshake that was broken off
            if path == "/" and error.status == 401:
                problem = error.what if self._cookie in connection.cookies else ""
                return HTMLResponse(render(__package__, "enter.html", problem=problem), headers=_NOT_KEPT)
            return JSONResponse(body_of(error), error.status, _NOT_KEPT)
        return None

    def _check_session(self, connection: HTTPConnection) -> None:
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._sessions.is_token(token.strip()):
            return
        session = connection.cookies.get(self._cookie, "")
        if not session or not self._sessions.knows(session):
            raise ApiError(
                "UNAUTHORISED",
                401,
                "the studio's token has changed, or your session has expired" if session else "the token is missing",
                fix="open the address that `lockstep studio` printed when it started",
            )

    def _has_session(self, connection: HTTPConnection) -> Response:
        is_known = self._sessions.knows(connection.cookies.get(self._cookie, ""))
        return JSONResponse({"status": "ok", "data": is_known}, headers=_NOT_KEPT)

    async def _begin_session(self, request: Request) -> Response:
        try:
            token = (await request.json())["token"]
        except (ValueError, KeyError, TypeError, RecursionError, ClientDisconnect):
            token = ""
        if not self._sessions.is_token(str(token)):
            raise ApiError("UNAUTHORISED", 401, "this is not the studio's token", fix="copy it from the terminal")
        answer = JSONResponse({"status": "ok", "data": None}, headers=_NOT_KEPT)
        answer.set_cookie(self._cookie, self._sessions.begin(), SESSION_S, httponly=True, samesite="strict")
        return answer


def _check_place(headers: Mapping[str, str]) -> None:
    """Refuse names bound to this address (DNS rebinding), and pages of other sites."""
    host = headers.get("host", "")
    origin = headers.get("origin")
    name = _host_of(f"//{host}")
    if name not in _LOOPBACK or "@" in host:
        raise ApiError(
            "FOREIGN_HOST",
            400,
            "the studio answers on this machine only",
            fix="use the address that it printed; from another machine, with ssh -L as in `lockstep studio --help`",
        )
    is_foreign = origin not in {None, f"http://{host}"}
    # Other ports of this machine are the same site to a browser, and get the cookie.
    elsewhere = origin is None and headers.get("sec-fetch-site") in {"cross-site", "same-site"}
    if is_foreign or (elsewhere and headers.get("sec-fetch-mode") != "navigate"):
        raise ApiError("FOREIGN_ORIGIN", 403, "another site may not use the studio", fix="use the studio's page")


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _check_body(method: str, headers: Mapping[str, str]) -> None:
    if method in {"GET", "HEAD", "OPTIONS"}:
        return
    length = headers.get("content-length")
    if length is None and "transfer-encoding" in headers:
        raise ApiError("INVALID_REQUEST", 411, "the request has no length", fix="send Content-Length")
    if length is not None and (not length.isdigit() or int(length) > MAX_BODY_BYTES):
        raise ApiError("BODY_TOO_LARGE", 413, f"a request is at most {MAX_BODY_BYTES} bytes", fix="send less")
