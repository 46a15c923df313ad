"""Each message takes effect once per consumer, in the consumer's own transaction, whatever becomes of that."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from outbox import (
    Done,
    Inbox,
    Message,
    NoTransactionError,
    Outbox,
    Reject,
    Relay,
    Retry,
    TransactionAbortedError,
    Unavailable,
)
from outbox.consumer import inbox as inbox_module
from outbox.store.idempotency.inbox import PRUNED_AT_ONCE
from outbox.store.operations.check import tables_of
from outbox.telemetry.events import Repeated
from tests.support.effects import effects, handle_once, take_effect
from tests.support.handles import HANDLES
from tests.support.waiting import eventually

# In one transaction after the other


def test_a_message_is_handled_the_first_time_only(engine, inbox, message):
    assert [handle_once(engine, inbox, message) for _ in range(3)] == [True, False, False]
    assert effects(engine) == ["booked"]


def test_listeners_of_an_outbox_are_told_of_a_repetition(engine, message):
    outbox, told = Outbox(engine), list[Repeated]()
    outbox.listen(lambda event: told.append(event) if isinstance(event, Repeated) else None)

    for _ in range(2):
        with outbox.begin() as session:
            Inbox(outbox, "billing").once(session, message)

    assert told == [Repeated(database=outbox.database, consumer="billing")]


def test_a_second_time_within_the_same_transaction_counts_too(engine, inbox, message):
    with Session(engine) as session, session.begin():
        assert [inbox.once(session, message) for _ in range(2)] == [True, False]


def test_what_was_rolled_back_was_not_handled(engine, inbox, message):
    with Session(engine) as session:
        assert inbox.once(session, message)
        take_effect(session)
        session.rollback()

    assert handle_once(engine, inbox, message)
    assert effects(engine) == ["booked"]


def test_what_a_savepoint_rolled_back_was_not_handled(engine, inbox, message):
    with Session(engine) as session, session.begin():
        with session.begin_nested() as savepoint:
            assert inbox.once(session, message)
            savepoint.rollback()
        with session.begin_nested():
            assert inbox.once(session, message)
            take_effect(session)

    assert not handle_once(engine, inbox, message)
    assert effects(engine) == ["booked"]


def test_each_consumer_handles_a_message_for_itself(engine, message):
    with Session(engine) as session, session.begin():
        answers = [Inbox(engine, name).once(session, message) for name in ("billing", "mail", "Mail", "billing")]

    assert answers == [True, True, True, False]


@pytest.mark.parametrize("form", [lambda m: m, lambda m: m.message_id, lambda m: str(m.message_id)])
def test_a_message_is_known_by_its_id_however_it_is_given(engine, inbox, message, form):
    """A consumer behind a broker has only what the header says."""
    assert handle_once(engine, inbox, message)
    assert not handle_once(engine, inbox, form(message))


@pytest.mark.parametrize("handle", HANDLES)
def test_every_handle_that_send_takes_will_do(engine, inbox, message, handle):
    with HANDLES[handle](engine) as first:
        assert inbox.once(first, message)
        first.commit()
    with HANDLES[handle](engine) as second:
        assert not inbox.once(second, message)


def test_a_connection_of_the_driver_will_do(pg_engine, message):
    inbox, answers = Inbox(pg_engine, "billing"), []

    for _ in range(2):
        with psycopg.connect(pg_engine.url.set(drivername="postgresql").render_as_string(hide_password=False)) as each:
            answers.append(inbox.once(each, message))

    assert answers == [True, False]


def test_a_message_of_the_outbox_is_handled_where_it_was_written(engine, inbox):
    """The message that a handler is given and the id that its writer got are the same."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        id = outbox.send(session, "orders", b"1")
    Relay(outbox, inbox.idempotent(lambda session, message: take_effect(session))).until_empty()

    assert not handle_once(engine, inbox, id)
    assert effects(engine) == ["booked"]


# What is refused


def test_without_a_transaction_it_is_refused(engine, inbox, message):
    """The row would outlive a rollback of the effect."""
    automatic = create_engine(engine.url, isolation_level="AUTOCOMMIT")

    with automatic.connect() as connection, pytest.raises(NoTransactionError):
        inbox.once(connection, message)
    automatic.dispose()


def test_a_wrong_handle_is_answered_with_the_right_ones(engine, inbox, message):
    fix = r"once takes a Session, .*, not Engine; begin a transaction: with engine\.begin\(\) as connection$"
    with pytest.raises(TypeError, match=fix):
        inbox.once(engine, message)


@pytest.mark.parametrize("id", ["", "order-1", b"x", 7, None], ids=repr)
def test_what_is_no_message_id_is_refused(engine, inbox, id):
    with Session(engine) as session, session.begin(), pytest.raises((TypeError, ValueError), match="UUID"):
        inbox.once(session, id)


@pytest.mark.parametrize("name", ["", "a\0", "x" * 256, "\ud800", 7], ids=repr)
def test_a_consumer_has_a_name_that_can_be_stored(engine, message, name):
    with pytest.raises((TypeError, ValueError), match="consumer"):
        Inbox(engine, name)


@pytest.mark.parametrize("retention", [timedelta(0), timedelta(days=-1), timedelta.max, 7], ids=str)
def test_a_retention_is_a_span_of_time(engine, retention):
    with pytest.raises((TypeError, ValueError), match="retention"):
        Inbox(engine, "billing", retention=retention)


def test_a_failed_statement_cannot_make_a_message_look_handled(pg_engine):
    """PostgreSQL would answer this commit with a rollback, and the message would be acknowledged without effect."""
    inbox, message = Inbox(pg_engine, "billing"), Message("orders", b"1")

    with pytest.raises(TransactionAbortedError), pg_engine.begin() as connection:
        inbox.once(connection, message)
        with pytest.raises(Exception, match="nonsense"):
            connection.execute(text("SELECT nonsense"))


# The decorator


def test_a_decorated_handler_opens_its_own_transaction_and_commits(engine, inbox, message):
    @inbox.idempotent
    def book(session: Session, message: Message) -> str:
        take_effect(session, message.text())
        return "receipt"

    assert [book(message) for _ in range(3)] == ["receipt", None, None]
    assert effects(engine) == ["1"]


def test_what_a_handler_raises_rolls_everything_back(engine, inbox, message):
    answers = iter([LookupError("no such order"), None])

    @inbox.idempotent
    def book(session: Session, message: Message) -> None:
        take_effect(session)
        if (error := next(answers)) is not None:
            raise error

    with pytest.raises(LookupError, match="no such order"):
        book(message)
    assert effects(engine) == []
    book(message)
    assert effects(engine) == ["booked"]


@pytest.mark.parametrize("verdict", [Retry("later"), Reject("never"), Unavailable("not now")], ids=repr)
def test_a_verdict_that_is_not_done_undoes_the_try_so_that_the_next_counts(engine, inbox, message, verdict):
    """A retry, or a dead letter that is replayed, must not be taken for a repetition."""
    answers = iter([verdict, Done()])

    @inbox.idempotent
    def book(session: Session, message: Message) -> Any:
        take_effect(session)
        return next(answers)

    assert [book(message), book(message), book(message)] == [verdict, Done(), None]
    assert effects(engine) == ["booked"]


def test_a_handler_joins_nobody_and_may_be_joined(engine, inbox, message):
    """On the same outbox, what the handler calls is part of its transaction, messages included."""
    outbox = Outbox(engine)

    @outbox.transactional
    def announce(session: Session) -> None:
        outbox.send(session, "booked", b"")

    @Inbox(outbox, "billing").idempotent
    def book(session: Session, message: Message) -> Retry:
        announce()
        return Retry("not yet")

    book(message)

    assert sent(engine) == 0


def sent(engine: Engine) -> int:
    """How many messages the log holds."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outbox_message")).scalar_one())


def test_a_failed_statement_that_a_handler_hides_is_an_error_all_the_same(pg_engine):
    inbox, message = Inbox(pg_engine, "billing"), Message("orders", b"1")

    @inbox.idempotent
    def hide(session: Session, message: Message) -> None:
        with pytest.raises(Exception, match="nonsense"):
            session.connection().execute(text("SELECT nonsense"))

    for _ in range(2):
        with pytest.raises(TransactionAbortedError):
            hide(message)


@pytest.mark.parametrize("bind", ["Engine", "sessionmaker", "Outbox"])
def test_an_inbox_is_made_on_whatever_the_transactions_are_on(engine, inbox, message, bind):
    binds: dict[str, Any] = {"Engine": engine, "sessionmaker": sessionmaker(engine), "Outbox": Outbox(engine)}
    handle = Inbox(binds[bind], "billing").idempotent(lambda session, message: take_effect(session))

    handle(message)
    handle(message)

    assert effects(engine) == ["booked"]


def test_a_handler_is_a_function_whose_first_argument_is_the_session(inbox):
    class Handlers:
        def method(self, session: Session, message: Message) -> None:
            """Its first argument is itself."""

    def generator(session: Session, message: Message) -> Any:
        yield

    for wrong in (Handlers.method, generator):
        with pytest.raises(TypeError, match=r"handler|session"):
            inbox.idempotent(wrong)  # type: ignore[arg-type, call-overload, unused-ignore]


# Retention


def remembered(engine: Engine) -> int:
    """How many messages the inbox holds."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outbox_inbox")).scalar_one())


@pytest.mark.parametrize("retention", [timedelta(days=7), timedelta(hours=1), timedelta(microseconds=500_000)], ids=str)
def test_a_message_is_remembered_until_its_retention_is_over(engine, message, retention):
    inbox = Inbox(engine, "billing", retention=retention)

    with Session(engine) as session, session.begin():
        inbox.once(session, message)

    table = tables_of(Outbox(engine).database).inbox
    with engine.connect() as connection:
        row = connection.execute(table.select()).one()
    assert row.expires_at - row.handled_at == retention


def test_pruning_forgets_what_is_over_and_nothing_else(engine, inbox, message):
    old = [Message("orders", b"").message_id for _ in range(2 * PRUNED_AT_ONCE + 1)]
    with engine.begin() as connection:
        for id in old:
            inbox.once(connection, id)
        connection.execute(text("UPDATE outbox_inbox SET expires_at = handled_at"))
        inbox.once(connection, message)

    assert inbox.prune() == len(old)
    assert remembered(engine) == 1
    assert not handle_once(engine, inbox, message)


def test_an_inbox_without_a_relay_deletes_what_is_over_by_itself(engine, monkeypatch):
    """On a thread, so that the handler waits for nothing. The inbox of an Outbox leaves it to the relays."""
    monkeypatch.setattr(inbox_module, "PRUNE_SECONDS", 0.0)
    of_an_outbox = Inbox(Outbox(engine), "outbox", retention=timedelta(milliseconds=1))
    own = Inbox(engine, "own")
    for _ in range(2):
        with engine.begin() as connection:
            of_an_outbox.once(connection, Message("orders", b""))
            connection.execute(text("UPDATE outbox_inbox SET expires_at = handled_at"))
    before = remembered(engine)
    with engine.begin() as connection:
        own.once(connection, Message("orders", b""))

    assert before == 2
    assert eventually(lambda: remembered(engine) == 1)


def test_two_that_prune_at_once_do_not_wait_for_each_other(pg_engine):
    inbox = Inbox(pg_engine, "billing")
    ids = [Message("orders", b"").message_id for _ in range(10)]
    with pg_engine.begin() as connection:
        for id in ids:
            inbox.once(connection, id)
        connection.execute(text("UPDATE outbox_inbox SET expires_at = handled_at"))

    with pg_engine.connect() as other:
        locked = other.execute(text("SELECT message_id FROM outbox_inbox LIMIT 3 FOR UPDATE")).all()
        pruned = inbox.prune()
        other.rollback()

    assert (len(locked), pruned, inbox.prune()) == (3, 7, 3)


def test_rows_that_go_during_a_prune_are_no_error_whatever_the_isolation_level_of_the_role(pg_engine):
    """The prune waits between its snapshot and its first row, and another process deletes the row meanwhile."""
    options = {"options": r"-c default_transaction_isolation=repeatable\ read"}
    inbox = Inbox(create_engine(pg_engine.url, connect_args=options), "billing")
    with pg_engine.begin() as connection:
        Inbox(pg_engine, "billing").once(connection, Message("orders", b""))
        connection.execute(text("UPDATE outbox_inbox SET expires_at = handled_at"))
        connection.execute(
            text("""
                CREATE FUNCTION stand() RETURNS trigger LANGUAGE plpgsql AS
                    $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
                CREATE TRIGGER stand BEFORE DELETE ON outbox_inbox FOR EACH STATEMENT EXECUTE FUNCTION stand()
            """)
        )

    with pg_engine.connect() as other, ThreadPoolExecutor(1) as pool:
        other.execute(text("SELECT pg_advisory_xact_lock(7)"))
        pruned = pool.submit(inbox.prune)
        assert eventually(lambda: stands(pg_engine))
        other.execute(text("DELETE FROM outbox_inbox"))
        other.commit()

    assert pruned.result(60) == 0


def stands(engine: Engine) -> bool:
    """Return whether anybody waits for an advisory lock."""
    with engine.connect() as connection:
        waiting = connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
    return bool(waiting)
