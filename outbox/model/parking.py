"""Parking as a value: the state of a message that was not done, and the messages that are not to be tried."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, get_args

State = Literal["delayed", "waiting", "retry", "dead", "behind"]


class States:
    """The names of the states."""

    DELAYED: Final = "delayed"
    WAITING: Final = "waiting"
    RETRY: Final = "retry"
    DEAD: Final = "dead"
    BEHIND: Final = "behind"


#: The states of the heads of units; what stands behind the head of its key has none, which is called `behind`.
STATES: tuple[State, ...] = get_args(State)
#: The error of a message that is handed out, or was and is not acknowledged: it begins so, and ends with a number.
HANDED_OUT = "handed out under receipt "


@dataclass(frozen=True, slots=True, kw_only=True)
class Parking:
    """The parking of messages that were not done; one value for all messages that are parked alike.

    `holds`: a message holds its key, and later messages of the key wait; else it stands for itself. `delay`: the time
    until the messages are due; None: a person decides, or, in the state `delayed`, their own `deliver_at`.
    """

    state: State
    holds: bool
    attempts: int = 0
    error: str | None = None
    delay: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Messages that are not to be tried: log `ids`, and all messages of `keys`."""

    ids: Collection[int | None] = ()
    keys: Collection[str | None] = ()

    def __bool__(self) -> bool:
        return bool(self.ids or self.keys)

    def has(self, id: int | None, key: str | None) -> bool:
        """Return whether a message is held, by its log id and key."""
        return id in self.ids or key in self.keys


NOTHING_HELD = Held()
