"""Decisions of people on the messages of one partition, carried out under its lease."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from outbox.model.message import Message
from outbox.model.position import Progress
from outbox.worker.decisions import CarriedOut, OpenDecisions, log_carried_out
from outbox.worker.holds import Holds
from outbox.worker.known import KnownOutcomes
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settle import Parkings, Settlement


class Deciding:
    """Carries decisions out: on parked messages at any moment, and on messages of the log when they are read."""

    def __init__(
        self,
        decisions: OpenDecisions,
        settlement: Settlement,
        holds: Holds,
        known: KnownOutcomes,
        policy: HandlerPolicy,
    ) -> None:
        """`settlement`: of the lease, which carries out decisions on what it parks."""
        self._decisions = decisions
        self._settlement = settlement
        self._holds = holds
        self._known = known
        self._policy = policy

    def carry_out(
        self, progress: Progress | None, under_way: Container[int | None] = (), *, last: bool = False
    ) -> bool:
        """Carry out decisions on parked messages; return whether there may be more to do.

        `progress`: as it is stored. `under_way`: messages that are being handled, which are left for later. `last`:
        perhaps there is no later look, so holders of other partitions are waited for.
        """
        open = self._decisions.open()
        if not open:
            return False
        with self._settlement.held():
            # A writer must not hold up the partition for as long as its transaction takes.
            carried_out = self._decisions.carry_out(open, progress, waits=False, last=last, under_way=under_way)
            # Before the commit, because the answer to the commit may be lost as well.
            self._known.forget({id for each in carried_out for id in each.messages})
        self._note(carried_out)
        # A later decision may have replaced an open decision meanwhile.
        return bool(carried_out) or not {*self._decisions.open()} <= {*open}

    def some_on(self, messages: Iterable[Message]) -> bool:
        """Return whether a person has decided on one of these messages of the log."""
        return self._decisions.some_unread and any(self._decisions.on(message) is not None for message in messages)

    def sort_out(self, messages: list[Message], held: Container[str | None]) -> tuple[list[Message], Parkings]:
        """Separate the messages to handle from messages that a person has decided on, and from what is behind these.

        `held`: keys that are held back; their messages are parked in any case.
        """
        return self._decisions.separate(messages, held, self._policy)

    def without_discarded(self, parkings: Parkings) -> Parkings:
        """Take note of decisions on messages that were parked now; return the parkings without the discarded ones."""
        carried_out = self._decisions.met()
        if carried_out:
            self._note(carried_out)
        gone = {id for each in carried_out if each.decision.verb == "discard" for id in each.messages}
        return [each for each in parkings if each[0].id not in gone] if gone else parkings

    def _note(self, carried_out: Sequence[CarriedOut]) -> None:
        log_carried_out(carried_out)
        self._holds.reconsider(key for each in carried_out for key in each.messages.values())
