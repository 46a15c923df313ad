"""A worker tells once a minute what it has done, and says nothing of an idle minute."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox import Done, Outbox
from outbox.model.message import Message
from outbox.rocketmq import CheckPolicy, TransactionMQProducer, TransactionResolution
from outbox.telemetry.activity_log import Activity
from outbox.telemetry.events import BatchRead, Settled
from outbox.worker import upkeep
from tests.support.waiting import eventually

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture(autouse=True)
def told(caplog):
    """The lines so far."""
    caplog.set_level("INFO", "outbox.activity")
    return lambda: [record.message for record in caplog.records if record.name == "outbox.activity"]


def written(seconds: float, number: int = 1, delay: float = 0.0) -> list[Message]:
    """Messages that were written so long ago."""
    found = [Message("orders", b"1") for _ in range(number)]
    for message in found:
        message.created_at = NOW - timedelta(seconds=seconds)
        message.deliver_at = message.created_at + timedelta(seconds=delay) if delay else None
    return found


def count(work: Activity, messages: list[Message]) -> None:
    """A worker reads messages and settles them at once."""
    where: dict[str, Any] = {"database": None, "subscription": "relay", "partition": 0}
    work.told(BatchRead(**where, messages=messages, now=NOW))
    work.told(Settled(**where, messages=messages, seconds=0.0))


def test_a_line_says_how_many_how_quickly_and_what_waits(clock, told):
    work = Activity("relay", every=60.0, clock=lambda: clock[-1])
    count(work, written(0.004, 990))
    count(work, written(30, 10))
    clock.append(160.0)
    work.tell_if_due(lambda: {"waiting": 3, "behind": 2, "retry": 0, "dead": 9, "delayed": 9})
    count(work, written(7200, 1, delay=7199))
    clock.append(220.0)
    work.tell_if_due(dict)

    assert told() == [
        "relay: 1000 messages sent in 1 min, 99 % of them within 5 ms of being written; 3 waiting, 2 behind",
        "relay: 1 message sent in 1 min, 99 % of them within 1 s of being written; none waits",
    ]


def test_the_slow_ones_are_not_left_out(clock, told):
    work = Activity("relay", every=60.0, clock=lambda: clock[-1])
    count(work, written(0.004, 980))
    count(work, written(30, 20))
    clock.append(160.0)
    work.tell_if_due(dict)

    assert "99 % of them within 32 s of being written" in told()[0]


def test_an_idle_minute_is_told_only_if_something_waits(clock, told):
    work = Activity("relay", every=60.0, clock=lambda: clock[-1])
    work.tell_if_due(dict)
    clock.append(161.0)
    work.tell_if_due(dict)
    clock.append(222.0)
    work.tell_if_due(lambda: {"waiting": 1})

    assert told() == ["relay: 0 messages sent in 1 min; 1 waiting"]


def test_a_relay_tells_it(engine, told, monkeypatch):
    monkeypatch.setattr(upkeep, "LOG_ACTIVITY", 0.5)
    outbox = Outbox(engine)
    with outbox.running(lambda _message: Done()):
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", b"1") for _ in range(7)])
        assert eventually(lambda: any(line.startswith("relay: 7 messages sent in ") for line in told()))

    # A line may come before the messages are sent.
    (sent,) = [line for line in told() if line.startswith("relay: 7 ")]
    assert sent.endswith("of being written; none waits")


def test_a_check_back_settles_messages_and_sends_none(engine, told, monkeypatch):
    monkeypatch.setattr(upkeep, "LOG_ACTIVITY", 0.5)
    outbox = Outbox(engine)
    policy = CheckPolicy(transaction_timeout=timedelta(milliseconds=1))
    with TransactionMQProducer("shop", outbox, lambda _message: TransactionResolution.COMMIT, policy=policy) as shop:
        shop.begin_transaction(verdict="listener").send("orders", b"1")
        assert eventually(lambda: any(line.startswith("check:shop: 1 message settled in ") for line in told()))
