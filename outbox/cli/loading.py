"""Objects of the user's own code, named on the command line as `module:object`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import click

from outbox.cli.output import scrubbed
from outbox.model.verdict import describe


def loaded(name: str, given_as: str) -> object:
    """Return the object that `module:object` names; its module is looked for in the current folder first.

    Raises:
        click.UsageError: there is none, or its module cannot be imported; `given_as` names the option in the error.
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise click.UsageError(f"{given_as} {name}: write module:object, for example shop.orders:listener")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found: object = _imported(module, f"{given_as} {name}", folder)
    for part in path.split("."):
        if not hasattr(found, part):
            raise click.UsageError(f"{given_as} {name}: {module} has no {path}")
        found = getattr(found, part)
    return found


def _imported(module: str, about: str, folder: str) -> object:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # A module that this module imports may be missing as well.
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise click.UsageError(
                f"{about}: there is no module {error.name}, neither in {folder} nor installed"
            ) from None
        raise click.UsageError(f"{about}: {module} cannot be imported: {_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise click.UsageError(f"{about}: {module} cannot be imported: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(scrubbed(describe(error)).split())
