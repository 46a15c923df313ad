"""The plan of a soak is data: the same for the same seed, with everything in it."""

from itertools import pairwise

import pytest

from tests.scenarios.soak.plan import DEPLOYMENTS, KINDS, RELAYS, RESTARTING, WRITERS, plan_of

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
    late = [action for action in plan_of(seed, SECONDS) if action.at >= SECONDS * RESTARTING]

    assert {action.kind for action in late if (action.lane, action.number) == ("relays", 0)} <= {"stop"}
    assert not {action.kind for action in late} & set(DEPLOYMENTS)
