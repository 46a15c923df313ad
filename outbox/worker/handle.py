"""Calls the handler with messages, and decides for each: done, parked, or open because the cause is not known yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass

from outbox.model.message import Message
from outbox.model.parking import Held, Parking
from outbox.model.retry import seconds_to_wait
from outbox.model.verdict import DONE, Done, Reject, Retry, Unavailable, Verdict, describe
from outbox.runtime.stop import Stop
from outbox.worker.batch_size import BatchSize
from outbox.worker.blame import Blame
from outbox.worker.calls import Call, LeasedCaller, StrangeAnswerError
from outbox.worker.hung import HungCall, HungCalls
from outbox.worker.known import identity_of
from outbox.worker.outages import Outages
from outbox.worker.outcome import Clock, Outcome, Pending
from outbox.worker.policy import HandlerPolicy
from outbox.worker.waiting import Wait

logger = logging.getLogger("outbox")

#: How often to look whether a lease was renewed that does not last long enough for a call.
_RENEWED_SECONDS = 0.02


@dataclass(slots=True)
class Look:
    """Asks the one who steps a batch to set `others`: whether there are messages elsewhere that could be tried.

    They could show whether the destination is sick, or a message crashes its handler.
    """

    others: bool = False


Steps = Generator[Wait | Look | Outcome, None, None]


class BatchHandler:
    """Handles batches under one lease, one after the other."""

    def __init__(
        self,
        calls: LeasedCaller,
        policy: HandlerPolicy,
        *,
        stop: Stop,
        most: int,
        outages: Outages,
        part_seconds: float = 1.0,
        hung: HungCalls | None = None,
    ) -> None:
        """`stop`: leaves the rest of a batch open. `most`: a call has at most so many messages. `part_seconds`: a batch
        that takes longer comes in parts. `hung`: the calls that did not come back, also those of earlier leases.
        """
        self._calls = calls
        self.policy = policy
        self._stop = stop
        self._part_seconds = part_seconds
        self._hung = HungCalls() if hung is None else hung
        #: What the destination does not accept, over all leases of the subscription.
        self.outages = outages
        self._size = BatchSize(least=policy.least, most=most, deadline=policy.deadline.total_seconds())
        self._blame = Blame()

    @property
    def gave_up(self) -> bool:
        """True when so many calls of the handler hang that only a new process helps."""
        return sum(call.hangs for call in self._calls.overdue) >= self.policy.max_hung

    def held(self) -> Held:
        """Return which parked messages are not to be tried, because they are in calls that did not come back."""
        return self._hung.held()

    def unanswered(self, messages: Iterable[Message], *, parked: bool) -> set[int | None]:
        """Return the log ids of messages that may have arrived: their calls hang, or have outcomes not settled yet.

        `parked`: these messages were read from where they are parked.
        """
        return self._hung.unanswered(messages, parked=parked)

    def read_from(self, incarnation: str) -> None:
        """Note the incarnation of the server that the messages are read from."""
        self._hung.read_from(incarnation)

    def keep(self, done: Sequence[Message], parkings: Sequence[tuple[Message, Parking]], *, parked: bool) -> None:
        """Remember outcomes that could not be settled, for the next lease.

        `parked`: the messages were read from where they are parked.
        """
        self._hung.note(self._calls.lease, done, parkings, parked=parked)

    def forget(self, ids: Collection[int]) -> None:
        """Forget the outcomes of the messages with these log ids, because a person has decided about them."""
        self._hung.known.forget(ids)

    def run(
        self,
        messages: list[Message],
        *,
        wait_for_destination: bool,
        quota: int,
        parked: bool = False,
        clock: Clock | None = None,
    ) -> Steps:
        """Call the handler until every message has an outcome, or a stop is asked; yield the outcomes.

        They come in parts when the batch takes long, so that each part can be settled before the next. A `Wait` is
        yielded while there is nothing to do, and a `Look` before messages are parked that nothing else could be tried
        beside.

        `wait_for_destination`: wait for an unavailable destination, with growing pauses; otherwise the topic counts as
        sick and its messages stay open. `quota`: how many messages may be parked as waiting. `parked`: the messages
        were read from where they are parked. `clock`: by which messages expire meanwhile.
        """
        batch = Pending(messages, quota, parked=parked, clock=clock)
        try:
            yield from self._work_through(batch, wait_for_destination=wait_for_destination)
            batch.leave_all()
            yield self._part(batch)
        except BaseException:
            self.keep(batch.outcome.done, batch.outcome.parked, parked=parked)
            raise

    def _part(self, batch: Pending, *, pauses: bool = False) -> Outcome:
        """Return the outcomes since the part before; `pauses`: none of the messages that are left is accepted now."""
        self._tell_what_waits(batch)
        part = batch.next_part(away=pauses or batch.findings.away is not None)
        self._blame.forget(part.done)
        self._blame.forget(message for message, parking in part.parked if parking.state != "retry")
        return part

    def _work_through(self, batch: Pending, *, wait_for_destination: bool) -> Steps:
        """Give messages their outcomes."""
        while batch.messages and not self._stop.asked:
            self._look_after_hung(batch, wait_for_destination=wait_for_destination)
            if not batch.messages or self.gave_up:
                break
            chunk, tried = self._choose(batch), list[Message]()
            if not chunk:
                # Every remaining message hangs, or was tried since the destination accepted something: start over.
                tried = [message for message in batch.messages if message.id in batch.findings.tried]
                batch.findings.tried.clear()
            elif (call := (yield from self._call(chunk))) is None:
                break
            elif self._judge(batch, call):
                self._let_expire(batch)
                if batch.has_part(after=self._part_seconds):
                    yield self._part(batch)
                continue
            if wait_for_destination:
                yield from self._wait_for_destination(batch, others_help=not chunk)
            elif self._leaves_all(batch, chunk, tried):
                break

    def _wait_for_destination(self, batch: Pending, *, others_help: bool) -> Steps:
        """Pause, after the outcomes so far. `others_help`: after it, only other messages could be tried."""
        self._tell(batch, batch.findings.errors_by_topic(batch.messages), pauses=True)
        batch.outcome.paused = True
        if batch.has_part():
            yield self._part(batch, pauses=True)
        yield self._pause()
        if not self._stop.asked:
            self._let_expire(batch)
            if others_help and not self._hung:
                yield from self._let_pass(batch)

    @staticmethod
    def _leaves_all(batch: Pending, chunk: list[Message], tried: list[Message]) -> bool:
        """Leave the topics that are not accepted; return whether nothing else is worth a try."""
        if batch.findings.away is not None and len(chunk) == 1:
            # The destination accepts nothing at all: to try another message now would show nothing new.
            batch.leave_topics(list(batch.messages))
            return True
        if not chunk:
            batch.leave_topics(tried)
            return True
        if len(chunk) == 1 and batch.findings.is_sick(chunk[0].topic, batch.messages):
            batch.leave_topics(chunk)
        return False

    def _let_expire(self, batch: Pending) -> None:
        """Park as dead the messages that have expired by now, except those that may have arrived."""
        if timed := batch.timed():
            unanswered = self.unanswered(timed, parked=batch.parked)
            batch.expire(message for message in timed if message.id not in unanswered)

    def _let_pass(self, batch: Pending) -> Generator[Look, None, None]:
        """Park the head of each key as `waiting`, if there are others to try and the quota allows it.

        Every remaining message has failed in a call of its own. Later messages can show whether the destination
        accepts anything.
        """
        look = Look()
        yield look
        heads = batch.heads()
        if look.others and len(heads) <= batch.quota:
            batch.quota -= len(heads)
            error_of = batch.findings.error_of
            batch.resolve([], [(message, self.policy.waiting(message, error_of(message))) for message in heads])

    def _tell_what_waits(self, batch: Pending) -> None:
        if batch.outcome.parked or batch.outcome.sick:
            waiting = {
                m.topic: parking.error or "" for m, parking in batch.outcome.parked if parking.state == "waiting"
            }
            sick = batch.findings.errors_by_topic(m for m in batch.outcome.open if m.topic in batch.outcome.sick)
            self._tell(batch, sick | waiting)

    def _tell(self, batch: Pending, errors: dict[str, str], *, pauses: bool = False) -> None:
        by_all = (batch.findings.away or batch.findings.error_of_all(errors.values())) if errors else None
        self.outages.refused(errors, by_all=by_all, pauses=pauses)

    def _call(self, chunk: list[Message]) -> Generator[Wait, None, Call | None]:
        """Call the handler; return the call when it has come back or is past its deadline, or None after a stop.

        While the call waits for its turn, a stop ends it. Past its deadline, it gives up its turn: the handler may be
        called again while this call still runs.
        """
        while True:
            while not self._calls.may_begin():
                if self._stop.asked:
                    return None
                yield Wait(time.monotonic() + _RENEWED_SECONDS, stop=self._stop)
            self._hung.known.hand_over(chunk)
            call = self._calls.begin(chunk)
            try:
                until = self._calls.look(call)
                while not call.over:
                    if call.started is None and self._stop.asked and self._calls.withdraw(call):
                        return None
                    yield Wait(until, call, self._stop if call.started is None else None)
                    until = self._calls.look(call)
            except BaseException:
                # Once it has begun, its verdicts count, whether it has come back by now or not.
                if not self._calls.withdraw(call):
                    self._hung.add(call, self._calls.lease)
                raise
            if not call.finished:
                self._hung.add(call, self._calls.lease)
            if not call.late:
                return call

    def _choose(self, batch: Pending) -> list[Message]:
        """Return the messages of the next call: none that hangs or was tried already, nor a later one of its key.

        A message that has failed alone is called alone again, because a failure can be blamed on it only then. All
        other messages go before it, and of several such messages the one that was tried longest ago goes first. So
        every message is tried some time, although the one in front of it is never accepted.
        """
        if len(self._calls.overdue) >= self.policy.max_hung:
            return []
        if not (batch.findings.tried or self._hung or self._blame.some_suspects):
            return batch.messages[: self._size.next]
        chunk: list[Message] = []
        suspects: list[Message] = []
        held, hanging = self._hung.keys, self._hung.ids
        for message in batch.messages:
            if message.id in hanging or message.id in batch.findings.tried or message.key in held:
                held |= {message.key} if message.key else set()
                continue
            if self._blame.is_suspect(message):
                suspects.append(message)
                held |= {message.key} if message.key else set()
                continue
            chunk.append(message)
            if len(chunk) == self._size.next:
                break
        return chunk or self._blame.next_suspect(suspects)

    def _judge(self, batch: Pending, call: Call) -> bool:
        """Decide about the messages of a call; return False when none of them got an outcome."""
        if not call.finished:
            logger.warning("a call with %d messages did not come back in time", len(call.messages))
            self._size.hung()
            return self._nobody_knows(
                batch, call.messages, f"no answer within {self.policy.deadline.total_seconds()} s"
            )
        if call.verdicts is None:
            if isinstance(call.error, StrangeAnswerError):
                # The handler is wrong, not a message: log it now, because smaller and smaller calls would not show it.
                self._tell(batch, {message.topic: describe(call.error) for message in call.messages})
            return self._nobody_knows(batch, call.messages, describe(call.error))
        self._size.came_back(len(call.messages), call.seconds)
        return self._apply(batch, call.messages, call.verdicts)

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
        """Give messages the outcomes that the verdicts demand; return False when none got one.

        After the first verdict of a key that is not `Done`, later ones of that key that are not `Done` are ignored.
        """
        if verdicts.count(DONE) == len(messages):
            self._accepted(batch, len(messages))
            batch.resolve(messages, [])
            return True
        done = [message for message, verdict in zip(messages, verdicts, strict=True) if isinstance(verdict, Done)]
        if done:
            self._accepted(batch, len(done))
        parked: list[tuple[Message, Parking]] = []
        failed_keys: set[str] = set()
        for message, verdict in zip(messages, verdicts, strict=True):
            if isinstance(verdict, Done) or message.key in failed_keys:
                continue
            if message.key is not None:
                failed_keys.add(message.key)
            parking = self._parking(batch, message, verdict, alone=len(messages) == 1)
            if parking is not None:
                parked.append((message, parking))
        batch.resolve(done, parked)
        return bool(done or parked)

    def _parking(self, batch: Pending, message: Message, verdict: Verdict, *, alone: bool) -> Parking | None:
        match verdict:
            case Retry(error, after, counts):
                return self.policy.failed(message, error, after, counts=counts)
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

    def _look_after_hung(self, batch: Pending, *, wait_for_destination: bool) -> None:
        if self._use_late_answers(batch):
            self._let_expire(batch)
        if wait_for_destination:
            self._leave_hopeless(batch)

    def _use_late_answers(self, batch: Pending) -> bool:
        """Use the verdicts of calls that hung and have come back; return whether there were such calls.

        For a message that still hangs alone, an attempt is counted when others were accepted since.
        """
        known = self._hung.known
        if known:
            in_turn = batch.in_turn(known.among(batch.messages, parked=batch.parked))
            done, parkings = known.take(in_turn, parked=batch.parked)
            batch.findings.some_accepted |= bool(done)
            batch.resolve(done, parkings)
        finished = self._hung.take_finished()
        for hung in finished:
            self._use_answers(batch, hung)
        for hung in self._hung.unfinished:
            # Found by id, because a message that was parked meanwhile was read again. One call counts only once.
            message = None if hung.alone is None else batch.by_id().get(hung.alone.id)
            if message is not None and self._blame.accepted_since_failure(message):
                hung.blamed = True
                batch.resolve([], [(message, self.policy.failed(message, "hangs, while others are accepted"))])
        return bool(finished)

    def _use_answers(self, batch: Pending, hung: HungCall) -> None:
        """Use the verdicts of a call that came back late, except for messages behind one that has to be sent again."""
        answers = hung.call.answers
        verdicts = {identity_of(message): verdict for message, verdict in answers}
        used = batch.in_turn(verdicts)
        now = set(map(identity_of, used))
        self._hung.known.note(m for m, v in answers if isinstance(v, Done) and identity_of(m) not in now)
        if used:
            self._apply(batch, used, [verdicts[identity_of(message)] for message in used])

    def _leave_hopeless(self, batch: Pending) -> None:
        """Park messages that hang for too long, and the rest of their keys, so that the position can pass them.

        They stay held until the call ends.
        """
        for call in [hung.call for hung in self._hung.unfinished if hung.call.hangs]:
            ids = {message.id for message in call.messages}
            keys = {message.key for message in call.messages if message.key is not None}
            stuck = [message for message in batch.messages if message.id in ids or message.key in keys][: batch.quota]
            if stuck:
                batch.quota -= len(stuck)
                why = "its call has not come back; it is held until the call does, or the process is started again"
                logger.warning("a call with %d messages hangs for %d s: %s", len(ids), call.seconds, why)
                batch.resolve([], [(message, self.policy.waiting(message, why)) for message in stuck])

    def _accepted(self, batch: Pending, count: int) -> None:
        self._blame.accepted(count)
        self._size.accepted(count)
        batch.findings.accepted()

    def _pause(self) -> Wait:
        """Return a pause, longer than the one before, which a stop ends."""
        self._blame.pauses += 1
        return Wait(time.monotonic() + seconds_to_wait(self.policy.pause, self._blame.pauses), stop=self._stop)
