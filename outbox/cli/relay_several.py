"""`outbox relay` for several databases or routes: it runs a relay for each, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import click

from outbox.cli.connection import checked_label
from outbox.cli.failures import UNFINISHED, report_failure
from outbox.cli.options import Target
from outbox.cli.output import say
from outbox.cli.relay_one import Relaying
from outbox.errors import DatabaseError
from outbox.model.subscription import require_own_name
from outbox.relay.routes import Route, route_subscriptions
from outbox.relay.supervisor import Relays
from outbox.runtime.signals import stopping_on_signals
from outbox.runtime.stop import Stop
from outbox.runtime.text import labelled
from outbox.senders.port import destination_of
from outbox.store.label import told_apart
from outbox.worker.connection import Until


class RelayingSeveral:
    """The relays of one command. Mistakes in the options raise before anything is opened."""

    def __init__(
        self, targets: Sequence[Target], to: str | Mapping[str, Route], *, name: str, lease: timedelta, **options: Any
    ) -> None:
        """`to`: one destination, or a route for each topic or pattern."""
        require_own_name(name)
        labels = told_apart([checked_label(target.url, target.schema) for target in targets])
        if len(set(targets)) < len(targets):
            twice = next(label for target, label in zip(targets, labels, strict=True) if targets.count(target) > 1)
            raise click.UsageError(f"{twice} is given twice")
        each_to = [(to, {"name": name})] if isinstance(to, str) else _by_route(to, name, options)
        self._each = []
        for target, label in zip(targets, labels, strict=True):
            for url, own in each_to:
                # What one of several routes says begins with the name of its subscription in any case.
                alone = len(targets) == 1
                relaying = Relaying(target, url, label=None if alone else label, lease=lease, **options | own)
                where = [] if alone else [label]
                named = " ".join([*where, own["name"]]) if len(each_to) > 1 or alone else label
                self._each.append(OneOfSeveral(relaying, own["name"], named))
        # The time that a healthy relay may need: for the call under way, and for a renewal of its lease.
        self._relays = Relays(self._each, drain=max(each.relaying.deadline for each in self._each) + lease)

    def run(self) -> int:
        """Send until stopped; return exit code 0, or 4 if a relay had not finished in time."""
        self._relays.run()
        for each in self._each:
            each.relaying.say_what_was_sent()
        return UNFINISHED if self._relays.unfinished else 0

    def end_by_themselves(self, *, once: bool, patience: timedelta) -> int:
        """Send one batch, or all there is, of each; return exit code 4 if one gave up, else the highest of theirs."""
        for each in self._each:
            each.patience = patience
        with stopping_on_signals(self._relays.stop):
            if once:
                self._relays.once()
            else:
                self._relays.until_empty()
        codes = [each.code for each in self._each] + [UNFINISHED for _ in self._relays.unfinished]
        return UNFINISHED if UNFINISHED in codes else max(codes)


def _by_route(table: Mapping[str, Route], name: str, shared: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the destination of each route, and what it has of its own among the options of a relay."""
    pairs = list(zip(table.values(), route_subscriptions(list(table), name), strict=True))
    beside = [each.declared(destination_of(str(route.to)), route.on_dead or shared["on_dead"]) for route, each in pairs]
    return [
        (
            str(route.to),
            {
                **route.options,
                "name": each.name,
                "topics": each.topics,
                "split_from": each.split_from,
                "beside": beside,
            },
        )
        for route, each in pairs
    ]


class OneOfSeveral:
    """A relay beside others, which opens its database by itself, as often as needed."""

    def __init__(self, relaying: Relaying, name: str, label: str) -> None:
        self.relaying = relaying
        self.name = name
        self.label = label
        #: For how long the destination may be silent before a relay that ends by itself gives up.
        self.patience = timedelta.max
        self.code = 0

    @property
    def stopping(self) -> bool:
        """True after a stop was asked, or after nothing was heard for longer than `patience`.

        The latter happens also when the database does not answer.
        """
        return self.relaying.stopping or self.relaying.silent > self.patience.total_seconds()

    def work(self, until: Until, stop: Stop) -> None:
        """Open the database, say where it begins, and send until stopped; or until it is empty, or gives up."""
        with self.relaying.within(stop):
            if until == "stopped":
                self._work()
            else:
                self._end(once=until == "once")

    def _work(self) -> None:
        try:
            self.relaying.work()
        except click.ClickException as error:
            raise DatabaseError(error.message) from None

    def close(self) -> None:
        """Close the sender of the relay."""
        self.relaying.close()

    def _end(self, *, once: bool) -> None:
        try:
            self.code = self.relaying.end_by_itself(once=once, patience=self.patience)
        except click.ClickException as error:
            say(f"Error: {labelled(self.label, self.name, error.message)}")
            self.code = error.exit_code
        except Exception as error:
            code = report_failure(error, partial(labelled, self.label, self.name))
            if code is None:
                raise
            self.code = code
