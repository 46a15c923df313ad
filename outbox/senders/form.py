"""The form of messages at a destination: other topics, or an envelope. Id, key and order stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from outbox.errors import InvalidMessageError, SenderError
from outbox.model.limits import checked_topic
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Verdict
from outbox.senders.envelopes import DEBEZIUM_PREFIX, ENVELOPES, EnvelopeName
from outbox.senders.key_order import in_order
from outbox.senders.new_topics import NewTopics, check_option, without_name
from outbox.senders.port import Sender, Stored

_TOPICS_KEPT = 1024


class Form:
    """Gives messages new topics, and puts them into an envelope.

    Args:
        rename: new topics by the old ones: whole names, or patterns with one star on each side. See `NewTopics`.
        prefix: stands before each topic, also before a new one. None: none, with the envelope debezium `outbox.event.`.
        envelope: "raw", "cloudevents" or "debezium"; see `outbox.senders.envelopes`.

    Raises:
        SenderError: a topic would break the limits, or the envelope is unknown.
    """

    def __init__(self, *, rename: Mapping[str, str] | None, prefix: str | None, envelope: EnvelopeName) -> None:
        if envelope not in ENVELOPES:
            raise SenderError(f"envelope: must be one of {', '.join(ENVELOPES)}, not {envelope!r:.60}")
        if prefix is not None:
            if not isinstance(prefix, str):
                raise SenderError(f"prefix: must be text, not {type(prefix).__name__}")
            check_option("prefix", f"{prefix}x")
        self._new_topics = NewTopics({} if rename is None else rename)
        self._prefix = prefix if prefix is not None else DEBEZIUM_PREFIX if envelope == "debezium" else ""
        self._wrap = ENVELOPES[envelope]
        self._topic = lru_cache(_TOPICS_KEPT)(self._new_topic)
        #: True if messages are sent as they are.
        self.is_plain = envelope == "raw" and not (self._new_topics or prefix)

    def stored(self, topics: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return what the log has by topic as what comes by new topic; without topics that no message can have."""
        found: dict[str, Stored] = {}
        for topic, each in topics.items():
            with suppress(ValueError):
                new = self._topic(topic)
                other = found.get(new, Stored(0, 0))
                found[new] = Stored(max(each.largest, other.largest), each.keyless + other.keyless)
        return found

    def send(self, sender: Sender, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages in their new form by a sender; return its verdicts.

        A message without a new form is rejected. It waits instead if its topic gets no name, because another
        configuration can give it one. The rest of the key waits for the next call.
        """
        topic, wrap = self._topic, self._wrap
        try:
            formed = [wrap(message, topic(message.topic)) for message in messages]
        except ValueError:
            return self._send_fit(sender, messages)
        return sender.send(formed)

    def _send_fit(self, sender: Sender, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages with a new form, up to the first of each key without."""
        fit: list[Message] = []

        def keep(message: Message) -> Verdict:
            try:
                topic = self._topic(message.topic)
            except ValueError as error:
                return without_name(message.topic, str(error))
            try:
                fit.append(self._wrap(message, topic))
            except (InvalidMessageError, UnicodeError) as error:
                return Reject(str(error))
            return DONE

        verdicts = in_order(messages, keep)
        answers = sender.send(fit) if fit else ()
        places = [place for place, verdict in enumerate(verdicts) if verdict is DONE]
        for place, answer in zip(places, answers, strict=True):
            verdicts[place] = answer
        return verdicts

    def _new_topic(self, topic: str) -> str:
        return checked_topic(self._prefix + self._new_topics.of(topic))
