"""The trace and the baggage at the moment of writing, so that a consumer's work shows up in the trace of its cause."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

#: Names of a trace in the W3C's form. Propagators of other forms have names of their own.
TRACE_HEADERS = ("traceparent", "tracestate")
#: The header of W3C Baggage, which has a meaning without a trace, too.
BAGGAGE = "baggage"

#: With this variable the API itself sets the provider, when it is asked for one.
_BY_ENVIRONMENT = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ
_NONE: Mapping[str, str] = MappingProxyType({})
_log = logging.getLogger(__name__)


def has_spans() -> bool:
    """Return whether somebody may record spans: OpenTelemetry's API is imported, and a provider of spans is set.

    Asked for every message, so the API's own variable is read: its function reads the environment each time.
    """
    api = sys.modules.get("opentelemetry.trace")
    return api is not None and (getattr(api, "_TRACER_PROVIDER", True) is not None or _BY_ENVIRONMENT)


def trace_headers(topic: str, number: int = 1) -> Mapping[str, str]:
    """Return the headers that the process's propagators make for messages that are written.

    By default the headers are `traceparent`, perhaps `tracestate`, and `baggage`. A trace names a span `create`, whose
    parent is the current span; without an SDK, the current span itself. Without any span there is no trace. A process
    that has not imported OpenTelemetry's API has no span, and the call costs one look into a dict. Never raises,
    because a message matters more than its trace.
    """
    if "opentelemetry.trace" not in sys.modules:
        return _NONE
    carrier: dict[str, str] = {}
    try:
        _inject(carrier, topic, number)
    except Exception:
        _log.debug("the trace context could not be captured", exc_info=True)
        return _NONE
    return carrier


def _inject(carrier: dict[str, str], topic: str, number: int) -> None:
    from opentelemetry.propagate import inject
    from opentelemetry.trace import SpanKind, set_span_in_context

    if not has_spans():
        inject(carrier)
        return
    attributes = {
        "messaging.system": "outbox",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
        "messaging.destination.name": topic,
        "messaging.batch.message_count": number,
    }
    span = tracer_of_writers().start_span(f"create {topic}", kind=SpanKind.PRODUCER, attributes=attributes)
    inject(carrier, set_span_in_context(span))
    span.end()


@lru_cache(maxsize=1)
def tracer_of_writers() -> Any:
    """Return the tracer of this process."""
    from opentelemetry import trace

    return trace.get_tracer("outbox")
