"""The outbox for a visitor: only the visitor's subscriptions, without secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol, TypeVar
from uuid import UUID

from outbox.admin.results import ParkedCount, SubscriptionDetails, Trace
from outbox.dashboard.access import Access, NotSeenError, names_of
from outbox.dashboard.filters import PAGE, Chosen, group_of
from outbox.dashboard.port import Admin
from outbox.dashboard.redaction import Keys, Redact, clean
from outbox.dashboard.tokens import Tokens
from outbox.model.decision import Decision
from outbox.model.message import Message
from outbox.model.parking import States
from outbox.model.status import Count
from outbox.model.subscription import check_of

#: One more than a page tells whether there is another page.
_ONE_MORE = PAGE + 1
#: Where a visitor sees some groups, so many pages of all are looked through for one.
_MOST_LOOKS = 10


class _OfSubscription(Protocol):
    @property
    def subscription(self) -> str | None: ...


T = TypeVar("T", bound=_OfSubscription)


@dataclass(frozen=True, slots=True)
class Seen:
    """Answers the questions of a visitor. Pages show values from here, and from nowhere else."""

    admin: Admin
    access: Access
    redact: Redact
    keys: Keys
    tokens: Tokens

    # The subscriptions of the visitor

    def require(self, name: str | None) -> None:
        """Raise unless the visitor sees a subscription; None: all subscriptions.

        Raises:
            NotSeenError: the visitor does not.
        """
        if self.access.subscriptions is None:
            return
        # The error of an unknown subscription would name all others.
        if name is None or name not in {each for known in self.names() for each in names_of(known)}:
            raise NotSeenError(f"there is no subscription {name} that you may see" if name else "you do not see all")

    def own(self, found: Iterable[T]) -> tuple[T, ...]:
        """Return rows about the visitor's subscriptions, or about none."""
        return tuple(each for each in found if self.access.sees(each.subscription))

    def subscriptions(self) -> tuple[SubscriptionDetails, ...]:
        """Return the visitor's subscriptions, sorted by name."""
        return tuple(each for each in self.admin.subscriptions() if self.access.sees(each.name))

    def names(self) -> tuple[str, ...]:
        """Return the names of the visitor's subscriptions, sorted."""
        return tuple(each.name for each in self.subscriptions())

    def meant(self, chosen: Chosen) -> Chosen:
        """Return a choice within the visitor's subscriptions: the first one, if the visitor does not see all."""
        if self.access.subscriptions is not None and chosen.name is None:
            names = self.names()
            if not names:
                raise NotSeenError("there is no subscription that you may see")
            return replace(chosen, name=names[0])
        self.require(chosen.name)
        return chosen

    # Messages

    def choice(self, chosen: Chosen) -> dict[str, Any]:
        """Return a choice as arguments of `Outbox.admin`."""
        self.require(chosen.name)
        if chosen.group is None:
            return chosen.choice
        errors = (each.error for each in self.admin.parked_count(**chosen.choice).errors)
        found = next((each for each in errors if group_of(each) == chosen.group), None)
        if found is None:
            raise NotSeenError("no parked message has this error any more; somebody may have decided first")
        return {**chosen.choice, "same_error": found}

    def parked(self, chosen: Chosen, after: tuple[str, int] | None) -> tuple[Sequence[Any], bool]:
        """Return a page of parked messages, and whether there is another page."""
        found = self.admin.parked(limit=_ONE_MORE, after=after, **self.choice(chosen))
        return found[:PAGE], len(found) > PAGE

    def parked_count(self, chosen: Chosen) -> ParkedCount:
        """Count the parked messages of a choice by state and error."""
        return self.admin.parked_count(**self.choice(chosen))

    def trace(self, id: int | UUID) -> Trace:
        """Return the trace of a message, as far as the visitor's subscriptions have to do with the message."""
        found = self.admin.trace(id)
        ways = () if found is None else self.own(found.subscriptions)
        if self.access.subscriptions is not None:
            ways = tuple(each for each in ways if each.state not in ("unselected", "before"))
        if found is None or (self.access.subscriptions is not None and not ways):
            raise NotSeenError(
                f"nothing of message {id} is stored now: it was purged after each subscription had passed it, or no"
                " message has this id"
            )
        return replace(found, subscriptions=ways)

    def contents(self, trace: Trace) -> Message | None:
        """Return the message of a trace, from the log or from a parked copy; None: both went meanwhile."""
        if trace.in_log:
            return self.admin.message(trace.id)
        copy = next((each.copy for each in trace.subscriptions if each.copy is not None), None)
        return None if copy is None else self.admin.parked_message(trace.id, name=copy.subscription).message

    def headers(self, message: Message) -> Mapping[str, str]:
        """Return the headers, redacted."""
        return self.redact(message)[0]

    def body(self, id: int | UUID, name: str | None) -> tuple[Message, bytes]:
        """Return a message and the body, redacted, and keep the reading as a decision."""
        trace = self.trace(id)
        copies = [each.copy.subscription for each in trace.subscriptions if each.copy is not None]
        copy = None if trace.in_log else name if name in copies else next(iter(copies), None)
        message = self.admin.read_body(trace.id, name=copy, by=self.access.user)
        return message, self.redact(message)[1]

    def key(self, key: str | None) -> str | None:
        """Return a key, perhaps hashed."""
        return key if key is None or self.keys == "shown" else f"#{self.tokens.short(key)}"

    def without_key(self, text: str, key: str | None) -> str:
        """Return a text with a key in it, perhaps hashed."""
        return text if key is None else text.replace(key, str(self.key(key)))

    def shown(self, trace: Trace) -> Trace:
        """Return a trace without secrets in errors, and with the key perhaps hashed."""
        ways = [
            replace(each, what=clean(self.without_key(each.what, trace.key)), copy=self._shown_copy(each.copy))
            for each in trace.subscriptions
        ]
        return replace(trace, key=self.key(trace.key), subscriptions=tuple(ways))

    def _shown_copy(self, copy: Any) -> Any:
        """Return a parked message without the key, and without secrets in the error."""
        return copy and replace(copy, key=None, error=None if copy.error is None else clean(copy.error))

    # Decisions and transactions

    def decisions(self, name: str | None, since: datetime | None, after: int | None) -> tuple[Decision, ...]:
        """Return the newest decisions about the visitor's subscriptions; those about none are for visitors of all.

        `after`: the id of the last one of the page before.
        """
        sees_all = self.access.subscriptions is None
        # By name, because decisions of others would fill the page, and be hidden.
        names = [name] if name is not None or sees_all else sorted({*self.names(), *(self.access.subscriptions or ())})
        page: dict[str, Any] = {"since": since, "limit": _ONE_MORE, "after": after}
        asked = (self.admin.decisions(subscription=each, **page) for each in names)
        found = sorted(self.own(chain.from_iterable(asked)), key=attrgetter("id"), reverse=True)[:_ONE_MORE]
        return tuple(
            replace(each, choice=self._shown_choice(each.choice))
            for each in found
            if sees_all or each.subscription is not None
        )

    def _shown_choice(self, choice: Mapping[str, Any]) -> Mapping[str, Any]:
        key = choice.get("key")
        return {**choice, "key": self.key(key)} if isinstance(key, str) else choice

    def half_transactions(
        self, group: str | None, *, given_up: bool, after: str | None
    ) -> tuple[Sequence[Any], str | None]:
        """Return a page of transactions without a verdict, the oldest first, and where the next page begins."""
        found: list[Any] = []
        for _ in range(_MOST_LOOKS):
            asked = self.admin.half_transactions(group=group, given_up=given_up, limit=_ONE_MORE, after=after)
            found += [each for each in asked if self.access.sees(check_of(each.group))]
            if len(found) > PAGE:
                return found[:PAGE], found[PAGE - 1].transaction_id
            if len(asked) < _ONE_MORE:
                return found, None
            # Others may have a page full of transactions.
            after = asked[-1].transaction_id
        return found, after

    def half_counts(self, group: str | None) -> tuple[Count, Count]:
        """Return how many messages of the visitor's groups, or of one, have no verdict, and how many were given up."""
        checks = [each for each in self.admin.statuses() if each.kind == "check" and self.access.sees(each.name)]
        meant = [each for each in checks if group is None or each.name == check_of(group)]
        return Count.total(each.unsettled for each in meant), Count.total(each.count(States.DEAD) for each in meant)

    def half_transaction(self, id: str) -> Any:
        """Return a transaction without bodies; without a group left, for visitors of all subscriptions."""
        found = self.admin.half_transaction(id, bodies=False)
        if found.transaction is None or not self.access.sees(check_of(found.transaction.group)):
            self.require(None)
        return found
