"""Half messages, the verdicts on them and the messages that were restored: the state of each, and contradictions.

Purge deletes half messages that have a verdict, verdicts after their half messages, and restored messages like all
messages. So a row that exists is always a proof. An absent row is a proof only if no row was purged.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from outbox.model.limits import HALF_TOPIC
from outbox.model.message import TRANSACTION_ID
from outbox.model.parking import States
from outbox.model.subscription import check_of
from outbox.store.half_messages.half import REAL_TOPIC, WAY

MESSAGE_COLUMNS = (
    "id long, message_id string, topic string, key string, tags string, headers string, body binary,"
    " created_at timestamp"
)
OP_COLUMNS = "transaction_id string, op string, decided_by string, decided_at timestamp"
PARKED_COLUMNS = "subscription string, key string, state string"

NOT_RESTORED = "committed, but its message is not in the log"
AGAINST_VERDICT = "rolled back, but its message is in the log"
WITHOUT_VERDICT = "no verdict, but its message is in the log"
SEVERAL_TIMES = "its message is in the log more than once"
ANOTHER_BODY = "its message is in the log with another body"

#: The states of a half message. Parked: its check-back was given up, and a person has to decide.
COMMITTED, ROLLED_BACK, OPEN, PARKED = STATES = ("committed", "rolled back", "open", "parked")

_SAME = ("transaction_id", "message_id", "topic")


def reconcile(
    messages: DataFrame,
    ops: DataFrame,
    parked: DataFrame,
    *,
    purged_id: int = 0,
    decided_before: datetime | None = None,
    topics: Collection[str] | None = None,
) -> DataFrame:
    """Return the state of each half message, and the contradiction, if there is one.

    A commit appends the messages of its transaction together with its verdict; a rollback, or no verdict, appends none.

    The three tables may be read at different moments, while transactions get their verdicts. A verdict that is younger
    than `messages` then seems to have restored nothing. For the log, `unless_healed` drops contradictions that a later
    look does not find again. For an archive, `decided_before` is a moment before its end.

    Args:
        messages: the log or an archive of it, *with* its half messages (`topics` or `halves` of the source).
        ops: the table `op`.
        parked: the table `parked`.
        purged_id: the highest id that was ever purged. An absent message of a half message at or below this id may have
            been purged: `unproven`, and no contradiction.
        decided_before: for verdicts from this moment on, an absent message is `unproven`, too.
        topics: the only topics whose restored messages are in `messages`; half messages of others are left out.

    Returns:
        id, message_id, transaction_id, producer_group, topic (the real topic), verdict (the way: join, record,
        listener), created_at, state (one of `STATES`), decided_by, decided_at, copies (how often the message is in the
        log), unproven, problem (null: none). Each half message has one row. A restored message whose half message is
        gone has a row, without id and state, only in a contradiction.
    """
    halves, restored = _halves(messages), _restored(messages)
    if topics is not None:
        halves = halves.where(sf.col("topic").isin(list(topics)))
    joined = (
        halves.join(restored, list(_SAME), "full")
        .join(ops.select("transaction_id", "op", "decided_by", "decided_at"), "transaction_id", "left")
        .join(_given_up(parked), ["transaction_id", "producer_group"], "left")
        .withColumn("copies", sf.coalesce("copies", sf.lit(0)))
    )
    has_half = sf.col("id").isNotNull()
    counts = has_half | (sf.col("op") == "rollback") | (sf.col("copies") > 1)
    missing = has_half & (sf.col("op") == "commit") & (sf.col("copies") == 0)
    proves = sf.col("id") > purged_id
    if decided_before is not None:
        proves &= sf.col("decided_at") < sf.lit(decided_before)
    return joined.where(counts).select(
        "id",
        "message_id",
        "transaction_id",
        "producer_group",
        "topic",
        "verdict",
        "created_at",
        sf.when(has_half, _state()).alias("state"),
        "decided_by",
        "decided_at",
        "copies",
        (missing & ~proves).alias("unproven"),
        _problem(missing & proves).alias("problem"),
    )


def states(reconciled: DataFrame) -> DataFrame:
    """Count half messages by producer group, topic and state.

    Returns:
        producer_group, topic, committed, rolled_back, open, parked, oldest_open (when the first open message was
        stored), contradictions (rows with a problem), unproven.
    """
    is_open = sf.col("state") == OPEN
    return (
        reconciled.groupBy("producer_group", "topic")
        .agg(
            *(sf.count_if(sf.col("state") == state).alias(state.replace(" ", "_")) for state in STATES),
            sf.min(sf.when(is_open, sf.col("created_at"))).alias("oldest_open"),
            sf.count("problem").alias("contradictions"),
            sf.count_if("unproven").alias("unproven"),
        )
        .orderBy("producer_group", "topic")
    )


def contradictions(reconciled: DataFrame) -> DataFrame:
    """Return the rows with a problem, in the order of the log; the columns are those of `reconcile`."""
    return reconciled.where(sf.col("problem").isNotNull()).orderBy("id", "transaction_id", "message_id")


def unless_healed(first: DataFrame, second: DataFrame) -> DataFrame:
    """Return the contradictions of a second look about messages with a contradiction in the first look.

    A verdict that is given between the reads of one look only *looks* like a contradiction. The next look begins after
    the first has ended, and sees all of the verdict. A real contradiction stays, perhaps as another problem.
    """
    return contradictions(second.join(first, ["transaction_id", "message_id"], "left_semi"))


def header(name: str) -> Column:
    """Return a header of a message, as text; null: the message has no such header."""
    return sf.get_json_object("headers", f"$['{name}']")


def _halves(messages: DataFrame) -> DataFrame:
    """Return one row per half message.

    A message that was sent twice in its transaction has two rows in the log, of which the first counts.
    """
    halves = messages.where(sf.col("topic") == HALF_TOPIC).select(
        "id",
        "message_id",
        sf.col("key").alias("transaction_id"),
        sf.col("tags").alias("producer_group"),
        header(REAL_TOPIC).alias("topic"),
        header(WAY).alias("verdict"),
        "created_at",
        sf.xxhash64("body").alias("hash"),
    )
    rest = ("id", "producer_group", "verdict", "created_at", "hash")
    first = sf.min(sf.struct(*rest)).alias("first")
    return halves.groupBy(*_SAME).agg(first).select(*_SAME, *(f"first.{name}" for name in rest))


def _restored(messages: DataFrame) -> DataFrame:
    """Return one row for each restored message, with the number of copies in the log."""
    # The text is looked for first, because most messages are of no transaction, and reading JSON is slow.
    of_transactions = (sf.col("topic") != HALF_TOPIC) & sf.col("headers").contains(TRANSACTION_ID)
    rows = messages.where(of_transactions).select(
        header(TRANSACTION_ID).alias("transaction_id"), "message_id", "topic", sf.xxhash64("body").alias("hash")
    )
    return (
        rows.where(sf.col("transaction_id").isNotNull())
        .groupBy(*_SAME)
        .agg(sf.count("*").alias("copies"), sf.min("hash").alias("low"), sf.max("hash").alias("high"))
    )


def _given_up(parked: DataFrame) -> DataFrame:
    """Return the transactions that wait for a person, with a half message among the dead letters of the check-back."""
    prefix = check_of("")
    is_given_up = sf.col("subscription").startswith(prefix) & (sf.col("state") == States.DEAD)
    return (
        parked.where(is_given_up)
        .select(
            sf.col("key").alias("transaction_id"),
            sf.substr("subscription", sf.lit(len(prefix) + 1)).alias("producer_group"),
            sf.lit(True).alias("given_up"),
        )
        .distinct()
    )


def _state() -> Column:
    return (
        sf.when(sf.col("op") == "commit", COMMITTED)
        .when(sf.col("op") == "rollback", ROLLED_BACK)
        .when(sf.col("given_up"), PARKED)
        .otherwise(OPEN)
    )


def _problem(is_missing: Column) -> Column:
    there = sf.col("copies") > 0
    other_body = (sf.col("low") != sf.col("hash")) | (sf.col("high") != sf.col("hash"))
    return (
        sf.when(is_missing, NOT_RESTORED)
        .when(there & (sf.col("op") == "rollback"), AGAINST_VERDICT)
        .when(there & sf.col("op").isNull() & sf.col("id").isNotNull(), WITHOUT_VERDICT)
        .when(sf.col("copies") > 1, SEVERAL_TIMES)
        .when(there & other_body, ANOTHER_BODY)
    )
