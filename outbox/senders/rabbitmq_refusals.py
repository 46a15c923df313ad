"""What RabbitMQ refuses: the messages at fault when it closes a channel, and what errors of the driver say."""

from __future__ import annotations

import errno
import os
import re
import ssl

from aiormq import AMQPError

from outbox.model.message import Message
from outbox.model.verdict import Reject, Unavailable, Verdict

_TOO_BIG = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
_FORBIDDEN_TOPIC = "access to topic '"
#: The end of a reason that the server has cut, because AMQP allows it 255 bytes.
_CUT = "..."


def verdict_of_fault(reason: str, message: Message) -> Verdict | None:
    """Return the verdict on a message if it is at fault for this reason; None if it is not.

    A reason that concerns the whole exchange, such as that there is none, is the fault of no message.
    """
    too_big = _TOO_BIG.search(reason)
    if too_big is not None and len(message.body) > int(too_big[1]):
        return Reject(f"{len(message.body)} bytes are more than the server's max_message_size of {too_big[1]}")
    if _forbids(reason, message.topic):
        return Unavailable(f"RabbitMQ: {reason}")
    return None


def words_of(error: BaseException | None) -> str:
    """Return what an error of the driver, or of the network, says to a person."""
    # What the socket said is plainer than what the driver makes of it.
    cause = error.__cause__ if isinstance(error, AMQPError) else error
    if isinstance(cause, TimeoutError):
        return "no answer"
    if isinstance(cause, EOFError):
        return "the server closed the connection"
    if isinstance(cause, OSError) and cause.errno in errno.errorcode and not isinstance(cause, ssl.SSLError):
        # The event loop's own text names the address again, and the number of the error.
        return os.strerror(cause.errno or 0).lower()
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    if isinstance(error, AMQPError) and error.args:
        return str(error.args[-1])
    return str(error or "") or type(error).__name__


def _forbids(reason: str, topic: str) -> bool:
    """Return whether the user may not write to this topic, although to others of the same exchange."""
    _, found, rest = reason.partition(_FORBIDDEN_TOPIC)
    quoted = f"{topic}'"
    is_cut = rest.endswith(_CUT) and quoted.startswith(rest.removesuffix(_CUT))
    return bool(found) and (rest.startswith(quoted) or is_cut)
