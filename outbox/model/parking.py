"""Parking as a value: how a message is parked that was not done, and which messages are not to be tried."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

State = Literal["delayed", "waiting", "retry", "blocked", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parking:
    """The way in which messages are parked that were not done. One value serves all messages with the same parking.

    `blocks`: later messages of their keys wait for them. `delay`: the time until they are due. None: they are due when
    their turn comes, or, in the state `delayed`, at their own `deliver_at`.
    """

    state: State
    blocks: bool
    attempts: int = 0
    error: str | None = None
    delay: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Messages that are not to be tried: those with these log `ids`, and those of these `keys` except the ids `but`."""

    ids: Collection[int | None] = ()
    keys: Collection[str | None] = ()
    but: Collection[int | None] = ()


NOTHING_HELD = Held()
