"""What tests of transactions share: an outbox, and a producer whose listener says what a test wants."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.rocketmq import TransactionMQProducer
from tests.rocketmq.parts import Listener, producer_of


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
