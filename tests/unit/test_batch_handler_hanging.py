"""Handing over to a handler that does not come back: the others go on, and the one that hangs is found."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import HungHandlerError, LeaseLostError, Message, Reject, Retry, RetryPolicy, Unavailable, Verdict
from outbox.model.lease import Lease, Partition
from outbox.model.parking import NOTHING_HELD, Parking
from outbox.model.parking import Held as HeldUnits
from outbox.model.slots import slot_of
from outbox.model.verdict import DONE
from outbox.runtime.clock import clock
from outbox.worker.calls import Call
from outbox.worker.hung import HungCalls, hung_calls_of
from outbox.worker.known import KnownOutcomes
from outbox.worker.policy import CALLED, DELAYED, EXPIRED, MAX_HUNG, HandlerPolicy
from tests.support.stage import LEASE, POLICY, Handler, Held, Stage, again, hanging, ids, messages, only, raising, seen
from tests.support.waiting import eventually


def test_a_call_that_hangs_leaves_its_messages_and_their_keys_parked_and_the_others_go_on():
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, 1):
        outcome = stage.run(messages("a", "b", "a", "b"))
        held = stage.hung.held(ordered=True)

    assert seen(outcome) == {"done": [2, 4], "parked": [(1, "waiting", 0), (3, "behind", 0)], "open": []}
    assert outcome.parked[0][1].error == CALLED
    assert held == HeldUnits(ids=set(), keys={"a"})


@pytest.mark.parametrize("policy", [POLICY, replace(POLICY, retry=RetryPolicy(attempts=1), block_on_dead=False)])
def test_an_attempt_counts_once_while_others_are_accepted_and_the_key_stays_held(policy):
    """A dead letter that lets its key go on may arrive yet, and what is behind it must not arrive before."""
    handler = Handler()
    stage = Stage(handler, policy)
    with hanging(handler, 1) as released:
        stage.run(messages("a", "b", "a", "b"))
        late = [seen(stage.late())["parked"] for _ in range(2)]
        stage.run(messages("c", first=5))
        late.append(seen(stage.late())["parked"])
        held = stage.hung.held(ordered=True).keys
        handler.answer = lambda _: Retry("no")
        released.set()
        assert eventually(lambda: not stage.hung.unfinished)
        late.append(seen(stage.late())["parked"])

    counted = [(1, "retry" if policy is POLICY else "dead", 1)]
    assert (late, held, stage.hung.held(ordered=True)) == ([counted, [], [], []], {"a"}, NOTHING_HELD)


def test_what_a_call_has_and_what_is_behind_it_waits_for_the_call():
    """It may have arrived, so it does not expire. A delayed message has its turn later in any case."""
    now = datetime.now(UTC)
    found = messages("a", None, "b", "a", "b", None)
    found[0].expires_at = found[4].expires_at = now
    found[2].expires_at, found[3].deliver_at = now, now + timedelta(hours=1)
    called = HeldUnits(ids={2}, keys={"a"})

    to_send, parked = POLICY.sort_out(found, now, held=(), called=called, known={3})

    waiting = POLICY.waiting(found[0], CALLED)
    assert (ids(to_send), parked) == (
        [3, 6],
        [(found[0], waiting), (found[1], waiting), (found[3], DELAYED), (found[4], EXPIRED)],
    )


@pytest.mark.parametrize("ordered", [True, False])
def test_a_call_holds_the_keys_of_its_messages_if_keys_have_an_order_or_only_its_messages(ordered):
    hung = HungCalls()
    hung.add(Call(messages("a", None, "a")))

    expected = HeldUnits(ids={2}, keys={"a"}) if ordered else HeldUnits(ids={1, 2, 3}, keys=set())
    assert hung.held(ordered=ordered) == expected


def test_a_message_whose_time_ends_while_it_waits_for_its_turn_is_not_handed_over():
    """Another partition has the turn for longer than that."""
    handler, others = Handler(), threading.Event()
    stage = Stage(handler)
    stage.caller.begin(Call(messages("x")), lambda given: [DONE] if others.wait(60) else [])
    found, now = messages("a", "b", "a"), datetime.now(UTC)
    found[0].expires_at = now + timedelta(seconds=0.1)

    def expires() -> None:
        """Its time counts from when the batch began."""
        over = clock() + 0.1
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
        held = [ids(call.messages) for call in stage.hung.unfinished]

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
    assert found == [[calls["keyed"]] * (number in own) + [calls["keyless"]] for number in range(4)]
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
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, 1, 2):
        outcome = stage.run(messages("a", "b"))
        late = stage.late().parked

    assert seen(outcome) == {"done": [], "parked": [(1, "waiting", 0), (2, "waiting", 0)], "open": []}
    assert late == []


def came_back(stage: Stage, released: threading.Event) -> dict[str, Any]:
    """All calls come back; what came of them."""
    released.set()
    assert eventually(lambda: not stage.hung.unfinished)
    return seen(stage.late())


def test_the_answer_of_a_call_that_comes_back_late_settles_what_is_parked():
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, 1) as released:
        outcome = stage.run(messages("a", "a"))
        late = came_back(stage, released)
    rest = stage.run([again(message, 1) for message, _ in outcome.parked[1:]], parked=True, quota=0)

    assert seen(outcome) == {"done": [], "parked": [(1, "waiting", 0), (2, "behind", 0)], "open": []}
    assert (late["done"], late["parked"], ids(rest.done), handler.calls) == ([1], [], [2], [[1], [2]])
    assert not stage.hung


VERDICTS: dict[int | None, Verdict] = {
    1: DONE,
    3: Retry("no"),
    5: Reject("never"),
    7: Unavailable("away"),
    9: Retry("later", counts=False),
}


@pytest.mark.parametrize("block_on_dead", [True, False])
def test_late_answers_count_up_to_the_first_failure_of_each_key(block_on_dead):
    """A message for which no attempt counts stays as it is parked, and is tried again."""
    policy = replace(POLICY, least=10, block_on_dead=block_on_dead)
    stage = Stage(Handler(), policy)
    call = Call(messages(*"aabbccddee"))
    finished_late(stage.hung, call, lambda given: [VERDICTS.get(each.id, DONE) for each in given], LEASE)

    late = seen(stage.late())

    dead = [] if block_on_dead else [6]
    assert late["done"] == [1, 2, *dead]
    assert [each for each in late["parked"] if each[1] != "behind"] == [(3, "retry", 1), (5, "dead", 1)]


def test_an_error_that_comes_late_counts_if_others_were_accepted_since_the_last_failure_alone():
    """Before it was alone in a call, nothing is blamed on it, and it stays as it is parked."""
    handler = Handler(raising(1))
    stage = Stage(handler)
    poison, others = messages("a")[0], messages("b", "c", first=2)
    tries = []
    for _ in range(2):
        with hanging(handler, 1) as released:
            tries.append(seen(stage.run([again(poison, 2)], parked=True, quota=0))["parked"])
            tries.append(came_back(stage, released)["parked"])
        stage.run(others)

    assert tries == [[(1, "waiting", 1)], [], [(1, "retry", 2)], []]


def test_a_topic_whose_parked_message_hangs_alone_is_left():
    """Its others are probed after a pause, so those of other topics are not behind a row of calls that hang."""
    handler, found = Handler(), [*messages("a", "b"), *messages("c", topic="other", first=3)]
    stage = Stage(handler)
    with hanging(handler, 1):
        outcome = stage.run([again(message, 1) for message in found], parked=True, quota=0)

    assert seen(outcome) == {"done": [3], "parked": [(1, "waiting", 0)], "open": [2]}
    assert outcome.refused == {"orders": "no answer within 60.0 s"}


def test_too_many_calls_that_hang_end_it_and_what_they_have_is_parked():
    """No further call is made while they are past their deadline; when they come back, each message has come once."""
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, *range(1, 20)) as released:
        outcome = stage.run(messages(*"abcdefghijkl"))
        calls, gave_up = len(handler.calls), stage.batch_handler.gave_up
        late = came_back(stage, released)
    rest = stage.run(outcome.open)

    assert (calls, gave_up) == (MAX_HUNG, True)
    assert seen(outcome)["parked"] == [(id, "waiting", 0) for id in range(1, 9)]
    assert (ids(outcome.open), late["done"], ids(rest.done)) == ([9, 10, 11, 12], [*range(1, 9)], [9, 10, 11, 12])
    assert sorted(id for call in handler.calls for id in call) == list(range(1, 13))


def test_half_as_many_calls_end_it_when_they_hang_for_minutes(monkeypatch):
    """A silent topic is not tried beside four of its calls; only a new process finds that an answer would come."""
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, *range(1, 5), hopeless=lambda: False):
        stage.run(messages(*"abcde"))
        for_seconds = stage.batch_handler.gave_up
        monkeypatch.setattr("outbox.worker.handle.HALF_HUNG_SECONDS", 0.0)
        for_minutes = stage.batch_handler.gave_up

    assert (for_seconds, for_minutes) == (False, True)


def test_no_more_messages_of_calls_that_hang_are_parked_than_may_wait():
    """The partition waits for the next call, and after three deadlines only a new process helps."""
    handler, times = Handler(), list[None]()
    stage = Stage(handler)
    with hanging(handler, 1, 2, 3, hopeless=lambda: len(times) > 5):
        parts = stage.parts(messages("a", "b", "c"), quota=1, meanwhile=lambda: times.append(None))
        with pytest.raises(HungHandlerError, match="too many messages wait already"):
            list(parts)

    assert (handler.calls, len(times) > 5, len(stage.hung.unfinished)) == ([[1], [2]], True, 2)


def test_a_call_for_whose_messages_there_is_no_room_is_waited_for():
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, 1, hopeless=lambda: False) as released:
        times = iter(range(1000))
        outcome = stage.run(messages("a", "b"), quota=0, meanwhile=lambda: released.set() if next(times) > 5 else None)

    assert seen(outcome) == {"done": [1, 2], "parked": [], "open": []}


def test_calls_that_came_back_are_not_held_against_the_destination():
    handler = Handler()
    stage = Stage(handler)
    with hanging(handler, *range(1, 9)):
        stage.run(messages(*"abcdefgh"))
        assert stage.batch_handler.gave_up

    assert eventually(lambda: not stage.batch_handler.gave_up)


# Late answers, and the leases after that of their call

LEASES = [Lease(Partition("relay"), epoch, "us") for epoch in range(4)]


def finished_late(hung: HungCalls, call: Call, handler: Any, lease: Lease) -> None:
    """The call is past its deadline when it comes back."""
    hung.add(call, lease)
    call.perform(handler)
    call.finish()


def hung_call(handler: Handler, all: list[Message]) -> HungCalls:
    """Message 1 is done, the call with the others comes back too late; then the lease is lost, and nothing settled."""
    hung = HungCalls()
    hung.taken(LEASES[1])
    hung.read_from("server")
    finished_late(hung, Call(all[1:]), handler, LEASES[1])
    handler.calls.clear()
    return hung


def under(lease: Lease, handler: Any, hung: HungCalls, incarnation: str = "server") -> Stage:
    """A handler of the next lease, which has looked at the calls."""
    hung.taken(lease)
    hung.read_from(incarnation)
    stage = Stage(handler, hung=hung, held=Held(lease))
    assert seen(stage.late()) == {"done": [], "parked": [], "open": []}
    return stage


def flat(calls: list[list[int]]) -> list[int]:
    """The messages of these calls, one after the other."""
    return [id for call in calls for id in call]


@pytest.mark.parametrize("cuts", [(0, 9), (0, 1, 5, 9)], ids=["one batch", "several"])
def test_a_late_answer_does_not_pass_over_what_is_sent_again_before_it(cuts):
    """Message 1 was not settled; after it the destination has to get the others again, or they would seem older."""
    handler, all = Handler(), messages(*"k" * 9)
    stage = under(LEASES[2], handler, hung_call(handler, all))
    done = [id for first, last in pairwise(cuts) for id in ids(stage.run(all[first:last]).done)]

    assert (flat(handler.calls), done) == ([1, 2, 3, 4, 5, 6, 7, 8, 9],) * 2


def test_it_counts_for_another_key_and_without_a_key():
    handler, all = Handler(), messages(*"kkabc", None, None, "k", "k")
    under(LEASES[2], handler, hung_call(handler, all)).run(all)

    assert flat(handler.calls) == [1, 2, 8, 9]


def test_under_the_next_lease_a_rejection_is_known_as_well():
    """Sent again, it would have what follows it sent again, where dead letters let their key go on."""
    handler, all = Handler(only(2, 3, verdict=Reject("never"))), messages("a", "b", "c", "d")
    hung = hung_call(handler, all)
    handler.answer = lambda _: DONE
    outcome = under(LEASES[2], handler, hung).run(all)

    found = {message.id: parking.state for message, parking in outcome.parked}
    assert (flat(handler.calls), found) == ([1], {2: "dead", 3: "dead"})


@pytest.mark.parametrize("verdict", [Retry("no"), Unavailable("away")])
def test_under_the_next_lease_only_what_was_accepted_is_known(verdict):
    """Of what failed no row tells; it is sent again."""
    handler, all = Handler(only(2, 3, verdict=verdict)), messages("a", "b", "c", "d")
    hung = hung_call(handler, all)
    handler.answer = lambda _: DONE
    outcome = under(LEASES[2], handler, hung).run(all)

    assert (sorted(flat(handler.calls)), sorted(ids(outcome.done))) == ([1, 2, 3], [1, 2, 3, 4])


def test_what_was_accepted_and_not_settled_is_known_under_the_next_lease():
    handler, all = Handler(), messages(*"k" * 9)
    hung = hung_call(handler, all)
    hung.note(LEASES[1], all[:1])
    outcome = under(LEASES[2], handler, hung).run(all)

    assert (handler.calls, ids(outcome.done)) == ([], [1, 2, 3, 4, 5, 6, 7, 8, 9])


def test_a_dead_letter_that_was_not_settled_is_known_and_another_failure_is_not():
    """It lets its key go on here; sent again, it would have what follows it sent again."""
    handler, all = Handler(), messages("a", "b", "a")
    stage = Stage(handler, replace(POLICY, block_on_dead=False))
    dead = (all[0], stage.batch_handler.policy.dead(all[0], "never"))
    stage.hung.note(LEASE, all[2:], [dead, (all[1], POLICY.failed(all[1], Retry("no")))])
    outcome = stage.run(all)

    assert (handler.calls, sorted(ids(outcome.done)), outcome.parked) == ([[2]], [2, 3], [dead])


@given(st.lists(st.sampled_from(["a", "b", None]), max_size=12), st.booleans(), st.data())
def test_what_is_known_is_done_if_no_other_message_of_its_key_is_in_front(keys, ordered, data):
    """Without order, all."""
    known, all = KnownOutcomes(), messages(*keys)
    accepted = [message for message in all if data.draw(st.booleans())]
    known.note(accepted)

    assert known.among(all, ordered=ordered)[0] == [
        message
        for message in accepted
        if message.key is None
        or not ordered
        or all_in(accepted, (each for each in all if each.key == message.key and ids([each]) < ids([message])))
    ]


def all_in(accepted: list[Message], before: Iterable[Message]) -> bool:
    """All that come before were accepted."""
    return all(each in accepted for each in before)


def test_it_is_known_until_it_is_settled():
    """A message that waits since, because of another of its key, is not settled; a dead letter is."""
    known, all = KnownOutcomes(), messages("a", None, "b", "c")
    known.note(all)
    found = [ids(known.among(all, ordered=True)[0]) for _ in range(2)]
    known.settled(all[:1], [(all[1], POLICY.dead(all[1], "no")), (all[2], POLICY.waiting(all[2], "later"))])

    assert (found, ids(known.among(all, ordered=True)[0])) == ([[1, 2, 3, 4]] * 2, [3, 4])


def test_what_a_batch_has_done_is_known_when_the_lease_is_lost_within_it():
    """It ends with an error before the next call; nothing of it was settled."""
    handler, hung, all, held = Handler(), HungCalls(), messages(*"abc"), Held(LEASES[1])
    hung.taken(LEASES[1])
    held.calls = 2
    with pytest.raises(LeaseLostError):
        Stage(handler, most=1, hung=hung, held=held).run(all)
    hung.taken(LEASES[2])
    outcome = Stage(handler, hung=hung, held=Held(LEASES[2])).run(all)

    assert (handler.calls, ids(outcome.done)) == ([[1], [2], [3]], [1, 2, 3])


@pytest.mark.parametrize("finished", [True, False])
def test_a_call_beside_which_the_connection_is_lost_is_not_made_again(finished):
    """What was handled before cannot be settled meanwhile; the call comes back soon, or has come back already."""
    handler, all, began = Handler(), messages("a"), threading.Event()

    def lost() -> None:
        assert began.wait(60)
        if finished:
            released.set()
            assert eventually(lambda: not stage.caller._under_way)
        raise OSError("away")

    with hanging(handler, 1, overdue=lambda: False) as released:
        answer = handler.answer

        def beginning(message: Message) -> Verdict:
            began.set()
            return answer(message)

        handler.answer = beginning
        stage = Stage(handler, held=Held(LEASES[1]))
        with pytest.raises(OSError, match="away"):
            stage.run(all, meanwhile=lost)
        stage.hung.taken(LEASES[2])
        held = stage.hung.held(ordered=True).keys
        released.set()
        assert eventually(lambda: not stage.hung.unfinished)
        following = Stage(handler, hung=stage.hung, held=Held(LEASES[2]))
        following.late()
        outcome = following.run(all)

    assert (held, handler.calls, ids(outcome.done)) == ({"a"}, [[1]], [1])


@pytest.mark.parametrize(
    ("epoch", "incarnation"), [(3, "server"), (2, "server that crashed")], ids=["another holder", "a crash"]
)
def test_no_outcome_counts_when_somebody_else_may_have_sent_or_the_server_has_crashed(epoch, incarnation):
    """Another holder of the lease may have sent message 1 after the late call."""
    handler, all = Handler(), messages(*"k" * 9)
    hung = hung_call(handler, all)
    hung.note(LEASES[1], all[:1])
    under(LEASES[epoch], handler, hung, incarnation).run(all)

    assert flat(handler.calls) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_call_that_hangs_while_somebody_else_has_the_lease_keeps_its_keys_and_its_answer_does_not_count():
    handler, hung, all = Handler(), HungCalls(), messages("k", "k", "a")
    hung.taken(LEASES[1])
    call = Call(all[:1])
    hung.add(call, LEASES[1])
    stage = under(LEASES[3], handler, hung)
    held = hung.held(ordered=True).keys
    call.perform(handler)
    call.finish()
    late = seen(stage.late())
    stage.run(all)

    assert (held, late["done"], hung.held(ordered=True)) == ({"k"}, [], NOTHING_HELD)
    assert flat(handler.calls) == [1, 1, 2, 3]


def test_a_call_of_a_lease_that_was_lost_before_it_hung_does_not_count():
    """Another relay of this process has taken the lease, and may have sent the same meanwhile."""
    handler, hung, all = Handler(), HungCalls(), messages("k", "a")
    hung.taken(LEASES[1])
    hung.taken(LEASES[2])
    finished_late(hung, Call(all[:1]), handler, LEASES[1])
    hung.note(LEASES[1], all[1:])
    handler.calls.clear()
    stage = Stage(handler, hung=hung, held=Held(LEASES[2]))
    stage.late()
    stage.run(all)

    assert flat(handler.calls) == [1, 2]


def test_a_relay_that_has_not_noticed_its_lost_lease_takes_no_answer_of_the_next():
    handler, hung, all = Handler(), HungCalls(), messages("k")
    hung.taken(LEASES[2])
    finished_late(hung, Call(all), handler, LEASES[2])
    late = [Stage(handler, hung=hung, held=Held(LEASES[epoch])).late().done for epoch in (1, 2)]

    assert late == [[], all]


def test_an_answer_that_could_not_be_settled_is_known_under_the_next_lease():
    handler, all = Handler(), messages("k")
    hung = hung_call(handler, [*messages(None, first=0), *all])
    for _ in Stage(handler, hung=hung, held=Held(LEASES[1])).batch_handler.late():
        break
    outcome = under(LEASES[2], handler, hung).run(all)

    assert (handler.calls, ids(outcome.done)) == ([], [1])


def test_the_outcome_of_one_message_is_not_that_of_another_with_its_id():
    """Ids are given out again when the log was emptied and its sequence restored."""
    handler = Handler()
    stage = Stage(handler)
    stage.hung.note(LEASE, messages("k", None))
    outcome = stage.run(messages("k", None))

    assert (flat(handler.calls), ids(outcome.done)) == ([1, 2], [1, 2])


def test_what_was_accepted_counts_for_the_row_that_was_parked_meanwhile():
    handler, (message,) = Handler(), messages("a")
    stage = Stage(handler)
    stage.hung.note(LEASE, [message])
    outcome = stage.run([again(message, 2)], parked=True)

    assert (handler.calls, ids(outcome.done)) == ([], [1])


@pytest.mark.parametrize("key", ["a", None])
def test_no_outcome_counts_for_what_a_person_decided_about(key):
    handler, all = Handler(), messages(key, "b")
    stage = Stage(handler)
    stage.hung.note(LEASE, all)
    stage.hung.known.forget({1})
    outcome = stage.run(all, parked=True)

    assert (handler.calls, sorted(ids(outcome.done))) == ([[1]], [1, 2])


@pytest.mark.parametrize("ordered", [True, False])
def test_of_a_key_that_has_its_turn_nothing_is_known_any_more_if_keys_have_an_order(ordered):
    known, all = KnownOutcomes(), messages("a", "a", None)
    known.note(all)
    known.hand_over(all[:1], ordered=ordered)

    assert ids(known.among(all, ordered=False)[0]) == ([3] if ordered else [2, 3])


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


class Calls(dict[Call, Any]):
    """A dict that is interrupted when it is gone through."""

    interrupted: Interrupted

    def __iter__(self) -> Iterator[Call]:
        """Interrupted at each."""
        for each in super().__iter__():
            self.interrupted.now()
            yield each


def test_two_relays_of_one_name_may_use_what_is_known_at_the_same_time():
    """One of them has not noticed yet that its lease is lost."""
    known, (first, *others) = KnownOutcomes(), messages(*"abc")
    known._outcomes = outcomes = Outcomes()
    known.note([first])
    outcomes.interrupted = Interrupted(lambda: known.note(others))
    known.forget({1})
    outcomes.interrupted.end()

    assert known.among([first, *others], ordered=True)[0] == others


def test_a_call_that_hangs_while_the_other_relay_looks_at_the_calls_stays_held():
    hung, all = HungCalls(), messages("a", "b")
    hung.taken(LEASE)
    hung._calls = calls = Calls()
    hung.add(Call(all[:1]))
    calls.interrupted = Interrupted(lambda: hung.add(Call(all[1:])))
    hung.come_back(LEASE, HandlerPolicy())
    calls.interrupted.end()

    assert hung.held(ordered=True).keys == {"a", "b"}


class Misjudging(HandlerPolicy):
    """Rules that have a mistake."""

    def failed(self, message: Message, verdict: Retry) -> Parking:
        """Raise, as nothing that is foreseen does."""
        raise LookupError(message, verdict)


def test_a_failure_in_judging_loses_no_answer():
    """What was done is not handled again, although its batch is."""
    handler, hung, all = Handler(lambda m: DONE if m.key else Retry("no")), HungCalls(), messages("a", None, "b")
    hung.taken(LEASE)
    with pytest.raises(LookupError):
        Stage(handler, Misjudging(), hung=hung).run(all)

    outcome = Stage(handler, hung=hung).run(all)

    assert (handler.calls, ids(outcome.done)) == ([[1], [2, 3], [2]], [1, 3])
