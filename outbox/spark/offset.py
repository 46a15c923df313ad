"""Offsets: the progress of a stream, as JSON for Spark's checkpoint; and positions that users hand over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from outbox.errors import PositionError
from outbox.model.position import Position, Progress
from outbox.store.log.stamp import Server, Stamp

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """The progress of a stream: delivered are all rows that the base of `progress` sees, and of the open window the ids
    up to `after`.

    `gone`: the position up to which rows had been purged when the stream began at earliest. Those rows do not count as
    lost from the first window.
    `latest`: the stream begins at the end of its first batch. Spark does not store the beginning, and asks for the
    beginning again when the first batch is repeated. A position of the later moment would count the batch's rows as
    delivered.
    `selected`: the stream's selection, as `Narrowing.describe` returns it.
    """

    server: Server
    progress: Progress
    selected: Mapping[str, str]
    gone: Position | None = None
    latest: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the offset as Spark stores it."""
        target = self.progress.target
        return {
            "v": VERSION,
            "server": asdict(self.server),
            "base": str(self.progress.base),
            "target": None if target is None else str(target),
            "after": self.progress.after,
            "gone": None if self.gone is None else str(self.gone),
            "latest": self.latest,
            "selected": dict(self.selected),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Read a stored offset; raise `PositionError` for anything else."""
        try:
            server = _server_in(stored)
            target, gone = (
                None if stored[name] is None else Position.parse(stored[name]) for name in ("target", "gone")
            )
            return cls(
                server=server,
                progress=Progress(Position.parse(stored["base"]), target, stored["after"]),
                selected=dict(stored["selected"]),
                gone=gone,
                latest=bool(stored["latest"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, PositionError) as error:
            raise PositionError(
                f"the checkpoint holds an offset that cannot be read ({error!r}): the checkpoint is damaged, or of"
                " another source; start with a new checkpointLocation, and startingPosition"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A position that a user hands over, of `server`; None: of the server that is read."""

    position: Position
    server: Server | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the JSON of `write`, or a bare position; raise `PositionError` for anything else."""
        try:
            if not text.lstrip().startswith("{"):
                return cls(position=Position.parse(text.strip()))
            stored = json.loads(text)
            return cls(position=Position.parse(stored["position"]), server=_server_in(stored))
        except (KeyError, TypeError, ValueError, AttributeError, PositionError) as error:
            raise PositionError(f"not a position: {text:.200}; use outbox.spark.position()") from error


def write(stamp: Stamp) -> str:
    """Return a stamp as JSON text, with the server."""
    stored = {"v": VERSION, "server": asdict(stamp.server), "position": str(stamp.position)}
    return json.dumps(stored, separators=(",", ":"))


def _server_in(stored: Mapping[str, Any]) -> Server:
    if stored["v"] != VERSION:
        raise PositionError(f"version {stored['v']} instead of {VERSION}")
    return Server(**stored["server"])
