"""The numbers of the overview: a look, the workers, and the lag of the last hour."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from outbox.admin.results import Look
from outbox.dashboard.access import Access
from outbox.dashboard.port import Admin
from outbox.errors import SubscriptionError
from outbox.model.status import WorkerStatus
from outbox.model.subscription import check_of
from outbox.runtime.clock import clock

#: A lag of the last hour is asked for again after so many seconds, and all lags of a look for so many together.
_YOUNG_SECONDS, _LAG_SECONDS = 60.0, 0.5
_HOUR, _STEP = timedelta(hours=1), timedelta(minutes=2)

Points = Sequence[tuple[datetime, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The numbers of the overview at one moment. `lags`: of the last hour, by subscription, as far as known."""

    look: Look
    workers: tuple[WorkerStatus, ...]
    lags: Mapping[str, Points]

    def of(self, access: Access) -> Answer:
        """Return the numbers for a visitor."""
        look = replace(
            self.look,
            findings=tuple(each for each in self.look.findings if access.sees(each.subscription)),
            subscriptions=tuple(each for each in self.look.subscriptions if access.sees(each.name)),
            transactions=tuple(each for each in self.look.transactions if access.sees(check_of(each.group))),
        )
        return Answer(
            look=look,
            workers=tuple(each for each in self.workers if access.sees(each.subscription)),
            lags={name: points for name, points in self.lags.items() if access.sees(name)},
        )


class Numbers:
    """Asks for the numbers of one database, and keeps the last answer for the time when the database is away."""

    def __init__(self) -> None:
        self.last: Answer | None = None
        #: Lags with the moment of the question, which costs more than a look.
        self._lags: dict[str, tuple[float, Points]] = {}
        self._lock = threading.Lock()

    def ask(self, admin: Admin) -> Answer:
        """Return the numbers of now."""
        with admin.connected() as shared:
            look = shared.look()
            lags = self._lags_of(shared, [each.name for each in look.subscriptions if each.kind != "check"])
            self.last = Answer(look=look, workers=shared.workers(), lags=lags)
            return self.last

    def _lags_of(self, admin: Admin, names: Sequence[str]) -> Mapping[str, Points]:
        """Return the lags; ask for old ones, the oldest first, for a short time."""
        with self._lock:
            until = clock() + _LAG_SECONDS
            for name in sorted(names, key=lambda each: self._lags.get(each, (0.0, ()))[0]):
                if clock() >= until:
                    break
                asked_at = self._lags.get(name, (None, ()))[0]
                if asked_at is None or clock() - asked_at > _YOUNG_SECONDS:
                    with suppress(SubscriptionError):  # dropped meanwhile
                        steps = admin.history(name, since=_HOUR, step=_STEP).steps
                        self._lags[name] = clock(), [(each.at, each.lag_seconds) for each in steps]
            self._lags = {name: self._lags[name] for name in names if name in self._lags}
            return {name: points for name, (_, points) in self._lags.items()}
