"""Pauses as values: orders of a person to hold messages back, with since when, by whom and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from outbox.model.command import Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """An order to hand no message over.

    Attributes:
        since: the moment of the order.
        by: the person who gave the order.
        reason: why.
        key: only messages of the key are held back; None: all.
        rate: at most so many messages a second are handed over; None: none.
    """

    since: datetime
    by: str
    reason: str | None = None
    key: str | None = None
    rate: float | None = None

    def in_words(self) -> str:
        """Return who holds back what, and why."""
        what = "paused"
        if self.rate is not None:
            pace = f"{self.rate:g} messages a second" if self.rate >= 1 else f"a message every {1 / self.rate:g} s"
            what = f"slowed down to {pace}"
        what += "" if self.key is None else f" for key {self.key!r}"
        return f"{what} by {self.by}{'' if self.reason is None else f' ({self.reason})'}"

    def resume(self, name: str, commands: Commands) -> str:
        """Return the command that takes the order back; `name`: of the subscription."""
        key = () if self.key is None else ("--key", self.key)
        return commands.line("subscriptions", "resume", name, *key)


Pauses = tuple[Pause, ...]


def without_pause(pauses: Pauses, key: str | None) -> Pauses:
    """Return the pauses without the order about a key, or about all messages."""
    return tuple(each for each in pauses if each.key != key)


def stored_form(pauses: Pauses) -> str | None:
    """Return the pauses as stored; None without any."""
    rows = [asdict(each) | {"since": each.since.isoformat()} for each in pauses]
    return json.dumps(rows) if rows else None


def read_form(stored: str | None) -> Pauses:
    """Return pauses from the stored form."""
    rows: list[dict[str, Any]] = [] if stored is None else json.loads(stored)
    return tuple(Pause(**row | {"since": datetime.fromisoformat(row["since"])}) for row in rows)
