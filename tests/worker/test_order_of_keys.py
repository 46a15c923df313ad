"""The order of keys is a property of a subscription: kept, not kept, kept for the whole partition, or compacted."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from tenacity import wait_fixed

from outbox import Message, Outbox, Reject, Retry, RetryPolicy, SubscriptionError, Verdict
from outbox.model.verdict import DONE
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings
from tests.support.parked import request, states
from tests.support.readers import Worker, at_work, worker
from tests.support.waiting import eventually

BRISK = Settings(poll=(timedelta(milliseconds=5), timedelta(milliseconds=20)))
#: A failed message is due again at once.
AT_ONCE = HandlerPolicy(retry=RetryPolicy(attempts=3, wait=wait_fixed(0)), portion=1)
#: A failed message waits for a moment.
LATER = HandlerPolicy(retry=RetryPolicy(attempts=3, wait=wait_fixed(0.3)), portion=1)


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


def group(outbox: Outbox, listener: Any, policy: HandlerPolicy = AT_ONCE, **differing: Any) -> Worker:
    return worker(outbox.database, listener, settings=BRISK, policy=policy, name="group", kind="consumer", **differing)


def send(engine: Engine, *bodies: str, key: str | None = "k", **fields: Any) -> None:
    with Outbox(engine).begin() as session:
        Outbox(engine).send_all(session, [Message("orders", body, key=key, **fields) for body in bodies])


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

    request(engine, "replay")
    send(engine, "d")
    with at_work(group(Outbox(engine), listener)):
        assert eventually(lambda: states(engine) == {"retry": 1} and listener.got.count("a") == 2)
        send(engine, "e")
        assert eventually(lambda: "e" in listener.got)

    assert sorted(listener.got) == sorted(["a", "b", "c", "a", "d", "e"])


def test_without_order_a_message_that_falls_due_comes_when_it_is_due_and_blocks_nothing(engine):
    send(engine, "late", delay=timedelta(seconds=0.5))
    send(engine, *"ab")
    listener = Listener(late=[Retry("no", timedelta(hours=1))])

    with at_work(group(Outbox(engine), listener, ordered=False)):
        assert eventually(lambda: "late" in listener.got)
        send(engine, "c")
        assert eventually(lambda: "c" in listener.got)

    assert listener.got == ["a", "b", "late", "c"]
    assert states(engine) == {"retry": 1}


def test_the_order_belongs_to_the_subscription(engine):
    group(Outbox(engine), Listener(), ordered=False).until_empty()

    with pytest.raises(SubscriptionError, match=r"has ordered False, this worker asks for True.*alter group --ordered"):
        group(Outbox(engine), Listener(), ordered=True).until_empty()


# A suspended queue


@pytest.mark.parametrize("second", ["k", "other", None])
def test_a_suspended_queue_waits_for_the_failed_message_whatever_the_keys(engine, second):
    send(engine, "a")
    send(engine, "b", key=second)
    listener = Listener(a=[Retry("no"), Retry("no")])
    policy = HandlerPolicy(retry=LATER.retry, portion=1, suspend=True)

    began = time.monotonic()
    group(Outbox(engine), listener, policy).until_empty()

    assert listener.got == ["a", "a", "a", "b"]
    assert time.monotonic() - began > 0.6
    assert states(engine) == {}


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
    first, second = Listener(a=[Retry("no", timedelta(seconds=1))]), Listener()
    group(Outbox(engine), first, policy).once()
    assert (first.got, states(engine)) == (["a"], {"retry": 1})

    group(Outbox(engine), second, policy).until_empty()

    assert second.got == ["a", "b"]


# The newest of a key


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
    assert states(engine) == {"retry": 1, "blocked": 2}


def test_what_waits_behind_a_parked_message_is_not_compacted(engine):
    send(engine, *"ab")
    listener = Listener(b=[Retry("no")])
    with at_work(group(Outbox(engine), listener, LATER, compact=True)):
        assert eventually(lambda: states(engine) == {"retry": 1})
        send(engine, *"cd")
        assert eventually(lambda: "d" in listener.got)

    assert listener.got == ["b", "b", "c", "d"]


def test_a_delayed_message_is_not_the_newest_before_it_is_due(engine):
    send(engine, *"ab")
    send(engine, "late", delay=timedelta(seconds=0.5))
    listener = Listener()

    with at_work(group(Outbox(engine), listener, compact=True)):
        assert eventually(lambda: "late" in listener.got)

    assert listener.got == ["b", "late"]
