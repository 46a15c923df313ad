"""The delivery report: how many messages were written, which are parked, and how long it took to settle batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from outbox.model.limits import HALF_TOPIC
from outbox.model.position import Position, Progress
from outbox.model.subscription import Subscription
from outbox.model.topics import Topics
from outbox.spark.reports.batches import Batch, Batches
from outbox.spark.reports.names import AGE_LIMITS, OLDER

#: The columns that each function needs of its DataFrame; the option `columns` makes the source read only these.
PER_HOUR_COLUMNS = "topic string, created_at timestamp"
PARKED_COLUMNS = "subscription string, state string, topic string, parked_at timestamp, error string"
BATCH_COLUMNS = "id long, xact_id long, topic string, slot short, tags string, direct string, created_at timestamp"

#: Errors are told apart by this many characters of their text.
_ERROR = 120
#: Progress rows are kept this long.
_KEPT = timedelta(days=1)
#: The columns of a batch that are known without its messages.
_PLACE = "subscription string, generation int, partition int, epoch long, n long, settled_at timestamp"
_PLACE_NAMES = tuple(field.split()[0] for field in _PLACE.split(", "))


def messages_per_hour(messages: DataFrame) -> DataFrame:
    """Count ordinary messages by topic and by the hour in which they were written.

    Returns:
        topic, hour (in the session's time zone), messages.
    """
    return (
        messages.where(sf.col("topic") != HALF_TOPIC)
        .groupBy("topic", sf.date_trunc("hour", sf.col("created_at")).alias("hour"))
        .agg(sf.count("*").alias("messages"))
        .orderBy("hour", "topic")
    )


def parked_by_age(parked: DataFrame, now: datetime) -> DataFrame:
    """Count parked messages by subscription, state and the time since they were parked.

    Returns:
        subscription, state, age (one of `names.AGES`), messages, oldest (when the first of them was parked).
    """
    seconds = sf.unix_micros(sf.lit(now)) / 1e6 - sf.unix_micros(sf.col("parked_at")) / 1e6
    return (
        parked.groupBy("subscription", "state", _age_of(seconds).alias("age"))
        .agg(sf.count("*").alias("messages"), sf.min("parked_at").alias("oldest"))
        .orderBy("subscription", "state", sf.desc("oldest"))
    )


def dead_letters(parked: DataFrame) -> DataFrame:
    """Count dead letters by subscription, topic and the beginning of their error, the most frequent first.

    Returns:
        subscription, topic, error, letters, oldest, newest (when the first and the last of them were parked).
    """
    return (
        parked.where(sf.col("state") == "dead")
        .groupBy("subscription", "topic", sf.substring("error", 1, _ERROR).alias("error"))
        .agg(sf.count("*").alias("letters"), sf.min("parked_at").alias("oldest"), sf.max("parked_at").alias("newest"))
        .orderBy(sf.desc("letters"), "subscription", "topic", "error")
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """One partition of a subscription, and its batches. `selects` tells which messages of the log it handles."""

    subscription: Subscription
    partition: int
    batches: Batches

    def selects(self, topic: str, slot: int, tags: str | None, direct: str | None) -> bool:
        chosen = self.subscription.selection
        if not Topics.of(chosen.topics).matches(topic):
            return False
        if chosen.tags is not None and tags not in chosen.tags:
            return False
        if slot % self.subscription.partitions != self.partition:
            return False
        return direct == chosen.only if chosen.only is not None else direct is None or direct != chosen.skips


@dataclass(frozen=True, slots=True)
class KeptBatches:
    """The batches whose progress rows are kept, by subscription and partition."""

    readers: tuple[_Reader, ...]

    @property
    def since(self) -> Position:
        """A position that all messages of the batches come after; as `since` of the source it leaves out older ones."""
        known = [each.batches.since for each in self.readers]
        return Position.of(min((each.head for each in known), default=0), (n for each in known for n in each.open))


def kept_batches(progress: DataFrame, subscriptions: Sequence[Subscription]) -> KeptBatches:
    """Collect the progress rows of the present generations on the driver: these are few, and only of the last day.

    Args:
        progress: the table `progress`.
        subscriptions: the subscriptions as the database has them.
    """
    known = {(each.name, each.generation): each for each in subscriptions}
    rows: defaultdict[tuple[str, int, int], list[Batch]] = defaultdict(list)
    wanted = ("subscription", "generation", "partition", "epoch", "n", "base", "target", "after_id", "settled_at")
    for row in progress.select(*wanted).orderBy("epoch", "n").toArrow().to_pylist():
        if (row["subscription"], row["generation"]) in known:
            rows[row["subscription"], row["generation"], row["partition"]].append(_batch(row))
    readers = []
    for (name, generation, partition), batches in sorted(rows.items()):
        subscription = known[name, generation]
        found = Batches(batches, complete=_is_complete(subscription, batches))
        readers.append(_Reader(subscription, partition, found))
    return KeptBatches(tuple(readers))


def settled_batches(messages: DataFrame, kept: KeptBatches) -> DataFrame:
    """Measure, for each batch that a subscription has settled, the time from writing its oldest message to settling.

    The report goes back as far as progress rows are kept, which is a day. The messages that the oldest row settled are
    not known. A message that was parked counts as settled when it was parked. The time in which the transaction of a
    message was open counts, too.

    Args:
        messages: the log, or the part of it that was committed after `kept.since`.
        kept: see `kept_batches`.

    Returns:
        subscription, generation, partition, epoch, n, settled_at, messages (how many the batch settled), oldest (when
        the first of them was written), seconds.
    """
    readers = kept.readers
    # A plain Python function, because functions over Arrow batches also need pandas.
    batches_of = sf.udf(_found_by(readers), "array<struct<reader: int, batch: int>>", useArrow=False)
    found = messages.select(
        sf.explode(batches_of("id", "xact_id", "topic", "slot", "tags", "direct")).alias("found"), "created_at"
    )
    return (
        found.groupBy("found.reader", "found.batch")
        .agg(sf.count("*").alias("messages"), sf.min("created_at").alias("oldest"))
        .join(_places(messages, readers), ["reader", "batch"])
        .select(*_PLACE_NAMES, "messages", "oldest")
        .withColumn("seconds", (sf.unix_micros("settled_at") - sf.unix_micros("oldest")) / 1e6)
        .orderBy("settled_at")
    )


def settling_times(batches: DataFrame) -> DataFrame:
    """Sum up the rows of `settled_batches` by subscription, with percentiles over batches: one value per batch.

    Returns:
        subscription, since (when the first of the batches was settled), batches, messages, p50, p95, p99 (seconds).
    """
    percentiles = sf.percentile("seconds", sf.array(*map(sf.lit, (0.5, 0.95, 0.99))))
    return (
        batches.groupBy("subscription")
        .agg(
            sf.min("settled_at").alias("since"),
            sf.count("*").alias("batches"),
            sf.sum("messages").alias("messages"),
            percentiles.alias("p"),
        )
        .select("subscription", "since", "batches", "messages", *(sf.col("p")[i].alias(f"p{q}") for i, q in _P))
        .orderBy("subscription")
    )


_P = ((0, 50), (1, 95), (2, 99))


def _is_complete(subscription: Subscription, batches: Sequence[Batch]) -> bool:
    """Return whether these include the first settle of a subscription that began with the first message."""
    first = batches[0]
    is_first = (subscription.generation, first.epoch, first.n) == (1, 1, 1)
    # A subscription that began elsewhere has a progress row of its creation, which is kept for at least a day.
    return is_first and first.settled_at - subscription.created_at < _KEPT


def _batch(row: dict[str, Any]) -> Batch:
    target = None if row["target"] is None else Position.parse(row["target"])
    progress = Progress(Position.parse(row["base"]), target, row["after_id"])
    return Batch(epoch=row["epoch"], n=row["n"], progress=progress, settled_at=row["settled_at"])


def _found_by(
    readers: Sequence[_Reader],
) -> Callable[[int, int, str, int, str | None, str | None], list[tuple[int, int]]]:
    """Return a function that finds the readers that have settled a message, each with the batch that settled it.

    The function returns pairs of indexes: of the reader in `readers`, and of the batch in its batches.
    """

    def find(
        id: int, number: int, topic: str, slot: int, tags: str | None, direct: str | None
    ) -> list[tuple[int, int]]:
        return [
            (at, batch)
            for at, reader in enumerate(readers)
            if reader.selects(topic, slot, tags, direct) and (batch := reader.batches.index(number, id)) is not None
        ]

    return find


def _places(messages: DataFrame, readers: Sequence[_Reader]) -> DataFrame:
    """Return what is known of each batch without its messages, to join with what was found about its messages."""
    rows = [
        (at, index, reader.subscription.name, reader.subscription.generation, reader.partition, batch.epoch, batch.n,
         batch.settled_at.astimezone(UTC))
        for at, reader in enumerate(readers)
        for index, batch in enumerate(reader.batches.batches)
    ]  # fmt: skip
    return messages.sparkSession.createDataFrame(rows, f"reader int, batch int, {_PLACE}")


def _age_of(seconds: Column) -> Column:
    found = sf.lit(OLDER)
    for limit, name in reversed(AGE_LIMITS):
        found = sf.when(seconds < limit, name).otherwise(found)
    return found
