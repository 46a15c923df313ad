"""Receipt handles: texts that name a message in a client's hands, and that any front can read."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from datetime import timedelta
from typing import NamedTuple, Self

from outbox.model.limits import MAX_NUMBER
from outbox.model.message import Message
from outbox.rocketmq.front.statuses import Code, RefusedError, internal
from outbox.store.subscriptions.receipts import Receipt

#: Characters of a receipt; each has fewer.
_MOST_OF_ERROR = 100
#: Characters of a handle; each has fewer.
_MOST = 1024


class Handle(NamedTuple):
    """The receipt of a message, and until when its time is not over, in seconds since 1970 by the front's clock.

    `owner`: a digest of the subscription.
    """

    receipt: Receipt
    until: float
    owner: str

    @classmethod
    def of(cls, message: Message, receipt: str, duration: timedelta, subscription: str) -> Self:
        """Return the handle of a message that was handed out just now."""
        until = round(time.time() + duration.total_seconds(), 3)
        return cls(Receipt(message.id or 0, receipt), until, _digest(subscription))

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the handle in a text.

        Raises:
            RefusedError: the text is no handle of a front.
        """
        try:
            found = None if len(text) > _MOST else json.loads(base64.urlsafe_b64decode(text.encode()))
            match found:
                # A later front may write more.
                case [int(id), str(error), int() | float() as until, str(owner), *_] if _fit(id, error):
                    return cls(Receipt(id, error), float(until), owner)
        except (ValueError, OverflowError, RecursionError):
            pass
        raise RefusedError(Code.INTERNAL_SERVER_ERROR, "Parse failed, dataList size 1. [no receipt handle of a front]")

    def is_of(self, subscription: str) -> bool:
        """Return whether the message was handed out to a subscription."""
        return self.owner == _digest(subscription)

    @property
    def is_over(self) -> bool:
        """True when the time of the message is over, if nobody has prolonged it."""
        return time.time() >= self.until

    def __str__(self) -> str:
        fields = [*self.receipt, self.until, self.owner]
        return base64.urlsafe_b64encode(json.dumps(fields, separators=(",", ":")).encode()).decode()


def expired() -> RefusedError:
    """Return the error for a handle that is worth nothing."""
    return RefusedError(Code.INVALID_RECEIPT_HANDLE, internal("receipt handle is expired").text)


def _digest(subscription: str) -> str:
    return hashlib.blake2b(subscription.encode(), digest_size=6).hexdigest()


def _fit(id: int, error: str) -> bool:
    """Return whether a row may have these. Not every database takes all texts, and JSON's `true` is a number."""
    is_id = not isinstance(id, bool) and 0 <= id <= MAX_NUMBER
    return is_id and error.isascii() and error.isprintable() and len(error) <= _MOST_OF_ERROR
