"""Destinations written with `async def`, run in an event loop of the library's own thread.

A connection of such a destination is made within a call, because the connection belongs to that loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Protocol

from outbox.model.message import Message
from outbox.model.verdict import Unavailable, Verdict, describe
from outbox.runtime.event_loop import BackgroundLoop
from outbox.runtime.tasks import NoAnswerError, end, gave_no_answer, guarded, in_time, result_of
from outbox.senders.function import checked_verdict, unfit_headers
from outbox.senders.key_order import Chains
from outbox.senders.port import concurrency_of, deadline_of, destination_of

#: The share of its deadline after which a call is cancelled. The rest is for the loop to notice. A loop that does not
#: is given up, with every connection that the destination has made there.
_SHARE = 0.9
#: The most calls of a function that are under way at once.
_MOST_UNDER_WAY = 100
_MOST_BYTES_UNDER_WAY = 8 * 1024 * 1024
#: Seconds that closing an object may take.
_PATIENCE = 1.0


class AsyncSender(Protocol):
    """A `Sender` with two `async def` methods."""

    async def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Do as `Sender.send`."""

    async def close(self) -> None:
        """Do as `Sender.close`."""


class AsyncObjectSender:
    """Waits for the calls of an `AsyncSender`. A call past its deadline is cancelled."""

    def __init__(self, sender: AsyncSender) -> None:
        self.destination = destination_of(sender)
        self.deadline = deadline_of(sender)
        self.concurrency = concurrency_of(sender)
        self._loop = BackgroundLoop("outbox-async", make=lambda: sender, close=_nothing, sees_end=True)

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages by the other sender; pass on an exception."""
        seconds = self.deadline.total_seconds()
        return _result(self._loop, lambda sender: _in_time(sender.send(messages), messages, seconds), messages, seconds)

    def close(self) -> None:
        """Close the other sender, if a call has used it, and end the loop."""
        # Only here: the loop may also end because it is stuck, and then another one goes on with the same object.
        if self._loop.is_running:
            with suppress(Exception):
                self._loop.run(lambda sender: sender.close(), timeout=_PATIENCE)
        self._loop.stop()


class AsyncFunctionSender:
    """Calls an `async def function(message)`; messages of different keys are under way at once.

    None, verdicts and exceptions mean the same as for `FunctionSender`.
    """

    def __init__(self, function: Callable[[Message], Awaitable[Verdict | None]]) -> None:
        self.destination = destination_of(function)
        self.deadline = deadline_of(function)
        self.concurrency = concurrency_of(function)
        self._function = function
        self._loop = BackgroundLoop("outbox-async", make=lambda: None, close=_nothing, sees_end=True)

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Call the function for each message; return one verdict per message, in their order."""
        seconds = self.deadline.total_seconds()
        if len(messages) == 1:
            return _result(self._loop, lambda _: _in_time(self._alone(messages), messages, seconds), messages, seconds)
        return _result(self._loop, lambda _: self._deliver(messages, seconds * _SHARE), messages, seconds)

    def close(self) -> None:
        """End the loop."""
        self._loop.stop()

    async def _alone(self, messages: Sequence[Message]) -> list[Verdict]:
        return [await self._ask(messages[0])]

    async def _deliver(self, messages: Sequence[Message], seconds: float) -> list[Verdict]:
        until = asyncio.get_running_loop().time() + seconds
        chains = Chains(messages, most=_MOST_UNDER_WAY, most_bytes=_MOST_BYTES_UNDER_WAY)
        calls: dict[asyncio.Task[Verdict], int] = {}
        while chains.left:
            while (index := chains.take()) is not None:
                calls[asyncio.create_task(guarded(self._ask(messages[index])))] = index
            left = until - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait(calls, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                chains.settle(calls.pop(call), _verdict_of(call))
            if not done:
                await end(calls)
                for call, index in calls.items():
                    if not gave_no_answer(call):
                        chains.settle(index, _verdict_of(call))
                chains.give_up(f"no answer within {seconds:g} s")
        return chains.verdicts()

    async def _ask(self, message: Message) -> Verdict:
        try:
            verdict = await self._function(message)
        except Exception:
            unfit = unfit_headers(message)
            if unfit is None:
                raise
            return unfit
        return checked_verdict(verdict, self.destination)


def _result(
    loop: BackgroundLoop[Any],
    action: Callable[[Any], Coroutine[Any, Any, Sequence[Verdict]]],
    messages: Sequence[Message],
    seconds: float,
) -> Sequence[Verdict]:
    """Return the result of an action in the loop, or `Unavailable` after its time; raise the action's exception."""

    async def caught(kept: Any) -> Sequence[Verdict] | Exception:
        try:
            return await action(kept)
        except Exception as error:  # a TimeoutError of the action is not one of the loop
            return error

    try:
        result = loop.run(caught, timeout=seconds)
    except TimeoutError:
        return _no_answer(messages, seconds)
    except CancelledError:  # by another thread: it has closed the sender, or its own call ran out of time
        return [Unavailable("the sender was closed", everything=True)] * len(messages)
    if isinstance(result, Exception):
        raise result
    return result


async def _in_time(
    call: Coroutine[Any, Any, Sequence[Verdict]], messages: Sequence[Message], seconds: float
) -> Sequence[Verdict]:
    """Return the result of a call, or `Unavailable` after the call was cancelled because of its time."""
    try:
        return await in_time(call, seconds * _SHARE)
    except NoAnswerError:
        return _no_answer(messages, seconds)


def _verdict_of(task: asyncio.Task[Verdict]) -> Verdict:
    try:
        return result_of(task)
    except BaseException as error:
        return Unavailable(describe(error))


def _no_answer(messages: Sequence[Message], seconds: float) -> list[Verdict]:
    return [Unavailable(f"no answer within {seconds:g} s", everything=True)] * len(messages)


async def _nothing(_kept: object) -> None:
    return
