"""The columns of each table as Spark and Arrow know the types: one fixed schema, every column nullable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from outbox.errors import MissingExtraError
from outbox.store.log.extraction import Kind, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

#: Spark's types of these kinds; the other kinds have the same name in Spark.
_SPARK: Mapping[Kind, str] = MappingProxyType(
    {"long": "bigint", "integer": "int", "short": "smallint", "uuid": "string"}
)


def spark_type(kind: Kind) -> str:
    """Return the name of Spark's type, as `DataType.simpleString` gives it."""
    return _SPARK.get(kind, kind)


def ddl(table: str, columns: Sequence[str]) -> str:
    """Return the columns as a Spark schema in DDL."""
    kinds = columns_of(table)
    return ", ".join(f"`{name}` {spark_type(kinds[name])}" for name in columns)


def arrow_schema(table: str, columns: Sequence[str]) -> pa.Schema:
    """Return the columns as an Arrow schema, with times in microseconds, UTC; raise without pyarrow."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError(
            "Spark needs an extra, on the driver and on every executor: pip install 'outbox-log[spark]'"
        ) from error
    types: dict[Kind, pa.DataType] = {
        "long": pa.int64(),
        "integer": pa.int32(),
        "short": pa.int16(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "binary": pa.binary(),
        "uuid": pa.string(),
        "string": pa.string(),
    }
    kinds = columns_of(table)
    return pa.schema([pa.field(name, types[kinds[name]], nullable=True) for name in columns])
