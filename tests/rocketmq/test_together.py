"""Calls of threads that go together."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from outbox.rocketmq.together import Together
from tests.support.waiting import eventually


class Run:
    """A run that ends when a test says so; its first one fails, if it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.runs = error, list[list[int]]()
        self.may_end = threading.Event()
        self.together = Together(self._run)

    def results(self, *items: int) -> list[str]:
        """The results of calls in threads, the first of which runs while the others come."""
        with ThreadPoolExecutor(len(items)) as threads:
            futures = [threads.submit(self.together.call, items[0])]
            assert eventually(lambda: self.runs)
            futures += [threads.submit(self.together.call, item) for item in items[1:]]
            assert eventually(lambda: len(self.together._waiting) == len(items) - 1)
            self.may_end.set()
            return [repr(each.exception() or each.result()) for each in futures]

    def _run(self, items: Sequence[int]) -> list[int]:
        self.runs.append(sorted(items))
        self.may_end.wait(60)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return [10 * each for each in items]


def test_the_calls_that_come_during_a_run_go_together_in_the_next_one():
    run = Run()

    assert (run.results(1, 2, 3, 4), run.runs) == (["10", "20", "30", "40"], [[1], [2, 3, 4]])


def test_what_a_run_raises_is_raised_by_its_own_call_and_the_others_run_anew():
    run = Run(ValueError("no"))

    assert (run.results(1, 2, 3), run.runs) == (["ValueError('no')", "20", "30"], [[1], [2, 3]])
