"""The log lines of a running command: on standard error, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from outbox.cli.output import printable, scrubbed, write_as

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def set_up(verbosity: int, form: str) -> None:
    """Log the library's own events; `verbosity` 0: warnings, 1: also information, 2: all."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form))
    write_as(handler.formatter if form == "json" else None)
    logger = logging.getLogger("outbox")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(_LEVELS[min(verbosity, len(_LEVELS) - 1)])
    # These say which of several processes works, and what it does, so they are shown without --verbose.
    for name in ("outbox.lease", "outbox.activity"):
        logging.getLogger(name).setLevel(logging.INFO)


def formatter(form: str) -> logging.Formatter:
    """Return the formatter of `text` or `json`."""
    return _Json() if form == "json" else _Text()


class _Text(logging.Formatter):
    """Formats a record as one line: time, level, text."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_moment(record)} {record.levelname.lower():7} {printable(scrubbed(record.getMessage()))}"
        return line if record.exc_info is None else f"{line}\n{scrubbed(self.formatException(record.exc_info))}"


class _Json(logging.Formatter):
    """Formats a record as a JSON object, for programs that collect logs; `named` gives a line its name and fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": "other",
            "message": scrubbed(record.getMessage()),
            **{
                name: scrubbed(value) if isinstance(value, str) else value
                for name, value in getattr(record, "outbox", {}).items()
            },
        }
        if record.exc_info is not None:
            fields["exception"] = scrubbed(self.formatException(record.exc_info))
        return json.dumps(fields, default=str)


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
