"""Senders: the port through which messages leave for a destination, and how a URL becomes one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from outbox.errors import SenderError
from outbox.model.message import Message
from outbox.model.verdict import Verdict

#: Packages offer senders in this group of entry points: the name is a URL scheme, the value a `(url: str) -> Sender`.
ENTRY_POINTS = "outbox.senders"

#: For one call of a sender that does not say how long it may take.
DEADLINE = timedelta(seconds=5)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST_AND_PORT = re.compile(r"(localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+):[0-9]{2,5}")
_HOST = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%]+\])(:[0-9]*)?")


class Sender(Protocol):
    """A destination. Two verbs; one call at a time, but for one past its deadline, which may overlap the next.

    Two attributes may say more, of a function as well. `destination`, a text, is what its subscription stores of it
    (see `destination_of`). `deadline`, a `timedelta`, is how long one call of `send` may take at most, 5 s if it does
    not say so: a relay waits for so long unless it is told another figure, and direct sends begin no call that
    might not be over when the relay sends what they have left behind.
    """

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Hand messages to the destination; one verdict per message, in their order.

        `Done` only when the message is stored there. After the first verdict of a key that is not `Done`, no later
        message of that key is `Done`. A message handed over again has the same id and the same bytes.
        What is raised says nothing about whose fault it was, nor which messages were stored.
        """

    def close(self) -> None:
        """Let go of connections and threads. Closing twice does no harm."""


def open_sender(url: str) -> Sender:
    """The sender for a destination's URL, from whichever installed package offers its scheme.

    Raises:
        SenderError: the URL is malformed, or nobody offers its scheme. Credentials are never part of the text.
        MissingExtraError: the sender is known, the driver it needs is not installed.
    """
    scheme = _split(url).scheme
    offers = tuple(entry_points(group=ENTRY_POINTS, name=scheme))
    if not offers:
        known = ", ".join(sorted({offer.name for offer in entry_points(group=ENTRY_POINTS)})) or "none"
        raise SenderError(f"there is no sender for {scheme}: URLs; installed are {known}{_perhaps_meant(url)}")
    if len({offer.value for offer in offers}) > 1:
        values = " and ".join(sorted(offer.value for offer in offers))
        raise SenderError(f"{scheme}: URLs are claimed twice, by {values}; uninstall one of them")
    return _loaded(offers[0])(url)


def destination_of(destination: Sender | Callable[[Message], Verdict | None] | str) -> str:
    """What a subscription stores of its destination: enough to notice another one, and no secrets.

    Of a URL: scheme, hosts (sorted) and path. Of a sender: its attribute `destination`, else `sender:module.Class`.
    Of a function: `callable:module.qualname`.
    """
    if isinstance(destination, str):
        return _destination_of_url(destination)
    declared = getattr(destination, "destination", None)
    if isinstance(declared, str):
        return declared
    if hasattr(destination, "send"):
        return f"sender:{type(destination).__module__}.{type(destination).__qualname__}"
    while isinstance(destination, partial):
        destination = destination.func
    named = destination if hasattr(destination, "__qualname__") else type(destination)
    return f"callable:{named.__module__}.{named.__qualname__}"


def deadline_of(sender: object) -> timedelta:
    """How long one call may take: the attribute `deadline` of a sender or of a function, else `DEADLINE`.

    Raises:
        TypeError: the attribute is no length of time.
    """
    deadline = getattr(sender, "deadline", None)
    if deadline is None:
        return DEADLINE
    if not isinstance(deadline, timedelta) or deadline <= timedelta(0):
        raise TypeError(
            f"the deadline of {type(sender).__name__} must be a timedelta greater than 0, not {deadline!r:.80}; write"
            " deadline = timedelta(seconds=30), say"
        )
    return deadline


def redacted(url: str) -> str:
    """A URL for messages and logs. Where it is malformed, it shows too little rather than a secret."""
    scheme, separator, rest = url.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        found = _SCHEME.match(url)
        return f"{found[0]}:…" if found and url.startswith(":", found.end()) else "…"
    # A password may hold an unencoded / or ?, so the last @ of the whole text ends the credentials.
    hosts, slash, path = re.split(r"[?#]", rest.rpartition("@")[2])[0].partition("/")
    # Without an @ at all, what stands in the place of a port may be a password.
    shown = ",".join(host if not host or _HOST.fullmatch(host) else "…" for host in hosts.split(","))
    return f"{scheme}://{shown}{slash}{path}"


def _destination_of_url(url: str) -> str:
    parts = _split(url)
    hosts = ",".join(sorted(parts.netloc.rpartition("@")[2].lower().split(",")))
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{hosts}{path}" if "://" in url else f"{parts.scheme}:{path}"


def _split(url: str) -> SplitResult:
    """The parts of a URL whose credentials, if it has any, are where they belong."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise SenderError(f"{redacted(url)} is not a URL") from None  # the cause quotes the credentials
    if not parts.scheme:
        text = "a destination is a URL with a scheme, such as nats://localhost:4222 or stdout:"
        raise SenderError(f"{text}{_perhaps_meant(url)}")
    credentials, _, hosts = parts.netloc.rpartition("@")
    if "@" in credentials + parts.path + parts.query + parts.fragment:
        fix = "only one @ may stand in it, before the first host; percent-encode @ / ? and # in a password or a path"
        raise SenderError(f"{redacted(url)}: {fix}")
    if hosts and not all(_HOST.fullmatch(host) for host in hosts.split(",")):
        raise SenderError(f"{redacted(url)}: the hosts are malformed; write host:port,host:port")
    return parts


def _perhaps_meant(url: str) -> str:
    """A hint for whoever has left the scheme out."""
    return f"; did you mean nats://{url}?" if _HOST_AND_PORT.fullmatch(url) else ""


def _loaded(offer: EntryPoint) -> Callable[[str], Sender]:
    factory: Callable[[str], Sender] = offer.load()
    return factory
