"""Listeners that can ask nobody, transactions whose id the caller gives, and one check service of several groups."""

from datetime import timedelta

import pytest

from outbox import Message, Outbox
from outbox.model.verdict import Retry
from outbox.relay.supervisor import Supervisor
from outbox.rocketmq import MQClientError, NobodyAsked, TransactionMQProducer
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.service import CheckedGroup, CheckService
from outbox.store.database import Channel, Database
from tests.rocketmq.parts import COMMIT, HOUR, IMMUNITY, Listener, half_rows, looked_at, wait_until_old_enough
from tests.support.readers import delivered


def test_an_answer_that_nobody_was_asked_counts_for_nothing(outbox, producer):
    producer.begin_transaction().send("orders", "1")

    (verdict,) = looked_at(outbox, half_rows(outbox), NobodyAsked("no client of orders"))

    assert verdict == Retry("no client of orders", HOUR, counts=False)


def test_a_transaction_may_have_a_given_id_and_its_message_be_sent_again(outbox, producer):
    message = Message("orders", "1")
    for _ in range(2):
        transaction = producer.begin_transaction(id="order-7")
        producer.send(message, transaction)
    transaction.commit()

    found = delivered(outbox.database, topics=("orders",))
    assert (transaction.id, [each.message_id for each in found]) == ("order-7", [message.message_id])


@pytest.mark.parametrize(
    ("id", "error", "words"),
    [
        ("", MQClientError, "transaction id cannot be empty"),
        ("k" * 1025, MQClientError, "a transaction id has at most 1024 bytes"),
        ("a\x00", MQClientError, "a transaction id has at most 1024 bytes"),
        (7, TypeError, "a transaction id is a str, not int"),
    ],
)
def test_an_id_that_no_transaction_can_have_is_refused(producer, id, error, words):
    with pytest.raises(error, match=words):
        producer.begin_transaction(id=id)


def test_one_service_asks_about_the_transactions_of_several_groups_on_three_connections(outbox: Outbox, monkeypatch):
    groups, asked = ("first", "second", "third"), list[tuple[str, Message]]()
    for group in groups:
        policy = CheckPolicy(transaction_timeout=IMMUNITY)
        made = TransactionMQProducer(group, outbox, Listener(), policy=policy)
        made.begin_transaction().send("orders", group)
        made.shutdown()
    wait_until_old_enough(outbox)

    def checked(name: str) -> CheckedGroup:
        def answer(message: Message) -> object:
            asked.append((name, message))
            return COMMIT

        policy = CheckPolicy(transaction_timeout=IMMUNITY, check_timeout=timedelta(minutes=1))
        return CheckedGroup(name=name, policy=policy, question=answer)

    opened, real = list[Database](), Database.open

    def open_one(database: Database) -> Channel:
        opened.append(database)
        return real(database)

    monkeypatch.setattr(Database, "open", open_one)
    broker = Broker(outbox, connections=1)
    Supervisor([CheckService(broker, [checked(name) for name in groups])]).until_empty()
    broker.close()

    assert sorted((name, message.body) for name, message in asked) == [(name, name.encode()) for name in groups]
    assert len(opened) <= 3
