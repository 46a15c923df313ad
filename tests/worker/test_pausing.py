"""A person pauses a subscription, or a key, or slows it down: workers hand nothing over, and go on in order."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Engine
from tenacity import wait_fixed

from outbox import InvalidMessageError, Message, Outbox, Reject, Retry, RetryPolicy, SubscriptionError
from outbox.admin import pausing
from outbox.model.lease import Holder
from outbox.model.subscription import Subscription
from outbox.model.verdict import DONE
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.pace import Pace
from outbox.worker.settings import Settings
from tests.support.consumers import consumer_of
from tests.support.deadlines import overdue
from tests.support.destination import Destination, briskly, expected, fill, relay_to, running
from tests.support.parked import decide, states
from tests.support.readers import send
from tests.support.waiting import eventually


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox of which nothing was sent yet."""
    return Outbox(engine)


def pause(outbox: Outbox, name: str = "relay", **options: Any) -> list[Subscription]:
    with closing(outbox.database.open()) as channel:
        return pausing.pause(channel, name, by="ops@host", **options)


def resume(outbox: Outbox, name: str = "relay", **options: Any) -> list[Subscription]:
    with closing(outbox.database.open()) as channel:
        return pausing.resume(channel, name, **options)


def is_held(outbox: Outbox) -> bool:
    """Whether a worker has the lease."""
    with closing(outbox.database.open()) as channel:
        found = Leases(channel).look(Subscriptions(channel).get("relay").partition(0))
        return found is not None and found.owner is not None


def epoch(outbox: Outbox) -> int:
    """How often the lease was taken."""
    with closing(outbox.database.open()) as channel:
        found = Leases(channel).look(Subscriptions(channel).get("relay").partition(0))
        assert found is not None
        return found.epoch


def lease_of(outbox: Outbox) -> Holder:
    """The lease of the relay, as it is now."""
    with closing(outbox.database.open()) as channel:
        found = Leases(channel).look(Subscriptions(channel).get("relay").partition(0))
        assert found is not None
        return found


@contextmanager
def looks() -> Iterator[Counter[int]]:
    """How often the thread of each worker has looked what is paused. By its second look it follows what it saw."""
    looked, find, test = Counter[int](), Subscriptions.find, threading.get_ident()

    def counts(self: Subscriptions, name: str) -> Subscription | None:
        if (worker := threading.get_ident()) != test:
            looked[worker] += 1
        return find(self, name)

    with patch.object(Subscriptions, "find", counts):
        yield looked


def looks_pass() -> bool:
    """Whether the worker has looked, has done what that meant, and has looked again."""
    with looks() as looked:
        return eventually(lambda: looked.total() >= 3)


def test_workers_of_a_paused_subscription_stand_by_and_go_on_where_they_stood(outbox):
    """Two relays at work: the one with the lease gives it back, and neither hands anything over until the resume."""
    destination = Destination()
    fill(outbox, 400)
    with running(*(relay_to(destination, outbox) for _ in range(2))):
        assert eventually(lambda: destination.messages)
        (paused,) = pause(outbox, reason="the broker moves")
        assert eventually(lambda: not is_held(outbox))
        before = len(destination.messages)
        fill(outbox, 200, first=400)
        with looks() as looked:
            assert eventually(lambda: sorted(looked.values())[-2:] >= [3, 3])
        standing_still = len(destination.messages) == before and not is_held(outbox)
        resume(outbox)
        assert eventually(lambda: len(destination.messages) >= 600)

    assert paused.pause is not None
    assert paused.pause.in_words() == "paused by ops@host (the broker moves)"
    assert standing_still
    assert all(destination.of_key(f"k{key}") == expected(key, 600) for key in range(20))


def test_messages_of_a_paused_key_wait_in_order_and_others_pass(outbox):
    """The key is paused while its first message waits for another try; the resume releases all of it in order.

    Meanwhile a message of another key is tried three times.
    """
    destination, tries = Destination(lambda message: Retry("not now") if message.key == "k1" else DONE), iter(range(3))
    fill(outbox, 100)
    patient = RetryPolicy(attempts=10_000, wait=wait_fixed(0.05))
    with running(relay_to(destination, outbox, retry=patient)):
        assert eventually(lambda: len(destination.messages) == 95)
        before = lease_of(outbox).epoch
        pause(outbox, key="k1")
        assert eventually(lambda: lease_of(outbox).epoch > before)
        destination.answer = lambda message: Retry("not yet") if message.body == b"199" and next(tries, 2) < 2 else DONE
        fill(outbox, 100, first=100)
        assert eventually(lambda: len(destination.messages) == 190 and states(outbox.engine).get("behind") == 9)
        held_back = destination.of_key("k1")
        resume(outbox, key="k1")
        assert eventually(lambda: len(destination.messages) == 200)

    assert held_back == []
    assert all(destination.of_key(f"k{key}") == expected(key, 200) for key in range(20))
    assert states(outbox.engine) == {}


def test_a_pause_holds_back_everything_beside_a_call_that_hangs(outbox):
    """The relay keeps the lease, so that no other one sends beside the call after the resume, and sends nothing."""
    destination, hangs = Destination(), threading.Event()
    hangs.set()
    destination.hanging = lambda messages: hangs.is_set() and any(message.key == "k1" for message in messages)
    fill(outbox, 1, first=1)
    with overdue(destination.hanging), running(relay_to(destination, outbox)):
        assert eventually(lambda: destination.calls == 1)
        fill(outbox, 18, first=2)
        assert eventually(lambda: len(destination.messages) == 18)
        pause(outbox)
        assert looks_pass()
        fill(outbox, 20, first=20)
        assert looks_pass()
        beside = len(destination.messages)
        hangs.clear()
        resume(outbox)
        assert eventually(lambda: len(destination.messages) == 39)

    assert beside == 18
    assert destination.of_key("k1") == [b"1", b"21"]


def test_the_pause_of_a_key_waits_for_a_call_that_hangs(outbox):
    """The relay keeps the lease and goes on; another relay would send beside the call."""
    destination, hangs = Destination(), threading.Event()
    hangs.set()
    destination.hanging = lambda messages: hangs.is_set() and any(message.key == "k1" for message in messages)
    fill(outbox, 1, first=1)
    with overdue(destination.hanging), running(relay_to(destination, outbox)):
        assert eventually(lambda: destination.calls == 1)
        pause(outbox, key="k2")
        assert looks_pass()
        fill(outbox, 18, first=2)
        assert eventually(lambda: len(destination.messages) == 18)
        lease = lease_of(outbox).epoch
        hangs.clear()
        assert eventually(lambda: lease_of(outbox).epoch > lease)
        fill(outbox, 20, first=20)
        assert eventually(lambda: states(outbox.engine) == {"retry": 1})

    assert destination.of_key("k1") == [b"1", b"21"]
    assert destination.of_key("k2") == [b"2"]


def test_a_paused_key_stays_paused_over_starts_and_the_pause_of_everything(outbox):
    destination = Destination()
    pause(outbox, key="k1")
    pause(outbox, rate=0.5)
    pause(outbox)
    fill(outbox, 20)
    with pytest.raises(SubscriptionError, match=r"relay is paused by ops@host; to go on, run: outbox subscriptions"):
        relay_to(destination, outbox).until_empty()
    relay_to(destination, outbox).once()
    resume(outbox)
    relay_to(destination, outbox).until_empty()
    relay_to(destination, outbox).until_empty()

    assert (len(destination.messages), states(outbox.engine)) == (19, {"retry": 1})

    (resumed,) = resume(outbox, key="k1")
    relay_to(destination, outbox).until_empty()

    assert (len(destination.messages), resumed.pauses) == (20, ())


def test_what_cannot_be_paused_is_refused(outbox):
    (stored,) = pause(outbox, rate=500.0, reason="the index is rebuilt")

    assert stored.pause is not None
    assert stored.pause.in_words() == "slowed down to 500 messages a second by ops@host (the index is rebuilt)"
    with pytest.raises(SubscriptionError, match="rate: must be above 0, not 0"):
        pause(outbox, rate=0.0)
    with pytest.raises(SubscriptionError, match="rate: a key has none"):
        pause(outbox, rate=1.0, key="k1")
    with pytest.raises(InvalidMessageError, match="key"):
        pause(outbox, key="")
    with pytest.raises(SubscriptionError, match="relay is not paused for key 'k1'"):
        resume(outbox, key="k1")
    with (
        pytest.raises(SubscriptionError, match="there is no subscription 'other'"),
        closing(outbox.database.open()) as channel,
    ):
        pausing.pause(channel, "other", by="ops@host")


@pytest.mark.storm
def test_a_slowed_down_relay_sends_at_most_its_rate(outbox):
    """Of 30 messages at 20 a second the last one comes after 1.4 s at the earliest: two may go at once."""
    destination = Destination()
    pause(outbox, rate=20.0)
    send(outbox, *(str(n) for n in range(30)))
    began = time.monotonic()

    relay_to(destination, outbox, settings=Settings()).until_empty()

    assert (len(destination.messages), time.monotonic() - began >= 1.3) == (30, True)


def test_the_pace_goes_on_from_turn_to_turn(outbox):
    """Of 10 messages in five turns at 20 a second the last one comes after 0.4 s at the earliest."""
    destination = Destination()
    pause(outbox, rate=20.0)
    relay = relay_to(destination, outbox, settings=Settings())
    began = time.monotonic()

    for n in range(5):
        send(outbox, f"{n}a", f"{n}b")
        relay.once()

    assert (len(destination.messages), time.monotonic() - began >= 0.35) == (10, True)


@pytest.mark.storm
def test_decisions_of_people_do_not_wait_for_the_backlog_of_a_slowed_down_relay(outbox):
    """A batch is as large as what is sent in a second, and decisions are carried out between two batches."""
    destination = Destination(lambda message: Reject("no") if message.body == b"0" else DONE)
    fill(outbox, 1)
    relay_to(destination, outbox).until_empty()
    pause(outbox, rate=20.0)
    fill(outbox, 1500, first=1)
    with running(relay_to(destination, outbox)):
        assert eventually(lambda: destination.messages)
        decide(outbox.engine, "discard")
        assert eventually(lambda: "dead" not in states(outbox.engine))
        sent = len(destination.messages)

    assert sent < 1500


def test_a_paused_key_does_not_suspend_a_queue(outbox):
    """A failed message holds back all keys of the queue, but not while a person has paused the message's key."""
    got, fails = list[str | None](), ["k1"]

    def handle(message: Message) -> Retry | None:
        if message.key in fails:
            return Retry("no")
        got.append(message.key)
        return None

    patient = RetryPolicy(attempts=10_000, wait=wait_fixed(0.05))
    consumer = consumer_of(outbox, suspend="queue", start="earliest", retry=patient, settings=briskly())
    consumer.on("*")(handle)
    fill(outbox, 20)
    with running(consumer):
        assert eventually(lambda: states(outbox.engine).get("retry") == 1)
        held_back = list(got)
        pause(outbox, "billing", key="k1")
        assert eventually(lambda: len(got) == 19)
        fails.clear()
        resume(outbox, "billing", key="k1")
        assert eventually(lambda: len(got) == 20)

    assert (held_back, got[-1]) == (["k0"], "k1")


def test_a_pace_makes_up_for_no_idle_time():
    now = [0.0]
    pace = Pace(50.0, clock=lambda: now[0])
    found = []
    for seconds, spent in ((0.0, 5), (0.02, 1), (60.0, 5), (0.01, 0)):
        now[0] += seconds
        found.append((pace.free, round(pace.free_in, 3)))
        pace.spend(spent)

    assert found == [(5, 0.0), (1, 0.08), (5, 0.0), (0, 0.09)]
