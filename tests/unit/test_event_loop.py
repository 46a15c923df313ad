"""An event loop in a thread: when it ends."""

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from outbox.runtime.event_loop import BackgroundLoop
from tests.support.waiting import eventually


class Kept:
    """It counts how often it is told to go."""

    def __init__(self) -> None:
        self.closings = 0

    async def greet(self) -> str:
        """Answer at once."""
        return "hello"

    async def sleep(self) -> None:
        """Answer never."""
        await asyncio.sleep(60)

    async def go(self) -> None:
        """Count."""
        self.closings += 1


def test_a_loop_that_nobody_has_any_more_ends():
    kept = Kept()
    loop = BackgroundLoop("forgotten", make=lambda: kept, close=Kept.go)
    assert loop.run(Kept.greet, timeout=60) == "hello"

    del loop

    assert eventually(lambda: "forgotten" not in {thread.name for thread in threading.enumerate()})
    assert kept.closings == 1


def test_a_loop_ends_once_although_several_calls_run_out_of_time():
    kept = Kept()
    loop = BackgroundLoop("late", make=lambda: kept, close=Kept.go)

    with ThreadPoolExecutor(4) as pool:
        for call in [pool.submit(loop.run, Kept.sleep, timeout=1) for _ in range(4)]:
            with pytest.raises((TimeoutError, CancelledError)):  # the first to give up ends the others
                call.result(60)
    loop.stop()

    # A loop that was given up says good-bye by itself.
    assert eventually(lambda: kept.closings > 0)
    assert kept.closings == 1


class Gate:
    """An action waits until the loop is closed."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.over = asyncio.Event()

    async def wait(self) -> str:
        """Answer when the loop is closed."""
        self.waits.set()
        await self.over.wait()
        return "over"

    async def open(self) -> None:
        """Return when the action has ended, before its caller has heard so."""
        self.over.set()
        await asyncio.sleep(0)


def test_an_action_that_ends_with_the_loop_still_tells_its_caller():
    gate = Gate()
    loop = BackgroundLoop("closing", make=lambda: gate, close=Gate.open)

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(loop.run, Gate.wait, timeout=120)
        assert gate.waits.wait(60)
        loop.stop()

        assert call.result(60) == "over"
