"""Opening a destination: a URL, a sender or a function of one message becomes a sender, with form and deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import EntryPoint, entry_points
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypedDict, cast

from outbox.errors import SenderError
from outbox.model.message import Message
from outbox.model.verdict import Verdict
from outbox.runtime.secret import Secret, secrets_of
from outbox.senders.asynchronous import AsyncFunctionSender, AsyncObjectSender, AsyncSender
from outbox.senders.envelopes import EnvelopeName
from outbox.senders.form import Form
from outbox.senders.function import FunctionSender
from outbox.senders.port import Doubt, Sender, Stored, concurrency_of, deadline_of, destination_of
from outbox.senders.urls import perhaps_meant, split_url
from outbox.senders.webhook_url import secrets_of_endpoint

#: Our own senders by their URL schemes: each a `(url: str) -> Sender`, imported when it is needed.
SCHEMES = {
    "nats": "outbox.senders.nats:NatsSender",
    "tls": "outbox.senders.nats:NatsSender",
    "kafka": "outbox.senders.kafka:KafkaSender",
    "kafkas": "outbox.senders.kafka:KafkaSender",
    "redis": "outbox.senders.redis:RedisSender",
    "rediss": "outbox.senders.redis:RedisSender",
    "redis+cluster": "outbox.senders.redis:RedisSender",
    "rediss+cluster": "outbox.senders.redis:RedisSender",
    "redis+sentinel": "outbox.senders.redis:RedisSender",
    "rediss+sentinel": "outbox.senders.redis:RedisSender",
    "http": "outbox.senders.webhook:WebhookSender",
    "https": "outbox.senders.webhook:WebhookSender",
    "postgresql": "outbox.senders.postgresql:PostgresSender",
    "amqp": "outbox.senders.rabbitmq:RabbitSender",
    "amqps": "outbox.senders.rabbitmq:RabbitSender",
    "sqs": "outbox.senders.aws:SqsSender",
    "sns": "outbox.senders.aws:SnsSender",
    "stdout": "outbox.senders.stdout:StdoutSender.from_url",
    "file": "outbox.senders.stdout:FileSender.from_url",
}
#: A single name before the @ is a user: libpq looks for the password elsewhere.
_WITH_USER = ("postgresql",)
#: Other packages offer senders in this group of entry points: the name is a scheme that we do not have.
ENTRY_POINTS = "outbox.senders"

#: The destination of messages: a sender, a function of one message, or a URL. Both may be `async`.
Destination = (
    Sender | AsyncSender | Callable[[Message], Verdict | None] | Callable[[Message], Awaitable[Verdict | None]] | str
)


class SenderOptions(TypedDict, total=False):
    """The options of `open_sender`."""

    rename: Mapping[str, str] | None
    prefix: str | None
    envelope: EnvelopeName
    deadline: timedelta | None


class OpenedSender:
    """A sender with its name, form and limits: a relay, a writer or a command gets the whole.

    Attributes:
        destination: the text for subscriptions and for people; see `destination_of`.
        deadline: the longest time of one call.
        concurrency: the most calls under way at once.
    """

    def __init__(
        self, sender: Sender, destination: str, *, form: Form | None = None, deadline: timedelta | None = None
    ) -> None:
        self.destination = destination
        self.deadline = deadline_of(sender) if deadline is None else deadline
        self.concurrency = concurrency_of(sender)
        self._sender = sender
        self._form = None if form is None or form.is_plain else form

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send messages in their form; return a verdict for each, in their order."""
        return self._sender.send(messages) if self._form is None else self._form.send(self._sender, messages)

    def doubts(self, topics: Mapping[str, Stored]) -> list[Doubt]:
        """Return what the destination tells of settings that may drop or refuse messages; see `Sender`."""
        find = getattr(self._sender, "doubts", None)
        return [] if find is None else find(topics if self._form is None else self._form.stored(topics))

    def close(self) -> None:
        """Close connections and end threads. Closing twice does no harm."""
        self._sender.close()


def open_sender(
    destination: Destination,
    *,
    rename: Mapping[str, str] | None = None,
    prefix: str | None = None,
    envelope: EnvelopeName = "raw",
    deadline: timedelta | None = None,
) -> OpenedSender:
    """Open a destination. An opened sender is returned unchanged, unless options are given.

    Args:
        destination: a URL, a sender or a function of one message.
        rename, prefix, envelope: the form of messages there; see `outbox.senders.form`.
        deadline: of one call. None: the sender's own, else 5 s.

    Raises:
        TypeError: the destination is of another kind, or the deadline is no timedelta above 0.
        SenderError: the URL is malformed, or no sender has its scheme; or messages cannot be sent in this form.
    """
    form = Form(rename=rename, prefix=prefix, envelope=envelope)
    if isinstance(destination, OpenedSender):
        if form.is_plain and deadline is None:
            return destination
        return OpenedSender(destination, destination.destination, form=form, deadline=deadline)
    name = destination_of(destination)
    sender = _offered(destination, name) if isinstance(destination, str) else _sender_of(destination, name)
    return OpenedSender(sender, name, form=form, deadline=deadline)


def _sender_of(sender: Any, name: str) -> Sender:
    """Return the sender for an object or a function."""
    if isinstance(sender, type):
        raise TypeError(f"a destination is an object, not a class: pass {sender.__name__}()")
    verbs = [getattr(sender, verb, None) for verb in ("send", "close")]
    if all(map(callable, verbs)) and not isinstance(sender, Generator | Coroutine):
        _require_no_generator(name, *verbs)
        if not any(map(iscoroutinefunction, verbs)):
            return cast("Sender", sender)
        if not all(map(iscoroutinefunction, verbs)):
            raise TypeError(f"{name}: write both send and close with async, or none of them")
        return AsyncObjectSender(sender)
    if not callable(sender):
        raise TypeError(
            "a destination is a URL, a sender with send(messages) and close(), or a function of one message,"
            f" not {type(sender).__name__}"
        )
    function, call = cast("Callable[[Message], Any]", sender), type(sender).__call__
    _require_no_generator(name, function, call)
    is_async = iscoroutinefunction(function) or iscoroutinefunction(call)
    return AsyncFunctionSender(function) if is_async else FunctionSender(function)


def is_offered(url: str) -> bool:
    """Return whether there is a sender for the scheme of a destination's URL."""
    return bool(_offers(split_url(url).scheme))


def secrets_of_destination(url: str) -> list[Secret]:
    """Return the secrets of a destination's URL, which may be malformed; a single name before the @ is a token."""
    scheme = url.partition("://")[0].lower()
    return secrets_of_endpoint(url) if scheme in ("http", "https") else secrets_of(url, token=scheme not in _WITH_USER)


def _offered(url: str, name: str) -> Sender:
    """Return the sender for a destination's URL; raise without one, or without its driver, and show no credentials."""
    scheme = name.partition(":")[0]
    offers = _offers(scheme)
    if not offers:
        known = ", ".join(sorted({*SCHEMES, *(offer.name for offer in entry_points(group=ENTRY_POINTS))}))
        raise SenderError(f"there is no sender for {scheme}: URLs; known are {known}{perhaps_meant(url)}")
    if len({offer.value for offer in offers}) > 1:
        values = " and ".join(sorted(offer.value for offer in offers))
        raise SenderError(f"{scheme}: URLs are claimed twice, by {values}; uninstall one of them")
    factory: Callable[[str], Sender] = offers[0].load()
    return factory(url)


def _offers(scheme: str) -> Sequence[EntryPoint]:
    if scheme in SCHEMES:
        return [EntryPoint(scheme, SCHEMES[scheme], ENTRY_POINTS)]
    return list(entry_points(group=ENTRY_POINTS, name=scheme))


def _require_no_generator(name: str, *verbs: Any) -> None:
    if any(isgeneratorfunction(verb) or isasyncgenfunction(verb) for verb in verbs):
        raise TypeError(f"{name} is a generator; write the function without yield")
