"""Broken twins of direct send: each is caught by a script that the library itself passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import IntegrityError

from outbox import Message, Outbox
from outbox.direct import sends as direct
from outbox.direct.delivery import DirectDelivery
from outbox.direct.sends import DirectSends
from outbox.model.subscription import Declaration, Subscription
from outbox.model.verdict import DONE
from outbox.runtime import failpoints
from outbox.store.dialects.postgresql import append as postgresql_append
from outbox.store.subscriptions.acks import Acks
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.calls import Call
from outbox.writing.sent import Sent
from tests.support.destination import Destination, relay_to
from tests.support.directly import at_rest, before_each_call, briefly, relayed, send, writing_directly
from tests.support.waiting import eventually

# The thread that sends is ended in the way of these tests, which pytest would tell.
pytestmark = [pytest.mark.storm, pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Writers have little time; crash points are disarmed at the end."""
    briefly(monkeypatch)
    yield
    failpoints.arm(None)


def die_at(point: str) -> None:
    """The thread that sends ends there, as with its process."""

    def reached(name: str) -> None:
        if name == point:
            raise SystemExit

    failpoints.arm(reached)


def a_commit_that_fails(engine: Engine) -> list[bytes]:
    """At COMMIT a deferred constraint says no."""
    destination = Destination()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    with writing_directly(engine, destination) as outbox:
        with suppress(IntegrityError), engine.begin() as connection:
            connection.execute(text("INSERT INTO t VALUES (1), (1)"))
            send(outbox, connection, b"phantom")
        with outbox.begin() as session:
            send(outbox, session, b"1")
        assert eventually(lambda: at_rest(outbox) and b"1" in destination.bodies)
    return destination.bodies + relayed(engine)


def a_writer_that_dies_before_it_sends(engine: Engine) -> list[bytes]:
    """What it has committed stands in the log."""
    destination = Destination()
    with writing_directly(engine, destination) as outbox:
        die_at("direct.before_send")
        with outbox.begin() as session:
            send(outbox, session, b"1")
        assert outbox._direct is not None
        dispatcher = outbox._direct._dispatcher
        assert dispatcher is not None
        assert eventually(lambda: not dispatcher.running)
        failpoints.arm(None)
    return destination.bodies + relayed(engine)


def works_on_the_compensation(engine: Engine) -> bool:
    with engine.connect() as connection:
        owner = "SELECT owner FROM outbox_lease WHERE subscription = 'relay:compensation'"
        return connection.execute(text(owner)).scalar() is not None


def nothing_fails(engine: Engine) -> list[bytes]:
    """A relay runs beside a writer whose destination takes its time."""
    destination = Destination()
    before_each_call(destination, lambda _: time.sleep(0.5))
    with writing_directly(engine, destination) as outbox:
        relay = relay_to(destination, Outbox(engine))
        relay.start()
        assert eventually(lambda: works_on_the_compensation(engine))
        with outbox.begin() as session:
            send(outbox, session, b"1")
        assert eventually(lambda: at_rest(outbox) and b"1" in destination.bodies)
        time.sleep(3)
        relay.stop()
        relay.join(60)
    return destination.bodies


class Deaf(DirectSends):
    """Leaves what was committed alone: it has been sent already."""

    def committed(self, sent: Sent, since: float) -> None:
        """Too late."""


def from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends what was given to it, at SQLAlchemy's event before the commit."""
    given: list[Message] = []
    heard: set[Engine] = set()

    write = Outbox._write

    def observe(outbox: Outbox, handle: Any, messages: Sequence[Message], *rest: Any, **options: Any) -> list[UUID]:
        written = write(outbox, handle, messages, *rest, **options)
        given.extend(messages)
        if outbox.engine not in heard:
            heard.add(outbox.engine)
            event.listen(outbox.engine, "commit", lambda _connection: send_now(outbox))
        return written

    def send_now(outbox: Outbox) -> None:
        sender: Any = outbox._sender
        assert set(sender.send(list(given))) <= {DONE}
        given.clear()

    monkeypatch.setattr(Outbox, "_write", observe)
    monkeypatch.setattr(direct, "DirectSends", Deaf)


def marks_without_compensation(monkeypatch: pytest.MonkeyPatch) -> None:
    declare = Subscriptions.declare

    def forgetful(self: Subscriptions, declared: Declaration, *start: object) -> Subscription:
        if declared.kind == "compensation":
            assert declared.grace is not None
            return replace(self.get("relay"), grace=declared.grace)
        return declare(self, declared, *start)  # type: ignore[arg-type]  # as it came

    monkeypatch.setattr(Subscriptions, "declare", forgetful)
    # The INSERT would look for it, too.
    monkeypatch.setattr(postgresql_append, "_KNOWN_DIRECT", "{given}")
    monkeypatch.setattr(postgresql_append, "_insert", postgresql_append._insert.__wrapped__)


def acks_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acks, "among", lambda *_: set())


def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    briefly(monkeypatch, grace=0.0)


def acks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = DirectDelivery._send

    def early(self: DirectDelivery, messages: list[Message], *arguments: Any) -> Iterator[Call]:
        Acks(self._open_channel(), self._name).insert(self._writer, [message.id or 0 for message in messages])
        return sent(self, messages, *arguments)

    monkeypatch.setattr(DirectDelivery, "_send", early)


@pytest.mark.parametrize(
    ("script", "twin", "found"),
    [
        (a_commit_that_fails, from_memory, [b"phantom", b"1", b"1"]),
        (a_writer_that_dies_before_it_sends, marks_without_compensation, []),
        (nothing_fails, acks_are_ignored, [b"1", b"1"]),
        (nothing_fails, no_grace, [b"1", b"1"]),
        (a_writer_that_dies_before_it_sends, acks_first, []),
    ],
)
def test_a_broken_twin_is_caught(
    pg_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    script: Callable[[Engine], list[bytes]],
    twin: Callable[[pytest.MonkeyPatch], None],
    found: list[bytes],
) -> None:
    twin(monkeypatch)

    assert script(pg_engine) == found


@pytest.mark.parametrize("script", [a_commit_that_fails, a_writer_that_dies_before_it_sends, nothing_fails])
def test_the_library_passes(pg_engine: Engine, script: Callable[[Engine], list[bytes]]) -> None:
    assert script(pg_engine) == [b"1"]
