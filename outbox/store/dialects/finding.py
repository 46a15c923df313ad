"""The findings of the check of a database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect: the place, the problem, the fix, and the evidence where the problem alone does not show it."""

    where: str
    problem: str
    fix: str
    evidence: str | None = None

    def __str__(self) -> str:
        evidence = "" if self.evidence is None else f" ({self.evidence})"
        return f"{self.where}: {self.problem}{evidence}; {self.fix}"


def given_again(drawn: int, where: str, highest: int, fix: str) -> Iterator[Finding]:
    """Find ids that would be given out again: `drawn` is the last drawn id, and the column `where` has a higher one."""
    if drawn < highest:
        problem = f"has drawn ids up to {drawn}, but {where} has {highest}: ids would be given out again"
        yield Finding("outbox_message.id", problem, fix)
