"""The statements that read whole tables and parts of windows, as far as databases differ; needs no driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from outbox.store.dialects.filtering import Filtering


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """The SQL of one database for reading rows outside of SQLAlchemy."""

    #: The expression that shows a column, by kind; a column of any other kind is shown as it is.
    show: Mapping[str, str]
    #: Expressions for columns that this database does not have, by name.
    replaced: Mapping[str, str]
    text: Callable[[str], str]
    uuid: Callable[[UUID], str]
    moment: Callable[[datetime], str]
    filtering: Filtering
    #: The number that tells whether a row is settled, written so that the planner still walks the primary key.
    number: str
    #: The rows of several late transactions: `{values}`, with ids from `{first}` to `{last}`.
    late: str
    #: Reads the system identifier and the timeline.
    server: str
    #: Set once before reading, so that rows come by the primary key. The planner underestimates the rows that fulfil
    #: conditions on transactions, and would sort the whole table on disk. Parallel workers and jit are off because they
    #: would take CPU from the application.
    settings: tuple[str, ...]
    #: Allows longer statements, for looks at whole windows; None: no limit is set.
    patience: str | None
    #: Reads whether the server has replayed its primary's log up to `{lsn}`, or is no standby.
    replayed: str
