"""Several partitions of one log: workers share them, and a command changes their number or lets them begin again.

Whom a partition belongs to, where all of them meet and where the next generation begins say the library's own
functions. A worker reads and sends in one step here, because what happens between the two is another world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from outbox.model.barrier import has_arrived, next_generation, stop_at
from outbox.model.lease import Holder, Partition
from outbox.model.position import Position, Progress
from outbox.model.shares import fair_shares
from tests.model import rules
from tests.model.explorer import Moves, apart
from tests.model.reading import passed, read
from tests.model.relaying import COMMAND, GOOD, OVER, Arrived, Faults, Writer, delivered, said, write
from tests.model.rules import LeaseRow, ProgressRow
from tests.model.server import Row, Server

#: In place of a number of partitions: all of them begin again.
AGAIN = 0
#: The slots of the keys.
SLOTS = {"a": 0, "b": 1, "c": 2}


class Stored(NamedTuple):
    """A partition as it is stored."""

    lease: LeaseRow = LeaseRow()
    progress: ProgressRow = ProgressRow()


class Generation(NamedTuple):
    """The partitions of a generation. `stop`: where they meet before there are `following` of them."""

    number: int
    partitions: tuple[Stored, ...]
    stop: Position | None = None
    following: int | None = None

    @property
    def standing(self) -> list[Progress]:
        """How far each partition is settled."""
        return [each.progress.progress for each in self.partitions]

    def partition(self, number: int) -> Partition:
        """Return a partition as the library knows it."""
        return Partition("relay", self.number, number, len(self.partitions))


class Held(NamedTuple):
    """What a worker knows of a partition that it has. `end`: the progress when what it has sent is settled."""

    generation: int
    partition: int
    epoch: int
    progress: Progress
    end: Progress | None = None


class Worker(NamedTuple):
    """`alive`: it has started, and not stopped."""

    alive: bool = False
    held: tuple[Held, ...] = ()


Change = Literal["ready", "asks", "met"]


class State(NamedTuple):
    """Everything. `changes`: the numbers of partitions that commands will give, and what the first of them does."""

    server: Server
    writers: tuple[Writer, ...]
    generation: Generation
    workers: tuple[Worker, ...]
    changes: tuple[int, ...]
    change: Change
    arrived: tuple[tuple[str, Arrived], ...]
    faults: Faults
    broken: str | None = None


class Partitioning:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    #: The most rows of a read.
    rows = 2

    def __init__(
        self,
        writers: tuple[tuple[str, ...], ...],
        *,
        partitions: int = 1,
        workers: int = 2,
        changes: tuple[int, ...] = (),
        faults: Faults,
    ) -> None:
        """`writers`: the key of each of their transactions. `changes`: numbers of partitions or `AGAIN`, in turn.

        Of the faults only lapses happen here.
        """
        self._writers = tuple(Writer(keys) for keys in writers)
        self._partitions, self._workers, self._changes, self._faults = partitions, workers, changes, faults

    def start(self) -> State:
        """Return the state in which nothing has happened."""
        keys = sorted({key for writer in self._writers for key in writer.left})
        return State(
            Server(),
            self._writers,
            Generation(1, (Stored(),) * self._partitions),
            (Worker(),) * self._workers,
            self._changes,
            "ready",
            tuple((key, Arrived()) for key in keys),
            self._faults,
        )

    def moves(self, state: State) -> Moves[State]:
        """Return every step of writers, workers and commands."""
        for number in apart(state.writers):
            yield from write(state, number, state.writers[number])
        # Workers cannot change places: shares go by their names.
        for number, worker in enumerate(state.workers):
            yield from self._work(state, number, worker)
        if state.changes:
            yield from self._change(state, state.changes[0])
        yield from self._begin_next(state)

    def wrong(self, state: State) -> str | None:
        """Return which promise is broken."""
        if state.broken is not None:
            return state.broken
        arrived = dict(state.arrived)
        for row in state.server.rows:
            number = self.owner_of(state.generation, row)
            progress = state.generation.partitions[number].progress.progress
            if passed(progress, row) and arrived[row.key].newest < row.nth:
                return f"lost: message {row.nth} of {row.key} is settled and was never sent"
        return None

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        if state.generation.following is not None or state.changes:
            return "stuck: the number of partitions never changes"
        for key, arrived in state.arrived:
            number = sum(row.key == key for row in state.server.rows)
            if arrived != (number, number):
                return f"{key} ends with message {arrived.last} (the newest was {arrived.newest}) of {number}"
        owners = [each.lease.owner for each in state.generation.partitions]
        shares = [owners.count(number) for number in range(len(state.workers))]
        if sum(shares) < len(owners) or max(shares) - min(shares) > 1:
            return f"unfair: the workers have {shares} partitions"
        return None

    # The rules, which twins break

    def owner_of(self, generation: Generation, row: Row) -> int:
        """Return the partition to which a message belongs."""
        partitions = range(len(generation.partitions))
        return next(each for each in partitions if generation.partition(each).owns(SLOTS[row.key]))

    def read(self, state: State, held: Held) -> tuple[tuple[Row, ...], Progress] | None:
        """Read on in a partition, up to where all of them meet."""
        stop, progress = self.stops(state.generation), held.progress
        if stop is not None:
            if has_arrived(progress, stop):
                return None
            progress = Progress(progress.base, stop, -1) if progress.target is None else progress
        rows = tuple(row for row in state.server.rows if self.owner_of(state.generation, row) == held.partition)
        return read(state.server._replace(rows=rows), progress, self.rows)

    def stops(self, generation: Generation) -> Position | None:
        """Return the position behind which nothing is handled."""
        return generation.stop

    def stores(self, generation: Generation, batch: Sequence[Row]) -> bool:
        """Return whether what was read is worth a settle: messages, or the way to where all meet."""
        return bool(batch) or generation.stop is not None

    def begins(self, generation: Generation) -> Progress | None:
        """Return where the next generation begins; None: not yet."""
        if any(each.lease.until is not None for each in generation.partitions):
            return None
        return next_generation(generation.standing)

    def may_order(self, generation: Generation) -> bool:
        """Return whether the command may order the change: it has all leases."""
        return all(each.lease.owner == COMMAND for each in generation.partitions)

    def begin_again(self, state: State) -> State:
        """Return the state after a reset: new partitions, to which an ordered number counts. All is to arrive again."""
        generation = state.generation
        partitions = (Stored(),) * (generation.following or len(generation.partitions))
        return _forgotten(state)._replace(generation=Generation(generation.number + 1, partitions))

    def share(self, state: State) -> Sequence[str | None]:
        """Return which worker shall have each partition."""
        owners = [None if each.lease.owner is None else str(each.lease.owner) for each in state.generation.partitions]
        return fair_shares(owners, [str(number) for number, each in enumerate(state.workers) if each.alive])

    # The steps of a worker

    def _work(self, state: State, number: int, worker: Worker) -> Moves[State]:
        name = f"worker {number + 1}"
        if not worker.alive:
            yield f"{name} starts", _with(state, number, worker._replace(alive=True))
            return
        for partition, stored in enumerate(state.generation.partitions):
            if self._takes(state, number, worker, partition):
                claim = _claim(stored.lease)
                lease = rules.acquired(stored.lease, number, GOOD, claim)
                if lease is not None:
                    held = Held(state.generation.number, partition, lease.epoch, stored.progress.progress)
                    taken = _store(state, partition, stored._replace(lease=lease))
                    yield (
                        f"{name} takes partition {partition}",
                        _with(taken, number, worker._replace(held=tuple(sorted((*worker.held, held), key=_order)))),
                    )
        for held in worker.held:
            yield from self._handle(state, number, held, f"{name}, partition {held.partition},")

    def _takes(self, state: State, number: int, worker: Worker, partition: int) -> bool:
        """Return whether a worker wants a partition: no command does, and it is its share and has something to do."""
        if state.change == "asks" or any(_is(each, state.generation, partition) for each in worker.held):
            return False
        stop, progress = state.generation.stop, state.generation.standing[partition]
        # One that has met the others is taken once more if its lease was not given back.
        back = state.generation.partitions[partition].lease.owner is None
        met = back and stop is not None and has_arrived(progress, stop)
        return self.share(state)[partition] == str(number) and not met

    def _handle(self, state: State, number: int, held: Held, name: str) -> Moves[State]:
        stored = _stored(state, held)
        good = stored is not None and stored.lease == LeaseRow(number, held.epoch, 0, GOOD)
        if good and state.faults.lapses and stored is not None:
            faults = state.faults._replace(lapses=state.faults.lapses - 1, happened=state.faults.happened + 1)
            over = stored._replace(lease=stored.lease._replace(until=OVER))
            yield f"{name} cannot renew its lease", _store(state, held.partition, over)._replace(faults=faults)
        if held.end is not None:
            yield from self._settle(state, number, held, stored, name)
            return
        if not good or stored is None:
            yield f"{name} has lost its lease", _drop(state, number, held)
            return
        stop = state.generation.stop
        met = stop is not None and has_arrived(held.progress, stop)
        if state.change == "asks" or met or self.share(state)[held.partition] != str(number):
            back = stored._replace(lease=rules.given_back(stored.lease, held.epoch))
            yield f"{name} gives its lease back", _drop(_store(state, held.partition, back), number, held)
            return
        found = self.read(state, held)
        if found is not None and self.stores(state.generation, found[0]):
            batch, end = found
            arrived, broken = delivered(state, batch)
            sent = _hold(state, number, held, held._replace(end=end))
            yield f"{name} sends {said(batch)}", sent._replace(arrived=arrived, broken=broken)

    def _settle(self, state: State, number: int, held: Held, stored: Stored | None, name: str) -> Moves[State]:
        assert held.end is not None
        if stored is None or not rules.held(stored.lease, held.epoch, same_server=True):
            yield f"{name} cannot settle", _drop(state, number, held)
            return
        newest = rules.newest((stored.progress, ProgressRow(held.epoch, 1, held.end)))._replace(n=0)
        after = _store(state, held.partition, stored._replace(progress=newest))
        settled = held._replace(progress=held.end, end=None)
        yield f"{name} settles", _hold(after, number, held, settled)

    # The steps of a command

    def _change(self, state: State, partitions: int) -> Moves[State]:
        said = "a reset" if partitions == AGAIN else f"a command that wants {partitions} partitions"
        if state.change == "ready":
            if partitions == AGAIN or state.generation.following is None:
                yield f"{said} asks for the leases", state._replace(change="asks")
            return
        for number, stored in enumerate(state.generation.partitions):
            if stored.lease.owner != COMMAND:
                lease = rules.acquired(stored.lease, COMMAND, GOOD, _claim(stored.lease))
                if lease is not None:
                    yield f"{said} takes that of {number}", _store(state, number, stored._replace(lease=lease))
        if self.may_order(state.generation) and partitions == AGAIN:
            yield f"{said} lets all begin again", self.begin_again(state)
        elif self.may_order(state.generation):
            back = tuple(
                each._replace(lease=rules.given_back(each.lease, each.lease.epoch))
                if each.lease.owner == COMMAND
                else each
                for each in state.generation.partitions
            )
            generation = state.generation._replace(
                partitions=back, stop=stop_at(state.generation.standing), following=partitions
            )
            yield (
                f"{said} orders the change, and gives the leases back",
                state._replace(generation=generation, changes=state.changes[1:], change="ready"),
            )

    def _begin_next(self, state: State) -> Moves[State]:
        generation = state.generation
        if generation.following is None:
            return
        start = self.begins(generation)
        if start is not None:
            new = Stored(progress=ProgressRow(progress=start))
            following = Generation(generation.number + 1, (new,) * generation.following)
            yield (
                f"the {generation.following} partitions of the next generation begin",
                state._replace(generation=following),
            )


def _claim(lease: LeaseRow) -> Holder | None:
    return Holder(str(lease.owner), lease.epoch, lease.renewals, None, live=False) if lease.until == OVER else None


def _order(held: Held) -> tuple[int, int]:
    return held.generation, held.partition


def _is(held: Held, generation: Generation, partition: int) -> bool:
    return (held.generation, held.partition) == (generation.number, partition)


def _stored(state: State, held: Held) -> Stored | None:
    """Return the rows of a partition that a worker has; None: they are gone with their generation."""
    return state.generation.partitions[held.partition] if held.generation == state.generation.number else None


def _store(state: State, number: int, stored: Stored) -> State:
    partitions = state.generation.partitions
    changed = (*partitions[:number], stored, *partitions[number + 1 :])
    return state._replace(generation=state.generation._replace(partitions=changed))


def _forgotten(state: State) -> State:
    """Return the state after a change, in which what has arrived does not count any more."""
    arrived = tuple((key, Arrived()) for key, _ in state.arrived)
    return state._replace(arrived=arrived, changes=state.changes[1:], change="ready")


def _with(state: State, number: int, worker: Worker) -> State:
    return state._replace(workers=(*state.workers[:number], worker, *state.workers[number + 1 :]))


def _hold(state: State, number: int, held: Held, after: Held) -> State:
    worker = state.workers[number]
    return _with(state, number, worker._replace(held=tuple(after if each == held else each for each in worker.held)))


def _drop(state: State, number: int, held: Held) -> State:
    worker = state.workers[number]
    return _with(state, number, worker._replace(held=tuple(each for each in worker.held if each != held)))


# Broken twins


class WithoutStopAt(Partitioning):
    """Begins the next generation where the first partition stands, and has the others stop where they are."""

    def begins(self, generation: Generation) -> Progress | None:
        """Begin at once."""
        return Progress(stop_at(generation.standing))


class FirstToArrive(Partitioning):
    """Begins the next generation as soon as one partition stands where all shall meet."""

    def begins(self, generation: Generation) -> Progress | None:
        """Look at that one alone."""
        stop = generation.stop
        return next((each for each in generation.standing if stop is not None and has_arrived(each, stop)), None)


class StopsWithoutLeases(Partitioning):
    """Orders the change while workers are at work."""

    def may_order(self, generation: Generation) -> bool:
        """Order."""
        return True


class ResetsBesideWorkers(StopsWithoutLeases):
    """Lets the partitions begin again while workers are at work, and overwrites their progress."""

    def begin_again(self, state: State) -> State:
        """Overwrite."""
        back = tuple(each._replace(progress=ProgressRow(each.lease.epoch)) for each in state.generation.partitions)
        return _forgotten(state)._replace(generation=state.generation._replace(partitions=back))


class PassesSilently(Partitioning):
    """Stores no progress where a partition has nothing to send."""

    def stores(self, generation: Generation, batch: Sequence[Row]) -> bool:
        """Settle messages alone."""
        return bool(batch)


class Everyone(Partitioning):
    """Takes every partition that is free."""

    def share(self, state: State) -> Sequence[str | None]:
        """Deal what is free to the first worker that is alive, and leave the rest."""
        alive = [str(number) for number, each in enumerate(state.workers) if each.alive]
        owners = [None if each.lease.owner is None else str(each.lease.owner) for each in state.generation.partitions]
        return [owner if owner in alive else next(iter(alive), None) for owner in owners]
