"""Options that several commands have: the database, a destination, output. Secrets never come as arguments."""

from __future__ import annotations

import dataclasses
import functools
import getpass
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from outbox.cli import logs
from outbox.cli.output import keep_secret, say
from outbox.runtime.secret import Secret, secrets_of, warning_of

if TYPE_CHECKING:
    from outbox.store.database import Channel

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)\s*")

option = functools.partial(click.option, show_envvar=True, show_default=True)


def together(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return one decorator in place of several, of which the first stands at the top."""

    def decorate(function: F) -> F:
        return functools.reduce(lambda decorated, each: each(decorated), reversed(decorators), function)

    return decorate


def as_value(name: str, value: type) -> Callable[[F], F]:
    """Return a decorator that hands the options which are fields of a dataclass over as one value of that name."""
    fields = [each.name for each in dataclasses.fields(value)]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(*args: Any, **given: Any) -> Any:
            given[name] = value(**{each: given.pop(each) for each in fields})
            return function(*args, **given)

        return command  # type: ignore[return-value]

    return decorate


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A duration, such as `90s`, `1h30m` or `7d`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Return the sum of the parts."""
        if isinstance(value, timedelta):
            return value
        if not re.fullmatch(f"({_DURATION.pattern})+", value):
            self.fail(f"{value!r} is not a duration; write 90s, 1h30m or 7d", param, ctx)
        try:
            return timedelta(seconds=sum(float(n) * _UNITS[unit] for n, unit in _DURATION.findall(value)))
        except OverflowError:
            self.fail(f"{value!r} is longer than anybody will wait", param, ctx)


class StartAt(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """The place where a subscription begins: `earliest`, `latest`, or a moment with its zone."""

    name = "earliest|latest|time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | datetime:
        """Return `earliest`, `latest`, or the moment that is given in ISO form."""
        if isinstance(value, datetime):
            return value
        if value.lower() in ("earliest", "latest"):
            return str(value.lower())
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is not None and moment.tzinfo is None:
            self.fail(f"{value!r} has no time zone; append Z for UTC", param, ctx)
        if moment is None:
            self.fail(f"{value!r} is neither earliest, latest nor a time such as 2026-01-31T12:00:00Z", param, ctx)
        return moment


class Names(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """Names with commas between them, such as `a,b,c`."""

    name = "a,b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Return the names one by one."""
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(","))
        if not all(names):
            self.fail("write names with a comma between two", param, ctx)
        return names


class Urls(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A URL; an environment variable may hold several, with white space between them."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text as it is. It is checked later, where no error shows any part of it."""
        return str(value)

    def split_envvar_value(self, rv: str) -> list[str]:
        """Split before each scheme, because the path of a file may hold a blank."""
        return [url for url in re.split(r"\s+(?=[A-Za-z][A-Za-z0-9+.-]*://)", rv.strip()) if url]


DURATION, START, NAMES, URLS = Duration(), StartAt(), Names(), Urls()


@dataclass(frozen=True, slots=True)
class Target:
    """The database that a command is about."""

    url: str = field(repr=False)
    schema: str | None = None

    @contextmanager
    def open_outbox(self) -> Iterator[Channel]:
        """Open a connection to the outbox that is there."""
        from outbox.cli.connection import open_outbox

        with open_outbox(self.url, self.schema) as channel:
            yield channel


def about_a_database(function: F, *, unless: str | None = None) -> F:
    """Give a command the options that name a database, and hand it over as `target`.

    `unless`: an option with which the command needs no database; `target` is None then.
    """

    @functools.wraps(function)
    def command(*args: Any, targets: tuple[Target, ...], **rest: Any) -> Any:
        if _unneeded(unless, rest):
            return function(*args, target=None, **rest)
        if len(targets) > 1:
            raise click.UsageError(
                f"this command is about one database, not {len(targets)}; say which by --database URL and --schema NAME"
            )
        return function(*args, target=targets[0], **rest)

    return about_databases(command, several=False, unless=unless)  # type: ignore[return-value]


def about_databases(function: F, *, several: bool = True, unless: str | None = None) -> F:
    """Give a command the options that name databases; hand over each database with each schema as `targets`."""

    @functools.wraps(function)
    def command(
        *args: Any,
        database: tuple[str, ...],
        database_file: Path | None,
        schema: tuple[str, ...],
        verbose: int,
        log_format: str,
        **rest: Any,
    ) -> Any:
        logs.set_up(verbose, log_format)
        urls = _urls(database, database_file)
        if not urls and not _unneeded(unless, rest):
            raise click.UsageError("no database: set OUTBOX_DATABASE, or give --database URL or --database-file PATH")
        targets = tuple(Target(url, name) for url in urls for name in schema or (None,))
        return function(*args, targets=targets, **rest)

    return together(*_names_of_databases(several=several), *_LOGGED)(command)  # type: ignore[return-value]


def _unneeded(unless: str | None, given: Mapping[str, Any]) -> bool:
    return unless is not None and given[unless] is not None


def to_a_destination(function: F) -> F:
    """Give a command `--to` and `--to-file`, and hand the URL over as `to`."""
    return _by_url_or_file(function, "to", "The destination: nats://host:4222, stdout:, …")


def by_routes(function: F) -> F:
    """Give a command `--route` and `--config`, and hand over their texts as `route` and the path as `config`."""
    route = option(
        "--route",
        multiple=True,
        metavar="TOPIC=URL",
        callback=_no_passwords,
        help="A destination for a topic or a pattern, as 'orders.*=nats://host:4222'; the first that matches counts,"
        " and the last is '*=URL'. May be given several times; in the environment with blanks between two.",
    )
    config = option("--config", type=click.Path(path_type=Path), metavar="PATH", help="A TOML file with routes.")
    return together(route, config)(function)


def a_business_database(function: F) -> F:
    """Give a command `--business` and `--business-file`, and hand the URL over as `business`."""
    help = 'The business database, for transactions that were begun with verdict="record".'
    return _by_url_or_file(function, "business", help, envvar="OUTBOX_BUSINESS")


def from_a_standby(function: F) -> F:
    """Give a command `--standby` and `--standby-file`, and hand the URL over as `standby`."""
    help = "A standby of the database, which is read in its place. PostgreSQL only."
    return _by_url_or_file(function, "standby", help, envvar="OUTBOX_STANDBY")


def _by_url_or_file(function: F, name: str, help: str, *, envvar: str | None = None) -> F:
    """Give a command the options `--name` and `--name-file`, and hand over the URL that one of them gives."""

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> Any:
        given[name] = _one_of(name, given[name], given.pop(f"{name}_file"))
        return function(*args, **given)

    url = option(f"--{name}", metavar="URL", envvar=envvar, callback=no_password, help=help)
    return together(url, _file_option(name, envvar))(command)  # type: ignore[return-value]


def _file_option(name: str, envvar: str | None, more: str = "") -> Callable[[Any], Any]:
    return option(
        f"--{name}-file",
        type=click.Path(path_type=Path),
        metavar="PATH",
        envvar=envvar and f"{envvar}_FILE",
        help=f"A file that holds that URL, with its password{more}.",
    )


def as_given(name: str) -> str:
    """Return an option as the user has given it, for errors: the variable of the environment, or the option's name."""
    ctx = click.get_current_context()
    for each in (name, f"{name}_file"):
        if ctx.get_parameter_source(each) is ParameterSource.ENVIRONMENT:
            return _variable(next(param for param in ctx.command.params if param.name == each), ctx)
    return f"--{name}"


def as_json(function: F) -> F:
    """Give a command `--json`."""
    return option("--json", "json", is_flag=True, help="Machine-readable output.")(function)


def by_whom(function: F) -> F:
    """Give a command that decides something `--by`."""
    return option("--by", help="Who decides; otherwise the user of this process.")(function)


def me() -> str:
    """Return the user and the host of this process, as `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def confirmed(question: str, *, yes: bool) -> None:
    """Return if the person agrees, by `--yes` or by an answer at a terminal; else end the command."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is no terminal to answer at: give --yes")
    click.confirm(question, abort=True, err=True)


def _no_passwords(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Raise if one of the values holds a secret. All are looked at first, so that no error shows one of the others."""
    refused: click.UsageError | None = None
    for value in values:
        try:
            no_password(ctx, param, value)
        except click.UsageError as error:
            refused = error
    if refused is not None:
        raise refused
    return values


def no_password(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Raise for a secret that every user of the machine could read in the list of processes."""
    if value is None:
        return None
    name = str(param.name)
    secrets = secrets_in(name, value)
    keep_secret(secrets)
    if secrets and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            f"--{name} holds a password{_where(secrets)}, which everybody on this machine could read; set"
            f" {_variable(param, ctx)} instead{_in_file(name, ctx)}"
        )
    return value


def _variable(param: click.Parameter, ctx: click.Context) -> str:
    if param.envvar is not None:
        return str(param.envvar)
    return f"{ctx.auto_envvar_prefix}_{str(param.name).upper()}"


def secrets_in(name: str, value: str) -> list[Secret]:
    """Return the secrets in the value of an option, which is the URL of a destination or of a database."""
    if name not in ("to", "route"):
        return secrets_of(value)
    from outbox.senders.opening import secrets_of_destination

    url = value.partition("=")[2] if name == "route" else value
    return [*secrets_of_destination(url), *(secrets_of(value, token=True) if url != value else ())]


def _in_file(name: str, ctx: click.Context) -> str:
    """Return how to give the option by a file, in words; an empty text if it cannot be given so."""
    what, file = ("routes", "config") if name == "route" else ("the URL", f"{name}_file")
    if all(each.name != file for each in ctx.command.params):
        return ""
    return f", or write {what} to a file and give --{file.replace('_', '-')} PATH"


def _where(secrets: Sequence[Secret]) -> str:
    """Return where in a URL its secrets are, in words; an empty text for a password before the host."""
    names = dict.fromkeys(f"{each.parameter!r:.40}" for each in secrets if each.parameter)
    if names:
        return f" in its parameter {' and '.join(names)}"
    return " in its query" if any(each.parameter == "" for each in secrets) else ""


def warn_of_readers(file: Path) -> None:
    """Warn of a file that holds a secret and that everybody may read."""
    if warning := warning_of(file):
        say(f"warning: {warning}")


def _one_of(name: str, url: str | None, file: Path | None) -> str | None:
    """Return the URL from the option or from the file."""
    if file is None or not _file_is_meant(name, given=url is not None):
        return url
    return _read(name, file)[0]


def _urls(given: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """Return the URLs of the databases from the option or from the file."""
    if file is None or not _file_is_meant("database", given=bool(given)):
        return given
    return tuple(_read("database", file))


def _file_is_meant(name: str, *, given: bool) -> bool:
    """Return whether the file counts, and not the URL; the command line wins over the environment."""
    ctx = click.get_current_context()
    if not given:
        return True
    said = {each for each in (name, f"{name}_file") if ctx.get_parameter_source(each) is ParameterSource.COMMANDLINE}
    if len(said) != 1:
        raise click.UsageError(f"both --{name} and --{name}-file are given; give one of them")
    return name not in said


def _read(name: str, file: Path) -> list[str]:
    """Return the lines of a file, which are URLs."""
    try:
        urls = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise click.UsageError(f"--{name}-file {file}: {reason}") from None
    several = name == "database"
    if not urls or any(len(url.split()) > 1 for url in urls) or (len(urls) > 1 and not several):
        form = "one URL a line" if several else "one URL"
        raise click.UsageError(f"--{name}-file {file}: it should hold {form} and nothing else")
    secrets = [each for url in urls for each in secrets_in(name, url)]
    keep_secret(secrets)
    if secrets:
        warn_of_readers(file)
    return urls


def _names_of_databases(*, several: bool) -> list[Callable[..., Any]]:
    again = " May be given several times." if several else ""
    return [
        option(
            "--database",
            type=URLS,
            multiple=True,
            metavar="URL",
            envvar="OUTBOX_DATABASE",
            callback=_no_passwords,
            help=f"Where the tables are: postgresql://host/name or sqlite:///path.{again}",
        ),
        _file_option("database", "OUTBOX_DATABASE", "; or several, one a line" if several else ""),
        option(
            "--schema",
            multiple=True,
            envvar="OUTBOX_SCHEMA",
            metavar="NAME",
            help=f"Schema of the tables (PostgreSQL).{again}",
        ),
    ]


_LOGGED = [
    option(
        "-v",
        "--verbose",
        count=True,
        show_default=False,
        envvar="OUTBOX_VERBOSE",
        help="Log what happens; -vv: everything.",
    ),
    option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        envvar="OUTBOX_LOG_FORMAT",
        help="How to log.",
    ),
]
