"""When a transaction is asked about: to the millisecond, by the clock of the database, which stands still here."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox.model.message import Message
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Declaration
from outbox.model.verdict import DONE, Reject, Retry, Verdict
from outbox.rocketmq import TransactionMQProducer
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import Checker, CheckPolicy
from outbox.schema import record_metadata
from outbox.store.database import Database
from outbox.worker.policy import HandlerPolicy
from tests.rocketmq.parts import CHECK, COMMIT, GROUP, UNKNOW, Listener, arrived, half_rows, parked, verdicts
from tests.support.dialects import outbox_of, varied
from tests.support.orders import Base
from tests.support.readers import Worker, job

SECOND, MILLISECOND = 1000, timedelta(milliseconds=1)
HOURS_72 = 72 * 3600 * SECOND
IMMUNE = "CHECK_IMMUNITY_TIME_IN_SECONDS"


class Stepped:
    """An outbox whose database has a clock that stands still until it is set; in milliseconds from `began` on."""

    def __init__(self, engine: Engine, began: datetime = datetime(2026, 7, 1, 12, 0, 0, 123000, UTC)) -> None:
        self.engine = engine
        self.began = began
        kind = {"postgresql": "timestamptz", "sqlite": "text"}[engine.dialect.name]
        with engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE IF NOT EXISTS test_clock (at {kind})"))
            connection.execute(text("DELETE FROM test_clock"))
            connection.execute(text("INSERT INTO test_clock VALUES (:at)"), {"at": self._at(0)})
        dialect = varied(Database(engine).dialect, now="(SELECT at FROM test_clock)")
        self.outbox = outbox_of(engine, dialect)

    def set(self, milliseconds: int) -> None:
        """It is so late now."""
        with self.engine.begin() as connection:
            connection.execute(text("UPDATE test_clock SET at = :at"), {"at": self._at(milliseconds)})

    def _at(self, milliseconds: int) -> Any:
        moment = self.began + milliseconds * MILLISECOND
        return moment.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if self.engine.dialect.name == "sqlite" else moment

    def broker(self) -> Broker:
        """The part that RocketMQ's broker has."""
        return Broker(self.outbox, connections=1)

    def verdicts(self, rows: list[Message], *ages: int, answer: Any = UNKNOW, **options: Any) -> list[Verdict]:
        """What a checker makes of the first half message at each of these moments."""
        business = options.pop("business", None)
        listener = Listener(answer=answer)
        policy = CheckPolicy(**options)
        checker = Checker(self.broker(), GROUP, policy, listener.check_local_transaction, business, spread=lambda: 0.0)
        found: list[Verdict] = []
        for age in ages:
            self.set(age)
            found.append(checker.check(rows)[0])
        checker.close()
        return found


@pytest.fixture
def stepped(engine):
    made = Stepped(engine)
    yield made
    made.outbox.close()


@pytest.fixture
def producer(stepped):
    made = TransactionMQProducer(GROUP, stepped.outbox, Listener())
    yield made
    made.shutdown()


def begun(producer, way="listener", **headers):
    """A transaction with a message."""
    transaction = producer.begin_transaction(verdict=way)
    transaction.send("orders", "1", headers=headers)
    return transaction


def immune(milliseconds: int) -> Retry:
    """Not asked; nothing counts."""
    return Retry("immune", milliseconds * MILLISECOND, counts=False)


ASKED = Retry("UNKNOWN", timedelta(seconds=30))


# The rules, at the millisecond


@pytest.mark.parametrize(
    ("header", "limit"),
    [(None, 6), ("0", 6), ("1", 6), ("5", 6), ("6", 6), ("007", 7), ("7", 7), ("600", 600), ("604800", 604_800)],
)
def test_an_age_that_equals_the_immunity_is_immune_still(stepped, producer, header, limit):
    """What is asked for less than the default counts as that."""
    begun(producer, **({} if header is None else {IMMUNE: header}))
    rows, end = half_rows(stepped.outbox), limit * SECOND

    found = stepped.verdicts(rows, 0, end - 1, end, end + 1, age_limit=timedelta(days=30))

    assert found == [immune(end + 1), immune(2), immune(1), ASKED]


@pytest.mark.parametrize("seconds", [0, 0.5, 3600])
def test_the_timeout_is_that_of_the_policy(stepped, producer, seconds):
    begun(producer)
    rows, end, timeout = half_rows(stepped.outbox), int(seconds * SECOND), timedelta(seconds=seconds)

    found = stepped.verdicts(rows, end, end + 1, transaction_timeout=timeout)

    assert found == [immune(1), ASKED]


def test_ages_are_exact_at_any_time_of_any_day(stepped, producer):
    """A number of days with a fraction is not, and would be a little more or less than what was waited."""
    wrong = []
    for days in range(1, 15):
        stepped.began += timedelta(days=1, milliseconds=997 * days)
        stepped.set(0)
        transaction = begun(producer)
        rows = [row for row in half_rows(stepped.outbox) if row.key == transaction.id]
        found = stepped.verdicts(rows, 6 * SECOND - 1, 6 * SECOND, 6 * SECOND + 1)
        if found != [immune(2), immune(1), ASKED]:
            wrong.append((days, found))

    assert wrong == []


def test_the_youngest_message_of_a_transaction_says_how_long_it_is_immune(stepped, producer):
    transaction = begun(producer)
    rows = half_rows(stepped.outbox)
    stepped.set(5 * SECOND)
    transaction.send("orders", "2")
    transaction.send("orders", "3", headers={IMMUNE: "7"})

    found = stepped.verdicts(rows, 6 * SECOND + 1, 12 * SECOND, 12 * SECOND + 1)

    assert found == [immune(6 * SECOND), immune(1), ASKED]


def test_a_transaction_as_old_as_the_limit_is_asked_about_and_an_older_one_is_given_up(stepped, producer):
    begun(producer)
    rows = half_rows(stepped.outbox)

    found = stepped.verdicts(rows, HOURS_72 - 1, HOURS_72, HOURS_72 + 1)

    assert found == [ASKED, ASKED, Reject("given up: older than 3 days, 0:00:00")]


def test_while_it_is_immune_no_transaction_is_too_old(stepped, producer):
    begun(producer, **{IMMUNE: "604800"})
    rows = half_rows(stepped.outbox)

    found = stepped.verdicts(rows, HOURS_72 + 1, 604_800 * SECOND, 604_800 * SECOND + 1)

    assert found == [
        immune(604_800 * SECOND - HOURS_72),
        immune(1),
        Reject("given up: older than 3 days, 0:00:00"),
    ]


@pytest.mark.parametrize("way", ["join", "record"])
@pytest.mark.parametrize("committed", [True, False])
def test_what_a_database_can_say_is_never_too_old(engine, stepped, way, committed):
    """After all checkers were away for longer than the limit; of a joined transaction the op itself is the delivery."""
    Base.metadata.create_all(engine)
    record_metadata().create_all(engine)
    producer = TransactionMQProducer(GROUP, stepped.outbox, business=engine)
    transaction = begun(producer, way)
    rows = half_rows(stepped.outbox)
    if committed:
        with engine.begin() as connection:
            transaction.join(connection)
    business = Business(engine, connections=1)

    found = stepped.verdicts(rows, HOURS_72 + 1, business=business)
    producer.shutdown()
    business.close()

    assert (found, verdicts(engine)) == ([DONE], {transaction.id: "commit" if committed else "rollback"})
    assert arrived(stepped.outbox) == (["1"] if committed else [])


def test_what_a_database_does_not_say_is_given_up_at_the_limit(stepped):
    """Its business database is not known here."""
    producer = TransactionMQProducer(GROUP, stepped.outbox, business=stepped.engine)
    begun(producer, "record")
    rows = half_rows(stepped.outbox)

    found = stepped.verdicts(rows, HOURS_72, HOURS_72 + 1)
    producer.shutdown()

    assert [type(each) for each in found] == [Retry, Reject]


# With a worker, which parks what is to be asked again


class Polls:
    """The check service, polled at moments; its own grace apart, which counts by another clock."""

    def __init__(self, stepped: Stepped, answer: Any = UNKNOW, **policy: Any) -> None:
        self.stepped = stepped
        self.listener = Listener(answer=answer)
        policy_of = CheckPolicy(**policy)
        self.checker = Checker(
            stepped.broker(), GROUP, policy_of, self.listener.check_local_transaction, spread=lambda: 0.0
        )
        with stepped.engine.begin() as connection:
            connection.execute(text("UPDATE outbox_subscription SET grace_ms = 0 WHERE name = :name"), {"name": CHECK})
        declared = Declaration(
            name=CHECK, kind="check", destination=CHECK, topics=("RMQ_SYS_TRANS_HALF_TOPIC",), tags=(GROUP,)
        )
        rules = HandlerPolicy(retry=RetryPolicy(attempts=policy_of.check_max))
        self.worker = Worker(stepped.outbox.database, [job(declared, self.checker.check, policy=rules)])

    def at(self, *moments: int) -> list[int]:
        """Poll at these moments; return those at which somebody was asked."""
        asked = []
        for moment in moments:
            self.stepped.set(moment)
            before = len(self.listener.asked)
            self.worker.until_empty()
            asked += [moment] * (len(self.listener.asked) - before)
        self.checker.close()
        return asked


def around(*moments: int) -> list[int]:
    """1 ms before each moment, at it, and 1 ms after."""
    return [each + step for each in moments for step in (-1, 0, 1)]


def test_questions_come_an_interval_apart_and_so_many_of_them(engine, stepped, producer):
    transaction = begun(producer)
    polls = Polls(stepped, check_max=3)
    first = 6 * SECOND + 1
    second, third = first + 30 * SECOND, first + 60 * SECOND

    asked = polls.at(0, 1, *around(6 * SECOND, second, third), third + 30 * SECOND, third + 60 * SECOND)

    assert (asked, parked(engine)) == ([first, second, third], [("dead", 3)])
    transaction.commit()
    polls.at(third + 90 * SECOND)
    assert (parked(engine), arrived(stepped.outbox)) == ([], ["1"])


def test_immunity_delays_the_first_question_and_counts_nothing(engine, stepped, producer):
    """Polled every 30 s, as the real broker does, which gives it up unasked after 450 s."""
    begun(producer, **{IMMUNE: "600"})
    polls = Polls(stepped, check_max=15)

    asked = polls.at(*range(0, 600 * SECOND, 60 * SECOND), *around(600 * SECOND))

    assert (asked, parked(engine)) == ([600 * SECOND + 1], [("retry", 1)])
    assert [message.headers["TRANSACTION_CHECK_TIMES"] for message in polls.listener.asked] == ["1"]


def test_a_commit_while_it_is_immune_ends_the_questions(engine, stepped, producer):
    transaction = begun(producer, **{IMMUNE: "120"})
    polls = Polls(stepped, answer=COMMIT)
    before = polls.at(30 * SECOND)
    transaction.commit()

    after = polls.at(*around(120 * SECOND), 150 * SECOND)

    assert (before, after, parked(engine), arrived(stepped.outbox)) == ([], [], [], ["1"])


def test_a_transaction_that_grows_too_old_between_two_questions_is_given_up(engine, stepped, producer):
    begun(producer)
    polls = Polls(stepped, check_max=15)
    last = HOURS_72 - 30 * SECOND

    asked = polls.at(6 * SECOND + 1, last, HOURS_72, HOURS_72 + 1, HOURS_72 + 60 * SECOND)
    again = polls.at(HOURS_72 + 120 * SECOND)

    assert (asked, again) == ([6 * SECOND + 1, last, HOURS_72], [])
    assert [state for state, _ in parked(engine)] == ["dead"]
