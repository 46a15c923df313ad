"""The journal of a storm: what consumers did and what was done to them, in order; and the judge who reads it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
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
    """What is known of a key: the highest change handled, and the last call with its place in the journal."""

    done: int = 0
    last: tuple[int, int, int] | None = None
    #: Calls that have begun and not ended: process and message, and when they began.
    open: dict[tuple[int, str], int] = field(default_factory=dict)


def judge(facts: Iterable[Fact], entries: Sequence[Entry], parked: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what must not be, by kind; `parked`: the state of each parked message.

    lost: committed, and neither handled nor parked for a person. phantom: handled, and not committed. order: handled
    before the change of its key that comes first. back: a process without a fault goes back to an earlier change, or
    handles a change again. overlap: a call begins while another one of the key is under way, in a process that nothing
    had happened to.
    """
    return _Judge({fact.name: fact for fact in facts}, entries).walk(parked)


class _Judge:
    def __init__(self, facts: Mapping[str, Fact], entries: Sequence[Entry]) -> None:
        self._facts = facts
        self._entries = entries
        self._keys: dict[str, _Key] = {}
        self._done: set[str] = set()
        #: Calls that ended well, and were not made again since: process and message.
        self._well: set[tuple[int, str]] = set()
        self._hung: set[str] = set()
        self._found: dict[str, list[str]] = {}
        #: Where in the journal something has happened to a process, where it has lost a lease, where it begins calls.
        self._faults, self._lost, self._begins = (self._places(what) for what in ("fault", "lost", "begin"))

    def _places(self, what: What) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for at, entry in enumerate(self._entries):
            if entry.what == what:
                found.setdefault(entry.pid, []).append(at)
        return found

    def walk(self, parked: Mapping[str, str]) -> dict[str, list[str]]:
        for at, entry in enumerate(self._entries):
            if entry.what in ("fault", "lost"):
                continue
            if entry.name not in self._facts:
                self._note("phantom", entry.name)
            else:
                self._handled(at, entry, self._facts[entry.name], self._keys.setdefault(entry.key, _Key()))
        for name in self._facts:
            if name not in self._done and parked.get(name) not in ("dead", "behind"):
                self._note("lost", name)
        return self._found

    def _handled(self, at: int, entry: Entry, fact: Fact, key: _Key) -> None:
        call = (entry.pid, entry.name)
        match entry.what:
            case "begin":
                self._begin(at, entry, fact, key)
            case "locked":
                others = [(pid, since) for (pid, name), since in key.open.items() if (pid, name) != call]
                if not any(self._excused(pid, since, at) for pid, since in others):
                    self._note("overlap", f"{entry.name} in {entry.pid}, as the lock of the key says")
            case "hang":
                self._hung.add(entry.name)
            case _:
                key.open.pop(call, None)
                if entry.what == "done":
                    self._done.add(entry.name)
                    self._well.add(call)
                    key.done = max(key.done, fact.version)

    def _begin(self, at: int, entry: Entry, fact: Fact, key: _Key) -> None:
        call = (entry.pid, entry.name)
        others = [f"{name} in {pid}" for (pid, name), since in key.open.items() if not self._excused(pid, since, at)]
        if others:
            self._note("overlap", f"{entry.name} in {entry.pid}, while {', '.join(others)} is under way")
        if fact.version > key.done + 1:
            self._note("order", f"{entry.name} is change {fact.version} of {entry.key}, when {key.done + 1} was due")
        if key.last is not None and key.last[0] == entry.pid and not self._excused(entry.pid, key.last[2], at):
            back = fact.version < key.last[1] or (call in self._well and entry.name not in self._hung)
            if back:
                self._note("back", f"{entry.name} is change {fact.version} of {entry.key}, after {key.last[1]}")
        key.last = (entry.pid, fact.version, at)
        key.open[call] = at
        self._well.discard(call)

    def _excused(self, pid: int, since: int, at: int) -> bool:
        """Whether something has happened to a process in between, or it says so before it begins another call.

        A process that gets no turn for longer than its lease notices that late, as a frozen one does.
        """
        begins = self._begins.get(pid, [])
        after = bisect_right(begins, at)
        until = begins[after] if after < len(begins) else len(self._entries)
        return any(since < fault <= at for fault in self._faults.get(pid, [])) or any(
            since < lost < until for lost in self._lost.get(pid, [])
        )

    def _note(self, kind: str, text: str) -> None:
        self._found.setdefault(kind, []).append(text)
