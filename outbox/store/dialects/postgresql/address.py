"""The address of a database, as libpq reads it: the servers, and whether they are told apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
from sqlalchemy import Engine

from outbox.store.dialects.dialect import Location, connects_by_url
from outbox.store.dialects.finding import Finding

#: The values of `target_session_attrs` with which libpq connects to no standby.
_OF_THE_PRIMARY = ("read-write", "primary")


def location(found: Any) -> Location | None:
    """Return the place that libpq is asked for, or was; None where the application or a service file decides it.

    None also where no database is named: libpq then takes the one with the name of the user.
    """
    if not isinstance(found, Engine):
        if not hasattr(found, "info"):
            return None
        return Location(found.info.dbname, frozenset([(found.info.host, str(found.info.port))]))
    asked = _asked(found)
    if not connects_by_url(found) or "service" in asked or not asked.get("dbname"):
        return None
    return Location(asked["dbname"], frozenset(_servers(asked)))


def check_address(engine: Engine) -> Iterator[Finding]:
    """Find an address of several servers, any of which may answer a new connection."""
    asked = _asked(engine)
    servers = _servers(asked)
    if len(servers) > 1 and asked.get("target_session_attrs") not in _OF_THE_PRIMARY:
        named = ", ".join(f"{host}:{port}" for host, port in servers)
        problem = "names several servers, and a new connection may reach a standby, or a primary of before"
        yield Finding("address", problem, "add target_session_attrs=read-write to the URL", named)


def _asked(engine: Engine) -> dict[str, Any]:
    """Return the parameters of a connection, with those that libpq takes from its environment."""
    asked: dict[str, Any] = {
        option.keyword.decode(): option.val.decode()
        for option in psycopg.pq.Conninfo.get_defaults()
        if option.val is not None
    }
    asked.update(engine.dialect.create_connect_args(engine.url)[1])
    return asked


def _servers(asked: dict[str, Any]) -> list[tuple[str, str]]:
    hosts, ports = (str(asked.get(name, "")).split(",") for name in ("host", "port"))
    if len(ports) == 1:
        ports *= len(hosts)
    return list(zip(hosts, ports, strict=False))
