"""Decisions of people are carried out while nothing is handed over: the destination is away, or people have paused."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Engine, text
from tenacity import wait_fixed

from outbox import Message, Outbox, Reject, Unavailable
from outbox.model.verdict import DONE, Verdict
from outbox.telemetry.events import BatchRead
from tests.support.deadlines import overdue
from tests.support.destination import Destination, relay_to, running
from tests.support.parked import decide, decisions, states
from tests.support.waiting import eventually
from tests.worker.test_pausing import epoch, looks_pass, pause, resume


@pytest.fixture
def outbox(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    """An outbox whose workers pause for half a second when a destination is away."""
    monkeypatch.setattr("outbox.worker.handle.PAUSE", wait_fixed(0.5))
    return Outbox(engine)


def send(outbox: Outbox, *bodies: str, key: str | None = None) -> None:
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", body, key=key or body) for body in bodies])


def all_done(engine: Engine) -> bool:
    return all(done for *_, done in decisions(engine))


#: So many messages are tried in turn, with a pause after each, for longer than a test waits.
BATCH = list(map(str, range(200)))


class Unreliable(Destination):
    """A destination that rejects the body `bad`, and accepts nothing while it is away."""

    def __init__(self) -> None:
        super().__init__(self._verdict)
        self.away = False

    def _verdict(self, message: Message) -> Verdict:
        if self.away:
            return Unavailable("away", everything=True)
        return Reject("never") if message.body == b"bad" else DONE


def test_a_discard_does_not_wait_for_a_destination_that_is_away(engine, outbox):
    """Each message of the batch is tried alone, after a pause, before the batch makes way."""
    destination = Unreliable()
    send(outbox, "bad")
    send(outbox, "behind", key="bad")
    with running(relay_to(destination, outbox)):
        assert eventually(lambda: states(engine) == {"dead": 1, "behind": 1})
        destination.away = True
        send(outbox, *BATCH)
        calls = destination.calls
        assert eventually(lambda: destination.calls > calls)
        (decided,) = outbox.admin.discard(all=True, reason="late", by="ann")
        assert eventually(lambda: all_done(engine))
        meanwhile = (destination.bodies, states(engine))
        destination.away = False
        assert eventually(lambda: len(destination.bodies) == len(BATCH) + 1)

    assert (decided.worker is not None, meanwhile, states(engine)) == (True, ([], {"retry": 1}), {})


@pytest.mark.smoke("decisions are looked for once a second while nothing is handed over")
@pytest.mark.parametrize(("verb", "left"), [("discard", {}), ("set_aside", {"dead": 1})])
def test_a_decision_reaches_a_message_that_waits_for_a_destination_that_is_away(engine, outbox, verb, left):
    """The message is in the hands of the worker, and neither sent nor parked: the worker reads the message again."""
    destination, reads = Unreliable(), list[BatchRead]()
    outbox.listen(lambda event: reads.append(event) if isinstance(event, BatchRead) else None)
    destination.away = True
    send(outbox, *BATCH)
    with running(relay_to(destination, outbox)):
        assert eventually(lambda: destination.calls > 1)
        if verb == "discard":
            outbox.admin.discard(len(BATCH), unread=True, reason="late")
        else:
            outbox.admin.set_aside(len(BATCH), reason="late")
        assert eventually(lambda: len(reads) > 1)
        destination.away = False
        assert eventually(lambda: all_done(engine))

    assert (sorted(destination.bodies), states(engine)) == (sorted(map(str.encode, BATCH[:-1])), left)


@pytest.mark.smoke("decisions are looked for once a second while nothing is handed over")
@pytest.mark.parametrize("hangs", [False, True], ids=["nobody has the lease", "a call that hangs keeps the lease"])
def test_a_decision_that_a_pause_follows_at_once_is_carried_out_before_the_resume(engine, outbox, hangs):
    destination, is_hanging = Unreliable(), threading.Event()
    destination.hanging = lambda messages: is_hanging.is_set() and any(each.body == b"slow" for each in messages)
    send(outbox, "bad")
    with overdue(destination.hanging), running(relay_to(destination, outbox)):
        assert eventually(lambda: states(engine) == {"dead": 1})
        if hangs:
            is_hanging.set()
            send(outbox, "slow")
            assert eventually(lambda: "waiting" in states(engine))
        pause(outbox)
        assert looks_pass()
        send(outbox, "later")
        decide(engine, "discard")
        assert eventually(lambda: all_done(engine))
        meanwhile = destination.bodies
        is_hanging.clear()
        resume(outbox)
        assert eventually(lambda: len(destination.bodies) == 1 + hangs)

    assert meanwhile == []
    assert (sorted(destination.bodies), states(engine)) == ([b"later", b"slow"][: 1 + hangs], {})


@pytest.mark.storm
def test_decisions_of_a_pause_reach_every_partition_of_two_workers(engine):
    """More messages of each partition than one transaction has; two workers may each leave a partition to the other."""
    outbox, destination = Outbox(engine), Destination(lambda _message: Reject("never"))
    send(outbox, *map(str, range(3_100)))
    relay_to(destination, outbox, partitions=3).until_empty()
    relays = [relay_to(destination, Outbox(engine), partitions=3) for _ in range(2)]
    for relay in relays:
        relay.start()
    pause(outbox)
    assert looks_pass()
    decide(engine, "discard")
    assert eventually(lambda: all_done(engine))
    send(outbox, "1", "2", "3", "poison")
    outbox.admin.set_aside(3_104, reason="kills")
    destination.answer = lambda _message: DONE
    resume(outbox)
    assert eventually(lambda: states(engine) and len(destination.bodies) >= 3)
    for relay in relays:
        relay.stop()
        relay.join(60)

    assert (sorted(destination.bodies), states(engine)) == ([b"1", b"2", b"3"], {"dead": 1})


def test_a_discard_in_a_pause_waits_no_longer_than_the_writer_that_has_the_dedup_key(pg_engine, monkeypatch):
    monkeypatch.setattr("outbox.worker.upkeep.DECISIONS_AGAIN", 0.1)
    outbox = Outbox(pg_engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"bad", dedup_key="once")
    with running(relay_to(Unreliable(), outbox)):
        assert eventually(lambda: states(pg_engine) == {"dead": 1})
        pause(outbox)
        assert looks_pass()
        with pg_engine.begin() as writer:
            writer.execute(text("SELECT 1 FROM outbox_dedup FOR UPDATE"))
            before = epoch(outbox)
            decide(pg_engine, "discard")
            assert eventually(lambda: epoch(outbox) > before)
            meanwhile = states(pg_engine)
        assert eventually(lambda: all_done(pg_engine))

    assert (meanwhile, states(pg_engine)) == ({"dead": 1}, {})
