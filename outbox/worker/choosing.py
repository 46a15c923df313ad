"""Which messages the next call gets: none beside an earlier message of its key, and a suspect only alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from outbox.model.message import Message
from outbox.worker.batch_size import BatchSize
from outbox.worker.blame import Blame
from outbox.worker.calls import Call, Caller
from outbox.worker.outcome import Pending
from outbox.worker.policy import MAX_HUNG, HandlerPolicy


class Chooser:
    """Chooses the messages of the calls for one partition, of which several may be under way at once."""

    def __init__(self, policy: HandlerPolicy, caller: Caller, *, blame: Blame, size: BatchSize) -> None:
        self._policy = policy
        self._caller = caller
        self._blame = blame
        self._size = size

    def next(self, batch: Pending, under_way: Sequence[Call]) -> list[Message]:
        """Return the messages of the next call: none that was tried already, nor a later message of such a key.

        A message that has failed alone is called alone again, because only then can a failure be blamed on the message.
        All other messages go first, then the suspect that was tried longest ago; before those of refused topics those
        of others. So every message is tried some time, although the message in front is never accepted.
        """
        most = 1 if self._policy.suspend else self._caller.concurrency
        calls = most - len(under_way)
        if calls < 1 or len(self._caller.overdue) >= MAX_HUNG:
            return []
        size = self._next_size(batch, most)
        refused = batch.findings.refused
        if calls == 1 and not (batch.findings.tried or refused or self._blame.some_suspects or under_way):
            return batch.messages[:size]
        for topics in (refused, ()) if refused else ((),):
            suspects: list[Message] = []
            free = list(islice(self._free(batch, under_way, suspects, topics), calls * size))
            if chosen := self._share(free, calls)[:size] or self._blame.next_suspect(suspects):
                return chosen
        return []

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
