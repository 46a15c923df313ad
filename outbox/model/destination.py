"""Destinations as subscriptions store them, and the comparison of two destinations."""

from __future__ import annotations

import re

_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<hosts>[^/?]*)(?P<path>[^?]*)"
    r"(\?(?P<options>(?!as=)[^?&=]+=[^?&=]+(&(?!as=)[^?&=]+=[^?&=]+)*))?([?&]as=(?P<name>[^/?&=]+))?",
    re.DOTALL,
)


def same_destination(one: str, other: str) -> bool:
    """Return whether two texts name the same destination.

    Two URLs are compared by scheme, path, options and hosts: one common host is enough, so that the hosts of a cluster
    can be exchanged one by one. Only options that decide where messages go are stored. If both URLs have the option
    `as`, its value counts in place of the hosts; if only one URL has the option, the destinations differ. Other texts
    have to be equal.
    """
    if one == other:
        return True
    here, there = _URL.fullmatch(one), _URL.fullmatch(other)
    parts = ("scheme", "path", "options", "name")
    if here is None or there is None or here.group(*parts) != there.group(*parts):
        return False
    hosts = set(here["hosts"].split(",")) & set(there["hosts"].split(","))
    return here["name"] is not None or bool(hosts - {""})
