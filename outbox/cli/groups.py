"""Groups of commands: the help is not cut, and the error about a mistyped command names similar commands."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import click

_MOST_SUGGESTED = 2
#: More characters than any one sentence of help has.
_WHOLE_SENTENCE = 500


class Group(click.Group):
    """The class of all groups of `outbox`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the called command; for a mistyped command raise an error with similar commands."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            fix = meant(args[0], self.list_commands(ctx))
            raise click.UsageError(f"there is no command {args[0]}; {fix}", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, each with the whole first sentence of its help."""
        with formatter.section("Commands"):
            formatter.write_dl(self.summaries(ctx))

    def summaries(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return each command with its purpose in a sentence."""
        known = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return [(name, each.get_short_help_str(_WHOLE_SENTENCE)) for name, each in known if each is not None]


def meant(name: str, known: Sequence[str]) -> str:
    """Return the fix of an unknown name: similar names, or all."""
    like = get_close_matches(name, known, n=_MOST_SUGGESTED, cutoff=0.5)
    return f"did you mean {' or '.join(like)}?" if like else f"there are {', '.join(known)}"
