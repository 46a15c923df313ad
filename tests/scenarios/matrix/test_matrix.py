"""Whatever happens to a transaction happens to its messages, and to nothing else: the whole matrix.

Each case plays a scenario on a kind of handle and a kind of database, and compares both tables, the log and that of the
business, with the rows that the scenario says it leaves.

At small scale some kinds take turns at databases: each scenario meets each kind, and each database.
"""

from collections.abc import Sequence

import pytest

from outbox import Outbox
from tests.scenarios.matrix.homes import KINDS, Home, databases_of
from tests.scenarios.matrix.playing import left_by
from tests.scenarios.matrix.scenarios import SCENARIOS
from tests.scenarios.matrix.table import Scenario

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


CASES = [
    pytest.param(
        scenario,
        kind,
        database,
        id=f"{scenario.name}-{kind}-{database}",
        marks=() if has_its_turn(number, kind, database, there) else pytest.mark.full,
    )
    for number, scenario in enumerate(SCENARIOS)
    for kind in sorted(scenario.handles)
    for there in [list(databases_of(scenario, kind))]
    for database in there
]


@pytest.mark.parametrize(("scenario", "kind", "database"), CASES)
def test_a_row_and_its_message_share_the_fate_of_their_transaction(
    homes: dict[str, Home], scenario: Scenario, kind: str, database: str
):
    assert left_by(scenario, KINDS[kind], homes[database], Outbox) == scenario.expected
