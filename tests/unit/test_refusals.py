"""What a worker remembers of topics that the destination refuses."""

from outbox.worker.refusals import Refusals


def test_an_error_is_stored_again_at_its_time_although_the_topic_was_accepted_meanwhile():
    """A topic may be accepted and refused in turn, and each refusal may have another text."""
    now = 100.0
    refusals = Refusals(lambda: now)
    refusals.note({"t"}, set())
    first = list(refusals.to_store({"t": "one"}))
    refusals.stored("t", 160.0)

    refusals.note(set(), {"t"})
    refusals.note({"t"}, set())
    too_early = list(refusals.to_store({"t": "two"}))
    now = 160.0

    assert (first, too_early, list(refusals.to_store({"t": "two"}))) == ([("t", "one")], [], [("t", "two")])
