"""Races of a business transaction with those who look for its verdict, or end its half messages meanwhile."""

import threading
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Connection, Engine, text

from outbox.errors import MQClientError, VerdictStandsError
from outbox.model.verdict import DONE, Retry
from outbox.rocketmq import TransactionResolution
from tests.rocketmq.parts import (
    COMMIT,
    HOUR,
    half_rows,
    verdicts,
)
from tests.rocketmq.places import INSERT, UNDER_WAY, place_on
from tests.support.readers import waiting
from tests.support.sessions import terminate
from tests.support.waiting import eventually

# The table of races: the business is at it while a checker looks


def test_a_business_under_way_is_waited_for_and_not_counted(place):
    """Then it commits, and the next look finds that out."""
    transaction = place.begun()
    rows = half_rows(place.outbox)
    with place.business.connect() as business:
        transaction.join(business)
        business.execute(INSERT)
        (found,) = place.look(rows)
        business.commit()
    (after,) = place.look(rows)

    assert isinstance(found, Retry)
    why = "the business database does not say" if place.way == "record" else "its business transaction is under way"
    assert (found.counts, found.after, found.error.partition(":")[0]) == (False, HOUR, why)
    assert (after, verdicts(place.outbox.engine)) == (DONE, {transaction.id: "commit"})
    assert place.outcome() == (["ann"], ["1"])


@pytest.mark.parametrize("how", ["rolled back", "killed"])
def test_a_business_that_came_to_nothing_is_fenced(place, how):
    transaction = place.begun()
    rows = half_rows(place.outbox)
    business = place.business.connect()
    transaction.join(business)
    business.execute(INSERT)
    if how == "killed":
        kill(place.business, business)
    else:
        business.rollback()
    assert eventually(lambda: place.look(rows) == [DONE])
    with suppress(Exception):
        business.commit()
    business.close()

    assert verdicts(place.outbox.engine) == {transaction.id: "rollback"}
    assert place.outcome() == ([], [])


def kill(engine: Engine, business: Connection) -> None:
    """Have the connection die in the middle of its transaction."""
    if engine.dialect.name == "sqlite":
        business.connection.dbapi_connection.close()  # type: ignore[union-attr]
        return
    pid = business.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
    terminate(engine, "pid = :pid", pid=pid)


@pytest.mark.parametrize("has_read", [True, False])
def test_a_fence_that_was_first_is_met_by_the_business(pg_engine, place, has_read):
    """Also by one that has begun before, and only read so far."""
    if place.business.dialect.name == "sqlite":
        # Of engines that we make, a transaction has the file from its begin on: nobody fences meanwhile.
        has_read = False
    transaction = place.begun()
    with place.business.connect() as business:
        if has_read:
            business.execute(text("SELECT * FROM orders")).all()
        place.check()
        with pytest.raises(VerdictStandsError) as raised:
            transaction.join(business)

    assert (raised.value.transaction_id, raised.value.verdict) == (transaction.id, "rollback")
    assert place.outcome() == ([], [])


@pytest.mark.parametrize("ends", ["commit", "rollback"])
@pytest.mark.parametrize("way", ["join", "record"])
def test_a_business_waits_for_a_fence_that_is_not_committed(pg_engine, way, ends):
    with place_on(pg_engine, way, pg_engine) as place:
        transaction = place.begun()
        table, column = ("outbox_record", "verdict") if way == "record" else ("outbox_op", "op")
        by = "" if way == "record" else ", decided_by"
        fence = text(
            f"INSERT INTO {table} (transaction_id, {column}{by}, decided_at) VALUES"
            f" (:id, 'rollback'{', :by' if by else ''}, now())"
        )
        raised: list[Exception] = []

        def do() -> None:
            try:
                with pg_engine.connect() as business:
                    transaction.join(business)
                    business.execute(INSERT)
                    business.commit()
            except Exception as error:
                raised.append(error)

        with pg_engine.connect() as checker:
            checker.execute(fence, {"id": transaction.id, **({"by": "check"} if by else {})})
            thread = threading.Thread(target=do)
            thread.start()
            assert eventually(lambda: waiting(pg_engine) == 1)
            getattr(checker, ends)()
        thread.join()

        assert [type(error) for error in raised] == ([VerdictStandsError] if ends == "commit" else [])
        assert place.outcome() == (([], []) if ends == "commit" else (["ann"], ["1"]))


def test_two_checkers_of_a_business_that_never_comes_agree(place):
    transaction = place.begun()
    rows = half_rows(place.outbox)
    found: list[Any] = []
    looks = [threading.Thread(target=lambda: found.append(place.look(rows))) for _ in range(4)]
    for look in looks:
        look.start()
    for look in looks:
        look.join()
    again = place.look(rows)

    assert again == [DONE]
    assert [DONE] in found
    assert verdicts(place.outbox.engine) == {transaction.id: "rollback"}


def test_h6_two_checkers_wait_for_a_business_that_rolls_back(pg_engine, monkeypatch):
    monkeypatch.setattr("outbox.rocketmq.checker.PATIENCE_SECONDS", 30.0)
    with place_on(pg_engine, "join", pg_engine) as place:
        transaction = place.begun()
        rows = half_rows(place.outbox)
        found: list[Any] = []
        with pg_engine.connect() as business:
            transaction.join(business)
            looks = [threading.Thread(target=lambda: found.append(place.look(rows))) for _ in range(3)]
            for look in looks:
                look.start()
            assert eventually(lambda: waiting(pg_engine) == 3)
            business.rollback()
        for look in looks:
            look.join()

        assert (found, verdicts(pg_engine)) == ([[DONE]] * 3, {transaction.id: "rollback"})


def test_a_file_that_is_busy_is_no_verdict(sqlite_engine):
    """Whoever has it, perhaps not even the business."""
    with place_on(sqlite_engine, "join", sqlite_engine) as place:
        transaction = place.begun()
        rows = half_rows(place.outbox)
        with sqlite_engine.connect() as somebody:
            somebody.execute(text("SELECT 1"))
            found = place.look(rows)
        before = verdicts(sqlite_engine)

        assert (found, before) == ([UNDER_WAY], {})
        assert (place.look(rows), verdicts(sqlite_engine)) == ([DONE], {transaction.id: "rollback"})


# Who else may end such a transaction


def test_a_word_does_not_commit_what_a_business_transaction_decides(place):
    """Its business may still be rolled back, by a fence that came first, say."""
    transaction = place.begun()
    errors = []
    for end in (transaction.commit, lambda: place.producer.end_transaction(transaction.id, COMMIT)):
        with pytest.raises(MQClientError) as raised:
            end()
        errors.append(str(raised.value))

    assert errors[0] == errors[1]
    assert (verdicts(place.outbox.engine), place.outcome()) == ({}, ([], []))


def test_a_word_that_rolls_back_keeps_the_business_from_committing(place):
    for by_itself in (True, False):
        transaction = place.begun()
        if by_itself:
            transaction.rollback()
        else:
            place.producer.end_transaction(transaction.id, TransactionResolution.ROLLBACK)
        with place.business.connect() as business, pytest.raises(VerdictStandsError):
            transaction.join(business)
            business.execute(INSERT)
            business.commit()

    assert place.outcome() == ([], [])


def test_a_word_that_rolls_back_too_late_is_refused(place):
    """The business is committed; for a record nobody has said so to the outbox yet."""
    transaction = place.begun()
    with place.business.connect() as business:
        transaction.join(business)
        business.execute(INSERT)
        business.commit()
    raised = []
    for end in (
        transaction.rollback,
        lambda: place.producer.end_transaction(transaction.id, TransactionResolution.ROLLBACK),
    ):
        with pytest.raises(VerdictStandsError) as error:
            end()
        raised.append(error.value.verdict)

    assert (raised, place.outcome()) == (["commit", "commit"], (["ann"], ["1"]))


def test_a_word_that_commits_what_is_committed_changes_nothing(place):
    transaction = place.begun()
    with place.business.connect() as business:
        transaction.join(business)
        business.execute(INSERT)
        business.commit()
    transaction.commit()
    place.producer.end_transaction(transaction.id, COMMIT)

    assert place.outcome() == (["ann"], ["1"])


# Business transactions that are done twice


def test_a_business_that_was_committed_is_not_committed_a_second_time(place):
    """The answer to its commit was lost, and the application tries again."""
    transaction = place.begun()
    for attempt in range(2):
        with place.business.connect() as business, suppress(VerdictStandsError):
            transaction.join(business)
            business.execute(text(f"INSERT INTO orders (customer) VALUES ('{attempt}')"))
            business.commit()

    assert place.outcome() == (["0"], ["1"])


def test_a_verdict_that_is_said_twice_in_one_business_transaction_is_one(place):
    transaction = place.begun()
    with place.business.connect() as business:
        for _ in range(3):
            transaction.join(business)
        business.execute(INSERT)
        business.commit()

    assert place.outcome() == (["ann"], ["1"])


def test_a_second_try_on_the_same_connection_decides_again(place):
    """Although this transaction, too, has sent something before."""
    transaction = place.begun()
    with place.business.connect() as business:
        transaction.join(business)
        business.rollback()
        if place.way != "record":
            place.outbox.send(business, "orders", "plain")
        transaction.join(business)
        business.execute(INSERT)
        business.commit()
    business_rows, messages = place.outcome()

    assert (business_rows, sorted(messages)) == (["ann"], ["1"] if place.way == "record" else ["1", "plain"])


def test_a_failed_prepare_of_two_phases_is_not_committed_in_one(pg_engine):
    """The application swallows what the first phase raises."""
    with place_on(pg_engine, "join", pg_engine) as place:
        transaction = place.begun()
        place.check()
        with pg_engine.connect() as business:
            both = business.begin_twophase()
            with suppress(VerdictStandsError):
                transaction.join(business)
            for end in (both.prepare, both.commit):
                with suppress(Exception):
                    end()

        with sqlalchemy.create_engine(pg_engine.url).connect() as business:
            twice = business.begin_twophase()
            with suppress(VerdictStandsError):
                transaction.join(business)
            business.execute(INSERT)
            errors = []
            for end in (twice.prepare, twice.commit):
                try:
                    end()
                except Exception as error:
                    errors.append(type(error))

        assert (place.outcome(), errors[:1]) == (([], []), [VerdictStandsError])
