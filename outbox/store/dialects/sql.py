"""A statement that is complete, as against a template with `{names}` that have to be filled in."""

from __future__ import annotations


class Sql(str):
    """A statement in which nothing is left to be filled in. A text that holds data has to be one."""

    __slots__ = ()
