"""A call past its deadline leaves its messages parked, and its answer settles them when it comes back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text
from tenacity import wait_fixed

from outbox import LeaseLostError, Message, Outbox, Reject, Relay, Retry, RetryPolicy, Unavailable, Verdict
from outbox.model.verdict import DONE
from outbox.worker.parked import ParkedQueue
from outbox.worker.policy import CALLED
from outbox.worker.settle import Settlement
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import Destination, relay_to
from tests.support.parked import states
from tests.support.waiting import eventually

#: A failed message waits for an hour.
LATER = RetryPolicy(attempts=3, wait=wait_fixed(3600))
COUNTED = ("retry", 1, "hangs, while others are accepted")


class Holding(Destination):
    """Takes the message `1`, and comes back with it when it is released: with this verdict or error."""

    def __init__(self, verdict: Verdict | Exception = DONE) -> None:
        super().__init__()
        self.released, self.verdict = False, verdict
        self.hanging = lambda messages: not self.released and any(each.body == b"1" for each in messages)
        self.answer = self._answer

    def _answer(self, message: Message) -> Verdict:
        if message.body == b"1" and isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict if message.body == b"1" else DONE  # type: ignore[return-value]  # it was raised


def send(engine: Engine, *messages: tuple[str, str]) -> None:
    """Bodies with their keys, in one transaction."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", body, key=key) for body, key in messages])


@contextmanager
def hanging(engine: Engine, destination: Holding, **options: Any) -> Iterator[tuple[Relay, Any]]:
    """A relay whose call with message 1 of key a is past its deadline; message 3 stands behind it."""
    shared = overdue_when_hanging(destination, deadlines=1)
    send(engine, ("1", "a"), ("2", "b"), ("3", "a"))
    relay = relay_to(shared, Outbox(engine), **{"retry": LATER, **options})
    relay.start()
    try:
        assert eventually(lambda: destination.bodies == [b"2"] and len(parked(engine)) == 2)
        yield relay, shared.caller
    finally:
        destination.released = True
        relay.stop()
        relay.join(60)


def parked(engine: Engine) -> list[tuple[Any, ...]]:
    """State, attempts and error, in the order of the log."""
    with engine.connect() as connection:
        found = connection.execute(text("SELECT state, attempts, error FROM outbox_parked ORDER BY id")).all()
    return [tuple(each) for each in found]


def test_at_the_deadline_all_messages_of_a_call_are_parked_and_the_rest_of_their_keys_behind_them(engine):
    """Nothing is blamed on one of them; when the call comes back, all are done in their order."""
    destination = Holding()
    shared = overdue_when_hanging(destination, deadlines=1)
    send(engine, *((f"before {n}", f"{n}") for n in range(20)))
    relay = relay_to(shared, Outbox(engine))
    relay.start()
    assert eventually(lambda: len(destination.messages) == 20)
    send(engine, ("1", "a"), ("2", "b"), ("3", "a"))
    waits = eventually(lambda: len(parked(engine)) == 3)
    send(engine, ("4", "b"), ("5", "c"))
    beside = eventually(lambda: destination.bodies[20:] == [b"5"] and len(parked(engine)) == 4)
    during = parked(engine)
    destination.released = True
    drained = eventually(lambda: not states(engine))
    relay.stop()
    relay.join(60)

    assert (waits, beside, drained) == (True, True, True)
    assert during == [("waiting", 0, CALLED), ("waiting", 0, CALLED), (None, 0, None), (None, 0, None)]
    assert (destination.of_key("a"), destination.of_key("b")) == ([b"1", b"3"], [b"2", b"4"])


@pytest.mark.parametrize(
    ("verdict", "row"),
    [
        (Retry("no"), ("retry", 1, "no")),
        (Reject("never"), ("dead", 1, "never")),
        (Unavailable("away"), COUNTED),
        (Retry("later", counts=False), COUNTED),
        (ValueError("cannot"), COUNTED),
    ],
    ids=["fails", "is rejected", "is not accepted", "fails without an attempt", "raises"],
)
def test_a_failure_that_comes_late_counts_no_second_attempt(engine, verdict, row):
    """Where it counts none, the message stays as it is parked."""
    destination = Holding(verdict)
    with hanging(engine, destination) as (_, caller):
        counted = eventually(lambda: parked(engine) == [COUNTED, (None, 0, None)])
        destination.released = True
        assert eventually(lambda: not caller.overdue)
        send(engine, ("4", "b"))
        told = eventually(lambda: parked(engine) == [row, (None, 0, None)] and destination.bodies == [b"2", b"4"])

    assert (counted, told) == (True, True)


@pytest.mark.parametrize("on_dead", ["block", "continue"])
def test_a_dead_letter_whose_call_comes_back_is_done(engine, on_dead):
    """It has used its only attempt while others were accepted."""
    destination = Holding()
    with hanging(engine, destination, retry=RetryPolicy(attempts=1), on_dead=on_dead):
        dead = eventually(lambda: parked(engine)[0][0] == "dead")
        destination.released = True
        drained = eventually(lambda: not states(engine))

    assert (dead, drained, destination.of_key("a"), destination.calls) == (True, True, [b"1", b"3"], 3)


@pytest.mark.parametrize("written", [True, False])
def test_a_late_answer_that_could_not_be_settled_is_known_under_the_next_lease(engine, monkeypatch, written):
    destination, real, lost = Holding(), Settlement.settle_parked, list[None]()

    def losing(settlement: Settlement, done: dict[int, str | None], *rest: Any) -> None:
        loses = bool(done) and not lost
        if written or not loses:
            real(settlement, done, *rest)
        if loses:
            lost.append(None)
            raise LeaseLostError("the answer is lost")

    monkeypatch.setattr(Settlement, "settle_parked", losing)
    with hanging(engine, destination):
        assert eventually(lambda: parked(engine)[0] == COUNTED)
        if not written:
            # Else the row would wait for an hour before it is read again.
            with engine.begin() as connection:
                connection.execute(text("UPDATE outbox_parked SET due_at = parked_at WHERE state = 'retry'"))
        destination.released = True
        drained = eventually(lambda: not states(engine))

    assert (lost, drained, destination.of_key("a"), destination.calls) == ([None], True, [b"1", b"3"], 3)


def test_a_relay_that_stops_settles_what_has_come_back(engine, monkeypatch):
    """Else the next one would send it again."""
    destination = Holding()
    with hanging(engine, destination) as (relay, caller):
        monkeypatch.setattr(ParkedQueue, "due_in", 3600.0)
        destination.released = True
        assert eventually(lambda: not caller.overdue)
        before = len(parked(engine))
        relay.stop()
        relay.join(60)

    assert (before, len(parked(engine)), destination.bodies) == (2, 1, [b"2", b"1"])
