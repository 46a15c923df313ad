"""Calls that wait for messages: one pop serves all that wait for the same ones, and a call that waits has no thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from outbox.model.message import Message
from outbox.rocketmq.asked import Asked
from outbox.runtime.clock import clock
from outbox.worker.polling import Polling

#: Seconds between looks without a hint.
POLL_SECONDS = (0.05, 1.0)


class Popped(NamedTuple):
    """The messages of each call, and the receipt under which all of them are out."""

    receipt: str
    messages: Sequence[Sequence[Message]]


@dataclass(eq=False, slots=True)
class _Poll:
    """A call that waits until a moment by `clock`, and takes nothing while it may not."""

    asked: Asked
    until: float
    may: Callable[[], bool]
    answer: asyncio.Future[tuple[str, Sequence[Message]]]


class Polls:
    """The calls that wait for the messages of one choice; in one event loop only."""

    def __init__(
        self,
        pop: Callable[[Sequence[Asked]], Awaitable[Popped]],
        give_back: Callable[[Popped], None],
        hints: Callable[[Callable[[], None]], AbstractContextManager[None]],
        turns: asyncio.Semaphore,
    ) -> None:
        """`give_back`: takes messages of calls that have ended meanwhile. `hints`: calls a function at every commit.

        `turns`: of all pops, few at once, as nothing counts the messages of a pop before its calls go on.
        """
        self._pop, self._give_back, self._hints, self._turns = pop, give_back, hints, turns
        self._waiting: list[_Poll] = []
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def waits(self) -> bool:
        """True while a call waits."""
        return self._task is not None

    async def messages(
        self, asked: Asked, seconds: float, may: Callable[[], bool] = lambda: True
    ) -> tuple[str, Sequence[Message]]:
        """Return messages with their receipt, after at most so many seconds. `may`: whether there may be any now."""
        poll = _Poll(asked, clock() + seconds, may, asyncio.get_running_loop().create_future())
        self._waiting.append(poll)
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._serve())
        try:
            return await poll.answer
        except asyncio.CancelledError:
            if poll.answer.done() and not poll.answer.cancelled() and poll.answer.exception() is None:
                # The answer was there when the client gave the call up.
                receipt, messages = poll.answer.result()
                self._give_back(Popped(receipt, [messages]))
            raise

    def end(self) -> None:
        """Answer all calls with nothing; what a pop hands out meanwhile is given back."""
        for each in self._waiting:
            if not each.answer.done():
                each.answer.set_result(("", []))
        self._wake.set()

    async def _serve(self) -> None:
        """Pop until no call waits."""
        loop, polling = asyncio.get_running_loop(), Polling(*POLL_SECONDS)

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._wake.set)

        try:
            with self._hints(wake):
                while self._waiting:
                    self._wake.clear()
                    async with self._turns:
                        came = await self._look()
                    if came:
                        continue
                    ends = min((each.until for each in self._waiting), default=0.0) - clock()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), max(0.0, min(polling.pause(), ends)))
        except Exception as error:
            # The thread that hears hints could not begin, for example.
            self._fail([*self._waiting], error)
        finally:
            self._task = None

    def _fail(self, polls: Collection[_Poll], error: Exception) -> None:
        self._waiting = [each for each in self._waiting if each not in polls]
        for each in polls:
            if not each.answer.done():
                each.answer.set_exception(error)

    async def _look(self) -> bool:
        """Pop once for all calls that wait, and answer; return whether messages came."""
        polls = self._ready()
        if not polls:
            return False
        try:
            popped = await self._pop([each.asked for each in polls])
        except Exception as error:
            self._fail(polls, error)
            return False
        left = list[Sequence[Message]]()
        for each, messages in zip(polls, popped.messages, strict=True):
            if each.answer.done():
                left.append(messages)
            elif messages or clock() >= each.until:
                each.answer.set_result((popped.receipt, messages))
        self._waiting = [each for each in self._waiting if not each.answer.done()]
        if any(left):
            self._give_back(Popped(popped.receipt, left))
        return any(popped.messages)

    def _ready(self) -> list[_Poll]:
        """Return the calls that may have messages now; answer those that may not, and whose time is over."""
        self._waiting = [each for each in self._waiting if not each.answer.done()]
        ready = list[_Poll]()
        for each in self._waiting:
            if each.may():
                ready.append(each)
            elif clock() >= each.until:
                each.answer.set_result(("", []))
        return ready
