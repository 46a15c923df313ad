"""The least rights of each kind of process, as the GRANTs of PostgreSQL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from sqlalchemy.dialects import postgresql

from outbox.schema import PREFIX, tables

_READ, _GROW = ("SELECT",), ("SELECT", "INSERT")
_KEEP = ("SELECT", "INSERT", "UPDATE", "DELETE")
#: UPDATE is what FOR UPDATE needs, under which expired rows are deleted.
_EXPIRE = ("SELECT", "UPDATE", "DELETE")
#: Columns of the log that only the server fills: a wrong number in one of them would hide the row from every reader.
_DRAWN = ("id", "xact_id")
_FILLED = ", ".join(each.name for each in tables().message.columns if each.name not in _DRAWN)
_APPEND = f"INSERT ({_FILLED})"
_ORDER = ("SELECT", _APPEND, "INSERT", "UPDATE", "DELETE")

#: The rights by the name of a process or of its task, each by the name of the table.
NEEDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "writer": {"message": (_APPEND,)},
    "dedup": {"dedup": ("SELECT", "INSERT", "UPDATE")},
    "direct": {
        "message": _READ,
        "meta": _READ,
        "subscription": _GROW,
        "lease": ("INSERT",),
        "progress": ("INSERT",),
        "ack": ("INSERT",),
    },
    "transactions": {
        "message": _READ,
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
        "subscription": _KEEP,
        "lease": _KEEP,
        "progress": ("SELECT", "INSERT", "DELETE"),
        "parked": _KEEP,
        "worker": _KEEP,
        "ack": ("SELECT", "DELETE"),
        "dedup": _EXPIRE,
        "inbox": _EXPIRE,
    },
    "purge": {"message": ("DELETE",), "meta": ("UPDATE",), "op": ("SELECT", "DELETE")},
    "reader": {"message": _READ, "meta": _READ},
    "register": {
        "subscription": ("SELECT", "INSERT", "UPDATE"),
        "lease": ("INSERT",),
        "progress": ("SELECT", "INSERT", "DELETE"),
    },
}


def grants(schema: str | None, role: str, tasks: Iterable[str]) -> Iterator[str]:
    """Yield the statements that let `role` do `tasks` of `NEEDS`, and nothing else, on the tables in `schema`."""
    # Under another style of parameters the dialect doubles each % of a name.
    quote = postgresql.dialect(paramstyle="named").identifier_preparer.quote  # type: ignore[no-untyped-call]
    where = "" if schema is None else f"{quote(schema)}."
    if schema is not None:
        yield f"GRANT USAGE ON SCHEMA {quote(schema)} TO {quote(role)};"
    rights: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        for table, needed in NEEDS[task].items():
            rights[table].update(needed)
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for table, all_needed in rights.items():
        alike[tuple(sorted(all_needed, key=_ORDER.index))].append(f"{where}{PREFIX}{table}")
    for rights_of, named in alike.items():
        yield f"GRANT {', '.join(rights_of)} ON {', '.join(named)} TO {quote(role)};"
