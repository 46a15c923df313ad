"""Archive, then purge: messages leave the database only after they are proven to be in the archive.

The proof reads both sides anew and row by row: the messages from the database, their copies from the Parquet files.
Before that the bytes of these files are compared with the checksums in the manifests: a file that a disk has damaged is
found even where what is damaged is not read now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from os import PathLike
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from outbox.errors import ArchiveError, PositionError
from outbox.model.limits import HALF_TOPIC
from outbox.model.position import EARLIEST
from outbox.spark import archived, offset
from outbox.spark.files import sha256_of
from outbox.spark.manifest import Archive, ArchivedFile, Manifest
from outbox.store.database import Database
from outbox.store.dialects.dialect import Channel
from outbox.store.log.extraction import MESSAGES, columns_of
from outbox.store.log.stamp import Stamp, server_of
from outbox.store.operations.purge import Kept, Purge, Purged

ROWS_PER_RANGE = 100_000

#: A sum of hashes is kept below it, and so fits into a signed number of 64 bits.
_MODULUS = 2**63
_MASK = 2**60 - 1
_EXAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Messages of one range of ids: how many there are in the database, how many of these in the archive; checksums.

    Both ids belong to it.
    """

    first_id: int
    last_id: int
    rows: int
    archived: int
    checksum: int
    archived_checksum: int

    @property
    def same(self) -> bool:
        """Whether the archive holds each message of the database, once and with the same contents."""
        return (self.rows, self.checksum) == (self.archived, self.archived_checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Messages that are old enough to go, beside their copies in an archive, range by range of their ids.

    `differences`: some of the messages of the first range that differs, in words.
    """

    kept: Kept
    ranges: tuple[Range, ...]
    differences: str = ""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Messages that might be purged: those that are old enough, that every subscription is past, and an archive has."""

    archive: Archive
    last: Manifest
    kept: Kept


def compare_with_archive(
    spark: SparkSession,
    database: Database,
    channel: Channel,
    path: str | PathLike[str],
    older_than: timedelta,
    *,
    source: Mapping[str, str],
    width: int = ROWS_PER_RANGE,
) -> Comparison:
    """Compare the messages of a database that might be purged with an archive.

    They are older than this, every subscription is past them, and they are not behind the end of the archive.

    Args:
        spark: a session.
        database: where the messages are.
        channel: a connection to it.
        path: the folder of the archive.
        older_than: how long messages are kept, by the clock of the database.
        source: the options by which Spark reads the same database: url, urlEnv or service, and schema.
        width: ids in a range.

    Raises:
        ArchiveError: there is no archive, it cannot be read, or a file of it is damaged or missing.
        PositionError: the archive is of another server.
        SubscriptionError: there is no subscription, so nobody can tell what is still needed.
    """
    found = candidates(database, channel, path, older_than)
    return found if isinstance(found, Comparison) else compare_candidates(spark, found, source=source, width=width)


def candidates(
    database: Database, channel: Channel, path: str | PathLike[str], older_than: timedelta
) -> Candidates | Comparison:
    """Find out, without Spark, what might be purged; a comparison of nothing, if nothing might be.

    Raises:
        ArchiveError: there is no archive, or it cannot be read.
        PositionError: the archive is of another server.
        SubscriptionError: there is no subscription, so nobody can tell what is still needed.
    """
    archive = Archive(path)
    last = archive.newest()
    _require_same_server(database, channel, archive, last)
    purge = Purge(database)
    kept = purge.passed(channel, Kept(old=purge.old(channel, older_than), position=last.until))
    if not purge.rehearse(channel, older_than, kept=kept).rows:
        # What becomes old or decided from now on is not compared, so nothing may go.
        return Comparison(kept=replace(kept, position=EARLIEST), ranges=())
    return Candidates(archive, last, kept)


def compare_candidates(
    spark: SparkSession, found: Candidates, *, source: Mapping[str, str], width: int = ROWS_PER_RANGE
) -> Comparison:
    """Compare what might be purged with its copies; see `compare_with_archive`."""
    archive, highest = found.archive, found.kept.old.last_id
    is_old = sf.col("id") <= highest
    stored = _stored(spark, found, source).where(is_old)
    copies = archived(spark, archive.path).where(is_old)
    _require_intact(spark, archive, [file for file in archive.counted() if file.first_id <= highest])
    ranges = [replace(each, last_id=min(each.last_id, highest)) for each in compare(stored, copies, width=width)]
    first = next((each for each in ranges if not each.same), None)
    return Comparison(
        kept=found.kept,
        ranges=tuple(ranges),
        differences="" if first is None else _examples(first, stored, copies),
    )


def purge_archived(
    database: Database, channel: Channel, older_than: timedelta, compared: Comparison, *, rehearsal: bool = False
) -> Purged:
    """Delete what every subscription is past, of what was proven to be in the archive, and nothing else.

    What is committed after the comparison, with whatever id, is not among it: the archive's position does not see it.

    Raises:
        ArchiveError: a range differs, the first of which is named; nothing is deleted.
    """
    _require_same(compared)
    purge = Purge(database)
    return (purge.rehearse if rehearsal else purge.run)(channel, older_than, kept=compared.kept)


def _require_same_server(database: Database, channel: Channel, archive: Archive, last: Manifest) -> None:
    here, there = server_of(database, channel), last.server
    if here != there:
        raise PositionError(
            f"{archive.path} was extracted from another server, timeline or outbox ({here.unlike(there)}), so it"
            " proves nothing about these messages, and nothing was purged; give the archive of this database"
        )


def _require_intact(spark: SparkSession, archive: Archive, files: list[ArchivedFile]) -> None:
    """Have executors compare the bytes of files with the checksums that were noted when they were written."""
    if not files:
        return
    noted = [(str(archive.path / file.path), file.sha256) for file in files]
    checksum = sf.udf(_checksum_of, "string", useArrow=False)
    found = spark.createDataFrame(noted, "path string, sha256 string").withColumn("found", checksum("path"))
    for file in found.where(~sf.col("found").eqNullSafe(sf.col("sha256"))).collect():
        raise ArchiveError(
            f"{file.path} is damaged: its bytes are not those that were written, or an executor cannot read it; restore"
            " it from a backup; nothing was purged"
        )


def _checksum_of(path: str) -> str | None:
    try:
        with Path(path).open("rb") as file:
            return sha256_of(file)
    except OSError:
        return None


def _stored(spark: SparkSession, found: Candidates, source: Mapping[str, str]) -> DataFrame:
    """What the archive should have of what is old; the source refuses if it is of another server."""
    end = offset.write(Stamp(position=found.kept.position, server=found.last.server))
    options = {**source, "until": end, "createdTo": found.kept.old.before.isoformat(), "halves": "true"}
    return spark.read.format("outbox").options(**options).load()


def compare(stored: DataFrame, archived: DataFrame, *, width: int = ROWS_PER_RANGE) -> list[Range]:
    """Compare messages of the database with their copies, by ranges of `width` ids; those without messages left out.

    A checksum is the sum, modulo 2**63, of a hash of 60 bits over all columns of each row, made by Spark of what it has
    read. What the archive has besides, because it was purged from the database before, does not count.

    Args:
        stored: what would be purged, of the database, with all columns of `messages`.
        archived: the archive.
        width: ids in a range.
    """
    copies = _copies(archived).select("id", "copies", "copies_sum")
    rows = (
        _hashed(stored)
        .join(copies, "id", "left")
        .groupBy(sf.floor(sf.col("id") / width).alias("range"))
        .agg(
            sf.count("*").alias("rows"),
            sf.coalesce(sf.sum("copies"), sf.lit(0)).alias("archived"),
            _sum_of("hash").alias("checksum"),
            sf.coalesce(_sum_of("copies_sum"), sf.lit(0)).alias("archived_checksum"),
        )
        .orderBy("range")
    )
    return [
        Range(
            first_id=row["range"] * width,
            last_id=(row["range"] + 1) * width - 1,
            rows=row["rows"],
            archived=row["archived"],
            checksum=int(row["checksum"]) % _MODULUS,
            archived_checksum=int(row["archived_checksum"]) % _MODULUS,
        )
        for row in rows.toArrow().to_pylist()
    ]


def differences(first: int, last: int, stored: DataFrame, archived: DataFrame) -> DataFrame:
    """Return the messages between two ids (both belong to it) of which the archive has not one equal copy.

    Returns:
        id, topic, problem (missing, different, several times).
    """
    between = sf.col("id").between(first, last)
    problem = (
        sf.when(sf.col("copies").isNull(), "missing")
        .when((sf.col("low") != sf.col("hash")) | (sf.col("high") != sf.col("hash")), "different")
        .when(sf.col("copies") > 1, "several times")
    )
    joined = _hashed(stored.where(between)).join(_copies(archived.where(between)), "id", "left")
    problems = joined.withColumn("problem", problem).where(sf.col("problem").isNotNull())
    return problems.select("id", "topic", "problem").orderBy("id")


def _require_same(compared: Comparison) -> None:
    differing = [each for each in compared.ranges if not each.same]
    if not differing:
        return
    first = differing[0]
    halves = "; extract with --halves to another folder" if HALF_TOPIC in compared.differences else ""
    raise ArchiveError(
        f"the messages with ids {first.first_id} to {first.last_id} are not the same in the archive: the database has"
        f" {first.rows} of them with checksum {first.checksum}, the archive {first.archived} with checksum"
        f" {first.archived_checksum} ({compared.differences}); {len(differing)} of {len(compared.ranges)} ranges"
        f" differ, and nothing was purged{halves}"
    )


def _examples(found: Range, stored: DataFrame, archived: DataFrame) -> str:
    differing = differences(found.first_id, found.last_id, stored, archived).limit(_EXAMPLES).collect()
    said = {"missing": "is missing", "different": "is different", "several times": "is there several times"}
    return ", ".join(f"message {each['id']} of topic {each['topic']} {said[each['problem']]}" for each in differing)


def _copies(archived: DataFrame) -> DataFrame:
    """What the archive has of each id: how many copies, and their hashes."""
    return (
        _hashed(archived)
        .groupBy("id")
        .agg(
            sf.count("*").alias("copies"),
            _sum_of("hash").alias("copies_sum"),
            sf.min("hash").alias("low"),
            sf.max("hash").alias("high"),
        )
    )


def _hashed(messages: DataFrame) -> DataFrame:
    """The id and topic of each message, and a hash of all its columns."""
    columns = [sf.col(name) for name in columns_of(MESSAGES)]
    # Spark's hash passes over what is null, so that a value would count the same in the column beside it.
    which = reduce(lambda bits, each: bits * 2 + each.isNull().cast("long"), columns, sf.lit(0).cast("long"))
    return messages.select("id", "topic", sf.xxhash64(which, *columns).bitwiseAND(_MASK).alias("hash"))


def _sum_of(column: str) -> Column:
    """A sum that no number of rows overflows."""
    return sf.sum(sf.col(column).cast("decimal(20,0)"))
