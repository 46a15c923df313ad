"""The least rights of each kind of process on PostgreSQL: as GRANTs, and compared with those of a role."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from sqlalchemy import Connection, text
from sqlalchemy.dialects import postgresql

from outbox.schema import PREFIX, tables
from outbox.store.dialects.finding import Finding

_READ, _GROW = ("SELECT",), ("SELECT", "INSERT")
_KEEP = ("SELECT", "INSERT", "UPDATE", "DELETE")
#: UPDATE is what FOR UPDATE needs, under which expired rows are deleted.
_EXPIRE = ("SELECT", "UPDATE", "DELETE")
_COLUMNS = tuple(each.name for each in tables().message.columns)
#: Columns of the log that only the server fills for a plain writer. A wrong number in one of the first two would hide
#: the row from every reader, and a wrong moment from retention.
_NOT_A_WRITERS = ("id", "xact_id", "created_at")
_APPEND = f"INSERT ({', '.join(name for name in _COLUMNS if name not in _NOT_A_WRITERS)})"
_ORDER = ("SELECT", "INSERT", "UPDATE", "DELETE")

#: By the name after the prefix, also the table of the revision and the sequence of the ids.
_SEEN = (
    *("message", "meta", "op", "subscription", "lease", "progress", "parked", "decision", "worker"),
    *("withdrawal", "alembic_version", "message_id_seq"),
)

#: The rights by the name of a process or of its task, each by the name of the table.
NEEDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "writer": {"message": (_APPEND,)},
    "dedup": {"dedup": ("SELECT", "INSERT", "UPDATE")},
    "withdraw": {
        "message": ("SELECT (message_id, deliver_at)",),
        "withdrawal": _GROW,
    },
    "transactions": {
        "message": (*_READ, "INSERT (created_at)"),
        "meta": _READ,
        "subscription": _GROW,
        "lease": ("INSERT",),
        "progress": ("INSERT",),
        "parked": _READ,
        "op": ("SELECT", "INSERT", "UPDATE"),
    },
    "relay": {
        "message": _READ,
        "meta": _READ,
        # For /status and /metrics.
        "op": _READ,
        "subscription": _KEEP,
        "lease": _KEEP,
        "progress": ("SELECT", "INSERT", "DELETE"),
        "parked": _KEEP,
        "decision": _KEEP,
        "worker": _KEEP,
        "withdrawal": _GROW,
        "dedup": _EXPIRE,
        "inbox": _EXPIRE,
    },
    # What a writer with dedup keys and transactions needs, and a relay, with the rows of its own.
    "front": {
        "message": (*_READ, _APPEND, "INSERT (created_at)"),
        "meta": _READ,
        "op": ("SELECT", "INSERT", "UPDATE"),
        "subscription": _KEEP,
        "lease": _KEEP,
        "progress": ("SELECT", "INSERT", "DELETE"),
        "parked": _KEEP,
        "decision": _KEEP,
        "worker": _KEEP,
        "client": _KEEP,
        "topic": _GROW,
        "group": _GROW,
        "withdrawal": _GROW,
        "dedup": _KEEP,
        "inbox": _EXPIRE,
    },
    # A row goes again if the handler of a message has committed it, and then failed.
    "inbox": {"inbox": (*_GROW, "DELETE")},
    "purge": {
        "message": ("DELETE",),
        "meta": ("UPDATE",),
        "op": ("SELECT", "DELETE"),
        "withdrawal": ("SELECT", "DELETE"),
    },
    # Every question of `outbox.admin`, with the check of the tables.
    "dashboard": dict.fromkeys(_SEEN, _READ),
    # Replay, discard, set aside, pause and resume; verdicts on transactions. Without a worker, carried out at once.
    "decide": {
        "message": ("INSERT (created_at)", _APPEND),
        "subscription": ("UPDATE (pauses)",),
        "lease": ("INSERT", "UPDATE", "DELETE"),
        "parked": ("UPDATE", "DELETE"),
        "decision": ("INSERT", "UPDATE"),
        "dedup": _EXPIRE,
        "op": ("INSERT", "UPDATE"),
    },
    "reader": {"message": _READ, "meta": _READ},
    "register": {
        "subscription": ("SELECT", "INSERT", "UPDATE (topics, hold_ms)"),
        "lease": ("INSERT",),
        "progress": ("SELECT", "INSERT", "DELETE"),
    },
}


#: Of rights on tables that are there, those that a role has neither itself nor by another role.
_LACKING = """
    SELECT n.t, n.p FROM unnest(CAST(:tables AS text[]), CAST(:rights AS text[])) AS n(t, p)
    WHERE to_regclass(n.t) IS NOT NULL AND NOT CASE WHEN position('(' IN n.p) > 0
        THEN (SELECT bool_and(has_column_privilege(:role, n.t, c, split_part(n.p, ' ', 1)))
              FROM unnest(string_to_array(substring(n.p FROM '[(](.*)[)]'), ', ')) AS c)
        ELSE has_table_privilege(:role, n.t, n.p) END
"""
_IS_THERE = "SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = :role)"
_ENTERS = "SELECT has_schema_privilege(:role, coalesce(:schema, current_schema()), 'USAGE')"

#: Rights by the name of the table in SQL.
_Rights = Mapping[str, set[str]]
# Under another style of parameters the dialect doubles each % of a name.
_quoted = postgresql.dialect(paramstyle="named").identifier_preparer.quote  # type: ignore[no-untyped-call]


def grants(schema: str | None, role: str, tasks: Iterable[str]) -> Iterator[str]:
    """Yield the statements that let `role` do `tasks` of `NEEDS`, and nothing else, on the tables in `schema`."""
    if schema is not None:
        yield _entrance(schema, role)
    yield from _statements(role, _needs(schema, tasks))


def check_rights(connection: Connection, schema: str | None, role: str, tasks: Sequence[str]) -> Iterator[Finding]:
    """Find the rights that `role` lacks for `tasks` of `NEEDS`."""
    where, bound = f"role {role}", {"role": role}
    if not connection.scalar(text(_IS_THERE), bound):
        yield Finding(where, "is not there", f"CREATE ROLE {_quoted(role)} LOGIN")
        return
    pairs = [(table, right) for table, rights in _needs(schema, tasks).items() for right in sorted(rights)]
    wanted = {
        "tables": [table for table, _ in pairs],
        "rights": [right for _, right in pairs],
    }
    lacking: dict[str, set[str]] = defaultdict(set)
    for table, right in connection.execute(text(_LACKING), {**wanted, **bound}):
        lacking[table].add(right)
    fixes = list(_statements(role, lacking))
    if not connection.scalar(text(_ENTERS), {**bound, "schema": schema}):
        fixes.insert(0, _entrance(schema or "public", role))
    if fixes:
        named = [
            f"{right.partition(' ')[0]} on {table}" for table, rights in lacking.items() for right in sorted(rights)
        ]
        yield Finding(where, f"lacks rights of a {tasks[0]}", " ".join(fixes), ", ".join(named) or None)


def _needs(schema: str | None, tasks: Iterable[str]) -> _Rights:
    where = "" if schema is None else f"{_quoted(schema)}."
    rights: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        for table, needed in NEEDS[task].items():
            rights[f"{where}{PREFIX}{table}"].update(needed)
    return {table: set(_together(needed)) for table, needed in rights.items()}


def _together(rights: Collection[str]) -> Iterator[str]:
    """Yield the rights, those on columns as one for all columns; none where the role has the right on the table."""
    columns: dict[str, set[str]] = defaultdict(set)
    for right in rights:
        verb, _, named = right.partition(" ")
        columns[verb].update(named.strip("()").split(", ") if named else ())
    for verb, inside in columns.items():
        ordered = sorted(inside, key=lambda name: (_COLUMNS.index(name) if name in _COLUMNS else -1, name))
        yield verb if verb in rights or not inside else f"{verb} ({', '.join(ordered)})"


def _statements(role: str, rights: _Rights) -> Iterator[str]:
    """Yield a statement for all tables with the same rights."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for table, needed in rights.items():
        alike[tuple(sorted(needed, key=lambda right: _ORDER.index(right.partition(" ")[0])))].append(table)
    for needed_rights, named in alike.items():
        yield f"GRANT {', '.join(needed_rights)} ON {', '.join(named)} TO {_quoted(role)};"


def _entrance(schema: str, role: str) -> str:
    return f"GRANT USAGE ON SCHEMA {_quoted(schema)} TO {_quoted(role)};"
