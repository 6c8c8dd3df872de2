"""The WebSockets of browser tabs: once a second each reads the files of its runs and sends what changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from lockstep.errors import LockstepError
from lockstep.studio.index import RunIndex, Summary
from lockstep.studio.schemas import ApiError, malformed
from lockstep.studio.tailing import TICK_S, Feed, Message, Subscription

#: The pause while a long file is being read, in which other tabs find the feed unlocked.
_BEHIND_S = 0.02
#: How often an outbox is checked that a tab does not read.
_UNREAD_S = 0.1
MAX_SUBSCRIPTIONS = 20
#: The studio's page sends none.
MAX_BAD_MESSAGES = 20
#: Answers that wait for a tab to read; a part of a long run may have some megabytes.
MAX_UNSENT = 8
_log = logging.getLogger(__name__)


class TabMessage(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    type: Literal["watch", "subscribe", "unsubscribe", "range"]
    run: str = Field("", max_length=300)
    runs: bool = False
    stream: str = Field("steps", max_length=300)
    low: float | None = Field(None, alias="from", ge=-1e300, le=1e300)
    high: float | None = Field(None, alias="to", ge=-1e300, le=1e300)
    request: int | None = None
    #: Of a range: the columns besides those of the axes (default: all), and whether every row is needed.
    columns: list[Annotated[str, Field(max_length=300)]] | None = Field(None, max_length=100)
    full: bool = False


class Hub:
    """The tabs that are open, and the feeds of runs, which they share."""

    def __init__(self, index: RunIndex, hello: Callable[[], dict[str, Any]]) -> None:
        self.index = index
        self._hello = hello
        #: By run, while a tab follows it.
        self.feeds: WeakValueDictionary[str, Feed] = WeakValueDictionary()
        self._tabs: set[Tab] = set()

    async def close(self) -> None:
        """Close every tab: the studio ends."""
        for tab in list(self._tabs):
            with contextlib.suppress(RuntimeError, OSError, WebSocketDisconnect):
                await tab.socket.close(1012)

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        tab = Tab(self, socket)
        self._tabs.add(tab)
        tab.say({"type": "hello", **self._hello()})
        try:
            await tab.serve()
        finally:
            self._tabs.discard(tab)


class Tab:
    """One WebSocket."""

    def __init__(self, hub: Hub, socket: WebSocket) -> None:
        self._hub = hub
        self.socket = socket
        self._asked = asyncio.Event()
        self._subscriptions: dict[str, Subscription] = {}
        self._watches_runs = False
        #: The list as it was sent: runs by id, and problems.
        self._sent: tuple[dict[str, Summary], list[str]] | None = None
        self._list_due = 0.0
        self._outbox: list[Message] = []
        self._bad_messages = 0

    def say(self, message: Message) -> None:
        self._outbox.append(message)
        self._asked.set()

    async def serve(self) -> None:
        sender = asyncio.create_task(self._send())
        try:
            while True:
                message = await self.socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                await self._receive(message.get("text"))
                # A tab that asks and never reads: its next messages wait until it has taken the answers.
                while len(self._outbox) > MAX_UNSENT and not sender.done():
                    await asyncio.sleep(_UNREAD_S)
                if self._bad_messages > MAX_BAD_MESSAGES:
                    await self.socket.close(1008)
                    return
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    # Messages of the tab.

    async def _receive(self, text: str | None) -> None:
        message: TabMessage | None = None
        try:
            message = _parse(text)
            await self._answer(message)
        except LockstepError as error:
            self._bad_messages += error.code == "INVALID_REQUEST"
            about = message.model_dump(include={"run", "request"}, exclude_unset=True) if message else {}
            self.say({"type": "error", **error.as_dict(), "run": None, **about})

    async def _answer(self, message: TabMessage) -> None:
        match message.type:
            case "watch":
                self._watches_runs = message.runs
                self._sent = None
                self._list_due = 0.0
                self._asked.set()
            case "subscribe":
                if message.run not in self._subscriptions and len(self._subscriptions) >= MAX_SUBSCRIPTIONS:
                    raise ApiError(
                        "INVALID_CONFIG", 422, f"a tab follows at most {MAX_SUBSCRIPTIONS} runs", fix="leave some out"
                    )
                feed = self._hub.feeds.get(message.run) or Feed(self._hub.index.run_folder(message.run), message.run)
                self._hub.feeds[message.run] = feed
                self._subscriptions[message.run] = Subscription(feed)
                self._asked.set()
            case "unsubscribe":
                self._subscriptions.pop(message.run, None)
            case "range":
                subscription = self._subscriptions.get(message.run)
                if subscription is None:
                    raise ApiError("RUN_NOT_FOUND", 404, "this tab does not follow that run", fix="subscribe first")
                # Thinning out a million rows takes a while, and other tabs should not wait for it.
                self.say(await asyncio.to_thread(_range, subscription.feed, message))

    # Messages to the tab.

    async def _send(self) -> None:
        try:
            while True:
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
        except Exception:
            if WebSocketState.DISCONNECTED not in (self.socket.client_state, self.socket.application_state):
                _log.exception("a tab cannot be sent to")
        with contextlib.suppress(RuntimeError, OSError):
            await self.socket.close(1011)  # a tab that gets nothing more would wait; this one connects again

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
            error = ApiError(
                "RUN_NOT_USABLE",
                500,
                f"run {feed.name} cannot be followed",
                why="reading its files failed; see the studio's log",
                fix="look for a damaged file in its folder",
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


def _range(feed: Feed, message: TabMessage) -> str:
    with feed.lock:
        if message.stream not in feed.tails:
            raise ApiError("NOT_FOUND", 404, f"no stream {message.stream!r} in this run", fix="use one of its streams")
        columns = feed.tails[message.stream].columns
        start, end = columns.between(message.low, message.high)
        part = columns.part(start, end, message.columns, full=message.full)
        return feed.message("range", message.stream, columns, part, request=message.request)


def _parse(text: str | None) -> TabMessage:
    try:
        return TabMessage.model_validate_json(text or "")
    except ValidationError as error:
        raise malformed(error.errors()) from None
