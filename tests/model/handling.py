"""The library's own handler of batches, stepped by hand: its calls come back when the model says so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from datetime import datetime
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch
from uuid import UUID

from outbox.model.parking import Parking
from outbox.model.verdict import DONE, Unavailable, Verdict
from outbox.runtime.stop import Stop
from outbox.telemetry.events import Listeners
from outbox.worker.blame import Blame
from outbox.worker.calls import Call
from outbox.worker.handle import BatchHandler
from outbox.worker.hung import HungCalls
from outbox.worker.outcome import Outcome
from outbox.worker.policy import HandlerPolicy
from outbox.worker.waiting import Look, Wait
from tests.support.stage import outages_told_to

_NEVER = Stop()
_BEHIND = Unavailable("an earlier message of its key was not stored")


class Item(NamedTuple):
    """A message, as far as a handler looks at it."""

    id: int
    key: str | None
    attempt: int = 1
    topic: str = "orders"
    deliver_at: datetime | None = None
    expires_at: datetime | None = None

    @property
    def message_id(self) -> UUID:
        """Its id."""
        return UUID(int=self.id)


class Handled(NamedTuple):
    """What came of a batch: what is done, and how the rest is parked. What is in neither is open.

    `refused`: topics that are not accepted, with the errors.
    """

    done: list[int]
    parked: list[tuple[Item, Parking]]
    refused: dict[str, str | None]


class Handler:
    """Handles batches, one after the other."""

    def __init__(self, policy: HandlerPolicy, blame: Blame | None = None) -> None:
        """`blame`: remembers which messages failed alone; None: the library's own."""
        calls: Any = _Calls()
        with nullcontext() if blame is None else patch("outbox.worker.handle.Blame", return_value=blame):
            self._handler = BatchHandler(
                calls,
                policy,
                stop=_NEVER,
                most=100,
                outages=outages_told_to(Listeners()),
                part_seconds=math.inf,
                hung=HungCalls(),
            )

    def steps(
        self, items: Sequence[Item], *, parked: bool, others: Callable[[], bool]
    ) -> Generator[Call, None, Handled]:
        """Handle a batch of the log, or of what is `parked`; yield each call under way, which then has to be finished.

        `others`: whether there are other messages that could be tried.
        """
        messages: list[Any] = list(items)
        handled = Handled([], [], {})
        quota = 0 if parked else 100
        for step in self._handler.run(messages, quota=quota, parked=parked):
            if isinstance(step, Look):
                step.others = others()
            elif isinstance(step, Outcome):
                done: list[Any] = step.done
                handled.done.extend(item.id for item in done)
                handled.parked.extend(step.parked)  # type: ignore[arg-type]
                handled.refused.update(step.refused)
            elif isinstance(step, Wait) and step.calls:
                yield step.calls[0]
        return handled


def judged(policy: HandlerPolicy, items: Sequence[Item], verdicts: Sequence[Verdict], *, parked: bool) -> Handled:
    """Return what comes of a batch for whose messages a handler gives these verdicts, however often it is asked.

    Behind a message that it refuses it takes no other one of the same key in the same call.
    """
    said = {item.id: verdict for item, verdict in zip(items, verdicts, strict=True)}
    steps = Handler(policy).steps(items, parked=parked, others=lambda: False)
    while True:
        try:
            call = next(steps)
        except StopIteration as end:
            handled: Handled = end.value
            return handled
        refused: set[str | None] = set()
        answers: list[Verdict] = []
        for message in call.messages:
            answers.append(_BEHIND if message.key in refused else said[message.id or 0])
            if answers[-1] is not DONE and message.key is not None:
                refused.add(message.key)
        call.verdicts, call.finished = answers, True


class _Calls:
    """The calls of a lease that is good for ever: each is under way until somebody finishes it."""

    held = SimpleNamespace(lease=None)
    concurrency = 1
    overdue: tuple[Call, ...] = ()

    @property
    def caller(self) -> _Calls:
        return self

    def may_begin(self) -> bool:
        return True

    def begin(self, messages: Sequence[Any], *, until: float, patience: float) -> Call:
        call = Call(messages)
        call.started = time.monotonic()
        return call

    def look(self, call: Call) -> float:
        return math.inf

    def withdraw(self, call: Call) -> bool:
        return False
