"""Everything at once: nothing lost, nothing phantom, keys in order, no copy without trouble, and nobody has to help.

OUTBOX_TEST_SEED repeats the plan of another run, and OUTBOX_TEST_SECONDS gives its length.
"""

import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import started
from tests.scenarios.soak.growth import Change, changes
from tests.scenarios.soak.soak import Soak
from tests.scenarios.soak.world import World

pytestmark = pytest.mark.storm


@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_a_soak(tmp_path: Path, full: bool) -> None:
    """Writers, relays, the database and two destinations are killed, stopped and cut off; commands come in between."""
    seed = int(os.environ.get("OUTBOX_TEST_SEED") or random.randrange(1_000_000))
    seconds = float(os.environ.get("OUTBOX_TEST_SECONDS") or (1200 if full else 32))
    print(f"OUTBOX_TEST_SEED={seed} OUTBOX_TEST_SECONDS={seconds:g}")

    with ExitStack() as running:
        world = started(lambda: running.enter_context(World(tmp_path, in_memory=not full)))
        try:
            report = Soak(world, seed, seconds).perform()
        except BaseException:
            print(world.said())
            raise
        print(report)
        print(world.said())

    assert (report.findings.wrong, report.manual, report.grown) == ({}, [], [])
    # Without a relay that lived on, there was nothing to compare. In a short soak on a busy machine none may have.
    assert not full or any(name.startswith("relay") for name in report.changes)


def test_a_figure_that_rises_is_reported() -> None:
    """A warm-up is no growth; a short series tells nothing."""
    rising = [(float(at), 50.0 + at) for at in range(100)]
    warm = [(float(at), min(at, 50.0)) for at in range(100)]

    found = changes({"rising": rising, "warm": warm, "short": rising[:10]}, least_seconds=50)

    assert found == {"rising": Change(124, 149), "warm": Change(50, 50)}
    assert [name for name, each in found.items() if each.is_growth(share=0.1, more=5)] == ["rising"]
