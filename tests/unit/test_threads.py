"""Blocking work beside an event loop: answers, errors, a limit, and threads that are left behind."""

import asyncio
import threading

import pytest

from outbox.runtime.threads import Threads


def test_work_returns_its_result_or_raises_its_error_from_a_daemon_thread_of_that_name():
    def fail() -> None:
        raise OSError("no")

    def who() -> tuple[str, bool]:
        return threading.current_thread().name, threading.current_thread().daemon

    async def run() -> tuple[str, bool]:
        threads = Threads("outbox-work", most=1)
        with pytest.raises(OSError, match="no"):
            await threads.run(fail)
        return await threads.run(who)

    assert asyncio.run(run()) == ("outbox-work", True)


def test_work_that_a_cancelled_caller_leaves_behind_counts_until_its_end():
    end = threading.Event()

    async def run() -> tuple[bool, int]:
        threads = Threads("outbox-work", most=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await threads.run(end.wait)
        second = asyncio.create_task(threads.run(lambda: 2))
        for _ in range(10):
            await asyncio.sleep(0)
        waited = not second.done()
        end.set()
        return waited, await second

    assert asyncio.run(run()) == (True, 2)


def test_work_that_outlives_its_loop_ends_quietly():
    end, thread = threading.Event(), list[threading.Thread]()

    def work() -> None:
        thread.append(threading.current_thread())
        end.wait()

    async def run() -> None:
        asyncio.create_task(Threads("outbox-work", most=1).run(work))  # noqa: RUF006
        while not thread:
            await asyncio.sleep(0)

    asyncio.run(run())
    end.set()
    thread[0].join(60)

    assert not thread[0].is_alive()
