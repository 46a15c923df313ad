"""Registration: an extract tells its database how far the archive is, so that retention waits for the archive."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from outbox.errors import SubscriptionError
from outbox.model.position import EARLIEST
from outbox.spark.connections import rights_told
from outbox.spark.manifest import Archive, Manifest
from outbox.spark.place import Place

if TYPE_CHECKING:
    from outbox.store.subscriptions.readers import Readers

logger = logging.getLogger("outbox.extract")


@dataclass(frozen=True, slots=True)
class Registration:
    """The name of an archive among the subscriptions; `hold`: how long after its last window retention waits."""

    name: str
    hold: timedelta
    place: Place
    archive: Archive

    def require_possible(self, last: Manifest | None) -> None:
        """Raise if the archive cannot register under the name, or is gone although the name has windows."""
        with self._connected() as readers:
            self._require_registrable(readers, last)

    def begin(self, last: Manifest | None, topics: tuple[str, ...] | None) -> None:
        """Register before the first read, and store the archive's position, even if another was stored."""
        with self._connected() as readers:
            self._require_registrable(readers, last)
            readers.register(self.name, archive=str(self.archive.path), hold=self.hold, topics=topics)
            window, position = (0, EARLIEST) if last is None else (last.window, last.until)
            readers.advance(self.name, window, position)

    def advance(self, manifest: Manifest) -> None:
        """Store the position of a committed manifest. An error is only logged: the next run stores the position."""
        try:
            with self._connected() as readers:
                readers.advance(self.name, manifest.window, manifest.until)
        except Exception as error:
            logger.warning(
                "%s: window %d is committed, but the database was not told, so retention waits where it did: %s",
                self.name,
                manifest.window,
                str(error).partition("\n")[0],
            )

    def _require_registrable(self, readers: Readers, last: Manifest | None) -> None:
        """Refuse a new archive if the name has windows: the new one would lack messages that were purged since."""
        readers.require_registrable(self.name, archive=str(self.archive.path), hold=self.hold)
        if last is None and (window := readers.window(self.name)):
            raise SubscriptionError(
                f"{self.name!r} has come to window {window}, but there is no archive in {self.archive.path}: see"
                " whether the disk is mounted. To begin a new archive, run before: outbox subscriptions drop"
                f" {shlex.quote(self.name)}"
            )

    @contextmanager
    def _connected(self) -> Iterator[Readers]:
        from outbox.store.subscriptions.readers import Readers

        database = self.place.primary()
        try:
            with rights_told(), database.explained(), closing(database.open()) as channel:
                yield Readers(channel)
        finally:
            database.engine.dispose()
