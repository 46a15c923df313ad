"""The judge of a demo: it compares the orders table with the consumer's receipts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Receipt:
    """A copy of a message at a consumer: change number `version` of the order `key`."""

    key: str
    version: int
    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The result of a run; each field is a number of messages.

    `phantom`: of a change that was never committed. `duplicates`: further copies of a message. `violations`: first
    copies that came when another change of the order was due.
    """

    committed: int
    received: int
    lost: int
    phantom: int
    duplicates: int
    violations: int

    @property
    def is_sound(self) -> bool:
        """True if every promise was kept; duplicates are not against the promise."""
        return not (self.lost or self.phantom or self.violations)


def judge(committed: Mapping[str, int], receipts: Iterable[Receipt]) -> Judgement:
    """Compare the committed version of each order with what came. The order counts strictly: 1, 3, 2, 3 breaks it."""
    ids: dict[tuple[str, int], str] = {}
    highest: dict[str, int] = {}
    received = phantom = duplicates = violations = 0
    for receipt in receipts:
        received += 1
        change = receipt.key, receipt.version
        is_known = change in ids
        if not 1 <= receipt.version <= committed.get(receipt.key, 0):
            phantom += 1
        elif ids.setdefault(change, receipt.message_id) != receipt.message_id:
            # Two messages about one change: the first try of that change was rolled back.
            phantom += 1
        elif is_known:
            duplicates += 1
        else:
            before = highest.get(receipt.key, 0)
            violations += receipt.version != before + 1
            highest[receipt.key] = max(before, receipt.version)
    expected = sum(committed.values())
    return Judgement(
        committed=expected,
        received=received,
        lost=expected - len(ids),
        phantom=phantom,
        duplicates=duplicates,
        violations=violations,
    )
