"""What comes of a call: for each of its messages done, parked, or open because the cause is not known yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.verdict import DONE, Done, Reject, Retry, Unavailable, Verdict, describe, failure_of
from outbox.runtime.named import named
from outbox.runtime.text import counted
from outbox.worker.batch_size import BatchSize
from outbox.worker.blame import Blame
from outbox.worker.calls import Call, StrangeAnswerError
from outbox.worker.hung import HungCall, HungCalls
from outbox.worker.known import identity_of
from outbox.worker.outages import Outages
from outbox.worker.outcome import Pending
from outbox.worker.policy import HandlerPolicy
from outbox.worker.portions import PortionedCall

logger = logging.getLogger("outbox")


class Judge:
    """Decides about the messages of calls: of those that have come back, and of those that hang."""

    def __init__(
        self, policy: HandlerPolicy, *, hung: HungCalls, blame: Blame, size: BatchSize, outages: Outages
    ) -> None:
        self._policy = policy
        self._hung = hung
        self._blame = blame
        self._size = size
        self._outages = outages

    def judge(self, batch: Pending, call: Call) -> bool:
        """Decide about the messages of a call; return False when none got an outcome."""
        if isinstance(call, PortionedCall):
            return self._judge_portions(batch, call)
        if not call.finished:
            _tell_late(call)
            self._size.hung()
            return self._nobody_knows(batch, call.messages, Retry(self._no_answer))
        if call.verdicts is None:
            if isinstance(call.error, StrangeAnswerError):
                # The handler is wrong, not a message: log it now, because smaller and smaller calls would not show it.
                errors = {message.topic: describe(call.error) for message in call.messages}
                self._outages.refused(errors, by_all=batch.findings.error_of_all(errors.values()))
            return self._nobody_knows(batch, call.messages, failure_of(call.error))
        self._size.came_back(len(call.messages), call.seconds)
        return self.apply(batch, call.messages, call.verdicts)

    def _judge_portions(self, batch: Pending, call: PortionedCall) -> bool:
        """Decide about the answered messages, and about those of a portion that did not come back: the listener failed.

        Its messages are tried again when the call has come back.
        """
        decided = self.apply(batch, *call.answered)
        if not call.left:
            return decided
        _tell_late(call)
        verdict = Retry(self._no_answer)
        batch.resolve([], [(message, self._policy.failed(message, verdict)) for message in call.messages])
        return True

    @property
    def _no_answer(self) -> str:
        return f"no answer within {self._policy.deadline.total_seconds()} s"

    def _nobody_knows(self, batch: Pending, messages: Sequence[Message], verdict: Retry) -> bool:
        """Decide about a failure without verdicts; return whether a message got an outcome."""
        self._size.one()
        if len(messages) > 1:
            return False
        message = messages[0]
        if self._blame.failed_alone(message):
            batch.resolve([], [(message, self._policy.failed(message, verdict))])
            return True
        batch.findings.failed(message, verdict.error)
        return False

    def apply(self, batch: Pending, messages: Sequence[Message], verdicts: Sequence[Verdict]) -> bool:
        """Give messages the outcomes that the verdicts demand; return False when none got an outcome.

        After the first verdict of a key other than `Done`, later verdicts of the key count only if they are `Done`.
        """
        if verdicts and verdicts.count(DONE) == len(messages):
            self._accepted(batch, messages)
            batch.resolve(messages, [])
            return True
        done = [message for message, verdict in zip(messages, verdicts, strict=True) if isinstance(verdict, Done)]
        if done:
            self._accepted(batch, done)
        parked: list[tuple[Message, Parking]] = []
        refused: dict[str, str] = {}
        failed_keys: set[str | None] = set()
        alone = len(messages) == 1 or self._policy.in_portions
        last_done = max((place for place, verdict in enumerate(verdicts) if isinstance(verdict, Done)), default=-1)
        for place, (message, verdict) in enumerate(zip(messages, verdicts, strict=True)):
            if isinstance(verdict, Done) or message.key in failed_keys:
                continue
            if self._policy.ordered and message.key is not None:
                failed_keys.add(message.key)
            if isinstance(verdict, Unavailable):
                # A destination that has accepted a later message of the call is not away.
                away = verdict.everything and place > last_done
                refused[message.topic] = verdict.error
                parking = self._unavailable(batch, message, verdict.error, away=away, alone=alone)
            else:
                parking = self._failed(message, verdict)
            if parking is not None:
                parked.append((message, parking))
        batch.resolve(done, parked)
        if refused:
            batch.note_refused(refused, accepted={message.topic for message in done})
        return bool(done or parked)

    def _is_passed(self, batch: Pending, message: Message, *, away: bool) -> bool:
        """Return whether the destination accepts others while it does not accept a message.

        If it accepts nothing at all, an earlier message proves nothing: an outage has begun since. That parks nothing.
        """
        accepts = batch.findings.some_accepted and not away
        return accepts or self._blame.accepted_since_failure(message)

    def _unavailable(self, batch: Pending, message: Message, error: str, *, away: bool, alone: bool) -> Parking | None:
        """Return the parking of a message that is not accepted, while others are; None: the message stays in place.

        `away`: the destination accepts nothing at all. A parked message is the last of its topic to be tried again.
        """
        if self._policy.suspend:
            return self._policy.failed(message, Retry(error, counts=False))
        batch.findings.away = error if away else None
        if batch.parked:
            if away:
                self._size.one()
            return self._policy.waiting(message, error)
        if batch.quota > 0 and self._is_passed(batch, message, away=away):
            batch.quota -= 1
            return self._policy.waiting(message, error)
        self._size.one()
        batch.findings.errors[message.id] = error
        if not away:
            batch.findings.refused[message.topic] = error
        if alone:
            self._blame.refused_alone(message)
            batch.findings.tried.add(message.id)
        return None

    def _failed(self, message: Message, verdict: Retry | Reject) -> Parking:
        if isinstance(verdict, Reject):
            return self._policy.dead(message, verdict.error)
        return self._policy.failed(message, verdict)

    def use_late_answers(self, batch: Pending) -> bool:
        """Use the verdicts of hung calls that have come back; return whether there were any.

        For a message alone in a call that still hangs, an attempt is counted when other messages were accepted since;
        for a portion that an earlier lease began, at the deadline.
        """
        known = self._hung.known
        if known:
            in_turn = batch.in_turn(known.among(batch.messages, parked=batch.parked), ordered=self._policy.ordered)
            done, parkings = known.take(in_turn, parked=batch.parked)
            batch.findings.some_accepted |= bool(done)
            batch.resolve(done, parkings)
        finished = self._hung.take_finished()
        for hung in finished:
            self._use_answers(batch, hung)
        for hung in self._hung.unfinished:
            # Found by id, because a message that was parked meanwhile was read again. One call counts only once.
            message = None if hung.alone is None else batch.by_id().get(hung.alone.id)
            # After a lease of another process an earlier message of its key may be here, and comes first.
            if message is None or not batch.in_turn({identity_of(message)}, ordered=self._policy.ordered):
                continue
            if self._policy.in_portions and hung.call.over:
                hung.blamed = True
                batch.resolve([], [(message, self._policy.failed(message, Retry(self._no_answer)))])
            elif self._blame.accepted_since_failure(message):
                hung.blamed = True
                verdict = Retry("hangs, while others are accepted")
                batch.resolve([], [(message, self._policy.failed(message, verdict))])
        return bool(finished)

    def _use_answers(self, batch: Pending, hung: HungCall) -> None:
        """Use the verdicts of a late call, except for messages behind a message that has to be sent again."""
        answers = hung.call.answers
        verdicts = {identity_of(message): verdict for message, verdict in answers}
        used = batch.in_turn(verdicts, ordered=self._policy.ordered)
        now = set(map(identity_of, used))
        self._hung.known.note(m for m, v in answers if isinstance(v, Done) and identity_of(m) not in now)
        if used:
            self.apply(batch, used, [verdicts[identity_of(message)] for message in used])

    def leave_hopeless(self, batch: Pending) -> None:
        """Park messages that hang for too long, and the rest of their keys, so that the position can pass.

        The messages stay held until the call ends. For a portion the deadline is too long.
        """
        early = self._policy.in_portions
        for call in [each.call for each in self._hung.unfinished if (each.call.over if early else each.call.hangs)]:
            ids = {message.id for message in call.messages}
            keys = {message.key for message in call.messages if message.key is not None}
            stuck = [message for message in batch.messages if message.id in ids or message.key in keys][: batch.quota]
            if stuck:
                batch.quota -= len(stuck)
                why = "its call has not come back; it is held until the call does, or the process is started again"
                about = named("call_hangs", messages=len(ids), seconds=call.seconds)
                number = counted(len(ids), "message")
                logger.warning("a call with %s hangs for %d s: %s", number, call.seconds, why, extra=about)
                batch.resolve([], [(message, self._policy.waiting(message, why)) for message in stuck])

    def _accepted(self, batch: Pending, messages: Sequence[Message]) -> None:
        self._blame.accepted(len(messages))
        self._size.accepted(len(messages))
        batch.findings.accepted(messages)


def _tell_late(call: Call) -> None:
    about = named("call_late", messages=len(call.messages))
    number = counted(len(call.messages), "message")
    logger.warning("a call with %s did not come back in time", number, extra=about)
