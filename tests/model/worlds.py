"""All worlds of the model, and the broken twins that are refuted in them.

A world is small enough to visit all of its states. What it has is what can go wrong together; what cannot is in another
one, so that each stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tests.model import (
    answering,
    blaming,
    checking,
    deciding,
    deduping,
    directing,
    extracting,
    holding,
    leasing,
    partitioning,
    popping,
    twins,
)
from tests.model.answering import Answering
from tests.model.blaming import Blaming
from tests.model.checking import Checking
from tests.model.deciding import Decider, Deciding
from tests.model.deduping import Consuming, Deduping
from tests.model.directing import Directing
from tests.model.explorer import World
from tests.model.extracting import Extracting
from tests.model.holding import Holding
from tests.model.leasing import Leasing
from tests.model.partitioning import Partitioning
from tests.model.popping import Popping
from tests.model.relaying import Faults, PageByPage, Relaying
from tests.model.rules import LogRow

JOIN, COMMIT = Decider("join", "commit"), Decider("word", "commit")
ROLLBACK, FENCE = Decider("word", "rollback"), Decider("fence", "rollback")


class Scene(NamedTuple):
    """A world to visit. `states`: it has at least so many. `full`: only at full scale. `most`: so many are visited."""

    name: str
    world: partial[Any]
    states: int
    full: bool = False
    most: int = 10_000_000


class Twin(NamedTuple):
    """A world with one rule broken, which `broken` refutes. `right`: the same world with the rule."""

    name: str
    world: partial[Any]
    right: partial[Any]
    broken: str


def _log(*keys: str) -> tuple[LogRow, ...]:
    """Return messages of these keys. A plus means that a message is delayed, an exclamation mark that it expires."""
    return tuple(
        LogRow(id, key[0], holding.LATER if "+" in key else None, holding.LATER if "!" in key else None)
        for id, key in enumerate(keys, 1)
    )


#: Two writers of a key, of which one is late; two keys.
_LATE, _APART = (("a",), ("a",)), (("a",), ("b",))
#: Another transaction is open while two take turns.
_BESIDE = (("a",), ("a",), ("b",))
#: A writer of two messages, and another that may be late or first.
_TWO_AND_ONE = (("a", "b"), ("b",))
#: A writer whose ids are forgotten in a crash, and given out again.
_FORGOTTEN = (("a",), ("b", "b"))


def _relaying(
    world: type[Relaying],
    writers: tuple[tuple[str, ...], ...],
    workers: int = 1,
    *,
    command: bool = False,
    **faults: Any,
) -> partial[Any]:
    return partial(world, writers, workers=workers, command=command, faults=Faults(**faults))


def _partitioning(
    world: type[Partitioning],
    partitions: int,
    *changes: int,
    writers: tuple[tuple[str, ...], ...] = _APART,
    workers: int = 2,
    lapses: int = 0,
) -> partial[Any]:
    faults = Faults(lapses=lapses)
    return partial(world, writers, partitions=partitions, workers=workers, changes=changes, faults=faults)


def _holding(world: type[Holding], *keys: str, refusals: int = 2, crashes: int = 1, **options: Any) -> partial[Any]:
    return partial(world, _log(*keys), troubles=holding.Troubles(refusals, crashes), **options)


SCENES: tuple[Scene, ...] = (
    Scene("a transaction open beside two that take turns", _relaying(Relaying, _BESIDE), 15_000),
    Scene("late rows in a window of several pages", _relaying(PageByPage, _TWO_AND_ONE), 7_000),
    Scene(
        "a crash, a lost connection and a lapse", _relaying(Relaying, _LATE, 2, crashes=1, losses=1, lapses=1), 150_000
    ),
    Scene("ids given out again after a crash", _relaying(Relaying, _FORGOTTEN, crashes=1), 50_000),
    Scene("a failover to a standby that lags", _relaying(Relaying, _LATE, 2, failovers=1), 5_000),
    Scene("a command takes the lease", _relaying(Relaying, _LATE, 2, command=True, lapses=1), 40_000),
    Scene("pops beside each other", partial(Popping, _LATE, deaths=1, late=1), 5_000),
    Scene("pops and a worker", partial(Popping, _APART, turns=1), 5_000),
    Scene("a lease and its clocks", partial(Leasing, 2, 1, end=4, leaps=1, asks=3), 300_000),
    Scene("two partitions", _partitioning(Partitioning, 2, lapses=1), 15_000),
    Scene("from one partition to two", _partitioning(Partitioning, 1, 2), 7_000),
    Scene("from two partitions to one", _partitioning(Partitioning, 2, 1), 19_000),
    Scene("two partitions that begin again", _partitioning(Partitioning, 2, partitioning.AGAIN, lapses=1), 100_000),
    Scene("retries, dead letters and decisions", _holding(Holding, "a", "b", "a"), 4_300),
    Scene("delayed messages", _holding(Holding, "a", "b", "a", "a+"), 15_000),
    Scene("messages that expire", _holding(Holding, "a!", "a", "a!+"), 100_000),
    Scene("dead letters that block nothing", _holding(Holding, "a", "b", "a", on_dead="continue"), 5_700),
    Scene("decisions on messages that nobody has read", _holding(Directing, "a", "b", "a", refusals=1), 9_000),
    Scene("an outage", partial(Blaming, *"abcd", away=8), 160),
    Scene("an outage of which the destination speaks", partial(Blaming, *"abcd", away=8, says="unavailable"), 160),
    Scene("a message that crashes its handler", partial(Blaming, *"abacdef", poison=1), 20),
    Scene("an outage and a message that crashes", partial(Blaming, *"abacd", away=8, poison=2), 790),
    Scene("an outage and a key with more than a batch", partial(Blaming, *"aaaaa", away=3), 70),
    Scene("a message that crashes, behind one of an outage", partial(Blaming, *"abaacd", away=4, poison=3), 350),
    Scene(
        "more than a batch behind one of an outage, which crashes", partial(Blaming, *"aaaaab", away=4, poison=2), 100
    ),
    Scene("more than a batch of messages, in an outage", partial(Blaming, *"abcdef", away=6, poison=2), 100),
    Scene("more keys than memory", _holding(Holding, "a", "b", "a", "b", most_keys=0), 13_000),
    Scene(
        "late answers",
        partial(Answering, 3, troubles=answering.Troubles(hangs=1, lapses=1, losses=1)),
        10_000,
    ),
    Scene(
        "late answers of a lease that lapses twice",
        partial(Answering, 3, troubles=answering.Troubles(hangs=1, lapses=2, losses=1)),
        70_000,
    ),
    Scene(
        "messages of calls that hang arrive late",
        partial(Answering, 3, processes=1, late=True, troubles=answering.Troubles(hangs=2, losses=1)),
        500,
    ),
    Scene("a transaction of half messages", partial(Deciding, 4, (JOIN, COMMIT, ROLLBACK, FENCE)), 20_000),
    *(Scene(f"check-back, {way}", partial(Checking, way), 15) for way in ("join", "record", "listener")),
    Scene("an extract", partial(Extracting, _BESIDE, crashes=1), 15_000),
    Scene("a dedup key", partial(Deduping, 3, clock=2), 1_500),
    Scene("the inbox of two consumers", partial(Consuming, ("billing", "mail"), messages=2, crashes=2), 1_500),
    Scene("three writers, two workers", _relaying(Relaying, _BESIDE, 2, lapses=1), 550_000, full=True),
    Scene(
        "two transactions of a writer",
        _relaying(Relaying, (("a", "a"), ("a",)), 2, crashes=1, losses=1, lapses=1),
        3_000_000,
        full=True,
        most=3_000_000,
    ),
    Scene("more ids given out again", _relaying(Relaying, (("a",), ("b", "b", "b")), crashes=1), 600_000, full=True),
    Scene(
        "a command and a lost connection",
        _relaying(Relaying, _LATE, 2, command=True, lapses=1, losses=1),
        300_000,
        full=True,
    ),
    Scene(
        "a failover under three writers",
        _relaying(Relaying, (("a",), ("b",), ("a",)), failovers=1),
        500_000,
        full=True,
    ),
    Scene("two partitions, one, three", _partitioning(Partitioning, 2, 1, 3, lapses=1), 280_000, full=True),
    Scene("five messages of two keys", _holding(Holding, "a", "b", "a", "b", "a", refusals=3), 105_000, full=True),
    Scene(
        "delayed behind dead letters",
        _holding(Holding, "a", "b", "a", "a+", refusals=3, on_dead="continue"),
        130_000,
        full=True,
    ),
    Scene(
        "two hung calls",
        partial(Answering, 3, troubles=answering.Troubles(hangs=2, lapses=2, losses=1)),
        60_000,
        full=True,
    ),
    Scene("five senders of half messages", partial(Deciding, 5, (JOIN, COMMIT, ROLLBACK, FENCE)), 60_000, full=True),
)


def _twin(
    name: str,
    make: Callable[..., partial[Any]],
    broken: type,
    right: type,
    says: str,
    *args: Any,
    **options: Any,
) -> Twin:
    return Twin(name, make(broken, *args, **options), make(right, *args, **options), says)


def _of(world: Callable[..., World[Any]], *args: Any, **options: Any) -> partial[Any]:
    return partial(world, *args, **options)


_HANGS = answering.Troubles(hangs=1, lapses=2)

TWINS: tuple[Twin, ...] = (
    _twin("highest id", _relaying, twins.HighestId, Relaying, "lost", _APART),
    _twin("floor below xmin", _relaying, twins.BelowOldest, Relaying, "order", _BESIDE),
    _twin("late rows forgotten", _relaying, twins.ForgetsLate, PageByPage, "b ends with", _TWO_AND_ONE),
    _twin("order by transaction id", _relaying, twins.ByTransaction, Relaying, "order", _LATE),
    _twin("positions of a standby", _relaying, twins.OnStandby, Relaying, "lost", _APART),
    _twin("reads what is not committed", _relaying, twins.ReadsUncommitted, Relaying, "phantom", _LATE),
    _twin(
        "no epoch in the settle",
        _relaying,
        twins.NoEpoch,
        Relaying,
        "the stored progress goes back",
        _LATE,
        2,
        lapses=1,
    ),
    _twin(
        "no lease check before the call",
        _relaying,
        twins.NoLeaseCheck,
        Relaying,
        "a ends with message 1",
        _LATE,
        2,
        lapses=1,
    ),
    _twin(
        "base kept over a lost connection",
        _relaying,
        twins.KeepsBase,
        Relaying,
        "b ends with message 0",
        _FORGOTTEN,
        crashes=1,
    ),
    _twin(
        "a command that does not ask",
        _relaying,
        twins.CommandRobs,
        Relaying,
        "repeated without a failure",
        _LATE,
        2,
        command=True,
    ),
    _twin("pops without the lock", _of, popping.NoLock, Popping, "twice", _APART),
    _twin("pops beside a worker", _of, popping.BesideWorker, Popping, "twice", _APART, turns=1),
    _twin("a pop that looks at the lease once", _of, popping.LooksOnce, Popping, "twice", _APART, turns=1),
    _twin("a pop that forgets held keys", _of, popping.HandsOutBehind, Popping, "order", _LATE),
    _twin("the second of a key to another call", _of, popping.HandsOutTheRest, Popping, "order", _LATE, late=1),
    _twin("waits for its own length", _of, leasing.OwnLength, Leasing, "two at once", 3, 1, end=2, asks=2),
    _twin("believes a wall clock", _of, leasing.WallClock, Leasing, "two at once", 2, 1, end=1, leaps=1, asks=2),
    _twin("looks once, takes later", _of, leasing.LooksOnce, Leasing, "two at once", 2, 1, end=2, asks=3),
    _twin("deadline from the answer", _of, leasing.FromTheAnswer, Leasing, "two at once", 2, 1, end=2, asks=2),
    _twin("gives back what is another's", _of, leasing.GivesBackAny, Leasing, "two at once", 2, 1, end=2, asks=3),
    _twin("barrier without stop_at", _partitioning, partitioning.WithoutStopAt, Partitioning, "lost", 2, 1),
    _twin("the first to arrive begins", _partitioning, partitioning.FirstToArrive, Partitioning, "lost", 2, 1),
    _twin(
        "barrier without the leases",
        _partitioning,
        partitioning.StopsWithoutLeases,
        Partitioning,
        "repeated without a failure",
        2,
        1,
    ),
    _twin(
        "begins again beside its workers",
        _partitioning,
        partitioning.ResetsBesideWorkers,
        Partitioning,
        "lost",
        2,
        partitioning.AGAIN,
    ),
    _twin("silent partitions store nothing", _partitioning, partitioning.PassesSilently, Partitioning, "stuck", 2, 1),
    _twin("everyone takes what is free", _partitioning, partitioning.Everyone, Partitioning, "unfair", 2),
    _twin("held keys forgotten", _holding, holding.ForgetsKeys, Holding, "order", "a", "a", "a"),
    _twin("what is behind gets no head", _holding, holding.NeverAdvances, Holding, "lost", "a", "a", "a"),
    _twin("what is behind is tried", _holding, holding.TriesWhatIsBehind, Holding, "order", "a", "a", "a"),
    _twin("a key freed at once", _holding, holding.FreesAtOnce, Holding, "order", "a", "a", "a"),
    _twin(
        "a decision is closed before its message is read",
        _holding,
        directing.ClosesAtOnce,
        Directing,
        "sent: message",
        "a",
        "a",
        refusals=1,
    ),
    _twin(
        "a decision is stamped before the settle",
        _holding,
        directing.StampsTooEarly,
        Directing,
        "sent: message",
        "a",
        "a",
        refusals=1,
    ),
    _twin("every failure is blamed", _of, blaming.BlamesEveryFailure, Blaming, "an attempt", *"abcd", away=8),
    _twin(
        "what is behind a message that is done is not tried",
        _of,
        blaming.NeverAdvances,
        Blaming,
        "lost: at rest message 3 waits for nothing",
        *"abaacd",
        away=4,
        poison=3,
    ),
    _twin(
        "the first is tried again",
        _of,
        blaming.TriesTheFirst,
        Blaming,
        "stuck",
        *"aaaaab",
        away=4,
        poison=2,
    ),
    _twin("nobody is blamed", _of, blaming.BlamesNobody, Blaming, "stuck", *"abcdefg", poison=1),
    _twin("late answers over a lost lease", _of, answering.CountsLateAnswers, Answering, "order", 2, troubles=_HANGS),
    _twin(
        "keys of hung calls not held",
        _of,
        answering.SendsBesideHungCalls,
        Answering,
        "order",
        3,
        processes=1,
        late=True,
        troubles=answering.Troubles(hangs=1),
    ),
    _twin(
        "what hangs is passed and not parked",
        _of,
        answering.PassesWhatHangs,
        Answering,
        "lost",
        2,
        processes=1,
        late=True,
        troubles=answering.Troubles(hangs=1),
    ),
    _twin("first verdict does not stand", _of, deciding.LastVerdictStands, Deciding, "two verdicts", 1, (JOIN, FENCE)),
    _twin("fence without the lock", _of, deciding.FenceLooks, Deciding, "two verdicts", 1, (JOIN, FENCE)),
    _twin("send without the lock", _of, deciding.NoLock, Deciding, "lost", 1, (JOIN, FENCE)),
    _twin("lock in the statement that reads", _of, deciding.OneStatement, Deciding, "lost", 1, (JOIN, FENCE)),
    _twin("absent is rolled back", _of, checking.AbsentIsRollback, Checking, "lost", "listener"),
    _twin("fence without a record", _of, checking.FencesWithoutRecord, Checking, "lost", "record"),
    _twin("a position that is not flushed", _of, extracting.NotFlushed, Extracting, "lost", _FORGOTTEN, crashes=1),
    _twin("an extract's position of a standby", _of, extracting.ExtractsOnStandby, Extracting, "lost", _APART),
    _twin("dedup by id alone", _of, deduping.ByIdAlone, Consuming, "lost", ("billing", "mail")),
    _twin("the note before the work", _of, deduping.NotesBefore, Consuming, "lost", ("billing",)),
    _twin("looks for the dedup key, then writes", _of, deduping.LooksThenWrites, Deduping, "written twice", 2),
)
