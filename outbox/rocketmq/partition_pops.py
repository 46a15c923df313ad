"""The messages of one partition without a worker: each pop hands some out, in one short transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import takewhile

from outbox.errors import LeaseLostError
from outbox.model.barrier import has_arrived
from outbox.model.lease import Holder, Partition
from outbox.model.message import Message
from outbox.model.parking import Parking, States
from outbox.model.position import EARLIEST, Position, Progress
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Selection, Subscription
from outbox.model.verdict import Retry
from outbox.rocketmq.asked import Asked
from outbox.runtime.failpoints import crash_point
from outbox.runtime.process import unique_name
from outbox.runtime.text import counted
from outbox.store.database import Channel
from outbox.store.failure import in_one_line
from outbox.store.idempotency.withdrawals import Withdrawals
from outbox.store.log.cursor import Batch, Cursor
from outbox.store.log.log import Limits, Log
from outbox.store.subscriptions.falling_due import FallingDue
from outbox.store.subscriptions.leases import Leases, LeaseWatch
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.pops import MOST_BYTES, Pops, Standing
from outbox.store.subscriptions.progress import ProgressLog
from outbox.telemetry.events import BatchRead, Teller, UpkeepRefused
from outbox.worker import upkeep
from outbox.worker.decisions import CarriedOut, OpenDecisions, log_carried_out
from outbox.worker.policy import BEHIND, DELAYED, EXPIRED, HandlerPolicy, newest
from outbox.worker.settle import by_id

#: So many rows of the log are read at once; those that are not handed out stay in memory for the next pops.
_LIMITS = Limits(rows=128, bytes=MOST_BYTES)
#: A pop ends after it has copied so many messages behind keys that are in other hands, or looked at so many portions.
MAX_BEHIND, _MOST_PORTIONS = 320, 16
#: A portion has at least so many messages.
_PORTION = 32
#: The progress behind more portions without a message to hand out is stored at once.
_FEW_PORTIONS = 2
#: So many delayed messages fall due in one transaction.
_FALLING_DUE = 1_000
#: The parking of a message that is passed before it is handed out, because of others of the keys of a pop.
NEXT = Parking(state=States.RETRY, holds=True, delay=timedelta(0))
#: The length of a lease that is taken over from a worker that has ended, and given back at once.
_LEASE = timedelta(seconds=3)


@dataclass(eq=False, slots=True)
class _Share:
    """The messages that one call gets."""

    asked: Asked
    messages: list[Message] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.asked.most - len(self.messages)


@dataclass(slots=True)
class _Taking:
    """What one pop takes, until it is written. `receipt`: the error of what is handed out."""

    receipt: str
    shares: Sequence[_Share]
    policy: HandlerPolicy
    most: int
    parkings: list[tuple[Message, Parking]] = field(default_factory=list)
    #: The messages of the log that are passed.
    read: list[Message] = field(default_factory=list)
    #: The keys of which a message holds back the later ones; the share is that of the message, if it is handed out.
    keys: dict[str | None, _Share | None] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """So many messages all calls may still get."""
        return sum(each.room for each in self.shares)

    @property
    def together(self) -> bool:
        """True when a call may get several messages of a key."""
        return self.policy.ordered and any(each.asked.most > 1 for each in self.shares)

    @property
    def last(self) -> int | None:
        """The last id that is handed out."""
        return max((message.id or 0 for each in self.shares for message in each.messages), default=None)

    @property
    def full(self) -> bool:
        """True when nothing more is handed out or copied."""
        return not self.room or sum(parking is BEHIND for _, parking in self.parkings) >= MAX_BEHIND

    def take(self, message: Message, parking: Parking | None = None) -> None:
        """Park a message as given; else hand it out, unless an earlier one of its key is in other hands."""
        behind, share = message.key in self.keys, None
        if parking is None and message.attempt > self.most:
            dead = self.policy.dead(message, f"handed out {counted(self.most, 'time')}, and not acknowledged")
            parking = replace(dead, attempts=self.most)
        if parking is None:
            share = self.keys[message.key] if behind else max(self.shares, key=lambda each: each.room)
            share = share if share is not None and share.room else None
        if share is not None:
            share.messages.append(message)
            parking = self.policy.failed(message, Retry(self.receipt, after=share.asked.time))
            parking = replace(parking, state=States.BEHIND) if behind else parking
        parking = parking or NEXT
        if share is None and behind and parking.holds:
            parking = BEHIND
        if parking.holds and message.key is not None:
            self.keys[message.key] = share
        self.parkings.append((message, parking))

    def keep(self, ids: Collection[int | None]) -> None:
        """Leave out messages that were not stored as handed out after all."""
        for each in self.shares:
            each.messages = [message for message in each.messages if message.id in ids]
        self.parkings = [each for each in self.parkings if each[1].error != self.receipt or each[0].id in ids]


class Kept:
    """What many partitions keep of the log, of so many bytes together: what was read longest ago goes first."""

    def __init__(self, most_bytes: int = 16 * 1024 * 1024) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        #: The bytes that each partition keeps, the oldest first.
        self._sizes: dict[Unhanded, int] = {}
        self._bytes = 0

    def note(self, unhanded: Unhanded, messages: Sequence[Message]) -> None:
        """Note what a partition keeps from now on, and let others forget, if that is too much."""
        size = sum(len(each.body) + len(each.headers_json or "") for each in messages)
        with self._lock:
            self._bytes += size - self._sizes.pop(unhanded, 0)
            if size:
                self._sizes[unhanded] = size
            while self._bytes > self._most:
                oldest = next(iter(self._sizes))
                self._bytes -= self._sizes.pop(oldest)
                oldest.forget()


class Unhanded:
    """The log behind the stored progress of a partition, with what was read and not handed out.

    Windows never change, so a batch counts as long as the progress is in its window, whoever has stored the progress.
    """

    def __init__(self, log: Log, stop: Position | None, kept: Kept) -> None:
        """`stop`: where all partitions meet."""
        self._log, self._kept = log, kept
        self._stop = stop
        self._cursor: Cursor | None = None
        self._batch: Batch | None = None
        #: The last id before the batch in its window; None: the batch is the first of the window.
        self._after: int | None = None

    def read(self, channel: Channel, progress: Progress) -> tuple[Batch, list[Message]]:
        """Return the batch in which the next messages behind the progress are, and these messages."""
        batch = self._batch
        if batch is None or not self._has_next(batch, progress):
            if self._cursor is None:
                self._cursor = Cursor(self._log, progress, stop=self._stop)
            self._cursor.follow(progress)
            batch = self._batch = self._cursor.read(channel)
            self._after = progress.after
            self._kept.note(self, batch.messages)
        after = progress.after
        left = [each for each in batch.messages if after is None or (each.id or 0) > after]
        return batch, left

    def forget(self) -> None:
        """Keep nothing: the next read asks the database. May be called from any thread."""
        self._batch = None

    def _has_next(self, batch: Batch, progress: Progress) -> bool:
        if progress.after is None or (progress.base, progress.target) != (batch.window.base, batch.window.target):
            return False
        begins = self._after is None or self._after <= progress.after
        return begins and (batch.end.after is None or progress.after < batch.end.after)


class PartitionPops:
    """The pops of one partition in this process, one at a time."""

    def __init__(
        self,
        stored: Subscription,
        partition: Partition,
        *,
        most: int,
        selection: Selection | None,
        teller: Teller,
        kept: Kept,
    ) -> None:
        """`most`: deliveries of a message. `selection`: of the calls, which pass all other messages, for every call.

        None: that of the subscription.
        """
        self.stored, self.partition, self.most = stored, partition, most
        self.policy = HandlerPolicy(retry=RetryPolicy(attempts=most + 1)).of(stored)
        self.paused = frozenset(key for key in self.policy.paused if key is not None)
        self.unhanded = Unhanded(Log(_LIMITS, selection or stored.selection, partition), stored.stop_at, kept)
        self.teller = teller.of_partition(partition.partition)
        self._watch = LeaseWatch(_LEASE)
        self._prune_at = 0.0
        #: True when the partition has come to where all partitions meet.
        self.arrived = False
        #: The worker that has the lease; None: nobody.
        self.holder: Holder | None = None

    def pop(self, channel: Channel, receipt: str, asked: Sequence[Asked]) -> list[list[Message]] | None:
        """Return the messages of each call, after they were stored as handed out.

        None: the subscription has changed, or somebody has taken the lease; look again.
        """
        shares = [_Share(each) for each in asked]
        pop = _Pop(channel, self, _Taking(receipt, shares, self.policy, self.most))
        try:
            while True:
                began = time.monotonic()
                with channel.transaction():
                    goes_on = pop.run()
                    crash_point("pop.before_commit")
                crash_point("pop.after_commit")
                pop.tell(time.monotonic() - began)
                if not goes_on:
                    break
        except LeaseLostError:
            return None
        standing = pop.standing
        self.holder = None
        if standing is None or standing.subscription != self.stored:
            return None
        if not standing.free:
            return self._look_at_lease(channel)
        self.arrived = self.is_stop(pop.end)
        self._tidy(channel, pop)
        return [each.messages for each in shares]

    def is_stop(self, progress: Progress) -> bool:
        """Return whether all partitions meet there."""
        return self.stored.stop_at is not None and has_arrived(progress, self.stored.stop_at)

    def _look_at_lease(self, channel: Channel) -> list[list[Message]] | None:
        """Note who has the lease; give the lease back for a worker that has ended."""
        leases, owner = Leases(channel), unique_name()
        holder = leases.look(self.partition)
        if holder is None or holder.lease_until is None:
            return None
        claim = self._watch.look(holder)
        lease = leases.acquire(self.partition, owner, _LEASE, claim) if claim and not holder.wanted else None
        if lease is None:
            self.holder = holder
            return []
        leases.release(lease)
        return None

    def _tidy(self, channel: Channel, pop: _Pop) -> None:
        """Delete old progress, now and then."""
        try:
            if pop.stored and pop.standing is not None:
                pop.pops.thin(pop.standing)
            if time.monotonic() >= self._prune_at:
                self._prune_at = time.monotonic() + upkeep.PRUNE_PROGRESS
                ProgressLog(channel).prune(self.partition)
        except Exception as error:
            # What was handed out is stored. A lost connection is noticed by the next pop.
            if not channel.database.transient(error):
                why = in_one_line(error, channel.database.commands)[0]
                self.teller.tell(UpkeepRefused, what="old progress", error=why)


class _Pop:
    """One pop. `standing`: how the partition stood at its beginning; `end`: the progress that it leaves."""

    def __init__(self, channel: Channel, partition: PartitionPops, taking: _Taking) -> None:
        stored, place, self._policy = partition.stored, partition.partition, partition.policy
        blocks = self._policy.ordered and self._policy.block_on_dead
        self._channel, self._partition = channel, partition
        self._parked = Parked(channel, stored.name, place, ordered=stored.ordered, compact=stored.compact)
        self._decisions = OpenDecisions(channel, self._parked, place, blocks=blocks)
        #: True after open decisions were carried out, as far as that is possible now.
        self._decided = False
        self._carried_out: list[CarriedOut] = []
        self._withdrawals = Withdrawals(channel)
        self.pops = Pops(channel, place)
        self.taking = taking
        self.standing: Standing | None = None
        self.end = Progress(EARLIEST)
        #: True when progress was stored.
        self.stored = False

    def run(self) -> bool:
        """Do everything inside the open transaction; return True if the pop goes on in another transaction."""
        self.pops.lock()
        standing = self.standing = self.pops.standing()
        if standing is None or standing.subscription != self._partition.stored or not standing.free:
            return False
        self.end = standing.settled.progress
        if standing.fell_due or (standing.decided and not self._decided):
            self._prepare(standing)
            return True
        if not (standing.due and self._hand_out_again(standing)):
            self._hand_out(standing)
        return False

    def tell(self, seconds: float) -> None:
        """Tell what was committed. `seconds`: of the transaction."""
        carried_out = [*self._carried_out, *self._decisions.met()]
        log_carried_out(carried_out)
        discarded = {id for each in carried_out if each.decision.verb == "discard" for id in each.messages}
        taking, self._carried_out = self.taking, []
        if taking.read and self.standing is not None:
            self._partition.teller.tell(BatchRead, messages=taking.read, now=self.standing.now)
        parkings = [each for each in taking.parkings if each[0].id not in discarded]
        self._partition.teller.tell_settled([], parkings, seconds)

    def _prepare(self, standing: Standing) -> None:
        """Carry out decisions of people, and let delayed messages join the units of their keys."""
        self._require_free(standing)
        if standing.fell_due:
            falling = FallingDue(self._channel, standing.subscription.name, standing.partition)
            due = falling.due(_FALLING_DUE)
            falling.join(due)
            self._parked.advance(set(due.values()))
        if standing.decided and not self._decided:
            # A writer must not hold up the others for as long as its transaction takes.
            open = self._decisions.open()
            self._carried_out = self._decisions.carry_out(open, standing.settled.progress, waits=False)
            self._decided = not self._carried_out

    def _require_free(self, standing: Standing) -> None:
        if not self.pops.hold(standing):
            raise LeaseLostError(
                f"{standing.partition.subscription}: somebody has taken the lease; nothing was settled"
            )

    # Messages whose time is over

    def _hand_out_again(self, standing: Standing) -> bool:
        """Hand out heads that are due; return False if nothing was written."""
        taking = self.taking
        run = max(each.room for each in taking.shares)
        ready = self.pops.due(taking.room, run, ordered=self._policy.ordered, paused=self._partition.paused)
        recalled = self._withdrawals.of([each.message for each in ready], inside=True)
        expired, withdrawn = {each.message.id for each in ready if each.expired}, recalled.withdrawn
        for message in recalled.free:
            taking.take(message, EXPIRED if message.id in expired else None)
        dead = [each for each in taking.parkings if each[1].state == States.DEAD]
        if dead or withdrawn:
            self._require_free(standing)
            self._parked.remove([message.id or 0 for message in withdrawn])
            self._parked.change(by_id(dead))
            gone = [*withdrawn, *(message for message, _ in dead)]
            self._parked.advance({message.key for message in gone if message.key is not None})
        again = [each for each in taking.parkings if each[1].error == taking.receipt]
        taking.keep(self.pops.hand_out_again(standing, taking.receipt, again))
        # Also where a receipt was faster: the lock of the lease has drawn a transaction id.
        return bool(again or dead or withdrawn)

    # Messages of the log

    def _hand_out(self, standing: Standing) -> None:
        """Hand out the next messages of the log, and store the progress."""
        before, taking = standing.settled, self.taking
        seen, highest, portions = False, before.highest, 0
        while portions < _MOST_PORTIONS:
            portions += 1
            batch, messages = self._partition.unhanded.read(self._channel, self.end)
            seen = seen or batch.seen > 0
            highest = None if highest is None else max(highest, batch.highest)
            self.end = self._take(standing, batch, messages)
            if taking.last is not None or taking.full or not batch.seen:
                break
        if taking.parkings or self._is_stored(standing, seen=seen, passed=portions > _FEW_PORTIONS):
            self._write(standing, highest)

    def _take(self, standing: Standing, batch: Batch, messages: list[Message]) -> Progress:
        """Take messages of a batch, and return the progress behind them."""
        taking, policy = self.taking, self._policy
        some = messages[: max(_PORTION, 2 * taking.room)]
        held = self._partition.paused | self._held(standing, some)
        free, decided = self._decisions.separate(some, held, policy)
        free, parkings = policy.sort_out(free, batch.now, held=held)
        replaced = {message.id for message in newest(free)[1]} if policy.compact else set()
        recalled = self._withdrawals.of(free, inside=True)
        gone = replaced | {message.id for message in recalled.withdrawn}
        at_once = {message.id: parking for message, parking in [*decided, *parkings]}
        at_once |= {message.id: DELAYED for message in recalled.open}
        for message in _by_keys(some) if policy.ordered else some:
            if message.id not in gone:
                taking.take(message, at_once.get(message.id))
        if not taking.room:
            some = some[: _passed(some, taking.last or 0, together=taking.together)]
        taking.read += some
        if len(some) == len(messages):
            return batch.end
        taking.parkings = [each for each in taking.parkings if (each[0].id or 0) <= (some[-1].id or 0)]
        return Progress(batch.window.base, batch.window.target, some[-1].id)

    def _held(self, standing: Standing, messages: Sequence[Message]) -> set[str]:
        keys = {message.key for message in messages if message.key is not None} if standing.held else set[str]()
        return self._parked.held_among(keys) if keys else keys

    def _is_stored(self, standing: Standing, *, seen: bool, passed: bool) -> bool:
        """Return whether to store progress behind which no message is parked: once in a while, to save writes."""
        moved = self.end != standing.settled.progress
        every = upkeep.STORE_PASSED if seen else upkeep.STORE_IDLE if moved else upkeep.STORE_SAME
        # A row from the future was written before the clock of the database stepped back.
        age = abs((standing.now - standing.settled.settled_at).total_seconds())
        return age >= every or (moved and (passed or self._partition.is_stop(self.end)))

    def _write(self, standing: Standing, highest: int | None) -> None:
        crash_point("pop.before_write")
        taking = self.taking
        taking.keep(self.pops.settle(standing, self.end, highest, self._parked, taking.receipt, by_id(taking.parkings)))
        behind = {m.key for m, parking in taking.parkings if parking.holds and parking.error != taking.receipt}
        self._parked.advance({key for key in behind if key is not None})
        self._decisions.meet([message for message, _ in taking.parkings])
        self.stored = True


def _by_keys(messages: Sequence[Message]) -> list[Message]:
    """Return the messages key by key, in the order of the first of each."""
    first = dict[object, int]()
    for place, each in enumerate(messages):
        first.setdefault(each.key or each.id, place)
    return sorted(messages, key=lambda each: first[each.key or each.id])


def _passed(messages: Sequence[Message], last: int, *, together: bool) -> int:
    """Return how many messages are passed: all up to the last one handed out.

    `together`: also what follows at once of their keys, of which the next pop may hand out several.
    """
    keys = {each.key for each in messages if together and (each.id or 0) <= last and each.key is not None}
    return sum(1 for _ in takewhile(lambda each: (each.id or 0) <= last or each.key in keys, messages))
