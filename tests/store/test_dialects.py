"""Our dialects pass the contract, a plain one does as well, and dialects that are wrong in one place do not."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, inspect

from outbox import Outbox, create_engine
from outbox.store.dialects.dialect import Dialect
from outbox.store.dialects.postgresql.dialect import DIALECT as POSTGRESQL
from outbox.store.dialects.sqlite.dialect import DIALECT as SQLITE
from tests.scenarios.exactness.twins import ID_AFTER_LAST, replaced
from tests.store.dialect_contract import DialectContract
from tests.store.plain_dialect import PLAIN, made, refusing
from tests.support.dialects import outbox_of, varied


class TestPostgresql(DialectContract):
    """PostgreSQL."""

    @pytest.fixture
    def engine(self, pg_engine: Engine) -> Engine:
        """The database of this test."""
        return pg_engine


class TestSqlite(DialectContract):
    """SQLite."""

    @pytest.fixture
    def engine(self, sqlite_engine: Engine) -> Engine:
        """The database of this test."""
        return sqlite_engine


class TestPlain(DialectContract):
    """A database that has only what all of them have, as far as SQLite can stand for it."""

    dialect = PLAIN

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        """A file with the tables as such a database has them, which refuses what it would not understand."""
        engine = create_engine(f"sqlite:///{tmp_path / 'plain.sqlite3'}")
        made(engine)
        refusing(engine)
        yield engine
        engine.dispose()


def test_the_plain_database_refuses_what_it_does_not_have(tmp_path):
    """Else the contract would prove nothing: with SQLite's own dialect it fails."""
    engine = create_engine(f"sqlite:///{tmp_path / 'plain.sqlite3'}")
    made(engine)
    refusing(engine)
    outbox = Outbox(engine)

    with pytest.raises(AssertionError, match="json_each is not understood"), outbox.begin() as session:
        outbox.send(session, "alpha", b"", dedup_key="k")
    with (
        closing(outbox_of(engine, PLAIN).database.open()) as channel,
        pytest.raises(AssertionError, match="RETURNING is not understood"),
    ):
        channel.rows("DELETE FROM {inbox} RETURNING consumer")
    indexes = inspect(engine).get_indexes("outbox_parked")
    assert [(each["dialect_options"], each["unique"]) for each in indexes] == [({}, 0)] * 5


def windows(suite: DialectContract, outbox: Outbox, channel: Any) -> None:
    """As many schedules as the suite has; each of them may catch a twin."""
    for seed in range(12):
        suite.test_windows_hold_what_was_committed_between_their_positions(outbox, channel, seed)


def early_writer(suite: DialectContract, outbox: Outbox, channel: Any) -> None:
    suite.test_an_early_writer_who_commits_late_is_in_the_next_window(outbox, channel)


def order(suite: DialectContract, outbox: Outbox, channel: Any) -> None:
    suite.test_ids_follow_the_order_of_the_list(outbox, channel)


def never_falls(suite: DialectContract, outbox: Outbox, channel: Any) -> None:
    suite.test_a_position_never_falls(outbox, channel)


def parked(suite: DialectContract, outbox: Outbox, channel: Any) -> None:
    suite.test_parked_messages_come_in_the_order_of_their_keys(outbox, channel)


_BY_TRANSACTION = {"order": ("ORDER BY id LIMIT", "ORDER BY xact_id, id LIMIT")}
_HIGHEST = (
    "max(seq), 0) + 1) || ':' FROM sqlite_sequence\n    WHERE name = '{message}'",
    "max(id), 0) + 1) || ':' FROM {message}",
)
_FIRST_HIGHEST = ("max(seq)", "max(id)")

#: The fixtures of the databases, by the names of their dialects.
ENGINES = {"postgresql": "pg_engine", "sqlite": "sqlite_engine"}
#: What is wrong, and which tests of the suite notice it.
TWINS: dict[str, tuple[Dialect, list[Callable[..., None]]]] = {
    "postgresql: reads on behind the last id": (
        varied(ID_AFTER_LAST, read_on_fresh=ID_AFTER_LAST.reads.read_on),
        [windows, early_writer],
    ),
    "postgresql: forgets who commits late": (varied(POSTGRESQL, read_on=POSTGRESQL.reads.read_on_fresh), [windows]),
    "postgresql: pages by transaction": (
        varied(POSTGRESQL, page=replaced(POSTGRESQL.reads.page, **_BY_TRANSACTION)),
        [windows],
    ),
    "postgresql: pages without the late part": (varied(POSTGRESQL, page_late=POSTGRESQL.reads.page), [windows]),
    "postgresql: pages what is open": (
        varied(POSTGRESQL, page=replaced(POSTGRESQL.reads.page, open=("<> ALL (CAST(:open AS bigint[]))", "> 0"))),
        [windows],
    ),
    "postgresql: appends backwards": (
        varied(
            POSTGRESQL, append=lambda names, rows, **options: POSTGRESQL.writes.append(names, rows[::-1], **options)
        ),
        [order],
    ),
    "sqlite: appends backwards": (
        varied(SQLITE, append=lambda names, rows, **options: SQLITE.writes.append(names, rows[::-1], **options)),
        [order],
    ),
    "sqlite: takes the highest id for the last one": (
        varied(
            SQLITE,
            capture=replaced(SQLITE.reads.capture, highest=_HIGHEST, first=_FIRST_HIGHEST),
            read_on=replaced(SQLITE.reads.read_on, highest=_HIGHEST, first=_FIRST_HIGHEST),
            read_on_fresh=replaced(SQLITE.reads.read_on_fresh, highest=_HIGHEST, first=_FIRST_HIGHEST),
        ),
        [never_falls],
    ),
    "sqlite: a clock that cannot be moved": (varied(SQLITE, later="{now}"), [parked]),
    "sqlite: knows lists of one": (
        varied(SQLITE, among_numbers="{value} = json_extract({list}, '$[0]')"),
        [parked],
    ),
}


@pytest.mark.parametrize(
    ("twin", "check"),
    [
        pytest.param(twin, check, id=f"{name}: {check.__name__}")
        for name, (twin, checks) in TWINS.items()
        for check in checks
    ],
)
def test_a_dialect_that_is_wrong_in_one_place_is_caught(request, twin, check):
    engine = request.getfixturevalue(ENGINES[twin.name])
    outbox = outbox_of(engine, twin)

    with closing(outbox.database.open()) as channel, pytest.raises(AssertionError):
        check(DialectContract(), outbox, channel)


@pytest.mark.storm
@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, id=f"{name}: {check.__name__}")
        for name, check in dict.fromkeys((twin.name, check) for twin, checks in TWINS.values() for check in checks)
    ],
)
def test_what_catches_a_twin_catches_no_sound_dialect(request, name, check):
    outbox = Outbox(request.getfixturevalue(ENGINES[name]))

    with closing(outbox.database.open()) as channel:
        check(DialectContract(), outbox, channel)
