"""The barrier: partitions that stand apart meet, without passing anything twice and without leaving anything out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.model.barrier import has_arrived, next_generation, stop_at
from outbox.model.position import EARLIEST, Position, Progress, Window

NUMBERS = range(30)


@st.composite
def moments(draw):
    """Positions that one server gave, one after the other: what was settled once, stays settled."""
    settled: set[int] = set()
    found = [EARLIEST]
    for _ in range(draw(st.integers(1, 6))):
        settled |= draw(st.sets(st.sampled_from(NUMBERS), max_size=6))
        head = max(settled, default=-1) + 1
        found.append(Position.of(head, set(range(head)) - settled))
    return found


@st.composite
def standings(draw):
    """Partitions, each somewhere between two of these moments, or at one of them."""
    at = draw(moments())
    found = []
    for _ in range(draw(st.integers(1, 4))):
        base, target = sorted(draw(st.tuples(*[st.integers(0, len(at) - 1)] * 2)))
        after = draw(st.integers(-1, 30))
        found.append(Progress(at[base]) if base == target else Progress(at[base], at[target], after))
    return found


@given(standings())
def test_no_partition_has_passed_the_meeting_point(standing):
    stop = stop_at(standing)

    for progress in standing:
        begun = progress.target or progress.base
        assert [n for n in NUMBERS if begun.sees(n) and not stop.sees(n)] == []


@given(standings())
def test_the_meeting_point_is_the_first_one(standing):
    """What it sees, some partition has begun: the others have no more to do than to catch up."""
    stop = stop_at(standing)

    assert {n for n in NUMBERS if stop.sees(n)} == {
        n for n in NUMBERS if any((progress.target or progress.base).sees(n) for progress in standing)
    }


@given(standings())
def test_each_partition_handles_what_is_left_up_to_the_meeting_point_once(standing):
    """The rest of its window, then a window that ends there."""
    stop = stop_at(standing)

    for progress in standing:
        end = progress.target or progress.base
        rest = Window(end, stop)
        handled = [n for n in NUMBERS if end.sees(n)] + [n for n in NUMBERS if rest.holds(n)]
        assert sorted(handled) == [n for n in NUMBERS if stop.sees(n)]


@given(standings())
def test_the_next_generation_begins_when_all_have_arrived(standing):
    stop = stop_at(standing)
    arrived = [Progress(stop)] * len(standing)

    assert all(has_arrived(progress, stop) for progress in arrived)
    assert next_generation(arrived) == Progress(stop)


@given(standings())
def test_partitions_that_stand_apart_have_no_next_generation(standing):
    alike = all(progress == standing[0] for progress in standing)

    assert next_generation(standing) == (standing[0] if alike else None)


@pytest.mark.parametrize("one", [Progress(Position(7)), Progress(Position(3), Position(9, (4, 7)), 12)])
def test_one_partition_stands_where_all_stand(one):
    """A backlog need not be handled first: the next generation goes on inside of the window."""
    assert next_generation([one]) == one


def test_a_window_that_is_not_done_has_not_arrived():
    target = Position(9)

    assert not has_arrived(Progress(Position(3), target, 12), target)
    assert not has_arrived(Progress(Position(3)), target)


def test_the_meeting_point_is_what_two_positions_see_together():
    standing = [Progress(Position(5, (2, 3))), Progress(Position(3, (1,)), Position(7, (3, 6)), 4)]

    assert stop_at(standing) == Position(7, (3, 6))
