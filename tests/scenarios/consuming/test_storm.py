"""A group in a storm: each committed message is handled or waits for a person, each key in order and in one hand.

Consumers, as processes, join, fail, hang, are killed and told to stop; the judge is in `journal.py`.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.scenarios.consuming.journal import Entry, judge
from tests.scenarios.consuming.storm import Plan, Report, Storm
from tests.scenarios.exactness.history import Fact

pytestmark = pytest.mark.storm

SMALL = Plan(seconds=10, least=300)
FULL = Plan(seconds=60, least=2_000, a_second=120, crowd=(8, 1, 32, 8, 3, 16))
ON_SQLITE, ON_SQLITE_FULL = (
    replace(SMALL, least=100, crowd=(3, 1, 4, 2), partitions=4, a_second=30),
    replace(FULL, least=1_000, crowd=(4, 1, 6, 2), a_second=40),
)


def performed(engine: Engine, folder: Path, plan: Plan) -> Report:
    """What comes of a storm; its seed and its figures are shown when something is wrong."""
    seed = random.randrange(1_000_000)
    report = Storm(engine, folder, plan, seed).perform()
    print(f"seed {seed}: {report}")
    return report


@pytest.mark.timeout(900)
@pytest.mark.parametrize("inbox", [False, True], ids=["plain", "inbox"])
def test_a_group_grows_and_shrinks_on_postgresql(pg_engine: Engine, tmp_path: Path, full: bool, inbox: bool) -> None:
    """Effects in the database come exactly once where there is an inbox."""
    report = performed(pg_engine, tmp_path, replace(FULL if full else SMALL, inbox=inbox))

    assert (report.wrong, report.effects) == ({}, [])
    assert report.messages >= (1_900 if full else 280)
    assert {"kill", "stop"} <= set(report.faults)
    assert report.calls["failed"] >= report.messages / 50, "it was too easy"


@pytest.mark.timeout(900)
def test_a_group_with_an_inbox_grows_and_shrinks_on_sqlite(sqlite_engine: Engine, tmp_path: Path, full: bool) -> None:
    """Where one process writes at a time, the transactions of handlers among them."""
    report = performed(sqlite_engine, tmp_path, replace(ON_SQLITE_FULL if full else ON_SQLITE, inbox=True))

    assert (report.wrong, report.effects) == ({}, [])
    assert {"kill", "stop"} <= set(report.faults)


#: More failures, and processes that go on after their lease.
FROZEN = replace(
    SMALL,
    seconds=15,
    crowd=(4,),
    partitions=4,
    keys=60,
    a_second=90,
    fails=0.3,
    hangs=0.0,
    lease=2.0,
    trouble=("freeze",),
    every=1.0,
    rows=5,
)
#: A key that does not wait is seen after its first failure; a late owner only after a freeze.
TWINS = [
    (None, set(), FROZEN),
    ("without_hold", {"order"}, replace(FROZEN, seconds=3)),
    ("without_epoch", {"back", "overlap"}, FROZEN),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("twin", "kinds", "plan"), TWINS)
def test_a_broken_twin_is_caught(
    pg_engine: Engine, tmp_path: Path, twin: str | None, kinds: set[str], plan: Plan
) -> None:
    """Without the key that waits, and without the epoch by which late owners are noticed; the library is not."""
    report = performed(pg_engine, tmp_path, replace(plan, twin=twin, patience=60.0 if twin is None else 10.0))

    assert (bool(report.wrong), bool(kinds & report.wrong.keys())) == (twin is not None,) * 2, report


FACTS = [Fact("a1", "a", 1), Fact("a2", "a", 2), Fact("b1", "b", 1)]


def entries(*texts: str) -> list[Entry]:
    """Entries from `what name pid`."""
    found = []
    for each in texts:
        what, name, pid = each.split()
        found.append(Entry(what, int(pid), name, name[:1]))  # type: ignore[arg-type]
    return found


GOOD = ("begin a1 1", "done a1 1", "begin a2 1", "failed a2 1", "begin a2 1", "done a2 1", "begin b1 2", "done b1 2")
STORIES = [
    (GOOD, {}),
    (GOOD[:6], {"lost": ["b1"]}),
    ((*GOOD, "begin x1 1"), {"phantom": ["x1"]}),
    ((*GOOD[2:4], *GOOD), {"order": ["a2 is change 2 of a, when 1 was due"], "back": ["a1 is change 1 of a, after 2"]}),
    ((*GOOD, "begin a1 1"), {"back": ["a1 is change 1 of a, after 2"]}),
    ((*GOOD, "fault x 1", "begin a1 1"), {}),
    ((*GOOD, "fault x 1", "begin a2 1", "failed a2 1", "begin a2 1"), {}),
    ((*GOOD, "fault x 1", "begin a2 1", "done a2 1", "begin a2 1"), {"back": ["a2 is change 2 of a, after 2"]}),
    ((*GOOD, "begin a1 2", "done a1 2", "begin a2 2"), {}),
    ((*GOOD, "begin b1 2"), {"back": ["b1 is change 1 of b, after 1"]}),
    ((GOOD[0], "begin a1 2", "done a1 2", *GOOD[1:]), {"overlap": ["a1 in 2, while a1 in 1 is under way"]}),
    ((GOOD[0], "fault x 1", "begin a1 2", "done a1 2", *GOOD[1:]), {}),
    ((GOOD[0], "begin a1 2", "lost x 1", "done a1 2", *GOOD[1:]), {}),
    ((GOOD[0], "begin a1 2", "done a1 2", *GOOD[1:], "lost x 1"), {"overlap": ["a1 in 2, while a1 in 1 is under way"]}),
    ((GOOD[0], "locked a1 2", *GOOD[1:]), {"overlap": ["a1 in 2, as the lock of the key says"]}),
]


@pytest.mark.parametrize(("texts", "found"), STORIES)
def test_the_judge_finds_what_must_not_be(texts, found):
    assert judge(FACTS, entries(*texts), {}) == found
