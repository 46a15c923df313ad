"""Runs a storm, then each test that failed in it three times alone: `python -m tests.support.crowd [pytest options]`.

`--tier all` runs everything in that way.

A test that fails alone as well is broken. A test that passes alone failed in the crowd: the fault is listed with the
load and the text of the failure, and more than three such tests are a failure of the run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TIMES = 3
MOST_IN_THE_CROWD = 3
FOUND = Path("build/failures.json")
#: pytest ran tests to the end, and some failed. Anything else above 0 is a run that says nothing.
SOME_FAILED = 1


class Failures:
    """Writes a file of what failed, test by test, with the load of the machine at that moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed:
            self._found[report.nodeid] = {"load": os.getloadavg()[0], "text": report.longreprtext}

    def pytest_sessionfinish(self) -> None:
        """Write the file, which is an empty object where nothing failed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1))


def in_the_crowd(failed: list[str], run_alone: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Return which of the failed tests fail alone as well, and which pass alone three times."""
    broken = [test for test in failed if not all(run_alone(test) for _ in range(TIMES))]
    return broken, [test for test in failed if test not in broken]


def run_alone(test: str) -> bool:
    """Return whether a test passes with the machine for itself."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", test], check=False).returncode == 0


def main(options: list[str]) -> int:
    """Run the storm and judge it; return the exit code."""
    FOUND.unlink(missing_ok=True)
    storm = [sys.executable, "-m", "pytest", "--tier", "storm", f"--failures={FOUND}", *options]
    code = subprocess.run(storm, check=False).returncode
    if code not in (0, SOME_FAILED):
        return code
    failures = json.loads(FOUND.read_text())
    broken, crowded = in_the_crowd([*failures], run_alone)
    for test in crowded:
        print(f"failed in the crowd, at a load of {failures[test]['load']:.1f}: {test}\n{failures[test]['text']}\n")
    for test in broken:
        print(f"failed alone as well: {test}")
    print(f"{len(broken)} failed alone as well, {len(crowded)} in the crowd only, of which {MOST_IN_THE_CROWD} may")
    return int(bool(broken) or len(crowded) > MOST_IN_THE_CROWD)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
