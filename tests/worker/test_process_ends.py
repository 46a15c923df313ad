"""A message that ends the process which handles it stops nothing for ever, and repeats its neighbours at most twice."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox
from tests.rocketmq.halves import producer
from tests.support.parked import states
from tests.support.programs import Program

BEGIN = """
import os, sys
from tenacity import wait_none
from outbox import Done, Outbox, Relay, Retry, RetryPolicy, create_engine
from tests.support.destination import briskly

outbox = Outbox(create_engine(sys.argv[1]))

def meet(message):
    with open(sys.argv[2], "a") as journal:
        journal.write(message.body.decode() + chr(10))
    if message.body == b"fatal":
        os._exit(9)
"""
RELAY = """
class Fragile:
    destination = "test"
    def send(self, messages):
        for message in messages:
            meet(message)
        return [Done()] * len(messages)
    def close(self): pass

Relay(outbox, Fragile(), settings=briskly()).until_empty()
"""
CONSUMER = """
consumer = outbox.consumer("billing", settings=briskly())
consumer.on("orders")(meet)
consumer.until_empty()
"""
#: Everything fails once, so that all messages are parked when the process ends.
SECOND_ATTEMPT = """
class Failing:
    destination = "test"
    def send(self, messages):
        if messages[0].attempt == 1:
            return [Retry("not yet")] * len(messages)
        for message in messages:
            meet(message)
        return [Done()] * len(messages)
    def close(self): pass

Relay(outbox, Failing(), retry=RetryPolicy(attempts=9, wait=wait_none()), settings=briskly()).until_empty()
"""
IN_ORDER = """
from outbox.rocketmq import ConsumeFromWhere, ConsumeOrderlyStatus, DefaultMQPushConsumer, MessageListenerOrderly

def listen(messages, context):
    for each in messages:
        meet(each)
    return ConsumeOrderlyStatus.SUCCESS

consumer = DefaultMQPushConsumer(
    "billing", outbox, consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, max_reconsume_times=16,
)
consumer.subscribe("orders")
consumer.register_message_listener(MessageListenerOrderly(listen))
consumer.consumer.until_empty()
"""
CHECK_BACK = """
from datetime import timedelta
from outbox.rocketmq import TransactionResolution
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.service import CheckService
from outbox.relay.supervisor import Supervisor

def listen(message):
    meet(message)
    return TransactionResolution.COMMIT

policy = CheckPolicy(transaction_timeout=timedelta(seconds=0.2), check_interval=timedelta.resolution)
Supervisor([CheckService(Broker(outbox, connections=1), "shop", policy, listen)]).until_empty()
"""


def lives(program: str, engine: Engine, journal: Path) -> list[int]:
    """The exit codes of one process after the other, until one has nothing more to do."""
    codes = [1]
    url = engine.url.render_as_string(hide_password=False)
    while codes[-1] and len(codes) < 12:
        codes.append(Program(["-c", BEGIN + program, url, str(journal)]).wait(60))
        with engine.begin() as connection:
            # Nobody renews it: the next process need not wait for the length of a lease to see that.
            connection.execute(text("UPDATE outbox_lease SET length_ms = 1 WHERE owner IS NOT NULL"))
    return codes[1:]


def send(outbox: Outbox) -> None:
    messages = [Message("orders", b"%d" % number, key=f"k{number % 3}") for number in range(6)]
    fatal = Message("orders", b"fatal", key="f")
    with outbox.begin() as session:
        outbox.send_all(session, [*messages[:3], Message("orders", b"free"), fatal, *messages[3:]])
        outbox.send_all(session, [Message("orders", b"behind", key="f")])


@pytest.mark.every_database
@pytest.mark.smoke("starts five processes, four of which end in the midst of a call")
@pytest.mark.parametrize("program", [RELAY, CONSUMER], ids=["relay", "consumer"])
def test_a_message_that_ends_its_process_becomes_a_dead_letter(program, engine, tmp_path):
    """The others arrive, and are handled three times at most; what is behind the message waits for a person."""
    outbox, journal = Outbox(engine), tmp_path / "journal"
    send(outbox)

    codes = lives(program, engine, journal)
    handled = Counter(journal.read_text().split())

    assert codes == [9, 9, 9, 9, 0]
    assert handled.pop("fatal") == 4
    assert handled.keys() == {"0", "1", "2", "3", "4", "5", "free"}
    assert max(handled.values()) <= 3
    assert states(engine) == {"dead": 1, "behind": 1}


@pytest.mark.storm
def test_a_parked_message_that_ends_its_process_becomes_a_dead_letter(engine, tmp_path):
    outbox, journal = Outbox(engine), tmp_path / "journal"
    send(outbox)

    codes = lives(SECOND_ATTEMPT, engine, journal)
    handled = Counter(journal.read_text().split())

    # The first process has settled that all have failed, so its end is no reason for care.
    assert codes == [9, 9, 9, 9, 9, 0]
    assert handled.pop("fatal") == 5
    assert handled.keys() == {"0", "1", "2", "3", "4", "5", "free"}
    assert max(handled.values()) <= 3
    assert states(engine) == {"dead": 1, "behind": 1}


@pytest.mark.storm
def test_where_everything_waits_for_a_failure_the_order_stands(engine, tmp_path):
    """A dead letter of an orderly listener holds nothing back."""
    outbox, journal = Outbox(engine), tmp_path / "journal"
    send(outbox)

    codes = lives(IN_ORDER, engine, journal)
    handled = journal.read_text().split()

    assert codes == [9, 9, 9, 9, 0]
    assert list(dict.fromkeys(handled)) == ["0", "1", "2", "free", "fatal", "3", "4", "5", "behind"]
    assert max(Counter(handled).values()) <= 4
    assert states(engine) == {"dead": 1}


@pytest.mark.storm
def test_a_question_that_ends_its_process_gives_its_transaction_up(engine, tmp_path):
    journal = tmp_path / "journal"
    shop = producer(engine, timeout=timedelta(seconds=0.2))
    for body in ("1", "fatal", "2"):
        shop.begin_transaction().send("orders", body)

    codes = lives(CHECK_BACK, engine, journal)
    asked = Counter(journal.read_text().split())

    assert codes == [9, 9, 9, 9, 0]
    assert asked.pop("fatal") == 4
    assert set(asked) == {"1", "2"}
    assert max(asked.values()) <= 3
    assert states(engine) == {"dead": 1}
