"""Handing over in portions, without a database: each is answered for itself, and several are under way at once."""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox import Message, Reject, Retry, Unavailable, Verdict
from outbox.model.verdict import DONE
from outbox.worker.policy import newest
from tests.support.stage import HASTY, POLICY, Handler, Held, Stage, again, hanging, ids, messages, only, raising, seen
from tests.support.waiting import eventually

ONE = replace(POLICY, portion=1)
HASTY_ONE = replace(HASTY, portion=1)


def test_each_portion_is_a_list_of_its_own():
    handler = Handler()

    outcome = Stage(handler, replace(POLICY, portion=2)).run(messages("a", "b", None, "a", "c"))

    assert handler.calls == [[1, 2], [3, 4], [5]]
    assert ids(outcome.done) == [1, 2, 3, 4, 5]


def test_a_failure_is_its_messages_own_and_blocks_its_key():
    """Of a sender it might be the destination's; here each message was handed over once."""
    handler = Handler(raising(2))

    outcome = Stage(handler, ONE).run(messages("a", "b", "a", "b", None))

    assert handler.calls == [[1], [2], [3], [5]]
    assert seen(outcome) == {"done": [1, 3, 5], "parked": [(2, "retry", 1), (4, "blocked", 0)], "open": []}


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), MemoryError()])
def test_whatever_a_listener_raises_is_a_failure(error):
    def answer(message: Message) -> Verdict:
        if message.id == 1:
            raise error
        return DONE

    outcome = Stage(Handler(answer), ONE).run(messages("a", "b"))

    assert seen(outcome) == {"done": [2], "parked": [(1, "retry", 1)], "open": []}


def test_an_answer_that_is_none_is_a_failure_that_says_so():
    def handle(_: Sequence[Message]) -> list[object]:
        return [None]

    outcome = Stage(handle, ONE).run(messages("a"))

    assert [(m.id, p.state, p.error) for m, p in outcome.parked] == [
        (1, "retry", "StrangeAnswerError: a handler must return verdicts, not NoneType")
    ]


def test_without_order_a_failure_blocks_no_key():
    handler = Handler(only(1, verdict=Reject("no")))

    outcome = Stage(handler, replace(ONE, ordered=False)).run(messages("a", "a", "a"))

    assert handler.calls == [[1], [2], [3]]
    assert [(m.id, p.state, p.blocks) for m, p in outcome.parked] == [(1, "dead", False)]
    assert ids(outcome.done) == [2, 3]


def test_a_portion_of_several_is_answered_in_parts():
    handler = Handler(only(2, verdict=Retry("no", timedelta(minutes=1))))

    outcome = Stage(handler, replace(POLICY, portion=3)).run(messages("a", "b", "c", "b", "d"))

    assert handler.calls == [[1, 2, 3], [5]]
    assert seen(outcome) == {"done": [1, 3, 5], "parked": [(2, "retry", 1), (4, "blocked", 0)], "open": []}


def test_a_suspended_queue_leaves_the_rest_open():
    handler = Handler(only(2, verdict=Retry("no")))

    outcome = Stage(handler, replace(ONE, suspend=True), concurrency=3).run(messages("a", "b", "c", "d"))

    assert handler.calls == [[1], [2]]
    assert seen(outcome) == {"done": [1], "parked": [(2, "retry", 1)], "open": [3, 4]}


def test_what_is_unavailable_is_not_counted_and_others_go_on():
    handler = Handler(only(2, verdict=Unavailable("later")))

    outcome = Stage(handler, ONE).run(messages("a", "b", "c"))

    assert seen(outcome) == {"done": [1, 3], "parked": [(2, "waiting", 0)], "open": []}


# Portions that do not come back


def test_a_portion_that_hangs_holds_its_own_message_only_and_counts_against_it():
    handler = Handler()
    stage = Stage(handler, HASTY_ONE)
    with hanging(handler, 2) as released:
        began = time.monotonic()
        outcome = stage.run(messages("a", "b", "c", "b", "d"))
        seconds = time.monotonic() - began

        assert handler.calls == [[1], [2], [3], [5]]
        assert seen(outcome) == {"done": [1, 3, 5], "parked": [(2, "retry", 1), (4, "blocked", 0)], "open": []}
        assert next(p.error for _, p in outcome.parked) == "no answer within 0.1 s"
        assert seconds > 0.1
        held = stage.batch_handler.hung.held()
        assert (held.ids, held.keys, held.but) == ({2}, {"b"}, set())
        released.set()

    assert eventually(lambda: not stage.batch_handler.hung.unfinished, 10)


def test_a_late_answer_counts_when_the_message_is_read_again():
    handler = Handler()
    stage = Stage(handler, HASTY_ONE)
    with hanging(handler, 1) as released:
        outcome = stage.run(messages("a", "b"))
        released.set()
        assert eventually(lambda: stage.batch_handler.hung.held().ids == set(), 10)

    retried = stage.run([again(m, p.attempts + 1) for m, p in outcome.parked], parked=True, quota=0)

    assert handler.calls == [[1], [2]]
    assert seen(retried) == {"done": [1], "parked": [], "open": []}


def test_a_late_failure_is_tried_again():
    handler = Handler(raising(1))
    stage = Stage(handler, HASTY_ONE)
    with hanging(handler, 1) as released:
        outcome = stage.run(messages("a"))
        released.set()
        assert eventually(lambda: stage.batch_handler.hung.held().ids == set(), 10)
    handler.answer = lambda _: DONE

    retried = stage.run([again(m, p.attempts + 1) for m, p in outcome.parked], parked=True, quota=0)

    assert seen(retried) == {"done": [1], "parked": [], "open": []}


def test_a_call_left_behind_hands_over_nothing_more():
    handler = Handler()
    stage = Stage(handler, HASTY_ONE)
    with hanging(handler, 1) as released:
        outcome = stage.run(messages("a", "b", "c"))
        released.set()
        assert eventually(lambda: not stage.batch_handler.hung.unfinished, 10)

    assert ids(outcome.done) == [2, 3]
    assert handler.calls == [[1], [2], [3]]


# The end of a call


def test_a_call_ends_after_its_time_and_the_rest_comes_with_the_next_part():
    handler = Handler()

    def slow(_: Message) -> Verdict:
        time.sleep(0.02)
        return DONE

    handler.answer = slow
    parts = list(Stage(handler, ONE, part_seconds=0.05).parts(messages(*"abcdefgh")))

    assert sum(len(part.done) for part in parts) == 8
    assert len(parts) > 2
    assert handler.calls == [[each] for each in range(1, 9)]


def test_no_portion_begins_after_the_lease():
    """The lease is looked at before each portion; the next call waits for its renewal."""
    held = Held()
    handler = Handler()
    stage = Stage(handler, ONE, held=held)

    def ends(message: Message) -> Verdict:
        if message.id == 2:
            held.moments = [0.0] * 2 + [float("inf")]
            time.sleep(0.01)
        return DONE

    handler.answer = ends
    outcome = stage.run(messages("a", "b", "c"))

    assert ids(outcome.done) == [1, 2, 3]
    assert handler.calls == [[1], [2], [3]]


def test_a_stop_is_followed_between_two_portions():
    held = Held()
    handler = Handler()

    def stops(message: Message) -> Verdict:
        if message.id == 2:
            held.stop.ask()
            stage.stop.looks = 0
            time.sleep(0.01)
        return DONE

    handler.answer = stops
    stage = Stage(handler, ONE, held=held)

    assert seen(stage.run(messages("a", "b", "c"))) == {"done": [1, 2], "parked": [], "open": [3]}


# Side by side


class Watched:
    """A handler that knows which messages are with it at once."""

    def __init__(self, verdicts: dict[int, Verdict], slow: frozenset[int] = frozenset()) -> None:
        self.verdicts = verdicts
        self.slow = slow
        self.lock = threading.Lock()
        self.present: list[Message] = []
        self.most = 0
        self.together: set[str] = set()
        self.arrived: dict[str | None, list[int]] = defaultdict(list)

    def __call__(self, given: Sequence[Message]) -> list[Verdict]:
        """Sleep a little, so that others come meanwhile."""
        (message,) = given
        with self.lock:
            if message.key is not None and message.key in {each.key for each in self.present}:
                self.together.add(message.key)
            self.present.append(message)
            self.most = max(self.most, len(self.present))
            self.arrived[message.key].append(message.id or 0)
        time.sleep(0.02 if message.id in self.slow else 0.0002)
        with self.lock:
            self.present.remove(message)
        return [self.verdicts.get(message.id or 0, DONE)]


def test_several_are_handled_at_once_and_never_two_of_a_key():
    handler = Watched({}, slow=frozenset(range(1, 13)))

    outcome = Stage(handler, ONE, concurrency=4).run(messages(*"abcdabcdabcd"))

    assert (handler.most, handler.together) == (4, set())
    assert dict(handler.arrived) == {"a": [1, 5, 9], "b": [2, 6, 10], "c": [3, 7, 11], "d": [4, 8, 12]}
    assert sorted(ids(outcome.done)) == list(range(1, 13))


def test_without_order_messages_of_a_key_are_handled_at_once():
    handler = Watched({}, slow=frozenset(range(1, 9)))

    Stage(handler, replace(ONE, ordered=False), concurrency=4).run(messages(*"aaaaaaaa"))

    assert (handler.most, handler.together) == (4, {"a"})


def test_one_that_hangs_does_not_stop_those_beside_it():
    handler = Handler()
    stage = Stage(handler, HASTY_ONE, concurrency=2)
    with hanging(handler, 1) as released:
        outcome = stage.run(messages("a", "b", "a", "c", "d"))
        released.set()

    assert sorted(ids(outcome.done)) == [2, 4, 5]
    assert sorted((m.id, p.state, p.attempts) for m, p in outcome.parked) == [(1, "retry", 1), (3, "blocked", 0)]
    assert eventually(lambda: not stage.batch_handler.hung.unfinished, 10)


def test_a_lease_that_is_lost_holds_what_is_under_way():
    held = Held()
    held.calls = 2
    handler = Handler()
    stage = Stage(handler, ONE, held=held, concurrency=2, part_seconds=0.0)

    with hanging(handler, 1) as released:
        with pytest.raises(Exception, match="lost"):
            stage.run(messages(*"abcdefgh"))
        assert 1 in stage.batch_handler.hung.ids
        released.set()


@given(
    keys=st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=24),
    bad=st.sets(st.integers(1, 24), max_size=6),
    slow=st.sets(st.integers(1, 24), max_size=3),
    concurrency=st.integers(1, 4),
    ordered=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_every_message_has_one_outcome_and_keys_keep_their_order(keys, bad, slow, concurrency, ordered):
    given = messages(*keys)
    handler = Watched({id: Retry("no") for id in bad}, frozenset(slow))
    policy = replace(ONE, ordered=ordered)

    outcome = Stage(handler, policy, concurrency=concurrency, part_seconds=0.005).run(given)

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


# The newest of a key


def test_the_newest_of_each_topic_and_key_stands_for_the_earlier():
    found = [
        *messages("a", "b", None, "a"),
        *messages("a", "b", first=5, topic="prices"),
        *messages(None, "a", first=7),
    ]

    newer, replaced = newest(found)

    assert (ids(newer), ids(replaced)) == ([2, 3, 5, 6, 7, 8], [1, 4])
