"""A storm is judged by what its failed tests do alone."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import crowd
from tests.support.crowd import in_the_crowd

#: Fails at its first run, as a test does in a crowd.
_ONCE = """
from pathlib import Path

def test_{name}():
    ran = Path("ran_{name}")
    first = not ran.exists()
    ran.touch()
    assert not first
"""


def answers(*passed: bool) -> Iterator[bool]:
    yield from passed


@pytest.mark.parametrize(("alone", "broken"), [
    ([True, True, True], []),
    ([False], ["a"]),
    ([True, True, False], ["a"]),
])  # fmt: skip
def test_a_test_that_fails_once_alone_is_broken(alone, broken):
    runs = answers(*alone)

    found = in_the_crowd(["a"], lambda test: next(runs))

    assert (found, list(runs)) == ((broken, [] if broken else ["a"]), [])


def judged(folder, monkeypatch, tests: str) -> int:
    """Return the exit code after a storm of these tests, in a folder of their own."""
    (folder / "test_it.py").write_text(tests)
    (folder / "conftest.py").write_text(
        "import pathlib\nfrom tests.support.crowd import Failures\n"
        "def pytest_addoption(parser):\n    parser.addoption('--tier')\n    parser.addoption('--failures')\n"
        "def pytest_configure(config):\n    if config.getoption('--failures'):\n"
        "        config.pluginmanager.register(Failures(pathlib.Path(config.getoption('--failures'))))\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(crowd.__file__).removesuffix("/tests/support/crowd.py"))
    return subprocess.run([sys.executable, "-m", "tests.support.crowd", "test_it.py"], check=False).returncode


@pytest.mark.storm
@pytest.mark.parametrize(("tests", "code"), [
    ("".join(_ONCE.format(name=name) for name in "abc"), 0),
    ("".join(_ONCE.format(name=name) for name in "abcd"), 1),
    ("def test_it():\n    assert 0", 1),
    ("import what_is_not_there", 2),
    ("", 5),
])  # fmt: skip
def test_three_tests_may_fail_in_the_crowd_and_none_alone(tmp_path, monkeypatch, tests, code):
    assert judged(tmp_path, monkeypatch, tests) == code


@pytest.mark.storm
def test_a_failure_is_kept_with_its_load_and_its_text(tmp_path, monkeypatch):
    judged(tmp_path, monkeypatch, _ONCE.format(name="a"))

    ((test, found),) = json.loads((tmp_path / crowd.FOUND).read_text()).items()

    assert (test, sorted(found), "assert not" in found["text"]) == ("test_it.py::test_a", ["load", "text"], True)
