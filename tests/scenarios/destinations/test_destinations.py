"""Every destination under fire: nothing lost, nothing phantom, keys in order, and no copy without a failure.

Writers, relays and a consumer as processes, real servers; all of them are killed.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox.testing.servers import PostgresServer
from tests.conftest import started
from tests.scenarios.destinations.fire import Plan, Report, Run
from tests.support.durable_destinations import KINDS
from tests.support.several import new_database

pytestmark = pytest.mark.storm

SMALL = Plan(writers=2, quota=240, keys=40, batch=50, trouble=("crash", "worst"))
FULL = Plan(
    quota=5_000,
    keys=300,
    batch=200,
    trouble=("worst", "crash", "kill", "worst", "blackout", "kill", "worst", "crash"),
    until_written=True,
    pauses=(2.0, 5.0),
)
#: For servers of Redis that fail over, where the failovers count. A failover may lose the copies of one kill.
FAILOVERS = replace(SMALL, writers=4, quota=500, trouble=("crash", "worst", "blackout", "worst", "kill", "worst"))
#: For twins, of which one needs no trouble at all to fail.
DARK, CALM = replace(SMALL, quota=120, trouble=("blackout",)), replace(SMALL, quota=120, trouble=())


@pytest.fixture
def billing_engine(postgres: PostgresServer, pg_template: str) -> Iterator[Engine]:
    """The database of the consumer."""
    with new_database(postgres, pg_template) as engine:
        yield engine


#: Their servers take long to come back, or are many; SNS differs from SQS only in the form of its calls.
_SLOW = ("kafka", "rabbitmq", "sns", "redis+cluster", "redis+sentinel")


@pytest.fixture
def perform(pg_engine: Engine, billing_engine: Engine, tmp_path: Path):
    """Performs a run; its seed and its figures are shown when something is wrong."""

    def perform(kind: str, plan: Plan) -> Report:
        seed = random.randrange(1_000_000)
        report = started(Run(kind, pg_engine, billing_engine, tmp_path, plan, seed).perform)
        print(f"seed {seed}: {report}")
        return report

    return perform


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full if kind in _SLOW else ()) for kind in KINDS]
)
def test_each_message_arrives_in_order_while_everything_is_killed(perform, full: bool, kind: str) -> None:
    """Its effects happen once. A copy comes only after a failure, and of each failure at most a batch."""
    plan = FAILOVERS if kind.startswith("redis+") else FULL if full else SMALL
    report = perform(kind, plan)

    assert (report.findings.wrong, report.wrong_effects) == ({}, {})
    assert report.messages >= plan.writers * plan.quota
    assert (report.findings.duplicates == 0) is KINDS[kind].drops_copies, "or it was too easy"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The twins are tried at the destination whose server is back soonest; at full scale at all of them."""
    if "twin_kind" in metafunc.fixturenames:
        metafunc.parametrize("twin_kind", KINDS if metafunc.config.getoption("--full") else ["webhook"])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("twin", "found", "plan"),
    [
        # A sender that is told Done by nobody.
        ("answers_at_once", "lost", DARK),
        # A relay that settles a batch, and sends it then.
        ("marks_first", "lost", DARK),
        # A sender that sends a message before the one before it, of the same key, is confirmed.
        ("two_at_once", "violations", CALM),
    ],
)
def test_a_broken_twin_is_caught(perform, twin_kind: str, twin: str, found: str, plan: Plan) -> None:
    """The same run, with the same judge, without most of its trouble."""
    report = perform(twin_kind, replace(plan, twin=twin))

    assert found in report.findings.wrong
