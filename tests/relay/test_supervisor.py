"""One supervisor for all that runs in threads: it begins works, begins them again, and ends them by one stop."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from tenacity import wait_fixed

from outbox import SubscriptionError
from outbox.relay.supervisor import Supervisor
from outbox.runtime.stop import Stop
from outbox.worker.settings import Until
from tests.support.waiting import eventually


class Working:
    """Work that rests until it is stopped, and does something at its beginning."""

    def __init__(self, name: str = "work", begin: Callable[[int], object] = lambda _tries: None) -> None:
        self.name = name
        self.tries = self.closed = 0
        self.stop = Stop()
        self._begin = begin

    @property
    def stopping(self) -> bool:
        """By itself."""
        return self.stop.asked

    def work(self, until: Until, stop: Stop) -> None:
        """Rest."""
        with self.stop.within(stop):
            self.tries += 1
            self._begin(self.tries)
            while until == "stopped" and self.stop.rest(60):
                pass

    def close(self) -> None:
        """Count it."""
        self.closed += 1


def fail(_tries: int) -> None:
    raise KeyError("odd")


def fail_at_first(tries: int) -> None:
    if tries < 3:
        raise KeyError("odd")


def test_one_stop_ends_all_of_them():
    works = [Working("a"), Working("b"), Working("c", fail)]
    supervisor = Supervisor(works, pause=wait_fixed(3600))
    supervisor.start()
    assert eventually(lambda: [each.tries for each in works] == [1, 1, 1])

    supervisor.stop()
    supervisor.join(60)

    assert (supervisor.alive, [each.closed for each in works]) == (False, [1, 1, 1])


def test_what_fails_begins_again_and_disturbs_no_other(caplog):
    well, odd = Working("well"), Working("odd", fail_at_first)
    supervisor = Supervisor([well, odd], pause=wait_fixed(0.01))
    supervisor.start()
    again = eventually(lambda: odd.tries == 3)
    supervisor.stop()
    supervisor.join(60)

    assert (again, well.tries, odd.closed) == (True, 1, 1)
    assert [record.getMessage() for record in caplog.records] == ["unexpected KeyError; odd will try again"]


def test_one_that_is_not_to_begin_again_raises_what_ended_it():
    odd = Working("odd", fail)
    supervisor = Supervisor([odd], pause=None)

    for work in (supervisor.run, supervisor.until_empty, supervisor.once):
        with pytest.raises(KeyError, match="odd"):
            work()

    assert (odd.tries, odd.closed, supervisor.alive) == (3, 1, False)


def test_one_may_end_by_itself_while_the_others_go_on():
    first, second = Working("first"), Working("second")
    supervisor = Supervisor([first, second])
    supervisor.start()
    assert eventually(lambda: first.tries == second.tries == 1)

    first.stop.ask()
    ended = eventually(lambda: first.closed == 1)
    goes_on = supervisor.unfinished
    supervisor.stop()
    supervisor.join(60)

    assert (ended, goes_on, second.closed) == (True, ("second",), 1)


def test_what_works_is_not_started_beside_itself():
    working = Working()
    supervisor = Supervisor([working])
    supervisor.start()

    for begin in (supervisor.start, supervisor.run):
        with pytest.raises(SubscriptionError, match="at work already"):
            begin()
    goes_on = supervisor.alive and not working.stop.asked
    supervisor.stop()
    supervisor.join(60)
    supervisor.start()
    again = eventually(lambda: working.tries == 2)
    supervisor.stop()
    supervisor.join(60)

    assert (goes_on, again, working.closed) == (True, True, 2)


def test_a_stop_before_the_start_counts():
    working = Working()
    supervisor = Supervisor([working])

    supervisor.stop()
    supervisor.run()

    assert (working.tries, working.closed) == (0, 1)


def test_a_thread_that_was_not_begun_is_not_waited_for():
    supervisor = Supervisor([Working()])

    supervisor.join()

    assert (supervisor.alive, supervisor.unfinished) == (False, ())


def test_the_time_to_drain_is_the_same_for_all():
    """It does not begin for one when it is over for another."""
    go_on = threading.Event()
    works = [Working(name, lambda _tries: go_on.wait(60)) for name in "abc"]
    supervisor = Supervisor(works, drain=timedelta(hours=1))
    supervisor.start()
    assert eventually(lambda: [each.tries for each in works] == [1, 1, 1])

    supervisor.stop()
    waited = supervisor.ended(0)
    noticed = [each._asked_at is not None for each in supervisor._supervised]
    go_on.set()
    supervisor.join(60)

    assert (waited, noticed, supervisor.alive) == (False, [True, True, True], False)


def test_work_that_ends_its_thread_has_failed():
    def exits(_tries: int) -> None:
        raise SystemExit(3)

    supervisor = Supervisor([Working("odd", exits), Working("well", exits)], pause=wait_fixed(0.01))

    with pytest.raises(BaseExceptionGroup, match="2 of 2 relays failed") as caught:
        supervisor.until_empty()
    assert [type(each) for each in caught.value.exceptions] == [SystemExit] * 2


def test_the_end_of_the_last_work_is_noticed_at_once():
    """Its thread is alive for a moment more; to look again only later would make each end a second long.

    What has not ended when it is looked at first wakes the one who looks.
    """
    for _ in range(200):
        assert len(list(Supervisor([Working()], pause=None).running("empty", look=3600))) <= 1
