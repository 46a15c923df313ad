"""`outbox half check`: asks the producers of a group, or a database, about transactions without a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from outbox.cli.options import DURATION, Target, a_business_database, about_a_database, as_value, option
from outbox.cli.output import age, counted, fail, say, warn
from outbox.cli.probes import Probes, probed, run_probed

if TYPE_CHECKING:
    from outbox.admin.results import Look
    from outbox.model.subscription import Subscription
    from outbox.rocketmq.listener import Question
    from outbox.rocketmq.service import CheckService
    from outbox.store.database import Channel

#: For so long a stop waits for questions under way.
_DRAIN = timedelta(minutes=1)
_DEFAULT_TIMEOUT = timedelta(seconds=6)
#: At the end of a run at most so many pending transactions are counted.
_MOST_COUNTED = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The options for a `CheckPolicy`."""

    check_interval: timedelta
    check_max: int
    age_limit: timedelta
    check_timeout: timedelta


@click.command()
@about_a_database
@option(
    "--listener",
    metavar="MODULE:OBJECT",
    help="Whom to ask: an object with check_local_transaction(message) or check(message), or a function of a message.",
)
@option("--group", help="The producer group; not needed if there is only one.")
@a_business_database
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
@option("--once", is_flag=True, help="Ask about due transactions, then end.")
@as_value("policy", Policy)
@probed
def check(
    *,
    target: Target,
    listener: str | None,
    group: str | None,
    business: str | None,
    policy: Policy,
    once: bool,
    probes: Probes,
) -> None:
    """Ask about transactions without a verdict.

    Runs until SIGTERM or SIGINT; questions under way end first, and a second signal ends the process at once. Several
    processes may run for a group, producers among them: one process checks back, the others stand by.

    Without --listener only transactions with verdict="join" are decided, and with --business also
    verdict="record": the databases know the outcome. Other transactions wait for a process with a listener. No waiting
    counts against a transaction, and a process without a listener gives way.

    A transaction is asked about after the transaction_timeout that the producers of the group have stored.
    """
    for name in ("check_interval", "check_timeout", "age_limit"):
        if getattr(policy, name) <= timedelta(0):
            raise click.UsageError(f"--{name.replace('_', '-')} must be greater than 0")
    if once:
        probes.require_none("--once")
    question = None if listener is None else _question_of(listener)
    with target.open_outbox() as channel:
        group = _group_of(channel, group, once=once)
        known = _stored(channel, group)
        timeout = _DEFAULT_TIMEOUT if known is None else known.grace
        if once:
            _require_nobody(channel, group)
    with _service(target, group, timeout, policy, question, business) as service:
        say(f"check:{group}: {_asked(listener, business)}, after {age(timeout.total_seconds())}")
        _run(service, target, probes, once=once)
    say(f"check:{group}: {_left(target, group) if once else 'stopped'}")


@contextmanager
def _service(
    target: Target, group: str, timeout: timedelta, policy: Policy, question: Question | None, business_url: str | None
) -> Iterator[CheckService]:
    """Yield the check service of a group, with open databases."""
    from outbox.cli.business import business_of
    from outbox.cli.connection import open_channel_of, open_database
    from outbox.rocketmq.broker import Broker
    from outbox.rocketmq.checker import CheckPolicy
    from outbox.rocketmq.service import CheckService
    from outbox.writing.bare import BareOutbox

    with ExitStack() as open:
        business = None if business_url is None else open.enter_context(business_of(business_url))
        database = open.enter_context(open_database(target.url, target.commands))
        open.enter_context(database.explained())
        if business is not None:
            business.require_other_than(database)
        with open_channel_of(database):
            outbox = BareOutbox(database)
        open.callback(outbox.notifier.close)
        broker = Broker(outbox, connections=1)
        open.callback(broker.close)
        checks = CheckPolicy(transaction_timeout=timeout, **asdict(policy))
        yield CheckService.of(broker, group, checks, question, business)


def _run(service: CheckService, target: Target, probes: Probes, *, once: bool) -> None:
    from outbox.admin.admin import Admin
    from outbox.cli.connection import checked_label
    from outbox.cli.failures import UNFINISHED
    from outbox.relay.supervisor import Supervisor
    from outbox.runtime.signals import stopping_on_signals

    def look() -> Look:
        with target.open_outbox() as channel:
            return Admin(channel).look()

    supervisor = Supervisor([service], drain=_DRAIN, pause=None)
    if not once:
        if (
            not run_probed(supervisor, probes, {checked_label(target.url, target.schema): look})
            or supervisor.unfinished
        ):
            click.get_current_context().exit(UNFINISHED)
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
    """Return the group that --group names, or else the only known group."""
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
        warn(new)
    return group


def _stored(channel: Channel, group: str) -> Subscription | None:
    from outbox.model.subscription import check_of
    from outbox.store.subscriptions.subscriptions import Subscriptions

    return Subscriptions(channel).find(check_of(group))


def _require_nobody(channel: Channel, group: str) -> None:
    """Exit with code 4 if a live worker checks back on the group, because the worker may never give its lease back."""
    from outbox.cli.failures import UNFINISHED
    from outbox.store.subscriptions.leases import Leases

    known = _stored(channel, group)
    holder = None if known is None else Leases(channel).look(known.partition(0))
    if holder is not None and holder.live:
        fail(f"worker {holder.owner} checks back on group {group} already")
        click.get_current_context().exit(UNFINISHED)


def _asked(listener: str | None, business: str | None) -> str:
    """Return in words whom the service asks."""
    if listener is None and business is None:
        return "asks nobody but the outbox's own database"
    asked = [
        "" if listener is None else f"asks {listener}",
        "asks the business database for records" if business else "",
    ]
    return " and ".join(filter(None, asked))


def _left(target: Target, group: str) -> str:
    """Return in words what is still pending, because the end of a run need not be the end of the work."""
    from outbox.rocketmq.checker import NO_BUSINESS, NO_LISTENER
    from outbox.store.half_messages.pending import HalfTransactions

    with target.open_outbox() as channel:
        found = HalfTransactions(channel).pending(group=group, limit=_MOST_COUNTED)
    given_up = sum(each.given_up for each in found)
    shown = f"{_MOST_COUNTED} or more" if len(found) == _MOST_COUNTED else str(len(found))
    left = [f", {given_up} of them given up" if given_up else ""]
    for answer, lack in ((NO_LISTENER, "--listener"), (NO_BUSINESS, "--business")):
        waiting = sum(each.last_answer == answer and not each.given_up for each in found)
        left.append(f", {waiting} of them for want of {lack}" if waiting else "")
    return f"done; {counted(shown, 'transaction', ('is', 'are'))} pending{''.join(left)}"
