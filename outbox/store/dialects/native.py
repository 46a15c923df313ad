"""The parts of the tables in which databases differ; needs no driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column
from sqlalchemy.types import TypeEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """Column types, defaults and indexes of one kind of database.

    After a release a change here needs a revision, because existing tables keep their columns and indexes.
    """

    #: The database's clock as SQL; it gives one answer within one statement.
    now: str
    #: Makes the column of ids, which the database draws.
    id: Callable[[], Column[Any]]
    #: The number of the transaction that writes a row, as SQL; None where a row's own id tells what is settled.
    transaction: str | None
    #: Makes the type of ids and keys, which compare by bytes, whatever the database's locale.
    name: Callable[[], TypeEngine[str]]
    #: The options of an index on the rows that fulfil a condition; none where an index is on all rows.
    partial: Callable[[str], dict[str, Any]]
