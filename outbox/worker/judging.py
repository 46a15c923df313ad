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
from outbox.worker.outages import Outages
from outbox.worker.outcome import Pending
from outbox.worker.policy import CALLED, HandlerPolicy
from outbox.worker.portions import PortionedCall
from outbox.worker.silences import PATIENCE_SECONDS, Silences

logger = logging.getLogger("outbox")


class Judge:
    """Decides about the messages of calls: of those that have come back, and of those that hang."""

    def __init__(
        self, policy: HandlerPolicy, *, blame: Blame, silences: Silences, size: BatchSize, outages: Outages
    ) -> None:
        self._policy = policy
        self._blame = blame
        self._silences = silences
        self._size = size
        self._outages = outages
        #: Hanging calls with one message that has no blame yet, and how many messages were accepted at the deadline.
        self._alone: dict[Call, int] = {}

    def judge(self, batch: Pending, call: Call) -> bool:
        """Decide about the messages of a call; return False when none got an outcome."""
        if isinstance(call, PortionedCall):
            decided = self.apply(batch, *call.answered)
            return self._leave(batch, call) if call.left else decided
        if call.left:
            return self._leave(batch, call)
        if call.verdicts is None:
            if isinstance(call.error, StrangeAnswerError):
                # The handler is wrong, not a message: log it now, because smaller and smaller calls would not show it.
                errors = {message.topic: describe(call.error) for message in call.messages}
                self._outages.refused(errors, by_all=batch.findings.error_of_all(errors.values()))
            return self._nobody_knows(batch, call.messages, failure_of(call.error))
        self._size.came_back(len(call.messages), call.seconds)
        decided = self.apply(batch, call.messages, call.verdicts)
        self._note_silence(call)
        return decided

    def _note_silence(self, call: Call) -> None:
        """Note for which topics the destination gave no answer, but let the call wait."""
        refused = [message for message, verdict in call.answers if isinstance(verdict, Unavailable)]
        if call.seconds >= PATIENCE_SECONDS:
            self._silences.unanswered(refused, of=len(call.messages), alone=True)
        else:
            self._silences.answered(refused)

    def _leave(self, batch: Pending, call: Call) -> bool:
        """Park the messages of a call past its deadline, and later messages of the keys, until the call comes back.

        An attempt counts for a portion, and for a message alone with the blame for the failure.
        """
        messages, failure = call.messages, Retry(f"no answer within {call.deadline} s")
        alone = not self._note_late(batch, call, failure.error) and len(messages) == 1
        counts = self._policy.in_portions or (alone and self._blame.failed_alone(messages[0]))
        if not counts:
            batch.quota = max(0, batch.quota - len(messages))
        # A dead letter may let the rest of its key go on, but not beside its call.
        own = {message.id for message in messages}
        keys = {message.key for message in messages if self._policy.ordered and message.key is not None}
        rest = [message for message in batch.messages if message.key in keys and message.id not in own]
        fails, waits = (messages, rest) if counts else ([], [*messages, *rest])
        failed = [(message, self._policy.failed(message, failure)) for message in fails]
        batch.resolve([], [*failed, *((message, self._policy.waiting(message, CALLED)) for message in waits)])
        if alone and not counts:
            self._alone[call] = self._blame.count
            if batch.parked:
                batch.note_refused({messages[0].topic: failure.error}, accepted=())
        return True

    def _note_late(self, batch: Pending, call: Call, error: str) -> bool:
        """Note a call past its deadline; return whether one of its topics is silent, while others go on as before."""
        messages = call.messages
        topics = {message.topic for message in messages}
        if not self._policy.in_portions:
            self._silences.unanswered(messages, of=len(messages), alone=len(topics) == 1)
        if any(map(self._silences.is_silent, topics)):
            batch.findings.refused |= dict.fromkeys(topics, error)
            batch.note_refused(batch.findings.refused, accepted=())
        if any(map(self._silences.is_silent_alone, topics)):
            return True
        _tell_late(call)
        self._size.hung()
        self._size.one()
        return False

    def judge_late(self, batch: Pending, call: Call) -> None:
        """Decide about the parked messages of a call that has come back after its deadline.

        A row does not change without a verdict, behind the first failure of its key, and if no attempt counts.
        """
        self._alone.pop(call, None)
        failed, used = set[str | None](), list[tuple[Message, Verdict]]()
        for message, verdict in call.answers:
            passes = isinstance(verdict, Done) or (isinstance(verdict, Reject) and not self._policy.block_on_dead)
            counts = isinstance(verdict, Done | Reject) or (isinstance(verdict, Retry) and verdict.counts)
            if counts and message.key not in failed:
                used.append((message, verdict))
            if self._policy.ordered and message.key is not None and not passes:
                failed.add(message.key)
        if used:
            self.apply(batch, [message for message, _ in used], [verdict for _, verdict in used])
        elif call.error is not None:
            self._nobody_knows(batch, call.messages, failure_of(call.error))

    def hanging(self) -> list[tuple[Message, Parking]]:
        """Return, once, the failure of each message alone in a hanging call, if others were accepted since."""
        blamed = [call for call, count in self._alone.items() if self._blame.count > count]
        for call in blamed:
            del self._alone[call]
        failure = Retry("hangs, while others are accepted")
        return [(message, self._policy.failed(message, failure)) for call in blamed for message in call.messages]

    def _nobody_knows(self, batch: Pending, messages: Sequence[Message], verdict: Retry) -> bool:
        """Decide about a failure without verdicts; return whether a message got an outcome."""
        self._size.one()
        if len(messages) > 1:
            batch.findings.unclear = True
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

    def _accepted(self, batch: Pending, messages: Sequence[Message]) -> None:
        self._blame.accepted(len(messages))
        self._silences.answered(messages)
        self._size.accepted(len(messages))
        batch.findings.accepted(messages)


def _tell_late(call: Call) -> None:
    about = named("call_late", messages=len(call.messages), seconds=call.seconds)
    number = counted(len(call.messages), "message")
    held = "the keys are held until the call does, or the process is started again"
    logger.warning("a call with %s did not come back in time; %s", number, held, extra=about)
