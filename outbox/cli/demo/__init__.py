"""`outbox demo`: sends messages of real transactions, with crashes in the middle, and compares orders and receipts."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

from outbox.cli.options import configured, option

if TYPE_CHECKING:
    from outbox.cli.demo.judge import Judgement
    from outbox.cli.demo.play import Play
    from outbox.cli.demo.show import Show
    from outbox.cli.demo.site import Site


@click.command()
@option("--orders", type=click.IntRange(4, 100_000), default=2000, help="Orders to place.")
@option("--light", is_flag=True, help="No servers: SQLite and a file.")
@option("--keep", is_flag=True, help="Leave it running afterwards, to play with.")
@configured
def demo(*, orders: int, light: bool, keep: bool) -> int:
    """See transactions become messages, with crashes in the middle.

    Starts a private PostgreSQL and a private NATS JetStream (where they are not installed: SQLite and a file). Four
    processes place and move on orders, each change in a transaction with its message; some are rolled back. A relay and
    one of the four are killed with SIGKILL. At the end the table of the orders is compared with what a consumer of
    the stream received. Everything is removed again, but for a picture of the run.

    Exits with 1 if a message was lost, came of a rolled-back transaction, or came out of order.
    """
    from outbox.cli.demo.picture import saved
    from outbox.cli.demo.play import Play
    from outbox.cli.demo.show import Show, result
    from outbox.cli.demo.site import opened_site
    from outbox.cli.demo.staff import Staff

    show = Show()
    with (
        _ending_on_sigterm(),
        opened_site(show.tell, light=light) as site,
        closing(Staff(site.folder, site.environment)) as staff,
    ):
        play = Play(site, staff, show, orders)
        judgement = play.perform(keep=keep)
        result(_rows(orders, play, judgement), _conclusion(judgement), is_sound=judgement.is_sound)
        click.echo(f"The run as a picture: {saved(play.history)}")
        if keep:
            _wait_for_ctrl_c(site, play, show)
    return 0 if judgement.is_sound else 1


def _rows(orders: int, play: Play, judgement: Judgement) -> list[tuple[str, str, str]]:
    return [
        ("orders committed", f"{orders:,}", f"and {play.rollbacks:,} transactions rolled back"),
        ("messages committed", f"{judgement.committed:,}", "as the table of the orders says"),
        ("messages received", f"{judgement.received:,}", "by a consumer of the destination"),
        ("lost", f"{judgement.lost:,}", "committed, never received"),
        ("phantom", f"{judgement.phantom:,}", "received, never committed"),
        ("duplicates", f"{judgement.duplicates:,}", "sent again after the kill, with the same id"),
        ("order violations", f"{judgement.violations:,}", "changes of one order, received out of turn"),
        ("messages per second", f"{play.rate:,.0f}", "from the first to the last, the takeover included"),
    ]


def _conclusion(judgement: Judgement) -> str:
    if judgement.is_sound:
        return "Nothing lost, nothing made up, every order's changes in order."
    return "THE PROMISE IS BROKEN: see the table."


def _wait_for_ctrl_c(site: Site, play: Play, show: Show) -> None:
    from outbox.cli.demo.service import path_of

    click.echo(
        f"""
It is still running. In another terminal:

    export OUTBOX_DATABASE={site.database_url}
    outbox status
    python {path_of("orders.py")} ann 42

The relay sends to {site.destination.url}. What arrives is shown here, until Ctrl-C.
"""
    )
    with suppress(KeyboardInterrupt):
        trouble = ""
        while True:
            time.sleep(0.2)
            try:
                for receipt in play.arrived():
                    show.tell(f"{receipt.key}: change {receipt.version} arrived, message {receipt.message_id}")
                trouble = ""
            except Exception as error:
                # Whatever the user tries, the servers stay up until Ctrl-C.
                if trouble != (trouble := f"{type(error).__name__}: {error}"):
                    show.tell(f"what arrives cannot be shown, trying again: {trouble}")


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the demo in good order, as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
