"""The output of the demo: a line for each event, a line of progress each second, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from outbox.cli.output import show_table

_SECONDS_BETWEEN_LINES = 1.0


class Show:
    """Writes lines with the time since the beginning."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def tell(self, text: str) -> None:
        """Write a line."""
        click.echo(f"{time.monotonic() - self._began:5.1f} s  {text}")

    def progress(self, committed: int, received: int, expected: int) -> None:
        """Write a line of progress, if a second has passed since the last one."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self.tell(f"  {committed:,} of {expected:,} committed, {received:,} received")


def result(rows: Sequence[tuple[str, str, str]], conclusion: str, *, is_sound: bool) -> None:
    """Write the table at the end, and a sentence about the result."""
    click.echo()
    show_table(("RESULT", "NUMBER", ""), rows, numbers=("NUMBER",))
    click.echo()
    click.secho(conclusion, bold=True, fg="green" if is_sound else "red")
