"""The judge of a soak is judged first: what it lets pass, and what each twin of a good outcome is reported as."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scenarios.exactness.history import Delivery, Fact
from tests.scenarios.soak.judge import Bounds, Call, Findings, Outcome, Trouble, judge

BOUNDS = Bounds(unsettled=2, deadline=5.0, slack=1.0)
FACTS = [Fact("a", "k", 1), Fact("b", "k", 2), Fact("c", "k", 4), Fact("free")]


def stored(*names: str, key: str | None = "k") -> list[Delivery]:
    """Copies of messages of one unit, and of `free`, which has none."""
    return [Delivery(name, None if name == "free" else key, 0, name) for name in names]


def call(handed: float, *names: str, done: str | None = None, answered: float | None = 0.1) -> Call:
    """A call that was answered after so many seconds; `done` has a letter for each message, all by default."""
    said = frozenset(names if done is None else done)
    if answered is None:
        return Call(handed=handed, names=names)
    return Call(handed=handed, names=names, answered=handed + answered, done=said)


GOOD = Outcome(
    facts=FACTS,
    stored={"one": stored("a", "b"), "other": stored("c", "free")},
    calls=[call(1, "a", "b"), call(2, "c", "free")],
    troubles=[Trouble(10, 12)],
)


def again(first: Call, second: Call, *names: str) -> Outcome:
    """What is left when messages were handed over and stored twice."""
    return replace(
        GOOD, stored={"one": stored("a", "b", *names, "c", "free")}, calls=[first, second, call(90, "c", "free")]
    )


@pytest.mark.parametrize(
    ("outcome", "repeated"),
    [
        (GOOD, 0),
        # An answer said that it is not stored; or none came in time.
        (again(call(1, "a", "b", done="a"), call(2, "b"), "b"), 0),
        (again(call(1, "a", "b", answered=5.5), call(7, "a", "b"), "a", "b"), 0),
        (again(call(1, "a", "b", answered=8), call(7, "a", "b"), "a", "b"), 0),
        # A kill in the middle of the call, before the settle, and while nobody has noticed that the trouble is over.
        (again(call(11, "a", "b", answered=None), call(13, "a", "b"), "a", "b"), 2),
        (again(call(9, "a", "b"), call(13, "a", "b"), "a", "b"), 2),
        (again(call(12.9, "a", "b"), call(13.5, "a", "b"), "a", "b"), 2),
        # A worker waited for its destination, and noticed the trouble then.
        (replace(again(call(19.5, "a", "b"), call(21, "a", "b"), "a", "b"), outages=[Trouble(12.5, 19)]), 2),
        # A person gave it up.
        (replace(GOOD, stored={"one": stored("a", "c", "free")}, discarded={"b"}), 0),
    ],
)
def test_what_the_promise_allows_passes(outcome: Outcome, repeated: int) -> None:
    assert judge(outcome, BOUNDS) == Findings(repeated=repeated)


@pytest.mark.parametrize(
    ("outcome", "kinds"),
    [
        (replace(GOOD, stored={"one": stored("a", "b", "free")}), {"lost"}),
        (replace(GOOD, stored={"one": stored("a", "c", "free")}), {"lost"}),
        (replace(GOOD, facts=FACTS[:3]), {"phantom"}),
        (replace(GOOD, calls=[*GOOD.calls, call(3, "d")]), {"phantom"}),
        (replace(GOOD, stored={"one": stored("a", "c", "b", "free")}), {"violations"}),
        (
            replace(
                GOOD,
                stored={"one": stored("a", "c", "b", "c", "free")},
                calls=[*GOOD.calls, call(11, "c", answered=None), call(20, "c")],
            ),
            {"violations"},
        ),
        # In order at each of two destinations, and not in order of time.
        (replace(GOOD, calls=[call(1, "a", "c", "free"), call(2, "b")]), {"violations"}),
        (replace(GOOD, stored={"one": stored("a", "b", "c", "free", key="other")}), {"altered"}),
        (replace(GOOD, calls=[call(1, "a", "b", "a"), call(2, "c", "free")]), {"doubled"}),
        (replace(GOOD, stored={"one": stored("a", "b", "b", "c", "free")}), {"excess"}),
        # Again without trouble: before it, long after it; beside a call that is under way.
        (again(call(1, "a", "b"), call(2, "a", "b"), "a", "b"), {"excess"}),
        (again(call(14, "a", "b"), call(15, "a", "b"), "a", "b"), {"excess"}),
        (replace(again(call(19.5, "a", "b"), call(21, "a", "b"), "a", "b"), outages=[Trouble(14, 19)]), {"excess"}),
        (again(call(1, "a", "b", answered=2), call(2, "a", "b"), "a", "b"), {"excess"}),
    ],
)
def test_a_twin_is_reported(outcome: Outcome, kinds: set[str]) -> None:
    assert set(judge(outcome, BOUNDS).wrong) == kinds


def test_a_copy_that_differs_is_reported() -> None:
    copies = [*stored("a", "b"), Delivery("b", "k", 0, "other bytes"), *stored("c", "free")]
    outcome = replace(again(call(11, "a", "b"), call(12, "a", "b")), stored={"one": copies})

    assert judge(outcome, BOUNDS).wrong == {"altered": ["b at one"]}


def test_a_trouble_excuses_one_unsettled_batch_and_no_more() -> None:
    calls = [call(9, "a", "b"), call(11, "a", "b"), call(12, "b"), call(13, "c", "free")]
    outcome = replace(GOOD, stored={"one": stored("a", "b", "c", "free")}, calls=calls)

    found = judge(outcome, BOUNDS)

    assert (list(found.wrong), found.repeated) == (["excess"], 2)
