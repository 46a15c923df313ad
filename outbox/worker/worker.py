"""Workers: one engine for every subscription. A worker steps its partitions in turn: fetch, handle, settle."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from outbox.model.lease import Partition
from outbox.runtime.fork import in_child
from outbox.runtime.named import named
from outbox.runtime.process import unique_name
from outbox.runtime.stop import Stop
from outbox.runtime.text import age
from outbox.runtime.throttled_log import ThrottledLog
from outbox.runtime.wakeup import Wake
from outbox.store.database import Channel, Database
from outbox.store.dialects.dialect import Hint
from outbox.store.failure import in_one_line
from outbox.telemetry.events import EVERYWHERE, Beat, DatabaseAway, DatabaseBack, Listeners
from outbox.worker.connection import Connection, ConnectionLostError, Heartbeat
from outbox.worker.failures import log_away, passes, pause
from outbox.worker.hung import HungCalls
from outbox.worker.job import Job
from outbox.worker.settings import Settings, Until
from outbox.worker.subscription import SubscriptionWorker
from outbox.worker.turn import Turn
from outbox.writing.bare import BareOutbox

logger = logging.getLogger("outbox")

#: The longest sleep. A wake-up, a hint or the end of a wait ends it earlier.
_SLEEP_SECONDS = 60.0
#: Between two beats of a busy worker.
_BEAT_SECONDS = 1.0


class Worker:
    """Works for any number of subscriptions in one thread, on one connection.

    A worker steps each partition whose lease it has, and waits for none alone: neither for a lease, nor for a call of a
    handler, nor for the pause of a partition whose destination is away. A worker also waits for a database that is
    away; nothing has to be done by hand.
    """

    def __init__(
        self,
        database: Database,
        jobs: Sequence[Job],
        settings: Settings | None = None,
        *,
        stop: Stop,
        hung: dict[Partition, HungCalls] | None = None,
        listeners: Listeners | None = None,
    ) -> None:
        """`stop`: finish the work under way, and give the leases back. `hung`: calls of earlier workers that did not
        come back, by partition. `listeners`: told of events.
        """
        self._database = database
        self._settings = settings or Settings()
        hung = {} if hung is None else hung
        self._listeners = Listeners(EVERYWHERE) if listeners is None else listeners
        self._subscriptions = [SubscriptionWorker(database, job, self._settings, hung, self._listeners) for job in jobs]
        #: The moment since which the database is away; None while it is not.
        self._away_since: float | None = None
        #: The moment by which the next beat was promised.
        self._beat_due = 0.0
        self._new_owner()
        in_child(self._new_owner)
        self.wake = Wake()
        #: True when something in this process has said that messages may have come.
        self._hinted = False
        self._stop = Stop(stop, wake=self.wake.set)
        self._throttled_log = ThrottledLog(logger)

    @classmethod
    def of(cls, outbox: BareOutbox, jobs: Sequence[Job], settings: Settings | None, *, stop: Stop) -> Worker:
        """Return a worker of an outbox."""
        return cls(outbox.database, jobs, settings, stop=stop, hung=outbox.hung_calls, listeners=outbox.listeners)

    def _new_owner(self) -> None:
        #: The name under which this worker holds its leases: host and process, for people, and a random part that is
        #: new after each start and each fork, so that nobody takes this worker for an earlier one.
        self.owner = unique_name()

    @property
    def known(self) -> bool:
        """True when all subscriptions were declared before."""
        return all(each.known for each in self._subscriptions)

    def hint(self) -> None:
        """Look for messages at once, because some may have come. May be called from anywhere."""
        self._hinted = True
        self.wake.set()

    def work(self, until: Until) -> None:
        """Work until there, or until a stop is asked, over any number of lost connections.

        "empty" also waits for messages whose grace is not over. Messages of hanging calls are held until the calls come
        back; their lease is not given back but expires, because another worker would send the messages beside the call.

        Raises:
            HungHandlerError: so many calls of the handler hang that only a new process helps. Or, until "empty",
                everything else is handled, and a call hangs.
        """
        if not self.known:
            for finding in self._database.dialect.home.check_address(self._database.engine):
                logger.warning("%s", finding, extra=named("address", problem=finding.problem))
        for each in self._subscriptions:
            each.begin()
        failures = 0
        while not self._stop.asked:
            connection = None
            try:
                with closing(self._open()) as channel:
                    connection = self._connection(channel, until)
                    self._work_on(connection)
                return
            except ConnectionLostError as lost:
                self._tell_away(lost.error)
            failures = 1 if connection is not None and connection.worked else failures + 1
            self._stop.rest(pause(failures))

    def _connection(self, channel: Channel, until: Until) -> Connection:
        length, every = self._settings.lease, self._settings.renew_every
        heartbeat = Heartbeat(self._database, length=length, every=every, wake=self.wake)
        return Connection(
            channel=channel, heartbeat=heartbeat, owner=self.owner, stop=self._stop, wake=self.wake, until=until
        )

    def _work_on(self, connection: Connection) -> None:
        """Work until a stop was followed, or everything is handled."""
        try:
            while True:
                # First all looks: one that finds the connection lost would end calls that others have begun.
                for each in self._subscriptions if not self._stop.asked else ():
                    each.look(connection)
                for each in self._subscriptions:
                    each.step(connection)
                self._tell_back()
                turns = [turn for each in self._subscriptions for turn in each.turns.values()]
                if not turns and (self._stop.asked or all(each.finished for each in self._subscriptions)):
                    return
                self._sleep(connection.channel, turns)
        finally:
            for each in self._subscriptions:
                each.close(connection)
                each.job.caller.close()
            connection.heartbeat.close()

    def _sleep(self, channel: Channel, turns: Sequence[Turn]) -> None:
        """Sleep until there is work to do, or until a hint comes, which idle partitions hear."""
        idle = [turn for turn in turns if turn.idle]
        hint = self._hint(channel) if idle else None
        if hint is not None or any(turn.due for turn in turns):
            self._beat(0.0)
        else:
            until = min((turn.wait.until for turn in turns), default=math.inf)
            if not self._stop.asked:
                until = min(until, *(each.look_at for each in self._subscriptions))
            seconds = min(max(0.0, until - time.monotonic()), _SLEEP_SECONDS)
            self._beat(seconds)
            if self.wake.wait(seconds, channel.fileno if idle else None) and idle:
                # Notifications are read before the next look at the log, so that none is left to cause another look.
                hint = self._hint(channel)
        if hint is not None:
            for turn in idle:
                turn.hinted(hint)

    def _open(self) -> Channel:
        with self._explained():
            return self._database.open()

    def _tell_away(self, error: Exception) -> None:
        now, self._beat_due = time.monotonic(), 0.0
        self._away_since = now if self._away_since is None else self._away_since
        if self._listeners:
            why, seconds = in_one_line(error, self._database.commands)[0], now - self._away_since
            self._listeners.tell(DatabaseAway(database=self._database, error=why, seconds=seconds))

    def _tell_back(self) -> None:
        if self._away_since is not None:
            seconds, self._away_since = time.monotonic() - self._away_since, None
            logger.warning("the database is back after %s", age(seconds), extra=named("database_back", seconds=seconds))
            if self._listeners:
                self._listeners.tell(DatabaseBack(database=self._database, seconds=seconds))

    def _beat(self, seconds: float) -> None:
        """Tell about once a second that this worker goes on, and how long it may sleep."""
        due = time.monotonic() + seconds
        if due - self._beat_due >= _BEAT_SECONDS and self._listeners:
            self._beat_due = due
            self._listeners.tell(Beat(database=self._database, seconds=seconds))

    def _hint(self, channel: Channel) -> Hint | None:
        with self._explained():
            hint, hinted, self._hinted = channel.hinted(), self._hinted, False
        return hint or (Hint() if hinted else None)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Log an error after which another try may succeed, and raise `ConnectionLostError`; note any other error."""
        try:
            yield
        except Exception as error:
            if passes(self._database, error, known=self.known):
                log_away(self._throttled_log, in_one_line(error, self._database.commands)[0])
                raise ConnectionLostError(error) from error
            for each in self._subscriptions:
                each.note(in_one_line(error, self._database.commands)[0])
            raise
