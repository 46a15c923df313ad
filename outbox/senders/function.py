"""A plain function as a destination, called once per message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from outbox.errors import InvalidMessageError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Reject, Retry, Unavailable, Verdict, describe
from outbox.senders.headers import own_headers
from outbox.senders.key_order import in_order
from outbox.senders.port import concurrency_of, deadline_of, destination_of


class FunctionSender:
    """Calls `function(message)`. None means `Done`; an exception says nothing about whose fault the failure is.

    In a call with several messages, a message for which the function raises is `Unavailable`, and so is the rest of
    its key. The same goes for SystemExit, KeyboardInterrupt and CancelledError; in the main thread the first two are
    meant for the program. Other keys go on, for `timeout` at most, because a function that waits for a dead server
    may take seconds to raise. In a call with one message the exception is passed on: only then can the message be
    blamed. A message whose row holds other headers than `Message` makes is rejected when the function raises.
    """

    def __init__(
        self, function: Callable[[Message], Verdict | None], *, timeout: timedelta = timedelta(seconds=5)
    ) -> None:
        self.destination = destination_of(function)
        self.deadline = deadline_of(function)
        self.concurrency = concurrency_of(function)
        self._function = function
        self._timeout = timeout.total_seconds()

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Call the function for each message; return one verdict per message, in their order."""
        if len(messages) == 1:
            return [self._ask(messages[0])]
        raised: BaseException | None = None
        deadline = time.monotonic() + self._timeout

        def ask(message: Message) -> Verdict:
            nonlocal raised
            if raised is not None and time.monotonic() > deadline:
                return Unavailable(f"not asked after {describe(raised)}")
            try:
                return self._ask(message)
            except BaseException as error:
                if _is_for_the_program(error):
                    raise
                raised = error
                return Unavailable(describe(error))

        return in_order(messages, ask)

    def close(self) -> None:
        """Do nothing."""

    def _ask(self, message: Message) -> Verdict:
        try:
            verdict = self._function(message)
        except Exception:
            unfit = unfit_headers(message)
            if unfit is None:
                raise
            return unfit
        return checked_verdict(verdict, self.destination)


def _is_for_the_program(error: BaseException) -> bool:
    is_end = isinstance(error, (SystemExit, KeyboardInterrupt))
    return is_end and threading.current_thread() is threading.main_thread()


def unfit_headers(message: Message) -> Verdict | None:
    """Return the verdict on a message whose row holds other headers than `Message` makes, else None."""
    try:
        own_headers(message)
    except InvalidMessageError as unfit:
        return Reject(str(unfit))
    return None


def checked_verdict(verdict: Verdict | None, destination: str) -> Verdict:
    """Return the verdict of a function; None means `Done`."""
    if verdict is None:
        return DONE
    if not isinstance(verdict, Done | Retry | Reject | Unavailable):
        raise TypeError(f"{destination} must return a verdict or None, not {type(verdict).__name__}")
    return verdict
