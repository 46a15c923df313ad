"""Decisions: what a person decided, and when it was carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

#: What a person decides on messages, which a lease holder carries out.
Verb = Literal["replay", "discard", "set_aside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision of a person.

    Attributes:
        id: rises with each decision.
        at: when the person decided, by the database's clock.
        by: the person.
        verb: such as `replay`, `discard`, `set_aside` or `pause`.
        subscription: the name; None: the decision is about none.
        choice: what was decided on: `ids` in the log, or the properties of a subscription.
        reason: as the person gave it.
        count: on so many messages the decision was carried out; None: on none yet, or the decision is about none.
        done_at: when the decision was carried out; None: the decision is open.
    """

    id: int
    at: datetime
    by: str
    verb: str
    subscription: str | None
    choice: Mapping[str, Any]
    reason: str | None
    count: int | None
    done_at: datetime | None

    @property
    def left(self) -> list[int]:
        """The ids of the messages on which the decision is not carried out yet."""
        ids: list[int] = self.choice.get("left", self.choice.get("ids", []))
        return sorted(ids)

    def of(self, left: list[int]) -> Decision:
        """Return the decision with these messages left."""
        return replace(self, choice={**self.choice, "left": left})

    @property
    def shown(self) -> Decision:
        """The decision without what only workers need."""
        return replace(self, choice={k: v for k, v in self.choice.items() if k not in ("left", "message_ids")})

    @property
    def message_ids(self) -> dict[int, UUID]:
        """The message ids by log id, of a decision on messages that no worker had read; else empty."""
        return dict(zip(self.choice.get("ids", []), map(UUID, self.choice.get("message_ids", [])), strict=False))
