"""Commands by which a person decides something: they carry it out or leave it to a worker, and tell the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from outbox.cli.output import say, show_json

if TYPE_CHECKING:
    from outbox.store.database import Channel


class Result(Protocol):
    """The result of a command."""

    def describe(self) -> str:
        """Return it in words."""

    def as_json(self) -> dict[str, object]:
        """Return it for programs."""


def tell(result: Result, *, json: bool) -> None:
    """Say what was done: a line for a person, or JSON."""
    if json:
        show_json(result.as_json())
    else:
        say(result.describe())


def carry_out(channel: Channel, subscription: str) -> str | None:
    """Carry out the requests about a subscription, or return the owner of the live worker that will do it."""
    from outbox.admin.borrowing import WorkerAliveError
    from outbox.admin.commands import carry_out_without_worker
    from outbox.store.subscriptions.subscriptions import Subscriptions

    try:
        carry_out_without_worker(channel, Subscriptions(channel).get(subscription))
    except WorkerAliveError as error:
        return error.holder.owner
    return None
