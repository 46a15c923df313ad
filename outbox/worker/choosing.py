"""Which messages the next call gets: none beside an earlier message of its key, and a suspect only alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from outbox.model.message import Message
from outbox.worker.batch_size import BatchSize
from outbox.worker.blame import Blame
from outbox.worker.calls import Call, Caller
from outbox.worker.hung import HungCalls
from outbox.worker.outcome import Pending
from outbox.worker.policy import HandlerPolicy


class Chooser:
    """Chooses the messages of the calls for one partition, of which several may be under way at once."""

    def __init__(
        self, policy: HandlerPolicy, caller: Caller, *, hung: HungCalls, blame: Blame, size: BatchSize
    ) -> None:
        self._policy = policy
        self._caller = caller
        self._hung = hung
        self._blame = blame
        self._size = size

    def next(self, batch: Pending, under_way: Sequence[Call]) -> list[Message]:
        """Return the messages of the next call: none that hangs or was tried already, nor a later message of such a
        key.

        A message that has failed alone is called alone again, because only then can a failure be blamed on the message.
        All other messages go first, then the suspect that was tried longest ago. So every message is tried some time,
        although the message in front is never accepted.
        """
        most = self._most_calls
        if len(under_way) >= most or len(self._caller.overdue) >= self._policy.max_hung:
            return []
        size = self._next_size(batch, most)
        calls = most - len(under_way) if self._policy.ordered else 1
        if calls == 1 and not (batch.findings.tried or self._hung or self._blame.some_suspects or under_way):
            return batch.messages[:size]
        suspects: list[Message] = []
        chunk = list(islice(self._free(batch, under_way, suspects), calls * size))
        if calls > 1:
            chunk = _share_of_keys(chunk, calls)[:size]
        return chunk or self._blame.next_suspect(suspects)

    def _free(self, batch: Pending, under_way: Sequence[Call], suspects: list[Message]) -> Iterator[Message]:
        """Yield the messages that a call may have; add to `suspects` those that it may have alone."""
        ordered, tried = self._policy.ordered, batch.findings.tried
        begun = [message for call in under_way for message in call.messages]
        taken = self._hung.ids.union(message.id for message in begun)
        held = self._hung.keys.union(message.key for message in begun if message.key is not None) if ordered else set()
        for message in batch.messages:
            key = message.key
            if message.id in taken:
                continue
            if key not in held and message.id not in tried:
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

    @property
    def _most_calls(self) -> int:
        """How many calls for the partition may be under way at once."""
        return self._caller.concurrency if self._policy.in_portions and not self._policy.suspend else 1


def _share_of_keys(messages: list[Message], calls: int) -> list[Message]:
    """Return the messages of a share of the keys: a call holds its keys, and the other `calls` need some as well."""
    keys = dict.fromkeys(message.key for message in messages if message.key is not None)
    own = set(islice(keys, math.ceil(len(keys) / calls)))
    return [message for message in messages if message.key is None or message.key in own]
