"""The explorer visits every state once, and tells the shortest way to a fault."""

from tests.model.explorer import Moves, apart, explore

State = tuple[int, int]


class Counting:
    """Two that count to three, each for itself; `never`: the state that is wrong."""

    def __init__(self, never: State | None = None, *, rests: bool = True) -> None:
        self._never, self._rests = never, rests

    def start(self) -> State:
        """Return the state in which nobody has counted."""
        return 0, 0

    def moves(self, state: State) -> Moves[State]:
        """Return who may count on."""
        one, other = state
        if one < 3:
            yield "one counts", (one + 1, other)
        if other < 3:
            yield "the other counts", (one, other + 1)

    def wrong(self, state: State) -> str | None:
        """Return whether the state must not be."""
        return "never" if state == self._never else None

    def wrong_at_rest(self, state: State) -> str | None:
        """Return where it rests."""
        return None if self._rests else f"rests at {state}"


def test_every_state_is_visited_once():
    explored = explore(Counting())

    assert (explored.states, explored.steps, explored.whole, explored.wrong) == (16, 24, True, None)


def test_the_way_to_a_fault_is_the_shortest():
    explored = explore(Counting(never=(1, 2)))

    assert explored.wrong == "never"
    assert sorted(explored.trace) == ["one counts", "the other counts", "the other counts"]


def test_a_fault_at_rest_is_found_where_nothing_is_possible_any_more():
    explored = explore(Counting(rests=False))

    assert (explored.wrong, len(explored.trace)) == ("rests at (3, 3)", 6)


def test_an_explorer_that_stops_early_says_so():
    explored = explore(Counting(), most=5)

    assert (explored.whole, explored.wrong) == (False, None)
    assert "the first" in str(explored)


def test_of_actors_in_the_same_state_the_first_one_moves():
    assert list(apart(["idle", "at work", "idle", "at work"])) == [0, 1]
