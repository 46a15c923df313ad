"""Nothing lost, nothing phantom, every key in the order of its commits, and no more copies than a crash may cost.

Real writers and real relays, as processes, on a real database; the judge is in `history.py`.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.scenarios.exactness.runs import Plan, Report, Run

ON_POSTGRESQL = Plan(quota=250)
ON_POSTGRESQL_FULL = replace(ON_POSTGRESQL, quota=2600, long=12, seconds=3.0, least_trouble=12)
SMALL = Plan(quota=40, writers=3, keys=8, long=2, seconds=0.2, trouble=(), least_trouble=0)
ON_SQLITE = Plan(quota=200, writers=4, long=2, seconds=0.3, one_writer=True)
ON_SQLITE_FULL = replace(ON_SQLITE, quota=2500, long=6, least_trouble=8)


def performed(engine: Engine, folder: Path, plan: Plan) -> Report:
    """What comes of a run; its seed and its figures are shown when something is wrong."""
    seed = random.randrange(1_000_000)
    report = Run(engine, folder, plan, seed).perform()
    print(f"seed {seed}: {report}")
    return report


@pytest.mark.smoke("three writers and two relays, each a process")
def test_three_writers_and_two_relays(engine: Engine, tmp_path: Path) -> None:
    """Without trouble nothing comes twice either."""
    report = performed(engine, tmp_path, SMALL)

    assert report.findings.wrong == {}
    assert report.deliveries == report.messages >= 120


@pytest.mark.storm
@pytest.mark.timeout(1800)
def test_eight_writers_and_two_relays_in_trouble_on_postgresql(pg_engine: Engine, tmp_path: Path, full: bool) -> None:
    """Early ids, savepoints, rollbacks, transactions of seconds; relays killed, and stopped beyond their lease."""
    report = performed(pg_engine, tmp_path, ON_POSTGRESQL_FULL if full else ON_POSTGRESQL)

    assert report.findings.wrong == {}
    assert report.messages >= (20_000 if full else 2_000)
    assert {"kill", "stop"} <= set(report.faults)
    assert report.taken_back >= report.messages / 20, "it was too easy"
    # Of the transactions that stay open for seconds, some have begun before others that wrote first.
    assert report.early >= 10, "it was too easy"


@pytest.mark.storm
@pytest.mark.timeout(1800)
def test_four_writers_and_two_relays_in_trouble_on_sqlite(sqlite_engine: Engine, tmp_path: Path, full: bool) -> None:
    """Where one writer at a time draws ids; relays killed, and stopped beyond their lease."""
    report = performed(sqlite_engine, tmp_path, ON_SQLITE_FULL if full else ON_SQLITE)

    assert report.findings.wrong == {}
    assert report.messages >= 4 * (2500 if full else 200)
    assert {"kill", "stop"} <= set(report.faults)
