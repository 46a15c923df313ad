"""Reads ahead: fetches the next batches during the present one, on a thread and a channel of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

from outbox.runtime.failpoints import crash_point
from outbox.runtime.named import named
from outbox.store.database import Channel
from outbox.store.failure import in_one_line
from outbox.store.log.cursor import Batch, Cursor

logger = logging.getLogger("outbox")

#: So many batches are read before they are asked for. With one, the reading thread could send its next query only when
#: the thread that handles the batch releases the interpreter lock, and the server would be idle until then.
AHEAD = 2
#: After so many seconds a connection of its own is tried again, where the server had none left.
_AGAIN_SECONDS = 60.0


class Prefetcher:
    """Reads batch by batch. At most one read is under way; only the reading thread may use the cursor."""

    def __init__(self, channel: Channel, cursor: Cursor) -> None:
        self._channel = channel
        self._cursor = cursor
        #: How many batches were asked for and have not been received.
        self._asked = 0
        self._requests: SimpleQueue[bool] = SimpleQueue()
        #: None: there was no connection to read on, and the cursor stands where it stood.
        self._answers: SimpleQueue[Batch | Exception | None] = SimpleQueue()
        #: A batch that `more` has received and `read` has not returned yet.
        self._next: Batch | Exception | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> Batch:
        """Return the next batch: the first that was read ahead, or else a new read."""
        answer, self._next = self._next or self._receive(), None
        if isinstance(answer, Exception):
            raise answer
        return answer or _read(self._cursor, self._channel)

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
        try:
            self._next = self._next or self._receive() or _read(self._cursor, self._channel)
        except Exception as error:
            self._next = error
        if isinstance(self._next, Exception):
            return False
        found = bool(self._next.messages)
        if not self._next.seen:
            self._next = None
        return found

    def _receive(self) -> Batch | Exception | None:
        """Return the first answer to come; None: nothing is read ahead, and the cursor is free."""
        answer: Batch | Exception | None = None
        while answer is None and self._asked:
            self._asked -= 1
            answer = self._answers.get()
        return answer

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
        open_at = 0.0
        while self._requests.get():
            if channel is None and time.monotonic() >= open_at:
                try:
                    channel = self._channel.database.open()
                except Exception as error:
                    open_at = time.monotonic() + _AGAIN_SECONDS
                    why = in_one_line(error, self._channel.database.commands)[0]
                    text = "no connection to read ahead, reading on without: %s"
                    logger.warning(text, why, extra=named("reads_alone", error=why))
            try:
                self._answers.put(None if channel is None else _read(self._cursor, channel))
            except Exception as error:
                self._answers.put(error)
        if channel is not None:
            channel.close()


def _read(cursor: Cursor, channel: Channel) -> Batch:
    crash_point("worker.before_fetch")
    batch = cursor.read(channel)
    crash_point("worker.after_fetch")
    return batch
