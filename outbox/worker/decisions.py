"""Decisions of people on parked messages, carried out by a lease holder."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outbox.model.decision import Decision
from outbox.runtime.named import named
from outbox.runtime.text import one_line
from outbox.store.subscriptions.decisions import Decisions
from outbox.store.subscriptions.parked import Parked

logger = logging.getLogger("outbox")

#: On so many messages decisions are carried out in one transaction.
MOST = 1_000


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """A decision, and the messages on which it was carried out: log ids with their keys."""

    decision: Decision
    messages: Mapping[int, str | None]


def carry_out(open: Sequence[int], decisions: Decisions, parked: Parked, *, waits: bool = True) -> list[CarriedOut]:
    """Carry out open decisions on at most `MOST` parked messages, inside a transaction with the lease held.

    Decisions without any message left are stamped. Messages not parked any more do not count. `parked`: of the
    partition whose lease the caller holds. `waits`: as in `Parked.discard`.
    """
    found, room = list[CarriedOut](), MOST
    for decision in filter(None, map(decisions.take, open)):
        there = parked.still(decision.left)
        mine = [id for id in decision.left if id in there and there[id][1]][:room]
        kept = _carry_out(decision.verb, mine, parked, waits=waits)
        done = {id: there[id][0] for id in mine if id not in kept}
        left = [id for id in decision.left if id in there and id not in done]
        if left != decision.left:
            decisions.store(decision, left, carried_out=len(done))
        if done:
            found.append(CarriedOut(decision, done))
        room -= len(mine)
        if room <= 0:
            break
    parked.advance({key for each in found for key in each.messages.values() if key is not None})
    return found


def _carry_out(verb: str, ids: Sequence[int], parked: Parked, *, waits: bool) -> Collection[int]:
    """Carry out a decision on messages; return the ids of messages left for later."""
    if verb == "discard":
        return parked.discard(ids, waits=waits)
    parked.replay(ids)
    return ()


def log_carried_out(carried_out: Iterable[CarriedOut]) -> None:
    """Log decisions, a line for each message; called after the commit."""
    for each in carried_out:
        decision = each.decision
        why = "" if decision.reason is None else f" ({one_line(decision.reason)})"
        for id in each.messages:
            about = named(decision.verb, subscription=decision.subscription or "", id=id)
            logger.info("parked message %d: %s by %s%s", id, decision.verb, one_line(decision.by), why, extra=about)
