"""Destinations as subscriptions store them, and the comparison of two destinations."""

from __future__ import annotations

import re
from dataclasses import dataclass

_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<hosts>[^/?]*)(?P<path>.*?)(\?as=(?P<name>[^/?&=]+))?", re.DOTALL
)


def same_destination(one: str, other: str) -> bool:
    """Return whether two texts name the same destination.

    Two URLs are compared by scheme, path and hosts: one common host is enough, so that the hosts of a cluster can be
    exchanged one by one. If both URLs have the option `as`, its value counts in place of the hosts; if only one URL has
    the option, the destinations differ. Other texts have to be equal.
    """
    if one == other:
        return True
    here, there = _Place.of(one), _Place.of(other)
    if here is None or there is None or (here.scheme, here.path, here.name) != (there.scheme, there.path, there.name):
        return False
    return here.name is not None or bool(here.hosts & there.hosts)


@dataclass(frozen=True, slots=True)
class _Place:
    """A destination's URL as stored. `name`: the value of its option `as`, percent-encoded."""

    scheme: str
    hosts: frozenset[str]
    path: str
    name: str | None

    @classmethod
    def of(cls, text: str) -> _Place | None:
        """Return the parts of a URL with hosts, or None for any other text."""
        found = _URL.fullmatch(text)
        if found is None:
            return None
        return cls(found["scheme"], frozenset(filter(None, found["hosts"].split(","))), found["path"], found["name"])
