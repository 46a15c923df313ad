"""Handing over to a handler that does not come back: the others go on, and the one that hangs is found."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox import LeaseLostError, Message, Reject, Retry, RetryPolicy, Verdict
from outbox.model.lease import Lease, Partition
from outbox.model.parking import Held as HeldParked
from outbox.model.parking import Parking
from outbox.model.slots import slot_of
from outbox.model.verdict import DONE
from outbox.runtime.clock import clock
from outbox.worker.calls import Call
from outbox.worker.hung import HungCall, HungCalls, hung_calls_of
from outbox.worker.known import KnownOutcomes, identity_of
from outbox.worker.policy import BEHIND, MAX_HUNG, HandlerPolicy
from tests.support.stage import POLICY, Handler, Held, Stage, again, hanging, ids, messages, only, seen
from tests.support.waiting import eventually


def test_a_hung_call_keeps_its_keys_and_the_others_go_on():
    handler = Handler()
    with hanging(handler, 1, hopeless=lambda: False):
        outcome = Stage(handler).run(messages("a", "b", "a", "b"))

    assert seen(outcome) == {"done": [2, 4], "parked": [(1, "retry", 1), (3, "behind", 0)], "open": []}


def test_a_hung_call_keeps_its_keys_also_when_its_message_has_an_outcome():
    """A dead letter that lets its key go on may arrive yet, and what is behind it must not arrive before."""
    handler = Handler()
    policy = replace(POLICY, retry=RetryPolicy(attempts=1), block_on_dead=False)
    with hanging(handler, 1, hopeless=lambda: 4 in flat(handler.calls)):
        outcome = Stage(handler, policy).run(messages("a", "b", "a", "b"))

    assert seen(outcome) == {"done": [2, 4], "parked": [(1, "dead", 1), (3, "waiting", 0)], "open": []}


def test_a_later_batch_waits_for_the_keys_of_a_hung_call_until_it_ends():
    """What stands behind it there is held back by nothing else."""
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, 1, hopeless=lambda: False) as released:
        stage.run(messages("a", "b"))
        answer = handler.answer

        def releasing(message: Message) -> Verdict:
            if message.id == 6:
                released.set()
            return answer(message)

        handler.answer = releasing
        outcome = stage.run(messages("a", "c", "a", "d", first=3))

    assert seen(outcome) == {"done": [4, 6, 3, 5], "parked": [], "open": []}


def test_what_hangs_does_not_expire():
    """It may have arrived; the others of its batch are dead when their time is over."""
    handler, found, now = Handler(), messages("a", "b", "a", "c"), datetime.now(UTC)

    def their_time_is_over(message: Message) -> Verdict:
        for each in (found[0], found[3]) if message.id == 1 else ():
            each.expires_at = now
        return answer(message)

    with hanging(handler, 1, hopeless=lambda: False):
        answer, handler.answer = handler.answer, their_time_is_over
        outcome = Stage(handler).run(found, now=now)

    assert seen(outcome) == {"done": [2], "parked": [(4, "dead", 0), (1, "retry", 1), (3, "behind", 0)], "open": []}


def test_a_message_whose_time_ends_while_it_waits_for_its_turn_is_not_handed_over():
    """Another partition has the turn for longer than that."""
    handler, others = Handler(), threading.Event()
    stage = Stage(handler)
    stage.caller.begin(Call(messages("x")), lambda given: [DONE] if others.wait(60) else [])
    found, now = messages("a", "b", "a"), datetime.now(UTC)
    found[0].expires_at = now + timedelta(seconds=0.1)
    over = clock() + 0.1

    def expires() -> None:
        assert eventually(lambda: clock() >= over)
        others.set()

    outcome = stage.run(found, now=now, meanwhile=expires)

    assert flat(handler.calls) == [2, 3]
    assert seen(outcome) == {"done": [2, 3], "parked": [(1, "dead", 0)], "open": []}


def test_a_call_whose_wait_is_interrupted_is_held(monkeypatch):
    """Ctrl-C may come in the moment in which a call that has begun is waited for; the call goes on."""

    def interrupt(_call: Call, _seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Call, "wait", interrupt)
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, 1):
        with pytest.raises(KeyboardInterrupt):
            stage.run(messages("a", "b"))
        held = [ids(hung.call.messages) for hung in stage.batch_handler.hung.unfinished]

    assert held == [[1]]


def partitions_of(generation: int, number: int) -> list[Partition]:
    """The partitions of one generation."""
    return [Partition("relay", generation, each, number) for each in range(number)]


def test_the_next_partitions_have_the_calls_that_hang_if_their_keys_may_be_there():
    """A message without a key may be of any partition. Other subscriptions have calls of their own."""
    (first,), all = partitions_of(1, 1), dict[Partition, HungCalls]()
    calls = {name: Call(messages(key)) for name, key in (("keyed", "k"), ("keyless", None), ("back", "k"))}
    for call in calls.values():
        hung_calls_of(all, first, 256).add(call)
    hung_calls_of(all, Partition("other"), 256).add(Call(messages("k")))
    calls["back"].finish()
    found = [hung_calls_of(all, each, 256).unfinished for each in partitions_of(2, 4)]

    own = [each.partition for each in partitions_of(2, 4) if each.owns(slot_of("k", 256))]
    assert [[each.call for each in hung] for hung in found] == [
        [calls["keyed"]] * (number in own) + [calls["keyless"]] for number in range(4)
    ]
    assert all[first].unfinished


def test_earlier_partitions_are_forgotten_when_their_calls_have_come_back():
    """Or a number of partitions that is changed every night would be remembered for ever."""
    all, call = dict[Partition, HungCalls](), Call(messages("k"))
    hung_calls_of(all, partitions_of(1, 1)[0], 256).add(call)
    for generation in range(2, 10):
        for partition in partitions_of(generation, 3):
            hung_calls_of(all, partition, 256)
    held = [partition.generation for partition, hung in all.items() if hung.unfinished]
    call.finish()
    (last,) = partitions_of(10, 1)
    hung_calls_of(all, last, 256)

    assert held == list(range(1, 10))
    assert list(all) == [last]


def test_a_call_that_hangs_when_nothing_else_is_accepted_counts_nothing():
    """Its message waits, so that the position can pass it."""
    handler = Handler()
    with hanging(handler, 1, 2):
        outcome = Stage(handler).run(messages("a", "b"))

    assert seen(outcome) == {"done": [], "parked": [(1, "waiting", 0), (2, "waiting", 0)], "open": []}


def test_the_answer_of_a_call_that_hung_for_a_while_is_used():
    handler = Handler()
    stage = Stage(handler)

    def comes_back() -> None:
        if stage.batch_handler.hung:
            released.set()

    with hanging(handler, 1, hopeless=lambda: False) as released:
        outcome = stage.run(messages("a", "a"), meanwhile=comes_back)

    assert seen(outcome) == {"done": [1, 2], "parked": [], "open": []}
    assert [call for call in handler.calls if 1 in call] == [[1]]


def test_a_message_that_hangs_again_when_it_is_due_again_is_counted_again():
    """It is read anew from where it was parked, by a worker that was started anew."""
    handler = Handler()
    (poison,) = messages("a")
    with hanging(handler, 1):
        stage = Stage(handler)
        first = stage.run([again(poison, 2)], parked=True, quota=0)
        stage.run(messages("b", "c", first=2))
        second = stage.run([again(poison, 2)], parked=True, quota=0)

    assert seen(first) == {"done": [], "parked": [(1, "waiting", 1)], "open": [1]}
    assert seen(second) == {"done": [], "parked": [(1, "retry", 2)], "open": []}


def test_one_hung_call_counts_once():
    """The message is due again while its call hangs still: it was not tried again, and is not counted again."""
    handler = Handler()
    (poison,) = messages("a")
    with hanging(handler, 1, hopeless=lambda: False):
        stage = Stage(handler)
        first = stage.run([poison, *messages("b", first=2)])
        stage.run(messages("c", first=3))
        second = stage.run([again(poison, 2)], parked=True, quota=0)

    assert seen(first) == {"done": [2], "parked": [(1, "retry", 1)], "open": []}
    assert seen(second) == {"done": [], "parked": [], "open": [1]}


def test_too_many_calls_that_hang_end_it_and_what_they_have_is_parked():
    """No further call is made while they are past their deadline; when they come back, each message has come once."""
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, *range(1, 20)):
        outcome = stage.run(messages(*"abcdefghijkl"))
        calls, gave_up = len(handler.calls), stage.batch_handler.gave_up
    arrived = eventually(lambda: stage.batch_handler.hung.held() == HeldParked(ids=set(), keys=set(), but=set()))
    second = stage.run([again(message, 1) for message, _ in outcome.parked], parked=True, quota=0)
    third = stage.run(outcome.open)

    assert (calls, gave_up) == (MAX_HUNG, True)
    assert seen(outcome)["parked"] == [(id, "waiting", 0) for id in range(1, 9)]
    assert ids(outcome.open) == [9, 10, 11, 12]
    unanswered = stage.batch_handler.hung.unanswered([message for message, _ in outcome.parked], parked=True)
    assert (arrived, unanswered) == (True, set())
    assert [*ids(second.done), *ids(third.done)] == list(range(1, 13))
    assert sorted(id for call in handler.calls for id in call) == list(range(1, 13))


def test_calls_that_came_back_are_not_held_against_the_destination():
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, *range(1, 9)):
        stage.run(messages(*"abcdefgh"))
        assert stage.batch_handler.gave_up

    assert eventually(lambda: not stage.batch_handler.gave_up)


# Late answers, and the leases after that of their call

LEASES = [Lease(Partition("relay"), epoch, "us") for epoch in range(4)]


def hung_call(handler: Handler, hung: HungCalls, all: list[Message], lease: Lease = LEASES[1]) -> None:
    """Message 1 is done, the call with the others comes back too late; then the lease is lost."""
    hung.taken(lease)
    hung.read_from("server")
    finished_late(hung, Call(all[1:]), handler, lease)
    handler.calls.clear()


def finished_late(hung: HungCalls, call: Call, handler: Any, lease: Lease | None = None) -> None:
    """The call is past its deadline when it comes back."""
    hung.add(call, lease)
    call.perform(handler)
    call.finish()


def flat(calls: list[list[int]]) -> list[int]:
    """The messages of these calls, one after the other."""
    return [id for call in calls for id in call]


def test_a_late_answer_does_not_pass_over_what_is_sent_again_before_it():
    """Message 1 was not settled; after it the destination has to get the others again, or they would seem older."""
    handler, hung, all = Handler(), HungCalls(), messages(*"k" * 9)
    hung_call(handler, hung, all)
    hung.taken(LEASES[2])
    outcome = Stage(handler, hung=hung, held=Held(LEASES[2])).run(all)

    assert flat(handler.calls) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert ids(outcome.done) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_nor_does_it_when_the_others_come_in_another_batch():
    handler, hung, all = Handler(), HungCalls(), messages(*"k" * 9)
    hung_call(handler, hung, all)
    hung.taken(LEASES[2])
    stage = Stage(handler, hung=hung, held=Held(LEASES[2]))
    for batch in (all[:1], all[1:5], all[5:]):
        stage.run(batch)

    assert flat(handler.calls) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_late_rejection_counts_also_when_parked_messages_are_looked_at_first():
    handler, hung, all = Handler(), HungCalls(), messages("k")
    handler.answer = lambda _: Reject("never")
    hung.taken(LEASES[1])
    finished_late(hung, Call(all), handler, LEASES[1])
    hung.taken(LEASES[2])
    hung.held()
    outcome = Stage(handler, hung=hung, held=Held(LEASES[2])).run(all)

    assert (flat(handler.calls), seen(outcome)) == ([1], {"done": [], "parked": [(1, "dead", 1)], "open": []})


def test_it_counts_for_another_key_and_without_a_key():
    handler, hung, all = Handler(), HungCalls(), messages(*"kkabc", None, None, "k", "k")
    hung_call(handler, hung, all)
    hung.taken(LEASES[2])
    Stage(handler, hung=hung, held=Held(LEASES[2])).run(all)

    assert flat(handler.calls) == [1, 2, 8, 9]


def test_what_failed_late_behind_a_message_that_is_sent_again_is_sent_again_as_well():
    """Parked, it would let message 1 wait for it, which comes first."""
    handler, hung, all = Handler(only(2, verdict=Retry("no"))), HungCalls(), messages(*"k" * 9)
    hung_call(handler, hung, all)
    handler.answer = lambda _: DONE
    hung.taken(LEASES[2])
    outcome = Stage(handler, hung=hung, held=Held(LEASES[2])).run(all)

    assert (flat(handler.calls), seen(outcome)["parked"]) == ([1, 2, 3, 4, 5, 6, 7, 8, 9], [])


def test_an_outcome_that_was_not_settled_is_known_under_the_next_lease():
    handler, hung, all = Handler(), HungCalls(), messages(*"k" * 9)
    hung_call(handler, hung, all)
    hung.note(LEASES[1], all[:1], [])
    hung.taken(LEASES[2])
    hung.read_from("server")
    outcome = Stage(handler, hung=hung, held=Held(LEASES[2])).run(all)

    assert (handler.calls, ids(outcome.done)) == ([], [1, 2, 3, 4, 5, 6, 7, 8, 9])


def test_what_a_batch_has_done_is_known_when_the_lease_is_lost_within_it():
    """It ends with an error before the next call; nothing of it was settled."""
    handler, hung, all, held = Handler(), HungCalls(), messages(*"abc"), Held()
    held.calls = 2
    with pytest.raises(LeaseLostError):
        Stage(handler, most=1, hung=hung, held=held).run(all)
    outcome = Stage(handler, hung=hung).run(all)

    assert (handler.calls, ids(outcome.done)) == ([[1], [2], [3]], [1, 2, 3])


@pytest.mark.parametrize("finished", [True, False])
def test_a_call_beside_which_the_connection_is_lost_is_not_made_again(finished):
    """What was handled before cannot be settled meanwhile; the call comes back soon, or has come back already."""
    handler, hung, all, began = Handler(), HungCalls(), messages("a"), threading.Event()

    def lost() -> None:
        assert began.wait(60)
        if finished:
            released.set()
            assert eventually(lambda: not stage.caller._under_way)
        raise OSError("away")

    with hanging(handler, 1, overdue=lambda: False, hopeless=lambda: False) as released:
        answer = handler.answer

        def beginning(message: Message) -> Verdict:
            began.set()
            return answer(message)

        handler.answer = beginning
        stage = Stage(handler, hung=hung)
        with pytest.raises(OSError, match="away"):
            stage.run(all, meanwhile=lost)
        released.set()
        outcome = Stage(handler, hung=hung).run(all)

    assert (handler.calls, ids(outcome.done)) == ([[1]], [1])


@pytest.mark.parametrize(
    ("epoch", "incarnation"), [(3, "server"), (2, "server that crashed")], ids=["another holder", "a crash"]
)
def test_no_outcome_counts_when_somebody_else_may_have_sent_or_the_server_has_crashed(epoch, incarnation):
    """Another holder of the lease may have sent message 1 after the late call."""
    handler, hung, all = Handler(), HungCalls(), messages(*"k" * 9)
    hung_call(handler, hung, all)
    hung.note(LEASES[1], all[:1], [])
    hung.taken(LEASES[epoch])
    hung.read_from(incarnation)
    Stage(handler, hung=hung, held=Held(LEASES[epoch])).run(all)

    assert flat(handler.calls) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_call_that_hangs_while_somebody_else_has_the_lease_keeps_its_keys_and_its_answer_does_not_count():
    handler, hung, all = Handler(), HungCalls(), messages("k", "k", "a")
    hung.taken(LEASES[1])
    call = Call(all[:1])
    hung.add(call, LEASES[1])
    hung.taken(LEASES[3])

    def answer(message: Message) -> Verdict:
        if message.id == 3:
            call.perform(lambda messages: [DONE] * len(messages))
            call.finish()
        return DONE

    handler.answer = answer
    Stage(handler, hung=hung, held=Held(LEASES[3])).run(all)

    assert flat(handler.calls) == [3, 1, 2]


def test_a_call_of_a_lease_that_was_lost_before_it_hung_does_not_count():
    """Another relay of this process has taken the lease, and may have sent the same meanwhile."""
    handler, hung, all = Handler(), HungCalls(), messages("k", "a")
    hung.taken(LEASES[1])
    hung.taken(LEASES[2])
    finished_late(hung, Call(all[:1]), handler, LEASES[1])
    hung.note(LEASES[1], all[1:], [])
    handler.calls.clear()
    Stage(handler, hung=hung, held=Held(LEASES[2])).run(all)

    assert flat(handler.calls) == [1, 2]


def test_the_outcome_of_one_message_is_not_that_of_another_with_its_id():
    """Ids are given out again when the log was emptied and its sequence restored."""
    handler, hung = Handler(), HungCalls()
    hung.note(None, messages("k", None), [])
    outcome = Stage(handler, hung=hung).run(messages("k", None))

    assert (flat(handler.calls), ids(outcome.done)) == ([1, 2], [1, 2])


def test_the_outcome_of_an_id_that_is_given_out_again_is_not_used_when_it_comes_late():
    handler, hung = Handler(), HungCalls()
    finished_late(hung, Call(messages("k")), handler)
    Stage(handler, hung=hung).run(messages("k"))

    assert handler.calls == [[1], [1]]


def test_what_was_parked_and_not_settled_is_parked_again_without_a_call():
    handler, hung, all = Handler(), HungCalls(), messages("a", "a", "b")
    parked = [(all[0], POLICY.failed(all[0], Retry("no"))), (all[1], BEHIND), (all[2], POLICY.dead(all[2], "never"))]
    hung.note(None, [], parked)
    outcome = Stage(handler, hung=hung).run(all)

    assert handler.calls == []
    assert seen(outcome)["parked"] == [(1, "retry", 1), (3, "dead", 1), (2, "behind", 0)]


@pytest.mark.parametrize(
    ("before", "now"), [(None, 1), (1, None), (1, 2)], ids=["of the log", "parked", "at attempt 1"]
)
def test_a_failure_counts_only_where_it_was_read(before, now):
    """The settle may have been written although its answer was lost; then the row that it made is another one.

    None: read from the log; otherwise the attempt of a parked row.
    """
    handler, hung, (message,) = Handler(), HungCalls(), messages(None)
    answer = again(message, before or 1)
    hung.note(None, [], [(answer, POLICY.dead(answer, "never"))], parked=before is not None)
    found = again(message, now or 1)
    outcome = Stage(handler, hung=hung).run([found], parked=now is not None)
    unanswered = hung.unanswered([found], parked=now is not None)

    assert (handler.calls, ids(outcome.done), unanswered) == ([[1]], [1], set())


def test_a_failure_of_a_parked_row_is_known_when_it_is_read_again_as_it_was():
    handler, hung, (message,) = Handler(), HungCalls(), messages("a")
    parked = again(message, 2)
    hung.note(None, [], [(parked, POLICY.failed(parked, Retry("no")))], parked=True)
    outcome = Stage(handler, hung=hung).run([again(message, 2)], parked=True)

    assert (handler.calls, seen(outcome)["parked"]) == ([], [(1, "retry", 2)])


def test_a_failure_that_counts_nothing_leaves_a_parked_row_as_it_was_and_is_not_known():
    """If it was written, the row would get it a second time."""
    handler, hung, (message,) = Handler(), HungCalls(), messages("a")
    parked = again(message, 2)
    hung.note(None, [], [(parked, POLICY.failed(parked, Retry("no", counts=False)))], parked=True)
    outcome = Stage(handler, hung=hung).run([again(message, 2)], parked=True)

    assert (handler.calls, ids(outcome.done)) == ([[1]], [1])


def test_what_a_call_has_done_counts_for_the_row_that_was_parked_meanwhile():
    handler, hung, (message,) = Handler(), HungCalls(), messages("a")
    hung.note(None, [message], [])
    outcome = Stage(handler, hung=hung).run([again(message, 2)], parked=True)

    assert (handler.calls, ids(outcome.done)) == ([], [1])


@pytest.mark.parametrize("key", ["a", None])
def test_no_outcome_counts_for_what_a_person_decided_about(key):
    """A replay begins with the first attempt again."""
    handler, hung, all = Handler(only(1, verdict=Reject("never"))), HungCalls(), messages(key, "b")
    hung.note(None, [], [(each, POLICY.dead(each, "never")) for each in all], parked=True)
    stage = Stage(handler, hung=hung)
    stage.batch_handler.hung.known.forget({1})
    outcome = stage.run(all, parked=True)

    assert (handler.calls, seen(outcome)["parked"]) == ([[1]], [(2, "dead", 1), (1, "dead", 1)])


class Interrupted:
    """Another thread does something in the middle of what this one does, unless it has to wait for the end of that."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=action)

    def now(self) -> None:
        """Let the other thread go first; a second time changes nothing."""
        if self._thread.ident is None:
            self._thread.start()
            self._thread.join(0.2)

    def end(self) -> None:
        """Wait for the other thread."""
        self._thread.join(60)


class Outcomes(dict[Any, Any]):
    """A dict that is interrupted at each item of an iteration."""

    interrupted: Interrupted

    def items(self) -> Iterator[Any]:  # type: ignore[override]  # good enough for one who goes through it
        """Interrupted at each."""
        for each in super().items():
            self.interrupted.now()
            yield each


class Calls(list[HungCall]):
    """A list that is interrupted at the end of its second iteration."""

    interrupted: Interrupted
    iterations = 0

    def __iter__(self) -> Iterator[HungCall]:
        yield from super().__iter__()
        self.iterations += 1
        if self.iterations == 2:
            self.interrupted.now()


def test_two_relays_of_one_name_may_use_what_is_known_at_the_same_time():
    """One of them has not noticed yet that its lease is lost."""
    known, (first, *others) = KnownOutcomes(), messages(*"abc")
    known._outcomes = outcomes = Outcomes()
    known.note([first])
    outcomes.interrupted = Interrupted(lambda: known.note(others))
    known.forget({1})
    outcomes.interrupted.end()

    assert known.among([first, *others], parked=False) == set(map(identity_of, others))


def test_an_outcome_that_the_other_relay_has_taken_is_not_there_any_more():
    known, all = KnownOutcomes(), messages("a", None)
    known.note(all)

    assert known.take(all[:1], parked=False) == (all[:1], [])
    assert known.take(all, parked=False) == (all[1:], [])


def test_a_call_that_hangs_while_the_other_relay_looks_at_the_calls_stays_held():
    hung, all = HungCalls(), messages("a", "b")
    hung._calls = calls = Calls()
    hung.add(Call(all[:1]))
    calls.interrupted = Interrupted(lambda: hung.add(Call(all[1:])))
    hung.take_finished()
    calls.interrupted.end()

    assert hung.ids == {1, 2}


class Misjudging(HandlerPolicy):
    """Rules that have a mistake."""

    def failed(self, message: Message, verdict: Retry) -> Parking:
        """Raise, as nothing that is foreseen does."""
        raise LookupError(message, verdict)


def test_a_failure_in_judging_loses_no_answer():
    """What was done is not handled again, although its batch is."""
    handler, hung, all = Handler(lambda m: DONE if m.key else Retry("no")), HungCalls(), messages("a", None, "b")
    with pytest.raises(LookupError):
        Stage(handler, Misjudging(), hung=hung).run(all)

    outcome = Stage(handler, hung=hung).run(all)

    assert (handler.calls, ids(outcome.done)) == ([[1], [2, 3], [2]], [1, 3])
