"""Opening the database of the options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click
from sqlalchemy import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from outbox.cli.failures import UNREACHABLE, USAGE
from outbox.errors import SchemaError
from outbox.model.command import Commands
from outbox.store.database import Channel, Database
from outbox.store.dialects import part_of
from outbox.store.dialects.dialect import Dialect
from outbox.store.dialects.kinds import KINDS, is_file
from outbox.store.identity import require_version, stored_identity
from outbox.store.label import label_of, option_of
from outbox.store.operations.check import holds_inbox_alone
from outbox.writing.engines import create_engine

_CONNECT_SECONDS = 10
_ALONE = "only the inbox of a consumer is here, where nothing waits"
_FORM = "write postgresql://host:5432/name or sqlite:////absolute/path"
_HOSTS = "write several hosts as postgresql:///name?host=db1:5432&host=db2:5432"


class InboxAloneError(SchemaError):
    """Raised in the database of a consumer, with an inbox and no outbox."""


@contextmanager
def open_outbox(url: str, commands: Commands) -> Iterator[Channel]:
    """Open a connection to the outbox of the options."""
    with open_database(url, commands) as database, database.explained(), open_channel_of(database) as channel:
        yield channel


@contextmanager
def open_channel(url: str, commands: Commands) -> Iterator[Channel]:
    """Open a connection to the database of the options, with an outbox or without."""
    with open_database(url, commands) as database, closing(database.open()) as channel:
        yield channel


@contextmanager
def open_database(url: str, commands: Commands) -> Iterator[Database]:
    """Yield the database of the options, without a connection yet. `commands`: about its outbox."""
    engine = engine_of(url, make=commands.line("db", "upgrade"))
    try:
        yield Database(engine, commands.schema, commands=commands)
    finally:
        engine.dispose()


@contextmanager
def open_channel_of(database: Database) -> Iterator[Channel]:
    """Open a connection to a database; take over the stored number of slots."""
    with closing(database.open()) as channel:
        _take_slots(channel)
        yield channel


def checked_label(given: str, schema: str | None) -> str:
    """Return the label of the database; raise for a mistake in the options. Nothing is opened."""
    url = url_of(given)
    if is_file(url) and schema is not None:
        raise _usage("SQLite has no schemas; leave the schema out")
    engine = _made(url)
    Database(engine, schema)
    engine.dispose()
    return label_of(url, schema)


def engine_of(given: str, *, make: str, create: bool = False, patient: bool = False) -> Engine:
    """Return an engine for the URL of the options. `make`: the command that creates a missing file, for the error.

    A connection whose server does not answer for as long as that of a worker is shut down, unless `patient`.
    """
    url = url_of(given)
    if is_file(url):
        _require_file(url, create=create, make=make)
    engine = _made(url)
    watch = part_of(engine.dialect.name, Dialect).driving.watch
    if watch is not None and not patient:
        watch(engine)
    return engine


def url_of(given: str) -> URL:
    """Return the URL of the database, with the driver of the command line."""
    url = _parsed(given)
    if url.get_backend_name() not in KINDS:
        raise _usage(f"no outbox lives in {url.get_backend_name()}; {_FORM}")
    if is_file(url) and url.host:
        path = "/".join(filter(None, (url.host, url.database)))
        raise _usage(f"the path of an SQLite database stands behind three slashes; write sqlite:///{path}")
    return url


def without_secrets(given: str) -> str:
    """Return the URL of a database without passwords, as an option takes it."""
    return option_of(_parsed(given))


def _made(url: URL) -> Engine:
    # Parameters may be a user's data, so no error shows them.
    options = {"hide_parameters": True, **_postgresql_options(url)}
    try:
        return create_engine(url, **options)  # type: ignore[arg-type]
    except (NoSuchModuleError, ModuleNotFoundError):
        raise _usage(f"the driver of {url.drivername} is not there; {_FORM}") from None


def _parsed(text: str) -> URL:
    # The hosts begin after the only @. With a second one, a part of the password would be taken for a host, and shown.
    if text.partition("://")[2].partition("/")[0].count("@") > 1:
        raise _usage("the database URL has two @; percent-encode the one in the password as %40")
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Neither the text nor the cause is shown: it may hold a password.
        raise _usage(f"the database is not given as a URL; {_HOSTS if ',' in text else _FORM}") from None
    return _blocking(url)


def _blocking(url: URL) -> URL:
    """Return the URL with the driver of the command line: the URL of an application may name another."""
    backend, _, driver = url.drivername.partition("+")
    kind = "postgresql" if backend == "postgres" else backend
    driving = part_of(kind, Dialect).driving if kind in KINDS else None
    return url if driving is None or driver not in {"", *driving.names} else driving.blocking_url(url)


def _require_file(url: URL, *, create: bool, make: str) -> None:
    """Raise if the file of an SQLite database is missing: SQLite would make a file for every mistyped name."""
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        return
    folder = Path(url.database).absolute().parent
    if not folder.is_dir():
        raise Failure(f"there is no file {url.database}, and no folder {folder} to make it in", UNREACHABLE)
    if not create and not Path(url.database).exists():
        raise Failure(f"there is no file {url.database}; to make it, run: {make}", UNREACHABLE)


def _postgresql_options(url: URL) -> dict[str, object]:
    if is_file(url):
        return {}
    defaults = {"connect_timeout": _CONNECT_SECONDS, "application_name": "outbox"}
    return {"connect_args": {name: value for name, value in defaults.items() if name not in url.query}}


def _take_slots(channel: Channel) -> None:
    try:
        stored = stored_identity(channel)
    except SchemaError:
        if holds_inbox_alone(channel):
            raise InboxAloneError(f"{channel.database.label}: {_ALONE}") from None
        raise
    if stored is None:
        return
    require_version(channel, stored)
    channel.database.slots = stored.slots


class Failure(click.ClickException):
    """A failure with one line and an exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code  # type: ignore[misc]  # click itself sets it where it has to


def _usage(text: str) -> Failure:
    return Failure(text, USAGE)
