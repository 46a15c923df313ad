"""Declarations that are refused beside the stored subscriptions; each error names a fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

from outbox.errors import SubscriptionError
from outbox.model.command import Commands
from outbox.model.destination import same_destination
from outbox.model.filter.tags import tag_expression
from outbox.model.subscription import (
    Declaration,
    Kind,
    Subscription,
    base_of,
    grace_milliseconds,
    route_name,
    routes_of,
)
from outbox.model.topics import ANYTHING, Topics


def require_fitting(declared: Declaration, known: Sequence[Subscription], commands: Commands) -> Subscription | None:
    """Refuse a declaration that does not fit the known subscriptions; return the stored subscription, or None.

    Raises:
        SubscriptionError: the stored properties differ, or another route has some of the topics of a new subscription.
    """
    stored = next((each for each in known if each.name == declared.name), None)
    if stored is not None and (stored.destination is not None or declared.destination is None):
        require_same(stored, declared, known, commands)
    elif stored is None and declared.split_from is not None:
        _require_split(declared, declared.split_from, known, commands)
    elif declared.kind == "relay":
        _require_own_topics(declared, known, commands)
    return stored


def require_same(
    stored: Subscription, declared: Declaration, known: Sequence[Subscription], commands: Commands
) -> None:
    """Refuse a declaration with another kind, selection, destination or policy than is stored."""
    if stored.kind != declared.kind:
        raise SubscriptionError(
            f"{stored.name!r} is the name of a subscription of another kind: {stored.kind}, not {declared.kind};"
            " use another name"
        )
    if declared.kind == "backfill":
        # A command has chosen its selection, and workers do not know it.
        declared = replace(declared, topics=stored.topics, tags=stored.tags, filter=stored.filter)
    topics = None if declared.topics is None else tuple(sorted(set(declared.topics)))
    destination = declared.destination or stored.destination
    if destination and stored.destination and same_destination(stored.destination, destination):
        destination = stored.destination
    on_dead = declared.on_dead or stored.on_dead
    # A stored grace that is longer does no harm, because this worker needs only that rows wait long enough.
    grace = max(declared.grace or stored.grace, stored.grace)
    differing = [
        (f"has {what} {_shown(there)}, this worker asks for {_shown(here)}", option)
        for what, there, here, option in (
            ("topics", stored.topics, topics, _topics_option(topics)),
            ("tags", stored.tags, declared.tags, ("--tags", tag_expression(declared.tags))),
            ("filter", stored.filter, declared.filter, ("--filter", declared.filter or "TRUE")),
            ("destination", stored.destination, destination, ("--to", destination or "")),
            ("on-dead", stored.on_dead, on_dead, ("--on-dead", on_dead or "")),
            ("grace", stored.grace, grace, ("--grace", f"{grace_milliseconds(grace)}ms")),
            *_switches(stored, declared),
        )
        if there != here
    ]
    if differing:
        # The properties of a backfill are those of its subscription.
        altered = stored.follows or stored.name
        instead = (
            f"a transaction_timeout of {_shown(stored.grace)}"
            if stored.kind == "check" and stored.grace != grace
            else "another name"
            if stored.kind in ("consumer", "broadcast")
            else "another --name"
        )
        differs = f"subscription {stored.name!r} {'; it '.join(text for text, _ in differing)}"
        if stored.kind == "relay" and (taken := taken_topics(stored, topics, known, commands)):
            raise SubscriptionError(f"{differs}; {taken}; or give this worker {instead}")
        if moved := _moved(stored.topics, topics):
            # Altered topics would be sent again from the beginning by a new subscription, so this comes first.
            # One at a time, because each route has a subscription of its own.
            route = route_name(declared.split_from or declared.name, moved[0])
            options = (*_topics_option(moved[:1]), "--to", "URL", "--as", route)
            split = commands.line("subscriptions", "split", stored.name, *options)
            raise SubscriptionError(
                f"{differs}; give them to another subscription, from where this one stands: {split}; or give this"
                f" worker {instead}"
            )
        changes = (word for _, option in differing for word in option)
        alter = commands.line("subscriptions", "alter", altered, *changes)
        # First of all what is right after a move: a worker that moves it back is seldom meant.
        old = "" if stored.kind == "check" else "stop this worker if it is the old one, or "
        raise SubscriptionError(f"{differs}; {old}give this worker {instead}, or run: {alter}")


def require_partitions(name: str, kind: Kind, partitions: int, slots: int) -> None:
    """Refuse a number of partitions that does not fit the kind of subscription, or the slots of the outbox."""
    if kind == "backfill":
        raise SubscriptionError(f"{name} keeps the number of partitions with which it began")
    if kind not in ("relay", "consumer") and partitions != 1:
        raise SubscriptionError(f"{name} is of the kind {kind}, which has one partition")
    if not 1 <= partitions <= slots:
        raise SubscriptionError(
            f"partitions: must be from 1 to {slots}, not {partitions}; this outbox has {slots} slots, and a partition"
            " without any would have nothing to do"
        )


def taken_topics(
    stored: Subscription, topics: Sequence[str] | None, known: Sequence[Subscription], commands: Commands
) -> str | None:
    """Return in words the routes with topics that `stored` lacks, and the fix; None: no route."""
    base = base_of(stored.name, known)
    now, wanted = Topics.of(stored.topics), Topics.of(topics)
    owners = [
        each
        for each in routes_of(base, known)
        if each.name != stored.name and wanted.shares(Topics.of(each.topics)) and not now.shares(Topics.of(each.topics))
    ]
    return _beside_routes(base, owners, stored.name, commands) if owners else None


def _require_own_topics(declared: Declaration, known: Sequence[Subscription], commands: Commands) -> None:
    """Refuse to begin with topics of routes of this subscription that have begun before."""
    wanted = Topics.of(declared.topics)
    owners = [
        each
        for each in routes_of(declared.name, known)
        if each.name != declared.name and wanted.shares(Topics.of(each.topics))
    ]
    if owners:
        taken = _beside_routes(declared.name, owners, declared.name, commands)
        raise SubscriptionError(
            f"subscription {declared.name!r} has not begun yet, and {taken}; or give this worker another --name"
        )


def _beside_routes(base: str, owners: Sequence[Subscription], name: str, commands: Commands) -> str:
    """Return in words that these routes have topics of `name`, and how to run the relay with routes."""
    patterns = [each[len(base) + 1 :] or ANYTHING for each in (*(owner.name for owner in owners), name)]
    # The first that matches takes a message, so the wider ones come last.
    patterns.sort(key=lambda each: (-len(each.replace(ANYTHING, "")), each.count(ANYTHING)))
    named = " and ".join(repr(each.name) for each in owners)
    run = commands.line("relay", "--name", base, *(word for each in patterns for word in ("--route", f"{each}=URL")))
    return f"{named} would send some of these topics too; run the relay with routes: {run}"


def _require_split(declared: Declaration, base: str, known: Sequence[Subscription], commands: Commands) -> None:
    """Refuse to begin with topics that another subscription has, and has perhaps sent."""
    wanted = Topics.of(declared.topics)
    owners = [each for each in routes_of(base, known) if wanted.shares(Topics.of(each.topics))]
    if not owners:
        return
    named = " and ".join(repr(each.name) for each in owners)
    missing = f"subscription {declared.name!r} is not there yet, and {named} {'have' if owners[1:] else 'has'}"
    parts = _given(owners[0], wanted)
    if owners[1:] or not parts:
        raise SubscriptionError(
            f"{missing} its topics; a new route takes topics of one subscription, which keeps others. Put what has"
            " them before it among the routes, or leave it out"
        )
    options = (*_topics_option(parts), "--to", declared.destination, "--as", declared.name)
    split = commands.line("subscriptions", "split", owners[0].name, *options)
    raise SubscriptionError(f"{missing} its topics; to begin where that one stands, run: {split}")


def _moved(there: Sequence[str] | None, here: Sequence[str] | None) -> tuple[str, ...]:
    """Return the topics that only the worker leaves out, not the stored subscription; empty on more differences."""
    stored, declared = Topics.of(there), Topics.of(here)
    moved = tuple(each for each in declared.exceptions if each not in stored.exceptions)
    try:
        left = stored.without(moved)
    except SubscriptionError:
        return ()
    return moved if left.chosen() == declared.chosen() else ()


def _given(owner: Subscription, wanted: Topics) -> list[str]:
    """Return the wanted topics that a split of `owner` would give away; empty if no such split is possible."""
    stored = Topics.of(owner.topics)
    parts = [each for each in wanted.included if not stored.lacks(each)]
    try:
        given = stored.within(parts)
        return parts if given is not None and stored.without(given.included) else []
    except SubscriptionError:
        return []


def _topics_option(topics: Sequence[str] | None) -> tuple[str, str]:
    return "--topics", ANYTHING if topics is None else ",".join(topics)


def _switches(stored: Subscription, declared: Declaration) -> Iterator[tuple[str, bool, bool, tuple[str, ...]]]:
    """Yield the properties that are on or off: name, stored and declared value, and the option that alters them."""
    for name in ("ordered", "compact"):
        there, here = getattr(stored, name), getattr(declared, name)
        yield name, there, there if here is None else here, (f"--{name}" if here else f"--no-{name}",)


def _shown(value: object) -> str:
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, tuple):
        return ",".join(value)
    return "all" if value is None else str(value)
