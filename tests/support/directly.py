"""Writers that send by themselves right after their commits, for tests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.direct import delivery
from outbox.senders.opening import OpenedSender, open_sender
from tests.support.destination import Destination, relay_to
from tests.support.waiting import eventually

_GRACE_SECONDS = delivery.GRACE_SECONDS


@contextmanager
def writing_directly(engine: Any, destination: Any, *, patient: bool = True, **options: Any) -> Iterator[Outbox]:
    """An outbox whose writer sends by itself from now on.

    `patient`: the writer has minutes to send, unless the test has less for it: its thread may stand still for seconds.
    """
    grace = delivery.GRACE_SECONDS
    with patch.object(delivery, "GRACE_SECONDS", 600.0 if patient and grace == _GRACE_SECONDS else grace):
        outbox = Outbox(engine, sender=destination, direct="relay", **options)
        try:
            assert eventually(lambda: promises(outbox)), "direct sends did not begin"
            yield outbox
        finally:
            outbox.close()


def promises(outbox: Outbox) -> bool:
    """Whether a message that is written now would be sent by its writer."""
    assert outbox._direct is not None
    return outbox._direct.offer(1) is not None


def at_rest(outbox: Outbox) -> bool:
    """Whether the writer has nothing to send any more."""
    assert outbox._direct is not None
    dispatcher = outbox._direct._dispatcher
    return dispatcher is None or (dispatcher._idle and dispatcher._busy_since is None and dispatcher.waiting == 0)


def settled(outbox: Outbox, destination: Destination, bodies: list[bytes]) -> bool:
    """Whether exactly these have arrived when nothing waits any more, in whatever order."""
    assert eventually(lambda: at_rest(outbox) and len(destination.bodies) >= len(bodies))
    return sorted(destination.bodies) == sorted(bodies)


def send(outbox: Outbox, handle: Session | Connection, *bodies: bytes) -> None:
    """Messages that their writer may send."""
    for body in bodies:
        outbox.send(handle, "orders", body)


def marked(engine: Engine) -> list[bytes]:
    """What writers were to send by themselves, as it stands in the log."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT body FROM outbox_message WHERE direct = 'relay' ORDER BY id"))
        return [bytes(row[0]) for row in rows]


def relayed(engine: Engine, name: str = "test") -> list[bytes]:
    """What is left when the writers have ended: everything that relay and compensation deliver.

    `name`: of the writers' destination.
    """
    without_grace(engine)
    destination = Destination()
    destination.destination = name
    relay_to(destination, Outbox(engine)).until_empty()
    return destination.bodies


def without_grace(engine: Engine) -> None:
    """The compensation waits for writers no more, because they have ended."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_subscription SET grace_ms = 0 WHERE kind = 'compensation'"))


def briefly(monkeypatch: pytest.MonkeyPatch, grace: float = 2.0, right: float = 1.0) -> None:
    """Writers of this process have less time."""
    in_brief(monkeypatch.setattr, grace, right)


def in_brief(set_attribute: Callable[[object, str, object], None], grace: float, right: float) -> None:
    """What the compensation waits for, and for how much of that a call may begin: the rest is for the call."""
    set_attribute(delivery, "GRACE_SECONDS", grace)
    set_attribute(delivery, "RIGHT_SECONDS", right)
    set_attribute(delivery, "FLUSH_SECONDS", 0.0)
    set_attribute(delivery, "open_sender", lambda destination: _within(grace - right, open_sender(destination)))


def _within(seconds: float, sender: OpenedSender) -> OpenedSender:
    """The same sender, of which others know that a call takes so long at most."""
    known = copy(sender)
    known.deadline = timedelta(seconds=seconds)
    return known


def before_each_call(destination: Destination, act: Callable[[Sequence[Message]], object]) -> None:
    """Do something with the messages of a call before the destination takes them."""

    def hanging(messages: Sequence[Message]) -> bool:
        act(messages)
        return False

    destination.hanging = hanging
