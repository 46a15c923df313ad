"""The judge of a run: the business table says what had to come, the history of the deliveries says what came.

Stricter than a subsequence: per key the first copies come in the order of their commits, none before its forerunner
(1, 3, 2, 3 fails). A message may come again only after a fault, from at most one batch back, and a fault excuses no
more copies than a batch holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outbox.model.message import Message
from tests.support.records import RecordFile


@dataclass(frozen=True, slots=True)
class Fact:
    """A row of the business table, committed together with one message. `version` rises with the commits of a key."""

    name: str
    key: str | None = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """One copy of a message as it reached the destination. `copy` is the same for all copies of a message."""

    name: str
    key: str | None = None
    relay: int = 0
    copy: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """A relay was killed, or was stopped for longer than its lease: the batch that it held may come again.

    What a stopped one holds may also come late, whenever it goes on.
    """

    kind: Literal["kill", "stop"] = "kill"
    relay: int = 0


Event = Delivery | Fault


@dataclass(slots=True)
class Findings:
    """What a history proves. Only `duplicates` may stand in the findings of a good run, and only so many."""

    lost: list[str] = field(default_factory=list)
    phantom: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    #: Copies that no fault excuses: before any, too many for those there were, or from more than a batch back.
    excess: list[str] = field(default_factory=list)
    duplicates: int = 0

    @property
    def wrong(self) -> dict[str, list[str]]:
        """Everything that must not be."""
        kinds = ("lost", "phantom", "violations", "altered", "excess")
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind)}

    def __str__(self) -> str:
        kinds = ("lost", "phantom", "violations", "altered", "excess")
        counts = ", ".join(f"{kind} {len(getattr(self, kind))}" for kind in kinds)
        examples = "; ".join(f"{kind}: {', '.join(texts[:3])}" for kind, texts in self.wrong.items())
        return f"{counts}, duplicates {self.duplicates}" + (f" ({examples})" if examples else "")


def judge(facts: Iterable[Fact], history: Iterable[Event], *, batch: int) -> Findings:
    """Compare what was committed with what came; `batch` is how many messages a relay may hold unsettled."""
    return _Judge(facts, batch).walk(history)


class _Judge:
    def __init__(self, facts: Iterable[Fact], batch: int) -> None:
        self._facts = {fact.name: fact for fact in facts}
        self._batch = batch
        self._ranks = ranks(self._facts.values())
        self._next: dict[str, int] = {}
        self._copies: dict[str, str] = {}
        self._faults = 0
        self._stopped: set[int] = set()
        self._findings = Findings()

    def walk(self, history: Iterable[Event]) -> Findings:
        for event in history:
            if isinstance(event, Fault):
                self._faults += 1
                if event.kind == "stop":
                    self._stopped.add(event.relay)
            elif event.name not in self._facts:
                self._findings.phantom.append(event.name)
            else:
                self._deliver(event)
        self._findings.lost = sorted(set(self._facts) - set(self._copies))
        return self._findings

    def _deliver(self, event: Delivery) -> None:
        fact, found = self._facts[event.name], self._findings
        first = event.name not in self._copies
        if (event.key, self._copies.setdefault(event.name, event.copy)) != (fact.key, event.copy):
            found.altered.append(event.name)
        if not first:
            self._again(event, fact)
        elif fact.key is not None:
            rank, expected = self._ranks[event.name], self._next.get(fact.key, 0)
            if rank != expected:
                found.violations.append(f"{event.name} is no. {rank} of {fact.key}, when no. {expected} was due")
            self._next[fact.key] = max(expected, rank + 1)

    def _again(self, event: Delivery, fact: Fact) -> None:
        found = self._findings
        found.duplicates += 1
        back = 0 if fact.key is None else self._next[fact.key] - self._ranks[event.name]
        if found.duplicates > self._faults * self._batch:
            found.excess.append(f"{event.name} came again after {self._faults} faults and {found.duplicates} copies")
        elif back > self._batch and event.relay not in self._stopped:
            found.excess.append(f"{event.name} came again from {back} messages of {fact.key} back")


def ranks(facts: Iterable[Fact]) -> dict[str, int]:
    """Each keyed fact's place among the committed ones of its key: what was rolled back leaves no hole."""
    by_key: dict[str, list[Fact]] = {}
    for fact in facts:
        if fact.key is not None:
            by_key.setdefault(fact.key, []).append(fact)
    found: dict[str, int] = {}
    for key, of_key in by_key.items():
        versions = sorted(fact.version for fact in of_key)
        assert len(set(versions)) == len(versions), f"the writers of {key} did not take turns"
        found |= {fact.name: rank for rank, fact in enumerate(sorted(of_key, key=lambda fact: fact.version))}
    return found


def delivery_of(message: Message, relay: int = 0) -> Delivery:
    """What a destination keeps of a message whose body is its name."""
    headers = message.headers_json or ""
    parts = "\0".join((str(message.message_id), message.topic, message.key or "", headers)).encode() + message.body
    copy = hashlib.blake2b(parts, digest_size=8).hexdigest()
    return Delivery(message.body.decode(), message.key, relay, copy)


class HistoryFile:
    """A history that several processes append to."""

    def __init__(self, path: Path) -> None:
        self._records = RecordFile(path)

    def append(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, Fault):
            self._records.append([event.kind, event.relay])
        else:
            self._records.append([event.name, event.key, event.relay, event.copy])

    def read(self) -> list[Event]:
        """Everything so far, without what a kill has cut."""
        records = self._records.read()
        return [Fault(*record) if len(record) == 2 else Delivery(*record) for record in records]

    def close(self) -> None:
        """Give the file back."""
        self._records.close()
