"""The messages of a batch: each gets one outcome, and what is blocked by its key goes with it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from outbox import Retry
from outbox.worker.outcome import Outcome, Pending
from outbox.worker.policy import BEHIND, EXPIRED, with_one_head
from tests.support.stage import POLICY, ids, messages, seen

KEYS = st.lists(st.sampled_from(["a", "b", None]), max_size=12)


def pending(*keys: str | None) -> Pending:
    """A batch with such messages."""
    return Pending(messages(*keys), quota=0, parked=False)


def test_what_a_parked_message_blocks_is_parked_with_it_also_what_is_before_it():
    batch = pending("a", "b", "a", None, "a")
    middle = batch.messages[2]
    batch.resolve(batch.messages[3:4], [(middle, POLICY.failed(middle, Retry("no")))])

    assert seen(batch.outcome) == {"done": [4], "parked": [(3, "retry", 1), (1, "behind", 0), (5, "behind", 0)],
                                   "open": []}  # fmt: skip
    assert ids(batch.messages) == [2]


def test_a_part_has_the_outcomes_since_the_one_before_and_the_first_message_without_one():
    batch = pending("a", "b", "c")
    batch.resolve(batch.messages[:1], [])
    first = batch.next_part(away=True)
    batch.resolve(batch.messages, [])
    second = batch.next_part(away=False)

    assert [(ids(part.done), part.next and part.next.id, part.away) for part in (first, second)] == [
        ([1], 2, True),
        ([2, 3], None, False),
    ]


def test_there_is_a_part_when_some_have_an_outcome_and_others_not_and_it_is_time():
    batch = pending("a", "b")
    before = batch.has_part()
    batch.resolve(batch.messages[:1], [])
    some = (batch.has_part(), batch.has_part(after=3600))
    batch.resolve(batch.messages, [])

    assert (before, some, batch.has_part()) == (False, (True, False), False)


def test_topics_are_left_with_what_is_in_their_keys():
    batch = Pending([*messages("a", "b", topic="gone"), *messages("a", "c", None, first=3)], quota=0, parked=False)
    batch.keep_topics_open(batch.messages[:1])
    batch.keep_open()

    assert (ids(batch.outcome.open), batch.outcome.refused, batch.messages) == ([1, 2, 3, 4, 5], {"gone": None}, [])


def test_what_comes_before_a_message_of_a_topic_that_is_left_stays_in_the_batch():
    first, third = messages("a", "a")
    (second,) = messages("a", topic="gone", first=9)
    batch = Pending([first, second, third], quota=0, parked=True)
    batch.keep_topics_open([second])

    assert (ids(batch.outcome.open), ids(batch.messages)) == ([9, 2], [1])


def test_a_message_that_was_left_open_while_a_call_had_it_is_done_with_its_answer():
    batch = Pending(messages("a", "b"), quota=0, parked=True)
    under_way, other = batch.messages
    batch.keep_topics_open([other])
    batch.resolve([under_way], [])

    assert (ids(batch.outcome.done), ids(batch.outcome.open), batch.messages) == ([1], [2], [])


def test_the_answer_about_a_message_of_another_batch_ends_no_other():
    batch, (other,) = pending("a"), messages("b", first=9)
    batch.resolve([other], [])

    assert (ids(batch.outcome.done), ids(batch.messages)) == ([9], [1])


def test_of_a_key_the_first_parking_holds_the_key_and_the_rest_is_behind():
    first, second, other = messages("a", "a", "b")
    retry, dead = POLICY.failed(first, Retry("no")), replace(POLICY.dead(first, "no"), holds=False)

    assert with_one_head([(first, retry), (second, retry), (other, retry)])[1:] == [(second, BEHIND), (other, retry)]
    assert with_one_head([(first, BEHIND), (second, retry)]) == [(first, BEHIND), (second, BEHIND)]
    assert with_one_head([(first, dead), (second, retry)]) == [(first, dead), (second, retry)]


def test_only_expired_messages_are_parked_as_dead_and_by_the_clock_alone():
    now = datetime.now(UTC)
    without, batch = pending("a", "b", "c"), pending("a", "b", "c")
    batch = Pending(batch.messages, 0, parked=False, now=now)
    for each in (without, batch):
        each.messages[0].expires_at, each.messages[1].expires_at = now, now + timedelta(seconds=1)
        each.expire(each.messages)

    assert (ids(without.timed()), ids(batch.timed())) == ([], [2])
    assert (without.outcome.parked, [(m.id, p) for m, p in batch.outcome.parked]) == ([], [(1, EXPIRED)])


def test_topics_that_wait_or_are_refused_are_not_accepted_and_none_is_while_the_destination_is_away():
    one, other, third = messages("a", topic="one")[0], messages("b", topic="other")[0], messages("c", topic="third")[0]
    outcome = Outcome(done=[one, other, third], parked=[(other, POLICY.waiting(other, "no"))], refused={"third": None})

    assert outcome.accepted_topics == {"one"}
    outcome.away = True
    assert outcome.accepted_topics == set()


@given(KEYS, st.data())
def test_every_message_gets_one_outcome_or_none_whatever_is_resolved(keys, data):
    batch, all = pending(*keys), pending(*keys).messages
    while batch.messages:
        some = [each for each in batch.messages if data.draw(st.booleans())] or batch.messages[:1]
        done = data.draw(st.integers(0, len(some)))
        batch.resolve(some[:done], [(each, POLICY.failed(each, Retry("no"))) for each in some[done:]])
        outcome = [*batch.outcome.done, *(each for each, _ in batch.outcome.parked)]
        assert sorted(ids([*outcome, *batch.messages])) == ids(all)
        held = {each.key for each, parking in batch.outcome.parked if parking is not BEHIND}
        assert not held & {each.key for each in batch.messages if each.key is not None}


@given(KEYS)
def test_heads_are_the_first_of_each_key_and_all_without_one(keys):
    batch = pending(*keys)
    expected = [each for n, each in enumerate(batch.messages) if each.key is None or each.key not in keys[:n]]

    assert sorted(ids(batch.heads())) == ids(expected)
