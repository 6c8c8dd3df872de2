"""The hub between run folders and browser tabs: polls files up to ten times a second, and sends what changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.websockets import WebSocket, WebSocketState

from lockstep.errors import LockstepError
from lockstep.studio.commands import Jobs
from lockstep.studio.index import RunIndex, Summary
from lockstep.studio.schemas import ApiError
from lockstep.studio.tailing import Feed, Message, Subscription

#: How often the files of runs are read, and the list; each less often, by this factor, while nothing is new.
TICK_S, LIST_S, SLOWER = 0.1, 1.0, 1.1
MAX_SUBSCRIPTIONS = 20
#: The studio's own page sends none.
MAX_BAD_MESSAGES = 20
#: Answers that wait for a tab to read; a part of a long run may have some megabytes.
MAX_UNSENT = 8
_log = logging.getLogger(__name__)


class Asked(BaseModel):
    """A tab's message."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    type: Literal["watch", "subscribe", "unsubscribe", "range"]
    run: str = Field("", max_length=300)
    runs: bool = False
    stream: str = Field("steps", max_length=300)
    low: float | None = Field(None, alias="from", ge=-1e300, le=1e300)
    high: float | None = Field(None, alias="to", ge=-1e300, le=1e300)
    request: int | None = None


@dataclass(eq=False)
class Tab:
    """One WebSocket."""

    socket: WebSocket
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    watches_runs: bool = False
    #: By id, as they were sent.
    known_runs: dict[str, Summary] | None = None
    known_problems: list[str] = field(default_factory=list)
    outbox: list[Message] = field(default_factory=list)
    bad_messages: int = 0

    def say(self, message: Message) -> None:
        self.outbox.append(message)
        self.wake.set()


class Hub:
    """Feeds by run and the tabs that watch them."""

    def __init__(self, index: RunIndex, jobs: Jobs, hello: Callable[[], dict[str, Any]]) -> None:
        self._index, self._jobs, self._hello = index, jobs, hello
        self._feeds: dict[str, Feed] = {}
        self._tabs: set[Tab] = set()
        self._runs: list[Summary] = []
        self._problems: list[str] = []
        self._listed = False
        self._busy = asyncio.Event()
        self._asked = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._follow_runs()), asyncio.create_task(self._follow_list())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for tab in list(self._tabs):
                with contextlib.suppress(RuntimeError, OSError):
                    await tab.socket.close(1012)

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        tab = Tab(socket)
        self._tabs.add(tab)
        self._asked.set()
        tab.say({"type": "hello", **self._hello()})
        sender = asyncio.create_task(self._send(tab))
        try:
            while True:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                await self._receive(tab, message.get("text"))
                # A tab that asks and never reads: it is not listened to until it has taken what it asked for.
                while len(tab.outbox) > MAX_UNSENT and not sender.done():
                    await asyncio.sleep(TICK_S)
                if tab.bad_messages > MAX_BAD_MESSAGES:
                    await socket.close(1008)
                    return
        finally:
            self._tabs.discard(tab)
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            self._drop_unwatched()

    # What a tab asks for.

    async def _receive(self, tab: Tab, text: str | None) -> None:
        asked: Asked | None = None
        try:
            asked = _parse(text)
            await self._answer(tab, asked)
        except LockstepError as error:
            tab.bad_messages += error.code == "INVALID_REQUEST"
            about = asked.model_dump(include={"run", "request"}, exclude_unset=True) if asked else {}
            tab.say({"type": "error", **error.as_dict(), "run": None, **about})

    async def _answer(self, tab: Tab, asked: Asked) -> None:
        match asked.type:
            case "watch":
                tab.watches_runs, tab.known_runs = asked.runs, None
                self._asked.set()
                tab.wake.set()
            case "subscribe":
                if asked.run not in tab.subscriptions and len(tab.subscriptions) >= MAX_SUBSCRIPTIONS:
                    what = f"a tab follows at most {MAX_SUBSCRIPTIONS} runs"
                    raise ApiError("INVALID_CONFIG", 422, what, fix="leave some out")
                if asked.run not in self._feeds:
                    self._feeds[asked.run] = Feed(self._index.run_folder(asked.run), asked.run)
                tab.subscriptions[asked.run] = Subscription(self._feeds[asked.run])
                self._busy.set()
                tab.wake.set()
            case "unsubscribe":
                tab.subscriptions.pop(asked.run, None)
                self._drop_unwatched()
            case "range":
                subscription = tab.subscriptions.get(asked.run)
                if subscription is None:
                    what = "this tab does not follow that run"
                    raise ApiError("RUN_NOT_FOUND", 404, what, fix="subscribe first")
                # Thinning out a million rows takes a while, and other tabs should not wait for it.
                tab.say(await asyncio.to_thread(_range, subscription.feed, asked))

    def _drop_unwatched(self) -> None:
        watched = {name for tab in self._tabs for name in tab.subscriptions}
        for name in self._feeds.keys() - watched:
            del self._feeds[name]

    # Polling files.

    async def _follow_runs(self) -> None:
        pause_s = TICK_S
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._busy.wait(), pause_s if self._feeds else None)
            self._busy.clear()
            feeds = list(self._feeds.values())
            changed, failed = await asyncio.to_thread(_poll, feeds)
            for feed in failed:
                self._give_up(feed)
            if changed:
                for tab in self._tabs:
                    tab.wake.set()
            # While a long file is being read, tabs need a moment in which the feed is not locked.
            behind = any(feed.behind for feed in feeds if feed not in failed)
            pause_s = TICK_S / 5 if behind else TICK_S if changed else min(LIST_S, SLOWER * pause_s)

    async def _follow_list(self) -> None:
        pause_s = LIST_S
        while True:
            self._listed = self._listed and bool(self._tabs)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), pause_s if self._tabs else None)
            self._asked.clear()
            try:
                pause_s = LIST_S if await self._send_list() else min(2 * LIST_S, SLOWER * pause_s)
            except Exception:
                _log.exception("the list of runs cannot be sent; trying again")

    async def _send_list(self) -> bool:
        """Read the list and the jobs; return whether anything changed."""
        listed = any(tab.watches_runs for tab in self._tabs)
        look = self._index.watched if listed else lambda: None
        found, jobs = await asyncio.to_thread(lambda: (look(), self._jobs.changed()))
        same = True
        if found is not None:
            same = self._listed and self._runs is found[0] and self._problems == found[1]
            (self._runs, self._problems), self._listed = found, True
            for tab in self._tabs:
                if not same or tab.known_runs is None:
                    tab.wake.set()
        for job in jobs:
            for tab in self._tabs:
                tab.say({"type": "job", "job": job})
        return not same or bool(jobs)

    def _give_up(self, feed: Feed) -> None:
        """Stop following this run; a tab may subscribe again."""
        if self._feeds.get(feed.name) is feed:
            del self._feeds[feed.name]
        why, fix = "reading its files failed; see the studio's log", "look for a damaged file in its folder"
        error = ApiError("RUN_NOT_USABLE", 500, f"run {feed.name} cannot be followed", why=why, fix=fix)
        for tab in self._tabs:
            if (sent := tab.subscriptions.get(feed.name)) is not None and sent.feed is feed:
                del tab.subscriptions[feed.name]
                tab.say({"type": "error", **error.as_dict(), "run": feed.name})

    # Sending to tabs.

    async def _send(self, tab: Tab) -> None:
        try:
            while True:
                await tab.wake.wait()
                tab.wake.clear()
                for message in self._news(tab):
                    if isinstance(message, bytes):
                        await tab.socket.send_bytes(message)
                    else:
                        await tab.socket.send_json(message)
                # A slow tab gets fewer, larger messages; nothing queues up for it.
                await asyncio.sleep(TICK_S / 2)
        except Exception:
            if WebSocketState.DISCONNECTED not in (tab.socket.client_state, tab.socket.application_state):
                _log.exception("a tab cannot be sent to")
        with contextlib.suppress(RuntimeError, OSError):
            await tab.socket.close(1011)  # a tab that gets nothing more would wait; this one connects again

    def _news(self, tab: Tab) -> Iterator[Message]:
        """What to send, made while it is sent: the frames of one run at a time."""
        news, tab.outbox = tab.outbox, []
        yield from news
        if tab.watches_runs and self._listed:
            yield from self._news_of_list(tab)
        for subscription in list(tab.subscriptions.values()):
            try:
                news = subscription.news()
            except Exception:
                _log.exception("run %s cannot be sent", subscription.feed.name)
                self._give_up(subscription.feed)
                continue
            yield from news

    def _news_of_list(self, tab: Tab) -> list[Message]:
        known, problems = tab.known_runs, self._problems
        now = tab.known_runs = {run["id"]: run for run in self._runs}
        if known is None:
            tab.known_problems = problems
            return [{"type": "runs", "runs": self._runs, "problems": problems}]
        changed = [run for name, run in now.items() if known.get(name) is not run]
        removed = [name for name in known if name not in now]
        if not changed and not removed and problems == tab.known_problems:
            return []
        tab.known_problems = problems
        return [{"type": "runs_changed", "runs": changed, "removed": removed, "problems": problems}]


def _poll(feeds: list[Feed]) -> tuple[bool, list[Feed]]:
    """Whether anything changed, and the feeds that cannot be read."""
    changed, failed = False, []
    for feed in feeds:
        try:
            changed |= feed.poll()
        except Exception:
            _log.exception("run %s cannot be followed", feed.name)
            failed.append(feed)
    return changed, failed


def _range(feed: Feed, asked: Asked) -> bytes:
    with feed.lock:
        if asked.stream not in feed.tails:
            raise ApiError("NOT_FOUND", 404, f"no stream {asked.stream!r} in this run", fix="use one of its streams")
        return feed.range(asked.stream, asked.low, asked.high, asked.request)


def _parse(text: str | None) -> Asked:
    try:
        return Asked.model_validate_json(text or "")
    except ValidationError as error:
        why = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
        fix = "see the studio's documentation of /api/live"
        raise ApiError("INVALID_REQUEST", 422, "the message is malformed", why=why[:500], fix=fix) from None
