"""Access: who a visitor is, and what the visitor may see and decide."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.requests import Request

from outbox.model.subscription import AT, subscription_of
from outbox.runtime.process import user_and_host

#: `see`: every page. `bodies`: the bodies of messages. `replay` and `discard`: parked messages. `pause`: pause and
#: resume. `decide`: transactions of half messages.
RIGHTS = frozenset({"see", "bodies", "replay", "discard", "pause", "decide"})

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
#: A proxy on this machine speaks for strangers.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class StrangerError(Exception):
    """Raised for a request without access."""


class RefusedError(Exception):
    """Raised for a missing right; the text names the right."""


class NotSeenError(Exception):
    """Raised for a missing thing, or for a thing of other people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A visitor with rights.

    Attributes:
        user: the name in each decision.
        may: some of `see`, `bodies`, `replay`, `discard`, `pause`, `decide`. Each other right needs `see` as well.
        subscriptions: the names of the visible subscriptions; None: all.

    Raises:
        ValueError: a right or the user is none.
    """

    user: str
    may: Collection[str]
    subscriptions: Collection[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.may, str) or isinstance(self.subscriptions, str):
            raise ValueError("may and subscriptions must be lists of names, not one text; pass […]")
        if unknown := sorted(set(self.may) - RIGHTS):
            raise ValueError(f"may: {', '.join(unknown)} is no right; the rights are {', '.join(sorted(RIGHTS))}")
        if not self.user.strip():
            raise ValueError("user must not be empty; each decision keeps the name of a person")

    def allows(self, right: str) -> bool:
        """Return whether the visitor has a right, and may see pages at all."""
        return right in self.may and "see" in self.may

    def sees(self, subscription: str | None) -> bool:
        """Return whether the messages of a subscription are shown. Backfills and instances belong to a name."""
        if self.subscriptions is None or subscription is None:
            return True
        return not names_of(subscription).isdisjoint(self.subscriptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(Access):
    """The access of a visitor who has logged in here. `log_out`: the token of the form that ends the session."""

    log_out: str


def names_of(subscription: str) -> set[str]:
    """Return the names by which a subscription is meant: its own, and those of which it is a backfill or instance."""
    return {subscription, subscription_of(subscription) or subscription, subscription.partition(AT)[0]}


#: The access hook of an application: returns the access of a request, or None for nobody.
Hook = Callable[[Request], Access | Awaitable[Access | None] | None]


def LOCAL(request: Request) -> Access | None:  # noqa: N802 - a value to users, as `access=LOCAL`
    """Give every right to requests of the same machine: from a loopback address, to a loopback name, by no proxy."""
    client = None if request.client is None else request.client.host
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if client is None or not _is_loopback(client) or name.lower() not in _LOCAL_NAMES:
        return None
    if any(each in request.headers for each in _FORWARDED):
        return None
    return Access(user=user_and_host(), may=RIGHTS)


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
