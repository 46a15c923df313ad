"""Opening a destination: a URL, a sender or a function of one message becomes a sender, with all that is put on it."""

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
from outbox.senders.port import Sender, concurrency_of, deadline_of, destination_of
from outbox.senders.urls import perhaps_meant, split_url
from outbox.senders.webhook_url import secrets_of_endpoint

#: Packages offer senders in this group of entry points: the name is a URL scheme, the value a `(url: str) -> Sender`.
ENTRY_POINTS = "outbox.senders"

#: The destination of messages: a sender, a function of one message, or a URL. Both may be `async`.
Destination = (
    Sender | AsyncSender | Callable[[Message], Verdict | None] | Callable[[Message], Awaitable[Verdict | None]] | str
)


class SenderOptions(TypedDict, total=False):
    """The options of `open_sender`, for those that pass them on."""

    rename: Mapping[str, str] | None
    prefix: str | None
    envelope: EnvelopeName
    deadline: timedelta | None


class OpenedSender:
    """A sender that knows what has to be known of it: a relay, a writer or a command gets it whole.

    Attributes:
        destination: what its subscription stores, and people read; see `destination_of`.
        deadline: how long one call may take at most.
        concurrency: how many calls may be under way at once.
    """

    def __init__(
        self, sender: Sender, destination: str, *, form: Form | None = None, deadline: timedelta | None = None
    ) -> None:
        self.destination = destination
        self.deadline = deadline_of(sender) if deadline is None else deadline
        self.concurrency = concurrency_of(sender)
        self.sends_events: bool = getattr(sender, "sends_events", False)
        self._sender = sender
        self._form = None if form is None or form.is_plain else form
        if self._form is not None and self._form.makes_events:
            if self.sends_events:
                raise SenderError(
                    f"{destination}: the envelope cloudevents and format=cloudevents of the URL would each make an"
                    " event of a message; leave one of them out"
                )
            self.sends_events = True

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send messages in their form; return a verdict for each, in their order."""
        return self._sender.send(messages) if self._form is None else self._form.send(self._sender, messages)

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
    """Open a destination; return a sender that is passed on whole. An opened one is returned as it is.

    Args:
        destination: a URL, a sender or a function of one message.
        rename, prefix, envelope: the form in which messages are sent; see `outbox.senders.form`.
        deadline: of one call. None: the sender's own, if it has one, else 5 s.

    Raises:
        TypeError: it is no destination, or its deadline is no timedelta above 0.
        SenderError: the URL is malformed, or no installed package offers its scheme; or messages cannot be sent in this
            form.
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
    """Return the sender that an object or a function stands for."""
    if isinstance(sender, type):
        raise TypeError(f"a destination is an object, not a class: pass {sender.__name__}()")
    verbs = [getattr(sender, verb, None) for verb in ("send", "close")]
    if all(map(callable, verbs)) and not isinstance(sender, Generator | Coroutine):
        _require_no_generator(name, *verbs)
        if any(map(iscoroutinefunction, verbs)):
            return _awaited(sender, name, verbs)
        return cast("Sender", sender)
    if not callable(sender):
        raise TypeError(
            "a destination is a URL, a sender, which has send(messages) and close(), or a function of one message,"
            f" not {type(sender).__name__}"
        )
    function, call = cast("Callable[[Message], Any]", sender), type(sender).__call__
    _require_no_generator(name, function, call)
    is_async = iscoroutinefunction(function) or iscoroutinefunction(call)
    return AsyncFunctionSender(function) if is_async else FunctionSender(function)


def is_offered(url: str) -> bool:
    """Return whether an installed package offers the scheme of a destination's URL."""
    return bool(_offers(split_url(url).scheme))


def secrets_of_destination(url: str) -> list[Secret]:
    """Return the secrets of a destination's URL, which may be malformed; a single name before the @ is a token."""
    is_webhook = url.partition("://")[0].lower() in ("http", "https")
    return secrets_of_endpoint(url) if is_webhook else secrets_of(url, token=True)


def _awaited(sender: Any, name: str, verbs: Sequence[Any]) -> Sender:
    if not all(map(iscoroutinefunction, verbs)):
        raise TypeError(f"{name}: write both send and close with async, or none of them")
    return AsyncObjectSender(sender)


def _offered(url: str, name: str) -> Sender:
    """Return the sender for a destination's URL, from the installed package that offers its scheme.

    Raises:
        SenderError: no package offers its scheme. Credentials are never part of the text.
        MissingExtraError: the sender is known, the driver it needs is not installed.
    """
    scheme = name.partition(":")[0]
    offers = _offers(scheme)
    if not offers:
        known = ", ".join(sorted({offer.name for offer in entry_points(group=ENTRY_POINTS)})) or "none"
        raise SenderError(f"there is no sender for {scheme}: URLs; installed are {known}{perhaps_meant(url)}")
    if len({offer.value for offer in offers}) > 1:
        values = " and ".join(sorted(offer.value for offer in offers))
        raise SenderError(f"{scheme}: URLs are claimed twice, by {values}; uninstall one of them")
    return _loaded(offers[0])(url)


def _offers(scheme: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINTS, name=scheme))


def _loaded(offer: EntryPoint) -> Callable[[str], Sender]:
    factory: Callable[[str], Sender] = offer.load()
    return factory


def _require_no_generator(name: str, *verbs: Any) -> None:
    if any(isgeneratorfunction(verb) or isasyncgenfunction(verb) for verb in verbs):
        raise TypeError(f"{name} would only begin when it is called; write it without yield")
