"""The journal of a storm: what consumers did and what was done to them, in order; and the judge who reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Literal

from tests.scenarios.exactness.history import Fact
from tests.support.records import RecordFile

#: begin, done, failed, hang: of a message. locked: another hand has the key, as the database says. fault: the process
#: was killed, frozen or told to stop. lost: it says itself that it has lost a lease.
What = Literal["begin", "done", "failed", "hang", "locked", "fault", "lost"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that happened in a process; `name` and `key` of the message."""

    what: What
    pid: int
    name: str = ""
    key: str = ""


class Journal:
    """A file that many processes append to."""

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path)

    def write(self, entry: Entry) -> None:
        """Append an entry."""
        self._file.append(astuple(entry))

    def read(self) -> list[Entry]:
        """Everything so far."""
        return [Entry(*record) for record in self._file.read()]


@dataclass(slots=True)
class _Key:
    """What is known of a key: the highest change handled, and each process's last one since its last fault."""

    done: int = 0
    last: tuple[int, int] | None = None
    #: Calls that have begun and not ended: process and message.
    open: list[tuple[int, str]] = field(default_factory=list)


def judge(facts: Iterable[Fact], entries: Iterable[Entry], parked: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what must not be, by kind; `parked`: the state of each parked message.

    lost: committed, and neither handled nor parked for a person. phantom: handled, and not committed. order: handled
    before the change of its key that comes first. back: a process without a fault goes back to an earlier change.
    overlap: a call begins while another one of the key is under way, in a process that nothing had happened to.
    """
    return _Judge({fact.name: fact for fact in facts}).walk(entries, parked)


class _Judge:
    def __init__(self, facts: Mapping[str, Fact]) -> None:
        self._facts = facts
        self._keys: dict[str, _Key] = {}
        #: The messages that were handled, each with the process that did so.
        self._done: set[tuple[int, str]] = set()
        self._hung: set[str] = set()
        self._found: dict[str, list[str]] = {}
        #: How many faults each process had.
        self._faults = Counter[int]()
        self._begun_under: dict[tuple[int, str], int] = {}

    def walk(self, entries: Iterable[Entry], parked: Mapping[str, str]) -> dict[str, list[str]]:
        for entry in entries:
            if entry.what in ("fault", "lost"):
                self._faults[entry.pid] += 1
            elif entry.name not in self._facts:
                self._note("phantom", entry.name)
            else:
                self._handled(entry, self._facts[entry.name], self._keys.setdefault(entry.key, _Key()))
        done = {name for _, name in self._done}
        for name in self._facts:
            if name not in done and parked.get(name) not in ("dead", "blocked"):
                self._note("lost", name)
        return self._found

    def _handled(self, entry: Entry, fact: Fact, key: _Key) -> None:
        match entry.what:
            case "begin":
                self._begin(entry, fact, key)
            case "locked":
                if not any(self._faulted(call) for call in key.open):
                    self._note("overlap", f"{entry.name} in {entry.pid}, as the lock of the key says")
            case "hang":
                self._hung.add(entry.name)
            case _:
                call = (entry.pid, entry.name)
                if call in key.open:
                    key.open.remove(call)
                if entry.what == "done":
                    self._done.add(call)
                    key.done = max(key.done, fact.version)

    def _begin(self, entry: Entry, fact: Fact, key: _Key) -> None:
        call = (entry.pid, entry.name)
        others = [f"{name} in {pid}" for pid, name in key.open if not self._faulted((pid, name))]
        if others:
            self._note("overlap", f"{entry.name} in {entry.pid}, while {', '.join(others)} is under way")
        if fact.version > key.done + 1:
            self._note("order", f"{entry.name} is change {fact.version} of {entry.key}, when {key.done + 1} was due")
        if key.last is not None and key.last[0] == entry.pid and not self._faulted((entry.pid, "")):
            back = fact.version < key.last[1] or (call in self._done and entry.name not in self._hung)
            if back:
                self._note("back", f"{entry.name} is change {fact.version} of {entry.key}, after {key.last[1]}")
        key.last = (entry.pid, fact.version)
        key.open.append(call)
        self._begun_under[call] = self._begun_under[entry.pid, ""] = self._faults[entry.pid]

    def _faulted(self, call: tuple[int, str]) -> bool:
        """Whether something has happened to a process since its call began; without a name, since any of its calls."""
        return self._faults[call[0]] > self._begun_under.get(call, 0)

    def _note(self, kind: str, text: str) -> None:
        self._found.setdefault(kind, []).append(text)
