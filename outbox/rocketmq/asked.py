"""What a call asks for that receives messages."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple


class Asked(NamedTuple):
    """One of the calls that a pop serves: `most` messages, each of which is nobody else's for a `time`."""

    most: int
    time: timedelta
