"""Opening a business database without an outbox, which holds the records of its commits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from outbox.cli.connection import Failure, engine_of, without_secrets
from outbox.cli.failures import report_failure
from outbox.model.command import Commands
from outbox.rocketmq.business import Business


@contextmanager
def business_of(url: str) -> Iterator[Business]:
    """Yield a business database, after a look for a record, so that a mistake shows at once. Errors name the option."""
    commands = Commands(where=("--database", without_secrets(url)))
    try:
        engine = engine_of(url, make=commands.line("db", "upgrade", "--record-only"))
    except click.ClickException as error:
        raise Failure(f"--business: {error.message}", error.exit_code) from None
    business = Business(engine, connections=1)
    try:
        try:
            business.standing("")
        except Exception as error:
            code = report_failure(error, "--business: {}".format)
            if code is None:
                raise
            click.get_current_context().exit(code)
        yield business
    finally:
        business.close()
        engine.dispose()
