"""An event loop in a thread: when it ends."""

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from outbox.runtime.event_loop import BackgroundLoop
from tests.support.waiting import eventually


class Resident:
    """It counts how often it is told to go."""

    def __init__(self) -> None:
        self.farewells = 0

    async def greet(self) -> str:
        """Answer at once."""
        return "hello"

    async def sleep(self) -> None:
        """Answer never."""
        await asyncio.sleep(60)

    async def go(self) -> None:
        """Count."""
        self.farewells += 1


def test_a_loop_that_nobody_has_any_more_ends():
    resident = Resident()
    loop = BackgroundLoop("forgotten", make=lambda: resident, farewell=Resident.go)
    assert loop.run(Resident.greet, timeout=5) == "hello"

    del loop

    assert eventually(lambda: "forgotten" not in {thread.name for thread in threading.enumerate()}, 5)
    assert resident.farewells == 1


def test_a_loop_ends_once_although_several_calls_run_out_of_time():
    resident = Resident()
    loop = BackgroundLoop("late", make=lambda: resident, farewell=Resident.go)

    with ThreadPoolExecutor(4) as pool:
        for call in [pool.submit(loop.run, Resident.sleep, timeout=1) for _ in range(4)]:
            with pytest.raises((TimeoutError, CancelledError)):  # the first to give up ends the others
                call.result(60)
    loop.stop()

    # A loop that was given up says good-bye by itself.
    assert eventually(lambda: resident.farewells > 0)
    assert resident.farewells == 1
