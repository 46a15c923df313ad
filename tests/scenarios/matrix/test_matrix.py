"""Whatever happens to a transaction happens to its messages, and to nothing else: the whole matrix.

Each case plays a scenario on a kind of handle and a kind of database, and compares both tables, the log and that of the
business, with the rows that the scenario says it leaves.
"""

import pytest

from outbox import Outbox
from tests.scenarios.matrix.homes import KINDS, Home, databases_of
from tests.scenarios.matrix.playing import left_by
from tests.scenarios.matrix.scenarios import SCENARIOS
from tests.scenarios.matrix.table import Scenario

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CASES = [
    pytest.param(scenario, kind, database, id=f"{scenario.name}-{kind}-{database}")
    for scenario in SCENARIOS
    for kind in sorted(scenario.handles)
    for database in databases_of(scenario, kind)
]


@pytest.mark.parametrize(("scenario", "kind", "database"), CASES)
def test_a_row_and_its_message_share_the_fate_of_their_transaction(
    homes: dict[str, Home], scenario: Scenario, kind: str, database: str
):
    assert left_by(scenario, KINDS[kind], homes[database], Outbox) == scenario.expected
