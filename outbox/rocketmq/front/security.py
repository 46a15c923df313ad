"""Security of a front: who may call, and how calls travel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outbox.rocketmq.front.authentication import Authentication


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The files for a front's security.

    `auth_file`: the access keys of clients, a line each: `access_key:secret`, or `access_key:secret:topic,topic`. None:
    every client may call.
    """

    auth_file: str | Path | None = None

    def authentication(self) -> Authentication | None:
        """Return the check of each call.

        Raises:
            ValueError: the file cannot be read, or a line has a mistake.
        """
        return None if self.auth_file is None else Authentication(Path(self.auth_file))
