"""Parked messages: what failed, what waits behind it, what falls due later, and what people ask for.

The log is read in its order, by one worker after the other. What a message is parked as says the library's policy, and
which keys are held back says its own memory of them. The destination may refuse any message, and never all for ever.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from itertools import product
from typing import Any, Literal, NamedTuple

from tenacity.wait import wait_fixed

from outbox.model.parking import Parking
from outbox.model.retry import RetryPolicy
from outbox.model.verdict import DONE, Reject, Retry, Unavailable, Verdict
from outbox.worker.holds import Holds
from outbox.worker.policy import BEHIND, EXPIRED, HandlerPolicy
from tests.model import rules
from tests.model.explorer import Moves
from tests.model.handling import Item, judged
from tests.model.rules import LogRow, Parked, ParkedRow

#: A moment that has come, and one that has not.
NOW, LATER = 0, 1
Answer = Literal["done", "failed", "rejected", "unavailable"]
_REFUSALS: tuple[Answer, ...] = ("failed", "rejected", "unavailable")
_VERDICTS: dict[Answer, Verdict] = {
    "done": DONE,
    "failed": Retry("failed"),
    "rejected": Reject("rejected"),
    "unavailable": Unavailable("unavailable"),
}


class Unsettled(NamedTuple):
    """What came of messages that were handed over. `upto`: of the log, up to this id; None: of parked messages."""

    upto: int | None
    done: tuple[int, ...]
    parkings: tuple[tuple[Item, Parking], ...]


class Memory(NamedTuple):
    """What a worker knows: the keys that are held, and what is not settled.

    `keys` None: there are too many, and the database is asked. `given_up`: unread messages that people have discarded.
    """

    keys: frozenset[str] | None
    unsettled: Unsettled | None = None
    given_up: frozenset[int] = frozenset()


class Troubles(NamedTuple):
    """How many of each may still happen. `crashed`: whether a worker has crashed already."""

    refusals: int = 0
    crashes: int = 0
    crashed: bool = False


class State(NamedTuple):
    """Everything. `committed`: so many messages of the log; `passed`: the stored progress.

    `arrived`: the log ids of the messages that the destination has; `last`: its last one of each key. `discarded`: what
    people did not want any more. `replayed`: what they wanted after others were let pass. `decided`: what they decided,
    by log id, and nobody has carried out.
    `expired`: messages of the log whose time is over.
    """

    committed: int
    passed: int
    parked: Parked
    memory: Memory | None
    arrived: frozenset[int]
    last: tuple[tuple[str, int], ...]
    discarded: frozenset[int]
    troubles: Troubles
    replayed: frozenset[int] = frozenset()
    decided: frozenset[tuple[int, str]] = frozenset()
    expired: frozenset[int] = frozenset()
    broken: str | None = None


class ListParked:
    """The parked rows as `Holds` asks for them."""

    def __init__(self, rows: Parked) -> None:
        self._rows = rows
        #: Whether somebody has asked which of some keys are held.
        self.asked = False

    def keys(self, limit: int) -> set[str] | None:
        """Return the keys that are held; None: more than `limit`."""
        found = rules.keys_held(self._rows)
        return found if len(found) <= limit else None

    def held_among(self, keys: Collection[str]) -> set[str]:
        """Return which of these keys are held."""
        self.asked = True
        return rules.keys_held(self._rows).intersection(keys)


class _Remembered(ListParked):
    """The same rows, with the keys that a worker has in memory already."""

    def __init__(self, rows: Parked, memory: Memory) -> None:
        super().__init__(rows)
        self._memory = memory

    def keys(self, limit: int) -> set[str] | None:
        """Return what is remembered."""
        return None if self._memory.keys is None else set(self._memory.keys)


class Keys(Holds):
    """The library's keys, as a value before and after what it does."""

    def __init__(self, rows: ListParked, most: int) -> None:
        port: Any = rows
        super().__init__(port, most)
        self._rows = rows

    def memory(self) -> Memory:
        """Return what is remembered now."""
        self._rows.asked = False
        keys = frozenset(key for key in self.among([]) if key is not None)
        return Memory(None if self._rows.asked else keys)


class Holding:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    #: The most messages of a hand-over.
    rows = 2

    def __init__(
        self,
        log: Sequence[LogRow],
        *,
        troubles: Troubles,
        on_dead: Literal["block", "continue"] = "block",
        most_keys: int = 9,
    ) -> None:
        """`log`: its messages, which are committed one after the other. `most_keys`: so many are kept in memory."""
        self._log = tuple(log)
        self._troubles = troubles
        self._on_dead = on_dead
        self._most_keys = most_keys
        self._policy = HandlerPolicy(
            retry=RetryPolicy(attempts=2, wait=wait_fixed(LATER)),
            block_on_dead=on_dead == "block",
            deadline=timedelta(hours=1),
            least=self.rows,
        )

    def start(self) -> State:
        """Return the state in which nothing is committed."""
        return State(0, 0, frozenset(), None, frozenset(), (), frozenset(), self._troubles)

    def moves(self, state: State) -> Moves[State]:
        """Return every step of writers, of the worker, of people, and of time."""
        if state.committed < len(self._log):
            new = self._log[state.committed]
            yield f"message {new.id} of {new.key} is committed", state._replace(committed=state.committed + 1)
        for message in self._log[state.passed :]:
            if message.expires_at == LATER and message.id not in state.expired:
                yield f"message {message.id} expires", state._replace(expired=state.expired | {message.id})
        for row in state.parked:
            if row.expires_at == LATER and row.state != "dead":
                late = state.parked - {row} | {row._replace(expires_at=NOW)}
                yield f"message {row.id} expires", state._replace(parked=late)
            if row.due_at == LATER:
                came = state.parked - {row} | {row._replace(due_at=NOW)}
                yield f"message {row.id} falls due", state._replace(parked=came)
            if row.state == "dead" and row.id not in dict(state.decided):
                for verb in ("replay", "discard"):
                    decided = state.decided | {(row.id, verb)}
                    yield f"a person decides to {verb} message {row.id}", state._replace(decided=decided)
        if state.memory is None:
            yield "a worker takes the lease", state._replace(memory=self.loads(state.parked))
        else:
            yield from self._work(state, state.memory)

    def wrong(self, state: State) -> str | None:
        """Return which promise is broken."""
        if state.broken is not None:
            return state.broken
        known = state.arrived | state.discarded | {row.id for row in state.parked}
        lost = [row.id for row in self._log[: state.passed] if row.id not in known]
        return f"lost: message {lost[0]} is settled, and neither sent nor parked" if lost else None

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        missing = {row.id for row in self._log} - state.arrived - state.discarded
        if missing:
            return f"lost: at rest message {min(missing)} has not arrived"
        if state.parked:
            return "stuck: at rest something is parked that has arrived"
        if self._on_dead == "block":
            for key, last in state.last:
                ids = [row.id for row in self._log if row.key == key and row.id in state.arrived - state.discarded]
                if ids and last < max(ids) and not any(row.deliver_at for row in self._log if row.key == key):
                    return f"order: {key} ends with message {last}"
        return None

    # The rules, which twins break

    def loads(self, rows: Parked) -> Memory:
        """Return what a worker knows that has taken the lease: what is parked."""
        return Keys(ListParked(rows), self._most_keys).memory()

    def held(self, state: State, memory: Memory, keys: Sequence[str]) -> Collection[str | None]:
        """Return which of these keys are held back, as the worker knows it."""
        return self._keys(state.parked, memory).among([_message(Item(0, key)) for key in keys])

    def takes_place(self, state: State) -> tuple[Parked, set[str]]:
        """Return the rows after delayed ones that are due took their place, and their keys."""
        return rules.fallen_due(state.parked, NOW, self.rows)

    def ready(self, state: State, memory: Memory) -> list[ParkedRow]:
        """Return the parked messages whose turn has come."""
        return rules.ready(state.parked, NOW, self.rows)

    def advanced(self, rows: Parked, keys: Collection[str]) -> Parked:
        """Return the rows after the first of each of these keys became a head."""
        return rules.advanced(rows, keys, NOW)

    def still_held(self, rows: Parked, memory: Memory) -> ListParked:
        """Return the rows as a worker asks them which keys are still held."""
        return _Remembered(rows, memory)

    # The steps of a worker

    def _work(self, state: State, memory: Memory) -> Moves[State]:
        if state.troubles.crashes:
            troubles = state.troubles._replace(crashes=state.troubles.crashes - 1, crashed=True)
            yield "the worker crashes", state._replace(memory=None, troubles=troubles)
        if memory.unsettled is not None:
            settled = self._settled(state, memory, memory.unsettled)
            yield "the worker settles", settled
            if state.troubles.crashes:
                troubles = state.troubles._replace(crashes=state.troubles.crashes - 1, crashed=True)
                yield "the worker settles, and crashes", settled._replace(memory=None, troubles=troubles)
            return
        yield from self._decisions(state, memory)
        if any(row.state == "delayed" and row.due_at == NOW for row in state.parked):
            placed, keys_due = self.takes_place(state)
            keys = self._keys(placed, memory)
            keys.hold(keys_due)
            yield "what was delayed takes its place", state._replace(parked=placed, memory=keys.memory())
        due = self.ready(state, memory)
        if due:
            items = [Item(row.id, row.key, row.attempts + 1) for row in due if not rules.expired(row, NOW)]
            late = [(Item(row.id, row.key), EXPIRED) for row in due if rules.expired(row, NOW)]
            yield from self._hand_over(state, memory, items, upto=None, parkings=late)
        yield from self._read(state, memory)

    def _decisions(self, state: State, memory: Memory) -> Moves[State]:
        if state.decided:
            of_keys = {row.key for row in state.parked if row.key is not None and row.id in dict(state.decided)}
            discarded = {id for id, verb in state.decided if verb == "discard"}
            replayed = {id for id, verb in state.decided if verb == "replay"}
            after = rules.replayed(rules.removed(state.parked, discarded), replayed, NOW)
            after = self.advanced(after, of_keys)
            keys = self._keys(after, memory)
            keys.reconsider(of_keys)
            again = replayed if self._on_dead == "continue" else set[int]()
            yield (
                "the worker carries out what people decided",
                state._replace(
                    parked=after,
                    memory=keys.memory(),
                    decided=frozenset(),
                    discarded=state.discarded | discarded,
                    replayed=state.replayed | again,
                ),
            )

    def _read(self, state: State, memory: Memory) -> Moves[State]:
        batch = self._log[state.passed : min(state.committed, state.passed + self.rows)]
        if not batch:
            return
        held = self.held(state, memory, [row.key for row in batch if row.key is not None])
        messages: Any = [self._item(state, row) for row in batch]
        now: Any = NOW
        items, parkings = self._policy.sort_out(messages, now, held=held)
        yield from self._hand_over(state, memory, items, upto=batch[-1].id, parkings=parkings)

    def _item(self, state: State, row: LogRow) -> Item:
        """Return a message of the log; its moments are numbers."""
        deliver_at: Any = row.deliver_at
        expires_at: Any = self._expires(state, row)
        return Item(row.id, row.key, deliver_at=deliver_at, expires_at=expires_at)

    def _expires(self, state: State, row: LogRow) -> int | None:
        return NOW if row.id in state.expired else row.expires_at

    def _hand_over(
        self,
        state: State,
        memory: Memory,
        items: Sequence[Any],
        *,
        upto: int | None,
        parkings: Sequence[tuple[Any, Parking]],
    ) -> Moves[State]:
        where = "the log" if upto is not None else "what is parked"
        for answers in _answers(items, state.troubles.refusals):
            handled = judged(self._policy, items, [_VERDICTS[answer] for answer in answers], parked=upto is None)
            failed = handled.parked
            behind = {item.id: "behind it" for item, parking in failed if parking is BEHIND}
            if upto is None:
                failed = [(item, parking) for item, parking in failed if parking is not BEHIND]
            passes = {item.id for item, parking in (*parkings, *failed) if not parking.holds}
            passes |= {row.id for row in state.parked if row.unit is None}
            after = state
            for item in items:
                if item.id in handled.done:
                    after = self._arrives(after, item, passes)
            unsettled = Unsettled(upto, tuple(handled.done), (*parkings, *failed))
            refusals = state.troubles.refusals - sum(answer != "done" for answer in answers)
            said = ", ".join(
                f"{item.id} {behind.get(item.id, answer)}" for item, answer in zip(items, answers, strict=True)
            )
            yield (
                f"the worker reads {where}; {said or 'nothing to send'}",
                after._replace(
                    memory=memory._replace(unsettled=unsettled), troubles=state.troubles._replace(refusals=refusals)
                ),
            )

    def _arrives(self, state: State, item: Item, passes: Collection[int]) -> State:
        """Let a message arrive at the destination, and note what must not be. `passes`: dead, blocks nothing."""
        broken = state.broken or self._overtaken(state, item, passes)
        if item.id in state.arrived and not state.troubles.crashed:
            broken = broken or f"repeated without a failure: message {item.id}"
        last = dict(state.last)
        if item.key is not None:
            last[item.key] = item.id
        return state._replace(arrived=state.arrived | {item.id}, last=tuple(sorted(last.items())), broken=broken)

    def _overtaken(self, state: State, item: Item, passes: Collection[int]) -> str | None:
        """Return which message of the key should have come before, or None.

        What stands for itself, as what is replayed after others were let pass, has lost its place among them.
        """
        if item.key is None or item.id in state.replayed:
            return None
        rows = {row.id: row for row in state.parked if row.unit == item.key}
        place = rows[item.id].place if item.id in rows else math.inf
        before = [row.id for row in rows.values() if row.place < place]
        before += [
            row.id
            for row in self._log[state.passed : state.committed]
            if row.key == item.key and row.id < item.id and not row.deliver_at and row.id not in rows
        ]
        over = [id for id in before if id not in state.arrived and id not in passes]
        return f"order: message {item.id} of {item.key} came before message {over[0]}" if over else None

    def _settled(self, state: State, memory: Memory, unsettled: Unsettled) -> State:
        if unsettled.upto is None:
            rows = rules.removed(state.parked, unsettled.done)
            for item, parking in unsettled.parkings:
                rows = rules.changed(rows, [item.id], parking, NOW)
            changed = {row.key for row in state.parked ^ rows if row.key is not None}
            rows = self.advanced(rows, changed)
            keys = self._keys(rows, memory)
            keys.reconsider(changed)
            return state._replace(parked=rows, memory=keys.memory())
        rows = state.parked
        for item, parking in sorted(unsettled.parkings, key=lambda each: each[0].id):
            row = self._log[item.id - 1]
            rows = rules.parked(rows, [row._replace(expires_at=self._expires(state, row))], parking, NOW)
        rows = self.advanced(rows, {item.key for item, _ in unsettled.parkings if item.key is not None})
        keys = self._keys(rows, memory)
        keys.hold(item.key for item, parking in unsettled.parkings if parking.holds)
        return state._replace(parked=rows, passed=unsettled.upto, memory=keys.memory())

    def _keys(self, rows: Parked, memory: Memory) -> Keys:
        return Keys(self.still_held(rows, memory), self._most_keys)


def _answers(items: Sequence[Item], refusals: int) -> Iterator[tuple[Answer, ...]]:
    """Yield the ways in which a destination may answer.

    What it says of a message behind a refused one of the same key changes nothing. It says that it is unavailable only
    where it takes another message: else the worker waits, and nothing changes.
    """
    for answers in product(("done", *_REFUSALS), repeat=len(items)):
        refused = [item.key for item, answer in zip(items, answers, strict=True) if answer != "done"]
        distinct = len(set(refused) - {None}) + refused.count(None) == len(refused)
        accepts = any(item.key not in refused for item in items)
        if distinct and len(refused) <= refusals and ("unavailable" not in answers or accepts):
            yield answers


def _message(item: Item) -> Any:
    """Return an item as the message that the policy asks for its attempt, and the keys for its key."""
    return item


# Broken twins


class ForgetsKeys(Holding):
    """Takes the lease and knows of no key that is held."""

    def loads(self, rows: Parked) -> Memory:
        """Load nothing."""
        return Memory(frozenset())


class NeverAdvances(Holding):
    """Removes the head of a key and makes none of what stood behind it."""

    def advanced(self, rows: Parked, keys: Collection[str]) -> Parked:
        """Leave the rows as they are."""
        return rows


class _NothingHeld(_Remembered):
    def held_among(self, keys: Collection[str]) -> set[str]:
        return set()


class FreesAtOnce(Holding):
    """Lets go of a key as soon as one of its parked messages is done, whatever stands behind it."""

    def still_held(self, rows: Parked, memory: Memory) -> ListParked:
        """Find nothing."""
        return _NothingHeld(rows, memory)


class TriesWhatIsBehind(Holding):
    """Tries each message of a held key by itself, whatever stands before it."""

    def ready(self, state: State, memory: Memory) -> list[ParkedRow]:
        """Return all rows but the delayed and the dead ones."""
        return [row for row in sorted(state.parked, reverse=True) if row.state is None or row.due_at == NOW][
            : self.rows
        ]
