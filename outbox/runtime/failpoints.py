"""Crash points: named places in the code where a test may stop the process. No-ops unless armed."""

from collections.abc import Callable

_reached: Callable[[str], None] | None = None


def crash_point(name: str) -> None:
    """Tell whoever armed the crash points that `name` was reached."""
    if _reached is not None:
        _reached(name)


def arm(reached: Callable[[str], None] | None) -> None:
    """Call `reached(name)` at every crash point from now on; `None` disarms them."""
    global _reached
    _reached = reached
