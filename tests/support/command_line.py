"""Runs `outbox …` inside the test's process."""

import gc
import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine

from outbox.cli import main
from outbox.cli.output import known_secrets
from outbox.store.database import Database


@dataclass(frozen=True)
class Ended:
    """What a command wrote, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one line of JSON that was asked for."""
        return json.loads(self.out)


def outbox(engine: Engine | str | None, *arguments: str, **environment: str) -> Ended:
    """Run a command on a database, given as the environment gives it."""
    return _run(engine, arguments, environment, at_a_terminal=False)


def at_a_terminal(engine: Engine | str | None, *arguments: str, **environment: str) -> Ended:
    """Run a command whose output goes to a terminal, and so is in colour."""
    return _run(engine, arguments, environment, at_a_terminal=True)


def leading_to(engine: Engine) -> str:
    """The options with which texts of the library advise a command about this database."""
    return shlex.join(Database(engine).commands.where)


def _run(
    engine: Engine | str | None, arguments: Sequence[str], environment: dict[str, str], *, at_a_terminal: bool
) -> Ended:
    url = engine.url.render_as_string(hide_password=False) if isinstance(engine, Engine) else engine
    where = {} if url is None else {"OUTBOX_DATABASE": url}
    runner = CliRunner(env={"OUTBOX_DATABASE": None, "NO_COLOR": None})
    with the_tests_own_process():
        result = runner.invoke(main, list(arguments), env={**where, **environment}, color=at_a_terminal)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


@contextmanager
def the_tests_own_process() -> Iterator[None]:
    """A command sets up the log and the garbage collector of its process, and hides the secrets that the process was
    given. Here the process is that of the tests.
    """
    logger = logging.getLogger("outbox")
    handlers, propagate = logger.handlers[:], logger.propagate
    levels = {name: logging.getLogger(name).level for name in ("outbox", "outbox.lease", "outbox.activity")}
    thresholds = gc.get_threshold()
    try:
        # What a test has left would never be collected.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc, "freeze", lambda: None)
            yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        gc.set_threshold(*thresholds)
        known_secrets.clear()
