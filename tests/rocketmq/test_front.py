"""RocketMQ's front, as the official Python client sees it."""

from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import text

from outbox.errors import OptionError
from outbox.rocketmq import CheckPolicy
from outbox.rocketmq.front import Front
from outbox.rocketmq.front.sending import Sending
from outbox.rocketmq.front.transactions import Transactions
from tests.rocketmq.fronts import bodies, listening, producing
from tests.support.waiting import eventually

SOON = CheckPolicy(transaction_timeout=timedelta(milliseconds=200), check_interval=timedelta(milliseconds=200))


def message(client: ModuleType, topic: str, body: bytes, **fields: Any) -> Any:
    """A message of the official client."""
    made = client.Message()
    made.topic, made.body = topic, body
    for name, value in fields.items():
        setattr(made, name, value)
    made.add_property("size", "1")
    made.add_property("Gr\u00f6\u00dfe", " x ")
    return made


def checker_of(client: ModuleType, answers: dict[bytes, Any]) -> Any:
    """A checker that answers by the body, each answer of a list once and the last one from then on."""

    class Checker(client.TransactionChecker):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.asked: list[Any] = []

        def check(self, asked: Any) -> Any:
            self.asked.append(asked)
            left = answers[asked.body]
            return left.pop(0) if len(left) > 1 else left[0]

    return Checker()


@pytest.mark.every_database
def test_a_producer_of_the_official_client_sends_messages_and_transactions(outbox, official):
    answer = official.TransactionResolution
    checker = checker_of(official, {b"orphan": [answer.Value("TRANSACTION_RESOLUTION_UNSPECIFIED"), answer.COMMIT],
                                    b"undone": [answer.ROLLBACK]})  # fmt: skip
    with (
        listening(outbox, policy=SOON) as front,
        producing(official, front, "orders", "paid", checker=checker) as producer,
    ):
        receipt = producer.send(message(official, "orders", b"normal", tag="t", keys="k"))
        for verdict in ("commit", "rollback"):
            transaction = producer.begin_transaction()
            producer.send(message(official, "paid", verdict.encode()), transaction)
            getattr(transaction, verdict)()
        for body in (b"undone", b"orphan"):
            producer.send(message(official, "paid", body), producer.begin_transaction())

        assert eventually(lambda: len(bodies(outbox, "paid")) == 2)

    assert (bodies(outbox, "orders"), bodies(outbox, "paid")) == ([b"normal"], [b"commit", b"orphan"])
    assert receipt.message_id == receipt.transaction_id
    asked = checker.asked[-1]
    assert sorted(each.body for each in checker.asked) == [b"orphan", b"orphan", b"undone"]
    assert (asked.topic, asked.body, asked.properties) == (
        "paid", b"orphan",
        {"size": "1", "Gr\u00f6\u00dfe": " x ", "__transactionId__": asked.message_id, "TRANSACTION_CHECK_TIMES": "2"},
    )  # fmt: skip


def test_messages_of_each_type_are_stored_with_what_they_have(outbox, official):
    due = int(datetime.now(UTC).timestamp()) + 60
    with listening(outbox) as front, producing(official, front, "steps", "later", "orders") as producer:
        producer.send(message(official, "steps", b"1", message_group="g"))
        producer.send(message(official, "later", b"2", delivery_timestamp=due))
        producer.send_async(message(official, "orders", b"3", tag="t", keys="k")).result()

    with outbox.engine.connect() as connection:
        rows = connection.execute(text("SELECT topic, key, tags, deliver_at IS NULL FROM outbox_message ORDER BY id"))
        assert [(topic, key, tags, bool(now)) for topic, key, tags, now in rows] == [
            ("steps", "g", None, True), ("later", None, None, False), ("orders", None, "t", True),
        ]  # fmt: skip


def test_a_message_whose_answer_is_lost_is_sent_again_by_the_client_and_stored_once(outbox, official, monkeypatch):
    lost: list[str] = []

    def losing(call: Any) -> Any:
        def answer(self: Any, *wire: Any) -> Any:
            done = call(self, *wire)
            lost.append(call.__name__)
            if lost.count(call.__name__) == 1:
                raise ConnectionError("the answer is lost")
            return done

        return answer

    monkeypatch.setattr(Sending, "_append", losing(Sending._append))
    monkeypatch.setattr(Transactions, "prepare", losing(Transactions.prepare))
    with (
        listening(outbox) as front,
        producing(official, front, "orders", "paid", checker=checker_of(official, {})) as producer,
    ):
        producer.send(message(official, "orders", b"1", tag="t", keys="k"))
        transaction = producer.begin_transaction()
        producer.send(message(official, "paid", b"2", tag="t", keys="k"), transaction)
        transaction.commit()

    assert (lost, bodies(outbox, "orders"), bodies(outbox, "paid")) == (
        ["_append", "_append", "prepare", "prepare"],
        [b"1"],
        [b"2"],
    )


def test_messages_of_clients_that_make_the_same_id_are_all_delivered(outbox, official, monkeypatch):
    """As of two containers with one address and one process number; a checker is asked about each of the two."""
    monkeypatch.setattr("rocketmq.v5.util.MessageIdCodec.next_message_id", lambda _self: "01" + "A" * 32)
    answer = official.TransactionResolution
    checker = checker_of(official, {b"4": [answer.COMMIT], b"5": [answer.COMMIT]})
    with (
        listening(outbox, policy=SOON) as front,
        producing(official, front, "orders", "paid", checker=checker) as producer,
    ):
        for body in (b"1", b"2"):
            producer.send(message(official, "orders", body))
        undone, done = producer.begin_transaction(), producer.begin_transaction()
        producer.send(message(official, "paid", b"undone"), undone)
        producer.send(message(official, "paid", b"3"), done)
        undone.rollback()
        done.commit()
        for body in (b"4", b"5"):
            producer.send(message(official, "paid", body), producer.begin_transaction())

        assert eventually(lambda: len(bodies(outbox, "paid")) == 3)

    assert (bodies(outbox, "orders"), sorted(bodies(outbox, "paid"))) == ([b"1", b"2"], [b"3", b"4", b"5"])


def test_an_open_transaction_waits_uncounted_until_a_producer_of_its_topic_comes(outbox, official):
    answer = official.TransactionResolution
    checker = checker_of(official, {b"orphan": [answer.COMMIT]})
    with listening(outbox, policy=SOON) as front:
        with producing(official, front, "paid", checker=checker) as gone:
            gone.send(message(official, "paid", b"orphan"), gone.begin_transaction())
        with producing(official, front, "orders", checker=checker):
            pass
        with producing(official, front, "paid", checker=checker):
            assert eventually(lambda: bodies(outbox, "paid") == [b"orphan"])

    assert [each.properties["TRANSACTION_CHECK_TIMES"] for each in checker.asked] == ["1"]


def test_a_front_at_a_port_of_another_front_says_so(outbox):
    with listening(outbox) as front:
        other = type(front)(outbox, topics={}, listen=str(front.listening))
        text = f"a front cannot listen at {front.listening}: another process listens there; give --listen another port"
        with pytest.raises(Exception, match=text):
            other.run(signals=False)
        with pytest.raises(OptionError, match=text):
            other.start()

    assert other.listening is None


def test_a_front_that_was_started_listens(outbox):
    front = Front(outbox, topics={}, listen="127.0.0.1:0")
    places = list[object]()
    for _ in range(2):
        with front:
            front.start()
            places.append(front.listening)

    assert None not in places
    assert front.listening is None
