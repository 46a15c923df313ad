"""Which topics are silent: no answer comes for several of their messages, while others are accepted."""

from outbox.worker.blame import Blame
from outbox.worker.silences import Silences
from tests.support.stage import messages

HOLE, GOOD = (messages(None, None, topic=topic, first=first) for topic, first in (("hole", 1), ("good", 3)))


def test_topics_of_one_call_without_an_answer_are_suspected_until_they_are_answered():
    silences = Silences(Blame())
    silences.unanswered([*HOLE, *GOOD], alone=False)
    suspected = list(silences.suspected)
    silences.answered(GOOD)

    assert (suspected, list(silences.suspected), silences.is_silent("hole")) == (["hole", "good"], ["hole"], False)


def test_a_topic_is_silent_when_two_of_its_messages_had_no_answer_and_others_were_accepted():
    blame = Blame()
    silences = Silences(blame)
    silences.unanswered(HOLE[:1], alone=True)
    blame.accepted(1)
    of_one = silences.is_silent("hole")
    silences.unanswered(HOLE[:1], alone=True)
    of_one_again = silences.is_silent("hole")
    silences.unanswered(HOLE[1:], alone=True)
    of_two = silences.is_silent("hole")
    silences.answered(HOLE[:1])

    assert (of_one, of_one_again, of_two, silences.is_silent("hole")) == (False, False, True, False)


def test_while_nothing_is_accepted_the_destination_is_away_and_no_topic_silent():
    silences = Silences(Blame())
    silences.unanswered(HOLE, alone=True)

    assert not silences.is_silent("hole")
