"""The plan of a soak is data: the same for the same seed, with everything in it."""

from itertools import pairwise

import pytest

from tests.scenarios.soak.plan import DEPLOYMENTS, KINDS, RELAYS, RESTARTING, WRITERS, latest, plan_of

SECONDS = 120.0


def test_a_seed_gives_one_plan() -> None:
    assert plan_of(7, SECONDS) == plan_of(7, SECONDS) != plan_of(8, SECONDS)


@pytest.mark.parametrize("seed", range(20))
def test_everything_happens_within_two_minutes(seed: int) -> None:
    plan = plan_of(seed, SECONDS)

    wanted = {(lane, kind) for lane, kinds in KINDS.items() for kind in kinds}
    assert {(action.lane, action.kind) for action in plan} == wanted | {("commands", kind) for kind in DEPLOYMENTS}
    assert {action.number for action in plan if action.lane == "relays"} == set(range(RELAYS))
    assert {action.number for action in plan if action.lane == "writers"} <= set(range(WRITERS))


@pytest.mark.parametrize("seed", range(20))
def test_the_actions_of_a_lane_do_not_overlap(seed: int) -> None:
    plan = plan_of(seed, SECONDS)

    assert plan == sorted(plan, key=lambda action: action.at)
    assert all(0 < action.at < SECONDS for action in plan)
    for lane in KINDS:
        own = [action for action in plan if action.lane == lane]
        assert all(one.at + one.seconds < other.at for one, other in pairwise(own))


@pytest.mark.parametrize("seed", range(20))
def test_the_first_relay_lives_on_when_memory_is_compared(seed: int) -> None:
    """An action that would end it is left out when it is late."""
    plan = plan_of(seed, SECONDS)

    ending = [action for action in plan if latest(action, SECONDS) < SECONDS]
    assert {latest(action, SECONDS) for action in ending} == {SECONDS * RESTARTING}
    assert all(action.at < SECONDS * RESTARTING for action in ending)
    first = {action.kind for action in plan if (action.lane, action.number) == ("relays", 0) and action not in ending}
    assert first <= {"stop"}
    assert not {action.kind for action in plan if action not in ending} & set(DEPLOYMENTS)
