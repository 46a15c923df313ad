"""Statuses of answers: the codes of RocketMQ 5, and an error with a code."""

from __future__ import annotations

from enum import IntEnum

from sqlalchemy.exc import StatementError

from outbox.model.verdict import describe
from outbox.rocketmq.front.protocol import Wire, kind
from outbox.runtime.text import one_line
from outbox.store.failure import in_one_line

#: The text of an error inside RocketMQ's own server begins with this name.
_PROXY = "org.apache.rocketmq.proxy.common.ProxyException: "
#: RocketMQ's one text for a transaction that cannot be ended as asked.
NO_TRANSACTION = "cannot found transaction data"

_Status = kind("Status")


class Code(IntEnum):
    """The codes of a front's answers."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    UNAUTHORIZED = 40100
    FORBIDDEN = 40300
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    PAYLOAD_TOO_LARGE = 41300
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    TOO_MANY_REQUESTS = 42900
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    NOT_IMPLEMENTED = 50100


class RefusedError(Exception):
    """The answer to a call is a code other than OK, with a text: RocketMQ's own text first."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def internal(text: str, ours: str = "") -> RefusedError:
    """Return an error inside the server in RocketMQ's words. `ours`: more about the reason, in brackets."""
    return RefusedError(Code.INTERNAL_SERVER_ERROR, f"{_PROXY}{text}{f' [{ours}]' if ours else ''}")


def line_of(error: Exception) -> str:
    """Return an error in one line, for a client and for the log.

    The line is without the statement and its values, as these have whole messages of clients.
    """
    text, is_enough = in_one_line(error)
    return text if is_enough or isinstance(error, StatementError) else one_line(describe(error))


def status(code: Code = Code.OK, text: str = "OK") -> Wire:
    """Return a status of the protocol."""
    return _Status(code=int(code), message=text)
