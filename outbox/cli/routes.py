"""The routes of `outbox relay`: from `--route` options, or from a file."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import click

from outbox.cli.options import DURATION, secrets_in, warn_of_readers
from outbox.cli.output import keep_secret
from outbox.errors import FilterError, SenderError
from outbox.model.retry import RetryPolicy
from outbox.relay.routes import Route
from outbox.senders.envelopes import ENVELOPES, EnvelopeName
from outbox.store.log.limits import LIMITS, Limits

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: A variable with the name of its parameter, if it is the whole value of one.
_BY_VARIABLE = re.compile(rf"(?:[^?&]*=)?{_VARIABLE.pattern}")
_UNQUOTED = re.compile(r"^\s*\[routes\.[^\"'\]]*\*", re.MULTILINE)
_FIELDS = ("to", "prefix", "rename", "envelope", "on_dead", "deadline", "partitions", "compact", "tags", "filter")
#: The fields of the whole file, for all routes.
_NUMBERS = ("attempts", "batch_size", "batch_bytes")
_MOST_ROWS = 100_000
_POLICIES = ("block", "continue")


@dataclass(frozen=True, slots=True)
class Routes:
    """A route for each topic or pattern, in order; and the attempts and batches of all routes."""

    table: dict[str, Route]
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    limits: Limits = LIMITS


def routes_of_options(given: Sequence[str]) -> dict[str, Route]:
    """Return the routes of `--route PATTERN=URL` options, in their order."""
    found: dict[str, Route] = {}
    for each in given:
        pattern, equals, url = each.partition("=")
        if not equals or not pattern or not url:
            # The text is not shown, because it may hold a password.
            raise click.UsageError("--route: write a topic or a pattern, = and a URL, as 'orders.*=nats://host:4222'")
        if pattern in found:
            raise click.UsageError(f"--route: {pattern!r} is given twice; give it one destination")
        found[pattern] = Route(to=url)
    return found


def routes_of_file(file: Path) -> Routes:
    """Return the content of a TOML file: tables `[routes."orders.*"]`, and numbers for all routes before them."""
    try:
        content = file.read_text()
        found = tomllib.loads(content)
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{file}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    except tomllib.TOMLDecodeError as error:
        quote = '; quote the pattern: [routes."orders.*"]' if _UNQUOTED.search(content) else ""
        raise click.UsageError(f"{file}: it is not TOML: {error}{quote}") from None
    routes = found.pop("routes", None)
    for name, value in found.items():
        if name not in _NUMBERS:
            raise click.UsageError(
                f'{file}: {name!r} is unknown; there are {", ".join(_NUMBERS)} and tables such as [routes."orders.*"]'
            )
        if not _is_positive(value):
            raise click.UsageError(f"{file}: {name} must be a whole number from 1 on; write {name} = 100")
        if name == "batch_size" and value > _MOST_ROWS:
            raise click.UsageError(f"{file}: batch_size is at most {_MOST_ROWS}, not {value}")
    if not isinstance(routes, dict) or not routes:
        raise click.UsageError(f'{file}: it has no routes; write tables such as [routes."*"] with to = "nats://…"')
    tables = [_Table(file, pattern, table) for pattern, table in routes.items()]
    if any(each.holds_secret for each in tables):
        warn_of_readers(file)
    renamed = {"batch_size": "rows", "batch_bytes": "bytes"}
    limits = Limits(**{renamed[name]: value for name, value in found.items() if name in renamed})
    retry = RetryPolicy(**{name: value for name, value in found.items() if name not in renamed})
    return Routes({pattern: each.route() for pattern, each in zip(routes, tables, strict=True)}, retry, limits)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class _Table:
    """A table of the file. Its errors name the file, the table and the field."""

    def __init__(self, file: Path, pattern: str, fields: object) -> None:
        self._about = f'{file}: [routes."{pattern}"]'
        if not isinstance(fields, dict):
            raise click.UsageError(f'{self._about} must be a table; write to = "nats://…" below it')
        self._fields: Mapping[str, Any] = fields

    @property
    def holds_secret(self) -> bool:
        """True if the file itself holds a secret, and not only the name of a variable."""
        return bool(secrets_in("to", _BY_VARIABLE.sub("", str(self._fields.get("to", "")))))

    def route(self) -> Route:
        """Return the route."""
        for name, value in self._fields.items():
            if name not in _FIELDS:
                quote = f'; quote the topic: [routes."….{name}"]' if isinstance(value, dict) else ""
                self._refuse(name, f"is unknown; there are {', '.join(_FIELDS)}{quote}")
        rename = self._rename()
        prefix = self._text("prefix")
        envelope: EnvelopeName | None = self._one_of("envelope", tuple(ENVELOPES))
        try:
            return Route(
                to=self._to(),
                rename=rename,
                prefix=prefix,
                envelope=envelope,
                on_dead=self._one_of("on_dead", _POLICIES),
                deadline=self._deadline(),
                partitions=self._partitions(),
                compact=self._switch("compact"),
                tags=self._text("tags"),
                filter=self._text("filter"),
            )
        except (SenderError, FilterError) as error:
            raise click.UsageError(f"{self._about} {error}") from None

    def _to(self) -> str:
        text = self._text("to")
        if not text:
            self._refuse("to", 'is missing; write to = "nats://host:4222", or to = "${NATS_URL}" for the environment')
        url = _VARIABLE.sub(lambda found: self._variable(found[1]), text)
        keep_secret(secrets_in("to", url))
        return url

    def _variable(self, name: str) -> str:
        value = os.environ.get(name)
        if not value:
            self._refuse("to", f"takes the environment variable {name}, which is not set; set it")
        return value

    def _rename(self) -> dict[str, str] | None:
        rename = self._fields.get("rename")
        if rename is not None and not (
            isinstance(rename, dict) and all(isinstance(value, str) for value in rename.values())
        ):
            self._refuse("rename", 'must be a table of texts; write rename = {"orders.placed" = "placed-orders"}')
        return rename

    def _partitions(self) -> int | None:
        number = self._fields.get("partitions")
        if number is not None and not _is_positive(number):
            self._refuse("partitions", "must be a whole number from 1 on; write partitions = 4")
        return number

    def _switch(self, field: str) -> bool | None:
        value = self._fields.get(field)
        if value is not None and not isinstance(value, bool):
            self._refuse(field, f"must be true or false; write {field} = true")
        return value

    def _deadline(self) -> timedelta | None:
        text = self._text("deadline")
        if text is None:
            return None
        try:
            deadline: timedelta = DURATION.convert(text, None, None)
        except click.BadParameter as error:
            self._refuse("deadline", error.message)
        if deadline <= timedelta(0):
            self._refuse("deadline", "must be greater than 0")
        return deadline

    def _one_of(self, field: str, known: tuple[str, ...]) -> Any:
        value = self._text(field)
        if value is not None and value not in known:
            self._refuse(field, f"must be one of {', '.join(known)}, not {value!r:.60}")
        return value

    def _text(self, field: str) -> str | None:
        value = self._fields.get(field)
        if value is not None and not isinstance(value, str):
            self._refuse(field, f"must be a text in quotation marks, not {value!r:.60}")
        return value

    def _refuse(self, field: str, problem: str) -> NoReturn:
        raise click.UsageError(f"{self._about} {field}: {problem}")
