"""Options that several commands have: the database, a destination, output. Secrets never come as arguments."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, unquote

import click
from click.core import ParameterSource

from outbox.cli import logs
from outbox.cli.output import keep_secret

if TYPE_CHECKING:
    from outbox.store.database import Database
    from outbox.store.dialect import Channel

F = TypeVar("F", bound=Callable[..., Any])

_SECRET_NAMES = re.compile(r"(?i)(password|passwd|pwd|secret|token)")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)\s*")

option = functools.partial(click.option, show_envvar=True)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`90s`, `1h30m`, `7d`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Add the parts up."""
        if isinstance(value, timedelta):
            return value
        if not re.fullmatch(f"({_DURATION.pattern})+", value):
            self.fail(f"{value!r} is not a duration; write 90s, 1h30m or 7d", param, ctx)
        try:
            return timedelta(seconds=sum(float(n) * _UNITS[unit] for n, unit in _DURATION.findall(value)))
        except OverflowError:
            self.fail(f"{value!r} is longer than anybody will wait", param, ctx)


class StartAt(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`earliest`, `latest`, or a moment with its zone."""

    name = "earliest|latest|time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | datetime:
        """Read a moment in ISO form."""
        if isinstance(value, datetime) or value in ("earliest", "latest"):
            return value  # type: ignore[no-any-return]
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            self.fail(f"{value!r} is neither earliest, latest nor a time such as 2026-01-31T12:00:00Z", param, ctx)
        return moment


class Names(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`a,b,c`."""

    name = "a,b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Part the names."""
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(","))
        if not all(names):
            self.fail("write names with a comma between two", param, ctx)
        return names


DURATION, START, NAMES = Duration(), StartAt(), Names()


@dataclass(frozen=True, slots=True)
class Target:
    """The database that a command is about."""

    url: str = field(repr=False)
    schema: str | None = None

    @contextmanager
    def opened(self) -> Iterator[tuple[Database, Channel]]:
        """The outbox there, with a connection."""
        from outbox.cli.connection import opened

        with opened(self) as found:
            yield found


def about_a_database(function: F) -> F:
    """Give a command the options that name a database, and hand it over as `target`."""

    @functools.wraps(function)
    def command(
        *args: Any,
        database: str | None,
        database_file: Path | None,
        schema: str | None,
        verbose: int,
        log_format: str,
        **rest: Any,
    ) -> Any:
        logs.set_up(verbose, log_format)
        url = _one_of("database", database, database_file)
        if url is None:
            raise click.UsageError("no database: set OUTBOX_DATABASE, or give --database URL or --database-file PATH")
        return function(*args, target=Target(url, schema), **rest)

    for decorate in reversed(_ABOUT_A_DATABASE):
        command = decorate(command)
    return command  # type: ignore[return-value]


def to_a_destination(function: F) -> F:
    """Give a command `--to` and `--to-file`, and hand the URL over as `to`."""

    @functools.wraps(function)
    def command(*args: Any, to: str | None, to_file: Path | None, **rest: Any) -> Any:
        return function(*args, to=_one_of("to", to, to_file), **rest)

    for decorate in reversed(_TO_A_DESTINATION):
        command = decorate(command)
    return command  # type: ignore[return-value]


def as_json(function: F) -> F:
    """Give a command that reads `--json`."""
    return option("--json", "json", is_flag=True, help="Machine-readable output.")(function)


def confirmed(question: str, *, yes: bool) -> None:
    """Go on when the person agrees: by `--yes`, or at a terminal by an answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Say --yes.")
    click.confirm(question, abort=True, err=True)


def _no_password(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a secret that every user of the machine could read in the list of processes."""
    if value is None:
        return None
    name = str(param.name)
    secrets = _secrets_of(value, userinfo_is_secret=name == "to")
    keep_secret(*secrets)
    if secrets and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            f"--{name} holds a password, which everybody on this machine could read; set {_variable(param, ctx)}"
            f" instead, or write the URL to a file and give --{name}-file PATH"
        )
    return value


def _variable(param: click.Parameter, ctx: click.Context) -> str:
    if param.envvar is not None:
        return str(param.envvar)
    return f"{ctx.auto_envvar_prefix}_{str(param.name).upper()}"


def _secrets_of(url: str, *, userinfo_is_secret: bool = False) -> list[str]:
    """What of a URL nobody should see: the password, or the whole of a token; passwords in the query."""
    rest = url.partition("://")[2] or url
    userinfo, at, _ = rest.rpartition("@")
    user, colon, password = userinfo.partition(":")
    found = [password] if at and colon else [user] if at and userinfo_is_secret else []
    query = rest.partition("?")[2]
    found += [value for name, value in parse_qsl(query, keep_blank_values=True) if _SECRET_NAMES.search(name)]
    # A conninfo string instead of a URL.
    found += re.findall(r"(?i)password\s*=\s*(\S+)", url)
    return [secret for each in found if each for secret in {each, unquote(each)}]


def _one_of(name: str, url: str | None, file: Path | None) -> str | None:
    """The URL from the option or from the file; what stands on the command line wins over the environment."""
    ctx = click.get_current_context()
    if url is not None and file is not None:
        said = {
            each for each in (name, f"{name}_file") if ctx.get_parameter_source(each) is ParameterSource.COMMANDLINE
        }
        if len(said) != 1:
            raise click.UsageError(f"both --{name} and --{name}-file are given; which one is meant?")
        url, file = (url, None) if name in said else (None, file)
    return url if file is None else _read(name, file)


def _read(name: str, file: Path) -> str:
    try:
        url = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise click.UsageError(f"--{name}-file {file}: {reason}") from None
    if not url or len(url.split()) > 1:
        raise click.UsageError(f"--{name}-file {file}: it should hold one URL and nothing else")
    keep_secret(*_secrets_of(url, userinfo_is_secret=name == "to"))
    return url


_ABOUT_A_DATABASE = [
    option(
        "--database",
        metavar="URL",
        envvar="OUTBOX_DATABASE",
        callback=_no_password,
        help="Where the tables are: postgresql://host/name or sqlite:///path.",
    ),
    option(
        "--database-file",
        type=click.Path(path_type=Path),
        metavar="PATH",
        envvar="OUTBOX_DATABASE_FILE",
        help="A file that holds that URL, with its password.",
    ),
    option("--schema", envvar="OUTBOX_SCHEMA", metavar="NAME", help="Schema of the tables (PostgreSQL)."),
    option("-v", "--verbose", count=True, envvar="OUTBOX_VERBOSE", help="Log what happens; -vv: everything."),
    option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        envvar="OUTBOX_LOG_FORMAT",
        help="How to log.",
    ),
]
_TO_A_DESTINATION = [
    option("--to", metavar="URL", callback=_no_password, help="The destination: nats://host:4222, stdout:, …"),
    option(
        "--to-file",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="A file that holds the destination's URL, with its password.",
    ),
]
