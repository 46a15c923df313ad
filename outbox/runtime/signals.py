"""Signals that ask a process to stop."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from outbox.runtime.named import named

logger = logging.getLogger("outbox")


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Drain at the first SIGTERM or SIGINT, end at once at the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, _frame: FrameType | None) -> None:
        for each, former in before.items():
            signal.signal(each, former)
        logger.info("%s: finishing what is under way", signal.Signals(number).name, extra=named("stopping"))
        stop()

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in before:
        signal.signal(each, asked)
    try:
        yield
    finally:
        for each, former in before.items():
            signal.signal(each, former)
