"""Registration: an extract or a stream tells its database how far the reader is, so that retention waits for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from outbox.errors import SubscriptionError
from outbox.model.position import EARLIEST, Position
from outbox.spark.connections import rights_told
from outbox.spark.manifest import Archive, Manifest
from outbox.spark.place import Place

if TYPE_CHECKING:
    from outbox.store.subscriptions.readers import Readers

logger = logging.getLogger("outbox.extract")

#: In place of an archive, for all streams: only Spark knows where their checkpoints are.
STREAM = "a stream of Spark"
STREAM_HOLD = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Registration:
    """The name of an archive among the subscriptions; `hold`: how long after its last window retention waits."""

    name: str
    hold: timedelta
    place: Place
    archive: Archive

    def require_possible(self, last: Manifest | None) -> None:
        """Raise if the archive cannot register under the name, or is gone although the name has windows."""
        with _connected(self.place) as readers:
            self._require_registrable(readers, last)

    def begin(self, last: Manifest | None, topics: tuple[str, ...] | None) -> None:
        """Register before the first read, and store the archive's position, even if another was stored."""
        with _connected(self.place) as readers:
            self._require_registrable(readers, last)
            readers.register(self.name, archive=str(self.archive.path), hold=self.hold, topics=topics)
            window, position = (0, EARLIEST) if last is None else (last.window, last.until)
            readers.advance(self.name, window, position)

    def advance(self, manifest: Manifest) -> None:
        """Store the position of a committed manifest. An error is only logged: the next run stores the position."""
        with _told(self.name, f"window {manifest.window}"), _connected(self.place) as readers:
            readers.advance(self.name, manifest.window, manifest.until)

    def _require_registrable(self, readers: Readers, last: Manifest | None) -> None:
        """Refuse a new archive if the name has windows: the new one would lack messages that were purged since."""
        readers.require_registrable(self.name, archive=str(self.archive.path), hold=self.hold)
        if last is None and (window := readers.window(self.name)):
            drop = self.place.commands.line("subscriptions", "drop", self.name)
            raise SubscriptionError(
                f"{self.name!r} has come to window {window}, but there is no archive in {self.archive.path}: see"
                f" whether the disk is mounted. To begin a new archive, run before: {drop}"
            )


@dataclass(frozen=True, slots=True)
class StreamRegistration:
    """The name of a stream among the subscriptions. Retention waits for 30 days after the last batch."""

    name: str
    place: Place
    topics: tuple[str, ...]

    def begin(self) -> None:
        """Register before the first batch; raise if the name belongs to anything but a stream."""
        with _connected(self.place) as readers:
            self._register(readers)

    def advance(self, position: Position) -> None:
        """Store what the stream has delivered. An error is only logged: the next batch stores more."""
        with _told(self.name, "a batch"), _connected(self.place) as readers:
            self._register(readers)
            readers.advance(self.name, readers.window(self.name) + 1, position)

    def _register(self, readers: Readers) -> None:
        readers.register(self.name, archive=STREAM, hold=STREAM_HOLD, topics=self.topics or None)


@contextmanager
def _connected(place: Place) -> Iterator[Readers]:
    from outbox.store.subscriptions.readers import Readers

    database = place.primary()
    try:
        with rights_told(), database.explained(), closing(database.open()) as channel:
            yield Readers(channel)
    finally:
        database.engine.dispose()


@contextmanager
def _told(name: str, what: str) -> Iterator[None]:
    """Log an error of the block, because what was read is committed already."""
    try:
        yield
    except Exception as error:
        logger.warning(
            "%s: %s is committed, but the database was not told, so retention waits where it did: %s",
            name,
            what,
            str(error).partition("\n")[0],
        )
