"""Handing over, without a database: how many messages a call holds, and who is to blame for what goes wrong."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from outbox import Message, Reject, Retry, Unavailable, Verdict
from outbox.model.verdict import DONE
from outbox.telemetry.failure_log import FailureLog, Words
from outbox.worker.calls import Call
from outbox.worker.judging import Judge
from outbox.worker.outcome import Outcome
from outbox.worker.policy import HandlerPolicy
from tests.support.stage import DESTINATION, POLICY, Handler, Held, Stage, again, ids, messages, only, raising, seen

# How many messages a call holds


def test_calls_grow_step_by_step_while_they_are_quick(monkeypatch):
    monkeypatch.setattr(Call, "seconds", 0.0)  # whatever else the machine does
    handler = Handler()

    Stage(handler, most=100).run(messages(*[None] * 300))

    assert [len(call) for call in handler.calls] == [1, 8, 64, 100, 100, 27]


def test_calls_shrink_to_a_share_of_the_deadline(monkeypatch):
    """A message takes a fifth of the deadline: a call with more than one would not be safe."""
    took = POLICY.deadline.total_seconds() / 5
    monkeypatch.setattr(Call, "seconds", property(lambda call: took * len(call.messages)))
    handler = Handler()

    Stage(handler).run(messages(*[None] * 12))

    assert [len(call) for call in handler.calls] == [1] * 12


@pytest.mark.parametrize("share", [0.24, 0.9])
def test_calls_have_the_least_number_of_messages_however_long_they_take(monkeypatch, share):
    """The handler handles the messages of a call at the same time."""
    monkeypatch.setattr(Call, "seconds", POLICY.deadline.total_seconds() * share)
    handler = Handler()

    Stage(handler, replace(POLICY, least=4)).run(messages(*[None] * 10))

    assert [len(call) for call in handler.calls] == [4, 4, 2]


def test_after_a_failure_a_call_has_one_message_to_be_blamed(monkeypatch):
    """Then as many as before."""
    monkeypatch.setattr(Call, "seconds", POLICY.deadline.total_seconds())
    handler = Handler(raising(2))

    Stage(handler, replace(POLICY, least=4)).run(messages(*[None] * 8))

    assert [len(call) for call in handler.calls][:3] == [4, 1, 4]


# Parts of a batch


def test_a_batch_that_takes_long_comes_in_parts():
    """Each tells which message is the first without an outcome; what was told before is not told again."""
    verdicts: dict[int, Verdict] = {2: Retry("no"), 3: Reject("never")}
    stage = Stage(Handler(lambda message: verdicts.get(message.id or 0, DONE)), part_seconds=0, most=2)

    parts = list(stage.parts(messages(*"abcdef"), quota=0))

    assert [(seen(part), part.next and part.next.id) for part in parts] == [
        ({"done": [1], "parked": [], "open": []}, 2),
        ({"done": [], "parked": [(2, "retry", 1), (3, "dead", 1)], "open": []}, 4),
        ({"done": [4, 5], "parked": [], "open": []}, 6),
        ({"done": [6], "parked": [], "open": []}, None),
    ]


def test_a_part_comes_before_a_pause():
    """An outage may last for hours, and a crash must not repeat what was accepted before it."""
    stage = Stage(Handler(only(2, verdict=Unavailable("away"))), looks=30)

    parts = list(stage.parts(messages("a", "b"), quota=0))

    assert [seen(part) for part in parts] == [
        {"done": [1], "parked": [], "open": []},
        {"done": [], "parked": [], "open": [2]},
    ]


# Verdicts


@pytest.mark.parametrize("many", [False, True], ids=["alone", "among others"])
def test_verdicts_are_followed(many):
    verdicts: dict[int, Verdict] = {
        1: Retry("again"), 2: Retry("later", timedelta(minutes=1)), 3: Reject("never"), 4: DONE
    }  # fmt: skip
    stage = Stage(Handler(lambda message: verdicts.get(message.id or 0, DONE)))
    if many:
        stage.run(messages(*[None] * 9, first=100))

    outcome = stage.run(messages(None, None, None, None))

    assert [
        (m.id, f.state, f.attempts, f.delay, f.error) for m, f in sorted(outcome.parked, key=lambda a: a[0].id or 0)
    ] == [
        (1, "retry", 1, timedelta(0), "again"),
        (2, "retry", 1, timedelta(minutes=1), "later"),
        (3, "dead", 1, None, "never"),
    ]
    assert ids(outcome.done) == [4]


def test_what_stands_behind_a_failed_message_is_blocked_and_not_counted():
    stage = Stage(Handler(only(1, verdict=Retry("no"))))

    outcome = stage.run(messages("a", "b", "a", "b", "a"))

    assert seen(outcome) == {
        "done": [2, 4],
        "parked": [(1, "retry", 1), (3, "behind", 0), (5, "behind", 0)],
        "open": [],
    }


@pytest.mark.parametrize("block", [True, False])
def test_a_dead_letter_holds_its_key_by_policy(block):
    policy = HandlerPolicy(block_on_dead=block)

    outcome = Stage(Handler(only(1, verdict=Reject("no"))), policy).run(messages("a", "b", "a"))

    assert seen(outcome) == (
        {"done": [2], "parked": [(1, "dead", 1), (3, "behind", 0)], "open": []}
        if block
        else {"done": [2, 3], "parked": [(1, "dead", 1)], "open": []}
    )


def test_attempts_are_used_up():
    stage = Stage(Handler(only(1, verdict=Retry("no"))))
    (message,) = messages("a")

    states = [stage.run([again(message, attempt)]).parked[0][1].state for attempt in (1, 2, 3)]

    assert states == ["retry", "retry", "dead"]


# Whose fault it was


def test_a_message_that_raises_counts_only_when_another_was_accepted_since():
    stage = Stage(Handler(raising(1)), looks=40)
    (poison,) = messages("a")

    alone = seen(stage.run([poison]))
    stage.stop.looks = 1000
    with_another = seen(stage.run([poison, *messages("b", first=2)]))

    assert alone == {"done": [], "parked": [], "open": [1]}
    assert with_another == {"done": [2], "parked": [(1, "retry", 1)], "open": []}


def test_a_call_that_would_begin_too_late_is_not_made_and_counts_nothing():
    """The message has failed alone, and others were accepted since: its next failure would count."""
    handler, held = Handler(raising(1)), Held()
    stage = Stage(handler, looks=5, held=held)
    (message,) = messages("a")
    stage.run([message])
    stage.stop.looks = 1000
    stage.run(messages("b", first=2))
    handler.answer = lambda _: DONE
    handler.calls.clear()

    held.moments = [-math.inf, -math.inf, -math.inf, math.inf]
    outcome = stage.run([message])

    assert seen(outcome) == {"done": [1], "parked": [], "open": []}
    assert handler.calls == [[1]]


def test_a_message_that_raises_among_many_is_found_and_the_others_go_on():
    outcome = Stage(Handler(raising(50))).run(messages(*[None] * 100))

    assert outcome.parked[0][0].id == 50
    assert [parking.attempts for _, parking in outcome.parked] == [1]
    assert sorted(ids(outcome.done)) == [id for id in range(1, 101) if id != 50]


def test_two_messages_that_raise_do_not_hide_behind_each_other():
    outcome = Stage(Handler(raising(1, 2))).run(messages("a", "b", "c"))

    assert seen(outcome)["parked"] == [(1, "retry", 1), (2, "retry", 1)]
    assert ids(outcome.done) == [3]


@pytest.mark.parametrize("answer", [raising(*range(100)), lambda _: Unavailable("away")], ids=["raises", "unavailable"])
def test_a_destination_that_is_away_counts_nothing(answer):
    """A stop comes after a while: nothing was moved."""
    outcome = Stage(Handler(answer), looks=400).run(messages(*"abcdefgh"))

    assert seen(outcome) == {"done": [], "parked": [], "open": list(range(1, 9))}


def test_a_destination_that_comes_back_gets_everything_in_order():
    handler, tries = Handler(), 0

    def answer(message: Message) -> Verdict:
        nonlocal tries
        tries += 1
        return Unavailable("away") if tries < 20 else DONE

    handler.answer = answer
    outcome = Stage(handler).run(messages("a", "b", "a", "b"))

    assert seen(outcome)["parked"] == []
    assert [id for id in ids(outcome.done) if id % 2] == [1, 3]
    assert [id for id in ids(outcome.done) if not id % 2] == [2, 4]


def through_an_outage(calls: int, *, everything: bool = True) -> Outcome:
    """So many calls at once, for a destination that accepts 30 messages, refuses ten calls, and is back.

    There are more keys than refused calls, so that the batch has another message to try all the time.
    """
    lock, accepted, refused = threading.Lock(), list[int](), 0

    def handler(given: Sequence[Message]) -> Sequence[Verdict]:
        nonlocal refused
        with lock:
            taken = given[: 30 - len(accepted)] if refused < 10 else given
            refused += len(taken) < len(given)
            accepted.extend(ids(taken))
            away = Unavailable("away", everything=everything)
            return [DONE] * len(taken) + [away] * (len(given) - len(taken))

    outcome = Stage(handler, concurrency=calls, others=True).run(messages(*"abcdefghijklmnopqrst" * 10))

    for key in range(20):
        numbers = [id for id in accepted if id % 20 == key]
        assert numbers == sorted(numbers)
    return outcome


@pytest.mark.parametrize("calls", [1, 3])
def test_an_outage_that_begins_within_a_batch_parks_nothing(calls):
    """Whether other messages were accepted before, or in a call side by side, shows nothing about the present."""
    outcome = through_an_outage(calls)

    assert (outcome.parked, sorted(ids(outcome.done)), outcome.open) == ([], list(range(1, 201)), [])


def test_a_judge_that_trusts_earlier_messages_would_park(monkeypatch):
    monkeypatch.setattr(Judge, "_is_passed", lambda _judge, batch, _message, away: batch.findings.some_accepted)

    assert through_an_outage(3).parked


def test_what_a_destination_refuses_that_accepts_others_holds_nobody_up():
    """A queue may be full from one message to the next: other queues of the destination go on."""
    outcome = through_an_outage(1, everything=False)

    assert {parking.state for _, parking in outcome.parked} == {"waiting", "behind"}


def test_some_unavailable_messages_wait_and_the_rest_goes_on():
    outcome = Stage(Handler(only(2, 3, verdict=Unavailable("no stream")))).run(messages("a", "b", "c", "b", "a"))

    assert seen(outcome) == {
        "done": [1, 5],
        "parked": [(2, "waiting", 0), (4, "behind", 0), (3, "waiting", 0)],
        "open": [],
    } or sorted(seen(outcome)["parked"]) == [(2, "waiting", 0), (3, "waiting", 0), (4, "behind", 0)]
    assert ids(outcome.done) == [1, 5]


def test_a_message_of_a_missing_topic_waits_also_when_it_is_the_last_of_its_batch():
    """Others of the batch were accepted, so it is not the whole destination that is away."""
    (missing,) = messages("b", topic="gone", first=2)
    handler = Handler(lambda message: Unavailable("no stream") if message.topic == "gone" else DONE)

    outcome = Stage(handler, looks=100).run([*messages("a"), missing])

    assert seen(outcome) == {"done": [1], "parked": [(2, "waiting", 0)], "open": []}


def test_a_message_refused_as_if_the_server_were_away_waits_when_a_later_one_of_its_call_was_accepted():
    """The later one shows that the server is there: the log goes on, and no outage begins."""
    handler = Handler(only(2, verdict=Unavailable("403", everything=True)))

    outcome = Stage(handler, looks=20).run(messages("a", "b", "c", "d"))

    assert handler.calls == [[1], [2, 3, 4]]
    assert seen(outcome) == {"done": [1, 3, 4], "parked": [(2, "waiting", 0)], "open": []}
    assert not outcome.away


def test_what_waits_because_there_was_nothing_else_to_try_keeps_the_destinations_text():
    stage = Stage(Handler(lambda message: Unavailable(f"no stream takes {message.topic}")), others=True)

    outcome = stage.run(messages("a", "b"), quota=10)

    text = "no stream takes orders"
    assert sorted((message.id, parking.state, parking.error) for message, parking in outcome.parked) == [
        (1, "waiting", text),
        (2, "waiting", text),
    ]


@pytest.mark.parametrize(
    ("answer", "topics", "accepted", "said"),
    [
        (lambda m: Unavailable("gone", everything=True), "ab", "", "accepts nothing, messages wait: gone"),
        (lambda m: Unavailable("gone", everything=True), "a", "", "accepts nothing, messages wait: gone"),
        (lambda m: Unavailable("gone"), "ab", "", "accepts nothing, messages wait: gone"),
        (lambda m: Unavailable("gone"), "a", "", "does not accept topic a, its messages wait: gone"),
        (lambda m: Unavailable(f"no {m.topic}"), "a", "", "does not accept topic a, its messages wait: no a"),
        (lambda m: Unavailable("gone"), "ab", "c", "does not accept topic a, its messages wait: gone"),
    ],
)
def test_it_is_told_whether_the_server_or_a_topic_is_meant(caplog, answer, topics, accepted, said):
    """A sender may say that nothing is accepted; where it does not, several topics with one answer say so."""
    handler = Handler(lambda message: DONE if message.topic in accepted else answer(message))
    stage = Stage(handler, looks=20)
    stage.listeners.listen(FailureLog("relay", Words("relay", DESTINATION)).told)
    all = [each for n, topic in enumerate(accepted + topics) for each in messages(f"k{n}", topic=topic, first=n + 1)]

    stage.run(all)

    assert f"relay: {DESTINATION} {said}" in [record.message for record in caplog.records]


def test_a_probe_of_a_server_that_is_away_costs_one_call_of_one_message():
    """However many topics wait for it."""
    handler = Handler(lambda _: Unavailable("gone", everything=True))
    stage = Stage(handler)
    first = [messages(f"k{n}", topic=f"t{n}", first=n + 1)[0] for n in range(20)]
    stage.run(first, parked=True, quota=0)
    before = len(handler.calls)

    outcome = stage.run(first, parked=True, quota=0)

    assert (len(handler.calls) - before, len(handler.calls[-1])) == (1, 1)
    assert (len(outcome.parked), len(outcome.open)) == (1, 19)


def test_messages_that_are_refused_as_if_the_server_were_away_keep_nothing_behind_them_waiting():
    """A firewall before an endpoint may say 403 to some messages for ever, and those stand first."""
    handler = Handler(only(1, 2, verdict=Unavailable("403", everything=True)))
    stage, left = Stage(handler), messages("a", "b", "c", "a", None, "d")

    for _ in range(3):
        left = in_next_turn(left, stage.run(left, parked=True, quota=0))

    assert sorted(ids(left)) == [1, 2, 4]


def in_next_turn(all: list[Message], outcome: Outcome) -> list[Message]:
    """What is left, as it is read the next time: what was tried comes last."""
    tried = [message for message, _ in outcome.parked]
    return [message for message in all if message not in (*tried, *outcome.done)] + tried


def test_each_probe_of_a_server_that_is_away_is_another_message():
    handler = Handler(lambda _: Unavailable("gone", everything=True))
    stage, all = Stage(handler), messages("a", "b", None)

    for _ in range(5):
        all = in_next_turn(all, stage.run(all, parked=True, quota=0))

    assert handler.calls == [[1], [2], [3], [1], [2]]


def test_without_room_the_rest_pauses():
    outcome = Stage(Handler(only(2, 3, verdict=Unavailable("no stream"))), looks=100).run(
        messages("a", "b", "c", "d"), quota=1
    )

    assert (len(outcome.parked), len(outcome.open), ids(outcome.done)) == (1, 1, [1, 4])


# Beside the log: nobody waits for a destination that is away there


def test_a_message_that_raises_does_not_keep_others_of_its_topic_from_their_turn():
    """The first of what is due raises and nothing else flows: the others get their turn all the same."""
    outcome = Stage(Handler(raising(1))).run(messages("a", "b", "c"), parked=True, quota=0)

    assert ids(outcome.done) == [2, 3]
    assert seen(outcome)["parked"] == [(1, "retry", 1)]


def test_a_missing_topic_is_left_and_the_others_go_on():
    missing, present = messages("a", "b", "c", topic="gone"), messages("d", "e", first=10)
    handler = Handler(lambda message: Unavailable("no stream") if message.topic == "gone" else DONE)

    outcome = Stage(handler).run([*missing, *present], parked=True, quota=0)

    assert seen(outcome) == {"done": [10, 11], "parked": [(1, "waiting", 0)], "open": [2, 3]}
    assert outcome.refused == {"gone": "no stream"}
    assert len(handler.calls) < 8


# What a sender must not do


@pytest.mark.parametrize(
    "answer",
    [lambda given: [DONE] * (len(given) - 1), lambda given: [DONE] * (len(given) + 1), lambda given: None,
     lambda given: (DONE for _ in given), lambda given: [None] * len(given), lambda given: ["done"] * len(given)],
    ids=["too few", "too many", "none", "a generator", "not verdicts", "texts"],
)  # fmt: skip
@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.timeout(20)
def test_a_sender_that_breaks_the_contract_gets_nothing_settled(answer, parked):
    stage = Stage(answer, looks=200)

    outcome = stage.run(messages("a", "b", "a"), parked=parked, quota=0 if parked else 1000)

    # What is parked is tried again after the others.
    again = [(1, "waiting", 0), (2, "waiting", 0)] if parked else []
    assert seen(outcome) == {"done": [], "parked": again, "open": [1, 2, 3]}


def test_a_done_behind_a_failure_of_its_key_is_believed():
    """It is delivered, and cannot be taken back: it is not sent again."""

    def answer(given: Sequence[Message]) -> Sequence[Verdict]:
        return [Retry("no") if message.id == 11 else DONE for message in given]

    stage = Stage(answer)
    stage.run(messages(*[None] * 9))

    assert seen(stage.run(messages("a", "a", "a", first=11))) == {
        "done": [12, 13], "parked": [(11, "retry", 1)], "open": []
    }  # fmt: skip


@pytest.mark.timeout(20)
def test_a_handler_that_exits_the_interpreter_is_one_that_raises():
    def answer(message: Message) -> Verdict:
        if message.id == 1:
            raise SystemExit(3)
        return DONE

    handler = Handler(answer)
    outcome = Stage(handler).run(messages("a", "b", "c"))

    assert seen(outcome) == {"done": [2, 3], "parked": [(1, "retry", 1)], "open": []}


# A stop


def test_a_stop_leaves_the_rest_open():
    handler = Handler()
    stage = Stage(handler, looks=3)

    outcome = stage.run(messages(*[None] * 20))

    assert (len(outcome.done), len(outcome.open)) == (9, 11)
    assert ids(outcome.done) + ids(outcome.open) == list(range(1, 21))
