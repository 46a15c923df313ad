"""The newest message of a key stands for the earlier ones."""

from datetime import UTC, datetime

from outbox.worker.policy import newest
from tests.support.stage import ids, messages


def test_the_newest_of_each_topic_and_key_stands_for_the_earlier():
    found = [
        *messages("a", "b", None, "a"),
        *messages("a", "b", first=5, topic="prices"),
        *messages(None, "a", first=7),
    ]

    newer, replaced = newest(found)

    assert (ids(newer), ids(replaced)) == ([2, 3, 5, 6, 7, 8], [1, 4])


def test_a_message_that_may_expire_stands_for_no_other():
    """Otherwise none of the key would be handled when it expires before it is handed over."""
    found = messages("a", "a", "b", "a", "b", "b", "c")
    for message in found[1], found[5], found[6]:
        message.expires_at = datetime.now(UTC)

    newer, replaced = newest(found)

    assert (ids(newer), ids(replaced)) == ([4, 5, 6, 7], [1, 2, 3])
