"""Tiers: which tests `make test` runs, which ones a storm, and which ones run one after the other by the clock."""

from pathlib import Path
from typing import Literal

import pytest

#: `quick` is deterministic and fits six minutes; `storm` kills, floods and waits; `timed` asserts on real time.
Tier = Literal["quick", "storm", "timed"]

#: Rooms whose tests run on SQLite in a storm only, because the quick tier runs the same tests on PostgreSQL.
TWINS = ("admin", "cli", "consumer", "dashboard", "docs", "relay", "rocketmq", "spark", "worker")

#: The areas of a storm, with their folders below `tests/`. What no area names is in `rest`.
AREAS = {
    "crash": ("scenarios/crash", "scenarios/exactness"),
    "moving": ("scenarios/moving", "scenarios/consuming", "scenarios/soak"),
    "destinations": ("scenarios/destinations", "senders"),
    "spark": ("spark",),
    "rocketmq": ("rocketmq",),
    "worker": ("worker", "relay"),
    "model": ("model", "scenarios/matrix"),
    "dashboard": ("dashboard",),
    "rest": (),
}
#: Tests of the contract for senders that wait for a call's deadline, or try many bodies. The quick tier runs these
#: at the skeleton of remote senders, whose server is in memory and whose clock leaps; a storm at each destination.
LONG_FOR_SENDERS = {
    "test_a_silent_destination_is_unavailable",
    "test_a_big_call_is_stored_completely",
    "test_whatever_may_be_sent_arrives_exactly_or_is_rejected",
}
_AT_THE_SKELETON = "test_remote_sender"
_ROOT = Path(__file__).parents[1]


def tier_of(item: pytest.Item) -> Tier:
    """Return the tier of a test: by its markers, and by its database where the test has a twin on PostgreSQL."""
    if item.get_closest_marker("timed"):
        return "timed"
    if any(item.get_closest_marker(name) for name in ("storm", "jvm", "large", "full")):
        return "storm"
    if getattr(item, "originalname", "") in LONG_FOR_SENDERS and item.path.stem != _AT_THE_SKELETON:
        return "storm"
    return "storm" if _is_twin(item) and not item.get_closest_marker("every_database") else "quick"


def area_of(item: pytest.Item) -> str:
    """Return the area of a storm to which a test belongs."""
    folder = item.path.parent.relative_to(_ROOT).as_posix()
    return next((area for area, folders in AREAS.items() if folder in folders), "rest")


def _is_twin(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    on_sqlite = callspec is not None and callspec.params.get("engine") == "sqlite"
    return on_sqlite and item.path.parent.relative_to(_ROOT).parts[:1] in {(room,) for room in TWINS}
