"""What tests of transactions share: an outbox, and a producer whose listener says what a test wants."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from outbox import Outbox, create_engine
from outbox.rocketmq import TransactionMQProducer
from tests.rocketmq.parts import Listener, producer_of
from tests.rocketmq.places import Place, place_on


@pytest.fixture
def outbox(engine: Engine) -> Iterator[Outbox]:
    """An outbox on either database."""
    made = Outbox(engine)
    yield made
    made.close()


@pytest.fixture
def producer(outbox: Outbox) -> Iterator[TransactionMQProducer]:
    """A producer that does not check back by itself."""
    made = producer_of(outbox, Listener())
    yield made
    made.shutdown()


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The official client; it writes its log below the home folder, from the first import on."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return importlib.import_module("rocketmq")


@pytest.fixture(params=["join", "record"])
def place(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[Place]:
    """An outbox with a business that decides by a join, or by a record in a database of its own."""
    way, business = request.param, engine
    if way == "record":
        business = business_of(request, engine, tmp_path)
    with place_on(engine, way, business) as made:
        yield made
    if business is not engine:
        business.dispose()


def business_of(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Engine:
    """Another database of the same kind, which has no outbox."""
    if engine.dialect.name == "sqlite":
        return create_engine(f"sqlite:///{tmp_path / 'business.sqlite3'}")
    return create_engine(request.getfixturevalue("postgres").create_database(f"business_{uuid4().hex}"))
