"""Calls the handler with messages, and decides for each: done, parked, or open because the cause is not known yet."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.retry import seconds_to_wait
from outbox.model.verdict import DONE, Done, Reject, Retry, Unavailable, Verdict, describe
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.stop import Stop
from outbox.runtime.text import counted
from outbox.telemetry.events import HandedOver, Teller
from outbox.worker.batch_size import BatchSize
from outbox.worker.blame import Blame
from outbox.worker.calls import Call, Caller, Handler, HeldLease, StrangeAnswerError, verdicts_of
from outbox.worker.hung import HungCall, HungCalls
from outbox.worker.known import identity_of
from outbox.worker.outages import Outages
from outbox.worker.outcome import Outcome, Pending
from outbox.worker.policy import HandlerPolicy, Portions
from outbox.worker.portions import PortionedCall
from outbox.worker.waiting import Wait

logger = logging.getLogger("outbox")

#: How often to look whether a lease was renewed that does not last long enough for a call.
_RENEWED_SECONDS = 0.02


@dataclass(slots=True)
class Look:
    """Asks the stepping partition to set `others`: whether other messages could be tried.

    They could show whether the destination is away, or a message crashes its handler.
    """

    others: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedCaller:
    """Makes calls under one lease.

    `needs`: for so many seconds the lease has to last when a call begins. `deadline`: of a call, in seconds. `wake`:
    wakes the thread that steps the partition. `teller`: tells of the answers; `destination`: as events name it.
    `portions`: in which a call hands its messages over; None: all at once.
    """

    caller: Caller
    handler: Handler
    held: HeldLease
    needs: float
    deadline: float
    wake: Callable[[], None]
    teller: Teller
    destination: str | None = None
    portions: Portions | None = None

    def may_begin(self) -> bool:
        """Return whether the lease lasts long enough for a call; False while a renewal may come in time.

        Raises:
            LeaseLostError: no renewal came in time.
        """
        return self.held.require(self.needs)

    def begin(self, messages: Sequence[Message], *, until: float = math.inf) -> Call:
        """Have the handler called with messages when the turn comes, before the moment `until`."""
        options: dict[str, Any] = {"needs": self.needs, "until": until, "deadline": self.deadline, "wake": self.wake}
        if self.portions is None:
            call = Call(messages, self.held, **options)
        else:
            call = PortionedCall(messages, self.held, portions=self.portions, tell=self._tell, **options)
        self.caller.begin(call, self._call if self.portions is None else self.handler)
        return call

    def _call(self, messages: Sequence[Message]) -> list[Verdict]:
        verdicts: list[Verdict] | None = None
        error: str | None = None
        began = time.monotonic()
        try:
            crash_point("relay.before_send")
            verdicts = verdicts_of(self.handler, messages)
            crash_point("relay.after_send")
            return verdicts
        except BaseException as failed:
            error = describe(failed)
            raise
        finally:
            seconds = time.monotonic() - began
            self._tell(messages, verdicts, seconds, error)

    def _tell(
        self, messages: Sequence[Message], verdicts: Sequence[Verdict] | None, seconds: float, error: str | None = None
    ) -> None:
        answer = {"messages": messages, "verdicts": verdicts, "error": error, "seconds": seconds}
        self.teller.tell(HandedOver, destination=self.destination, **answer)


class BatchHandler:
    """Handles the batches of one lease, in turn."""

    def __init__(
        self,
        calls: LeasedCaller,
        policy: HandlerPolicy,
        *,
        stop: Stop,
        most: int,
        outages: Outages,
        part_seconds: float,
        hung: HungCalls,
    ) -> None:
        """`stop`: leaves the rest of a batch open. `most`: of messages in a call. `part_seconds`: a batch that takes
        longer comes in parts. `hung`, `outages`: calls that did not come back, and topics that are not accepted, over
        all leases.
        """
        self._calls = calls
        self.policy = policy
        self._stop = stop
        self._part_seconds = part_seconds
        self.hung = hung
        self._outages = outages
        self._size = BatchSize(least=policy.least, most=most, deadline=policy.deadline.total_seconds())
        self._blame = Blame()
        #: The calls that have not come back, and are not past their deadline.
        self._under_way: list[Call] = []

    @property
    def gave_up(self) -> bool:
        """True when so many calls of the handler hang that only a new process helps."""
        return sum(call.hangs for call in self._calls.caller.overdue) >= self.policy.max_hung

    def keep(self, done: Sequence[Message], parkings: Sequence[tuple[Message, Parking]], *, parked: bool) -> None:
        """Remember outcomes that could not be settled, for the next lease.

        `parked`: the messages were read from where they are parked.
        """
        self.hung.note(self._calls.held.lease, done, parkings, parked=parked)

    def run(
        self, messages: list[Message], *, quota: int, parked: bool = False, now: datetime | None = None
    ) -> Generator[Wait | Look | Outcome, None, None]:
        """Call the handler until every message has an outcome, or a stop is asked; yield the outcomes.

        A batch that takes long comes in parts, so that each part can be settled before the next. A `Wait` is yielded
        while there is nothing to do, and a `Look` before messages are parked because no other could be tried. While the
        destination accepts nothing of the log, the batch waits, with growing pauses; `parked` messages stay open, and
        their topics count as refused.

        `quota`: how many messages may be parked as waiting. `parked`: the messages were read from where they are
        parked. `now`: by the database's clock; messages expire meanwhile. None: they do not.
        """
        batch = Pending(messages, quota, parked=parked, now=now)
        try:
            yield from self._work_through(batch)
            batch.leave_all()
            yield self._part(batch)
        except BaseException:
            self._leave_calls(batch)
            self.keep(batch.outcome.done, batch.outcome.parked, parked=parked)
            raise

    def _part(self, batch: Pending, *, pauses: bool = False) -> Outcome:
        """Return the outcomes since the previous part; `pauses`: none of the remaining messages is accepted now."""
        self._tell_what_waits(batch)
        part = batch.next_part(away=pauses or batch.findings.away is not None)
        if self._outages:
            self._outages.accepted(part.accepted_topics)
        self._blame.forget(part.done)
        self._blame.forget(message for message, parking in part.parked if parking.state != "retry")
        return part

    def _work_through(self, batch: Pending) -> Generator[Wait | Look | Outcome, None, None]:
        while batch.messages and (self._under_way or not self._ends(batch)):
            self._look_after_hung(batch)
            if not self._under_way and (not batch.messages or self.gave_up):
                break
            call, tried = (yield from self._next_call(batch)), list[Message]()
            if call is None:
                if self._stop.asked:
                    break
                # Every remaining message hangs, or was tried since the destination accepted something: start over.
                tried = [message for message in batch.messages if message.id in batch.findings.tried]
                batch.findings.tried.clear()
            elif call.late or self._judge(batch, call):
                self._let_expire(batch)
                if batch.has_part(after=self._part_seconds):
                    yield self._part(batch)
                continue
            elif self._under_way:
                continue
            chunk = [] if call is None else list(call.messages)
            if not batch.parked:
                yield from self._wait_for_destination(batch, others_help=not chunk)
            elif self._leaves_all(batch, chunk, tried):
                break

    def _wait_for_destination(
        self, batch: Pending, *, others_help: bool
    ) -> Generator[Wait | Look | Outcome, None, None]:
        """Pause, after the outcomes so far. `others_help`: only other messages could be tried afterwards."""
        self._tell(batch, batch.findings.errors_by_topic(batch.messages), pauses=True)
        if batch.has_part():
            yield self._part(batch, pauses=True)
        self._blame.pauses += 1
        yield Wait(time.monotonic() + seconds_to_wait(self.policy.pause, self._blame.pauses), stop=self._stop)
        if not self._stop.asked:
            self._let_expire(batch)
            if others_help and not self.hung:
                yield from self._let_pass(batch)

    @staticmethod
    def _leaves_all(batch: Pending, chunk: list[Message], tried: list[Message]) -> bool:
        """Leave the topics that are not accepted; return whether no other message is worth a try."""
        if batch.findings.away is not None and len(chunk) == 1:
            # The destination accepts nothing at all: to try another message now would show nothing new.
            batch.leave_topics(list(batch.messages))
            return True
        if not chunk:
            batch.leave_topics(tried)
            return True
        if len(chunk) == 1 and batch.findings.is_refused(chunk[0].topic, batch.messages):
            batch.leave_topics(chunk)
        return False

    def _let_expire(self, batch: Pending) -> None:
        """Park expired messages as dead, unless they may have arrived."""
        if timed := batch.timed():
            under_way = {message.id for call in self._under_way for message in call.messages}
            unanswered = self.hung.unanswered(timed, parked=batch.parked) | under_way
            batch.expire(message for message in timed if message.id not in unanswered)

    def _let_pass(self, batch: Pending) -> Generator[Look, None, None]:
        """Park the head of each key as `waiting`, if there are other messages to try and the quota allows it.

        Every remaining message has failed in a call of its own. Later messages can show whether the destination accepts
        any.
        """
        look = Look()
        yield look
        heads = batch.heads()
        if look.others and len(heads) <= batch.quota:
            batch.quota -= len(heads)
            error_of = batch.findings.error_of
            batch.resolve([], [(message, self.policy.waiting(message, error_of(message))) for message in heads])

    def _tell_what_waits(self, batch: Pending) -> None:
        if batch.outcome.parked or batch.outcome.refused:
            waiting = {
                m.topic: parking.error or "" for m, parking in batch.outcome.parked if parking.state == "waiting"
            }
            refused = batch.findings.errors_by_topic(m for m in batch.outcome.open if m.topic in batch.outcome.refused)
            self._tell(batch, refused | waiting)

    def _tell(self, batch: Pending, errors: dict[str, str], *, pauses: bool = False) -> None:
        by_all = (batch.findings.away or batch.findings.error_of_all(errors.values())) if errors else None
        self._outages.refused(errors, by_all=by_all, pauses=pauses)

    def _ends(self, batch: Pending) -> bool:
        """Return whether the rest of a batch stays open."""
        return self._stop.asked or (self.policy.suspend and batch.suspended)

    def _next_call(self, batch: Pending) -> Generator[Wait, None, Call | None]:
        """Begin calls, and return the first that is over; None: no call is under way, and none could begin."""
        yield from self._begin_calls(batch)
        return (yield from self._next_over()) if self._under_way else None

    def _begin_calls(self, batch: Pending) -> Generator[Wait, None, None]:
        """Begin as many calls as may be under way at once, for messages of different keys; none after a stop."""
        while (chunk := self._choose(batch)) and not (self._under_way and self._stop.asked):
            while not self._calls.may_begin():
                if self._stop.asked or self._under_way:
                    return
                yield Wait(time.monotonic() + _RENEWED_SECONDS, stop=self._stop)
            self.hung.known.hand_over(chunk, ordered=self.policy.ordered)
            self._under_way.append(self._calls.begin(chunk, until=clock() + batch.seconds_to_expiry(chunk)))

    def _next_over(self) -> Generator[Wait, None, Call]:
        """Wait for a call to come back, to pass its deadline or to be withdrawn after a stop; return the call.

        Past the deadline, the handler may be called again beside the call, whose messages are held.
        """
        caller = self._calls.caller
        while True:
            # First, because a call past its deadline loses its turn by that.
            until = min([caller.look(call) for call in self._under_way])
            for call in self._under_way:
                if call.started is None and self._stop.asked:
                    caller.withdraw(call)
                if call.finished or (call.over and call.leave_behind()):
                    if call.left:
                        self.hung.add(call, self._calls.held.lease, blamed=self._calls.portions is not None)
                    self._under_way.remove(call)
                    return call
            waits = any(call.started is None for call in self._under_way)
            yield Wait(until, tuple(self._under_way), self._stop if waits else None)

    def _leave_calls(self, batch: Pending) -> None:
        """Hold the messages of the calls under way until the calls come back.

        Once a call has begun, its verdicts count, whether it has come back by now or not.
        """
        for call in self._under_way:
            if self._calls.caller.withdraw(call):
                continue
            if isinstance(call, PortionedCall) and call.leave_behind(overdue=False):
                self._apply(batch, *call.answered)
            self.hung.add(call, self._calls.held.lease)
        self._under_way = []

    def _choose(self, batch: Pending) -> list[Message]:
        """Return the messages of the next call: none that hangs or was tried already, nor a later message of such a
        key.

        A message that has failed alone is called alone again, because only then can a failure be blamed on the message.
        All other messages go first, then the suspect that was tried longest ago. So every message is tried some time,
        although the message in front is never accepted.
        """
        if len(self._under_way) >= self._most_calls or len(self._calls.caller.overdue) >= self.policy.max_hung:
            return []
        size = self._next_size(batch)
        calls = self._most_calls - len(self._under_way) if self.policy.ordered else 1
        if calls == 1 and not (batch.findings.tried or self.hung or self._blame.some_suspects or self._under_way):
            return batch.messages[:size]
        suspects: list[Message] = []
        chunk = list(islice(self._free(batch, suspects), calls * size))
        if calls > 1:
            chunk = _share_of_keys(chunk, calls)[:size]
        return chunk or self._blame.next_suspect(suspects)

    def _free(self, batch: Pending, suspects: list[Message]) -> Iterator[Message]:
        """Yield the messages that a call may have; add to `suspects` those that it may have alone."""
        taken = self.hung.ids.union(message.id for call in self._under_way for message in call.messages)
        held = set(self.hung.keys if self.policy.ordered else ())
        for message in batch.messages:
            if message.id in taken or message.id in batch.findings.tried or message.key in held:
                held |= self._ordered_key(message)
            elif self._blame.is_suspect(message):
                suspects.append(message)
                held |= self._ordered_key(message)
            else:
                yield message

    def _next_size(self, batch: Pending) -> int:
        """Return how many messages the next call may have.

        Calls in portions end by themselves in time. Of several side by side, each has a share, so that all end at about
        the same time.
        """
        if self._calls.portions is None:
            return self._size.next
        return max(1, len(batch.messages) // (2 * self._most_calls) if self._most_calls > 1 else len(batch.messages))

    @property
    def _most_calls(self) -> int:
        """How many calls for the partition may be under way at once."""
        return 1 if self._calls.portions is None or self._calls.portions.suspend else self._calls.caller.concurrency

    def _ordered_key(self, message: Message) -> set[str | None]:
        return {message.key} if self.policy.ordered and message.key is not None else set()

    def _judge(self, batch: Pending, call: Call) -> bool:
        """Decide about the messages of a call; return False when none got an outcome."""
        if isinstance(call, PortionedCall):
            return self._judge_portions(batch, call)
        if not call.finished:
            logger.warning("a call with %s did not come back in time", counted(len(call.messages), "message"))
            self._size.hung()
            return self._nobody_knows(batch, call.messages, self._no_answer)
        if call.verdicts is None:
            if isinstance(call.error, StrangeAnswerError):
                # The handler is wrong, not a message: log it now, because smaller and smaller calls would not show it.
                self._tell(batch, {message.topic: describe(call.error) for message in call.messages})
            return self._nobody_knows(batch, call.messages, describe(call.error))
        self._size.came_back(len(call.messages), call.seconds)
        return self._apply(batch, call.messages, call.verdicts)

    def _judge_portions(self, batch: Pending, call: PortionedCall) -> bool:
        """Decide about the answered messages, and about those of a portion that did not come back: the listener failed.

        Its messages are tried again when the call has come back.
        """
        decided = self._apply(batch, *call.answered)
        if not call.left:
            return decided
        logger.warning("a call with %s did not come back in time", counted(len(call.messages), "message"))
        batch.resolve([], [(message, self.policy.failed(message, self._no_answer)) for message in call.messages])
        return True

    @property
    def _no_answer(self) -> str:
        return f"no answer within {self.policy.deadline.total_seconds()} s"

    def _nobody_knows(self, batch: Pending, messages: Sequence[Message], error: str) -> bool:
        """Decide about a failure without verdicts; return whether a message got an outcome."""
        self._size.one()
        if len(messages) > 1:
            return False
        message = messages[0]
        if self._blame.failed_alone(message):
            batch.resolve([], [(message, self.policy.failed(message, error))])
            return True
        batch.findings.failed(message, error)
        return False

    def _apply(self, batch: Pending, messages: Sequence[Message], verdicts: Sequence[Verdict]) -> bool:
        """Give messages the outcomes that the verdicts demand; return False when none got an outcome.

        After the first verdict of a key other than `Done`, later verdicts of the key count only if they are `Done`.
        """
        if verdicts and verdicts.count(DONE) == len(messages):
            self._accepted(batch, len(messages))
            batch.resolve(messages, [])
            return True
        done = [message for message, verdict in zip(messages, verdicts, strict=True) if isinstance(verdict, Done)]
        if done:
            self._accepted(batch, len(done))
        parked: list[tuple[Message, Parking]] = []
        failed_keys: set[str | None] = set()
        for message, verdict in zip(messages, verdicts, strict=True):
            if isinstance(verdict, Done) or message.key in failed_keys:
                continue
            failed_keys |= self._ordered_key(message)
            alone = len(messages) == 1 or self._calls.portions is not None
            parking = self._parking(batch, message, verdict, alone=alone)
            if parking is not None:
                parked.append((message, parking))
        batch.resolve(done, parked)
        return bool(done or parked)

    def _parking(self, batch: Pending, message: Message, verdict: Verdict, *, alone: bool) -> Parking | None:
        match verdict:
            case Retry(error, after, counts):
                return self.policy.failed(message, error, after, counts=counts)
            case Unavailable(error) if self.policy.suspend:
                return self.policy.failed(message, error, counts=False)
            case Reject(error):
                return self.policy.dead(message, error)
            case Unavailable(error, everything):
                batch.findings.away = error if everything else None
                accepts = batch.findings.some_accepted or self._blame.accepted_since_failure(message)
                if accepts and batch.quota > 0:
                    batch.quota -= 1
                    return self.policy.waiting(message, error)
                self._size.one()
                batch.findings.errors[message.id] = error
                if alone:
                    self._blame.refused_alone(message)
                    batch.findings.refused_alone(message)
        return None

    def _look_after_hung(self, batch: Pending) -> None:
        if self._use_late_answers(batch):
            self._let_expire(batch)
        if not batch.parked:
            self._leave_hopeless(batch)

    def _use_late_answers(self, batch: Pending) -> bool:
        """Use the verdicts of hung calls that have come back; return whether there were any.

        For a message alone in a call that still hangs, an attempt is counted when other messages were accepted since;
        for a portion that an earlier lease began, at the deadline.
        """
        known = self.hung.known
        if known:
            in_turn = batch.in_turn(known.among(batch.messages, parked=batch.parked), ordered=self.policy.ordered)
            done, parkings = known.take(in_turn, parked=batch.parked)
            batch.findings.some_accepted |= bool(done)
            batch.resolve(done, parkings)
        finished = self.hung.take_finished()
        for hung in finished:
            self._use_answers(batch, hung)
        for hung in self.hung.unfinished:
            # Found by id, because a message that was parked meanwhile was read again. One call counts only once.
            message = None if hung.alone is None else batch.by_id().get(hung.alone.id)
            if message is None:
                continue
            if self._calls.portions is not None and hung.call.over:
                hung.blamed = True
                batch.resolve([], [(message, self.policy.failed(message, self._no_answer))])
            elif self._blame.accepted_since_failure(message):
                hung.blamed = True
                batch.resolve([], [(message, self.policy.failed(message, "hangs, while others are accepted"))])
        return bool(finished)

    def _use_answers(self, batch: Pending, hung: HungCall) -> None:
        """Use the verdicts of a late call, except for messages behind a message that has to be sent again."""
        answers = hung.call.answers
        verdicts = {identity_of(message): verdict for message, verdict in answers}
        used = batch.in_turn(verdicts, ordered=self.policy.ordered)
        now = set(map(identity_of, used))
        self.hung.known.note(m for m, v in answers if isinstance(v, Done) and identity_of(m) not in now)
        if used:
            self._apply(batch, used, [verdicts[identity_of(message)] for message in used])

    def _leave_hopeless(self, batch: Pending) -> None:
        """Park messages that hang for too long, and the rest of their keys, so that the position can pass.

        The messages stay held until the call ends. For a portion the deadline is too long.
        """
        portions = self._calls.portions is not None
        for call in [each.call for each in self.hung.unfinished if (each.call.over if portions else each.call.hangs)]:
            ids = {message.id for message in call.messages}
            keys = {message.key for message in call.messages if message.key is not None}
            stuck = [message for message in batch.messages if message.id in ids or message.key in keys][: batch.quota]
            if stuck:
                batch.quota -= len(stuck)
                why = "its call has not come back; it is held until the call does, or the process is started again"
                logger.warning("a call with %s hangs for %d s: %s", counted(len(ids), "message"), call.seconds, why)
                batch.resolve([], [(message, self.policy.waiting(message, why)) for message in stuck])

    def _accepted(self, batch: Pending, count: int) -> None:
        self._blame.accepted(count)
        self._size.accepted(count)
        batch.findings.accepted()


def _share_of_keys(messages: list[Message], calls: int) -> list[Message]:
    """Return the messages of a share of the keys: a call holds its keys, and the other `calls` need some as well."""
    keys = dict.fromkeys(message.key for message in messages if message.key is not None)
    own = set(islice(keys, math.ceil(len(keys) / calls)))
    return [message for message in messages if message.key is None or message.key in own]
