"""The form in which messages are sent: other topics, or an envelope. Id, key and order stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from outbox.errors import InvalidMessageError, SenderError
from outbox.model.limits import checked_topic
from outbox.model.message import Message
from outbox.model.verdict import Reject, Verdict
from outbox.senders.envelopes import DEBEZIUM_PREFIX, ENVELOPES, EnvelopeName
from outbox.senders.key_order import EARLIER
from outbox.senders.port import Sender

_TOPICS_KEPT = 1024


class Form:
    """Gives messages new topics, and puts them into an envelope.

    Args:
        rename: the new topic of each topic that is to have one; whole names.
        prefix: stands before each topic, also before a new one. None: none, with the envelope debezium `outbox.event.`.
        envelope: "raw", "cloudevents" or "debezium"; see `outbox.senders.envelopes`.

    Raises:
        SenderError: no topic can be made so, or there is no such envelope.
    """

    def __init__(self, *, rename: Mapping[str, str] | None, prefix: str | None, envelope: EnvelopeName) -> None:
        if envelope not in ENVELOPES:
            raise SenderError(f"envelope: must be one of {', '.join(ENVELOPES)}, not {envelope!r:.60}")
        if prefix is not None:
            if not isinstance(prefix, str):
                raise SenderError(f"prefix: must be text, not {type(prefix).__name__}")
            _check("prefix", f"{prefix}x")
        if rename is not None and not isinstance(rename, Mapping):
            raise SenderError(f"rename: must be a mapping of topics to topics, not {type(rename).__name__}")
        self._rename = dict(rename or {})
        for old, new in self._rename.items():
            for topic in (old, new):
                _check("rename", topic)
        self._prefix = prefix if prefix is not None else DEBEZIUM_PREFIX if envelope == "debezium" else ""
        self._wrap = ENVELOPES[envelope]
        self._topic = lru_cache(_TOPICS_KEPT)(self._new_topic)
        #: True if messages become CloudEvents.
        self.makes_events = envelope == "cloudevents"
        #: True if messages are sent as they are.
        self.is_plain = envelope == "raw" and not (self._rename or prefix)

    def send(self, sender: Sender, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages in their new form by a sender; return its verdicts.

        A message that cannot be sent so, because its topic becomes too long, say, is rejected. The rest of its key
        waits for the next call.
        """
        topic, wrap = self._topic, self._wrap
        try:
            formed = [wrap(message, topic(message.topic)) for message in messages]
        except (InvalidMessageError, UnicodeError):
            return self._send_fit(sender, messages)
        return sender.send(formed)

    def _send_fit(self, sender: Sender, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages that have a new form, up to the first of each key that has none."""
        fit: dict[int, Message] = {}
        verdicts: list[Verdict] = [EARLIER] * len(messages)
        stopped: set[str] = set()
        for index, message in enumerate(messages):
            if message.key is not None and message.key in stopped:
                continue
            try:
                fit[index] = self._wrap(message, self._topic(message.topic))
            except (InvalidMessageError, UnicodeError) as error:
                verdicts[index] = Reject(str(error))
                if message.key is not None:
                    stopped.add(message.key)
        answers = sender.send(list(fit.values())) if fit else ()
        for index, verdict in zip(fit, answers, strict=True):
            verdicts[index] = verdict
        return verdicts

    def _new_topic(self, topic: str) -> str:
        return checked_topic(self._prefix + self._rename.get(topic, topic))


def _check(option: str, topic: str) -> None:
    try:
        checked_topic(topic)
    except InvalidMessageError as error:
        raise SenderError(f"{option}: makes a topic that {error.limit}; write other characters, or fewer") from None
