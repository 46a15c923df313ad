"""The routes of `outbox relay`: from `--route` options, or from the settings file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import click

from outbox.cli.config import WITHOUT_OPTION, Config, with_variables, without_variables
from outbox.cli.options import DURATION
from outbox.cli.output import keep_secret
from outbox.cli.secrets import secrets_in, warn_of_readers
from outbox.errors import FilterError, SenderError
from outbox.model.retry import RetryPolicy
from outbox.relay.routes import Route
from outbox.senders.envelopes import ENVELOPES, EnvelopeName
from outbox.store.log.log import LIMITS, Limits

_FIELDS = ("to", "prefix", "rename", "envelope", "on_dead", "deadline", "partitions", "compact", "tags", "filter")
_MOST_ROWS = 100_000
_POLICIES = ("block", "continue")


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


def routes_of_file(config: Config) -> dict[str, Route]:
    """Return the routes of a settings file: tables such as `[routes."orders.*"]`."""
    if not isinstance(config.routes, dict) or not config.routes:
        raise click.UsageError(
            f'{config.file}: it has no routes; write tables such as [routes."*"] with to = "nats://…"'
        )
    tables = {pattern: _Table(config.file, pattern, table) for pattern, table in config.routes.items()}
    if any(each.holds_secret for each in tables.values()):
        warn_of_readers(config.file)
    return {pattern: each.route() for pattern, each in tables.items()}


def pace_of_file(config: Config) -> tuple[RetryPolicy, Limits]:
    """Return the attempts and the batches that `[relay]` of a settings file says."""
    relay = config.document.get("relay", {})
    given = {name: relay[name] for name in WITHOUT_OPTION["relay"] if name in relay}
    for name, value in given.items():
        if not _is_positive(value):
            raise click.UsageError(
                f"{config.file}: [relay] {name}: must be a whole number from 1 on; write {name} = 100"
            )
    if given.get("batch_size", 0) > _MOST_ROWS:
        raise click.UsageError(f"{config.file}: [relay] batch_size: is at most {_MOST_ROWS}, not {given['batch_size']}")
    retry, limits = RetryPolicy(), LIMITS
    return (
        replace(retry, attempts=given.get("attempts", retry.attempts)),
        Limits(rows=given.get("batch_size", limits.rows), bytes=given.get("batch_bytes", limits.bytes)),
    )


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
        return bool(secrets_in("to", without_variables(str(self._fields.get("to", "")))))

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
        url = with_variables(text, f"{self._about} to:")
        keep_secret(secrets_in("to", url))
        return url

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
