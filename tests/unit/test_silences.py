"""Which topics are silent: no answer comes for several of their messages, while others are accepted."""

from types import SimpleNamespace
from typing import Any

from outbox.model.verdict import DONE, Unavailable
from outbox.worker.blame import Blame
from outbox.worker.judging import Judge
from outbox.worker.silences import PATIENCE_SECONDS, Silences
from tests.support.stage import POLICY, messages

HOLE, GOOD = (messages(None, None, topic=topic, first=first) for topic, first in (("hole", 1), ("good", 3)))


def test_topics_of_one_call_without_an_answer_are_suspected_until_they_are_answered():
    silences = Silences(Blame())
    silences.unanswered([*HOLE, *GOOD], of=4, alone=False)
    suspected = list(silences.suspected)
    silences.answered(GOOD)

    assert (suspected, list(silences.suspected), silences.is_silent("hole")) == (["hole", "good"], ["hole"], False)


def test_a_topic_is_silent_when_two_of_its_messages_had_no_answer_and_others_were_accepted():
    blame = Blame()
    silences = Silences(blame)
    silences.unanswered(HOLE[:1], of=1, alone=True)
    blame.accepted(1)
    of_one = silences.is_silent("hole")
    silences.unanswered(HOLE[:1], of=1, alone=True)
    of_one_again = silences.is_silent("hole")
    silences.unanswered(HOLE[1:], of=1, alone=True)
    of_two = silences.is_silent_alone("hole")
    silences.answered(HOLE[:1])

    assert (of_one, of_one_again, of_two, silences.is_silent("hole")) == (False, False, True, False)


def test_calls_without_an_answer_may_have_too_many_messages_and_one_with_a_single_message_shows_a_silent_topic():
    silences, found = Silences(Blame()), []
    for given, of in ((HOLE, 2), (HOLE, 2), (HOLE[:1], 2), (HOLE[:1], 1)):
        silences.unanswered(given, of=of, alone=True)
        found.append((silences.is_silent("hole"), silences.is_silent_alone("hole")))

    assert found == [(False, False)] * 3 + [(True, False)]


def test_a_message_that_has_no_answer_again_and_again_is_no_silent_topic():
    silences = Silences(Blame())
    for _ in range(3):
        silences.unanswered(HOLE[:1], of=1, alone=True)

    assert not silences.is_silent("hole")


def test_a_message_that_is_refused_late_beside_others_was_not_alone_in_its_call():
    silences, nothing = Silences(Blame()), Any
    judge = Judge(POLICY, blame=nothing, silences=silences, size=nothing, outages=nothing)  # type: ignore[arg-type]
    for refused, accepted in zip(HOLE, GOOD, strict=True):
        answers = [(refused, Unavailable("no answer")), (accepted, DONE)]
        call: Any = SimpleNamespace(messages=[refused, accepted], answers=answers, seconds=PATIENCE_SECONDS)
        judge._note_silence(call)

    assert (list(silences.suspected), silences.is_silent("hole")) == (["hole"], False)
