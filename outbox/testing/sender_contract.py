"""The contract of senders as a suite: a sender that passes the suite may be given messages.

    class TestWebhook(SenderContract):
        @pytest.fixture
        def destination(self):
            return WebhookDestination(...)

A `Destination` tells the suite how to open a sender, how to see the stored messages, and how to cause failures. Tests
of failures beyond the destination are skipped.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from outbox.errors import InvalidMessageError
from outbox.model.limits import MAX_KEY_BYTES, MAX_TAGS, MAX_TOPIC
from outbox.model.message import Message, uuid7
from outbox.model.verdict import Done, Reject, Unavailable, Verdict
from outbox.senders.port import Sender

#: All topics that the suite uses, apart from those of arbitrary messages.
TOPICS = ("alpha", "beta", "gamma")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A copy of a message at the destination."""

    message_id: UUID
    topic: str | None
    key: str | None
    tags: str | None
    headers: Mapping[str, str]
    content_type: str | None
    body: bytes


class Destination(ABC):
    """The destination under test. Several senders may be open at once."""

    #: The seconds that a call of `send` may take, whatever state the destination is in.
    deadline: float = 5.0
    #: Fields of `Stored` that cannot be read back, and so are not compared.
    unreadable: frozenset[str] = frozenset()
    #: Whether the destination takes topics that were not made there before; if not, the suite keeps to `TOPICS`.
    takes_any_topic: bool = True

    @abstractmethod
    def open(self) -> Sender:
        """Return a new sender. The destination may be out of reach."""

    @abstractmethod
    def stored(self) -> Sequence[Stored]:
        """Return every copy that was ever stored, in the order of arrival. The destination can be reached."""

    def fail(self, topic: str) -> None:
        """Refuse from now on to store messages of `topic`, of `TOPICS`; store messages of the other topics."""
        _cannot("fail a single topic")

    def disappear(self) -> None:
        """Be out of reach from now on: connections are refused and lost."""
        _cannot("disappear")

    def fall_silent(self) -> None:
        """Accept connections from now on, and never answer."""
        _cannot("fall silent")

    def lose_next_answer(self) -> None:
        """Store the next message, but lose the answer to its sender."""
        _cannot("lose an answer")

    def recover(self) -> None:
        """End every failure."""
        _cannot("recover")


class SenderContract:
    """The suite. Subclass it with a fixture `destination`."""

    @pytest.fixture
    def destination(self) -> Destination:
        """The destination under test."""
        raise NotImplementedError("a subclass of SenderContract has a fixture `destination`")

    @pytest.fixture
    def sender(self, destination: Destination) -> Iterator[Sender]:
        """A sender to the destination."""
        sender = destination.open()
        yield sender
        sender.close()

    def test_an_empty_call_has_no_verdicts(self, sender: Sender) -> None:
        """Accept a call without messages, because a worker may have no message left to send."""
        assert list(sender.send([])) == []

    def test_done_means_stored(self, destination: Destination, sender: Sender) -> None:
        """Find every message at the destination right after the call."""
        sent = [a_message("alpha", n) for n in range(100)]

        check_all_done(sender.send(sent), sent)

        check_stored(destination, sent)

    def test_verdicts_are_in_the_order_of_the_messages(self, destination: Destination, sender: Sender) -> None:
        """Return a verdict for each message, at the message's place."""
        destination.fail("beta")
        sent = [a_message("beta" if n < 5 or n % 3 == 0 else "alpha", n) for n in range(30)]

        verdicts = sender.send(sent)

        assert [isinstance(verdict, Done) for verdict in verdicts] == [one.topic == "alpha" for one in sent]
        check_stored(destination, [one for one in sent if one.topic == "alpha"])

    def test_a_key_keeps_its_order(self, destination: Destination, sender: Sender) -> None:
        """Keep the order of a key across topics, within a call and over several calls."""
        sent = [a_message(TOPICS[n % 3], n, key=f"key-{n % 7}") for n in range(210)]

        verdicts = [verdict for start in range(0, 210, 70) for verdict in sender.send(sent[start : start + 70])]

        check_all_done(verdicts, sent)
        check_stored(destination, sent)

    def test_nothing_of_a_key_is_done_after_its_first_failure(self, destination: Destination, sender: Sender) -> None:
        """Stop a key after its first failure; other keys and keyless messages are not concerned."""
        destination.fail("beta")
        plan = [("alpha", "a"), ("beta", "a"), ("alpha", "a"), ("gamma", "b"), ("alpha", None), ("beta", None)]
        plan += [("gamma", "a"), ("alpha", "b"), ("gamma", None), ("alpha", "a")]
        sent = [a_message(topic, n, key=key) for n, (topic, key) in enumerate(plan)]

        verdicts = sender.send(sent)

        done = [isinstance(verdict, Done) for verdict in verdicts]
        assert done == [True, False, False, True, True, False, False, True, True, False]
        stored = {one.message_id for one in destination.stored()}
        assert stored >= {one.message_id for one, is_done in zip(sent, done, strict=True) if is_done}

    def test_a_big_call_is_stored_completely(self, destination: Destination, sender: Sender) -> None:
        """Store 2 000 messages of one call, with and without keys."""
        sent = [a_message(TOPICS[n % 3], n, key=f"key-{n % 50}" if n % 2 else None) for n in range(2_000)]

        check_all_done(sender.send(sent), sent)

        check_stored(destination, sent)

    @pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 1_000_000, 4 * 1024 * 1024])
    def test_a_body_of_any_size_arrives_or_is_rejected(
        self, destination: Destination, sender: Sender, size: int
    ) -> None:
        """Return `Reject` for a body that the destination cannot take; every destination takes 64 KiB."""
        sent = [a_message("alpha", bytes(range(256)) * (size // 256) + bytes(size % 256))]

        verdicts = sender.send(sent)

        check_arrived_or_rejected(destination, sent, verdicts)
        if size <= 65_536:
            check_all_done(verdicts, sent)

    def test_every_field_arrives_exactly(self, destination: Destination, sender: Sender) -> None:
        """Store every field of a message that every destination can carry."""
        sent = a_message(
            "alpha",
            b"\x00\xff\r\n body",
            key=" order-7: é 😀\r\n",
            tags="placed, päid",
            headers={"X-Trace": "a:b: c=d", "plain": "", "name": "Zoë  Ω"},
            content_type="application/json; charset=utf-8",
        )

        check_all_done(sender.send([sent]), [sent])

        check_stored(destination, [sent])

    def test_whatever_may_be_sent_arrives_exactly_or_is_rejected(
        self, destination: Destination, sender: Sender
    ) -> None:
        """Store arbitrary messages unaltered, or reject them, so that none is tried for ever."""

        @settings(deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(messages(any_topic=destination.takes_any_topic), min_size=1, max_size=10))
        def arrive(examples: list[Message]) -> None:
            sent = [_renamed(example) for example in examples]  # an example may be tried again
            check_arrived_or_rejected(destination, sent, sender.send(sent))

        arrive()

    def test_a_destination_that_is_gone_is_unavailable(self, destination: Destination, sender: Sender) -> None:
        """Return `Unavailable` in time: no message is done or blamed; afterwards all messages arrive."""
        self.check_outage(destination, sender, destination.disappear)

    def test_a_silent_destination_is_unavailable(self, destination: Destination, sender: Sender) -> None:
        """Do the same for a destination that accepts all connections and never answers."""
        self.check_outage(destination, sender, destination.fall_silent)

    def test_a_sender_may_be_opened_while_its_destination_is_gone(self, destination: Destination) -> None:
        """Open a sender without its destination, because a relay may start before its broker."""
        destination.disappear()
        sender = destination.open()
        try:
            assert outcome_of(sender, [a_message("alpha", 1)]) == [Unavailable]
            destination.recover()
            check_eventually_done(sender, [a_message("alpha", 2)])
        finally:
            sender.close()

    def test_a_lost_answer_is_followed_by_the_same_message(self, destination: Destination, sender: Sender) -> None:
        """Deliver at least once: the copy has the id and the bytes of the first, and the key keeps its order."""
        first = a_message("alpha", "first")
        sent = [a_message("alpha", n, key="key") for n in range(3)]
        check_all_done(sender.send([first]), [first])

        destination.lose_next_answer()
        outcome = outcome_of(sender, sent)
        destination.recover()

        # A driver may try again by itself, and learn what became of them.
        assert outcome in [[Done] * stored + [Unavailable] * (3 - stored) for stored in range(4)]
        check_eventually_done(sender, [_again(one) for one in sent])
        check_stored(destination, [first, *sent])

    def test_closing_twice_does_no_harm(self, destination: Destination) -> None:
        """Close senders twice, used or not."""
        unused, used = destination.open(), destination.open()
        used.send([a_message("alpha", 1)])

        for sender in (unused, used, unused, used):
            sender.close()

    def check_outage(self, destination: Destination, sender: Sender, break_it: Callable[[], None]) -> None:
        """Send before, during and after an outage."""
        before = [a_message("alpha", n) for n in range(10)]
        sent = [a_message("alpha", n, key=f"key-{n % 3}" if n % 2 else None) for n in range(20)]
        check_all_done(sender.send(before), before)

        break_it()
        for part in (sent, sent[:1], sent):
            began = time.monotonic()
            assert outcome_of(sender, part) == [Unavailable] * len(part)
            assert time.monotonic() - began <= destination.deadline
        destination.recover()

        check_eventually_done(sender, [_again(one) for one in sent])
        check_stored(destination, before + sent)


def a_message(topic: str, body: object, **fields: Any) -> Message:
    """Return a message as handed over by a worker; a number becomes a short body."""
    made = Message(topic, str(body) if isinstance(body, int) else body, **fields)
    made.created_at = datetime.now(UTC)
    return made


def messages(*, any_topic: bool = True) -> st.SearchStrategy[Message]:
    """Return a strategy for any message within the limits of `Message`, or else within those and `TOPICS`."""
    topics = st.sampled_from(TOPICS)
    if any_topic:
        topics |= st.text("abzABZ019._%|-", min_size=1, max_size=MAX_TOPIC)
    names = st.text("abzABZ019!#$%&'*+.^_`|~-", min_size=1, max_size=40)
    values = _text(max_size=100, exclude_categories=("Cs", "Cc")).map(str.strip)
    typed = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=80).map(str.strip)
    return st.builds(
        _allowed,
        topic=topics,
        body=st.binary(max_size=300),
        key=st.none() | st.sampled_from(_AWKWARD) | _text(min_size=1, max_size=MAX_KEY_BYTES // 4),
        tags=st.none() | _text(min_size=1, max_size=MAX_TAGS, exclude_categories=("Cs", "Cc")),
        headers=st.dictionaries(names.filter(_is_free), values, max_size=8),
        content_type=st.none() | typed,
    )


def outcome_of(sender: Sender, sent: Sequence[Message]) -> list[type[Verdict]]:
    """Send messages, and return the kinds of the verdicts; an exception counts as `Unavailable` for all messages."""
    try:
        verdicts = sender.send(sent)
    except Exception:
        return [Unavailable] * len(sent)
    return [type(verdict) for verdict in verdicts]


def check_all_done(verdicts: Sequence[Verdict], sent: Sequence[Message]) -> None:
    """Require `Done` for each message."""
    assert len(verdicts) == len(sent), f"{len(verdicts)} verdicts for {len(sent)} messages"
    failed = [verdict for verdict in verdicts if not isinstance(verdict, Done)]
    assert not failed, f"{len(failed)} of {len(sent)} are not Done, the first is {failed[0]}"


def check_eventually_done(sender: Sender, sent: Sequence[Message], *, seconds: float = 60.0) -> None:
    """Send the messages until all are `Done`, as a worker does."""
    deadline = time.monotonic() + seconds
    while set(outcome_of(sender, sent)) != {Done}:
        assert time.monotonic() < deadline, f"not Done after {seconds} s"
        time.sleep(0.1)


def check_stored(destination: Destination, sent: Sequence[Message]) -> None:
    """Require exactly the sent messages, unaltered, the first copies of each key in order."""
    stored = destination.stored()
    firsts = list(dict.fromkeys(one.message_id for one in stored))
    expected = {one.message_id: one for one in sent}
    assert set(firsts) == set(expected), f"{len(firsts)} messages are stored instead of {len(expected)}"
    assert _by_key(expected[found] for found in firsts) == _by_key(sent), "a key is out of order"
    for one in stored:
        _check_equal(one, expected[one.message_id], destination.unreadable)


def check_arrived_or_rejected(destination: Destination, sent: Sequence[Message], verdicts: Sequence[Verdict]) -> None:
    """Require each message stored unaltered, or rejected for a reason, or waiting.

    A message waits behind a rejected message of its key, or for another name of its topic.
    """
    assert len(verdicts) == len(sent), f"{len(verdicts)} verdicts for {len(sent)} messages"
    copies = defaultdict(list)
    for one in destination.stored():
        copies[one.message_id].append(one)
    stopped: set[str | None] = set()
    for message, verdict in zip(sent, verdicts, strict=True):
        if isinstance(verdict, Done):
            assert message.key is None or message.key not in stopped, "Done after a failure of its key"
            assert copies[message.message_id], "Done but not stored"
            for one in copies[message.message_id]:
                _check_equal(one, message, destination.unreadable)
            continue
        waits = isinstance(verdict, Unavailable) and message.key is not None and message.key in stopped
        # Another name for the topic, in the configuration, mends it.
        waits = waits or (isinstance(verdict, Unavailable) and "rename = {" in verdict.error)
        assert waits or (isinstance(verdict, Reject) and verdict.error), f"{message!r}: {verdict}"
        stopped.add(message.key)


_AWKWARD = (
    " ",
    "a b ",
    "%41",
    "'; drop table x; --",
    "%s %(x)s {0} ${jndi:x}",
    "\ufeff\u2028\u202e",
    "e\u0301",
    "é",
    "\r\nX: y",
)


def _is_free(name: str) -> bool:
    return not name.lower().startswith(("outbox-", "nats-")) and name.lower() != "content-type"


def _text(*, min_size: int = 0, max_size: int, exclude_categories: tuple[str, ...] = ("Cs",)) -> st.SearchStrategy[str]:
    alphabet = st.characters(exclude_categories=exclude_categories, exclude_characters="\0|\u2028\u2029")  # type: ignore[arg-type]
    return st.text(alphabet, min_size=min_size, max_size=max_size)


def _allowed(topic: str, body: bytes, **fields: Any) -> Message:
    try:
        return a_message(topic, body, **fields)
    except InvalidMessageError:
        reject()


def _renamed(message: Message) -> Message:
    renamed = copy.copy(message)
    renamed.message_id = uuid7()
    return renamed


def _again(message: Message) -> Message:
    again = copy.copy(message)
    again.attempt += 1
    return again


def _by_key(sent: Iterable[Message]) -> dict[str, list[UUID]]:
    ids = defaultdict(list)
    for message in sent:
        if message.key is not None:
            ids[message.key].append(message.message_id)
    return ids


def _check_equal(stored: Stored, sent: Message, unreadable: frozenset[str]) -> None:
    for field in {"topic", "key", "tags", "headers", "content_type", "body"} - unreadable:
        found, expected = getattr(stored, field), getattr(sent, field)
        assert found == expected, f"{field} is {found!r:.300}, not {expected!r:.300}"


def _cannot(what: str) -> NoReturn:
    pytest.skip(f"this destination cannot {what}")
