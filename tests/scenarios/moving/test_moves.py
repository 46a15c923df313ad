"""A subscription moves to another destination under load: nothing is lost, sent twice, or overtaken within its key."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from tests.scenarios.moving.arrivals import Arrival, arrivals, arrived, faults
from tests.scenarios.moving.writers import Writers, many
from tests.support.command_line import outbox
from tests.support.supervised import supervised
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

OLD, NEW = "test://old/orders", "test://new/orders"
REFUSED = f"has destination {OLD}, this worker asks for {NEW}"


def alter(engine: Engine) -> None:
    """As an operator does."""
    ended = outbox(engine, "subscriptions", "alter", "relay", "--to", NEW)
    assert ended.code == 0, ended.err


def take_by_force(engine: Engine) -> None:
    """A broken twin: it takes the lease although a worker is in the middle of a batch."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET epoch = epoch + 1, owner = NULL, lease_until = NULL"))
        connection.execute(text("UPDATE outbox_subscription SET destination = :new"), {"new": NEW})


@dataclass
class Move:
    """Two relays for each destination, writers that go on all the time, and a change in the middle."""

    engine: Engine
    folder: Path
    least: int
    seconds: float

    def perform(self, change: Callable[[Engine], None], *, before: int) -> dict[str, int]:
        """Return what was wrong. `before`: how many relays to the new destination are there before the change."""
        old, new = self.folder / "old", self.folder / "new"
        url = self.engine.url.render_as_string(hide_password=False)
        program = ["-m", "tests.scenarios.moving.relaying", url]
        olds, news = [*program, str(old), OLD], [*program, str(new), NEW]
        sqlite = self.engine.dialect.name == "sqlite"
        with ExitStack() as running:
            writers = running.enter_context(
                Writers(self.engine, 2 if sqlite else 4, keys=5, pause=0.02 if sqlite else 0.01)
            )
            running.enter_context(supervised([olds, olds], self.folder / "olds"))
            assert eventually(lambda: arrived(old))
            early = running.enter_context(supervised([news] * before, self.folder / "news"))
            assert eventually(lambda: all(REFUSED in each.said for each in early))
            assert eventually(lambda: arrived(old) > self.least, self.seconds)
            change(self.engine)
            running.enter_context(supervised([news] * (2 - before), self.folder / "later"))
            assert eventually(lambda: arrived(new) > self.least, self.seconds)
            written = writers.stop()
            eventually(lambda: arrived(old) + arrived(new) >= len(written), self.seconds)
        return faults(written, arrivals(old), arrivals(new))


@pytest.fixture
def move(engine: Engine, tmp_path: Path, full: bool) -> Move:
    """One on a database of its own."""
    for folder in ("olds", "news", "later"):
        (tmp_path / folder).mkdir()
    return Move(engine, tmp_path, least=2 * many(engine, full=True) if full else 300, seconds=600 if full else 60)


def test_the_new_relays_are_there_before_the_move(move):
    """They are refused, and their supervisor starts them again, until the destination is theirs."""
    assert move.perform(alter, before=2) == {}


def test_the_new_relays_come_after_the_move(move):
    assert move.perform(alter, before=0) == {}


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_a_move_that_takes_the_lease_by_force_is_found_out(move):
    assert move.perform(take_by_force, before=2).keys() & {"twice", "late", "overtaken"}


A, B, C = Arrival(1, "k", 0), Arrival(2, "k", 1), Arrival(3, "k", 2)


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ([A, B], [C], {}),
        ([A], [C], {"lost": 1}),
        ([A, B], [Arrival(2, "k", 1), C], {"twice": 1}),
        ([A, C], [Arrival(4, "k", 1)], {"overtaken": 1}),
        ([A, Arrival(9, "k", 1)], [C], {"late": 1}),
        ([A, B], [C, Arrival(4, "k", 7)], {"phantom": 1}),
    ],
)
def test_the_judge_of_a_move_tells_what_is_wrong(old, new, wrong):
    assert faults([("k", 0), ("k", 1), ("k", 2)], old, new) == wrong
