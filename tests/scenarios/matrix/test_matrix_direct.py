"""Direct send in the transactions of the matrix: what was not committed goes to nobody, and nothing goes twice."""

from typing import Any

import pytest

from outbox import Outbox
from tests.scenarios.matrix.homes import KINDS, Home
from tests.scenarios.matrix.playing import left_by
from tests.scenarios.matrix.scenarios import SCENARIOS
from tests.scenarios.matrix.table import Scenario
from tests.support.destination import Destination
from tests.support.directly import marked, promises
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

CASES = [
    pytest.param(scenario, kind, id=f"{scenario.name}-{kind}")
    for scenario in SCENARIOS
    # What a child sends arrives in the child.
    if "postgresql" in scenario.databases and scenario.setting != "fork"
    for kind in ("Session", "Connection")
    if kind in scenario.handles
]


@pytest.mark.parametrize(("scenario", "kind"), CASES)
def test_what_its_writer_was_to_send_arrives_once_and_nothing_else(
    homes: dict[str, Home], scenario: Scenario, kind: str
):
    home, destination = homes["postgresql"], Destination()

    def make_outbox(bind: Any) -> Outbox:
        outbox = Outbox(bind, sender=destination, direct="relay")
        assert eventually(lambda: promises(outbox))
        return outbox

    left = left_by(scenario, KINDS[kind], home, make_outbox)

    assert left == scenario.expected
    assert sorted(destination.bodies) == sorted(marked(home.observer))
