"""Tasks of foreign code in an event loop: nothing that they raise or do ends the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class EndedError(RuntimeError):
    """Raised when a coroutine raised an exception that would end its task, the loop or the process."""


class NoAnswerError(Exception):
    """Raised when a coroutine was cancelled at its deadline."""


async def in_time(call: Coroutine[Any, Any, R], seconds: float) -> R:
    """Return the result of a coroutine; cancel at the deadline, wait for the end, and raise `NoAnswerError`."""
    # In a task of its own, so that whatever it does to its task does nothing to this one.
    task = asyncio.create_task(guarded(call))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            await end({task})
            if gave_no_answer(task):
                raise NoAnswerError(f"no answer within {seconds:g} s")
    finally:
        task.cancel()
    return result_of(task)


async def guarded(call: Coroutine[Any, Any, R]) -> R:
    """Return the result of a coroutine; raise `EndedError` for an exception that is meant to end the process."""
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        raise EndedError(f"it raised {type(error).__name__}: {error}") from error


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their end.

    Messages that a task stores while it handles the cancellation must not come behind later messages.
    """
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def gave_no_answer(task: asyncio.Task[Any]) -> bool:
    """Return whether the cancellation has ended a task."""
    return task.cancelled() or isinstance(task.exception(), TimeoutError)


def result_of(task: asyncio.Task[R]) -> R:
    """Return the result of a task that is over, or raise its exception. A cancellation is the task's own."""
    if task.cancelled():
        raise EndedError("it raised CancelledError")
    return task.result()
