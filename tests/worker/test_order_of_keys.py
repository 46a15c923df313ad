"""The order of keys is a property of a subscription: kept, not kept, kept for the whole partition, or compacted."""

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from tenacity import wait_fixed

from outbox import (
    HungHandlerError,
    Message,
    Outbox,
    Reject,
    Retry,
    RetryPolicy,
    SubscriptionError,
    Unavailable,
    Verdict,
)
from outbox.admin import commands
from outbox.model.slots import slot_of
from outbox.model.verdict import DONE
from outbox.store.log.log import Limits
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.calls import Caller
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings
from tests.support.deadlines import OverdueCaller
from tests.support.destination import LONG_LEASE
from tests.support.leases import step_clock
from tests.support.parked import attempts, decide, states
from tests.support.readers import Worker, at_work, worker
from tests.support.waiting import eventually

BRISK = Settings(poll=(timedelta(milliseconds=5), timedelta(milliseconds=20)), lease=LONG_LEASE)
#: A failed message is due again at once.
AT_ONCE = HandlerPolicy(retry=RetryPolicy(attempts=3, wait=wait_fixed(0)), portion=1)
#: A failed message waits for an hour.
LATER = HandlerPolicy(retry=RetryPolicy(attempts=3, wait=wait_fixed(3600)), portion=1)


class Listener:
    """Gives the verdicts that were set for bodies, one at each try, and then `Done`; keeps what it got."""

    def __init__(self, **verdicts: list[Verdict]) -> None:
        self.verdicts = verdicts
        self.got: list[str] = []

    def __call__(self, messages: Sequence[Message]) -> list[Verdict]:
        """One message at a time."""
        (message,) = messages
        body = message.body.decode()
        self.got.append(body)
        left = self.verdicts.get(body, [])
        return [left.pop(0) if left else DONE]


def group(
    outbox: Outbox, listener: Any, policy: HandlerPolicy = AT_ONCE, caller: Caller | None = None, **differing: Any
) -> Worker:
    declared = {"name": "group", "kind": "consumer", "destination": None, **differing}
    return worker(outbox.database, listener, settings=BRISK, policy=policy, caller=caller, **declared)


def alter(engine: Engine, **changes: Any) -> None:
    with closing(Outbox(engine).database.open()) as channel:
        stored = Subscriptions(channel).get("group")
        commands.alter(channel, replace(stored, **changes), before=stored)


def send(engine: Engine, *bodies: str, key: str | None = "k", **fields: Any) -> None:
    with Outbox(engine).begin() as session:
        Outbox(engine).send_all(session, [Message("orders", body, key=key, **fields) for body in bodies])


def parked_bodies(engine: Engine) -> list[bytes]:
    """Of what is parked, in the order of the log."""
    with engine.connect() as connection:
        return [bytes(body) for (body,) in connection.execute(text("SELECT body FROM outbox_parked ORDER BY id"))]


def fall_due(engine: Engine) -> None:
    """What is due within the next hour is due now."""
    step_clock(engine, timedelta(hours=1), "outbox_parked.due_at")


# Without order


def test_without_order_a_failed_message_blocks_nothing(engine):
    send(engine, *"abc")
    listener = Listener(a=[Retry("no", timedelta(hours=1))])

    group(Outbox(engine), listener, ordered=False).until_empty()
    send(engine, "d")
    group(Outbox(engine), listener).until_empty()

    assert listener.got == ["a", "b", "c", "d"]
    assert states(engine) == {"retry": 1}


def test_without_order_a_dead_letter_blocks_nothing_and_neither_does_its_replay(engine):
    send(engine, *"abc")
    listener = Listener(a=[Reject("no"), Retry("no", timedelta(hours=1))])
    group(Outbox(engine), listener, ordered=False).until_empty()
    assert states(engine) == {"dead": 1}

    decide(engine, "replay")
    send(engine, "d")
    with at_work(group(Outbox(engine), listener)):
        assert eventually(lambda: states(engine) == {"retry": 1} and listener.got.count("a") == 2)
        send(engine, "e")
        assert eventually(lambda: "e" in listener.got)

    assert sorted(listener.got) == sorted(["a", "b", "c", "a", "d", "e"])


def test_without_order_a_message_that_hangs_holds_no_other_of_its_key(engine):
    send(engine, *"ab")
    released, listener = threading.Event(), Listener(b=[Retry("no")])

    def hangs(messages: Sequence[Message]) -> list[Verdict]:
        if messages[0].body == b"a":
            released.wait(60)
        return listener(messages)

    caller = OverdueCaller(lambda messages: messages[0].body == b"a" and not released.is_set())
    with at_work(group(Outbox(engine), hangs, caller=caller, ordered=False)):
        found = eventually(lambda: listener.got == ["b", "b"])
        released.set()

    assert found


def test_without_order_a_paused_key_holds_what_failed_before(engine):
    send(engine, "a")
    listener = Listener(a=[Retry("no", timedelta(0))])
    group(Outbox(engine), Listener(a=[Retry("no", timedelta(hours=1))]), ordered=False).until_empty()
    step_clock(engine, timedelta(hours=2), "outbox_parked.due_at")
    Outbox(engine).admin.pause("group", key="k")
    group(Outbox(engine), listener, ordered=False).until_empty()

    assert (listener.got, states(engine)) == ([], {"retry": 1})


def test_without_order_a_replay_blocks_nothing_before_a_worker_comes(engine):
    send(engine, "a")
    group(Outbox(engine), Listener(a=[Reject("no")]), ordered=False).until_empty()

    Outbox(engine).admin.replay(all=True, name="group")

    with engine.connect() as connection:
        found = connection.execute(text("SELECT state, unit FROM outbox_parked")).all()
    assert [tuple(each) for each in found] == [("retry", None)]


def test_without_order_a_message_that_falls_due_comes_when_it_is_due_and_blocks_nothing(engine):
    send(engine, "late", delay=timedelta(hours=1))
    send(engine, *"ab")
    listener = Listener(late=[Retry("no", timedelta(hours=1))])

    with at_work(group(Outbox(engine), listener, ordered=False)):
        assert eventually(lambda: listener.got == ["a", "b"] and states(engine) == {"delayed": 1})
        fall_due(engine)
        assert eventually(lambda: "late" in listener.got)
        send(engine, "c")
        assert eventually(lambda: "c" in listener.got)

    assert listener.got == ["a", "b", "late", "c"]
    assert states(engine) == {"retry": 1}


@pytest.mark.smoke("the pauses of a refused topic grow to seconds")
def test_without_order_a_message_that_fell_due_and_is_unavailable_blocks_nothing(engine):
    send(engine, "late", delay=timedelta(hours=1))
    listener = Listener(late=[Unavailable("away")] * 1000)

    with at_work(group(Outbox(engine), listener, ordered=False)):
        assert eventually(lambda: states(engine) == {"delayed": 1})
        fall_due(engine)
        assert eventually(lambda: "late" in listener.got)
        send(engine, "a")
        assert eventually(lambda: "a" in listener.got)


def test_the_order_belongs_to_the_subscription(engine):
    group(Outbox(engine), Listener(), ordered=False).until_empty()

    with pytest.raises(SubscriptionError, match=r"has ordered False, this worker asks for True.*alter group --ordered"):
        group(Outbox(engine), Listener(), ordered=True).until_empty()


def test_what_waits_for_a_key_goes_on_when_order_is_given_up(engine):
    """Also behind a dead letter, which would hold back its key for ever."""
    send(engine, *"abc")
    send(engine, *"xyz", key="other")
    listener = Listener(a=[Reject("no")], x=[Retry("no", timedelta(hours=1))])
    group(Outbox(engine), listener).until_empty()
    assert states(engine) == {"dead": 1, "retry": 1, "behind": 4}

    alter(engine, ordered=False)
    send(engine, "d")
    send(engine, "w", key="other")
    few = replace(BRISK, limits=Limits(rows=1))
    worker(Outbox(engine).database, listener, settings=few, policy=AT_ONCE, name="group", kind="consumer").until_empty()

    assert sorted(listener.got) == [*"abcdwxyz"]
    assert states(engine) == {"dead": 1, "retry": 1}


@pytest.mark.storm
def test_order_that_is_altered_again_and_again_under_load_loses_and_repeats_nothing(engine):
    """Each message fails once; after the last change the keys have their order again."""
    bodies = [str(number) for number in range(60)]
    again: dict[str, list[Verdict]] = {body: [Retry("no", timedelta(seconds=0.05))] for body in bodies}
    listener = Listener(**again)
    outbox = Outbox(engine)
    group(outbox, Listener()).until_empty()
    with at_work(group(outbox, listener)):
        for number, body in enumerate(bodies):
            send(engine, body, key="ab"[number % 2])
            if number % 10 == 9:
                alter(engine, ordered=number % 20 == 19)
        assert eventually(lambda: len(listener.got) == 120 and not states(engine))
        listener.verdicts = {"a": [Retry("no", timedelta(seconds=0.3))]}
        send(engine, *"abc")
        assert eventually(lambda: len(listener.got) == 124)

    assert Counter(listener.got[:120]) == Counter(bodies * 2)
    assert listener.got[120:] == ["a", "a", "b", "c"]


# A suspended queue


@pytest.mark.storm
@pytest.mark.parametrize("second", ["k", "other", None])
def test_a_suspended_queue_waits_for_the_failed_message_whatever_the_keys(engine, second):
    send(engine, "a")
    send(engine, "b", key=second)
    listener = Listener(a=[Retry("no"), Retry("no")])
    policy = HandlerPolicy(retry=LATER.retry, portion=1, suspend=True)

    with at_work(group(Outbox(engine), listener, policy)):
        for tries in (1, 2):
            assert eventually(lambda: (listener.got, attempts(engine)) == (["a"] * tries, tries))  # noqa: B023
            fall_due(engine)
        assert eventually(lambda: len(listener.got) >= 4 and not states(engine))

    assert listener.got == ["a", "a", "a", "b"]


def test_a_suspended_queue_goes_on_behind_a_dead_letter(engine):
    send(engine, "a")
    send(engine, *"bc", key=None)
    listener = Listener(a=[Retry("no")] * 3)
    policy = HandlerPolicy(retry=AT_ONCE.retry, portion=1, suspend=True)

    group(Outbox(engine), listener, policy).until_empty()

    assert listener.got == ["a", "a", "a", "b", "c"]
    assert states(engine) == {"dead": 1}


def test_a_queue_is_still_suspended_for_the_next_worker(engine):
    send(engine, *"ab", key=None)
    policy = HandlerPolicy(retry=LATER.retry, portion=1, suspend=True)
    first, second = Listener(a=[Retry("no", timedelta(minutes=1))]), Listener()
    group(Outbox(engine), first, policy).once()
    assert (first.got, states(engine)) == (["a"], {"retry": 1})

    group(Outbox(engine), second, policy).until_empty()
    before = list(second.got)
    fall_due(engine)
    group(Outbox(engine), second, policy).until_empty()

    assert (before, second.got) == ([], ["a", "b"])


SUSPENDS = HandlerPolicy(retry=LATER.retry, portion=1, suspend=True)


@pytest.mark.storm
def test_a_suspended_queue_hands_over_nothing_else_that_is_parked(engine):
    """A message falls due, and a person releases what a dead letter holds back."""
    send(engine, *"dx", key="other")
    send(engine, "late", delay=timedelta(hours=1))
    send(engine, "a")
    listener = Listener(d=[Reject("no")], a=[Retry("no", timedelta(hours=1))])

    with at_work(group(Outbox(engine), listener, SUSPENDS)):
        assert eventually(lambda: states(engine) == {"dead": 1, "delayed": 1, "behind": 1, "retry": 1})
        decide(engine, "discard")
        assert eventually(lambda: states(engine) == {"delayed": 1, "retry": 2})
        fall_due(engine)
        assert eventually(lambda: {"late", "x"} <= set(listener.got))

    assert listener.got[:3] == ["d", "a", "a"]
    assert sorted(listener.got[3:]) == ["late", "x"]


def test_a_queue_is_not_suspended_by_what_a_dead_letter_holds_back(engine):
    """A person wants an expired message after all, and leaves a dead letter of its key in front."""
    send(engine, "d")
    send(engine, "expired", expires_at=datetime.now(UTC) + timedelta(hours=1))
    step_clock(engine, timedelta(hours=2), "outbox_message.expires_at")
    listener = Listener(d=[Reject("no")])
    group(Outbox(engine), listener, SUSPENDS).until_empty()
    assert states(engine) == {"dead": 2}

    decide(engine, "replay", of="expired")
    send(engine, "b", key="other")
    with at_work(group(Outbox(engine), listener, SUSPENDS)):
        assert eventually(lambda: listener.got == ["d", "b"])
        decide(engine, "discard", of="d")
        assert eventually(lambda: listener.got == ["d", "b", "expired"])


def test_a_queue_that_is_suspended_by_a_call_that_hangs_does_not_wait_for_ever(engine):
    send(engine, *"ab", key=None)
    released, listener = threading.Event(), Listener()

    def hangs(messages: Sequence[Message]) -> list[Verdict]:
        listener(messages)
        released.wait(60)
        return [DONE]

    with pytest.raises(HungHandlerError):
        group(Outbox(engine), hangs, SUSPENDS, caller=OverdueCaller(lambda _messages: True)).until_empty()
    released.set()

    assert listener.got == ["a"]


def test_each_partition_is_suspended_by_itself(engine):
    """Messages of the other partition are handled meanwhile."""
    keys = [next(f"{n}" for n in range(99) if slot_of(f"{n}", 256) % 2 == part) for part in (0, 1)]
    send(engine, "a", key=keys[0])
    listener = Listener(a=[Retry("no", timedelta(hours=1))])

    with at_work(group(Outbox(engine), listener, SUSPENDS, partitions=2)):
        assert eventually(lambda: states(engine) == {"retry": 1})
        send(engine, "c", key=keys[0])
        send(engine, "b", key=keys[1])
        assert eventually(lambda: "b" in listener.got)
        fall_due(engine)
        assert eventually(lambda: len(listener.got) == 4)

    assert listener.got == ["a", "b", "a", "c"]


# The newest of a key


def test_a_stop_before_the_newest_message_of_a_key_parks_nothing(engine):
    """What stands in front of the messages that a newer one replaced was not handled, and is read again."""
    send(engine, "a")
    send(engine, "b", key="other")
    send(engine, *"cd", key="third")
    listener = Listener(a=[Retry("no", timedelta(hours=1))])

    group(Outbox(engine), listener, SUSPENDS, compact=True).once()

    assert (listener.got, states(engine)) == (["a"], {"retry": 1})


def test_a_message_that_expires_before_its_turn_replaces_no_other(engine):
    send(engine, "first", key="other")
    send(engine, "a")
    expires_at = datetime.now(UTC) + timedelta(seconds=1)
    send(engine, "b", expires_at=expires_at)

    class Slow(Listener):
        def __call__(self, messages: Sequence[Message]) -> list[Verdict]:
            if messages[0].body == b"first":
                assert eventually(lambda: datetime.now(UTC) > expires_at + timedelta(seconds=0.2))
            return super().__call__(messages)

    listener = Slow()
    group(Outbox(engine), listener, compact=True).until_empty()

    assert listener.got == ["first", "a"]
    assert states(engine) == {"dead": 1}


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_the_newest_message_of_a_key_comes_whatever_the_pages(engine, rows):
    """Each page of a window is a batch of its own."""
    for number in range(30):
        send(engine, f"{number}", key="abc"[number % 3])
    again: dict[str, list[Verdict]] = {"9": [Retry("no")]}
    listener = Listener(**again)

    settings = replace(BRISK, limits=Limits(rows=rows))
    of = worker(Outbox(engine).database, listener, settings=settings, policy=AT_ONCE, name="group", compact=True)
    of.until_empty()

    assert states(engine) == {}
    for key in range(3):
        got = [int(body) for body in listener.got if int(body) % 3 == key]
        assert got == sorted(got)
        assert got[-1] == 27 + key


def test_of_a_compacted_key_only_the_newest_message_is_handled(engine):
    send(engine, *"abc")
    send(engine, "d", key="other")
    send(engine, *"ef", key=None)
    listener = Listener()

    group(Outbox(engine), listener, compact=True).until_empty()

    assert listener.got == ["c", "d", "e", "f"]
    assert states(engine) == {}


def test_the_newest_message_stands_for_the_earlier_ones_also_when_it_fails(engine):
    send(engine, *"abc")
    listener = Listener(c=[Retry("no", timedelta(hours=1))])
    group(Outbox(engine), listener, compact=True).until_empty()

    send(engine, *"de")
    group(Outbox(engine), listener).until_empty()

    assert listener.got == ["c"]
    assert states(engine) == {"retry": 1}
    assert parked_bodies(engine) == [b"e"]


def test_a_newer_message_takes_the_place_of_a_failed_one_and_waits_as_long(engine):
    send(engine, *"ab")
    listener = Listener(b=[Retry("no", timedelta(hours=1))])
    with at_work(group(Outbox(engine), listener, LATER, compact=True)):
        assert eventually(lambda: states(engine) == {"retry": 1})
        send(engine, *"cd")
        assert eventually(lambda: parked_bodies(engine) == [b"d"])
        fall_due(engine)
        assert eventually(lambda: "d" in listener.got)

    assert listener.got == ["b", "d"]


def test_a_newer_message_takes_the_place_of_a_dead_letter_and_is_handled_at_once(engine):
    send(engine, *"ab")
    listener = Listener(b=[Reject("never")])
    group(Outbox(engine), listener, compact=True).until_empty()

    send(engine, *"cd")
    group(Outbox(engine), listener).until_empty()

    assert listener.got == ["b", "d"]
    assert states(engine) == {}


def test_behind_a_failed_message_the_newest_of_each_topic_stays(engine):
    send(engine, "a")
    listener = Listener(a=[Retry("no", timedelta(hours=1))])
    group(Outbox(engine), listener, compact=True).until_empty()

    with Outbox(engine).begin() as session:
        for topic, body in (("other", "b"), ("other", "c"), ("third", "d")):
            Outbox(engine).send(session, topic, body, key="k")
        in_time = datetime.now(UTC) + timedelta(hours=1)
        Outbox(engine).send(session, "third", "e", key="k", expires_at=in_time)
    group(Outbox(engine), listener).until_empty()

    assert parked_bodies(engine) == [b"a", b"c", b"d", b"e"]
    assert states(engine) == {"retry": 1, "behind": 3}


def test_a_delayed_message_is_not_the_newest_before_it_is_due(engine):
    send(engine, *"ab")
    send(engine, "late", delay=timedelta(hours=1))
    listener = Listener()

    with at_work(group(Outbox(engine), listener, compact=True)):
        assert eventually(lambda: listener.got == ["b"] and states(engine) == {"delayed": 1})
        fall_due(engine)
        assert eventually(lambda: "late" in listener.got)

    assert listener.got == ["b", "late"]


def test_an_older_message_that_a_person_replays_replaces_no_newer_one(engine):
    """It comes behind the newer one, as without compaction."""
    send(engine, "old", expires_at=datetime.now(UTC) + timedelta(hours=1))
    step_clock(engine, timedelta(hours=2), "outbox_message.expires_at")
    send(engine, "new")
    listener = Listener(new=[Retry("no", timedelta(hours=1))])
    group(Outbox(engine), listener, LATER, compact=True).until_empty()
    assert states(engine) == {"dead": 1, "retry": 1}

    decide(engine, "replay", of="old")
    with at_work(group(Outbox(engine), listener, LATER)):
        assert eventually(lambda: "dead" not in states(engine))
        fall_due(engine)
        assert eventually(lambda: not states(engine))

    assert listener.got == ["new", "new", "old"]
