"""Delays: the longest time that a caller may ask for, and RocketMQ's 18 levels of delay by name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Literal, get_args

DelayLevel = Literal[
    "1s", "5s", "10s", "30s", "1m", "2m", "3m", "4m", "5m", "6m", "7m", "8m", "9m", "10m", "20m", "30m", "1h", "2h"
]

MAX_DELAY = timedelta(days=36_525)

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours"}

#: In the order of RocketMQ's `messageDelayLevel`: its level 1 is the first, its level 18 the last.
DELAY_LEVELS: Mapping[str, timedelta] = MappingProxyType(
    {name: timedelta(**{_UNITS[name[-1]]: int(name[:-1])}) for name in get_args(DelayLevel)}
)


def require_window(name: str, window: object) -> None:
    """Refuse a length of time for which nothing can be remembered.

    Raises:
        ValueError: `window` is no timedelta above 0 and up to `MAX_DELAY`; the text calls it `name`.
    """
    if not isinstance(window, timedelta) or not timedelta(0) < window <= MAX_DELAY:
        raise ValueError(f"{name} must be a timedelta above 0, of at most {MAX_DELAY.days} days, not {window!r:.40}")
