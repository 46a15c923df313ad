"""Live pages: one loop of questions for all who look, and the answers as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

from outbox.runtime.clock import clock
from outbox.runtime.text import in_utc

logger = logging.getLogger("outbox")

T = TypeVar("T")

_EVERY, _DEADLINE = timedelta(seconds=2), timedelta(seconds=10)
#: A stream ends after this time. The browser comes back, and the rule of access is asked again.
_LASTING = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[T]):
    """An answer and its moment by this process's clock. `value`: None: there is none since `at`, which may be None."""

    value: T | None
    at: datetime | None


class _Viewer:
    """A page that is open: an event in the loop of its request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.news = asyncio.Event()

    def tell(self) -> None:
        """Wake the viewer from the thread that asks."""
        with suppress(RuntimeError):  # the loop of the request has ended
            self._loop.call_soon_threadsafe(self.news.set)


class Live(Generic[T]):
    """Asks every two seconds, in one thread whatever the number of viewers; without viewers nothing is asked.

    Args:
        ask: blocks until it has an answer. An exception is no answer.
        every: the pause between an answer and the next question.
        deadline: viewers are told that there is no answer when one takes longer.
    """

    def __init__(self, ask: Callable[[], T], *, every: timedelta = _EVERY, deadline: timedelta = _DEADLINE) -> None:
        self._ask = ask
        self._every, self._patience = every.total_seconds(), (every + deadline).total_seconds()
        self._lock = threading.Lock()
        self._viewers = set[_Viewer]()
        self._left = threading.Event()
        self._runs = False
        self._answer: Answer[T] | None = None
        self._answered_at: datetime | None = None
        self.asked = 0

    @property
    def viewers(self) -> int:
        """The number of pages that are open."""
        return len(self._viewers)

    async def answers(self) -> AsyncGenerator[Answer[T], None]:
        """Yield the newest answer, and each that comes; without one in time, that there is none."""
        viewer = _Viewer()
        self._enter(viewer)
        try:
            while True:
                try:
                    await asyncio.wait_for(viewer.news.wait(), self._patience)
                except TimeoutError:
                    yield Answer(value=None, at=self._answered_at)
                else:
                    viewer.news.clear()
                    assert self._answer is not None
                    yield self._answer
        finally:
            self._leave(viewer)

    def _enter(self, viewer: _Viewer) -> None:
        with self._lock:
            self._viewers.add(viewer)
            self._left.clear()
            if self._answer is not None:
                viewer.tell()
            if not self._runs:
                threading.Thread(target=self._run, name="outbox-dashboard", daemon=True).start()
                self._runs = True  # last, because a thread may not start for want of memory

    def _leave(self, viewer: _Viewer) -> None:
        with self._lock:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._answer = None  # nobody keeps it young
                self._left.set()

    def _run(self) -> None:
        while True:
            answer = self._asked_now()
            with self._lock:
                self._answer = answer if self._viewers else None
                for each in self._viewers:
                    each.tell()
            self._left.wait(self._every)
            with self._lock:
                if not self._viewers:
                    self._runs = False
                    return

    def _asked_now(self) -> Answer[T]:
        self.asked += 1
        try:
            value = self._ask()
        except Exception as error:
            if self._answer is None or self._answer.value is not None:
                logger.warning("the dashboard has no answer from its database: %s", error)
            return Answer(value=None, at=self._answered_at)
        self._answered_at = datetime.now(UTC)
        return Answer(value=value, at=self._answered_at)


async def stream(
    live: Live[T],
    render: Callable[[T], Mapping[str, str]],
    *,
    lasting: timedelta = _LASTING,
    pause: timedelta = timedelta(0),
) -> AsyncGenerator[str, None]:
    """Yield server-sent events for one viewer, until the time is over or the viewer leaves.

    Events: `answer` with the moment and the sections that have changed; `silent` with the moment of the last answer;
    `again` at the end, so that the browser comes back.

    Args:
        live: whose answers.
        render: returns the HTML of each section by its name.
        lasting: for so long, at least; of no time a stream has one answer.
        pause: until the browser comes back.
    """
    until, sent = clock() + lasting.total_seconds(), dict[str, str]()
    yield "retry: 2000\n\n"
    async with aclosing(live.answers()) as answers:
        async for each in answers:
            at = None if each.at is None else in_utc(each.at)
            if each.value is None:
                yield _event("silent", {"at": at})
            else:
                # In a thread, because the loop may be that of an application.
                rendered = await run_in_threadpool(render, each.value)
                sections = {name: str(html) for name, html in rendered.items()}
                changed = {name: html for name, html in sections.items() if sent.get(name) != html}
                yield _event("answer", {"at": at, "sections": changed})
                sent = sections
            if clock() >= until:
                break
    yield _event("again", {"after": round(pause.total_seconds() * 1000)})


def _event(name: str, data: Mapping[str, object]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
