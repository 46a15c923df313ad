"""A stage for handling: messages, handlers that behave as they are told, and what came of it."""

import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast
from unittest.mock import patch

from tenacity import wait_fixed

from outbox import LeaseLostError, Message, RetryPolicy, Unavailable, Verdict
from outbox.model.lease import Lease, Partition
from outbox.model.verdict import DONE
from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake
from outbox.telemetry.events import HandedOver, Listeners, Teller
from outbox.worker.calls import Call, Caller, HeldLease
from outbox.worker.handle import BatchHandler, LeasedCaller
from outbox.worker.hung import HungCalls
from outbox.worker.outages import Outages
from outbox.worker.outcome import Outcome
from outbox.worker.policy import HandlerPolicy
from outbox.worker.waiting import Look, Wait

POLICY = HandlerPolicy(retry=RetryPolicy(attempts=3, wait=wait_fixed(0)), deadline=timedelta(seconds=60))
DESTINATION = "nats://h:4222"
#: In place of the one that events name, which nobody asks for.
NO_DATABASE: Any = None
LEASE = Lease(Partition("relay"), 1, "us")
#: Each message alone with the listener, so that a failure is its own.
ONE = replace(POLICY, portion=1)
EARLIER = Unavailable("an earlier message of its key was not stored")


T = TypeVar("T")


def teller_to(listeners: Listeners) -> Teller:
    """What tells of the subscription `relay`."""
    return Teller(listeners, {"database": NO_DATABASE, "subscription": "relay"})


def drive(steps: Generator[Wait, None, T], wake: Wake) -> T:
    """Run steps to their end, asleep during their waits; return what they return."""
    with closing(steps):
        while True:
            try:
                wait = next(steps)
            except StopIteration as end:
                return cast("T", end.value)
            sleep_through(wait, wake)


def sleep_through(wait: Wait, wake: Wake) -> None:
    """Sleep until a wait is over."""
    while not wait.over:
        wake.wait(min(max(0.0, wait.until - time.monotonic()), 3600.0))


def outages_told_to(listeners: Listeners) -> Outages:
    """The outages of a subscription; those who listen are told of them."""
    return Outages(teller_to(listeners), DESTINATION)


def messages(*keys: str | None, first: int = 1, topic: str = "orders") -> list[Message]:
    """Messages with these keys, numbered in the order of the log; the body is the number."""
    found = []
    for id, key in enumerate(keys, first):
        message = Message(topic, str(id), key=key)
        message.id = id
        found.append(message)
    return found


def again(message: Message, attempt: int) -> Message:
    """The same message as it is read from where it was parked."""
    copy = Message(message.topic, message.body, key=message.key)
    copy.id, copy.message_id, copy.attempt = message.id, message.message_id, attempt
    return copy


class Handler:
    """Answers what `answer` says of each message, and keeps what it was called with."""

    def __init__(self, answer: Callable[[Message], Verdict] = lambda _: DONE) -> None:
        self.answer = answer
        self.calls: list[list[int]] = []

    def __call__(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Behind the first of a key that is not done nothing of the key is."""
        self.calls.append(ids(messages))
        verdicts: list[Verdict] = []
        stopped: set[str | None] = set()
        for message in messages:
            verdict = EARLIER if message.key in stopped else self.answer(message)
            if verdict is not DONE and message.key is not None:
                stopped.add(message.key)
            verdicts.append(verdict)
        return verdicts


class Held(HeldLease):
    """A lease that lasts, unless a test says otherwise."""

    def __init__(self, lease: Lease = LEASE) -> None:
        super().__init__(lease, math.inf, Stop())
        #: Until when it lasts, at each look; the last one for ever.
        self.moments = [math.inf]
        #: After so many calls it is lost.
        self.calls = math.inf

    @property
    def until(self) -> float:
        """What the thread sees that makes a call."""
        return self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]

    def require(self, seconds: float) -> bool:
        """Good for any time, until it is lost."""
        self.calls -= 1
        if self.calls < 0:
            raise LeaseLostError("lost")
        return True


class StopAfter(Stop):
    """A stop that is asked after so many looks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    @property
    def asked(self) -> bool:
        """Count a look."""
        self.looks -= 1
        return self.looks <= 0


class Stage:
    """A batch handler, and the one who steps it; a stop is asked after so many looks."""

    def __init__(
        self,
        handler: Any,
        policy: HandlerPolicy = POLICY,
        *,
        most: int = 100,
        looks: int = 1_000_000,
        part_seconds: float = 60.0,
        held: Held | None = None,
        hung: HungCalls | None = None,
        others: bool = False,
        concurrency: int = 1,
    ) -> None:
        #: Those who are told what comes of the calls.
        self.listeners = Listeners()
        self.stop = StopAfter(looks)
        self.wake = Wake()
        self.caller = Caller(concurrency)
        self._others, held = others, held or Held()
        self.hung = HungCalls() if hung is None else hung
        if hung is None:
            self.hung.taken(held.lease)
        #: How often a batch waited for no call. Such a wait ends at once.
        self.pauses = 0
        calls = LeasedCaller(
            caller=self.caller,
            handler=handler,
            held=held,
            needs=1.0,
            deadline=policy.deadline.total_seconds(),
            wake=self.wake.set,
            teller=teller_to(self.listeners),
            portions=policy.portions(part_seconds),
        )
        self.batch_handler = BatchHandler(
            calls,
            policy,
            stop=self.stop,
            most=most,
            part_seconds=part_seconds,
            hung=self.hung,
            outages=outages_told_to(self.listeners),
        )

    def parts(
        self,
        messages: Sequence[Message],
        *,
        quota: int = 1000,
        parked: bool = False,
        now: datetime | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[Outcome]:
        """The parts of one batch; `meanwhile` is called in each of its waits."""
        handling = self.batch_handler.run(list(messages), quota=quota, parked=parked, now=now)
        with closing(handling):
            for each in handling:
                if isinstance(each, Look):
                    each.others = self._others
                elif isinstance(each, Wait):
                    meanwhile()
                    self.pauses += not each.calls
                    # Without its stop, whose looks are counted.
                    wait = replace(each, stop=None)
                    sleep_through(wait if each.calls else wait.at_most(0.001), self.wake)
                else:
                    yield each

    def run(self, messages: Sequence[Message], **options: Any) -> Outcome:
        """One batch, all its parts together."""
        return together(self.parts(messages, **options))

    def late(self) -> Outcome:
        """What came of the calls that have come back late, and of those that hang."""
        return together(self.batch_handler.late())


def together(parts: Iterable[Outcome]) -> Outcome:
    """All parts together."""
    whole = Outcome()
    for part in parts:
        whole = replace(part, done=whole.done + part.done, parked=whole.parked + part.parked)
    return whole


def ids(messages: Sequence[Message]) -> list[int]:
    """Their numbers."""
    return [message.id or 0 for message in messages]


def handed_over(stage: Stage, given: Sequence[Message], **options: Any) -> list[list[int]]:
    """Those of each call, while the stage handles the messages."""
    heard = list[list[int]]()

    @stage.listeners.listen
    def hears(event: Any) -> None:
        if isinstance(event, HandedOver):
            heard.append(ids(event.messages))

    stage.run(given, **options)
    return heard


def seen(outcome: Outcome) -> dict[str, Any]:
    """What came of a batch, by id."""
    return {
        "done": ids(outcome.done),
        "parked": [(message.id, parking.state, parking.attempts) for message, parking in outcome.parked],
        "open": ids(outcome.open),
    }


def only(*bad: int, verdict: Verdict) -> Callable[[Message], Verdict]:
    """This verdict for these, Done for the others."""
    return lambda message: verdict if message.id in bad else DONE


def raising(*bad: int) -> Callable[[Message], Verdict]:
    """Raises for these, Done for the others."""

    def answer(message: Message) -> Verdict:
        if message.id in bad:
            raise ValueError("cannot take this")
        return DONE

    return answer


@contextmanager
def hanging(
    handler: Handler,
    *bad: int,
    overdue: Callable[[], bool] = lambda: True,
    hopeless: Callable[[], bool] = lambda: True,
) -> Iterator[threading.Event]:
    """Calls with these messages hang until released. No other call is ever past its deadline.

    `overdue`, `hopeless`: whether a deadline, or three, have passed by now for a call that hangs.
    """
    released, hang = threading.Event(), set[int | None]()
    former = handler.answer

    def answer(message: Message) -> Verdict:
        if message.id in bad:
            hang.add(message.id)
            released.wait(60)
            hang.discard(message.id)
        return former(message)

    def due(call: Call) -> float:
        # A call that does not hang is looked at every few milliseconds.
        return -math.inf if overdue() and late(call) else time.monotonic() + 0.01

    def late(call: Call) -> bool:
        return not call.finished and any(message.id in hang for message in call.messages)

    handler.answer = answer
    try:
        with (
            patch.object(Call, "due", property(due)),
            patch.object(Call, "hangs", property(lambda call: hopeless() and late(call))),
        ):
            yield released
    finally:
        released.set()
