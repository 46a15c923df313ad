"""Secrets among options: refused as arguments, hidden in texts, and warned of in files that everybody may read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from outbox.cli import config
from outbox.cli.output import keep_secret, warn
from outbox.runtime.secret import Secret, secrets_of, warning_of


def no_password(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Return the value of a URL option; raise for a secret that every user could read in the list of processes.

    With several values all secrets are known before the error, so that the error shows none of them.
    """
    name, values = str(param.name), value if isinstance(value, tuple) else filter(None, (value,))
    secrets = [secret for each in values for secret in secrets_in(name, each)]
    keep_secret(secrets)
    settings = config.current() if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP else None
    if settings is not None and any(secrets_in(name, each) for each in settings.texts[name]):
        warn_of_readers(settings.file)
    if secrets and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            f"--{name} holds a password{_where(secrets)}, for every user of this machine to read; set"
            f" {variable_of(param, ctx)} instead{_in_file(name, ctx)}"
        )
    return value


def variable_of(param: click.Parameter, ctx: click.Context) -> str:
    """Return the environment variable of an option."""
    if param.envvar is not None:
        return str(param.envvar)
    return f"{ctx.auto_envvar_prefix}_{str(param.name).upper()}"


def secrets_in(name: str, value: str) -> list[Secret]:
    """Return the secrets in the value of an option, which is the URL of a destination or of a database."""
    if name not in ("to", "route"):
        return secrets_of(value)
    from outbox.senders.opening import secrets_of_destination

    pattern, _, url = value.partition("=") if name == "route" else ("", "", value)
    # A colon is in no pattern: this = belongs to a URL without pattern.
    return [*secrets_of_destination(url), *(secrets_of(value, token=True) if ":" in pattern else ())]


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
    """Warn of a file with a secret that every user may read."""
    if warning := warning_of(file):
        warn(warning)
