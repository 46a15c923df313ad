"""Everything at once: nothing lost, nothing phantom, keys in order, no copy without trouble, and nobody has to help.

OUTBOX_TEST_SEED repeats the plan of another run, and OUTBOX_TEST_SECONDS gives its length.
"""

import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import started
from tests.scenarios.soak.growth import grown, lasting
from tests.scenarios.soak.soak import Soak
from tests.scenarios.soak.world import World


@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_a_soak(tmp_path: Path, full: bool) -> None:
    """Writers, relays, the database and two destinations are killed, stopped and cut off; commands come in between."""
    seed = int(os.environ.get("OUTBOX_TEST_SEED") or random.randrange(1_000_000))
    seconds = float(os.environ.get("OUTBOX_TEST_SECONDS") or (1200 if full else 120))
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

    assert (report.findings.wrong, report.manual, report.grown) == ({}, [], {})
    assert report.compared, "no process lived for long enough"


def test_a_figure_that_rises_is_reported() -> None:
    """A warm-up is none, nor is one that falls; a short series tells nothing."""
    rising, warm, short = (
        [(float(at), figure(at)) for at in range(100)]
        for figure in (lambda at: 50.0 + at, lambda at: min(at, 50.0), lambda at: 50.0)
    )
    series = {"rising": rising, "warm": warm, "short": short[:10]}

    assert grown(series, least_seconds=50, share=0.1, more=5) == {"rising": "112, then 137"}
    assert lasting(series, 50) == ["rising", "warm"]
