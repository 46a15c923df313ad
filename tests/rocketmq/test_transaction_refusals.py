"""Transactions of the 5.x shape that are refused, at the begin, at a message, or at the end."""

from contextlib import nullcontext, suppress
from typing import Any

import pytest
from sqlalchemy import create_engine as plain_engine
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import InvalidMessageError, Message, Outbox, migrate
from outbox.errors import DatabaseError, MQClientError, VerdictStandsError
from outbox.model.limits import MAX_HEADERS
from outbox.rocketmq import TransactionMQProducer, TransactionResolution
from outbox.testing.servers import PostgresServer
from tests.conftest import started
from tests.rocketmq.parts import (
    COMMIT,
    GROUP,
    ROLLBACK,
    Listener,
    arrived,
    check_back,
    halves,
    one,
    producer_of,
    verdicts,
)
from tests.support.readers import delivered
from tests.support.servers.postgresql import Standby
from tests.support.waiting import eventually

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"


def test_what_was_not_sent_cannot_be_ended(outbox, producer, engine):
    transaction = producer.begin_transaction()
    errors = []
    for end in (transaction.commit, transaction.rollback):
        with pytest.raises(MQClientError) as raised:
            end()
        errors.append(str(raised.value))

    assert errors == ["Transactional message has not been sent yet"] * 2
    assert verdicts(engine) == {}


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("empty", "transaction id cannot be empty"),
        ("unknown", "CODE: 1  DESC: Find prepared transaction message failed"),
        ("of another group", "CODE: 1  DESC: The producer group wrong"),
        ("of another group, committed", "CODE: 1  DESC: The producer group wrong"),
    ],
)
def test_what_is_not_the_groups_cannot_be_ended_by_it(engine, outbox, producer, which, text):
    other = producer_of(outbox, Listener(), "another-group")
    transaction = one(other)
    if which == "of another group, committed":
        transaction.commit()
    stood = verdicts(engine)
    id = {"empty": "", "unknown": "018f0000"}.get(which, transaction.id)

    errors = []
    for state in (COMMIT, ROLLBACK):
        with pytest.raises(MQClientError) as raised:
            producer.end_transaction(id, state)
        errors.append(str(raised.value))
    other.shutdown()

    assert (errors, verdicts(engine)) == ([text] * 2, stood)


def test_a_transaction_ends_with_a_state_and_nothing_else(outbox, producer, engine):
    transaction = one(producer)

    for state in (None, True, "commit", 8, "COMMIT_MESSAGE"):
        with pytest.raises(TypeError, match="a transaction ends with a state or a resolution"):
            producer.end_transaction(transaction.id, state)

    assert verdicts(engine) == {}


@pytest.mark.storm
def test_a_replica_stores_nothing_and_ends_nothing():
    with started(PostgresServer) as server:
        primary = plain_engine(server.create_database("shop"))
        migrate.upgrade(primary)
        outbox = Outbox(primary)
        producer = producer_of(outbox, Listener())
        transaction = one(producer)
        producer.shutdown()
        with Standby(server) as standby:
            copy = plain_engine(standby.url("shop"))
            assert eventually(lambda: halves(copy) == 1)
            replica = producer_of(Outbox(copy), Listener())
            refused = []
            for attempt in (
                lambda: replica.end_transaction(transaction.id, COMMIT),
                lambda: replica.end_transaction(transaction.id, ROLLBACK),
                lambda: replica.begin_transaction().send("orders", "2"),
            ):
                with pytest.raises(MQClientError) as raised:
                    attempt()
                refused.append((str(raised.value), raised.value.code))
            replica.shutdown()
            copy.dispose()
        stood = verdicts(primary)
        outbox.close()
        primary.dispose()

    assert (refused, stood) == ([("CODE: 11  DESC: SLAVE_NOT_AVAILABLE", 11)] * 3, {})


@pytest.mark.parametrize("op", ["commit", "rollback"])
def test_nothing_is_added_to_a_transaction_that_is_over(outbox, producer, engine, op):
    here, elsewhere = one(producer), one(producer)
    getattr(here, op)()
    producer.end_transaction(elsewhere.id, TransactionResolution(op))
    errors = []
    for transaction in (here, elsewhere):
        with pytest.raises((MQClientError, VerdictStandsError)) as raised:
            transaction.send("orders", "late")
        errors.append(str(raised.value))

    done = {"commit": "was committed", "rollback": "was rolled back"}[op]
    assert errors == [
        f"transaction {here.id} is over; begin another one",
        f"transaction {elsewhere.id} {done} before by producer {GROUP}, and that stands; this send changes nothing",
    ]
    assert (halves(engine), arrived(outbox)) == (2, ["1", "1"] if op == "commit" else [])


def test_a_transaction_needs_somebody_who_can_be_asked(outbox):
    producer = producer_of(outbox)
    texts = []
    for way in ("listener", "record"):
        with pytest.raises(MQClientError) as raised:
            producer.begin_transaction(verdict=way)
        texts.append(str(raised.value))
    with pytest.raises(ValueError, match="verdict is one of join, record, listener, not 'both'"):
        producer.begin_transaction(verdict="both")  # type: ignore[arg-type]

    assert texts[0] == "Transaction checker should not be null"
    assert "needs the engine of the business database" in texts[1]
    assert producer.begin_transaction(verdict="join").verdict == "join"
    assert producer_of(outbox, Listener()).begin_transaction().verdict == "listener"


def test_a_producer_whom_nobody_answers_is_told_so_before_its_business_begins(outbox, engine):
    """Leaving the block, or `commit()`, would tell it when the business is committed."""
    producer = producer_of(outbox)

    with pytest.raises(MQClientError, match=r"^Transaction checker should not be null: .*verdict=\"join\"$"):
        producer.begin_transaction()


@pytest.mark.parametrize("way", ["listener", "join", "record"])
@pytest.mark.parametrize(("state", "expected"), [(COMMIT, ["1"]), (ROLLBACK, [])])
def test_leaving_a_transaction_that_was_ended_by_hand_raises_nothing(outbox, engine, tmp_path, way, state, expected):
    """By its id, whatever its block would have done; a verdict that a database denies is no such end."""
    business = plain_engine(f"sqlite:///{tmp_path / 'business.db'}")
    migrate.upgrade_record(business)
    producer = producer_of(outbox, Listener(), business=business)
    refused = state is COMMIT and way != "listener"
    with suppress(MQClientError) if refused else nullcontext(), producer.begin_transaction(verdict=way) as transaction:
        transaction.send("orders", "1")
        producer.end_transaction(transaction.id, state)
    producer.shutdown()
    business.dispose()

    stands = {} if refused else {transaction.id: state.value}
    assert (verdicts(engine), arrived(outbox)) == (stands, [] if refused else expected)


def test_leaving_a_transaction_that_check_back_has_rolled_back_tells_so(outbox, producer):
    """The business, which the block is the end of, has lost its message."""
    with pytest.raises(VerdictStandsError), producer.begin_transaction() as transaction:
        transaction.send("orders", "1")
        check_back(outbox, ROLLBACK)


SENDS = {
    "None": lambda producer, transaction: producer.send(Message("orders", "1"), None),
    "swapped": lambda producer, transaction: producer.send(transaction, Message("orders", "1")),
    "a session": lambda producer, transaction: producer.send(Message("orders", "1"), Session()),
}


@pytest.mark.parametrize(
    ("call", "found"), list(zip(SENDS, ["not NoneType", "the other way round", "not Session"], strict=True))
)
def test_a_send_without_its_transaction_is_told_what_to_pass(outbox, producer, engine, call, found):
    with pytest.raises(TypeError) as raised:
        SENDS[call](producer, producer.begin_transaction())

    text = f"send takes a message and its transaction, {found}: send(message, transaction), with the transaction of"
    assert (str(raised.value).startswith(text), halves(engine)) == (True, 0)


LONG = "t" * 127
TOPICS = {
    "a.b": "The specified topic[a.b] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$",
    LONG + "t": "The specified topic is longer than topic max length 127.",
    "SCHEDULE_TOPIC_XXXX": "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden.",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC": "Sending message to topic[RMQ_SYS_TRANS_OP_HALF_TOPIC] is forbidden.",
    "TRANS_CHECK_MAX_TIME_TOPIC": "Sending message to topic[TRANS_CHECK_MAX_TIME_TOPIC] is forbidden.",
    "SELF_TEST_TOPIC": "Sending message to topic[SELF_TEST_TOPIC] is forbidden.",
    "OFFSET_MOVED_EVENT": "Sending message to topic[OFFSET_MOVED_EVENT] is forbidden.",
}


def test_a_topic_that_rocketmq_would_refuse_is_refused_in_its_words(outbox, producer, engine):
    found = {}
    for topic in TOPICS:
        with pytest.raises(MQClientError) as raised:
            producer.begin_transaction().send(topic, "1")
        found[topic] = str(raised.value)

    assert (found, halves(engine)) == (TOPICS, 0)


def test_the_half_topic_is_nobodys(outbox, producer):
    with pytest.raises(InvalidMessageError, match="reserved for half messages"):
        producer.begin_transaction().send(HALF_TOPIC, "1")


LARGEST = 4 * 1024 * 1024
DECIMAL = "must be a decimal integer of seconds,"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"body": b""}, "CODE: 13  DESC: the message body length is zero"),
    (
        {"headers": {"CHECK_IMMUNITY_TIME_IN_SECONDS": ""}},
        "CODE: 13  DESC: The name or value of property can not be null or blank string!",
    ),
    *(
        (
            {"headers": {name: "1"}},
            f"CODE: 13  DESC: The Property<{name}> is used by system, input another please",
        )
        for name in (
            "__transactionId__",
            "TRANSACTION_CHECK_TIMES",
            "KEYS",
            "TAGS",
            "DELAY",
            "REAL_TOPIC",
            "TRAN_MSG",
            "PGROUP",
            "UNIQ_KEY",
            "MAX_RECONSUME_TIMES",
            "REAL_QID",
            "WAIT",
            "TIMER_DELIVER_MS",
        )
    ),
    (
        {"dedup_key": "1"},
        "CODE: 13  DESC: a message of a transaction has no dedup_key; its message_id is sent once",
    ),
    *(
        (
            {"headers": {"CHECK_IMMUNITY_TIME_IN_SECONDS": asked}},
            f"CODE: 13  DESC: CHECK_IMMUNITY_TIME_IN_SECONDS {DECIMAL} 0 to 1000000000, but is {asked!r}",
        )
        for asked in ("-1", "5.5", "abc", "1e3", "0x10", "+5", "1000000001", "99999999999")
    ),
]


def test_a_message_that_cannot_be_one_of_a_transaction_is_refused(sqlite_engine):
    """The error has the code of RocketMQ for an illegal message."""
    producer = producer_of(Outbox(sqlite_engine), Listener())

    def stored(fields: dict[str, Any]) -> object:
        try:
            return producer.begin_transaction().store(Message("orders", **{"body": b"1", **fields}))
        except MQClientError as error:
            return str(error), error.code

    found = [(fields, stored(fields)) for fields, _ in REFUSED]

    assert (found, halves(sqlite_engine)) == ([(fields, (text, 13)) for fields, text in REFUSED], 0)


def test_no_message_is_no_message(outbox, producer):
    with pytest.raises(MQClientError) as raised:
        producer.begin_transaction().store(None)

    assert str(raised.value) == "CODE: 13  DESC: the message is null"


def test_what_rocketmq_takes_at_most_is_taken(outbox, producer):
    with producer.begin_transaction() as transaction:
        transaction.send(LONG, bytes(LARGEST))
        transaction.send("a%b|c_-Z9", "1", headers={"CHECK_IMMUNITY_TIME_IN_SECONDS": "1000000000"})

    found = delivered(outbox.database)
    assert [(message.topic, len(message.body)) for message in found] == [(LONG, LARGEST), ("a%b|c_-Z9", 1)]


def test_headers_that_leave_no_room_for_the_id_are_refused_before_anything_is_stored(outbox, producer, engine):
    with pytest.raises(InvalidMessageError, match=f"must be at most {MAX_HEADERS}"):
        producer.begin_transaction().send("orders", "1", headers={f"h{number}": "x" for number in range(MAX_HEADERS)})

    assert halves(engine) == 0


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("", "the specified group is blank"),
        ("  ", "the specified group is blank"),
        ("g" * 256, "the specified group is longer than group max length 255."),
        ("a b", "the specified group['a b'] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("DEFAULT_PRODUCER", "producerGroup can not equal DEFAULT_PRODUCER, please specify another one."),
    ],
)
def test_a_group_that_rocketmq_would_refuse_is_refused_in_its_words(sqlite_engine, group, text):
    with pytest.raises(MQClientError) as raised:
        TransactionMQProducer(group, Outbox(sqlite_engine))

    assert str(raised.value) == text


def test_on_sqlite_a_half_message_is_refused_where_it_would_wait_for_the_open_transaction(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    producer = producer_of(outbox, Listener())
    known = one(producer)
    errors = []
    with Session(sqlite_engine) as session:
        session.execute(text("SELECT 1"))
        for attempt in (lambda: one(producer), known.commit, known.rollback):
            with pytest.raises(DatabaseError) as raised:
                attempt()
            errors.append("before the business transaction begins" in str(raised.value))
    producer.shutdown()

    assert (errors, halves(sqlite_engine), verdicts(sqlite_engine)) == ([True] * 3, 1, {})
