"""Crash points: named places in the code where a test may stop the process. No-ops unless armed."""

from collections.abc import Callable

_reached: Callable[[str], None] | None = None


def crash_point(name: str) -> None:
    """Call the function that was given to `arm`, if any, with the name of a crash point."""
    if _reached is not None:
        _reached(name)


def arm(reached: Callable[[str], None] | None) -> None:
    """Call `reached(name)` at every crash point from now on; `None` disarms them."""
    global _reached
    _reached = reached
