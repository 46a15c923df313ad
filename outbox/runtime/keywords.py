"""Keyword arguments that a TypedDict describes, as a caller without a type checker may get wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def require_known(what: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse a name that `what` does not have, because a choice without the name would choose more."""
    if unknown := sorted(given.keys() - set(known)):
        raise TypeError(f"{what} has no option {unknown[0]}; there are {', '.join(known)}")
