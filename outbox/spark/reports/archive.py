"""Archive, then purge: messages leave the database only after they are proven to be in the archive.

The proof reads both sides again, row by row: the messages from the database, their copies from the Parquet files.
Before, the bytes of the files are compared with the checksums in the manifests. So a file that a disk has damaged is
found even if the proof does not read the damaged part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from outbox.spark import offset
from outbox.spark.files import sha256_of
from outbox.spark.frames import of_files
from outbox.spark.manifest import Archive, ArchivedFile, Manifest
from outbox.store.database import Channel
from outbox.store.log.extraction import MESSAGES, columns_of
from outbox.store.log.stamp import Stamp, server_of
from outbox.store.operations.purge import Kept, Purge, Purged

ROWS_PER_RANGE = 100_000

#: Sums of hashes are taken modulo this number, so that they fit into a signed number of 64 bits.
_MODULUS = 2**63
_MASK = 2**60 - 1
_EXAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """One range of ids, both ends included: messages in the database, copies in the archive, and checksums."""

    first_id: int
    last_id: int
    rows: int
    archived: int
    checksum: int
    archived_checksum: int

    @property
    def same(self) -> bool:
        """True if the archive holds each message of the database, once and with the same contents."""
        return (self.rows, self.checksum) == (self.archived, self.archived_checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of messages that are old enough to go with their copies in an archive, by ranges of ids.

    `differences`: a text about some messages of the first range that differs.
    """

    kept: Kept
    ranges: tuple[Range, ...]
    differences: str = ""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Messages that might be purged: old enough, passed by every subscription, and before the end of an archive.

    `files`: the files of the archive that may hold copies of those that the database has.
    """

    archive: Archive
    last: Manifest
    kept: Kept
    files: tuple[ArchivedFile, ...]


def candidates(channel: Channel, path: str | PathLike[str], older_than: timedelta) -> Candidates | Comparison:
    """Return, without Spark, the messages that might be purged; if there are none, return an empty comparison.

    Args:
        channel: a connection to the database with the messages.
        path: the folder of the archive.
        older_than: how long messages are kept, by the clock of the database.

    Raises:
        ArchiveError: there is no archive, or the archive cannot be read.
        PositionError: the archive is of another server.
        SubscriptionError: there is no subscription, so any message may still be needed.
    """
    archive = Archive(path)
    last = archive.newest()
    _require_same_server(channel, archive, last)
    purge = Purge(channel)
    kept = purge.kept(older_than, last.until)
    held = purge.held(kept)
    if held is None or not purge.run(older_than, kept=kept, rehearsal=True).rows:
        # Messages that become old, or get a verdict, from now on are not compared, so none may be purged.
        return Comparison(kept=replace(kept, position=EARLIEST), ranges=())
    # The archive may be older than the candidates by years; messages that were purged before do not matter.
    files = [file for manifest in archive.since(held.number) for file in manifest.files]
    return Candidates(archive, last, kept, tuple(file for file in files if held.meets(file.first_id, file.last_id)))


def compare_candidates(spark: SparkSession, found: Candidates, *, source: Mapping[str, str]) -> Comparison:
    """Compare the messages that might be purged with their copies.

    Args:
        spark: a session.
        found: see `candidates`.
        source: the options by which Spark reads the same database: url, and schema.
    """
    archive, highest = found.archive, found.kept.last_id
    is_old = sf.col("id") <= highest
    stored = _stored(spark, found, source).where(is_old)
    copies = of_files(spark, archive, found.files).where(is_old)
    _require_intact(spark, archive, found.files)
    ranges = [replace(each, last_id=min(each.last_id, highest)) for each in compare(stored, copies)]
    first = next((each for each in ranges if not each.same), None)
    return Comparison(
        kept=found.kept, ranges=tuple(ranges), differences="" if first is None else _examples(first, stored, copies)
    )


def purge_archived(channel: Channel, older_than: timedelta, compared: Comparison, *, rehearsal: bool = False) -> Purged:
    """Delete only messages that every subscription has passed, with a proven copy in the archive.

    Messages that are committed after the comparison stay, whatever their ids: the archive's position does not see them.
    A rehearsal counts the messages and deletes none.

    Raises:
        ArchiveError: a range differs (the text names the first one); nothing is deleted.
    """
    _require_same(compared)
    return Purge(channel).run(older_than, kept=compared.kept, rehearsal=rehearsal)


def _require_same_server(channel: Channel, archive: Archive, last: Manifest) -> None:
    here, there = server_of(channel), last.server
    if here != there:
        raise PositionError(
            f"{archive.path} was extracted from another server, timeline or outbox ({here.unlike(there)}), so the"
            " archive proves nothing, and nothing was purged; give the archive of this database"
        )


def _require_intact(spark: SparkSession, archive: Archive, files: Sequence[ArchivedFile]) -> None:
    """Have executors compare the bytes of files with the checksums that were noted when they were written."""
    if not files:
        return
    noted = [(str(archive.path / file.path), file.sha256) for file in files]
    checksum = sf.udf(_checksum_of, "string", useArrow=False)
    found = spark.createDataFrame(noted, "path string, sha256 string").withColumn("found", checksum("path"))
    for file in found.where(~sf.col("found").eqNullSafe(sf.col("sha256"))).collect():
        raise ArchiveError(
            f"{file.path} is damaged: the bytes are not the written ones, or an executor cannot read the file; restore"
            " the file from a backup; nothing was purged"
        )


def _checksum_of(path: str) -> str | None:
    try:
        with Path(path).open("rb") as file:
            return sha256_of(file)
    except OSError:
        return None


def _stored(spark: SparkSession, found: Candidates, source: Mapping[str, str]) -> DataFrame:
    """Return the old messages that the archive should have. The source refuses if the archive is of another server."""
    end = offset.write(Stamp(position=found.kept.position, server=found.last.server))
    options = {**source, "until": end, "createdTo": found.kept.before.isoformat(), "halves": "true"}
    return spark.read.format("outbox").options(**options).load()


def compare(stored: DataFrame, archived: DataFrame, *, width: int = ROWS_PER_RANGE) -> list[Range]:
    """Compare messages of the database with their copies, by ranges of `width` ids; leave out ranges without messages.

    A checksum is the sum, modulo 2**63, of a hash of 60 bits over all columns of each row, computed by Spark. Copies of
    messages that were purged from the database before do not count.

    Args:
        stored: the messages of the database that would be purged, with all columns of `messages`.
        archived: the messages of the archive.
        width: how many ids a range has.
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
    """Return the messages from id `first` to id `last` of which the archive does not have exactly one equal copy.

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
        f" {first.rows} with checksum {first.checksum}, the archive {first.archived} with checksum"
        f" {first.archived_checksum} ({compared.differences}); {len(differing)} of {len(compared.ranges)} ranges"
        f" differ, and nothing was purged{halves}"
    )


def _examples(found: Range, stored: DataFrame, archived: DataFrame) -> str:
    differing = differences(found.first_id, found.last_id, stored, archived).limit(_EXAMPLES).collect()
    said = {"missing": "is missing", "different": "is different", "several times": "is there several times"}
    return ", ".join(f"message {each['id']} of topic {each['topic']} {said[each['problem']]}" for each in differing)


def _copies(archived: DataFrame) -> DataFrame:
    """Return one row for each id in the archive: how many copies there are, and their hashes."""
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
    """Return the id and topic of each message, and a hash of all its columns."""
    columns = [sf.col(name) for name in columns_of(MESSAGES)]
    # Spark's hash skips nulls, so a value would give the same hash in the column beside. Therefore the hash also covers
    # which columns are null.
    which = reduce(lambda bits, each: bits * 2 + each.isNull().cast("long"), columns, sf.lit(0).cast("long"))
    return messages.select("id", "topic", sf.xxhash64(which, *columns).bitwiseAND(_MASK).alias("hash"))


def _sum_of(column: str) -> Column:
    """Return a sum that does not overflow, however many rows there are."""
    return sf.sum(sf.col(column).cast("decimal(20,0)"))
