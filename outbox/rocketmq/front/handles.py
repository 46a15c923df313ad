"""Receipt handles: texts that name a message in a client's hands, and that any front can read."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Self

from outbox.errors import InvalidMessageError
from outbox.model.limits import MAX_NUMBER, checked_key
from outbox.model.message import Message
from outbox.rocketmq.front.statuses import Code, RefusedError, internal
from outbox.store.subscriptions.receipts import Receipt

#: Characters of a receipt; each has fewer.
_MOST_OF_ERROR = 100
#: Characters of a handle; with the longest key of a message it has fewer.
_MOST = 12_288


class Handle(NamedTuple):
    """The receipt of a message, and until when its time is not over, in seconds since 1970 by the front's clock.

    `owner`: a digest of the subscription; empty in a handle of a former front.
    """

    receipt: Receipt
    until: float
    owner: str = ""

    @classmethod
    def of(cls, message: Message, receipt: str, duration: timedelta, subscription: str) -> Self:
        """Return the handle of a message that was handed out just now."""
        until = round(time.time() + duration.total_seconds(), 3)
        return cls(Receipt(message.id or 0, message.key, receipt), until, _digest(subscription))

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the handle in a text.

        Raises:
            RefusedError: the text is no handle of a front.
        """
        try:
            found = None if len(text) > _MOST else json.loads(base64.urlsafe_b64decode(text.encode()))
            match found:
                # A former front wrote no owner, and a later one may write more texts.
                case [int(id), str() | None as key, str(error), int() | float() as until, *more] if _fit(id, more):
                    # Other keys and errors are in no row, and not every database takes them.
                    if key is not None:
                        checked_key(key)
                    if error.isascii() and error.isprintable() and len(error) <= _MOST_OF_ERROR:
                        return cls(Receipt(id, key, error), float(until), *more[:1])
        except (ValueError, OverflowError, RecursionError, InvalidMessageError):
            pass
        raise RefusedError(Code.INTERNAL_SERVER_ERROR, "Parse failed, dataList size 1. [no receipt handle of a front]")

    def is_of(self, subscription: str) -> bool:
        """Return whether the message was handed out to a subscription, as far as the handle tells."""
        return self.owner in ("", _digest(subscription))

    @property
    def is_over(self) -> bool:
        """True when the time of the message is over, if nobody has prolonged it."""
        return time.time() >= self.until

    def __str__(self) -> str:
        fields = [*self.receipt, self.until, *([self.owner] if self.owner else [])]
        return base64.urlsafe_b64encode(json.dumps(fields, separators=(",", ":")).encode()).decode()


def expired() -> RefusedError:
    """Return the error for a handle that is worth nothing."""
    return RefusedError(Code.INVALID_RECEIPT_HANDLE, internal("receipt handle is expired").text)


def _digest(subscription: str) -> str:
    return hashlib.blake2b(subscription.encode(), digest_size=6).hexdigest()


def _fit(id: int, more: Sequence[object]) -> bool:
    # JSON's `true` is a number of Python.
    return not isinstance(id, bool) and 0 <= id <= MAX_NUMBER and all(isinstance(each, str) for each in more)
