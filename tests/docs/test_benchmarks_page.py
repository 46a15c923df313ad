"""The page about benchmarks has each of them, with what it compares, and no other."""

import re

from benchmarks.__main__ import what_is_compared
from tests.support.pages import TOP


def test_every_benchmark_is_on_the_page():
    page = (TOP / "docs" / "benchmarks.md").read_text()

    rows = re.findall(r"^\| `(\w+)` \|.*\| ([A-Z][^|]*) \|$", page, re.MULTILINE)

    assert dict(rows) == what_is_compared()
