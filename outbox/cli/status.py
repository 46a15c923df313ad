"""`outbox status`: how every subscription stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from outbox.cli.options import DURATION, Target, about_a_database, as_json, option
from outbox.cli.output import age, say, show_json, show_table

if TYPE_CHECKING:
    from outbox.store.status import Standing

_HEADERS = ("SUBSCRIPTION", "BACKLOG", "LAG", "DELAYED", "WAITING", "RETRY", "BLOCKED", "DEAD", "WORKER")
_NUMBERS = _HEADERS[1:-1]
#: So much of a worker's random name tells it from the others.
_OWNER = 8
#: A shorter pause is a restart.
_IDLE_SECONDS = 60.0


@click.command()
@about_a_database
@as_json
@option("--watch", is_flag=True, help="Show it again and again, until interrupted.")
@option("--interval", type=DURATION, default="2s", show_default=True, help="Pause between two looks of --watch.")
def status(*, target: Target, json: bool, watch: bool, interval: timedelta) -> None:
    """Show what waits, since when, and who works on it.

    BACKLOG counts messages of the log that are not settled yet, up to 10 000; ~ marks an estimate. LAG is the age of
    the oldest of them. DELAYED to DEAD count messages that were set aside.
    """
    show = _show_json if json else _show_table
    if watch:
        _watch(target, show, interval)
        return
    with target.opened() as (database, channel):
        from outbox.store.status import standings

        show(*standings(database, channel))


def _watch(target: Target, show: Callable[[datetime, list[Standing]], None], interval: timedelta) -> None:
    """Over any number of lost connections, as a worker does."""
    from outbox.cli.failures import UNREACHABLE, told
    from outbox.store.status import standings

    reached = False
    while True:
        try:
            with target.opened() as (database, channel):
                while True:
                    found = standings(database, channel)
                    reached = True
                    if show is _show_table and sys.stdout.isatty():
                        click.clear()
                    show(*found)
                    time.sleep(interval.total_seconds())
        except KeyboardInterrupt:
            return
        except Exception as error:
            # Only who was there before is waited for: a wrong URL does not get better.
            code = told(error) if reached else None
            if code is None:
                raise
            if code != UNREACHABLE:
                click.get_current_context().exit(code)
            time.sleep(interval.total_seconds())


def _show_table(_now: datetime, found: list[Standing]) -> None:
    show_table(_HEADERS, [_row(standing) for standing in found], numbers=_NUMBERS)
    for warning in (text for standing in found for text in _warnings(standing, found)):
        say(f"warning: {warning}")


def _row(standing: Standing) -> tuple[str, ...]:
    lag = f"~{age(standing.lag)}" if standing.lag_about else age(standing.lag) if standing.backlog.number else "-"
    worker = str(standing.holder.owner)[:_OWNER] if standing.is_run and standing.holder is not None else "nobody"
    parked = (str(count) for count in standing.parked.values())
    return (standing.subscription.name, str(standing.backlog), lag, *parked, worker)


def _warnings(standing: Standing, all: Sequence[Standing]) -> list[str]:
    holder = standing.holder
    if holder is None or holder.notice is None:
        return _of_nobody(standing, all)
    at = "" if holder.noticed_at is None else f" (at {holder.noticed_at:%H:%M:%S} UTC)"
    return [f"{standing.subscription.name}: {holder.notice}{at}", *_of_nobody(standing, all)]


def _of_nobody(standing: Standing, all: Sequence[Standing]) -> list[str]:
    name = standing.subscription.name
    if standing.is_run:
        return []
    if standing.subscription.destination is None:
        advice = f"; if nobody is to, run: outbox subscriptions drop {name}" if _others_are_used(name, all) else ""
        return [f"nobody has run {name} yet; it keeps every message from being purged{advice}"]
    if standing.idle is not None and standing.idle < _IDLE_SECONDS:
        return []
    since = "" if standing.idle is None else f", for {age(standing.idle)}"
    return [f"nobody runs {name}{since}; messages after its position are not purged"]


def _others_are_used(name: str, all: Sequence[Standing]) -> bool:
    """Whether another subscription does the work; its own direct writers' is none: it would be dropped with it."""
    others = (each.subscription for each in all if each.subscription.name != name)
    return any(each.destination is not None and each.direct != name for each in others)


def _show_json(now: datetime, found: list[Standing]) -> None:
    show_json({"at": now, "subscriptions": [_as_json(standing, found) for standing in found]})


def _as_json(standing: Standing, all: Sequence[Standing]) -> dict[str, object]:
    holder = standing.holder
    return {
        "name": standing.subscription.name,
        "topics": standing.subscription.topics,
        "destination": standing.subscription.destination,
        "backlog": standing.backlog.number,
        "backlog_is_estimate": standing.backlog.about,
        "lag_seconds": round(standing.lag, 3),
        "lag_is_estimate": standing.lag_about,
        "idle_seconds": None if standing.idle is None else round(standing.idle, 3),
        "worker": holder.owner if holder is not None and standing.is_run else None,
        "live": standing.is_run,
        "lease_until": holder.lease_until if holder is not None else None,
        "lease_seconds": holder.length.total_seconds() if holder is not None and holder.length is not None else None,
        "notice": holder.notice if holder is not None else None,
        "noticed_at": holder.noticed_at if holder is not None else None,
        "parked": {state: count.number for state, count in standing.parked.items()},
        "parked_is_minimum": [state for state, count in standing.parked.items() if count.about],
        "warnings": _warnings(standing, all),
    }
