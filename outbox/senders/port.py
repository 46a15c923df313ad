"""Senders: the port through which messages leave for a destination."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol

from outbox.model.message import Message
from outbox.model.verdict import Verdict
from outbox.senders.urls import destination_of_url

#: For one call of a sender that does not say how long it may take.
DEADLINE = timedelta(seconds=5)


class Doubt(NamedTuple):
    """A setting of a destination that may drop or refuse messages: the place, the problem and the fix."""

    where: str
    problem: str
    fix: str


class Stored(NamedTuple):
    """The newest messages of a topic in the log: the bytes of the largest body, and the number without a key."""

    largest: int
    keyless: int


class Sender(Protocol):
    """A destination, with two methods. One call is made at a time, but a call past its deadline may overlap the next.

    Four attributes are optional, also on a function:

    - `concurrency`, a number: the calls that a relay may make at once, for different keys; by default 1.
    - `destination`, a text: the destination as a subscription stores it; see `destination_of`.
    - `doubts`, a method: given `Stored` by topic, returns a list of `Doubt`; `outbox doctor --to` shows them.
    - `deadline`, a `timedelta`: the longest time of one call of `send`; by default 5 s. A relay waits for so long
      unless given another limit.
    """

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send messages to the destination; return one verdict per message, in their order.

        `Done` only when the message is stored there. After the first verdict of a key other than `Done`, no later
        message of the key is `Done`. A message handed over again has the same id and the same bytes. An exception tells
        neither whether destination or message is at fault, nor which messages were stored.
        """

    def close(self) -> None:
        """Close connections and end threads. Closing twice does no harm."""


def destination_of(destination: object) -> str:
    """Return a destination as a subscription stores it: enough to notice another one, and no secrets.

    Of a URL: scheme, hosts (sorted), path, the options that decide where messages go, and the option `as`. Of a sender:
    its attribute `destination`, else `sender:module.Class`. Of a function: `callable:module.qualname`.
    """
    if isinstance(destination, str):
        return destination_of_url(destination)
    declared = getattr(destination, "destination", None)
    if isinstance(declared, str):
        return declared
    if hasattr(destination, "send"):
        return f"sender:{type(destination).__module__}.{type(destination).__qualname__}"
    while isinstance(destination, partial):
        destination = destination.func
    named = destination if hasattr(destination, "__qualname__") else type(destination)
    return f"callable:{named.__module__}.{named.__qualname__}"


def deadline_of(sender: object) -> timedelta:
    """Return the longest time of one call: the attribute `deadline` of a sender or of a function, else `DEADLINE`.

    Raises:
        TypeError: the attribute is no timedelta above 0.
    """
    deadline = getattr(sender, "deadline", None)
    if deadline is None:
        return DEADLINE
    if not isinstance(deadline, timedelta) or deadline <= timedelta(0):
        raise TypeError(
            f"the deadline of {type(sender).__name__} must be a timedelta greater than 0, not {deadline!r:.80}; write"
            " deadline = timedelta(seconds=30), say"
        )
    return deadline


def concurrency_of(sender: object) -> int:
    """Return the most calls at once: the attribute `concurrency` of a sender or of a function, else 1.

    Raises:
        TypeError: the attribute is no whole number above 0.
    """
    concurrency = getattr(sender, "concurrency", 1)
    if not isinstance(concurrency, int) or concurrency < 1:
        raise TypeError(
            f"the concurrency of {type(sender).__name__} must be a whole number above 0, not {concurrency!r:.80}"
        )
    return concurrency
