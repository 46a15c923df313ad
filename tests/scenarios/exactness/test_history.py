"""The judge is judged first: what it lets pass and what it reports, case by case."""

import pytest

from tests.scenarios.exactness.history import Delivery, Event, Fact, Fault, Findings, HistoryFile, judge

#: Three commits of one key; versions 2 and 5 were rolled back, which is no hole in the order.
FACTS = [Fact("m1", "k", 1), Fact("m2", "k", 3), Fact("m3", "k", 4)]
KILL = Fault("kill", 1)


def came(*names: str | Fault, relay: int = 1) -> list[Event]:
    """A history of messages of key k."""
    return [name if isinstance(name, Fault) else Delivery(name, "k", relay, name) for name in names]


@pytest.mark.parametrize(
    ("history", "duplicates"),
    [
        (came("m1", "m2", "m3"), 0),
        (came("m1", "m2", KILL, "m1", "m2", "m3"), 2),
        (came(KILL, "m1", "m2", "m3"), 0),
    ],
)
def test_what_the_promise_allows_passes(history: list[Event], duplicates: int) -> None:
    """In the order of the commits; again only what one batch before a fault held."""
    assert judge(FACTS, history, batch=2) == Findings(duplicates=duplicates)


@pytest.mark.parametrize(
    ("history", "kinds"),
    [
        (came("m1", "m2"), {"lost"}),
        (came("m1", "m2", "m3", "m4"), {"phantom"}),
        (came("m1", "m3", "m2", "m3"), {"violations", "excess"}),
        (came("m1", "m3", KILL, "m2", "m3"), {"violations"}),
        (came("m1", "m3"), {"lost", "violations"}),
        (came("m2", "m1", "m3"), {"violations"}),
        (came("m1", "m2", "m2", "m3"), {"excess"}),
        (came("m1", "m2", "m2", KILL, "m3"), {"excess"}),
        (came("m1", "m2", "m3", KILL, "m1", "m2", "m3"), {"excess"}),
        ([Delivery("m1", "k", 1, "a"), KILL, Delivery("m1", "k", 1, "b"), *came("m2", "m3")], {"altered"}),
        ([Delivery("m1", "another", 1, "m1"), *came("m2", "m3")], {"altered"}),
    ],
)
def test_what_the_promise_forbids_is_reported(history: list[Event], kinds: set[str]) -> None:
    """Each kind of failure under its own name."""
    assert set(judge(FACTS, history, batch=2).wrong) == kinds


def test_a_copy_from_more_than_a_batch_back_is_reported() -> None:
    """However few copies there are: a kill takes the position back by one batch and no further."""
    history = came("m1", "m2", "m3", KILL, "m1")

    assert list(judge(FACTS, history, batch=2).wrong) == ["excess"]


def test_a_relay_that_was_stopped_may_finish_its_batch_late() -> None:
    """Nobody can call back what it had in hand; the budget of a batch holds for it too."""
    late: list[Event] = [Delivery("m1", "k", 1, "m1")]
    history = [*came("m1"), Fault("stop", 1), *came("m1", "m2", "m3", relay=2), *late]

    assert judge(FACTS, history, batch=2) == Findings(duplicates=2)
    assert list(judge(FACTS, [*history, *late], batch=2).wrong) == ["excess"]


def test_messages_without_a_key_have_no_order_but_come_once() -> None:
    """Their count is judged, not their place."""
    facts = [Fact("a"), Fact("b")]
    history = [Delivery("b"), Delivery("a")]

    assert judge(facts, history, batch=2) == Findings()
    assert list(judge(facts, [*history, Delivery("a")], batch=2).wrong) == ["excess"]


def test_two_commits_of_a_key_with_one_version_void_the_run() -> None:
    """The writers of a key have to take turns, or there is no order to keep."""
    with pytest.raises(AssertionError, match="did not take turns"):
        judge([Fact("a", "k", 1), Fact("b", "k", 1)], [], batch=1)


def test_a_record_cut_by_a_kill_is_not_there(tmp_path) -> None:
    """And those around it are."""
    path = tmp_path / "history"
    history = HistoryFile(path)
    history.append(Delivery("a", "k", 7, "c"))
    with path.open("ab") as file:
        file.write(b'\n["b", "k", 7')
    history.append(Fault("stop", 7))

    assert history.read() == [Delivery("a", "k", 7, "c"), Fault("stop", 7)]
    history.close()
