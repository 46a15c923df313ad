"""A database under every state of the planner's statistics that an installation goes through."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, text

from outbox import create_engine
from outbox.testing.servers import PostgresServer
from tests.conftest import adopt


@contextmanager
def planner_states(postgres: PostgresServer, template: str, fill: Callable[..., None]) -> Iterator[dict[str, Engine]]:
    """The same rows, never analysed, analysed when there were none (`stale`), and analysed as they are (`fresh`).

    `fill`: writes the rows into an engine, with `analysed_first` after a look at the empty tables.
    """
    names = {state: f"plans_{state}_{uuid.uuid4().hex[:8]}" for state in ("never", "stale", "fresh")}
    engines = {}
    for state in ("never", "stale"):
        engines[state] = create_engine(postgres.create_database(names[state], template=template))
        adopt(engines[state])
        fill(engines[state], analysed_first=state == "stale")
    engines["never"].dispose()
    engines["fresh"] = create_engine(postgres.create_database(names["fresh"], template=names["never"]))
    adopt(engines["fresh"])
    with engines["fresh"].begin() as connection:
        connection.execute(text("ANALYZE"))
    yield engines
    for state, engine in engines.items():
        engine.dispose()
        postgres.drop_database(names[state])
