"""The application of these tests: every change of an aggregate is a fact, and every fact is sent."""

from __future__ import annotations

from sqlalchemy import Engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Outbox
from tests.scenarios.exactness.history import Fact


class Base(DeclarativeBase):
    """The business tables."""


class Aggregate(Base):
    """Something that changes. Its row is the lock by which the writers of its key take turns."""

    __tablename__ = "aggregate"

    key: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(default=0)


class FactRow(Base):
    """The truth: what was committed, and as which change of its aggregate."""

    __tablename__ = "fact"

    name: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str | None]
    version: Mapped[int]


class Scratch(Base):
    """Something else to write before: who writes early has an early transaction id."""

    __tablename__ = "scratch"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str]


def set_up(engine: Engine, keys: int) -> None:
    """Make the tables, with aggregates `k0`, `k1` and so on."""
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all([Aggregate(key=f"k{n}", version=0) for n in range(keys)])


def facts(engine: Engine) -> list[Fact]:
    """What was committed."""
    with Session(engine) as session:
        return [Fact(row.name, row.key, row.version) for row in session.scalars(select(FactRow))]


def change(outbox: Outbox, session: Session, key: str, name: str, topic: str = "orders") -> None:
    """Change an object, then send: the way that application code is written. The send flushes, so the row is locked
    before the message draws its id.
    """
    aggregate = session.get_one(Aggregate, key)
    aggregate.version = Aggregate.version + 1
    outbox.send(session, topic, name, key=key)
    note(session, aggregate, name)


def note(session: Session, aggregate: Aggregate, name: str) -> None:
    """Write down which change of its aggregate this was; the row is locked from here on at the latest."""
    session.flush()
    session.add(FactRow(name=name, key=aggregate.key, version=aggregate.version))
