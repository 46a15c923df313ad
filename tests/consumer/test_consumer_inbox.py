"""With `inbox` a function works in a transaction of the consumer, in which the message is remembered as handled."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import DatabaseError, Message, NoTransactionError, Outbox, Reject, Retry
from tests.support.consumers import consumer_of, parked, until_over, write
from tests.support.effects import billing, effects, take_effect
from tests.support.handles import awaited


@pytest.fixture
def outbox(engine) -> Iterator[Outbox]:
    """An outbox beside a table of effects."""
    billing(engine)
    made = Outbox(engine)
    yield made
    made.close()


def inboxes(outbox: Outbox) -> int:
    """How many messages are remembered."""
    with outbox.engine.connect() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM outbox_inbox WHERE consumer = 'billing'")) or 0)


def test_effect_and_inbox_row_are_committed_together(outbox):
    write(outbox, "1", "2", key="k")
    consumer = consumer_of(outbox, inbox=True)

    @consumer.on("orders")
    def handle(session: Session, message: Message) -> None:
        take_effect(session, message.body.decode())

    consumer.until_empty()

    assert (effects(outbox.engine), inboxes(outbox), parked(outbox)) == (["1", "2"], 2, [])


ANSWERS: list[tuple[Any, tuple[str, int, str]]] = [
    (ValueError("no"), ("retry", 1, "ValueError: no")),
    (Retry("later"), ("retry", 1, "later")),
    (Reject("never"), ("dead", 1, "never")),
]


@pytest.mark.parametrize(("answer", "parking"), ANSWERS)
def test_a_failure_takes_the_effect_back(outbox, answer, parking):
    write(outbox, "1")
    consumer = consumer_of(outbox, inbox=True)

    @consumer.on("orders")
    def handle(session: Session, message: Message) -> Any:
        take_effect(session)
        if isinstance(answer, Exception):
            raise answer
        return answer

    consumer.once()

    assert (effects(outbox.engine), inboxes(outbox), parked(outbox)) == ([], 0, [parking])


def commits(session: Session) -> Any:
    session.commit()
    raise ValueError("the second half")


def commits_in_a_savepoint(session: Session) -> Any:
    with session.begin_nested():
        take_effect(session)
    session.commit()


def commits_below(session: Session) -> Any:
    session.connection().commit()
    raise ValueError("the second half")


def commits_the_root(session: Session) -> Any:
    root = session.connection().get_transaction()
    assert root is not None
    root.commit()


def commits_below_and_goes_on(session: Session) -> Any:
    with suppress(NoTransactionError):
        session.connection().commit()


async def forgotten() -> None:
    """Awaited by nobody."""


ENDED = "NoTransactionError: the inbox ends the transaction when the handler has returned"
ENDS: list[tuple[Callable[[Session], Any], str]] = [
    (commits, ENDED),
    (commits_in_a_savepoint, ENDED),
    (commits_below, ENDED),
    (commits_the_root, ENDED),
    (commits_below_and_goes_on, ENDED),
    (Session.close, ENDED),
    (Session.rollback, ENDED),
    (lambda session: forgotten(), "handle returned a coroutine, which nobody awaits"),
    (lambda session: False, "handle returned bool; let the handler return"),
]


@pytest.mark.parametrize(("end", "error"), ENDS)
def test_what_is_no_regular_end_of_a_function_is_a_failure_each_time(outbox, end, error):
    """Otherwise a message would count as handled, and nothing, or half of it, would have happened."""
    write(outbox, "1")
    consumer, attempts = consumer_of(outbox, inbox=True), list[int]()

    @consumer.on("orders")
    def handle(session: Session, message: Message) -> Any:
        attempts.append(message.attempt)
        take_effect(session)
        return end(session)

    until_over(consumer)

    ((state, _, found),) = parked(outbox)
    assert (state, error in (found or ""), attempts) == ("dead", True, [1, 2, 3])
    assert (effects(outbox.engine), inboxes(outbox)) == ([], 0)


def commits_in_the_driver(session: Session) -> Any:
    session.connection().connection.commit()


def commits_in_words(session: Session) -> Any:
    session.connection().exec_driver_sql("COMMIT")


def fails_after_a_commit(session: Session) -> Any:
    session.connection().connection.commit()
    session.execute(text("SELECT 1"))
    raise ValueError("the second half")


def rejects_after_a_commit(session: Session) -> Any:
    session.connection().exec_driver_sql("COMMIT")
    return Reject("the second half")


@pytest.mark.parametrize("end", [commits_in_the_driver, commits_in_words, fails_after_a_commit, rejects_after_a_commit])
def test_a_commit_that_only_the_driver_sees_is_a_failure_each_time(outbox, end):
    """Its half of the effect is there; at least the message does not count as handled."""
    write(outbox, "1")
    consumer, attempts = consumer_of(outbox, inbox=True), list[int]()

    @consumer.on("orders")
    def handle(session: Session, message: Message) -> Any:
        attempts.append(message.attempt)
        take_effect(session, str(message.attempt))
        return end(session)

    until_over(consumer)

    ((state, _, error),) = parked(outbox)
    assert (state, ENDED in (error or ""), attempts) == ("dead", True, [1, 2, 3])
    assert (effects(outbox.engine), inboxes(outbox)) == (["1", "2", "3"], 0)


def test_a_coroutine_s_commit_below_its_session_is_a_failure_each_time(outbox):
    write(outbox, "1")
    consumer = consumer_of(Outbox(awaited(outbox.engine)), inbox=True)

    @consumer.on("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        connection = await session.connection()
        if message.attempt == 1:
            await connection.commit()
        else:
            await connection.exec_driver_sql("COMMIT")

    until_over(consumer)
    consumer.close()

    ((state, attempts, error),) = parked(outbox)
    assert (state, attempts, ENDED in (error or ""), inboxes(outbox)) == ("dead", 3, True, 0)


def test_a_savepoint_of_a_function_may_end(outbox):
    write(outbox, "1")
    consumer = consumer_of(outbox, inbox=True)

    @consumer.on("orders")
    def handle(session: Session, message: Message) -> None:
        with session.begin_nested():
            take_effect(session, "kept")
        savepoint = session.begin_nested()
        take_effect(session, "taken back")
        savepoint.rollback()

    consumer.until_empty()

    assert (effects(outbox.engine), inboxes(outbox), parked(outbox)) == (["kept"], 1, [])


def test_a_message_that_comes_again_after_its_commit_takes_no_effect(outbox):
    """The worker is interrupted between the handler's commit and its own settle."""
    write(outbox, "1", "2")
    calls: list[bytes] = []

    class Interrupted(BaseException):
        """What a crash point raises here."""

    def crash(name: str) -> None:
        if name == "worker.before_settle" and calls:
            raise Interrupted

    def run() -> None:
        consumer = consumer_of(outbox, inbox=True)

        @consumer.on("orders")
        def handle(session: Session, message: Message) -> None:
            calls.append(message.body)
            take_effect(session, message.body.decode())

        consumer.until_empty()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outbox.worker.settle.crash_point", crash)
        with pytest.raises(Interrupted):
            run()
    run()

    assert (calls, effects(outbox.engine)) == ([b"1", b"2"], ["1", "2"])


def test_a_message_sent_by_the_function_is_part_of_its_transaction(outbox):
    write(outbox, "1")
    consumer = consumer_of(outbox, inbox=True, topics=["orders"])

    @consumer.on("orders")
    def handle(session: Session, message: Message) -> None:
        outbox.send(session, "invoices", message.body)
        if message.attempt == 1:
            raise ValueError("not yet")

    until_over(consumer)

    with outbox.engine.connect() as connection:
        assert connection.scalars(text("SELECT topic FROM outbox_message ORDER BY id")).all() == ["orders", "invoices"]


def test_a_coroutine_gets_a_session_to_await(outbox):
    write(outbox, "1", "2")
    consumer = consumer_of(Outbox(awaited(outbox.engine)), inbox=True, concurrency=2)

    @consumer.on("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.execute(text("INSERT INTO effect (what) VALUES (:what)"), {"what": message.body.decode()})
        if message.body == b"1" and message.attempt == 1:
            raise ValueError("not yet")

    until_over(consumer)
    consumer.close()

    assert (effects(outbox.engine), inboxes(outbox), parked(outbox)) == (["1", "2"], 2, [])


def test_a_coroutine_that_commits_fails_each_time(outbox):
    write(outbox, "1")
    consumer = consumer_of(Outbox(awaited(outbox.engine)), inbox=True)

    @consumer.on("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.execute(text("INSERT INTO effect (what) VALUES ('half')"))
        await session.commit()

    until_over(consumer)
    consumer.close()

    ((state, attempts, error),) = parked(outbox)
    assert (state, attempts, ENDED in (error or "")) == ("dead", 3, True)
    assert (effects(outbox.engine), inboxes(outbox)) == ([], 0)


def test_two_groups_take_an_effect_each(outbox):
    write(outbox, "1")
    for name in ("billing", "mail"):
        consumer = consumer_of(outbox, name, inbox=True)
        consumer.on("orders")(lambda session, _message, name=name: take_effect(session, name))
        consumer.until_empty()

    assert effects(outbox.engine) == ["billing", "mail"]


def test_a_function_of_the_other_kind_is_refused_before_anything_is_opened(outbox):
    async def coroutine(session: AsyncSession, message: Message) -> None:
        """Never called."""

    with pytest.raises(DatabaseError, match="made on an Engine that blocks; use with"):
        consumer_of(outbox, inbox=True).on("orders")(coroutine)
    with pytest.raises(DatabaseError, match="made on an AsyncEngine; use async with"):
        consumer_of(Outbox(awaited(outbox.engine)), inbox=True).on("orders")(lambda _session, _message: None)


@pytest.mark.parametrize("function", [lambda: None, lambda _message: None])
def test_a_function_without_a_session_is_refused(outbox, function):
    with pytest.raises(TypeError, match=r"let the function take \(session, message\)"):
        consumer_of(outbox, inbox=True).on("orders")(function)
