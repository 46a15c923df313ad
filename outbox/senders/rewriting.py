"""A sender that gives another one its messages under other topics, or in an envelope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from outbox.errors import InvalidMessageError, SenderError
from outbox.model.limits import checked_topic
from outbox.model.message import Message
from outbox.model.verdict import Reject, Verdict
from outbox.senders.envelopes import DEBEZIUM_PREFIX, ENVELOPES, EnvelopeName
from outbox.senders.key_order import EARLIER
from outbox.senders.opening import Destination, open_sender
from outbox.senders.port import deadline_of, destination_of

_TOPICS_KEPT = 1024


class RewritingSender:
    """Sends messages by another sender, each with its id, its key and its place in the order.

    Args:
        destination: a URL, a sender or a function, as `Relay` takes it.
        rename: the new topic of each topic that is to have one; whole names.
        prefix: stands before each topic, also before a new one. None: none, with the envelope debezium `outbox.event.`.
        envelope: "raw", "cloudevents" or "debezium"; see `outbox.senders.envelopes`.

    A message that cannot be sent so, because its topic becomes too long, say, is rejected. The rest of its key waits
    for the next call.

    Raises:
        SenderError: no topic can be made so, there is no such envelope, or the sender makes events of messages itself.
    """

    def __init__(
        self,
        destination: Destination,
        *,
        rename: Mapping[str, str] | None = None,
        prefix: str | None = None,
        envelope: EnvelopeName = "raw",
    ) -> None:
        self._sender = open_sender(destination)
        check_rewriting(rename=rename, prefix=prefix, envelope=envelope, sender=self._sender)
        self.destination = destination_of(destination)
        self.deadline = deadline_of(self._sender)
        self._rename = dict(rename or {})
        self._prefix = prefix if prefix is not None else DEBEZIUM_PREFIX if envelope == "debezium" else ""
        self._wrap = ENVELOPES[envelope]
        self._topic = lru_cache(_TOPICS_KEPT)(self._new_topic)

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages in their new form by the other sender; return its verdicts."""
        topic, wrap = self._topic, self._wrap
        try:
            rewritten = [wrap(message, topic(message.topic)) for message in messages]
        except (InvalidMessageError, UnicodeError):
            return self._send_fit(messages)
        return self._sender.send(rewritten)

    def close(self) -> None:
        """Close the other sender."""
        self._sender.close()

    def _send_fit(self, messages: Sequence[Message]) -> Sequence[Verdict]:
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
        answers = self._sender.send(list(fit.values())) if fit else ()
        for index, verdict in zip(fit, answers, strict=True):
            verdicts[index] = verdict
        return verdicts

    def _new_topic(self, topic: str) -> str:
        return checked_topic(self._prefix + self._rename.get(topic, topic))


def check_rewriting(
    *, rename: Mapping[str, str] | None, prefix: str | None, envelope: str, sender: object = None
) -> bool:
    """Return whether these options change a message at all. `sender`: sends what they make; None: not yet known.

    Raises:
        SenderError: no topic can be made so, there is no such envelope, or the sender makes events of messages itself.
    """
    if envelope not in ENVELOPES:
        raise SenderError(f"envelope: must be one of {', '.join(ENVELOPES)}, not {envelope!r:.60}")
    if envelope == "cloudevents" and getattr(sender, "sends_events", False):
        raise SenderError(
            f"{destination_of(sender)}: the envelope cloudevents and format=cloudevents of the URL would each make an"
            " event of a message; leave one of them out"
        )
    if prefix is not None:
        if not isinstance(prefix, str):
            raise SenderError(f"prefix: must be text, not {type(prefix).__name__}")
        _check("prefix", f"{prefix}x")
    if rename is not None and not isinstance(rename, Mapping):
        raise SenderError(f"rename: must be a mapping of topics to topics, not {type(rename).__name__}")
    for old, new in (rename or {}).items():
        for topic in (old, new):
            _check("rename", topic)
    return bool(rename or prefix) or envelope != "raw"


def _check(option: str, topic: str) -> None:
    try:
        checked_topic(topic)
    except InvalidMessageError as error:
        raise SenderError(f"{option}: makes a topic that {error.limit}; write other characters, or fewer") from None
