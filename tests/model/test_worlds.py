"""Small worlds keep every promise in every interleaving. Broken twins do not; the shortest way to the fault is told."""

from functools import cache
from typing import Any

import pytest

from tests.model.explorer import Explored, World, explore
from tests.model.worlds import SCENES, TWINS, Scene, Twin

SMALL = [scene for scene in SCENES if not scene.full]
LARGE = [scene for scene in SCENES if scene.full]
#: Worlds with more states are visited in a storm.
QUICK = 10_000
#: Twins of worlds that take seconds to visit.
SLOW_TWINS = {
    "base kept over a lost connection",
    "the first is tried again",
    "barrier without stop_at",
    "barrier without the leases",
    "begins again beside its workers",
    "floor below xmin",
    "silent partitions store nothing",
    "the first to arrive begins",
}


@cache
def explored_once(world: type[World[Any]], *arguments: Any, **options: Any) -> Explored:
    """A twin, or several, may be broken in the same world."""
    return explore(world(*arguments, **options))


@pytest.mark.smoke("visits every state of a small world")
@pytest.mark.parametrize(
    "scene",
    [pytest.param(each, id=each.name, marks=[pytest.mark.large] if each.states > QUICK else []) for each in SMALL],
)
def test_nothing_is_wrong_in_any_state(scene: Scene) -> None:
    """Each state is visited once, and none is left out."""
    explored = explored_once(scene.world.func, *scene.world.args, **scene.world.keywords)

    print(explored)
    assert (explored.wrong, explored.whole) == (None, True), explored
    assert explored.states >= scene.states


@pytest.mark.full
@pytest.mark.parametrize("scene", LARGE, ids=lambda scene: scene.name)
def test_a_larger_world_is_as_right(scene: Scene) -> None:
    """All of its states, or as many as there is time for."""
    explored = explore(scene.world(), most=scene.most)

    print(explored)
    assert explored.wrong is None, explored
    assert explored.states >= scene.states


def test_a_slow_twin_is_a_twin() -> None:
    assert {twin.name for twin in TWINS} >= SLOW_TWINS


def test_the_worlds_are_large_enough() -> None:
    """100 000 states in each run of the tests, and a million more at full scale."""
    assert sum(scene.states for scene in SMALL) >= 100_000
    assert sum(scene.states for scene in LARGE) >= 1_000_000


@pytest.mark.parametrize(
    "twin",
    [pytest.param(each, id=each.name, marks=[pytest.mark.large] if each.name in SLOW_TWINS else []) for each in TWINS],
)
def test_a_broken_twin_is_refuted(twin: Twin) -> None:
    """The trace says how. With the rule in its place the same world is right."""
    right = explored_once(twin.right.func, *twin.right.args, **twin.right.keywords)
    broken = explore(twin.world())

    print(broken)
    assert broken.wrong is not None
    assert broken.wrong.startswith(twin.broken), broken
    assert broken.trace
    assert (right.wrong, right.whole) == (None, True), right
