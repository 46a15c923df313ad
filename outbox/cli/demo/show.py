"""The output of the demo: bars that move on a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import click

from outbox.cli.output import show_table

_SECONDS_BETWEEN_LINES = 1.0


class Show(Protocol):
    """A way to show the course of the demo."""

    def tell(self, text: str) -> None:
        """Show a text about what happened."""

    def progress(self, committed: int, received: int) -> None:
        """Show how many messages were committed and received."""

    def running(self, expected: int) -> AbstractContextManager[object]:
        """Show progress from now on, up to so many messages, while the returned context lasts."""


def new_show() -> Show:
    """Return bars on a terminal, else lines."""
    return Bars() if sys.stdout.isatty() else Lines()


def result(rows: Sequence[tuple[str, str, str]], conclusion: str, *, is_sound: bool) -> None:
    """Write the table at the end, and what it says in one sentence."""
    click.echo()
    show_table(("RESULT", "NUMBER", ""), rows, numbers=("NUMBER",))
    click.echo()
    click.secho(conclusion, bold=True, fg="green" if is_sound else "red")


class Lines:
    """Plain text, a line of progress a second."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._expected = 0

    def tell(self, text: str) -> None:
        """Write a line with the time since the beginning."""
        click.echo(f"{time.monotonic() - self._began:5.1f} s  {text}")

    def progress(self, committed: int, received: int) -> None:
        """Write a line of progress, if a second has passed since the last one."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self.tell(f"  {committed:,} of {self._expected:,} committed, {received:,} received")

    def running(self, expected: int) -> AbstractContextManager[object]:
        """Keep the expected number for the lines of progress; there is nothing to draw."""
        self._expected = expected
        return nullcontext()


class Bars:
    """Two bars below the lines that tell what happens."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(highlight=False)
        columns = TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, console=self._console)
        self._began = time.monotonic()

    def tell(self, text: str) -> None:
        """Write a line above the bars."""
        from rich.text import Text

        self._console.print(Text.assemble((f"{time.monotonic() - self._began:5.1f} s  ", "dim"), text))

    def progress(self, committed: int, received: int) -> None:
        """Move the bars."""
        self._progress.update(self._committed, completed=committed)
        self._progress.update(self._received, completed=received)

    def running(self, expected: int) -> AbstractContextManager[object]:
        """Draw the bars."""
        self._committed = self._progress.add_task("committed", total=expected)
        self._received = self._progress.add_task("received", total=expected)
        return self._progress
