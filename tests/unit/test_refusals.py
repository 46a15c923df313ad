"""What a worker remembers of topics that the destination refuses."""

from outbox.worker.refusals import Refusals


def test_an_error_is_stored_again_at_its_time_although_the_topic_was_accepted_meanwhile():
    """A topic may be accepted and refused in turn, and each refusal may have another text."""
    now = 100.0
    refusals = Refusals(lambda: now)
    refusals.note({"t": "no"}, set())
    first = list(refusals.to_store({"t": "one"}))
    refusals.stored("t", 160.0)

    refusals.note({}, {"t"})
    refusals.note({"t": "no"}, set())
    too_early = list(refusals.to_store({"t": "two"}))
    now = 160.0

    assert (first, too_early, list(refusals.to_store({"t": "two"}))) == ([("t", "one")], [], [("t", "two")])


def test_a_refused_topic_pauses_and_is_then_probed_until_it_is_accepted():
    now = 100.0
    refusals = Refusals(lambda: now)
    refusals.note({"t": "no stream"}, set())
    paused = refusals.paused(), refusals.probed()
    now = 101.0
    over = refusals.paused(), refusals.probed()
    refusals.note({}, {"t"})

    assert paused == ({"t": "no stream"}, set())
    assert over == ({}, {"t"})
    assert (refusals.paused(), refusals.probed(), refusals.next()) == ({}, set(), None)


def test_a_topic_of_which_some_messages_are_accepted_is_not_probed_by_one():
    now = 100.0
    refusals = Refusals(lambda: now)
    refusals.note({"t": "partition 3 has no leader"}, {"t"})
    now = 101.0

    assert (refusals.paused(), refusals.probed()) == ({}, set())


def test_of_many_refused_topics_some_are_probed_at_once_and_the_others_pause():
    now = 100.0
    refusals = Refusals(lambda: now)
    refusals.note({f"t{n}": "no" for n in range(200)}, set())
    now = 110.0

    assert (len(refusals.probed()), len(refusals.paused())) == (50, 150)
    assert refusals.next() == 110.2


def test_topics_without_a_message_for_a_probe_let_others_have_their_turn():
    now = 100.0
    refusals = Refusals(lambda: now)
    refusals.note({f"t{n}": "no" for n in range(100)}, set())
    now = 110.0
    first = set(refusals.probed())
    refusals.missed(first, nothing_due=False)
    second = set(refusals.probed())
    refusals.missed(second, nothing_due=True)

    assert (len(first | second), len(refusals.paused())) == (100, 50)
