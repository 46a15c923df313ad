"""Words about connections: the reason of an error, and the log lines of a connection that comes and goes."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable

from outbox.runtime.named import named

_SECONDS_BETWEEN_WARNINGS = 60.0


class ConnectionLog:
    """Logs that a destination is away: at first, and then once a minute; and the connection that follows.

    A line for every connection would fill the log when connections are lost again and again.
    """

    def __init__(self, logger: logging.Logger, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._name = name
        self._clock = clock
        self._warned_at = float("-inf")
        self._is_news = True

    def lost(self, reason: str) -> str:
        """Log that the destination is away; return the text for a verdict."""
        text = f"{self._name}: {reason}"
        if self._clock() - self._warned_at >= _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = self._clock()
            self._is_news = True
            self._logger.warning("%s", text, extra=named("connection_lost", destination=self._name, error=reason))
        return text

    def connected(self, where: str) -> None:
        """Log the first connection, and the first after a warning."""
        if self._is_news:
            self._is_news = False
            about = named("connected", destination=self._name)
            self._logger.info("%s: connected to %s", self._name, where, extra=about)


class OfOthers(logging.Filter):
    """Passes on a driver's records of other threads; of the thread `thread` only records from `level` on."""

    def __init__(self, thread: str, level: float) -> None:
        super().__init__()
        self._thread = thread
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is passed on."""
        return record.threadName != self._thread or record.levelno >= self._level


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure for people: the system's words where there are any, else the driver's.

    The event loop's own text repeats the address and the number of the error, and drivers wrap both.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):  # one error for each address of the host
            cause = cause.exceptions[0]
        if (words := _words_of_the_system(cause)) is not None:
            return words
        cause = cause.__cause__ or cause.__context__
    if len(error.args) == 2 and isinstance(error.args[1], str):  # a code and a text
        return error.args[1]
    return str(error) or type(error).__name__


def _words_of_the_system(error: BaseException) -> str | None:
    if type(error) is ConnectionError:  # raised by a sender, which has chosen the words
        return str(error)
    if isinstance(error, (ssl.SSLError, socket.gaierror)):
        return _words_of_tls(error)
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        name = f"{error.filename}: " if error.filename else ""
        return name + os.strerror(error.errno or 0).lower()
    if isinstance(error, TimeoutError):
        if "handshake" in str(error):  # of `ssl`, behind the line of a file in C
            return "no answer to the handshake of TLS; perhaps the port takes no TLS"
        return str(error) or "no answer"
    return "the server closed the connection" if isinstance(error, EOFError) else None


def _words_of_tls(error: OSError) -> str:
    """Return the words of TLS, or of a look-up of a host, whose errors are alike."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return "the server closed the connection of TLS; perhaps the server wants another certificate (option cert)"
    reason = str(getattr(error, "reason", None) or error.strerror).lower().replace("_", " ")
    _, refused, alert = reason.partition(" alert ")
    return f"the server refuses the handshake of TLS: {alert}" if refused else reason
