"""Options that several commands have: the database, a destination, output. Secrets never come as arguments."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import click
from click.core import ParameterSource

from outbox.cli import config, logs
from outbox.cli.output import keep_secret
from outbox.cli.secrets import no_password, secrets_in, variable_of, warn_of_readers
from outbox.model.command import OF_ENVIRONMENT, Commands

if TYPE_CHECKING:
    from outbox.store.database import Channel

F = TypeVar("F", bound=Callable[..., Any])

_CONFIG = Path("outbox.toml")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
#: Where an option may come from, the strongest first.
_SOURCES = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
_MESSAGE_ID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-fA-F]{32}")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)\s*")

option = functools.partial(click.option, show_envvar=True, show_default=True)


def together(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator in place of several; the first stands at the top."""

    def decorate(function: F) -> F:
        return functools.reduce(lambda decorated, each: each(decorated), reversed(decorators), function)

    return decorate


def as_value(name: str, value: type) -> Callable[[F], F]:
    """Return a decorator that hands the fields of a dataclass, given as options, over as one value."""
    fields = [each.name for each in dataclasses.fields(value)]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(*args: Any, **given: Any) -> Any:
            given[name] = value(**{each: given.pop(each) for each in fields})
            return function(*args, **given)

        return command  # type: ignore[return-value]

    return decorate


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A duration: `90s`, `1h30m` or `7d`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Return the sum of the parts."""
        from outbox.model.limits import MAX_DELAY

        if isinstance(value, timedelta):
            return value
        if not re.fullmatch(f"({_DURATION.pattern})+", value):
            self.fail(f"{value!r} is not a duration; write 90s, 1h30m or 7d", param, ctx)
        seconds = sum(float(n) * _UNITS[unit] for n, unit in _DURATION.findall(value))
        if seconds > MAX_DELAY.total_seconds():
            self.fail(f"{value!r} is longer than {MAX_DELAY.days}d", param, ctx)
        return timedelta(seconds=seconds)


class Rate(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A rate: `500/s`, `30/m` or `10/h`; a number of messages a second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number for a second."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)/([smh])", value)
        if found is None:
            self.fail(f"{value!r} is not a rate; write 500/s, 30/m or 10/h", param, ctx)
        return float(found[1]) / float(_UNITS[found[2]])


class StartAt(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """The begin of a subscription: `earliest`, `latest`, or a moment with a zone."""

    name = "earliest|latest|time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | datetime:
        """Return `earliest`, `latest`, or a moment given in ISO form."""
        if isinstance(value, datetime):
            return value
        if value.lower() in ("earliest", "latest"):
            return str(value.lower())
        return _moment_of(self, value, "neither earliest, latest nor a time", param, ctx)


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A moment with a zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return a moment given in ISO form."""
        return value if isinstance(value, datetime) else _moment_of(self, value, "no time", param, ctx)


def _moment_of(
    type: click.ParamType,  # type: ignore[type-arg]  # generic in newer versions only
    value: str,
    wrong: str,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        type.fail(f"{value!r} is {wrong} such as 2026-01-31T12:00:00Z", param, ctx)
    if moment.tzinfo is None:
        type.fail(f"{value!r} has no time zone; append Z for UTC", param, ctx)
    return moment


class Names(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """Names with commas in between: `a,b,c`."""

    name = "a,b"
    envvar_list_splitter = ","

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Return a tuple of names."""
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(","))
        if not all(names):
            self.fail("write names with a comma between two", param, ctx)
        return names


class Urls(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A URL; an environment variable may hold several, with white space in between."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text unchecked; later checks show no part of the text in an error."""
        return str(value)

    def split_envvar_value(self, rv: str) -> list[str]:
        """Split before each scheme, because the path of a file may hold a blank."""
        return [url for url in re.split(r"\s+(?=[A-Za-z][A-Za-z0-9+.-]*://)", rv.strip()) if url]


DURATION, RATE, START, MOMENT, NAMES, URLS = Duration(), Rate(), StartAt(), Moment(), Names(), Urls()


class Key(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A key of messages, the unit of order."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a key that a message can have."""
        from outbox.errors import InvalidMessageError
        from outbox.model.limits import checked_key

        if not value:
            self.fail("a key is not empty; for messages without a key leave the option out", param, ctx)
        try:
            return checked_key(value)
        except InvalidMessageError as error:
            self.fail(str(error), param, ctx)


class MessageId(click.IntRange):
    """The id of a message: the number in the log, or the UUID that `send` returned."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a number or a UUID."""
        if isinstance(value, str) and _MESSAGE_ID.fullmatch(value):
            return UUID(value)
        return super().convert(value, param, ctx)


KEY = Key()
#: The id of a message.
ID = MessageId(1, 2**63 - 1)

#: The rest of a selection, besides topics.
by_content = together(
    option("--tags", help="Only messages with one of these tags, as 'TagA || TagB'; '*' all."),
    option("--filter", help='Only messages for which a condition in SQL92 is true, as "price > 100"; TRUE all.'),
)


@dataclass(frozen=True, slots=True)
class Target:
    """The database of a command."""

    url: str = field(repr=False)
    #: Writes the commands that texts advise about the outbox there.
    commands: Commands = OF_ENVIRONMENT

    @property
    def schema(self) -> str | None:
        """The schema of the tables."""
        return self.commands.schema

    @contextmanager
    def open_outbox(self) -> Iterator[Channel]:
        """Open a connection to the outbox there."""
        from outbox.cli.connection import open_outbox

        with open_outbox(self.url, self.commands) as channel:
            yield channel


def about_a_database(function: F, *, unless: str | None = None) -> F:
    """Give a command the options for a database, and hand the database over as `target`.

    `unless`: with this option the command needs no database, and `target` is None.
    """

    @functools.wraps(function)
    def command(*args: Any, targets: tuple[Target, ...], **rest: Any) -> Any:
        if _unneeded(unless, rest):
            return function(*args, target=None, **rest)
        if len(targets) > 1:
            raise click.UsageError(
                f"this command is about one database, not {len(targets)}; choose by --database URL and --schema NAME"
            )
        return function(*args, target=targets[0], **rest)

    return about_databases(command, several=False, unless=unless)  # type: ignore[return-value]


def about_databases(function: F, *, several: bool = True, unless: str | None = None) -> F:
    """Give a command the options for databases; hand over each database with each schema as `targets`."""

    @functools.wraps(function)
    def command(
        *args: Any,
        database: tuple[str, ...],
        database_file: Path | None,
        schema: tuple[str, ...],
        **rest: Any,
    ) -> Any:
        urls = _urls("database", database, database_file)
        if _source("database") is ParameterSource.COMMANDLINE:
            urls = tuple(map(_with_password, urls))
        if not urls and not _unneeded(unless, rest):
            raise click.UsageError("no database: set OUTBOX_DATABASE, or give --database URL or --database-file PATH")
        where = {url: _options_for(url, database_file, several=len(urls) > 1) for url in urls}
        called = click.get_current_context().find_object(Commands) or OF_ENVIRONMENT
        targets = tuple(
            Target(url, dataclasses.replace(called, schema=name, where=where[url]))
            for url in urls
            for name in schema or (None,)
        )
        return function(*args, targets=targets, **rest)

    return together(*_names_of_databases(several=several), logged)(command)  # type: ignore[return-value]


def _with_password(url: str) -> str:
    """Return the URL of the environment, if it names the same database and user: an advised URL has no password."""
    from outbox.cli.connection import without_secrets

    param = next(each for each in click.get_current_context().command.params if each.name == "database")
    known = os.environ.get(variable_of(param, click.get_current_context()), "")
    for each in URLS.split_envvar_value(known):
        with suppress(click.ClickException):
            if without_secrets(each) == without_secrets(url):
                keep_secret(secrets_in("database", each))
                return each
    return url


def _options_for(url: str, file: Path | None, *, several: bool) -> tuple[str, ...]:
    """Return the options that lead another command to the same database; none if the environment does so."""
    ctx = click.get_current_context()
    source, config_source = _source("database"), ctx.get_parameter_source("config")
    by_file = file is not None and ctx.get_parameter_source("database_file") is source
    if several or (source is ParameterSource.COMMANDLINE and not by_file):
        from outbox.cli.connection import without_secrets

        return "--database", without_secrets(url)
    if source is ParameterSource.COMMANDLINE:
        return "--database-file", str(Path(file or "").absolute())
    settings = config.current()
    if source is ParameterSource.DEFAULT_MAP and config_source is ParameterSource.COMMANDLINE and settings is not None:
        return "--config", str(settings.file.absolute())
    return ()


def logged(function: F) -> F:
    """Give a command the options for its log, and set the log up."""

    @functools.wraps(function)
    def command(*args: Any, verbose: int, log_format: str, **rest: Any) -> Any:
        logs.set_up(verbose, log_format)
        return function(*args, **rest)

    return together(*_LOGGED, configured)(command)  # type: ignore[return-value]


def _unneeded(unless: str | None, given: Mapping[str, Any]) -> bool:
    return unless is not None and given[unless] is not None


def _by_url_or_file(function: F, name: str, help: str, *, envvar: str | None = None) -> F:
    """Give a command the options `--name` and `--name-file`, and hand over the URL."""

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> Any:
        url = given[name]
        found = _urls(name, () if url is None else (url,), given.pop(f"{name}_file"))
        given[name] = found[0] if found else None
        return function(*args, **given)

    url = option(f"--{name}", metavar="URL", envvar=envvar, callback=no_password, help=help)
    return together(url, _file_option(name, envvar))(command)  # type: ignore[return-value]


to_a_destination = functools.partial(
    _by_url_or_file, name="to", help="The destination: nats://host:4222, sqs://region, …"
)
a_business_database = functools.partial(
    _by_url_or_file,
    name="business",
    help='The business database, for transactions that were begun with verdict="record".',
    envvar="OUTBOX_BUSINESS",
)
from_a_standby = functools.partial(
    _by_url_or_file,
    name="standby",
    help="A standby of the database, to be read instead. PostgreSQL only.",
    envvar="OUTBOX_STANDBY",
)


def _configure(ctx: click.Context, _: click.Parameter, file: Path | None) -> None:
    """Take defaults from the settings file that is named, or from `outbox.toml` in the current folder."""
    found = file or (_CONFIG if _CONFIG.is_file() else None)
    if found is not None and not ctx.resilient_parsing:
        config.apply(ctx, found)


configured = option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="PATH",
    envvar="OUTBOX_CONFIG",
    is_eager=True,  # before the options that get defaults
    expose_value=False,
    callback=_configure,
    help="A settings file.  [outbox.toml in the current folder, if there]",
)


def _file_option(name: str, envvar: str | None, more: str = "") -> Callable[[Any], Any]:
    return option(
        f"--{name}-file",
        type=click.Path(path_type=Path),
        metavar="PATH",
        envvar=envvar and f"{envvar}_FILE",
        help=f"A file with the URL and its password{more}.",
    )


def from_settings(name: str) -> bool:
    """Return whether the value of an option comes from the settings file."""
    return _source(name) is _SOURCES[-1]


def as_given(name: str) -> str:
    """Return an option as the user has given it, for errors: by its own name, or that of its variable."""
    source, ctx = _source(name), click.get_current_context()
    for param in ctx.command.params:
        of_it = param.name in (name, f"{name}_file") and ctx.get_parameter_source(param.name) is source
        if of_it and source is ParameterSource.ENVIRONMENT:
            return variable_of(param, ctx)
    return f"--{name.replace('_', '-')}" if source is ParameterSource.COMMANDLINE else f"{name} in the settings file"


def _source(name: str) -> ParameterSource | None:
    """Return the source of an option with a value, or of its file."""
    ctx = click.get_current_context()
    found = [ctx.get_parameter_source(each) for each in (name, f"{name}_file")]
    return next((each for each in _SOURCES if each in found), None)


as_json = option("--json", "json", is_flag=True, help="Machine-readable output.")
at_most = option("--limit", type=click.IntRange(1, 2**31 - 1), default=100, help="Show at most so many.")
by_whom = option("--by", help="The person; otherwise the user of the process.")


def confirmed(question: str, *, yes: bool) -> None:
    """Return if the person agrees, by `--yes` or by an answer at a terminal; else end the command."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is no terminal to answer at: give --yes")
    click.confirm(question, abort=True, err=True)


def _urls(name: str, given: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """Return the URLs from the option or from the file."""
    if file is None or not _file_is_meant(name, given=bool(given)):
        return given
    return tuple(_read(name, file))


def _file_is_meant(name: str, *, given: bool) -> bool:
    """Return whether the file counts, and not the URL; the stronger source wins."""
    ctx = click.get_current_context()
    if not given:
        return True
    url, path = (_SOURCES.index(ctx.get_parameter_source(each)) for each in (name, f"{name}_file"))
    if url == path:
        raise click.UsageError(f"both --{name} and --{name}-file are given; leave one out")
    return path < url


def _read(name: str, file: Path) -> list[str]:
    """Return the URLs in a file, one a line."""
    try:
        urls = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise click.UsageError(f"--{name}-file {file}: {reason}") from None
    several = name == "database"
    if not urls or any(len(url.split()) > 1 for url in urls) or (len(urls) > 1 and not several):
        form = "one URL a line" if several else "one URL"
        raise click.UsageError(f"--{name}-file {file}: the file should hold {form} and nothing else")
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
            callback=no_password,
            help=f"Where the tables are: postgresql://host/name or sqlite:///path.{again}",
        ),
        _file_option("database", "OUTBOX_DATABASE", "; or with several, a line each" if several else ""),
        option(
            "--schema",
            multiple=True,
            envvar="OUTBOX_SCHEMA",
            metavar="NAME",
            help=f"Schema of the tables (PostgreSQL).{again}",
        ),
    ]


_LOGGED = [
    option("-v", "--verbose", count=True, show_default=False, envvar="OUTBOX_VERBOSE", help="Log events; -vv: all."),
    option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        envvar="OUTBOX_LOG_FORMAT",
        help="How to log.",
    ),
]
