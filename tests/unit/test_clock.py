"""Our own clock goes on while the machine is suspended, where the system has one that does."""

from types import SimpleNamespace

from outbox.runtime.clock import clock

BOOTTIME = 7


def test_where_there_is_a_clock_that_goes_on_during_a_suspend_it_is_taken(monkeypatch):
    """The other one stands still then, and what was over long ago would look as if it had just begun."""
    clocks = {BOOTTIME: 42.0}
    system = SimpleNamespace(CLOCK_BOOTTIME=BOOTTIME, clock_gettime=clocks.__getitem__, monotonic=lambda: 1.0)
    monkeypatch.setattr("outbox.runtime.clock.time", system)

    assert clock() == 42.0


def test_elsewhere_it_is_the_one_that_never_goes_back(monkeypatch):
    monkeypatch.setattr("outbox.runtime.clock.time", SimpleNamespace(monotonic=lambda: 1.0))

    assert clock() == 1.0
