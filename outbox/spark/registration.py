"""Registration: an extract tells its database how far the archive is, so that retention waits for it."""

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
from outbox.spark.place import Place, engine_options, require_file
from outbox.store.dialects.kinds import is_file

if TYPE_CHECKING:
    from outbox.spark.manifest import Archive, Manifest
    from outbox.store.subscriptions.readers import Readers

logger = logging.getLogger("outbox.extract")


@dataclass(frozen=True, slots=True)
class Registration:
    """The name of an extract among the subscriptions, and how long after its last progress retention waits for it."""

    name: str
    hold: timedelta = timedelta(days=30)

    def begin(
        self, place: Place, archive: Archive, last: Manifest | None, topics: tuple[str, ...] | None = None
    ) -> None:
        """Register the extract before its first read, and store the archive's position, even if another was stored.

        Raises:
            SubscriptionError: the name belongs to a relay or another archive, or is reserved; or it has windows, but
                there is no archive; or the hold is out of range.
        """
        with _connected(place) as readers:
            self._require_registrable(readers, archive, last)
            readers.register(self.name, archive=str(archive.path), hold=self.hold, topics=topics)
            window, position = (0, EARLIEST) if last is None else (last.window, last.until)
            readers.advance(self.name, window, position)

    def require_possible(self, place: Place, archive: Archive, last: Manifest | None) -> None:
        """Check that this archive may register under the name, and write nothing.

        Raises:
            SubscriptionError: the name belongs to a relay or another archive, or is reserved; or it has windows, but
                there is no archive; or the hold is out of range.
        """
        with _connected(place) as readers:
            self._require_registrable(readers, archive, last)

    def _require_registrable(self, readers: Readers, archive: Archive, last: Manifest | None) -> None:
        """Refuse a new archive if the name has windows: the new one would lack messages that were purged since."""
        readers.require_registrable(self.name, archive=str(archive.path), hold=self.hold)
        if last is None and (window := readers.window(self.name)):
            raise SubscriptionError(
                f"{self.name!r} has come to window {window}, but there is no archive in {archive.path}: see whether its"
                f" disk is mounted. To begin a new one, run before: outbox subscriptions drop {shlex.quote(self.name)}"
            )

    def advance(self, place: Place, manifest: Manifest) -> None:
        """Store the position of a manifest that was committed. An error is only logged: the next run stores it."""
        try:
            with _connected(place) as readers:
                readers.advance(self.name, manifest.window, manifest.until)
        except Exception as error:
            logger.warning(
                "%s: window %d is committed, but the database was not told, so retention waits where it did: %s",
                self.name,
                manifest.window,
                str(error).partition("\n")[0],
            )


@contextmanager
def _connected(place: Place) -> Iterator[Readers]:
    from outbox.store.database import Database
    from outbox.store.subscriptions.readers import Readers
    from outbox.writing.engines import create_engine

    url = place.primary.resolve()
    if is_file(url):
        require_file(url)
    engine = create_engine(url.render_as_string(hide_password=False), **engine_options(url))
    try:
        database = Database(engine, place.schema)
        with rights_told(), database.explained(), closing(database.open()) as channel:
            yield Readers(channel)
    finally:
        engine.dispose()
