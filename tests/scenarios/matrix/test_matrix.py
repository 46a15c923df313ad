"""Whatever happens to a transaction happens to its messages, and to nothing else: the whole matrix.

Each case plays a scenario on a kind of handle and a kind of database, and compares both tables, the log and that of the
business, with the rows that the scenario says it leaves.

In a storm some kinds take turns at databases: each scenario meets each kind, and each database. In the quick tier a
scenario is played twice, on PostgreSQL and on SQLite, where it is for both; kinds and drivers take turns.
"""

from collections.abc import Iterator, Sequence

import pytest
from _pytest.mark.structures import ParameterSet

from outbox import Outbox
from tests.scenarios.matrix.homes import KINDS, Home, databases_of
from tests.scenarios.matrix.playing import left_by
from tests.scenarios.matrix.scenarios import SCENARIOS
from tests.scenarios.matrix.table import SQLITE, Scenario

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

#: Databases, and drivers, of which a kind meets one by turns. A registry of sessions is no other session, what is
#: awaited uses SQLite as its blocking twin does, and the drivers differ in what connections do for both kinds.
TURNS = {
    "Session": ("psycopg2", "pg8000"),
    "Connection": ("pg8000", "psycopg2"),
    "AsyncSession": ("plain_sqlite", "sqlite"),
    "AsyncConnection": ("sqlite", "plain_sqlite"),
    "scoped_session": ("postgresql", "sqlite", "plain_sqlite"),
    "async_scoped_session": ("sqlite", "plain_sqlite", "postgresql"),
}


def has_its_turn(number: int, kind: str, database: str, there: Sequence[str]) -> bool:
    """Return whether the scenario of this number is played with the kind on the database at each scale."""
    turns = [each for each in TURNS.get(kind, ()) if each in there]
    return database not in turns or turns[number % len(turns)] == database


def cases() -> Iterator[ParameterSet]:
    """Every scenario on each kind of handle and database, with the scale that it is for."""
    for number, scenario in enumerate(SCENARIOS):
        all_of_it = [(kind, base) for kind in sorted(scenario.handles) for base in databases_of(scenario, kind)]
        on_sqlite = [each for each in all_of_it if each[1] in SQLITE]
        elsewhere = [each for each in all_of_it if each[1] not in SQLITE]
        quick = [places[number % len(places)] for places in (on_sqlite, elsewhere) if places]
        for kind, database in all_of_it:
            there = list(databases_of(scenario, kind))
            played_often = has_its_turn(number, kind, database, there)
            scale = () if (kind, database) in quick else pytest.mark.storm if played_often else pytest.mark.full
            yield pytest.param(scenario, kind, database, id=f"{scenario.name}-{kind}-{database}", marks=scale)


@pytest.mark.parametrize(("scenario", "kind", "database"), list(cases()))
def test_a_row_and_its_message_share_the_fate_of_their_transaction(
    homes: dict[str, Home], scenario: Scenario, kind: str, database: str
):
    assert left_by(scenario, KINDS[kind], homes[database], Outbox) == scenario.expected
