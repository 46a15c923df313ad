"""Spans around functions that handle messages, in a process that uses OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

from outbox.model.message import Message


def processed(function: Callable[..., Any], consumer: str, *, awaited: bool) -> Callable[..., Any]:
    """Return the function, each call in a span `process`. The last argument is a message, or a list of messages.

    A process that has not imported OpenTelemetry's API has no spans, and a call costs one look into a dict.
    """
    if awaited:

        @wraps(function)
        async def in_span_awaited(*given: Any) -> Any:
            with _span(consumer, given[-1]):
                return await function(*given)

        return in_span_awaited

    @wraps(function)
    def in_span(*given: Any) -> Any:
        with _span(consumer, given[-1]):
            return function(*given)

    return in_span


def _span(consumer: str, given: object) -> AbstractContextManager[None]:
    if "opentelemetry.trace" not in sys.modules:
        return nullcontext()
    from outbox.telemetry.opentelemetry import processing

    # An inbox may be asked by the id alone.
    messages = given if isinstance(given, list) else [given] if isinstance(given, Message) else []
    return processing(consumer, messages)
