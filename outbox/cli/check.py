"""`outbox check`: asks what became of the transactions of a producer group that nobody has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.options import DURATION, Target, a_business_database, about_a_database, option
from outbox.cli.output import age, counted, say

if TYPE_CHECKING:
    from outbox.rocketmq.checker import CheckPolicy
    from outbox.rocketmq.listener import Question
    from outbox.rocketmq.service import CheckService
    from outbox.store.database import Channel

_DEFAULT_TIMEOUT = timedelta(seconds=6)


@click.command()
@about_a_database
@option(
    "--listener",
    metavar="MODULE:OBJECT",
    help="Whom to ask: an object with check_local_transaction(message) or check(message), or a function of a message.",
)
@option("--group", help="The producer group; may be left out where there is one.")
@a_business_database
@option(
    "--transaction-timeout",
    type=DURATION,
    help="No transaction is asked about before this age. [default: as the producers of the group say; else 6s]",
)
@option("--check-interval", type=DURATION, default="30s", help="Pause between two questions about a transaction.")
@option(
    "--check-max", type=click.IntRange(1), default=15, help="Answers UNKNOWN until a transaction waits for a person."
)
@option("--age-limit", type=DURATION, default="72h", help="Age from which on a transaction waits for a person.")
@option(
    "--check-timeout",
    type=DURATION,
    default="5s",
    help="Time limit of a question, and of a look into the business database; a later answer counts as UNKNOWN.",
)
@option("--once", is_flag=True, help="Ask about what is due, then end.")
def check(
    *,
    target: Target,
    listener: str | None,
    group: str | None,
    business: str | None,
    transaction_timeout: timedelta | None,
    once: bool,
    **policy: Any,
) -> None:
    """Ask what became of transactions that nobody has ended.

    Runs until SIGTERM or SIGINT, which let it finish what is under way; a second one ends it at once. Several processes
    may run for one group, producers among them: one checks back, the others stand by.

    Without --listener only transactions that were begun with verdict="join" are decided, and with --business those
    with "record": their databases know what became of them. All others wait for a process that has a listener. Nothing
    is counted against them, and this process gives such a process its turn.
    """
    for name in ("check_interval", "check_timeout", "age_limit"):
        if policy[name] <= timedelta(0):
            raise click.UsageError(f"--{name.replace('_', '-')} must be greater than 0")
    question = None if listener is None else _question_of(listener)
    from outbox.rocketmq.broker import declaration_of
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        group = _group_of(channel, group, once=once)
        timeout = _timeout_of(channel, group, transaction_timeout)
        Subscriptions(channel).check(declaration_of(group, timeout))
        if once:
            _require_nobody(channel, group)
    from outbox.rocketmq.checker import CheckPolicy

    checked = CheckPolicy(transaction_timeout=timeout, **policy)
    with _service(target, group, checked, question, business) as service:
        say(f"check:{group}: {_asked(listener, business)}, after {age(timeout.total_seconds())}")
        _run(service, once=once)
    say(f"check:{group}: {_left(target, group) if once else 'stopped'}")


@contextmanager
def _service(
    target: Target, group: str, policy: CheckPolicy, question: Question | None, business_url: str | None
) -> Iterator[CheckService]:
    """Yield the check service of a group, with the databases that it needs."""
    from outbox.cli.connection import business_of, open_channel_of, open_database
    from outbox.outbox import Outbox
    from outbox.rocketmq.broker import Broker
    from outbox.rocketmq.service import CheckService

    with ExitStack() as open:
        business = None if business_url is None else open.enter_context(business_of(business_url))
        database = open.enter_context(open_database(target.url, target.schema))
        open.enter_context(database.explained())
        if business is not None:
            business.require_other_than(database)
        with open_channel_of(database):
            outbox = Outbox(database.engine, schema=database.schema, slots=database.slots)
        open.callback(outbox.close)
        broker = Broker(outbox, connections=1)
        open.callback(broker.close)
        yield CheckService(broker, group, policy, question, business)


def _run(service: CheckService, *, once: bool) -> None:
    from outbox.relay.supervisor import Supervisor
    from outbox.runtime.signals import stopping_on_signals

    supervisor = Supervisor([service], pause=None)
    if not once:
        supervisor.run()
        return
    with stopping_on_signals(supervisor.stop):
        supervisor.until_empty()


def _question_of(listener: str) -> Question:
    from outbox.cli.loading import loaded
    from outbox.rocketmq.listener import question_of

    try:
        question = question_of(loaded(listener, "--listener"))  # type: ignore[arg-type]  # anything may be named
    except TypeError as error:
        raise click.UsageError(f"--listener {listener}: {error}") from None
    if question is None:
        raise click.UsageError(f"--listener {listener}: it is None")
    return question


def _group_of(channel: Channel, group: str | None, *, once: bool) -> str:
    """Return the group that --group names, or else the only one that is known."""
    from outbox.errors import MQClientError
    from outbox.rocketmq.limits import checked_group
    from outbox.store.subscriptions.subscriptions import Subscriptions

    known = [tag for each in Subscriptions(channel).all() if each.kind == "check" for tag in each.tags or ()]
    if group is None:
        if len(known) == 1:
            return known[0]
        there = f"there are {', '.join(known)}" if known else "no producer has begun a transaction here yet"
        raise click.UsageError(f"say which producer group by --group; {there}")
    try:
        checked_group(group)
    except MQClientError as error:
        raise click.UsageError(f"--group: {error}") from None
    if group not in known:
        there = f"; there are {', '.join(known)}" if known else ""
        new = f"no producer of group {group} has begun a transaction here yet{there}"
        if once:
            raise click.ClickException(new)
        say(f"warning: {new}")
    return group


def _timeout_of(channel: Channel, group: str, asked: timedelta | None) -> timedelta:
    from outbox.model.subscription import check_of
    from outbox.store.subscriptions.subscriptions import Subscriptions

    known = Subscriptions(channel).find(check_of(group))
    if asked is None:
        return _DEFAULT_TIMEOUT if known is None else known.grace
    return asked


def _require_nobody(channel: Channel, group: str) -> None:
    """Exit with code 4 if a live worker checks back on the group, because it may never give its lease back."""
    from outbox.cli.failures import UNFINISHED
    from outbox.model.subscription import check_of
    from outbox.store.subscriptions.leases import Leases
    from outbox.store.subscriptions.subscriptions import Subscriptions

    known = Subscriptions(channel).find(check_of(group))
    holder = None if known is None else Leases(channel).look(known.partition(0))
    if holder is not None and holder.live:
        say(f"Error: worker {holder.owner} checks back on group {group} already")
        click.get_current_context().exit(UNFINISHED)


def _asked(listener: str | None, business: str | None) -> str:
    """Return in words whom the service asks."""
    asked = [
        "asks nobody but the outbox's own database" if listener is None and business is None else "",
        "" if listener is None else f"asks {listener}",
        "" if business is None else "asks the business database for records",
    ]
    return " and ".join(each for each in asked if each)


def _left(target: Target, group: str) -> str:
    """Return in words what is still pending, because the end of a run need not be the end of the work."""
    from outbox.rocketmq.checker import NO_BUSINESS, NO_LISTENER
    from outbox.store.half_messages.pending import HalfTransactions

    most = 1_000
    with target.open_outbox() as channel:
        found = HalfTransactions(channel).pending(group=group, limit=most)
    given_up = sum(each.given_up for each in found)
    shown = f"{most} or more" if len(found) == most else str(len(found))
    left = [f", {given_up} of them given up" if given_up else ""]
    for answer, lack in ((NO_LISTENER, "--listener"), (NO_BUSINESS, "--business")):
        waiting = sum(each.last_answer == answer and not each.given_up for each in found)
        left.append(f", {waiting} of them for want of {lack}" if waiting else "")
    return f"done; {counted(shown, 'transaction', ('is', 'are'))} pending{''.join(left)}"
