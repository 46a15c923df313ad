"""Which messages the next call gets: none beside an earlier message of its key, and a suspect only alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from outbox.model.message import Message
from outbox.worker.batch_size import BatchSize
from outbox.worker.blame import Blame
from outbox.worker.calls import Call, Caller
from outbox.worker.outcome import Pending
from outbox.worker.policy import MAX_HUNG, MOST_PROBES, HandlerPolicy
from outbox.worker.silences import Silences


class Chooser:
    """Chooses the messages of the calls for one partition, of which several may be under way at once."""

    def __init__(
        self, policy: HandlerPolicy, caller: Caller, *, blame: Blame, silences: Silences, size: BatchSize
    ) -> None:
        self._policy = policy
        self._caller = caller
        self._blame = blame
        self._silences = silences
        self._size = size

    def next(self, batch: Pending, under_way: Sequence[Call]) -> list[Message]:
        """Return the messages of the next call: none that was tried already, nor a later message of such a key.

        A message that has failed alone is called alone again, because only then can a failure be blamed on the message.
        All other messages go first, then the suspect that was tried longest ago; before those of refused topics those
        of others, and of these each topic alone that may be silent. So every message is tried some time, although the
        message in front is never accepted.
        """
        side_by_side = 1 if self._policy.suspend else self._caller.concurrency
        calls = side_by_side - len(under_way)
        if calls < 1 or len(self._caller.overdue) >= MAX_HUNG:
            return []
        size = self._next_size(batch, side_by_side)
        refused, suspected = batch.findings.refused, self._silences.suspected
        suspicious = batch.findings.tried or refused or suspected or self._blame.some_suspects
        if calls == 1 and not (suspicious or under_way):
            return batch.messages[:size]
        for topics in self._left_out(batch, refused, suspected):
            suspects: list[Message] = []
            allowed, most = self._free(batch, under_way, suspects, topics), size
            if topics and batch.findings.seek_accepted:
                # Any of them may show that the destination accepts others.
                allowed, most = one_of_each_topic(allowed, ordered=self._policy.ordered), MOST_PROBES
            free = list(islice(allowed, calls * most))
            if chosen := self._share(free, calls)[:most] or self._blame.next_suspect(suspects):
                return chosen
        return []

    def some_untried(self, batch: Pending) -> bool:
        """Return whether a call may have messages of topics that are neither refused nor suspected."""
        topics = {*batch.findings.refused, *self._silences.suspected}
        return next(self._free(batch, (), [], topics), None) is not None

    def _left_out(
        self, batch: Pending, refused: Collection[str], suspected: Collection[str]
    ) -> Iterator[Collection[str]]:
        """Yield the topics without a message in the call, one choice after the other."""
        if not suspected:
            yield from (refused, ()) if refused else ((),)
            return
        yield {*refused, *suspected}
        if refused:
            yield suspected
        topics = {message.topic for message in batch.messages}
        few = len(self._caller.overdue) < MAX_HUNG // 2
        for topic in suspected:
            # Calls that never come back must not use up the calls of the others.
            if topic in topics and (few or not self._silences.is_silent_alone(topic)):
                yield topics - {topic}

    def _free(
        self, batch: Pending, under_way: Sequence[Call], suspects: list[Message], refused: Collection[str]
    ) -> Iterator[Message]:
        """Yield the messages that a call may have; add to `suspects` those that it may have alone.

        `refused`: topics without a message in the call.
        """
        ordered, tried = self._policy.ordered, batch.findings.tried
        begun = [message for call in under_way for message in call.messages]
        taken = {message.id for message in begun}
        held = {message.key for message in begun if message.key is not None} if ordered else set[str]()
        for message in batch.messages:
            key = message.key
            if message.id in taken:
                continue
            if key not in held and message.id not in tried and message.topic not in refused:
                if not self._blame.is_suspect(message):
                    yield message
                    continue
                suspects.append(message)
            if ordered and key is not None:
                held.add(key)

    def _next_size(self, batch: Pending, most: int) -> int:
        """Return how many messages the next call may have.

        Calls in portions end by themselves in time. Of several side by side, each has a share, so that all end at about
        the same time.
        """
        if not self._policy.in_portions:
            return self._size.next
        return max(1, len(batch.messages) // (2 * most) if most > 1 else len(batch.messages))

    def _share(self, messages: list[Message], calls: int) -> list[Message]:
        """Return the share of one of several calls: a call holds its keys, and the others need some as well."""
        if calls == 1:
            return messages
        keys = [message.key if self._policy.ordered and message.key is not None else message.id for message in messages]
        units = dict.fromkeys(keys)
        own = set(islice(units, math.ceil(len(units) / calls)))
        return [message for message, key in zip(messages, keys, strict=True) if key in own]


def one_of_each_topic(messages: Iterable[Message], *, ordered: bool) -> Iterator[Message]:
    """Yield the first message of each topic. `ordered`: none behind an earlier message of its key that is left out."""
    met, left = set[str](), set[str]()
    for message in messages:
        if message.topic not in met and message.key not in left:
            met.add(message.topic)
            yield message
        elif ordered and message.key is not None:
            left.add(message.key)
