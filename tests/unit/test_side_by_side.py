"""Several calls for one partition, side by side: none has a message beside an earlier message of its key."""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox import Message, Retry, Unavailable, Verdict
from outbox.model.verdict import DONE
from outbox.worker.calls import Call
from outbox.worker.outcome import Outcome
from outbox.worker.waiting import Wait
from tests.support.stage import (
    EARLIER,
    ONE,
    POLICY,
    Handler,
    Held,
    Stage,
    handed_over,
    hanging,
    ids,
    messages,
)
from tests.support.waiting import eventually


class Watched:
    """A handler that knows which messages are with it at once."""

    def __init__(self, verdicts: dict[int, Verdict], slow: frozenset[int] = frozenset(), meeting: int = 0) -> None:
        """`meeting`: the first so many calls wait for each other."""
        self.verdicts = verdicts
        self.awaited, self.met = meeting, threading.Event()
        self.slow = slow
        self.lock = threading.Lock()
        self.present: list[set[str]] = []
        #: True when nothing of a key is done behind a message that is not; and how many calls there were at once.
        self.in_order, self.most = True, 0
        self.together: set[str] = set()
        self.arrived: dict[str | None, list[int]] = defaultdict(list)

    def __call__(self, given: Sequence[Message]) -> list[Verdict]:
        """Sleep a little, so that others come meanwhile; behind the first of a key that is not done nothing is."""
        keys = {message.key for message in given if message.key is not None}
        with self.lock:
            self.together |= keys & {key for call in self.present for key in call}
            self.present.append(keys)
            self.most = max(self.most, len(self.present))
            if self.most >= self.awaited:
                self.met.set()
        assert self.met.wait(60)
        time.sleep(0.02 if self.slow & {message.id for message in given} else 0.0002)
        verdicts, stopped = list[Verdict](), set[str | None]()
        with self.lock:
            for message in given:
                if message.key in stopped:
                    verdicts.append(EARLIER)
                    continue
                self.arrived[message.key].append(message.id or 0)
                verdicts.append(self.verdicts.get(message.id or 0, DONE))
                if verdicts[-1] is not DONE and self.in_order and message.key is not None:
                    stopped.add(message.key)
            self.present.remove(keys)
        return verdicts


def test_several_are_handled_at_once_and_never_two_of_a_key():
    handler = Watched({}, meeting=4)

    outcome = Stage(handler, ONE, concurrency=4).run(messages(*"abcdabcdabcd"))

    assert (handler.most, handler.together) == (4, set())
    assert dict(handler.arrived) == {"a": [1, 5, 9], "b": [2, 6, 10], "c": [3, 7, 11], "d": [4, 8, 12]}
    assert sorted(ids(outcome.done)) == list(range(1, 13))


def test_messages_without_a_key_are_handled_at_once():
    four = threading.Barrier(4)

    def handle(given: Sequence[Message]) -> list[Verdict]:
        four.wait(60)
        return [DONE] * len(given)

    outcome = Stage(handle, ONE, concurrency=4).run(messages(*[None] * 8))

    assert (len(outcome.done), four.broken) == (8, False)


def test_whole_calls_of_a_sender_are_made_at_once_with_different_keys():
    """Each call takes its share of the keys, with all that is there of a key."""
    handler = Watched({}, meeting=3)
    stage = Stage(handler, replace(POLICY, least=24), concurrency=3)

    calls = handed_over(stage, messages(*"abcabcabcdef" * 2))

    assert sorted(calls) == [
        [1, 2, 4, 5, 7, 8, 13, 14, 16, 17, 19, 20],
        [3, 6, 9, 10, 15, 18, 21, 22],
        [11, 12, 23, 24],
    ]
    assert (handler.most, handler.together) == (3, set())


def test_whole_calls_share_what_has_no_key():
    stage = Stage(Watched({}), replace(POLICY, least=9), concurrency=3)

    assert sorted(handed_over(stage, messages(*[None] * 9))) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_without_order_messages_of_a_key_are_handled_at_once():
    handler = Watched({}, meeting=4)

    Stage(handler, replace(ONE, ordered=False), concurrency=4).run(messages(*"aaaaaaaa"))

    assert (handler.most, handler.together) == (4, {"a"})


def test_a_call_leaves_some_keys_to_the_others():
    """The keys alternate in the log."""
    stage = Stage(Watched({}, slow=frozenset(range(1, 17))), ONE, concurrency=2)

    assert sorted(handed_over(stage, messages(*"ab" * 8)))[:2] == [[1, 3, 5, 7], [2, 4, 6, 8]]


def test_another_call_goes_on_while_what_one_had_is_unavailable():
    """Only when none is under way is there a pause."""
    away, first = [Unavailable("away")], list[Call]()

    def answer(message: Message) -> Verdict:
        if message.id == 1 and away:
            first.extend(call for call in stage.caller._under_way if ids(call.messages) == [1])
            return away.pop()
        assert message.id == 1 or eventually(lambda: first and first[0].finished)
        return DONE

    stage = Stage(Handler(answer), ONE, concurrency=2)
    outcome = stage.run(messages("a", "b"), quota=0)

    assert (ids(outcome.done), stage.pauses) == ([2, 1], 0)


def test_too_many_portions_that_hang_end_it_and_what_they_have_is_parked():
    """More calls may be under way than may hang."""
    handler = Handler()
    stage = Stage(handler, ONE, concurrency=12)
    with hanging(handler, *range(1, 13), overdue=lambda: len(handler.calls) >= 12) as released:
        outcome = stage.run(messages(*"abcdefghijklmn"))
        released.set()

    assert len(handler.calls) == 12 + len(outcome.done)
    assert sorted((m.id, p.state, p.attempts) for m, p in outcome.parked) == [(n, "retry", 1) for n in range(1, 13)]
    assert sorted(ids(outcome.done) + ids(outcome.open)) == [13, 14]
    assert eventually(lambda: not stage.hung.unfinished)


def test_one_that_hangs_does_not_stop_those_beside_it():
    handler = Handler()
    stage = Stage(handler, ONE, concurrency=2)
    with hanging(handler, 1) as released:
        outcome = stage.run(messages("a", "b", "a", "c", "d"))
        released.set()

    assert sorted(ids(outcome.done)) == [2, 4, 5]
    assert sorted((m.id, p.state, p.attempts) for m, p in outcome.parked) == [(1, "retry", 1), (3, "behind", 0)]
    assert eventually(lambda: not stage.hung.unfinished)


def test_the_first_call_that_comes_back_is_settled_first():
    released, awaited = threading.Event(), threading.Event()

    def slow(message: Message) -> Verdict:
        assert (released if message.id == 1 else awaited).wait(60)
        return DONE

    stage = Stage(Handler(slow), ONE, concurrency=2, part_seconds=0.0)
    parts = stage.parts(messages("a", "b"), meanwhile=awaited.set)
    first = next(parts)
    released.set()

    assert (ids(first.done), [ids(part.done) for part in parts]) == ([2], [[1]])


def test_no_call_begins_after_a_stop_beside_those_under_way():
    """Not even when another one has come back."""
    stopped = threading.Event()

    def stops(message: Message) -> Verdict:
        if message.id == 2:
            stage.stop.looks = 0
            stopped.set()
        else:
            assert stopped.wait(60)
        return DONE

    handler = Handler(stops)
    stage = Stage(handler, ONE, concurrency=2)
    outcome = stage.run(messages("a", "b", "c", "d"))

    assert sorted(handler.calls) == [[1], [2]]
    assert (sorted(ids(outcome.done)), ids(outcome.open)) == ([1, 2], [3, 4])


def test_a_call_that_waits_for_its_turn_is_withdrawn_by_a_stop():
    """The wait for it ends with the stop; the wait for a call that has begun does not."""
    stage, others = Stage(Handler(), ONE), threading.Event()
    stage.caller.begin(Call(messages("x")), lambda _: [DONE] if others.wait(60) else [])
    handling = stage.batch_handler.run(messages("a"), quota=0)

    wait = next(handling)
    assert isinstance(wait, Wait)
    stops, stage.stop.looks = wait.stop, 0
    (end,) = handling
    others.set()

    assert (stops, isinstance(end, Outcome) and ids(end.open)) == (stage.stop, [1])


def test_calls_under_way_are_looked_after_while_the_lease_is_too_short_for_another():
    handler, good = Handler(), [True, False]

    class Short(Held):
        def require(self, seconds: float) -> bool:
            """Good for the first call, and then again after a look."""
            return good.pop(0) if good else True

    parts = Stage(handler, ONE, concurrency=2, held=Short(), part_seconds=0.0).parts(messages("a", "b"))

    assert (ids(next(parts).done), handler.calls) == ([1], [[1]])
    assert [ids(part.done) for part in parts] == [[2]]


def test_a_message_does_not_expire_while_a_call_has_it():
    """The call beside comes back when its time is over."""
    found, now = messages("a", "b"), datetime.now(UTC)
    both, released = threading.Barrier(2), threading.Event()

    def slow(message: Message) -> Verdict:
        if message.id == 1:
            message.expires_at = now
        both.wait(60)
        assert message.id == 2 or released.wait(60)
        return DONE

    parts = Stage(Handler(slow), ONE, concurrency=2, part_seconds=0.0).parts(found, now=now)
    first = next(parts)
    released.set()
    second = next(parts)

    assert (ids(first.done), ids(second.done), second.parked) == ([2], [1], [])


def test_a_lease_that_is_lost_holds_what_is_under_way():
    held = Held()
    held.calls = 2
    handler = Handler()

    def answer(message: Message) -> Verdict:
        assert message.id == 1 or eventually(lambda: [1] in handler.calls)
        return DONE

    handler.answer = answer
    stage = Stage(handler, ONE, held=held, concurrency=2, part_seconds=0.0)

    with hanging(handler, 1) as released:
        with pytest.raises(Exception, match="lost"):
            stage.run(messages(*"abcdefgh"))
        assert "a" in stage.hung.held(ordered=True).keys
        released.set()


@given(
    keys=st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=24),
    bad=st.sets(st.integers(1, 24), max_size=6),
    slow=st.sets(st.integers(1, 24), max_size=3),
    concurrency=st.integers(1, 4),
    ordered=st.booleans(),
    portion=st.sampled_from([1, None]),
)
@settings(max_examples=60)
def test_every_message_has_one_outcome_and_keys_keep_their_order(keys, bad, slow, concurrency, ordered, portion):
    given = messages(*keys)
    handler = Watched({id: Retry("no") for id in bad}, frozenset(slow))
    handler.in_order = ordered
    policy = replace(POLICY, ordered=ordered, portion=portion)

    stage = Stage(handler, policy, concurrency=concurrency, part_seconds=0.005)
    outcome = stage.run(given)

    with_outcome = ids(outcome.done) + ids([message for message, _ in outcome.parked])
    assert sorted(with_outcome) == ids(given)
    assert all(len(each) == len(set(each)) for each in handler.arrived.values())
    if ordered:
        assert handler.together == set()
        for key, arrived in handler.arrived.items():
            of_key = [message.id for message in given if message.key == key]
            stopped = next((at for at, id in enumerate(of_key) if id in bad), len(of_key) - 1)
            assert key is None or arrived == of_key[: stopped + 1]
    else:
        assert set(ids(outcome.done)) == set(ids(given)) - bad
