"""Parameters of addresses: read with their limits, and written again. None of them sizes the work."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from outbox.model.limits import MAX_NOTE, MAX_NUMBER
from outbox.model.parking import STATES
from outbox.runtime.text import without_numbers

#: Rows of a page, in every list.
PAGE = 50
#: The steps of a history, by its hours.
STEPS = {1: timedelta(minutes=1), 6: timedelta(minutes=5), 24: timedelta(minutes=15)}


class BadAddressError(Exception):
    """Raised for a parameter that no page can have; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A choice of parked messages, as an address has it.

    `error`: a part of the error. `group`: of errors that differ in numbers alone, by the name of `group_of`; an error
    may hold what no address and no log of a proxy should.
    """

    name: str | None = None
    state: str | None = None
    topic: str | None = None
    key: str | None = None
    error: str | None = None
    group: str | None = None
    before: datetime | None = None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Chosen:
        """Return the choice of an address or a form."""
        texts = {each.name: text(given, each.name) for each in fields(cls)}
        state, before = texts["state"], texts.pop("before")
        if state is not None and state not in STATES:
            raise BadAddressError(f"state must be one of {', '.join(STATES)}")
        return cls(**texts, before=None if before is None else moment(before, "before"))

    @property
    def query(self) -> dict[str, str]:
        """The choice as parameters of an address."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        written = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in given.items()}
        return {name: value for name, value in written.items() if value is not None}

    @property
    def choice(self) -> dict[str, Any]:
        """The choice as arguments of `Outbox.admin`, without the group."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "group"}
        return {("error_like" if name == "error" else name): value for name, value in given.items()}


def group_of(error: str | None) -> str:
    """Return the name of an error in addresses; errors that differ in numbers alone have the same."""
    return hashlib.sha256(without_numbers(error).encode(errors="surrogatepass")).hexdigest()[:16]


def text(given: Mapping[str, str], name: str) -> str | None:
    """Return a parameter; an empty one is none."""
    value = given.get(name, "").strip() or None
    if value is not None and (len(value) > MAX_NOTE or "\0" in value):
        raise BadAddressError(f"{name} must be at most {MAX_NOTE} characters without NUL")
    return value


def moment(value: str, name: str) -> datetime:
    """Return a moment with a zone."""
    try:
        found = datetime.fromisoformat(value)
        if found.tzinfo is None:
            raise BadAddressError(f"{name} has no time zone; append Z for UTC")
        return found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadAddressError(f"{name} must be a moment such as 2026-01-31T12:00:00Z") from None


def message_id(value: str) -> int | UUID:
    """Return the id of a message: a number of the log, or the UUID that `send` returned."""
    if (found := _number(value)) is not None:
        return found
    try:
        return UUID(value)
    except ValueError:
        raise BadAddressError("the id of a message is a number from 1 on, or a UUID") from None


def after(given: Mapping[str, str]) -> tuple[str, int] | None:
    """Return subscription and id of the last message of the page before."""
    value = text(given, "after")
    if value is None:
        return None
    id, _, name = value.partition(" ")
    found = message_id(id)
    if not isinstance(found, int):
        raise BadAddressError("after must be a number and a subscription")
    return name, found


def number(given: Mapping[str, str], name: str) -> int | None:
    """Return a whole number from 1 on."""
    value = text(given, name)
    if value is None:
        return None
    if (found := _number(value)) is None:
        raise BadAddressError(f"{name} must be a number from 1 on")
    return found


def _number(value: str) -> int | None:
    """Return a text as a whole number from 1 on; None: the text is none."""
    written = value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_NUMBER))
    return int(value) if written and 1 <= int(value) <= MAX_NUMBER else None


def hours(given: Mapping[str, str]) -> int:
    """Return the hours of a history: 1, 6 or 24."""
    value = text(given, "hours") or "1"
    if value not in map(str, STEPS):
        raise BadAddressError(f"hours must be one of {', '.join(map(str, STEPS))}")
    return int(value)
