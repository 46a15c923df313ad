"""The databases of the matrix: one of each for all of its cases, which leave nothing to each other."""

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy import make_url

from outbox.testing.servers import PostgresServer
from tests.conftest import adopt
from tests.scenarios.matrix.homes import DRIVERS, MAKES, Home
from tests.support.orders import Base


@pytest.fixture(scope="package")
def pg_url(postgres: PostgresServer, pg_template: str) -> Iterator[str]:
    name = f"matrix_{uuid.uuid4().hex}"
    url = postgres.create_database(name, template=pg_template)
    engine = sqlalchemy.create_engine(url)
    adopt(engine)
    engine.dispose()
    yield url
    postgres.drop_database(name)


@pytest.fixture(scope="package")
def homes(pg_url: str, sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Home]]:
    """A home of each kind."""
    folder = tmp_path_factory.mktemp("matrix")
    urls = {"postgresql": pg_url}
    for name in ("sqlite", "plain_sqlite"):
        path = folder / f"{name}.sqlite3"
        shutil.copy(sqlite_template, path)
        urls[name] = f"sqlite:///{path}"
    homes = {name: Home(make_url(url), MAKES[name], sqlalchemy.create_engine(url)) for name, url in urls.items()}
    for driver in DRIVERS:
        url = make_url(pg_url).set(drivername=f"postgresql+{driver}")
        homes[driver] = replace(homes["postgresql"], url=url)
    for home in homes.values():
        Base.metadata.create_all(home.observer)
    yield homes
    for home in homes.values():
        home.observer.dispose()
