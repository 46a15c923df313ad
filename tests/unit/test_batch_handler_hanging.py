"""Handing over to a handler that does not come back: the others go on, and the one that hangs is found."""

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from outbox import Message, RetryPolicy, Verdict
from outbox.model.parking import Held
from tests.support.stage import HASTY, Handler, Stage, again, hanging, ids, messages, seen
from tests.support.waiting import eventually

#: Here the others are to be accepted before the hand-over gives up.
LESS_HASTY = replace(HASTY, deadline=timedelta(seconds=0.5))


def test_a_hung_call_keeps_its_keys_and_the_others_go_on():
    handler = Handler()
    with hanging(handler, 1):
        outcome = Stage(handler, HASTY).run(messages("a", "b", "a", "b"))

    assert seen(outcome) == {"done": [2, 4], "aside": [(1, "retry", 1), (3, "blocked", 0)], "open": []}


def test_a_hung_call_keeps_its_keys_also_when_its_message_has_an_outcome():
    """A dead letter that lets its key go on may arrive yet, and what is behind it must not arrive before."""
    handler = Handler()
    policy = replace(LESS_HASTY, retry=RetryPolicy(attempts=1), block_on_dead=False)
    with hanging(handler, 1):
        outcome = Stage(handler, policy).run(messages("a", "b", "a", "b"))

    assert seen(outcome) == {"done": [2, 4], "aside": [(1, "dead", 1)], "open": [3]}


def test_a_later_batch_waits_for_the_keys_of_a_hung_call_until_it_ends():
    """What stands behind it there is held back by nothing else."""
    handler = Handler()
    stage = Stage(handler, LESS_HASTY)
    with hanging(handler, 1) as released:
        stage.run(messages("a", "b"))
        answer = handler.answer

        def releasing(message: Message) -> Verdict:
            if message.id == 6:
                released.set()
            return answer(message)

        handler.answer = releasing
        outcome = stage.run(messages("a", "c", "a", "d", first=3))

    assert seen(outcome) == {"done": [4, 6, 3, 5], "aside": [], "open": []}


def test_what_hangs_does_not_expire():
    """It may have arrived; the others of its batch are dead when their time is over."""
    handler, moment = Handler(), datetime.now(UTC)
    found = messages("a", "b", "a", "c")
    for message in found[0], found[3]:
        message.expires_at = moment - timedelta(seconds=1)
    with hanging(handler, 1):
        outcome = Stage(handler, LESS_HASTY).run(found, now=lambda: moment)

    assert seen(outcome) == {"done": [2], "aside": [(4, "dead", 0), (1, "retry", 1), (3, "blocked", 0)], "open": []}


def test_a_call_that_hangs_when_nothing_else_is_accepted_counts_nothing():
    handler = Handler()
    with hanging(handler, 1, 2):
        outcome = Stage(handler, HASTY).run(messages("a", "b"))

    assert seen(outcome) == {"done": [], "aside": [], "open": [1, 2]}


def test_the_answer_of_a_call_that_hung_for_a_while_is_used():
    handler = Handler()
    with hanging(handler, 1) as released:
        timer = threading.Timer(0.2, released.set)
        timer.start()
        outcome = Stage(handler, HASTY).run(messages("a", "a"))

    assert seen(outcome) == {"done": [1, 2], "aside": [], "open": []}
    assert [call for call in handler.calls if 1 in call] == [[1]]


def test_a_message_that_hangs_again_when_it_is_due_again_is_counted_again():
    """It is read anew from where it was parked, by a worker that was started anew."""
    handler = Handler()
    (poison,) = messages("a")
    with hanging(handler, 1):
        stage = Stage(handler, HASTY)
        first = stage.run([again(poison, 2)], wait_for_destination=False, quota=0)
        stage.run(messages("b", "c", first=2))
        second = stage.run([again(poison, 2)], wait_for_destination=False, quota=0)

    assert seen(first) == {"done": [], "aside": [], "open": [1]}
    assert seen(second) == {"done": [], "aside": [(1, "retry", 2)], "open": []}


def test_one_hung_call_counts_once():
    """The message is due again while its call hangs still: it was not tried again, and is not counted again."""
    handler = Handler()
    (poison,) = messages("a")
    with hanging(handler, 1):
        stage = Stage(handler, HASTY)
        first = stage.run([poison, *messages("b", first=2)])
        stage.run(messages("c", first=3))
        second = stage.run([again(poison, 2)], wait_for_destination=False, quota=0)

    assert seen(first) == {"done": [2], "aside": [(1, "retry", 1)], "open": []}
    assert seen(second) == {"done": [], "aside": [], "open": [1]}


def test_too_many_hung_calls_end_it():
    handler = Handler()
    stage = Stage(handler, HASTY)
    with hanging(handler, *range(1, 20)):
        outcome = stage.run(messages(*"abcdefghij"))

    assert stage.batch_handler.gave_up
    assert (ids(outcome.done), len(outcome.open)) == ([], 10)
    assert len(handler.calls) <= HASTY.max_hung + 1


def test_who_does_not_give_up_makes_only_so_many_calls_beside_those_that_hang():
    """What they have is parked meanwhile, and comes once."""
    handler = Handler()
    stage = Stage(handler, HASTY, rests=1000, gives_up=False)
    with hanging(handler, *range(1, 20)):
        outcome = stage.run(messages(*"abcdefghijkl"))
        calls = len(handler.calls)
    arrived = eventually(lambda: stage.batch_handler.held() == Held(ids=set(), keys=set(), but=set()), 10)
    stage.rests = 1000
    second = stage.run([again(message, 1) for message, _ in outcome.parked], wait_for_destination=False, quota=0)

    assert (calls, stage.batch_handler.gave_up) == (8, False)
    assert seen(outcome)["aside"] == [(id, "waiting", 0) for id in range(1, 9)]
    assert ids(outcome.open) == [9, 10, 11, 12]
    assert (arrived, len(stage.batch_handler.unanswered)) == (True, 0)
    assert (ids(second.done), len(handler.calls)) == (list(range(1, 9)), 8)


def test_calls_that_came_back_are_not_held_against_the_destination():
    handler = Handler()
    stage = Stage(handler, HASTY)
    with hanging(handler, *range(1, 6)):
        stage.run(messages(*"abcde"))
    time.sleep(0.1)

    assert not stage.batch_handler.gave_up
