"""A call that hands over in portions, without a database: each portion is answered for itself."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from outbox import Message, Reject, Retry, RetryPolicy, Unavailable, Verdict
from outbox.model.parking import Held as HeldUnits
from outbox.model.verdict import DONE
from outbox.runtime.clock import clock
from outbox.telemetry.events import HandedOver
from outbox.worker.calls import Call
from outbox.worker.hung import HungCalls
from outbox.worker.policy import Portions
from outbox.worker.portions import PortionedCall
from tests.support.stage import (
    ONE,
    POLICY,
    Handler,
    Held,
    Stage,
    handed_over,
    hanging,
    ids,
    messages,
    only,
    raising,
    seen,
)
from tests.support.waiting import eventually


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
    assert seen(outcome) == {"done": [1, 3, 5], "parked": [(2, "retry", 1), (4, "behind", 0)], "open": []}


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
    assert [(m.id, p.state, p.holds) for m, p in outcome.parked] == [(1, "dead", False)]
    assert ids(outcome.done) == [2, 3]


def test_a_portion_of_several_is_answered_in_parts():
    handler = Handler(only(2, verdict=Retry("no", timedelta(minutes=1))))

    outcome = Stage(handler, replace(POLICY, portion=3)).run(messages("a", "b", "c", "b", "d"))

    assert handler.calls == [[1, 2, 3], [5]]
    assert seen(outcome) == {"done": [1, 3, 5], "parked": [(2, "retry", 1), (4, "behind", 0)], "open": []}


def test_a_suspended_queue_leaves_the_rest_open():
    handler = Handler(only(2, verdict=Retry("no")))

    outcome = Stage(handler, replace(ONE, suspend=True), concurrency=3).run(messages("a", "b", "c", "d"))

    assert handler.calls == [[1], [2]]
    assert seen(outcome) == {"done": [1], "parked": [(2, "retry", 1)], "open": [3, 4]}


def test_a_dead_letter_does_not_suspend_the_queue():
    handler = Handler(only(2, verdict=Reject("never")))

    outcome = Stage(handler, replace(ONE, suspend=True)).run(messages("a", "b", "c"))

    assert handler.calls == [[1], [2], [3]]
    assert seen(outcome) == {"done": [1, 3], "parked": [(2, "dead", 1)], "open": []}


def test_a_suspended_queue_also_waits_for_what_is_unavailable():
    handler = Handler(only(2, verdict=Unavailable("later")))

    outcome = Stage(handler, replace(ONE, suspend=True)).run(messages("a", "b", "c"))

    assert handler.calls == [[1], [2]]
    assert seen(outcome) == {"done": [1], "parked": [(2, "retry", 0)], "open": [3]}


def test_what_is_unavailable_blocks_no_key_without_order():
    handler = Handler(only(2, verdict=Unavailable("later")))

    outcome = Stage(handler, replace(ONE, ordered=False)).run(messages("b", "a", "a"))

    assert [(m.id, p.state, p.holds) for m, p in outcome.parked] == [(2, "waiting", False)]
    assert ids(outcome.done) == [1, 3]


def test_without_order_a_call_goes_on_with_the_key_of_a_failed_message():
    stage = Stage(Handler(only(1, verdict=Retry("no"))), replace(ONE, ordered=False))

    assert handed_over(stage, messages("a", "a")) == [[1, 2]]


def test_what_is_unavailable_while_nothing_is_accepted_comes_last_and_alone():
    """Each message of the portions was alone with the listener, so each is known to be unavailable."""
    away = {1, 2}

    def answer(message: Message) -> Verdict:
        verdict: Verdict = Unavailable("away") if message.id in away else DONE
        away.discard(message.id or 0)
        return verdict

    assert handed_over(Stage(Handler(answer), ONE), messages("a", "b"), quota=0) == [[1, 2], [1], [2]]


def test_what_is_unavailable_is_not_counted_and_others_go_on():
    handler = Handler(only(2, verdict=Unavailable("later")))

    outcome = Stage(handler, ONE).run(messages("a", "b", "c"))

    assert seen(outcome) == {"done": [1, 3], "parked": [(2, "waiting", 0)], "open": []}


# Portions that do not come back


def test_a_portion_that_hangs_holds_its_own_message_only_and_counts_against_it():
    handler = Handler()
    stage = Stage(handler, ONE)
    with hanging(handler, 2) as released:
        outcome = stage.run(messages("a", "b", "c", "b", "d"))

        assert handler.calls == [[1], [2], [3], [5]]
        assert seen(outcome) == {"done": [1, 3, 5], "parked": [(2, "retry", 1), (4, "behind", 0)], "open": []}
        assert next(p.error for _, p in outcome.parked) == "no answer within 60.0 s"
        assert stage.hung.held(ordered=True) == HeldUnits(ids=set(), keys={"b"})
        released.set()

    assert eventually(lambda: not stage.hung.unfinished)


@pytest.mark.parametrize("fails", [False, True])
def test_a_late_answer_settles_what_is_parked_and_counts_no_second_attempt(fails):
    handler = Handler(raising(1) if fails else lambda _: DONE)
    stage = Stage(handler, ONE)
    with hanging(handler, 1) as released:
        stage.run(messages("a", "b"))
        released.set()
        assert eventually(lambda: not stage.hung.unfinished)

    late = seen(stage.late())

    assert (handler.calls, late["done"], late["parked"]) == (
        [[1], [2]],
        [] if fails else [1],
        [(1, "retry", 1)] if fails else [],
    )


def test_a_call_left_behind_hands_over_nothing_more():
    handler = Handler()
    stage = Stage(handler, ONE)
    with hanging(handler, 1) as released:
        outcome = stage.run(messages("a", "b", "c"))
        released.set()
        assert eventually(lambda: not stage.hung.unfinished)

    assert ids(outcome.done) == [2, 3]
    assert handler.calls == [[1], [2], [3]]


def test_a_portion_that_was_answered_in_time_does_not_hang_while_others_hear_of_it(monkeypatch):
    """Whoever is told of the answers may take longer than the deadline."""
    stage, calls = Stage(Handler(), ONE, concurrency=2), list[PortionedCall]()

    def due(call: PortionedCall) -> float:
        calls.append(call)
        told = len(call.answered[0]) == len(call.messages)
        return -math.inf if told else time.monotonic() + 0.01

    @stage.listeners.listen
    def hears(event: Any) -> None:
        if isinstance(event, HandedOver):
            assert eventually(lambda: any(each.left and event.messages[0] in each.answered[0] for each in calls))

    monkeypatch.setattr(PortionedCall, "due", property(due))
    outcome = stage.run(messages(*"abcdefgh"))

    assert (sorted(ids(outcome.done)), outcome.parked) == ([*range(1, 9)], [])
    assert eventually(lambda: not stage.hung.unfinished)


def test_earlier_answers_of_a_call_count_although_its_last_portion_comes_back_while_the_call_is_left_behind():
    """At that moment the call is past its deadline, and has come back."""
    handler = Handler()

    class Released(HungCalls):
        def add(self, call: Call, *given: Any, **options: Any) -> None:
            """The call comes back before its answers are looked at."""
            super().add(call, *given, **options)
            released.set()
            assert eventually(lambda: call.finished)

    with hanging(handler, 3) as released:
        outcome = Stage(handler, ONE, hung=Released()).run(messages(*"abcd"))

    assert handler.calls == [[1], [2], [3], [4]]
    assert (ids(outcome.done), [(m.id, p.state) for m, p in outcome.parked]) == ([1, 2, 4], [(3, "retry")])


def test_whoever_drops_a_call_under_way_keeps_its_answers_and_holds_only_its_portion():
    """As when the connection is lost: the next lease goes on beside the portion."""
    handler, given = Handler(), messages(*"abcdc")
    stage, over = Stage(handler, ONE), list[bool]()

    def lost() -> None:
        assert eventually(lambda: [3] in handler.calls)
        raise ConnectionError

    with hanging(handler, 3, overdue=lambda: bool(over)) as released:
        with pytest.raises(ConnectionError):
            stage.run(given, meanwhile=lost)
        over.append(True)
        assert stage.hung.held(ordered=True).keys == {"c"}
        outcome = stage.run([given[0], given[1], given[3]])
        released.set()

    assert (handler.calls, ids(outcome.done)) == ([[1], [2], [3], [4]], [1, 2, 4])


def test_later_messages_of_a_key_whose_dead_message_hangs_let_the_position_pass():
    """The key goes on behind a dead letter, but not beside its call; the rest of the partition does not wait."""
    handler = Handler()
    stage = Stage(handler, replace(ONE, retry=RetryPolicy(attempts=1), block_on_dead=False))
    with hanging(handler, 1, hopeless=lambda: False) as released:
        outcome = stage.run(messages("a", "b", "a"))
        released.set()

    assert seen(outcome) == {"done": [2], "parked": [(1, "dead", 1), (3, "waiting", 0)], "open": []}


def test_everybody_hears_of_all_answers_of_a_call_that_was_left_behind():
    handler = Handler()
    stage, heard = Stage(handler, ONE), list[list[int]]()

    @stage.listeners.listen
    def hears(event: Any) -> None:
        if isinstance(event, HandedOver):
            heard.append(ids(event.messages))

    with hanging(handler, 2) as released:
        stage.run(messages("a", "b"))
        released.set()

    assert eventually(lambda: heard == [[1, 2]])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_a_call_comes_back_whatever_those_raise_who_are_told_of_it(error):
    stage = Stage(Handler(), ONE)

    @stage.listeners.listen
    def hears(_: object) -> None:
        raise error

    assert seen(stage.run(messages("a", "b"))) == {"done": [1, 2], "parked": [], "open": []}
    assert not stage.hung


def portioned(*keys: str, held: Held | None = None, deadline: float = 60.0, **options: Any) -> PortionedCall:
    """A call that has its turn."""
    portions = Portions(size=1, seconds=60.0)
    call = PortionedCall(messages(*keys), held, portions=portions, tell=lambda *_: None, deadline=deadline, **options)
    call.begin(waited=False)
    return call


def test_the_deadline_counts_from_the_beginning_of_each_portion():
    call, handler, moments = portioned(*"abc"), Handler(), list[float]()

    def late(_: Message) -> Verdict:
        moments.append(call.started or 0.0)
        assert eventually(lambda: time.monotonic() > moments[-1])
        return DONE

    handler.answer = late
    call.perform(handler)

    assert moments[0] < moments[1] < moments[2]


@pytest.mark.parametrize("leased", [True, False])
def test_a_call_hands_over_nothing_more_when_the_lease_is_about_to_end_or_a_message_expires(leased):
    held, until = Held(), clock() + 1.0
    call = portioned(*"abc", held=held, needs=1.0) if leased else portioned(*"abc", until=until)

    def ends(given: Sequence[Message]) -> list[Verdict]:
        if given[0].id == 2 and leased:
            held.moments = [clock() + 0.5]
            time.sleep(0.01)
        while given[0].id == 2 and not leased and clock() < until:
            time.sleep(0.01)
        return [DONE]

    call.perform(ends)

    assert ids(call.answered[0]) == [1, 2]


def test_a_call_hands_over_nothing_more_when_it_may_have_lost_its_turn():
    """Its portion came back, but past the deadline, and perhaps another call has begun."""
    call, handler = portioned("a", "b"), Handler()
    assert call.started is not None
    # The turn lasts for a minute, and each portion is past its deadline when it comes back.
    call.started, call.deadline = call.started + 60.0, 0.0
    call.perform(handler)

    assert (handler.calls, call.answered, call.late) == ([[1]], (call.messages[:1], [DONE]), False)
    assert not call.left


def test_a_call_that_comes_too_late_hands_over_nothing_and_is_no_failure():
    held = Held()
    held.moments = [0.0]
    call, handler = portioned("a", held=held), Handler()

    call.perform(handler)

    assert (handler.calls, call.answered, call.late) == ([], ([], []), True)


def test_a_call_that_has_come_back_is_not_left_behind():
    call = portioned("a", deadline=0.0)
    call.perform(Handler())
    call.finish()

    assert not call.leave_behind()
    assert not call.leave_behind(overdue=False)


def test_a_call_that_is_dropped_before_its_deadline_hands_over_nothing_more():
    call, handler = portioned("a", "b", "c"), Handler()
    given = call.messages

    def dropped(message: Message) -> Verdict:
        if message.id == 2:
            assert not call.leave_behind()
            assert call.leave_behind(overdue=False)
        return DONE

    handler.answer = dropped
    call.perform(handler)

    assert handler.calls == [[1], [2]]
    assert (call.messages, call.answered, call.answers) == (given[1:2], (given[:1], [DONE]), [(given[1], DONE)])
    assert not call.late


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
