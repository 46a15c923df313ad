"""Questions to clients: any producer of a topic may know the outcome of a transaction, so all are asked by turns."""

from __future__ import annotations

from outbox.rocketmq.front.clients import Clients
from outbox.rocketmq.front.protocol import Wire

#: Streams that are tried for a question: each may take seconds, and a question has a time limit.
_MOST_TRIED = 2


class Questions:
    """Writes questions to the clients of a front, from any thread."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        #: The number of questions that no producer took: the next one begins with another producer.
        self._missed = 0

    def ask(self, topic: str, command: Wire, *, turn: int) -> bool:
        """Write a command to a producer of a topic; return False if no producer took the command.

        `turn`: chooses the producer; the next number chooses the next one.
        """
        streams = self._clients.producers(topic)
        first = (turn + self._missed) % len(streams) if streams else 0
        if any(stream.write(command) for stream in (streams[first:] + streams[:first])[:_MOST_TRIED]):
            return True
        self._missed += 1
        return False
