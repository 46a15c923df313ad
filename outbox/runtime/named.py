"""Names and fields of log lines, for programs that collect logs."""

from __future__ import annotations


def named(event: str, **fields: object) -> dict[str, object]:
    """Return `extra` for a log line: the stable name of the line, and its fields; a field that is None is left out."""
    return {"outbox": {"event": event, **{name: value for name, value in fields.items() if value is not None}}}
