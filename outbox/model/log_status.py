"""The status of the log as a value: size, age, the last purge, and who holds old messages back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """The status of the log.

    `rows`: how many ids lie between the first and the last message, so at least as many as messages. `bytes`: with
    indexes; on SQLite of the whole file. `oldest`: when the first message was written. `purged_at`: the end of the last
    purge, with a retention of `keep_seconds`. `held_back`: about how many messages past this retention are kept for a
    subscription, by name.
    """

    rows: int
    bytes: int
    oldest: datetime | None
    purged_at: datetime | None
    keep_seconds: float | None
    held_back: Mapping[str, int] = field(default_factory=dict)
