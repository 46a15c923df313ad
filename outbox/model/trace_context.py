"""The trace context at the moment of writing, so that a consumer's work shows up in the trace of its cause."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

#: In this order, because a `tracestate` means nothing without its `traceparent`.
TRACE_HEADERS = ("traceparent", "tracestate")

_NONE: Mapping[str, str] = MappingProxyType({})
_log = logging.getLogger(__name__)


def trace_headers() -> Mapping[str, str]:
    """Return the headers of W3C Trace Context for the current span: `traceparent` and perhaps `tracestate`.

    Empty without a span. A process that has not imported OpenTelemetry's API has no span, and the call costs one look
    into a dict. Never raises, because a message matters more than its trace.
    """
    if "opentelemetry.trace" not in sys.modules:
        return _NONE
    carrier: dict[str, str] = {}
    try:
        _propagator().inject(carrier)
    except Exception:
        _log.debug("the trace context could not be captured", exc_info=True)
        return _NONE
    return carrier


@lru_cache(maxsize=1)
def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
