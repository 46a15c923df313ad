"""`outbox subscriptions`: the readers of the log, and what belongs to each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.decisions import tell
from outbox.cli.groups import Group
from outbox.cli.options import DURATION, NAMES, Target, about_a_database, as_json, confirmed, option, to_a_destination
from outbox.cli.output import age, counted, moment, show_json, show_table

if TYPE_CHECKING:
    from datetime import timedelta

    from outbox.model.lease import Holder, Partition
    from outbox.model.subscription import Subscription
    from outbox.store.operations.parked_status import Count
    from outbox.store.subscriptions.readers import Hold

_HEADERS = ("NAME", "TOPICS", "DESTINATION", "ON DEAD", "PARTITIONS", "CREATED (UTC)", "WORKER")


_wait_for_lease = option(
    "--wait", type=DURATION, default="30s", help="How long to ask a worker for its lease; 0s: not at all."
)


@click.group(cls=Group, no_args_is_help=True)
def subscriptions() -> None:
    """List, alter, split and drop the readers of the log."""


@subscriptions.command("list")
@about_a_database
@as_json
def list_(*, target: Target, json: bool) -> None:
    """List the subscriptions: what they read, where they send it, who works on them."""
    from outbox.store.subscriptions.leases import Leases
    from outbox.store.subscriptions.readers import Readers
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        found = [
            (each, Leases(channel).look_all(each.all_partitions()), Readers(channel).hold(each))
            for each in Subscriptions(channel).all()
        ]
    if json:
        show_json({"subscriptions": [_as_json(*each) for each in found]})
    else:
        show_table(_HEADERS, [_row(*each) for each in found])


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--topics", type=NAMES, help="Read these topics only; 'orders.*' is a pattern, '!orders.*' an exception.")
@option("--all-topics", is_flag=True, help="Read all topics.")
@to_a_destination
@option("--on-dead", type=click.Choice(["block", "continue"]), help="Whether a dead letter holds back its key.")
@option("--grace", type=DURATION, help="How long after its commit a message is read at the earliest.")
@option("--partitions", type=click.IntRange(1), help="How many workers may share its messages; a change of its own.")
@_wait_for_lease
@as_json
def alter(
    *,
    target: Target,
    name: str,
    topics: tuple[str, ...] | None,
    all_topics: bool,
    to: str | None,
    on_dead: Any,
    grace: timedelta | None,
    partitions: int | None,
    wait: timedelta,
    json: bool,
) -> None:
    """Give a subscription other topics, another destination, another policy or another number of partitions.

    Topics that another route of the same relay has are refused, because both would send them.

    Workers may run: the one at work finishes its calls and pauses for the change. A worker that declares something else
    ends then; with several databases or routes, or in an application, it tries again instead.

    A change counts from where the subscription stands: what it has passed already is not read again.

    With --on-dead continue the messages behind dead letters that are there go on, too, in their order; the dead letters
    stay. With --on-dead block those that come hold back their keys, those that are there do not.

    Another number of partitions counts as soon as all partitions stand at the same position. One alone does at once;
    several are handled up to the position of the foremost, by the relays that run, before any goes on. The command
    waits for that as long as --wait says; the relays do not need it. The number that there is takes the change back.
    """
    others = topics is not None or all_topics or not (to is None and on_dead is None and grace is None)
    if topics is not None and all_topics:
        raise click.UsageError("--topics and --all-topics exclude each other")
    if partitions is not None and others:
        raise click.UsageError("--partitions is a change of its own: give it alone")
    if partitions is None and not others:
        raise click.UsageError(
            "nothing to alter: give --topics, --all-topics, --to, --on-dead, --grace or --partitions"
        )
    if partitions is not None:
        from outbox.admin.repartition import repartition

        with target.open_outbox() as channel:
            altered = repartition(channel, name, partitions, wait=wait)
        tell(_Altered(altered), json=json)
        return
    from outbox.admin import commands
    from outbox.model.topics import chosen_topics
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        stored = Subscriptions(channel).get(name)
        destination = None if to is None else _checked_destination(to, stored)
        if stored.destination is None and destination is None and stored.direct is None:
            raise click.UsageError(f"{name} has no destination yet: its first worker declares all of it; or say --to")
        changed = replace(
            stored,
            topics=stored.topics if topics is None and not all_topics else chosen_topics(topics),
            destination=destination or stored.destination,
            on_dead=on_dead or stored.on_dead or "block",
            grace=stored.grace if grace is None else grace,
        )
        altered = commands.alter(channel, changed, before=stored, wait=wait)
    tell(_Altered(altered), json=json)


def _checked_destination(to: str, stored: Subscription) -> str:
    """Return what is stored of a destination. Its URL is checked as by `outbox relay`, without a connection."""
    from outbox.senders.opening import is_offered, open_sender
    from outbox.senders.port import destination_of

    # Senders and functions of an application are opened there only; a sender may call itself `shop://orders`.
    own = ("sender", "callable", (stored.destination or "").partition(":")[0])
    if to.partition(":")[0] in own and not is_offered(to):
        return destination_of(to)
    opened = open_sender(to)
    opened.close()
    return opened.destination


@dataclass(frozen=True, slots=True)
class _Altered:
    """A subscription after it was altered."""

    subscription: Subscription

    def describe(self) -> str:
        now = self.subscription
        where = f"{_topics(now)} to {_destination(now)}"
        partitions = "" if now.partitions == 1 else f", {now.partitions} partitions"
        told = f"{now.name}: {where}, a dead letter: {now.on_dead}{_grace(now)}{partitions}"
        if now.next_partitions is None:
            return told
        following = counted(now.next_partitions, "partition")
        return (
            f"{told}; {following} as soon as its relays have handled each up to where the foremost is, which outbox"
            " status shows"
        )

    def as_json(self) -> dict[str, object]:
        return _declared(self.subscription)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--topics", type=NAMES, required=True, help="The topics or patterns that the new subscription is to have.")
@to_a_destination
@option(
    "--as",
    "as_name",
    metavar="NEW",
    help="Name of the new subscription.  [default: that of a --route]",
)
@_wait_for_lease
@as_json
def split(
    *,
    target: Target,
    name: str,
    topics: tuple[str, ...],
    to: str | None,
    as_name: str | None,
    wait: timedelta,
    json: bool,
) -> None:
    """Give topics of a subscription to a new one with another destination.

    The new one begins exactly where NAME stands, with its policy, and takes over the parked messages of these topics;
    NAME no longer has them. So nothing is left out, and nothing is sent twice.

    A relay at work finishes its calls first. Then it ends, because its topics are others now; with several databases
    or routes, or in an application, it tries again instead. Start outbox relay with a --route for the topics.
    """
    if to is None:
        raise click.UsageError("no destination for the new subscription: give --to URL or --to-file PATH")
    from outbox.admin.split import split as carry_out
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        destination = _checked_destination(to, Subscriptions(channel).get(name))
        done = carry_out(channel, name, topics, destination=destination, as_name=as_name, wait=wait)
    tell(_Split(done.origin, done.made, done.parked), json=json)


@dataclass(frozen=True, slots=True)
class _Split:
    """Two subscriptions that were one, and how many parked messages the new one got."""

    origin: Subscription
    made: Subscription
    parked: int

    def describe(self) -> str:
        now, new = self.origin, self.made
        parked = f", with {counted(self.parked, 'parked message')}" if self.parked else ""
        where = f"{new.name}: {_topics(new)} to {_destination(new)}, from where {now.name} stands{parked}"
        return f"{where}; {now.name}: {_topics(now)} to {_destination(now)}"

    def as_json(self) -> dict[str, object]:
        return {"split": _declared(self.origin), "made": _declared(self.made), "moved": self.parked}


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--yes", is_flag=True, help="Do not ask.")
@as_json
def drop(*, target: Target, name: str, yes: bool, json: bool) -> None:
    """Forget a subscription, with its position and what it has parked, while no worker runs.

    What belongs to its direct writers, NAME:compensation, goes with it. Stop those writers first: nobody sends what
    they leave behind.
    """
    from outbox.admin import commands
    from outbox.model.subscription import compensation_of
    from outbox.store.operations.parked_status import parked_counts
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        stored = Subscriptions(channel).get(name)
        names = [name, compensation_of(name)]
        found = [each for each in names if Subscriptions(channel).find(each) is not None]
        counts = [each for of in found for each in parked_counts(channel, of).items()]
        dropped = _Dropped(found, [(state, count) for state, count in counts if count.number])
        then = "A worker of that name would begin anew."
        if stored.kind == "check":
            then = "Nobody would be asked about its pending transactions any more; decide them before by outbox half."
        if stored.kind == "extract":
            then = "Messages that its archive does not have yet may be purged then."
        confirmed(f"drop {' and '.join(found)}{dropped.lost}? {then}", yes=yes)
        commands.drop(channel, stored)
    tell(dropped, json=json)


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Subscriptions that are dropped, with the counts of their parked messages by state."""

    names: Sequence[str]
    parked: Sequence[tuple[str, Count]]

    @property
    def lost(self) -> str:
        """The parked messages that are dropped with them, in words."""
        parked = ", ".join(f"{count} {state}" for state, count in self.parked)
        return f", with the messages that were parked ({parked})" if parked else ""

    def describe(self) -> str:
        return f"{' and '.join(self.names)} {'is' if len(self.names) == 1 else 'are'} dropped{self.lost}"

    def as_json(self) -> dict[str, object]:
        parked = Counter[str]()
        for state, count in self.parked:
            parked[state] += count.number
        return {"dropped": self.names, "parked": parked}


def _row(subscription: Subscription, holders: Mapping[Partition, Holder], hold: Hold | None) -> tuple[object, ...]:
    worker = ", ".join(sorted({holder.owner or "" for holder in holders.values() if holder.live})) or "nobody"
    if hold is not None:
        worker = "released" if hold.released else f"held since {moment(hold.since)}"
    return (
        subscription.name,
        _topics(subscription),
        _destination(subscription),
        subscription.on_dead or ("(none yet)" if hold is None else "-"),
        _partitions(subscription) if hold is None else "-",
        moment(subscription.created_at, zone=False),
        worker,
    )


def _partitions(subscription: Subscription) -> str:
    ordered = subscription.next_partitions
    return f"{subscription.partitions}" if ordered is None else f"{subscription.partitions}→{ordered}"


def _destination(subscription: Subscription) -> str:
    if subscription.kind == "check":
        return "(check-back)"
    if subscription.hold is not None:
        return f"archive {subscription.destination}"
    return subscription.destination or "(none yet)"


def _grace(subscription: Subscription) -> str:
    return f", {age(subscription.grace.total_seconds())} after the commit" if subscription.grace else ""


def _topics(subscription: Subscription) -> str:
    if subscription.direct is not None:
        return f"left behind by writers of {subscription.direct}"
    if subscription.kind == "check":
        return f"transactions of {','.join(subscription.tags or ())}"
    return "all topics" if subscription.topics is None else ",".join(subscription.topics)


def _as_json(subscription: Subscription, holders: Mapping[Partition, Holder], hold: Hold | None) -> dict[str, object]:
    owners = [
        holders[each].owner if each in holders and holders[each].live else None
        for each in subscription.all_partitions()
    ]
    live = None not in owners
    return {
        **_declared(subscription),
        "created_at": subscription.created_at,
        "worker": owners[0] if live else None,
        "live": live,
        "workers": owners,
        "hold_seconds": None if subscription.hold is None else subscription.hold.total_seconds(),
        "held_since": None if hold is None else hold.since,
        "held_until": None if hold is None else hold.until,
        "released": None if hold is None else hold.released,
    }


def _declared(subscription: Subscription) -> dict[str, object]:
    return {
        "name": subscription.name,
        "kind": subscription.kind,
        "topics": subscription.topics,
        "tags": subscription.tags,
        "destination": subscription.destination,
        "on_dead": subscription.on_dead,
        "grace_seconds": subscription.grace.total_seconds(),
        "partitions": subscription.partitions,
        "next_partitions": subscription.next_partitions,
    }
