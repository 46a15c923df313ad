"""Transactions of the 5.x shape: any number of messages, one verdict."""

import threading

import pytest
from sqlalchemy import create_engine as plain_engine
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.errors import MQClientError, VerdictStandsError
from outbox.rocketmq import LocalTransactionState, TransactionResolution
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
    one,
    producer_of,
    verdicts,
)
from tests.support.waiting import eventually

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


# Producers


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
