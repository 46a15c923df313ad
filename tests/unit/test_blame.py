"""Blame: a failure counts against a message only when it was alone, and others were accepted since it last failed."""

from hypothesis import given
from hypothesis import strategies as st

from outbox import Message
from outbox.worker.blame import Blame, Findings
from tests.support.stage import ids, messages

FIRST, SECOND, THIRD = messages("a", "b", "c")


def test_the_first_failure_counts_against_nobody_and_the_next_one_if_others_were_accepted_since():
    blame = Blame()
    blame.accepted(10)
    first = blame.failed_alone(FIRST)
    again = blame.failed_alone(FIRST)
    blame.accepted(1)

    assert (first, again, blame.failed_alone(FIRST), blame.failed_alone(FIRST)) == (False, False, True, False)


def test_what_was_accepted_before_the_destination_was_unavailable_counts_still():
    """The destination said itself that it is away: that is no failure of the message."""
    blame = Blame()
    blame.failed_alone(FIRST)
    blame.accepted(1)
    blame.refused_alone(FIRST)

    assert blame.failed_alone(FIRST)


def test_the_next_suspect_is_the_one_that_was_tried_longest_ago():
    blame = Blame()
    for message in (THIRD, FIRST, SECOND, THIRD):
        blame.failed_alone(message)

    assert ids(blame.next_suspect([FIRST, SECOND, THIRD])) == [1]
    assert ids(blame.next_suspect([SECOND, THIRD])) == [2]
    assert blame.next_suspect([]) == []


def test_a_message_that_is_not_handled_again_is_no_suspect():
    blame = Blame()
    blame.failed_alone(FIRST)
    before = (blame.some_suspects, blame.is_suspect(FIRST), blame.is_suspect(SECOND))
    blame.forget([FIRST, SECOND])

    assert before == (True, True, False)
    assert (blame.some_suspects, blame.is_suspect(FIRST)) == (False, False)


@given(st.lists(st.sampled_from([FIRST, SECOND, THIRD, None])))
def test_no_failure_counts_while_nothing_is_accepted_and_each_counts_at_most_once_for_what_is(steps):
    """A message fails alone, or one is accepted (None)."""
    blame, counted, accepted = Blame(), dict[Message, int](), 0
    for step in steps:
        if step is None:
            blame.accepted(1)
            accepted += 1
        elif blame.failed_alone(step):
            counted[step] = counted.get(step, 0) + 1

    assert all(count <= accepted for count in counted.values())


def test_pauses_are_counted_until_something_is_accepted():
    blame = Blame()
    blame.pauses += 3
    blame.accepted(1)

    assert blame.pauses == 0


def test_two_messages_that_fail_alone_stand_for_their_topic():
    one, two, other = *messages("a", "b", topic="gone"), messages("c", first=3)[0]
    all, findings = [one, two, other], Findings()
    findings.failed(one, "no")
    with_one = findings.failed_twice("gone", all)
    findings.failed(two, "no")
    with_two = findings.failed_twice("gone", all)
    findings.accepted([other])

    assert (with_one, with_two, findings.failed_twice("gone", all)) == (False, True, False)


def test_a_refused_topic_is_accepted_with_its_next_message():
    gone, findings = messages("a", topic="gone"), Findings(refused={"gone": "no stream", "lost": "no stream"})

    findings.accepted(gone)

    assert findings.refused == {"lost": "no stream"}


def test_errors_are_known_by_topic_and_one_that_all_have_is_that_of_the_destination():
    gone, findings = messages("x", topic="gone", first=9)[0], Findings()
    findings.failed(FIRST, "away")
    findings.failed(gone, "away")
    errors = findings.errors_by_topic([FIRST, SECOND, gone])

    assert errors == {"orders": "away", "gone": "away"}
    assert (findings.error_of(FIRST), findings.error_of(SECOND)) == (
        "away",
        "not accepted, and there was nothing else to try",
    )
    assert findings.error_of_all(errors.values()) == "away"
    assert findings.error_of_all(["away"]) is None
    assert findings.error_of_all(["away", "refused"]) is None
    findings.accepted([FIRST])
    assert findings.error_of_all(errors.values()) is None
