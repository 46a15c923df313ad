"""A few connections, shared by threads that use them one after the other."""

from typing import Any, cast

from outbox.rocketmq.connections import Connections


class Opened:
    """A connection that knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        """Close it."""
        self.closed = True


def test_a_connection_is_kept_for_the_next_one_who_needs_it():
    connections = Connections(lambda: cast("Any", Opened()), 2)

    with connections.one() as first:
        pass
    with connections.one() as again, connections.one() as other:
        assert (again is first, other is first) == (True, False)


def test_a_connection_that_is_in_use_at_a_close_is_closed_when_it_is_given_back():
    connections = Connections(lambda: cast("Any", Opened()), 2)

    with connections.one() as used:
        with connections.one() as unused:
            pass
        connections.close()
        during = [cast("Any", each).closed for each in (used, unused)]
    with connections.one() as later:
        assert (during, cast("Any", used).closed, later is used) == ([False, True], True, False)
