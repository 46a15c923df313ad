"""Reads ahead: fetches the next batches during the present one, on a thread and a channel of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

from outbox.runtime.failpoints import crash_point
from outbox.store.database import Channel
from outbox.store.log.cursor import Batch, Cursor

#: So many batches are read before they are asked for. With one, the reading thread could send its next query only when
#: the thread that handles the batch releases the interpreter lock, and the server would be idle until then.
AHEAD = 2


class Prefetcher:
    """Reads batch by batch. At most one read is under way; only the reading thread may use the cursor."""

    def __init__(self, channel: Channel, cursor: Cursor) -> None:
        self._channel = channel
        self._cursor = cursor
        #: How many batches were asked for and have not been received.
        self._asked = 0
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[Batch | Exception] = SimpleQueue()
        #: A batch that `more` has received and `read` has not returned yet.
        self._next: Batch | Exception | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> Batch:
        """Return the next batch: the first that was read ahead, or else a new read."""
        if self._next is None and not self._asked:
            return _read(self._cursor, self._channel)
        answer, self._next = self._next or self._receive(), None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read_ahead(self, batches: int = AHEAD) -> None:
        """Begin to read the batches after the last one; `read` will return them in turn."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_for_ever, name="outbox-reader", daemon=True)
            self._thread.start()
        while self._asked + (self._next is not None) < batches:
            self._asked += 1
            self._requests.put(True)

    def more(self) -> bool:
        """Return whether there are messages behind the last batch; `read` will return them."""
        self.read_ahead(1)
        self._next = self._next or self._receive()
        if isinstance(self._next, Exception):
            return False
        found = bool(self._next.messages)
        if not self._next.seen:
            self._next = None
        return found

    def _receive(self) -> Batch | Exception:
        self._asked -= 1
        return self._answers.get()

    @property
    def due_in(self) -> float:
        """Seconds until a read may bring messages after their grace; asked when nothing is read ahead."""
        return self._cursor.due_in

    def young(self) -> Iterator[Batch]:
        """Yield batches from before the first read that wait for their grace; called when nothing is read ahead."""
        return self._cursor.young(self._channel)

    def forget(self) -> Cursor:
        """Drop the batches that were read ahead, and return the cursor."""
        self._next = None
        while self._asked:
            self._receive()
        return self._cursor

    def close(self) -> None:
        """End the thread, after the reads under way."""
        self._requests.put(False)

    def _read_for_ever(self) -> None:
        channel: Channel | None = None
        while self._requests.get():
            try:
                channel = channel or self._channel.database.open()
                self._answers.put(_read(self._cursor, channel))
            except Exception as error:
                self._answers.put(error)
        if channel is not None:
            channel.close()


def _read(cursor: Cursor, channel: Channel) -> Batch:
    crash_point("worker.before_fetch")
    batch = cursor.read(channel)
    crash_point("worker.after_fetch")
    return batch
