"""Transactions of the 5.x shape: any number of messages, one verdict, and what a consumer gets of it."""

import threading
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine as plain_engine
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import InvalidMessageError, Message, Outbox, migrate
from outbox.errors import DatabaseError, MQClientError, VerdictStandsError
from outbox.model.limits import MAX_HEADERS
from outbox.model.slots import slot_of
from outbox.rocketmq import LocalTransactionState, MessageQueue, TransactionMQProducer, TransactionResolution
from outbox.testing.servers import PostgresServer
from tests.conftest import started
from tests.rocketmq.parts import (
    COMMIT,
    GROUP,
    ONE_DATABASE,
    ROLLBACK,
    UNKNOW,
    Listener,
    arrived,
    check_back,
    halves,
    producer_of,
    verdicts,
    wait_until_old_enough,
)
from tests.support.leases import step_clock
from tests.support.readers import delivered
from tests.support.servers.postgresql import Standby
from tests.support.waiting import eventually

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"


def one(producer: TransactionMQProducer, body: str = "1"):
    """A transaction with a message."""
    transaction = producer.begin_transaction()
    transaction.send("orders", body)
    return transaction


# Verdicts


def test_a_commit_delivers_every_message_and_nothing_before(outbox, producer):
    transaction = producer.begin_transaction()
    transaction.send("orders", "1", key="a")
    producer.send(Message("mail", "2"), transaction)
    transaction.send("orders", "3", key="a")
    before = arrived(outbox)

    transaction.commit()

    assert (before, arrived(outbox), arrived(outbox)) == ([], ["1", "2", "3"], [])
    assert transaction.resolution is TransactionResolution.COMMIT


def test_a_rollback_delivers_nothing(outbox, producer, engine):
    transaction = one(producer)

    transaction.rollback()

    assert (arrived(outbox), transaction.resolution) == ([], TransactionResolution.ROLLBACK)
    assert halves(engine) == 1


def test_leaving_a_transaction_commits_it(outbox, producer):
    with producer.begin_transaction() as transaction:
        transaction.send("orders", "1")

    assert (arrived(outbox), transaction.resolution) == (["1"], TransactionResolution.COMMIT)


def test_leaving_a_transaction_that_was_rolled_back_leaves_it_so(outbox, producer):
    with producer.begin_transaction() as transaction:
        transaction.send("orders", "1")
        transaction.rollback()

    assert (arrived(outbox), transaction.resolution) == ([], TransactionResolution.ROLLBACK)


def test_leaving_a_transaction_without_a_message_is_nothing(outbox, producer, engine):
    with producer.begin_transaction():
        pass

    assert (verdicts(engine), halves(engine)) == ({}, 0)


@pytest.mark.parametrize(("answer", "expected"), [(COMMIT, ["1"]), (ROLLBACK, []), (UNKNOW, [])])
def test_leaving_by_an_exception_says_nothing_and_check_back_decides(outbox, producer, answer, expected):
    """It may come from a commit whose answer was lost."""
    with pytest.raises(ConnectionError), producer.begin_transaction() as transaction:
        transaction.send("orders", "1")
        raise ConnectionError
    before = transaction.resolution

    check_back(outbox, answer)

    assert (before, arrived(outbox)) == (TransactionResolution.UNKNOWN, expected)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (COMMIT, ["1"]),
        (TransactionResolution.COMMIT, ["1"]),
        (ROLLBACK, []),
        (TransactionResolution.ROLLBACK, []),
    ],
)
def test_another_producer_of_the_group_ends_a_transaction(engine, outbox, producer, state, expected):
    """The id is all that it needs, and it learns the verdict that stands however often it asks."""
    transaction = one(producer)
    other = producer_of(Outbox(engine), Listener())

    found = [other.end_transaction(transaction.id, state) for _ in range(3)]
    other.shutdown()

    assert found == [TransactionResolution(state.value)] * 3
    assert (arrived(outbox), transaction.resolution) == (expected, found[0])


def test_an_unknown_end_changes_nothing_and_tells_what_stands(outbox, producer):
    first, second = one(producer), one(producer)
    states = (UNKNOW, LocalTransactionState.UNKNOWN, TransactionResolution.UNKNOWN)
    before = [producer.end_transaction(first.id, state) for state in states]
    first.commit()
    second.rollback()

    after = [producer.end_transaction(each.id, UNKNOW) for each in (first, second)]

    assert before == [TransactionResolution.UNKNOWN] * 3
    assert after == [TransactionResolution.COMMIT, TransactionResolution.ROLLBACK]
    assert arrived(outbox) == ["1"]


@pytest.mark.parametrize(("verb", "expected"), [("commit", ["1"]), ("rollback", [])])
def test_a_verdict_that_is_repeated_changes_nothing(outbox, producer, verb, expected):
    transaction = one(producer)
    state = COMMIT if verb == "commit" else ROLLBACK

    for _ in range(3):
        getattr(transaction, verb)()
        producer.end_transaction(transaction.id, state)

    assert (arrived(outbox), arrived(outbox)) == (expected, [])


def by_itself(transaction, producer, outbox, op):
    getattr(transaction, op)()


def by_another(transaction, producer, outbox, op):
    producer.end_transaction(transaction.id, TransactionResolution(op))


def by_check_back(transaction, producer, outbox, op):
    check_back(outbox, TransactionResolution(op))


@pytest.mark.parametrize(
    ("decide", "contradict"), [(by_itself, by_itself), (by_another, by_itself), (by_check_back, by_another)]
)
@pytest.mark.parametrize(("first", "second", "expected"), [("commit", "rollback", ["1"]), ("rollback", "commit", [])])
def test_a_contradiction_names_the_verdict_that_stands(outbox, producer, decide, contradict, first, second, expected):
    transaction = one(producer)
    decide(transaction, producer, outbox, first)

    with pytest.raises(VerdictStandsError) as raised:
        contradict(transaction, producer, outbox, second)

    done = {"commit": "was committed", "rollback": "was rolled back"}[first]
    by = "check" if decide is by_check_back else "producer"
    whom = f"{done} before by {by} {GROUP}"
    text = f"transaction {transaction.id} {whom}, and that stands; this {second} changes nothing"
    assert (raised.value.transaction_id, raised.value.verdict, str(raised.value)) == (transaction.id, first, text)
    assert (arrived(outbox), transaction.resolution) == (expected, TransactionResolution(first))


def test_check_back_never_contradicts_a_producer(outbox, producer):
    committed, rolled_back = one(producer, "committed"), one(producer, "rolled back")
    committed.commit()
    rolled_back.rollback()

    asked = check_back(outbox, lambda message: ROLLBACK if message.body == b"committed" else COMMIT)

    assert (asked, arrived(outbox)) == ([], ["committed"])


@pytest.mark.every_database
def test_commits_and_rollbacks_at_the_same_time_come_to_one_verdict(engine, outbox, producer):
    """Ten of each at once: who is told that it worked agrees with what stands."""
    wrong = []
    for round in range(5):
        transaction = one(producer, str(round))
        together = threading.Barrier(6)
        told: list[str] = []

        def end(state, transaction=transaction, together=together, told=told):
            together.wait()
            try:
                told.append(producer.end_transaction(transaction.id, state).value)
            except VerdictStandsError as error:
                told.append(error.verdict)

        threads = [threading.Thread(target=end, args=(state,)) for state in (COMMIT, ROLLBACK) * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stands = verdicts(engine)[transaction.id]
        if told != [stands] * 6 or arrived(outbox) != ([str(round)] if stands == "commit" else []):
            wrong.append((round, stands, told))

    assert wrong == []


# Refusals


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


def test_a_producer_is_closed_by_either_name(outbox, producer):
    producer.start()
    producer.close()
    other = producer_of(outbox, Listener())
    other.start()
    other.close()


def test_a_listener_may_be_set_later(outbox, engine):
    """As the 4.x client does it, and before the start."""
    producer, listener = producer_of(outbox), Listener(COMMIT, COMMIT)
    producer.set_transaction_listener(listener)
    first = producer.send_message_in_transaction(Message("orders", "1"))
    listener.outcome = UNKNOW
    second = producer.send_message_in_transaction(Message("orders", "2"))
    producer.start()
    with pytest.raises(MQClientError, match=r"before start\(\)"):
        producer.set_transaction_listener(Listener())
    assert eventually(lambda: second.transaction_id in verdicts(engine))
    producer.shutdown()
    producer.set_transaction_listener(None)
    with pytest.raises(MQClientError, match=r"^TransactionListener is null$"):
        producer.send_message_in_transaction(Message("orders", "3"))

    assert (first.local_transaction_state, arrived(outbox)) == (COMMIT, ["1", "2"])


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


@ONE_DATABASE
def test_one_producer_of_a_group_checks_back_in_a_process(outbox, producer):
    other = producer_of(outbox, Listener())
    producer.start()
    with pytest.raises(MQClientError) as raised:
        other.start()
    producer.shutdown()
    other.start()
    other.shutdown()

    text = f"The producer group[{GROUP}] has been created before, specify another name please."
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


def test_on_postgresql_a_half_message_is_committed_on_its_own(pg_engine):
    """Its connection is none of the application's pool, which has one only."""
    engine = plain_engine(pg_engine.url, pool_size=1, max_overflow=0, pool_timeout=1)
    outbox = Outbox(engine)
    producer = producer_of(outbox, Listener())
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        one(producer).commit()
        session.rollback()
    producer.shutdown()
    engine.dispose()

    assert arrived(Outbox(pg_engine)) == ["1"]


def test_connections_that_the_server_has_closed_are_no_reason_to_fail(pg_engine):
    """All that a producer has opened, so that one try for each would not do."""
    outbox = Outbox(pg_engine)
    producer = producer_of(outbox, Listener())
    together = threading.Barrier(5)

    def transact(number: int) -> None:
        transaction = one(producer, str(number))
        together.wait()
        with producer._broker._connections.one():
            together.wait()
        transaction.commit()

    threads = [threading.Thread(target=transact, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kill = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid()"
    )

    def killed() -> None:
        with pg_engine.begin() as connection:
            connection.execute(kill)

    killed()
    transaction = one(producer, "after")
    killed()
    transaction.commit()
    other = one(producer, "other")
    killed()
    other.rollback()
    producer.shutdown()

    assert sorted(arrived(outbox)) == ["0", "1", "2", "3", "4", "after"]


# What arrives


def test_what_arrives_is_what_was_sent(outbox, producer):
    """Byte for byte, with the id of its transaction besides."""
    body, headers = bytes(range(256)), {"trace": "ä \"quoted\" \\ 'x' 😀", "A": "1"}
    message = Message(
        "orders", body, key="k-\u00e4'\"", tags="tag a", headers=headers, content_type="application/x-thing; v=1"
    )
    plain = Message("orders", {"a": [1, None]})
    with producer.begin_transaction() as transaction:
        transaction.store(message)
        transaction.store(plain)

    found = delivered(outbox.database)
    own = {"__transactionId__": transaction.id}
    assert [
        (m.message_id, m.topic, m.key, m.tags, m.headers, m.body, m.content_type, m.deliver_at, m.expires_at, m.attempt)
        for m in found
    ] == [
        (
            message.message_id, "orders", "k-\u00e4'\"", "tag a", {**headers, **own}, body, "application/x-thing; v=1",
            None, None, 1,
        ),
        (plain.message_id, "orders", None, None, own, b'{"a":[1,null]}', "application/json", None, None, 1),
    ]  # fmt: skip
    assert {m.transaction_id for m in found} == {transaction.id}


def test_the_message_of_the_caller_stays_as_it_was(outbox, producer):
    message = Message("orders", "1", headers={"a": "b"}, delay=timedelta(seconds=3))
    with producer.begin_transaction() as transaction:
        transaction.store(message)

    kept = (message.headers, message.delay, message.topic, message.id)
    assert kept == ({"a": "b"}, timedelta(seconds=3), "orders", None)


def log_of(engine, topic="orders"):
    """Slot, commit and times of what was restored."""
    columns = "slot, created_at, deliver_at, expires_at"
    statement = text(f"SELECT {columns} FROM outbox_message WHERE topic = :topic ORDER BY id")
    with engine.connect() as connection:
        rows = connection.execute(statement, {"topic": topic}).all()
    return [(row[0], *(in_utc_of(moment) for moment in row[1:])) for row in rows]


def in_utc_of(moment):
    """SQLite keeps texts, without a zone, because it is UTC."""
    found = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return found if found is None else found.replace(tzinfo=found.tzinfo or UTC)


def test_a_delay_counts_from_the_commit(engine, outbox, producer):
    transaction = producer.begin_transaction()
    transaction.send("orders", "1", delay=timedelta(hours=1))
    transaction.send("orders", "2", delay="10s")
    transaction.send("orders", "3", delay=timedelta(0))
    step_clock(engine, timedelta(minutes=5), "outbox_message.created_at")
    ((_, stored, *_), *_) = log_of(engine, HALF_TOPIC)
    wait_until_old_enough(outbox)

    transaction.commit()

    found = log_of(engine)
    assert [deliver_at - committed for _, committed, deliver_at, _ in found] == [
        timedelta(hours=1),
        timedelta(seconds=10),
        timedelta(0),
    ]
    assert all(committed - stored >= timedelta(minutes=5) for _, committed, *_ in found)
    assert arrived(outbox) == ["3"]


@pytest.mark.parametrize("by", ["producer", "check back"])
def test_a_half_message_with_a_delay_is_delivered_when_it_is_due(outbox, producer, by):
    transaction = producer.begin_transaction()
    transaction.send("orders", "1", delay=timedelta(seconds=0.2))
    if by == "producer":
        transaction.commit()
    else:
        check_back(outbox, COMMIT)
    found: list[str] = []

    def look() -> bool:
        found.extend(arrived(outbox))
        return bool(found)

    assert eventually(look)
    assert (found, check_back(outbox, COMMIT), arrived(outbox)) == (["1"], [], [])


def test_moments_stay_as_they_were_given(engine, outbox, producer):
    """To the millisecond."""
    past, future = datetime(2020, 2, 29, 1, 2, 3, 4000, UTC), datetime(2999, 12, 31, 23, 59, 59, 999000, UTC)
    with producer.begin_transaction() as transaction:
        transaction.send("orders", "1", deliver_at=past, expires_at=future)
        transaction.send("orders", "2", deliver_at=future)
        transaction.send("orders", "3", expires_at=past)

    assert [times for _, _, *times in log_of(engine)] == [[past, future], [future, None], [None, past]]
    assert all(times == [None, None] for _, _, *times in log_of(engine, HALF_TOPIC))
    assert arrived(outbox) == ["1"]


def test_a_send_tells_the_queue_to_which_the_message_will_go(engine, outbox, producer):
    """Also of a message without a key, which may go to any."""
    with producer.begin_transaction() as transaction:
        told = [producer.send(Message("orders", "1", key=key), transaction).message_queue for key in [None] * 5 + ["a"]]

    slots = [slot for slot, *_ in log_of(engine)]
    assert told == [MessageQueue("orders", slot) for slot in slots]
    assert slots[-1] == slot_of("a", 256)


def test_an_id_that_is_sent_twice_is_one_message(engine, outbox, producer):
    """A client that was not sure whether the first send worked."""
    message = Message("orders", "1", key="a")
    with producer.begin_transaction() as transaction:
        places = [transaction.store(message).queue_offset for _ in range(3)]
        transaction.send("orders", "2", key="a")

    assert (len(set(places)), halves(engine)) == (3, 4)
    assert arrived(outbox) == ["1", "2"]


def test_the_same_id_in_two_transactions_is_a_message_of_each(outbox, producer):
    message = Message("orders", "1")
    first, second = producer.begin_transaction(), producer.begin_transaction()
    first.store(message)
    second.store(message)
    first.rollback()
    second.commit()

    assert arrived(outbox) == ["1"]


@pytest.mark.parametrize("topics", [None, ("orders",), ("orders", "mail")])
def test_nobody_but_check_back_reads_half_messages(outbox, producer, topics):
    one(producer, "open")
    one(producer, "rolled back").rollback()
    one(producer, "committed").commit()

    found = delivered(outbox.database, name="other", topics=topics)

    assert [(message.topic, message.body) for message in found] == [("orders", b"committed")]


def test_messages_arrive_in_the_order_of_their_commits(outbox, producer):
    first, second, third = (one(producer, body) for body in "123")
    third.commit()
    first.commit()
    second.commit()

    assert arrived(outbox) == ["3", "1", "2"]
