"""How many messages a call may have: more while calls are quick, one after a failure, fewer after a call that hung."""

from hypothesis import given
from hypothesis import strategies as st

from outbox.worker.batch_size import BatchSize, next_size

SECONDS = st.floats(0, 100)


def sizes(size: BatchSize, *took: float) -> list[int]:
    """The sizes of calls that take so many seconds, all of whose messages are accepted."""
    found = []
    for seconds in took:
        found.append(size.next)
        size.came_back(size.next, seconds)
        size.accepted(found[-1])
    return found


def test_calls_grow_step_by_step_and_never_beyond_what_a_quarter_of_the_deadline_allows():
    assert sizes(BatchSize(least=1, most=100, deadline=4.0), 0, 0, 0, 0) == [1, 8, 64, 100]
    assert sizes(BatchSize(least=1, most=100, deadline=4.0), 0.1, 0.8, 1.6, 0.5) == [1, 8, 10, 6]


def test_a_call_that_takes_too_long_is_followed_by_a_smaller_one_of_at_least_so_many():
    assert sizes(BatchSize(least=1, most=100, deadline=4.0), 0, 0, 640.0, 0) == [1, 8, 64, 1]
    assert sizes(BatchSize(least=4, most=100, deadline=4.0), 0, 320.0, 0) == [4, 32, 4]


def test_after_a_failure_a_call_has_one_message_and_grows_again():
    size = BatchSize(least=4, most=100, deadline=4.0)
    size.one()

    assert sizes(size, 0, 0, 0) == [1, 8, 64]


def test_after_a_call_that_hung_calls_are_small_until_as_many_were_accepted_as_the_largest_has():
    size = BatchSize(least=1, most=80, deadline=4.0)
    sizes(size, 0, 0, 0)
    size.hung()
    size.one()

    assert sizes(size, *[0] * 25) == [1, 8, *[10] * 9, *[20] * 5, *[40] * 3, *[80] * 6]


@given(st.integers(1, 1000), st.integers(1, 1000), SECONDS, st.floats(0.001, 100), st.integers(1, 1000))
def test_the_next_size_is_within_its_limits_and_fits(size, call, took, allowed, most):
    found = next_size(size, call, took, allowed=allowed, most=most)

    assert 1 <= found <= most
    assert found == 1 or (found * took <= allowed * call * 1.001 and found <= max(size, 8 * call))


@given(st.lists(st.tuples(st.sampled_from(["back", "hung", "one"]), SECONDS)), st.integers(1, 5), st.integers(5, 500))
def test_whatever_happens_a_call_has_a_message_and_no_more_than_allowed(steps, least, most):
    size = BatchSize(least=least, most=most, deadline=5.0)
    for what, took in steps:
        if what == "back":
            size.came_back(size.next, took)
            size.accepted(size.next)
        elif what == "hung":
            size.hung()
        else:
            size.one()
        assert 1 <= size.next <= most
