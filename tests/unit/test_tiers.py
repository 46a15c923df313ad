"""The quick tier is quick and knows no clock: what its tests may not do, and how long each may take."""

import ast
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.pages import TOP

TESTS = TOP / "tests"
#: What `make test` wrote about its last run.
LAST_RUN = TOP / "build" / "quick.xml"
#: Seconds that the call of a test may take, unless it says by `smoke` why it takes more.
LONGEST = 2.0
#: Calls of `sleep` in what the quick tier runs, and deadlines and leases below a second. Both may become fewer.
SLEEPS = 101
SHORT_DEADLINES = 6
#: Arguments that end or lose something when their time is over.
_DEADLINES = {"deadline", "timeout", "lease", "check_timeout", "drain", "settle_within"}
_ELSEWHERE = re.compile(r"\bmark\.(?:storm|timed|jvm|large|full)\b")


def quick_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything in a file that the quick tier may run: all but what a marker leaves to another tier."""
    for each in ast.iter_child_nodes(tree):
        if isinstance(each, ast.Assign) and "pytestmark" in ast.unparse(each.targets[0]):
            if _ELSEWHERE.search(ast.unparse(each.value)):
                return
        elif not any(_ELSEWHERE.search(ast.unparse(mark)) for mark in getattr(each, "decorator_list", ())):
            yield each
            yield from quick_nodes(each)


def is_sleep(node: ast.AST) -> bool:
    """Whether something sleeps for a time."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("sleep"):
        return False
    return [ast.unparse(each) for each in node.args] != ["0"]


def is_short_deadline(node: ast.AST) -> bool:
    """Whether an argument is a literal deadline or lease below a second."""
    if not isinstance(node, ast.keyword) or node.arg not in _DEADLINES:
        return False
    match node.value:
        case ast.Constant(value=int() | float() as seconds):
            return 0 < seconds < 1
        case ast.Call(func=ast.Name(id="timedelta"), keywords=units) if all(
            isinstance(each.value, ast.Constant) for each in units
        ):
            length = timedelta(**{str(each.arg): ast.literal_eval(each.value) for each in units})
            return timedelta() < length < timedelta(seconds=1)
        case _:
            return False


@pytest.fixture(scope="module")
def nodes() -> list[tuple[Path, ast.AST]]:
    """Everything that the quick tier may run, with its file."""
    files = sorted(TESTS.rglob("*.py"))
    return [(path.relative_to(TOP), node) for path in files for node in quick_nodes(ast.parse(path.read_text()))]


def places(nodes: list[tuple[Path, ast.AST]], what: Callable[[ast.AST], bool]) -> list[str]:
    """Return the places for which `what` holds."""
    return [f"{path}:{getattr(node, 'lineno', 0)}" for path, node in nodes if what(node)]


def test_no_more_places_sleep_than_did(nodes):
    assert len(places(nodes, is_sleep)) <= SLEEPS


def test_no_more_deadlines_are_below_a_second_than_were(nodes):
    assert len(places(nodes, is_short_deadline)) <= SHORT_DEADLINES


@pytest.mark.parametrize(("source", "found"), [
    ("time.sleep(0.1)", [is_sleep]),
    ("await asyncio.sleep(1)", [is_sleep]),
    ("await asyncio.sleep(0)", []),
    ("f(deadline=timedelta(seconds=0.5))", [is_short_deadline]),
    ("f(lease=timedelta(milliseconds=900))", [is_short_deadline]),
    ("f(timeout=0.5, lease=timedelta(seconds=2), pause=0.1)", [is_short_deadline]),
    ("@pytest.mark.storm\ndef test_a():\n    sleep(1)", []),
    ("pytestmark = pytest.mark.jvm\ndef test_a():\n    sleep(1)", []),
    ("pytestmark = pytest.mark.filterwarnings('x')\ndef test_a():\n    sleep(1)", [is_sleep]),
])  # fmt: skip
def test_such_places_would_be_seen(source, found):
    written = list(quick_nodes(ast.parse(source)))

    assert [what for what in (is_sleep, is_short_deadline) for node in written if what(node)] == found


def calls_of(report: Path) -> dict[str, float]:
    """Return the seconds of each test in a report of a run, but of those that say why they take long."""
    return {
        node_id(case): float(case.get("time", "0"))
        for case in ET.parse(report).iter("testcase")
        if not any(each.get("name") == "smoke" for each in case.iter("property"))
    }


def node_id(case: ET.Element) -> str:
    """Return how to call a test of a report again."""
    parts = case.get("classname", "").split(".")
    file = next(n for n in range(len(parts), 0, -1) if (TOP / "/".join(parts[:n])).with_suffix(".py").is_file())
    return "::".join(["/".join(parts[:file]) + ".py", *parts[file:], case.get("name", "")])


@pytest.mark.timed("the tests that were slow in the last run run again, alone")
@pytest.mark.timeout(1800)
def test_no_test_of_the_quick_tier_takes_two_seconds_alone(tmp_path):
    if not LAST_RUN.exists() and not os.environ.get("CI"):
        pytest.skip("make test writes how long its tests took, and has not run yet")
    slow = {test: seconds for test, seconds in calls_of(LAST_RUN).items() if seconds > LONGEST}
    report = tmp_path / "alone.xml"

    # Three times, because another program may have the machine in one of them.
    for _ in range(3):
        if slow:
            options = ["--junitxml", str(report), "-o", "junit_duration_report=call"]
            subprocess.run([sys.executable, "-m", "pytest", "-q", *options, *slow], cwd=TOP, check=True)
            slow = {test: seconds for test, seconds in calls_of(report).items() if seconds > LONGEST}

    assert slow == {}
