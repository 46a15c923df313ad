"""Offsets: how far a stream came, as the JSON that Spark's checkpoint keeps; and positions that users hand over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from outbox.errors import PositionError
from outbox.model.position import Position, Progress
from outbox.store.log.stamp import Server, Stamp

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """The progress of a stream: it has delivered all that the base of `progress` sees, and of the open window the ids
    up to `after`.

    `gone`: the position of what had been purged when the stream began at earliest. Those rows do not count as lost from
    the window that begins there.
    `latest`: the stream begins where its first batch ends. Spark does not store the beginning: when it repeats the
    first batch, it asks for the beginning again. A position of that later moment would count the batch's rows as
    delivered.
    `selected`: what the stream selects, as `Narrowing.describe` returns it; None: a version stored it that kept none.
    """

    server: Server
    progress: Progress
    gone: Position | None = None
    latest: bool = False
    selected: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the offset as Spark stores it."""
        target = self.progress.target
        return {
            **_of_server(self.server),
            "base": str(self.progress.base),
            "target": None if target is None else str(target),
            "after": self.progress.after,
            "gone": None if self.gone is None else str(self.gone),
            # Only if they are set: Spark compares offsets as texts, and takes a different text for new data.
            **({"latest": True} if self.latest else {}),
            **({} if self.selected is None else {"selected": dict(self.selected)}),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Read what Spark has stored.

        Raises:
            PositionError: it is not an offset of this version.
        """
        try:
            server = _server_in(stored)
            target, after, gone = stored["target"], stored["after"], stored.get("gone")
            progress = Progress(
                Position.parse(stored["base"]), None if target is None else Position.parse(target), after
            )
            selected = stored.get("selected")
            return cls(
                server=server,
                progress=progress,
                gone=None if gone is None else Position.parse(gone),
                latest=bool(stored.get("latest")),
                selected=None if selected is None else dict(selected),
            )
        except (KeyError, TypeError, ValueError, AttributeError, PositionError) as error:
            raise PositionError(
                f"the checkpoint holds an offset that cannot be read ({error!r}); it is damaged, or of another source:"
                " start with a new checkpointLocation, and startingPosition"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A position that a user hands over. `server`: the server that it is of; None: the one that is read."""

    position: Position
    server: Server | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the JSON of `write`, or a bare position.

        Raises:
            PositionError: it is neither.
        """
        try:
            if not text.lstrip().startswith("{"):
                return cls(position=Position.parse(text.strip()))
            stored = json.loads(text)
            return cls(position=Position.parse(stored["position"]), server=_server_in(stored))
        except (KeyError, TypeError, ValueError, AttributeError, PositionError) as error:
            raise PositionError(f"not a position: {text:.200}; take one from outbox.spark.position()") from error


def write(stamp: Stamp) -> str:
    """Return a stamp as JSON text, which names the server."""
    return json.dumps({**_of_server(stamp.server), "position": str(stamp.position)}, separators=(",", ":"))


def _of_server(server: Server) -> dict[str, Any]:
    return {
        "v": VERSION,
        "db": server.dialect,
        "sys": server.system,
        "oid": server.database,
        "tl": server.timeline,
        "log": server.installation,
    }


def _server_in(stored: Mapping[str, Any]) -> Server:
    if stored["v"] != VERSION:
        raise PositionError(f"version {stored['v']} instead of {VERSION}")
    return Server(
        dialect=stored["db"],
        system=stored["sys"],
        database=stored["oid"],
        timeline=stored["tl"],
        installation=stored["log"],
    )
