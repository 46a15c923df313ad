"""Opening a destination: a URL, a sender or a function of one message becomes a sender."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, cast

from outbox.model.message import Message
from outbox.model.verdict import Verdict
from outbox.senders.function import FunctionSender
from outbox.senders.port import Sender, destination_of, open_sender

#: Where messages go: a sender, a function of one message, or a URL.
Destination = Sender | Callable[[Message], Verdict | None] | str


def opened(sender: Destination) -> Sender:
    """The sender that a destination stands for.

    Raises:
        TypeError: it is none.
        SenderError: the URL is malformed, or nobody offers its scheme.
    """
    if isinstance(sender, str):
        return open_sender(sender)
    if isinstance(sender, type):
        raise TypeError(f"a destination is an object, not a class: pass {sender.__name__}()")
    verbs = [getattr(sender, verb, None) for verb in ("send", "close")]
    if all(map(callable, verbs)) and not isinstance(sender, Generator | Coroutine):
        _require_blocking(sender, verbs[0])
        return cast("Sender", sender)
    if not callable(sender):
        raise TypeError(
            "a destination is a URL, a sender, which has send(messages) and close(), or a function of one message,"
            f" not {type(sender).__name__}"
        )
    _require_blocking(sender, sender)
    _require_blocking(sender, type(sender).__call__)
    return FunctionSender(sender)


def _require_blocking(sender: Destination, verb: Any) -> None:
    if iscoroutinefunction(verb) or isgeneratorfunction(verb) or isasyncgenfunction(verb):
        raise TypeError(
            f"{destination_of(sender)} would only begin when it is called; write it without async and without yield"
        )
