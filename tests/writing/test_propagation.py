"""How a transaction meets the one that is running: it joins it, is one of its own, or demands that there is one."""

import contextvars
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy.orm import Session

from outbox import DatabaseError, NoTransactionError, Outbox
from tests.support.orders import Base, left, order

# required


def test_required_joins_three_deep_and_commits_once(shop, engine):
    @shop.transactional
    def inner(session: Session) -> Session:
        order(shop, session, "3")
        return session

    @shop.transactional(propagation="required")
    def middle(session: Session) -> list[Session]:
        order(shop, session, "2")
        return [session, inner()]

    with shop.begin() as session:
        order(shop, session, "1")
        sessions = [session, *middle()]
        before = left(engine)

    assert [each is session for each in sessions] == [True] * 3
    assert (before, left(engine)) == ([], ["1", "2", "3"])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_exception_from_any_depth_takes_everything_along(shop, engine, depth):
    @shop.transactional
    def nested(session: Session, level: int) -> None:
        order(shop, session, str(level))
        if level == depth:
            raise LookupError(level)
        nested(level + 1)

    with pytest.raises(LookupError, match=str(depth)):
        nested(1)

    assert left(engine) == []


def test_an_exception_that_is_caught_on_the_way_is_the_catcher_s_affair(shop, engine):
    """One transaction has one end; what may fail by itself goes into a savepoint, or into a transaction of its own."""

    @shop.transactional
    def risky(session: Session, customer: str) -> None:
        order(shop, session, customer)
        raise LookupError

    with shop.begin() as session:
        order(shop, session, "1")
        with pytest.raises(LookupError), session.begin_nested():
            risky("2")
        with pytest.raises(LookupError):
            risky("3")

    assert left(engine) == ["1", "3"]


def test_what_follows_a_transaction_joins_nothing(shop, engine):
    with pytest.raises(LookupError), shop.begin() as first:
        order(shop, first, "1")
        raise LookupError
    with shop.begin() as second:
        order(shop, second, "2")
    with pytest.raises(NoTransactionError), shop.begin("mandatory"):
        pass

    assert first is not second
    assert left(engine) == ["2"]


def test_a_scope_that_is_over_is_joined_by_nobody(shop, engine):
    """A copy of the context outlives it, and may run later in the same thread."""
    pool, later = ThreadPoolExecutor(1), []

    def place() -> None:
        with shop.begin() as session:
            order(shop, session, "1")
            later.append(contextvars.copy_context())

    @shop.transactional
    def audit(session: Session) -> None:
        order(shop, session, "2")

    pool.submit(place).result()
    pool.submit(later[0].run, audit).result()

    assert left(engine) == ["1", "2"]


# requires_new


def test_requires_new_commits_on_its_own_whatever_becomes_of_the_other(pg_engine):
    Base.metadata.create_all(pg_engine)
    shop = Outbox(pg_engine)

    @shop.transactional(propagation="requires_new")
    def audit(session: Session, what: str) -> None:
        order(shop, session, what)
        with shop.begin() as joined:
            order(shop, joined, f"{what} too")

    with pytest.raises(LookupError), shop.begin() as session:
        order(shop, session, "1")
        audit("2")
        between = left(pg_engine)
        with shop.begin() as joined:
            order(shop, joined, "3")
        raise LookupError

    assert (joined is session, between, left(pg_engine)) == (True, ["2", "2 too"], ["2", "2 too"])


def test_a_new_transaction_that_fails_leaves_the_running_one_alone(pg_engine):
    Base.metadata.create_all(pg_engine)
    shop = Outbox(pg_engine)
    with shop.begin() as session:
        order(shop, session, "1")
        with pytest.raises(LookupError), shop.begin("requires_new") as other:
            order(shop, other, "2")
            raise LookupError
        with shop.begin("requires_new") as second, shop.begin("requires_new") as third:
            order(shop, second, "3")
            order(shop, third, "4")

    assert left(pg_engine) == ["1", "3", "4"]


def test_a_new_transaction_beside_a_running_one_is_refused_on_sqlite(sqlite_engine):
    """It would wait for the write lock of the transaction that waits for it."""
    Base.metadata.create_all(sqlite_engine)
    shop = Outbox(sqlite_engine)
    with shop.begin("requires_new") as session:
        order(shop, session, "1")
        with pytest.raises(DatabaseError, match=r"one writer at a time.* use 'required', or a savepoint"):
            shop.begin("requires_new").__enter__()
        order(shop, session, "2")

    assert left(sqlite_engine) == ["1", "2"]


# mandatory


def test_mandatory_demands_a_transaction(shop, engine):
    @shop.transactional(propagation="mandatory")
    def part(session: Session, customer: str) -> str:
        order(shop, session, customer)
        return customer

    with pytest.raises(
        NoTransactionError, match=r"call the function inside of outbox\.begin\(\) or of a transactional function"
    ):
        part("1")
    with shop.begin():
        assert part("2") == "2"
    with Session(engine) as session, session.begin():
        assert part(session, "3") == "3"

    assert left(engine) == ["2", "3"]


@pytest.mark.parametrize("propagation", ["nested", "REQUIRED", "", "never"])
def test_an_unknown_propagation_is_refused_where_it_is_written(shop, propagation: Any):
    with pytest.raises(ValueError, match="is none of required, requires_new, mandatory"):
        shop.transactional(propagation=propagation)(lambda session: None)
    with pytest.raises(ValueError, match="is none of"):
        shop.begin(propagation).__enter__()


# An explicit session wins


@pytest.mark.parametrize("propagation", ["required", "requires_new", "mandatory"])
def test_an_explicit_session_wins_and_is_joined_by_what_is_called(shop, engine, propagation):
    @shop.transactional
    def inner(session: Session) -> Session:
        order(shop, session, "inner")
        return session

    @shop.transactional(propagation=propagation)
    def outer(session: Session) -> list[Session]:
        order(shop, session, "outer")
        return [session, inner()]

    with Session(engine) as given:
        sessions = outer(given)
        before = left(engine)
        given.rollback()
        outer(given)
        given.commit()

    assert [session is given for session in sessions] == [True, True]
    assert (before, left(engine)) == ([], ["inner", "outer"])
