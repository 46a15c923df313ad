"""The judge of the crash suite: what took effect is delivered, once, and nothing else is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run left behind. Names are those of messages; `halves` and `verdicts` are by transaction."""

    halves: Mapping[str, AbstractSet[str]]
    effects: Mapping[str, int]
    verdicts: Mapping[str, str]
    released: Counter[str]
    delivered: Counter[str]


@dataclass(slots=True)
class Findings:
    """What must not be."""

    #: Transactions whose verdict is not what their business did, and those without one.
    contradictions: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    #: Messages that came although nothing took effect; that did not come although it did; that came twice.
    phantom: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> dict[str, list[str]]:
        """Everything that was found."""
        kinds = ("contradictions", "undecided", "phantom", "lost", "twice")
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind)}

    def __str__(self) -> str:
        counts = {kind: len(found) for kind, found in self.wrong.items()}
        return f"wrong: {counts or 'nothing'}"


def judge(outcome: Outcome) -> Findings:
    """Compare what took effect with what was decided, released and delivered."""
    findings = Findings()
    due: set[str] = set()
    for transaction in sorted({*outcome.halves, *outcome.effects}):
        messages, names = outcome.effects.get(transaction), outcome.halves.get(transaction, set())
        verdict = outcome.verdicts.get(transaction)
        if verdict is None:
            findings.undecided.append(transaction)
        elif (verdict == "commit") != (messages is not None):
            findings.contradictions.append(transaction)
        if messages is not None:
            due |= names
            findings.lost += sorted(name for name in names if not outcome.delivered[name])
            if len(names) != messages:
                findings.lost.append(f"half messages of {transaction}")
    came = Counter({name: max(outcome.released[name], outcome.delivered[name]) for name in _names(outcome)})
    findings.phantom = sorted(set(came) - due)
    findings.twice = sorted(name for name, times in came.items() if times > 1)
    return findings


def _names(outcome: Outcome) -> set[str]:
    return {*outcome.released, *outcome.delivered}
