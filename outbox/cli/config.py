"""The settings file of the command line, `outbox.toml`: a value for each option, and the routes of `outbox relay`."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from outbox.cli.groups import meant

#: The settings of several commands, before the first table; the others are in the table of their command.
SHARED = (
    "database", "database_file", "schema", "verbose", "log_format",
    "business", "business_file", "standby", "standby_file",
)  # fmt: skip
#: The settings without an option, by command.
WITHOUT_OPTION = {"relay": ("attempts", "batch_size", "batch_bytes")}
_ROUTES = "routes"
_META = __name__
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: A variable with the name of its parameter, if it is the whole value of one.
_BY_VARIABLE = re.compile(rf"(?:[^?&]*=)?{_VARIABLE.pattern}")
_UNQUOTED = re.compile(r"^\s*\[routes\.[^\"'\]]*\*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Config:
    """A settings file and its content, for settings without an option.

    `texts` are values of options, as texts without variables, by the option's name in Python.
    """

    file: Path
    document: Mapping[str, Any]
    texts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def routes(self) -> Any:
        """The tables of routes, unchecked; None if there are none."""
        return self.document.get(_ROUTES)


def current() -> Config | None:
    """Return the settings file of the running command; None if there is no file."""
    found: Config | None = click.get_current_context().meta.get(_META)
    return found


def apply(ctx: click.Context, file: Path) -> None:
    """Make the values of a settings file the defaults of a command's options.

    Raises:
        click.UsageError: the file cannot be read, a setting is unknown, or has a wrong value. Settings in the tables of
            other commands are not looked at.
    """
    config = read(file)
    document = config.document
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    _require_known(document, [*SHARED, _ROUTES, *root.command.list_commands(root)], f"{file}:")
    table, about = _table_of(ctx, document, file)
    defaults: dict[str, str | list[str]] = {}
    for name, option in options_of(ctx.command).items():
        where, prefix = (document, f"{file}:") if name in SHARED else (table, about)
        if name in where:
            texts = _texts(option, where[name], f"{prefix} {name}:")
            config.texts[str(option.name)] = [without_variables(each) for each in texts]
            defaults[str(option.name)] = _value(ctx, option, texts, f"{prefix} {name}:")
    ctx.default_map = defaults
    ctx.meta[_META] = config


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by their names in a settings file."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    found = {each.opts[-1].removeprefix("--").replace("-", "_"): each for each in options}
    return {name: each for name, each in found.items() if name != "config"}


def with_variables(text: str, about: str) -> str:
    """Return a text of a settings file with the environment variables that it names as `${NAME}`."""

    def value(found: re.Match[str]) -> str:
        if given := os.environ.get(found[1]):
            return given
        raise click.UsageError(f"{about} takes the environment variable {found[1]}, which is not set; set it")

    return _VARIABLE.sub(value, text)


def without_variables(text: str) -> str:
    """Return a text of a settings file without the variables, whose values may be secrets of the environment."""
    return _BY_VARIABLE.sub("", text)


def read(file: Path) -> Config:
    """Return a settings file with its content.

    Raises:
        click.UsageError: the file cannot be read, or is not TOML.
    """
    try:
        content = file.read_text()
        return Config(file, tomllib.loads(content))
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{file}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    except tomllib.TOMLDecodeError as error:
        quote = '; quote the pattern: [routes."orders.*"]' if _UNQUOTED.search(content) else ""
        raise click.UsageError(f"{file}: it is not TOML: {error}{quote}") from None


def _table_of(ctx: click.Context, document: Mapping[str, Any], file: Path) -> tuple[Mapping[str, Any], str]:
    """Return the table of a command, whose settings are all known, and the begin of errors about the table."""
    above = ctx.parent
    if above is None:
        return document, f"{file}:"
    table, _ = _table_of(above, document, file)
    found = table.get(str(ctx.info_name), {})
    about = f"{file}: [{'.'.join(_words(ctx))}]"
    if not isinstance(found, dict):
        raise click.UsageError(f"{about} must be a table of settings, not {found!r:.60}")
    if isinstance(ctx.command, click.Group):
        known = ctx.command.list_commands(ctx)
    else:
        own = [name for name in options_of(ctx.command) if name not in SHARED]
        known = [*own, *WITHOUT_OPTION.get(str(ctx.info_name), ())]
    _require_known(found, known, about)
    return found, about


def _words(ctx: click.Context) -> list[str]:
    return [] if ctx.parent is None else [*_words(ctx.parent), str(ctx.info_name)]


def _require_known(table: Iterable[str], known: list[str], about: str) -> None:
    for name in table:
        if name not in known:
            fix = "write it before the first table" if name in SHARED else meant(name, known)
            raise click.UsageError(f"{about} {name}: is unknown; {fix}")


def _texts(option: click.Option, given: Any, about: str) -> list[str]:
    if isinstance(given, list) and not option.multiple and option.type.envvar_list_splitter != ",":
        raise click.UsageError(f"{about} must be one value, not a list")
    return [_text(each, about) for each in (given if isinstance(given, list) else [given])]


def _value(ctx: click.Context, option: click.Option, texts: list[str], about: str) -> str | list[str]:
    """Return the text for an option, or a list of texts for an option that may be given several times."""
    values = [with_variables(each, about) for each in texts]
    value = values if option.multiple else ",".join(values)
    try:
        option.type_cast_value(ctx, value)
    except click.BadParameter as error:
        raise click.UsageError(f"{about} {error.message}") from None
    return value


def _text(given: Any, about: str) -> str:
    """Return a value of TOML as the text that a variable of the environment would hold."""
    if isinstance(given, datetime):
        return given.isoformat()
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, (str, int, float)):
        return str(given)
    raise click.UsageError(f"{about} must be a text, a number, true or false")
