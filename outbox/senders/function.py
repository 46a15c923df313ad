"""A destination that is a plain function, called once per message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from outbox.errors import InvalidMessageError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Reject, Retry, Unavailable, Verdict, describe
from outbox.senders.headers import own_headers
from outbox.senders.key_order import EARLIER
from outbox.senders.port import concurrency_of, deadline_of, destination_of


class FunctionSender:
    """A sender that calls `function(message)`. None means `Done`; an exception does not tell what is at fault.

    In a call with several messages, one for which the function raises is `Unavailable`, and so is the rest of its key.
    SystemExit, KeyboardInterrupt and CancelledError are no exceptions to that, except for the first two in the main
    thread, where they are meant for the program. A relay calls functions in other threads.
    Other keys go on, for `timeout` at most, because a function that waits for a dead server may take seconds to raise.
    In a call with one message the exception is passed on: only then can it be blamed on the message. A message whose
    row holds other headers than `Message` makes is rejected when the function raises.
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
        verdicts: list[Verdict] = []
        stopped: set[str] = set()
        raised: BaseException | None = None
        deadline = time.monotonic() + self._timeout
        for message in messages:
            if message.key is not None and message.key in stopped:
                verdicts.append(EARLIER)
                continue
            if raised is not None and time.monotonic() > deadline:
                verdict: Verdict = Unavailable(f"not asked after {describe(raised)}")
            else:
                try:
                    verdict = self._ask(message)
                except BaseException as error:
                    if _is_for_the_program(error):
                        raise
                    raised = error
                    verdict = Unavailable(describe(error))
            if verdict.__class__ is not Done and message.key is not None:
                stopped.add(message.key)
            verdicts.append(verdict)
        return verdicts

    def close(self) -> None:
        """Do nothing: nothing is held."""

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
    """Return the verdict on a message whose row holds other headers than `Message` makes; None if they are in order."""
    try:
        own_headers(message)
    except InvalidMessageError as unfit:
        return Reject(str(unfit))
    return None


def checked_verdict(verdict: Verdict | None, destination: str) -> Verdict:
    """Return the verdict that a function has returned; None means `Done`."""
    if verdict is None:
        return DONE
    if not isinstance(verdict, Done | Retry | Reject | Unavailable):
        raise TypeError(f"{destination} must return a verdict or None, not {type(verdict).__name__}")
    return verdict
