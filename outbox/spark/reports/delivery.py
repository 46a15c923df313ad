"""The delivery report: how many messages were written, and which are parked."""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from outbox.model.limits import HALF_TOPIC
from outbox.model.parking import States

#: The columns that each function needs of its DataFrame; the option `columns` makes the source read only these.
PER_HOUR_COLUMNS = "topic string, created_at timestamp"
PARKED_COLUMNS = "subscription string, state string, topic string, parked_at timestamp, error string"

#: Groups of parked messages by age: each has an upper limit in seconds, and a name.
_AGE_LIMITS = ((60, "< 1 min"), (3_600, "< 1 h"), (86_400, "< 1 d"), (604_800, "< 7 d"))
_OLDER = "7 d and more"
AGES = (*(name for _, name in _AGE_LIMITS), _OLDER)
#: Errors are told apart by this many characters of their text.
_ERROR = 120


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


def _state() -> Column:
    """Return the state of a parked message: what stands behind the head of its key has none."""
    return sf.coalesce(sf.col("state"), sf.lit(States.BEHIND))


def parked_by_age(parked: DataFrame, now: datetime) -> DataFrame:
    """Count parked messages by subscription, state and the time since they were parked.

    Returns:
        subscription, state, age (one of `AGES`), messages, oldest (when the first of them was parked).
    """
    seconds = sf.unix_micros(sf.lit(now)) / 1e6 - sf.unix_micros(sf.col("parked_at")) / 1e6
    return (
        parked.groupBy("subscription", _state().alias("state"), _age_of(seconds).alias("age"))
        .agg(sf.count("*").alias("messages"), sf.min("parked_at").alias("oldest"))
        .orderBy("subscription", "state", sf.desc("oldest"))
    )


def dead_letters(parked: DataFrame) -> DataFrame:
    """Count dead letters by subscription, topic and the beginning of their error, the most frequent first.

    Returns:
        subscription, topic, error, letters, oldest, newest (when the first and the last letter were parked).
    """
    return (
        parked.where(sf.col("state") == States.DEAD)
        .groupBy("subscription", "topic", sf.substring("error", 1, _ERROR).alias("error"))
        .agg(sf.count("*").alias("letters"), sf.min("parked_at").alias("oldest"), sf.max("parked_at").alias("newest"))
        .orderBy(sf.desc("letters"), "subscription", "topic", "error")
    )


def _age_of(seconds: Column) -> Column:
    found = sf.lit(_OLDER)
    for limit, name in reversed(_AGE_LIMITS):
        found = sf.when(seconds < limit, name).otherwise(found)
    return found
