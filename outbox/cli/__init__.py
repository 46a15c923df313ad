"""The command line: `outbox …`. A verb is loaded when a user calls it, so that help answers at once."""

from __future__ import annotations

import errno
import functools
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, TextIO

import click

from outbox.cli.groups import Group
from outbox.cli.output import fail, scrubbed
from outbox.runtime.garbage import begin_command

#: The object of each verb, and its purpose in a sentence.
_VERBS = {
    "relay": ("outbox.cli.relay:relay", "Send the messages of the log to a destination."),
    "consume": ("outbox.cli.consume:consume", "Handle messages of the log by functions of an application."),
    "status": ("outbox.cli.status:status", "Show what waits, since when, and who works on it."),
    "workers": ("outbox.cli.workers:workers", "List the processes that work for subscriptions."),
    "half": ("outbox.cli.half:half", "Look at pending transactions, decide on them, ask about them."),
    "rocketmq": ("outbox.cli.rocketmq:rocketmq", "Serve the official clients of RocketMQ 5."),
    "send": ("outbox.cli.send:send", "Write a message, for a first try."),
    "log": ("outbox.cli.log:log", "Look at the messages of the log."),
    "parked": ("outbox.cli.parked:parked", "Look at messages set aside, and decide on them."),
    "decisions": ("outbox.cli.decisions:decisions", "List what people decided."),
    "dashboard": ("outbox.cli.dashboard:dashboard", "Show all of it in a browser, and decide there."),
    "subscriptions": (
        "outbox.cli.subscriptions:subscriptions",
        "List, alter, split, pause, resume, reset, backfill and drop the readers of the log.",
    ),
    "consumers": (
        "outbox.cli.consumers:consumers",
        "List the consumers of the log, look at one, let it begin again, drop it.",
    ),
    "extract": ("outbox.cli.extract:extract", "Write messages to Parquet files, by Spark."),
    "report": ("outbox.cli.report:report", "Look at the log with Spark: delivery, transactions, order."),
    "purge": ("outbox.cli.purge:purge", "Delete old messages that every subscription has passed."),
    "erase": ("outbox.cli.erase:erase", "Delete the messages of a person, by key or by message id."),
    "db": ("outbox.cli.db:db", "Make the tables, and print the rights of each role."),
    "doctor": ("outbox.cli.doctor:doctor", "Check the tables, the server and the rights, and say what to do."),
    "restore": ("outbox.cli.restore:restore", "Bring a log that was copied to another server in line."),
    "demo": ("outbox.cli.demo:demo", "See transactions become messages, with a crash in the middle."),
}

_INTERRUPTED = 130
#: Errors of writing to standard output: a full disk, a pipe that nobody reads, a terminal that is gone.
_UNWRITABLE = (errno.ENOSPC, errno.EPIPE, errno.EIO)


class Verbs(Group):
    """The verbs, loaded at need; each failure ends as one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs, in the order in which a user meets them."""
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a verb."""
        if cmd_name not in _VERBS:
            return None
        module, _, name = _VERBS[cmd_name][0].partition(":")
        found: click.Command = getattr(import_module(module), name)
        return found

    def summaries(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return the verbs with their purposes, without loading any."""
        return [(name, text) for name, (_, text) in _VERBS.items()]

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run, and exit with a code: 0 fine, 1 failure or findings, 2 usage, 3 no database, 4 hang or unfinished."""
        run = functools.partial(super().main, *args, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        begin_command()
        sys.exit(_ended(run))


def _ended(run: Callable[[], Any]) -> int:
    """Run, say in one line how the command failed, and return the exit code."""
    try:
        code = run()
        sys.stdout.flush()
    except click.ClickException as error:
        if not isinstance(error, click.UsageError):
            fail(error.format_message())
            return error.exit_code
        text = io.StringIO()
        error.show(text)
        click.echo(scrubbed(text.getvalue()), err=True, nl=False)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except Exception as error:
        from outbox.cli.failures import FAILURE, report_failure

        if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
            _drop_what_is_left(sys.stdout)
            # A reader that has closed its pipe has read enough, so this is not reported.
            if not isinstance(error, BrokenPipeError):
                click.echo(f"Error: standard output: {error.strerror}", err=True)
            return FAILURE
        code = report_failure(error)
        if code is None:
            raise
    return code if isinstance(code, int) else 0


def _drop_what_is_left(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that the end of the process does not try again to write the rest."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@click.group(
    cls=Verbs,
    context_settings={"auto_envvar_prefix": "OUTBOX", "help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="outbox-log", prog_name="outbox")
def main() -> None:
    """A transactional outbox: messages leave exactly when their transaction commits.

    The database is given as --database URL, OUTBOX_DATABASE or --database-file PATH. Every option has an environment
    variable, shown in the help of its command. A URL with a password belongs into the environment or a file.

    Exit codes: 0 fine, 1 failure or findings, 2 usage or configuration, 3 database unreachable, 4 a hang, or a drain
    without an end. A name or an id that is not there ends a command with 2.

    A terminal gets colours, unless NO_COLOR is set.
    """
    click.get_current_context().color = False if os.environ.get("NO_COLOR") else None
