"""Commands that texts advise: each acts on the outbox that the text is about, in whichever shell a person pastes it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

_OPTION = re.compile("--[a-z][a-z-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Writes commands about one outbox.

    `program`: the words with which a shell calls the command line. `schema`: of the tables. `where`: the options that
    lead to the database; empty where the environment of the shell is to name the database.
    """

    program: tuple[str, ...] = ("outbox",)
    schema: str | None = None
    where: tuple[str, ...] = ()

    def line(self, *words: object) -> str:
        """Return a command as a shell takes it. Words with a meaning for the shell are quoted.

        A name that begins with a hyphen stands at the end, where the name is taken for no option.
        """
        return self._joined(words, *self._schema_option, *self.where)

    def line_without_database(self, *words: object) -> str:
        """Do as `line`, for a command that opens no database."""
        return self._joined(words, *self._schema_option)

    def without_place(self, text: str) -> str:
        """Return a text for strangers: its commands do not say where the database is."""
        return text.replace(f" {shlex.join(self.where)}", "") if self.where else text

    @property
    def _schema_option(self) -> tuple[str, ...]:
        return () if self.schema is None else ("--schema", self.schema)

    def _joined(self, words: Iterable[object], *options: str) -> str:
        said, last = [*self.program], list[str]()
        for word in map(str, words):
            is_name = word.startswith("-") and not _OPTION.fullmatch(word) and not _OPTION.fullmatch(said[-1])
            (last if is_name else said).append(word)
        return shlex.join([*said, *options, *(["--", *last] if last else [])])


#: About the outbox of the environment of the shell.
OF_ENVIRONMENT = Commands()
