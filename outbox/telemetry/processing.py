"""Spans around functions that handle messages, in a process that uses OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from outbox.model.message import Message
from outbox.model.trace_context import has_spans


def processed(function: Callable[..., Any], consumer: str, *, awaited: bool) -> Callable[..., Any]:
    """Return the function, each call in a span `process`. The last argument is a message, or a list of messages.

    Without a provider of spans the function is called as it is; the check costs one look into a dict.
    """
    if awaited:

        @wraps(function)
        async def in_span_awaited(*given: Any) -> Any:
            if not has_spans():
                return await function(*given)
            with _span(consumer, given[-1]):
                return await function(*given)

        return in_span_awaited

    @wraps(function)
    def in_span(*given: Any) -> Any:
        if not has_spans():
            return function(*given)
        with _span(consumer, given[-1]):
            return function(*given)

    return in_span


def _span(consumer: str, given: object) -> AbstractContextManager[None]:
    from outbox.telemetry.opentelemetry import processing

    # An inbox may be asked by the id alone.
    messages = given if isinstance(given, list) else [given] if isinstance(given, Message) else []
    return processing(consumer, messages)
