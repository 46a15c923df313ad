"""Delays by name: the 18 levels that RocketMQ has, as an ordered table."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Literal, get_args

DelayLevel = Literal[
    "1s", "5s", "10s", "30s", "1m", "2m", "3m", "4m", "5m", "6m", "7m", "8m", "9m", "10m", "20m", "30m", "1h", "2h"
]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours"}

#: In the order of RocketMQ's `messageDelayLevel`: its level 1 is the first, its level 18 the last.
DELAY_LEVELS: Mapping[str, timedelta] = MappingProxyType(
    {name: timedelta(**{_UNITS[name[-1]]: int(name[:-1])}) for name in get_args(DelayLevel)}
)
