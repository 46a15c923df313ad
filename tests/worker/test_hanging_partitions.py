"""A call that hangs while the number of partitions changes: nothing is sent beside it, and nobody waits for it."""

from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta

import pytest

from outbox import Message, Outbox, SubscriptionError
from outbox.admin.repartition import repartition
from outbox.model.slots import slot_of
from outbox.runtime.stop import Stop
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.calls import Call
from outbox.worker.hung import HungCalls
from outbox.worker.job import Job
from outbox.worker.subscription import SubscriptionWorker
from outbox.worker.turn import Turn
from outbox.worker.worker import Worker
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import Destination, relay_to
from tests.support.leases import end_lease
from tests.support.partitions import KEYS, apart
from tests.support.readers import Collector, declared
from tests.support.waiting import eventually

PATIENCE = timedelta(seconds=60)


def hanging(body: bytes) -> Destination:
    """A destination that does not come back from its first call with this message, until `hangs` is taken away."""
    destination = Destination()
    held: list[object] = []

    def holds(messages: Sequence[Message]) -> bool:
        if not held and any(message.body == body for message in messages):
            held.append(messages)
        return bool(held) and held[0] is messages

    destination.hanging = holds
    return destination


def write(outbox: Outbox, *messages: Message) -> None:
    """One transaction."""
    with outbox.begin() as session:
        outbox.send_all(session, messages)


def test_leases_of_partitions_that_were_not_begun_are_kept_if_a_call_that_hangs_may_have_their_keys(
    engine, monkeypatch
):
    """Another process would send the call's messages beside it. The first partition of all fails to begin."""
    outbox, job = Outbox(engine), Job(declared=declared(), handler=Collector())
    Worker(outbox.database, [job], stop=Stop()).work("empty")

    def refused(*_: object) -> Turn:
        raise ValueError("a person has to mend something")

    monkeypatch.setattr(SubscriptionWorker, "_assign", refused)
    with closing(outbox.database.open()) as channel:
        hung = HungCalls()
        hung.add(Call([Message("orders", b"1")]))
        calls = {Subscriptions(channel).get("relay").partition(0): hung}
        repartition(channel, "relay", 4)
        with pytest.raises(ValueError, match="a person"):
            Worker(outbox.database, [job], stop=Stop(), hung=calls).work("once")
        holders = Leases(channel).look_all(Subscriptions(channel).get("relay").all_partitions())

    assert [holder.owner is not None for holder in holders.values()] == [True] * 4


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_the_next_partitions_hold_the_keys_of_a_call_that_hangs(engine, partitions):
    """Its lease has expired meanwhile, and its process is the one that has the new partitions."""
    outbox, destination = Outbox(engine), hanging(b"1")
    shared = overdue_when_hanging(destination)
    first, second = (relay_to(shared, outbox) for _ in range(2))
    # Of the same partition as what is held, and behind it.
    other = next(f"{n}" for n in range(999) if slot_of(f"{n}", 256) % 6 == slot_of("k", 256) % 6)
    first.start()
    write(outbox, Message("orders", b"1", key="k"))
    assert eventually(lambda: shared.caller.overdue)
    first.stop()
    first.join(60)
    end_lease(engine)
    write(outbox, Message("orders", b"2", key="k"), Message("orders", b"other", key=other))
    with closing(outbox.database.open()) as channel:
        repartition(channel, "relay", partitions, wait=PATIENCE)
    second.start()
    others = eventually(lambda: b"other" in destination.bodies)
    beside = destination.of_key("k")
    destination.hanging = lambda _messages: False
    complete = eventually(lambda: b"2" in destination.bodies)
    second.stop()
    second.join(60)

    assert (others, beside, complete) == (True, [], True)
    assert destination.of_key("k") in ([b"1", b"2"], [b"1", b"1", b"2"])


def test_a_change_behind_a_call_that_hangs_is_taken_back_and_the_others_go_on(engine, caplog):
    """Two partitions are to meet; one of them cannot give its lease back."""
    outbox = Outbox(engine)
    with closing(outbox.database.open()) as channel:
        Subscriptions(channel).declare(declared())
        passed = apart(outbox, channel)
        ordered = repartition(channel, "relay", 3, wait=timedelta(0))
        destination = hanging(b"x")
        destination.destination = declared().destination or ""
        relay = relay_to(overdue_when_hanging(destination), outbox)
        relay.start()
        assert eventually(lambda: destination.calls > 0)
        write(outbox, *(Message("orders", b"later", key=f"other-{number}") for number in range(40)))
        # Those of the key that hangs wait for it; there are 40 keys, so that each partition has some of them.
        went_on = eventually(lambda: destination.bodies.count(b"later") == 40)
        stored = Subscriptions(channel).get("relay")
        destination.hanging = lambda _messages: False
        complete = eventually(lambda: len(destination.bodies) >= len(KEYS) - passed + 40)
        changed = repartition(channel, "relay", 3, wait=PATIENCE)
        relay.stop()
        relay.join(60)

    assert ordered.next_partitions == 3
    assert (went_on, stored.partitions, stored.next_partitions, stored.stop_at) == (True, 2, None, None)
    assert "a call hangs, and the partitions cannot meet meanwhile; there are still 2 partitions" in caplog.text
    assert (complete, changed.partitions) == (True, 3)


def test_the_command_says_that_the_change_was_taken_back(engine, monkeypatch):
    outbox = Outbox(engine)
    with closing(outbox.database.open()) as channel, closing(outbox.database.open()) as worker:
        Subscriptions(channel).declare(declared())
        apart(outbox, channel)
        monkeypatch.setattr(
            "outbox.admin.repartition.time.sleep",
            lambda _seconds: Subscriptions(worker).take_back_number(Subscriptions(worker).get("relay")),
        )

        said = "relay has 2 partitions, and not 3: .*another command has changed .*, or .* a call of a relay hangs"
        with pytest.raises(SubscriptionError, match=said):
            repartition(channel, "relay", 3, wait=PATIENCE)
