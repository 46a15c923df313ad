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
Supervisor([CheckService.of(Broker(outbox, connections=1), "shop", policy, listen)]).until_empty()
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


#: Until the first question, which is asked in a storm alone.
SOON = timedelta(seconds=0.2)


def ask(outbox: Outbox) -> None:
    shop = producer(outbox.engine, timeout=SOON)
    for body in ("1", "fatal", "2"):
        shop.begin_transaction().send("orders", body)


SMOKE = (
    pytest.mark.every_database,
    pytest.mark.smoke("starts five processes, four of which end in the midst of a call"),
)
ORDERS, HELD = {"0", "1", "2", "3", "4", "5", "free"}, {"dead": 1, "behind": 1}


@pytest.mark.parametrize(
    ("program", "begin", "ends", "others", "left"),
    [
        pytest.param(RELAY, send, 4, ORDERS, HELD, marks=SMOKE, id="relay"),
        pytest.param(CONSUMER, send, 4, ORDERS, HELD, marks=SMOKE, id="consumer"),
        # The first process has settled that all have failed, so its end is no reason for care.
        pytest.param(SECOND_ATTEMPT, send, 5, ORDERS, HELD, marks=pytest.mark.storm, id="parked"),
        pytest.param(CHECK_BACK, ask, 4, {"1", "2"}, {"dead": 1}, marks=pytest.mark.storm, id="check-back"),
    ],
)
def test_a_message_that_ends_its_process_becomes_a_dead_letter(engine, tmp_path, program, begin, ends, others, left):
    """The others arrive, and are handled three times at most; what is behind the message waits for a person."""
    outbox, journal = Outbox(engine), tmp_path / "journal"
    begin(outbox)

    codes = lives(program, engine, journal)
    handled = Counter(journal.read_text().split())

    assert codes == [9] * ends + [0]
    assert (handled.pop("fatal"), handled.keys(), states(engine)) == (ends, others, left)
    assert max(handled.values()) <= 3


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
