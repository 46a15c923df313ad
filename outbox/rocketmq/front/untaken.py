"""Messages on the way to clients: a connection that takes none gets no further ones, which would fill the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outbox.model.message import Message

#: Of bodies and headers on the way by one connection, and by all. Until a client has taken a message, the memory holds
#: some four copies.
OF_CONNECTION, OF_ALL = 4 * 1024 * 1024, 16 * 1024 * 1024


class Untaken:
    """Counts the bytes on their way to clients; in one event loop only."""

    def __init__(self, of_connection: int = OF_CONNECTION, of_all: int = OF_ALL) -> None:
        """`of_connection`, `of_all`: with so many bytes on the way no more are handed out."""
        self._of_connection, self._of_all = of_connection, of_all
        self._bytes = Counter[str]()

    def allows(self, connection: str) -> bool:
        """Return whether messages may be handed out to a connection."""
        return self._bytes[connection] < self._of_connection and self._bytes.total() < self._of_all

    @contextmanager
    def sending(self, connection: str, messages: Sequence[Message]) -> Iterator[None]:
        """Send messages inside the block."""
        size = sum(len(each.body) + len(each.headers_json or "") for each in messages)
        self._bytes[connection] += size
        try:
            yield
        finally:
            self._bytes[connection] -= size
            if not self._bytes[connection]:
                del self._bytes[connection]
