"""Calls the handler with messages, and decides for each: done, parked, or open because the cause is not known yet.

A handler that raises, or that does not come back in time, does not say whether the message or the destination is the
cause. So a failure counts against a message only when the message was alone in its call, and the destination has
accepted another since its previous failure. Therefore a sick destination causes no dead letters, and a message that
crashes its handler does not stop the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime

from outbox.model.message import Message
from outbox.model.parking import Held, Parking
from outbox.model.retry import seconds_to_wait
from outbox.model.verdict import DONE, Done, Reject, Retry, Unavailable, Verdict, describe
from outbox.worker.calls import Call, Caller, HungCalls, StrangeAnswerError, next_size
from outbox.worker.failure_log import FailureLog
from outbox.worker.known import Identity, identity_of
from outbox.worker.policy import BLOCKED, EXPIRED, HandlerPolicy

logger = logging.getLogger("outbox")

#: A call should take no more than this share of its deadline; the number of messages in a call is adapted to it.
_SHARE_OF_DEADLINE = 0.25
#: After so many deadlines the worker waits for a call no longer: it parks the messages of the call, or gives up.
_HOPELESS = 3
#: When so many calls hang, a worker that does not give up makes no others until one of them comes back.
_MOST_HUNG = 8
#: After a call that hung, a call has so many times fewer messages, because all messages of a hung call are held.
_CAUTION = 8
#: When a call takes longer than this, `BatchHandler.meanwhile` is called while the call goes on.
_SOON_SECONDS = 0.005


@dataclass(slots=True)
class Outcome:
    """The result of a batch, or of a part of it.

    `open`: without a result, because the worker was stopped or the topic is in `sick`. `next`: the first message that
    has no result yet; None in the last part.
    """

    done: list[Message] = field(default_factory=list)
    parked: list[tuple[Message, Parking]] = field(default_factory=list)
    open: list[Message] = field(default_factory=list)
    sick: set[str] = field(default_factory=set)
    #: `paused`: the batch waited for the destination. `away`: the destination accepts nothing at the end.
    paused: bool = False
    away: bool = False
    next: Message | None = None

    @property
    def accepted_topics(self) -> set[str]:
        """The topics that the destination accepts, as far as is known at the end of the batch."""
        waiting = {message.topic for message, parking in self.parked if parking.state == "waiting"}
        return set() if self.away else {message.topic for message in self.done} - waiting - self.sick


class BatchHandler:
    """Handles batches, one after the other.

    Remembers how many messages the destination accepted, and which messages failed alone in a call.
    """

    def __init__(
        self,
        caller: Caller,
        policy: HandlerPolicy,
        *,
        before_call: Callable[[], float],
        rest: Callable[[float], bool],
        most: int,
        part_seconds: float = 1.0,
        hung: HungCalls | None = None,
        gives_up: bool = True,
        serialize: Callable[[Callable[[], None]], AbstractContextManager[object]] = nullcontext,
        failure_log: FailureLog | None = None,
    ) -> None:
        """`before_call` returns the moment before which a call has to begin, and raises when too little of the lease is
        left for a call. `rest` sleeps, and returns False when a stop is asked. `serialize` waits until nobody else
        calls the same handler, and calls its argument before it waits.

        A call has at most `most` messages. `part_seconds`: a batch that takes longer comes in parts. `hung`: the calls
        that did not come back, also those of earlier leases. `gives_up`: whether the worker gives up when calls hang,
        so that a new process ends them.
        """
        self._caller = caller
        self._policy = policy
        self._before_call = before_call
        self._rest = rest
        self._serialize = serialize
        self._failure_log = failure_log
        self._limit = self._most = most
        self._careful_until = most
        self._part_seconds = part_seconds
        self._size = policy.least
        self._accepts = 0
        #: By log id, the number of accepted messages at the first failure; in the order of the last failures.
        self._failed_alone: dict[int | None, int] = {}
        self._hung = HungCalls() if hung is None else hung
        self._gives_up = gives_up
        self._failures = 0
        #: Called before a pause, and while a call takes long: does what can be done meanwhile.
        self.meanwhile: Callable[[], None] = lambda: None

    @property
    def gave_up(self) -> bool:
        """True when so many calls hang, or one for so long, that only a new process helps."""
        if not (self._gives_up and self._hung):
            return False
        hanging = self._hung.unfinished
        return len(hanging) > self._policy.max_hung or any(map(self._is_hopeless, hanging))

    def held(self) -> Held:
        """Return which parked messages are not to be tried, because they are in calls that did not come back.

        A message that hangs alone in its call is not among them, because an attempt of it may have to be counted.
        """
        for call in self._hung.take_finished():
            self._hung.known.note(message for message, verdict in call.answers if isinstance(verdict, Done))
        alone = {c.messages[0].id for c in self._hung.unfinished if len(c.messages) == 1 and not c.blamed}
        return Held(ids=self._hung.ids - alone, keys=self._hung.keys, but=alone)

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
        self._hung.note(self._caller.lease, done, parkings, parked=parked)

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
        now: Callable[[], datetime] | None = None,
        more_available: Callable[[], bool] = lambda: False,
    ) -> Iterator[Outcome]:
        """Call the handler until every message has an outcome, or a stop is asked; yield the outcomes.

        They come in parts when the batch takes long, so that each part can be settled before the next.

        `wait_for_destination`: wait for an unavailable destination, with growing pauses; otherwise the topic counts as
        sick and its messages stay open. `quota`: how many messages may be parked as waiting. `parked`: the messages
        were read from where they are parked. `now`: the clock by which messages expire meanwhile. `more_available`:
        returns whether there are messages elsewhere that could show whether the destination is sick or a message
        crashes its handler.
        """
        batch = _Batch(messages, quota, parked=parked)
        began = time.monotonic()
        try:
            for pauses in self._work_through(batch, now, more_available, wait_for_destination=wait_for_destination):
                if (pauses or time.monotonic() - began >= self._part_seconds) and batch.pending and batch.has_part:
                    yield self._part(batch, pauses=pauses)
                    began = time.monotonic()
            batch.outcome.open.extend(batch.pending)
            batch.pending = []
            yield self._part(batch, pauses=False)
        except BaseException:
            self.keep(batch.outcome.done, batch.outcome.parked, parked=parked)
            raise

    def _part(self, batch: _Batch, *, pauses: bool) -> Outcome:
        """Return the outcomes since the part before; `pauses`: none of the messages that are left is accepted now."""
        self._tell_what_waits(batch)
        batch.outcome.away = pauses or batch.away is not None
        self._forget(batch.outcome)
        return batch.next_part()

    def _work_through(
        self,
        batch: _Batch,
        now: Callable[[], datetime] | None,
        more_available: Callable[[], bool],
        *,
        wait_for_destination: bool,
    ) -> Iterator[bool]:
        """Give messages their outcomes; yield False after some got one, and True before a pause."""
        while batch.pending and not self.gave_up and self._rest(0):
            self._look_after_hung(batch, now, wait_for_destination=wait_for_destination)
            if not batch.pending:
                break
            chunk, tried = self._choose(batch), list[Message]()
            if not chunk:
                # Every remaining message hangs, or was tried since the destination accepted something: start over.
                tried = [message for message in batch.pending if message.id in batch.tried]
                batch.tried.clear()
            elif self._judge(batch, self._call(chunk)):
                self._let_expire(batch, now)
                yield False
                continue
            if wait_for_destination:
                self._tell(batch, batch.answers_by_topic(batch.pending))
                batch.outcome.paused = True
                yield True
                self.meanwhile()
                if not self._pause():
                    break
                self._let_expire(batch, now)
                if not chunk and not self._hung and more_available():
                    self._let_pass(batch)
            elif self._leaves_all(batch, chunk, tried):
                break

    @staticmethod
    def _leaves_all(batch: _Batch, chunk: list[Message], tried: list[Message]) -> bool:
        """Leave the topics that are not accepted; return whether nothing else is worth a try."""
        if batch.away is not None and len(chunk) == 1:
            # The destination accepts nothing at all: to try another message now would show nothing new.
            batch.leave_topics(list(batch.pending))
            return True
        if not chunk:
            batch.leave_topics(tried)
            return True
        if len(chunk) == 1 and batch.is_sick(chunk[0].topic):
            batch.leave_topics(chunk)
        return False

    def _let_expire(self, batch: _Batch, now: Callable[[], datetime] | None) -> None:
        """Park as dead the messages that have expired by now, except those that may have arrived."""
        timed = [message for message in batch.pending if message.expires_at is not None]
        if timed and now is not None:
            moment, unanswered = now(), self.unanswered(timed, parked=batch.parked)
            late = [m for m in timed if m.expires_at is not None and m.expires_at <= moment and m.id not in unanswered]
            if late:
                batch.resolve([], [(message, EXPIRED) for message in late])

    def _let_pass(self, batch: _Batch) -> None:
        """Park the head of each key as `waiting`, if the quota allows it.

        Every remaining message has failed in a call of its own. Later messages can show whether the destination
        accepts anything.
        """
        heads = list({message.key or message.id: message for message in reversed(batch.pending)}.values())
        if len(heads) <= batch.quota:
            batch.quota -= len(heads)
            batch.resolve([], [(message, self._policy.waiting(message, batch.why(message))) for message in heads])

    def _tell_what_waits(self, batch: _Batch) -> None:
        if batch.outcome.parked or batch.outcome.sick:
            waiting = {
                m.topic: parking.error or "" for m, parking in batch.outcome.parked if parking.state == "waiting"
            }
            sick = batch.answers_by_topic(m for m in batch.outcome.open if m.topic in batch.outcome.sick)
            self._tell(batch, sick | waiting)

    def _tell(self, batch: _Batch, answers: dict[str, str]) -> None:
        if self._failure_log is not None and answers:
            same = None if batch.some_done or len(answers) == 1 else next(iter(answers.values()))
            of_all = same is not None and set(answers.values()) == {same}
            self._failure_log.refused(answers, by_all=batch.away or (same if of_all else None))

    def _call(self, chunk: list[Message]) -> Call:
        # At its deadline a call gives up its turn: the handler may be called again while this call still runs.
        while True:
            with self._serialize(self.meanwhile):
                begin_before = self._before_call()
                self._hung.known.hand_over(chunk)
                call = self._caller.start(chunk, begin_before)
                try:
                    self._await(call, self._policy.deadline.total_seconds())
                except BaseException:
                    # Its verdicts count, whether it has come back by now or not.
                    self._hung.add(call)
                    raise
                if not call.finished:
                    self._hung.add(call)
            if not call.late:
                return call

    def _await(self, call: Call, seconds: float) -> None:
        soon = min(_SOON_SECONDS, seconds)
        if not call.wait(soon):
            self.meanwhile()
            call.wait(seconds - soon)

    def _choose(self, batch: _Batch) -> list[Message]:
        """Return the messages of the next call: none that hangs or was tried already, nor a later one of its key.

        A message that has failed alone is called alone again, because a failure can be blamed on it only then. All
        other messages go before it, and of several such messages the one that was tried longest ago goes first. So
        every message is tried some time, although the one in front of it is never accepted.
        """
        if not (batch.tried or self._hung or self._failed_alone):
            return batch.pending[: self._size]
        if not self._gives_up and len(self._hung.unfinished) >= _MOST_HUNG:
            return []
        chunk: list[Message] = []
        suspects: dict[int | None, Message] = {}
        held, hanging = self._hung.keys, self._hung.ids
        for message in batch.pending:
            if message.id in hanging or message.id in batch.tried or message.key in held:
                held |= {message.key} if message.key else set()
                continue
            if message.id in self._failed_alone:
                suspects[message.id] = message
                held |= {message.key} if message.key else set()
                continue
            chunk.append(message)
            if len(chunk) == self._size:
                break
        return chunk or [suspects[id] for id in self._failed_alone if id in suspects][:1]

    def _judge(self, batch: _Batch, call: Call) -> bool:
        """Decide about the messages of a call; return False when none of them got an outcome."""
        if not call.finished:
            logger.warning("a call with %d messages did not come back in time", len(call.messages))
            self._most, self._careful_until = max(1, self._most // _CAUTION), self._accepts + self._limit
            return self._nobody_knows(
                batch, call.messages, f"no answer within {self._policy.deadline.total_seconds()} s"
            )
        if call.verdicts is None:
            if isinstance(call.error, StrangeAnswerError):
                # The handler is wrong, not a message: log it now, because smaller and smaller calls would not show it.
                self._tell(batch, {message.topic: describe(call.error) for message in call.messages})
            return self._nobody_knows(batch, call.messages, describe(call.error))
        self._adapt(call)
        return self._apply(batch, call.messages, call.verdicts)

    def _nobody_knows(self, batch: _Batch, messages: Sequence[Message], error: str) -> bool:
        """Decide about a failure without verdicts; return whether a message got an outcome.

        The failure counts against a message that was alone in its call, if others were accepted since its previous
        failure. Otherwise it counts against no message.
        """
        self._size = 1
        if len(messages) > 1:
            return False
        message = messages[0]
        if self._accepted_since_failure(message):
            batch.resolve([], [(message, self._policy.failed(message, error))])
            self._note_failed_alone(message, self._accepts)
            return True
        self._note_failed_alone(message, self._accepts)
        batch.tried.add(message.id)
        batch.answers[message.id] = error
        return False

    def _apply(self, batch: _Batch, messages: Sequence[Message], verdicts: Sequence[Verdict]) -> bool:
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
            parking = self._parking(batch, message, verdict, others_done=bool(done), alone=len(messages) == 1)
            if parking is not None:
                parked.append((message, parking))
        batch.resolve(done, parked)
        return bool(done or parked)

    def _parking(
        self, batch: _Batch, message: Message, verdict: Verdict, *, others_done: bool, alone: bool
    ) -> Parking | None:
        match verdict:
            case Retry(error, after, counts):
                return self._policy.failed(message, error, after, counts=counts)
            case Reject(error):
                return self._policy.dead(message, error)
            case Unavailable(error, everything):
                batch.away = error if everything else None
                others_done = others_done or batch.some_done
                if (others_done or self._accepted_since_failure(message)) and batch.quota > 0:
                    batch.quota -= 1
                    return self._policy.waiting(message, error)
                self._size = 1
                batch.answers[message.id] = error
                if alone:
                    self._note_failed_alone(message, self._failed_alone.get(message.id, self._accepts))
                    batch.tried.add(message.id)
                    batch.refused |= {message.topic} if batch.some_done else set()
        return None

    def _look_after_hung(
        self, batch: _Batch, now: Callable[[], datetime] | None, *, wait_for_destination: bool
    ) -> None:
        if self._use_late_answers(batch):
            self._let_expire(batch, now)
        if wait_for_destination:
            self._leave_hopeless(batch)

    def _use_late_answers(self, batch: _Batch) -> bool:
        """Use the verdicts of calls that hung and have come back; return whether there were such calls.

        For a message that still hangs alone, an attempt is counted when others were accepted since.
        """
        known = self._hung.known
        if known:
            in_turn = batch.in_turn(known.among(batch.pending, parked=batch.parked))
            batch.resolve(*known.take(in_turn, parked=batch.parked))
        finished = self._hung.take_finished()
        for call in finished:
            self._use_answers(batch, call)
        for call in self._hung.unfinished:
            # Found by id, because a message that was parked meanwhile was read again. One call counts only once.
            message = batch.by_id().get(call.messages[0].id) if len(call.messages) == 1 and not call.blamed else None
            if message is not None and self._accepted_since_failure(message):
                call.blamed = True
                batch.resolve([], [(message, self._policy.failed(message, "hangs, while others are accepted"))])
        return bool(finished)

    def _use_answers(self, batch: _Batch, call: Call) -> None:
        """Use the verdicts of a call that came back late, except for messages behind one that has to be sent again."""
        verdicts = {identity_of(message): verdict for message, verdict in call.answers}
        used = batch.in_turn(verdicts)
        now = set(map(identity_of, used))
        self._hung.known.note(m for m, v in call.answers if isinstance(v, Done) and identity_of(m) not in now)
        if used:
            self._apply(batch, used, [verdicts[identity_of(message)] for message in used])

    def _is_hopeless(self, call: Call) -> bool:
        return call.seconds > self._policy.deadline.total_seconds() * _HOPELESS

    def _leave_hopeless(self, batch: _Batch) -> None:
        """Park messages that hang for too long, and the rest of their keys, so that the position can pass them.

        They stay held until the call ends.
        """
        if self._gives_up:
            return
        for call in filter(self._is_hopeless, self._hung.unfinished):
            ids = {message.id for message in call.messages}
            keys = {message.key for message in call.messages if message.key is not None}
            stuck = [message for message in batch.pending if message.id in ids or message.key in keys][: batch.quota]
            if stuck:
                batch.quota -= len(stuck)
                why = "its call has not come back; it is held until the call does, or the process is started again"
                logger.warning("a call with %d messages hangs for %d s: %s", len(ids), call.seconds, why)
                batch.resolve([], [(message, self._policy.waiting(message, why)) for message in stuck])

    def _accepted(self, batch: _Batch, count: int) -> None:
        self._accepts += count
        self._failures = 0
        batch.tried.clear()
        batch.away = None

    def _forget(self, outcome: Outcome) -> None:
        """Forget the failures of messages that will not be handled again."""
        if self._failed_alone:
            for message in outcome.done:
                self._failed_alone.pop(message.id, None)
            for message, parking in outcome.parked:
                if parking.state != "retry":
                    self._failed_alone.pop(message.id, None)

    def _note_failed_alone(self, message: Message, accepts: int) -> None:
        """Put the message behind all others that have failed alone."""
        self._failed_alone.pop(message.id, None)
        self._failed_alone[message.id] = accepts

    def _accepted_since_failure(self, message: Message) -> bool:
        return self._accepts > self._failed_alone.get(message.id, self._accepts)

    def _adapt(self, call: Call) -> None:
        """Set the size of the next call: as many messages as a share of the deadline allows, growing step by step."""
        count = len(call.messages)
        if self._accepts >= self._careful_until:
            self._most, self._careful_until = min(2 * self._most, self._limit), self._accepts + self._limit
        allowed = self._policy.deadline.total_seconds() * _SHARE_OF_DEADLINE
        size = next_size(self._size, count, call.seconds, allowed=allowed, most=self._most)
        self._size = max(self._policy.least, size)

    def _pause(self) -> bool:
        self._failures += 1
        if self._failure_log is not None:
            self._failure_log.paused()
        return self._rest(seconds_to_wait(self._policy.pause, self._failures))


class _Batch:
    """The messages of one run: those without an outcome yet, and the outcomes since the last part."""

    def __init__(self, messages: list[Message], quota: int, *, parked: bool) -> None:
        self.pending = messages
        self.parked = parked
        self.quota = quota
        #: Ids of messages that failed since the destination last accepted something: others are tried first.
        self.tried: set[int | None] = set()
        #: Topics that were refused alone, while others were accepted.
        self.refused: set[str] = set()
        #: The last error of each message that was not accepted, by log id.
        self.answers: dict[int | None, str] = {}
        #: Why the destination accepts nothing at all, since it last accepted something.
        self.away: str | None = None
        self.outcome = Outcome()
        self._some_done = False

    @property
    def some_done(self) -> bool:
        """True when the destination has accepted a message of this run."""
        return self._some_done or bool(self.outcome.done)

    @property
    def has_part(self) -> bool:
        """True when messages got outcomes since the last part."""
        return bool(self.outcome.done or self.outcome.parked)

    def next_part(self) -> Outcome:
        """Return the outcomes since the last part, and begin another part."""
        part = self.outcome
        part.next = self.pending[0] if self.pending else None
        self._some_done = self.some_done
        self.outcome = Outcome(open=list(part.open), sick=set(part.sick), paused=part.paused)
        return part

    def in_turn(self, identities: Container[Identity]) -> list[Message]:
        """Return those of these messages that have no other message of their key before them."""
        found: list[Message] = []
        held: set[str | None] = set()
        for message in self.pending:
            if message.key in held:
                continue
            if identity_of(message) in identities:
                found.append(message)
            elif message.key is not None:
                held.add(message.key)
        return found

    def by_id(self) -> dict[int | None, Message]:
        """Return the messages without an outcome, by log id."""
        return {message.id: message for message in self.pending}

    def answers_by_topic(self, messages: Iterable[Message]) -> dict[str, str]:
        """Return, for the topics of these messages, why messages were not accepted, as far as an error is known."""
        return {m.topic: self.answers[m.id] for m in messages if m.id in self.answers} if self.answers else {}

    def why(self, message: Message) -> str:
        """Return why a message was not accepted: its last error, or a general text if none is known."""
        return self.answers.get(message.id, "not accepted, and there was nothing else to try")

    def is_sick(self, topic: str) -> bool:
        """Return whether a topic was refused while others were accepted, or two messages of it have failed alone."""
        return topic in self.refused or sum(m.topic == topic for m in self.pending if m.id in self.tried) > 1

    def resolve(self, done: Sequence[Message], parked: list[tuple[Message, Parking]]) -> None:
        """Give messages their outcome; park as `blocked` the rest of each key that one of them blocks."""
        self.outcome.done.extend(done)
        if len(done) == len(self.pending):
            self.pending = []
            return
        self.outcome.parked.extend(parked)
        resolved = {message.id for message in done} | {message.id for message, _ in parked}
        blocked_keys = {message.key for message, parking in parked if parking.blocks and message.key is not None}
        rest = [message for message in self.pending if message.id not in resolved]
        if blocked_keys:
            self.outcome.parked.extend((message, BLOCKED) for message in rest if message.key in blocked_keys)
            rest = [message for message in rest if message.key not in blocked_keys]
        self.pending = rest

    def leave_topics(self, messages: Iterable[Message]) -> None:
        """Leave all messages of these messages' topics open, and other messages of the same keys."""
        self.outcome.sick.update(message.topic for message in messages)
        left = [message for message in self.pending if message.topic in self.outcome.sick]
        keys = {message.key for message in left if message.key is not None}
        self.outcome.open.extend(left)
        self.outcome.open.extend(m for m in self.pending if m.topic not in self.outcome.sick and m.key in keys)
        self.pending = [m for m in self.pending if m.topic not in self.outcome.sick and m.key not in keys]
