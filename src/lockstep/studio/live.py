"""The WebSockets of browser tabs: once a second each reads the files of its runs and sends what changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketState

from lockstep.errors import ConfigError, LockstepError, RunFolderError
from lockstep.studio.access import CHECK
from lockstep.studio.index import RunIndex, Summary
from lockstep.studio.schemas import ApiError, RunName, malformed
from lockstep.studio.tailing import TICK_S, Feed, Message, Subscription

#: The pause while a long file is being read, in which other tabs find the feed unlocked.
_BEHIND_S = 0.02
MAX_SUBSCRIPTIONS = 20
#: Messages that are refused, of which the studio's page sends hardly any.
MAX_BAD_MESSAGES = 50
_log = logging.getLogger(__name__)


class TabMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["watch", "subscribe", "unsubscribe"]
    run: str = Field("", max_length=300)
    runs: bool = False


class Hub:
    """The tabs that are open, and the feeds of runs, which they share."""

    def __init__(self, index: RunIndex, hello: Callable[[], dict[str, Any]]) -> None:
        self.index = index
        self._hello = hello
        #: By run, while a tab follows it.
        self.feeds: WeakValueDictionary[str, Feed] = WeakValueDictionary()

    def feed(self, name: str) -> Feed:
        """Return the feed of a run: that of the tabs that follow it, or a new one. Raises :class:`ApiError`."""
        return self.feeds.setdefault(name, self.feeds.get(name) or Feed(self.index.run_folder(name), name))

    def rows(
        self,
        name: RunName,
        low: Annotated[float | None, Query(alias="from")] = None,
        high: Annotated[float | None, Query(alias="to")] = None,
        stream: str = "steps",
        column: Annotated[list[str] | None, Query(max_length=100)] = None,
        full: bool = False,
    ) -> Response:
        """Return a part of a stream: these columns (default: all) and the axes, thinned out unless short or full."""
        feed = self.feed(name)
        while True:
            with feed.lock:
                feed.poll()
            if not feed.behind:
                break
        with feed.lock:
            if stream not in feed.tails:
                raise ApiError("NOT_FOUND", 404, f"no stream {stream[:90]!r} in this run", fix="use one of its streams")
            columns = feed.tails[stream].columns
            part = columns.part(*columns.between(low, high), column, full=full)
            rows = feed.message("range", stream, columns, part)
        return Response(f'{{"status":"ok","data":{rows}}}', media_type="application/json")

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        await Tab(self, socket, {"type": "hello", **self._hello()}).serve()


class Tab:
    """One WebSocket."""

    def __init__(self, hub: Hub, socket: WebSocket, hello: Message) -> None:
        self._hub = hub
        self.socket = socket
        self._asked = asyncio.Event()
        self._subscriptions: dict[str, Subscription] = {}
        self._watches_runs = False
        #: The list as it was sent: runs by id, and problems.
        self._sent: tuple[dict[str, Summary], list[str]] | None = None
        self._list_due = 0.0
        self._outbox = [hello]
        self._bad_messages = 0

    async def serve(self) -> None:
        sender = asyncio.create_task(self._send())
        try:
            while True:
                message = await self.socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                self._receive(message.get("text"))
                if self._bad_messages > MAX_BAD_MESSAGES:
                    await self.socket.close(1008)
                    return
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    def _receive(self, text: str | None) -> None:
        run = None
        try:
            message = TabMessage.model_validate_json(text or "")
            run = message.run
            self._follow(message)
        except (LockstepError, ValidationError) as error:
            refusal = malformed(error.errors()) if isinstance(error, ValidationError) else error
            self._bad_messages += 1
            self._outbox.append({"type": "error", **refusal.as_dict(), "run": run})
        self._asked.set()

    def _follow(self, message: TabMessage) -> None:
        match message.type:
            case "watch":
                self._watches_runs = message.runs
                self._sent = None
                self._list_due = 0.0
            case "subscribe":
                if message.run not in self._subscriptions and len(self._subscriptions) >= MAX_SUBSCRIPTIONS:
                    raise ConfigError(f"a tab follows at most {MAX_SUBSCRIPTIONS} runs", fix="leave some out")
                self._subscriptions[message.run] = Subscription(self._hub.feed(message.run))
            case "unsubscribe":
                self._subscriptions.pop(message.run, None)

    async def _send(self) -> None:
        end = (1011, "")
        try:
            while True:
                self.socket.scope[CHECK]()
                news = self._outbox
                self._outbox = []
                await self._send_all(news)
                if time.monotonic() >= self._list_due:
                    await self._look_at_list()
                subscriptions = list(self._subscriptions.values())
                for subscription in subscriptions:
                    await self._look_at(subscription)
                is_behind = any(subscription.feed.behind for subscription in subscriptions)
                with contextlib.suppress(TimeoutError):
                    # wait_for of Python 3.11 may swallow a cancellation
                    async with asyncio.timeout(_BEHIND_S if is_behind else TICK_S):
                        await self._asked.wait()
                self._asked.clear()
        except ApiError as error:
            end = (1008, error.code)
        except Exception:
            if WebSocketState.DISCONNECTED not in (self.socket.client_state, self.socket.application_state):
                _log.exception("a tab cannot be sent to")
        with contextlib.suppress(RuntimeError, OSError):
            await self.socket.close(*end)  # a tab that gets nothing more would wait; this one connects again

    async def _send_all(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, str):
                await self.socket.send_text(message)
            else:
                await self.socket.send_json(message)

    async def _look_at(self, subscription: Subscription) -> None:
        """Send new rows of a run. A run that cannot be read is given up."""
        feed = subscription.feed
        try:
            news = await asyncio.to_thread(subscription.news)
        except Exception:
            _log.exception("run %s cannot be followed", feed.name)
            if self._subscriptions.get(feed.name) is subscription:
                del self._subscriptions[feed.name]
            self._hub.feeds.pop(feed.name, None)
            error = RunFolderError(
                f"run {feed.name} cannot be followed", why="see the studio's log", fix="look for a damaged file"
            )
            news = [{"type": "error", **error.as_dict(), "run": feed.name}]
        await self._send_all(news)

    async def _look_at_list(self) -> None:
        """Send the runs of the list that are new, if the tab watches it, and that the server is alive."""
        watched = None
        try:
            if self._watches_runs:
                watched = await asyncio.to_thread(self._hub.index.watched)
        except Exception:
            _log.exception("the list of runs cannot be read; trying again")
        news = self._news_of_list(*watched) if watched is not None else []
        self._list_due = time.monotonic() + TICK_S
        await self._send_all([*news, {"type": "alive", "now": time.time()}])

    def _news_of_list(self, runs: list[Summary], problems: list[str]) -> list[Message]:
        now = {run["id"]: run for run in runs}
        sent = self._sent
        self._sent = (now, problems)
        if sent is None:
            return [{"type": "runs", "runs": runs, "problems": problems}]
        changed = [run for name, run in now.items() if sent[0].get(name) is not run]
        removed = [name for name in sent[0] if name not in now]
        if not changed and not removed and problems == sent[1]:
            return []
        return [{"type": "runs_changed", "runs": changed, "removed": removed, "problems": problems}]
