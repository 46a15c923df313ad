"""Found by Spark by its name: makes `format("outbox")` known to every session."""

from outbox.spark.source import OutboxDataSource as DefaultSource

__all__ = ["DefaultSource"]
