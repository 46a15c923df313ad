"""Receipt handles: texts that name a message in a client's hands, and that any front can read."""

from __future__ import annotations

import base64
import json
import time
from datetime import timedelta
from typing import NamedTuple, Self

from outbox.errors import InvalidMessageError
from outbox.model.limits import MAX_NUMBER, checked_key
from outbox.model.message import Message
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.store.subscriptions.receipts import Receipt

#: Characters of a receipt; each has fewer.
_MOST_OF_ERROR = 100
#: Characters of a handle; with the longest key of a message it has fewer.
_MOST = 12_288


class Handle(NamedTuple):
    """The receipt of a message, and until when its time is not over, in seconds since 1970 by the front's clock."""

    receipt: Receipt
    until: float

    @classmethod
    def of(cls, message: Message, receipt: str, duration: timedelta) -> Self:
        """Return the handle of a message that was handed out just now."""
        return cls(Receipt(message.id or 0, message.key, receipt), time.time() + duration.total_seconds())

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the handle in a text.

        Raises:
            RefusedError: the text is no handle of a front.
        """
        try:
            found = None if len(text) > _MOST else json.loads(base64.urlsafe_b64decode(text.encode()))
            match found:
                case [int(id), str() | None as key, str(error), int() | float() as until] if _is_number(id):
                    # Other keys and errors are in no row, and not every database takes them.
                    if key is not None:
                        checked_key(key)
                    if error.isascii() and error.isprintable() and len(error) <= _MOST_OF_ERROR:
                        return cls(Receipt(id, key, error), float(until))
        except (ValueError, OverflowError, RecursionError, InvalidMessageError):
            pass
        raise RefusedError(Code.INTERNAL_SERVER_ERROR, "Parse failed, dataList size 1. [no receipt handle of a front]")

    @property
    def is_over(self) -> bool:
        """True when the time of the message is over, if nobody has prolonged it."""
        return time.time() >= self.until

    def __str__(self) -> str:
        fields = [self.receipt.id, self.receipt.key, self.receipt.error, round(self.until, 3)]
        return base64.urlsafe_b64encode(json.dumps(fields, separators=(",", ":")).encode()).decode()


def _is_number(id: int) -> bool:
    # JSON's `true` is a number of Python.
    return not isinstance(id, bool) and 0 <= id <= MAX_NUMBER
