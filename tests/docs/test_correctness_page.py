"""What the page about correctness says is there: its worlds, its twins, its suites, and its figures as lower bounds."""

import ast
import re
from pathlib import Path

import pytest

from tests.model.worlds import SCENES, TWINS
from tests.support.pages import TOP

PAGE = (TOP / "docs" / "correctness.md").read_text()
_NUMBER = r"(\d{1,3}(?: \d{3})*)"
_FIGURE = re.compile(rf"at least {_NUMBER}\b( states)?")
_SUITE = re.compile(r"`(tests/[\w/]+\.py)`")
#: The sections with promises begin with a sentence or a list, and have a line for each kind of evidence.
_KINDS = ("Worlds", "Twins", "Suites", "Figure")

SMALL = [scene for scene in SCENES if not scene.full]
NAMES = {scene.name for scene in SMALL}


def sections() -> dict[str, dict[str, str]]:
    """Return, for each promise, what the page says of each kind of evidence."""
    found: dict[str, dict[str, str]] = {}
    for section in PAGE.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        items = {
            kind: " ".join(match[1].split())
            for kind in _KINDS
            if (match := re.search(rf"^- {kind}: (.*?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL))
        }
        if items:
            found[title] = items
    return found


def named(kind: str) -> set[str]:
    """Return all that the page names of a kind."""
    text = " ".join(each[kind] for each in sections().values())
    return {name for name in in_code_style(text) if "/" not in name}


def in_code_style(text: str) -> set[str]:
    """Return what stands in code style in a text."""
    return set(re.findall(r"`([^`]+)`", text))


def number_of(text: str) -> int:
    """Return a number that has its thousands apart."""
    return int(text.replace(" ", ""))


def numbers_in(path: Path) -> set[int]:
    """Return the numbers that a suite has in its code."""
    tree = ast.parse(path.read_text())
    return {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and type(each.value) is int}


def test_every_promise_has_every_kind_of_evidence() -> None:
    assert {title: tuple(each) for title, each in sections().items()} == dict.fromkeys(sections(), _KINDS)
    assert len(sections()) >= 10


def test_the_page_names_every_world_and_every_twin_and_no_other() -> None:
    assert named("Worlds") == {scene.name for scene in SCENES}
    assert named("Twins") == {twin.name for twin in TWINS}


def test_every_suite_is_there() -> None:
    assert {path for path in _SUITE.findall(PAGE) if not (TOP / path).is_file()} == set()
    assert len(set(_SUITE.findall(PAGE))) >= 30


@pytest.mark.parametrize("title", sections())
def test_a_figure_is_a_lower_bound_that_its_suite_has(title: str) -> None:
    """Of worlds it is a number of states, which the tests of the model assert; else a suite has the number in it."""
    section = sections()[title]
    suites = [numbers_in(TOP / path) for path in _SUITE.findall(section["Suites"])]

    figures = [(number_of(figure), bool(states)) for figure, states in _FIGURE.findall(section["Figure"])]

    assert figures
    for figure, of_states in figures:
        if of_states:
            worlds = in_code_style(section["Figure"]) & NAMES or in_code_style(section["Worlds"]) & NAMES
            assert sum(scene.states for scene in SMALL if scene.name in worlds) >= figure
        else:
            assert any(figure in suite for suite in suites), f"no suite of this promise has the figure {figure}"


def test_the_states_of_a_run_are_lower_bounds() -> None:
    small = re.search(rf"`make model` visits at least {_NUMBER} states", PAGE)
    whole = re.search(rf"larger worlds, too: at least {_NUMBER} states", PAGE)

    assert small is not None
    assert whole is not None
    assert number_of(small[1]) <= sum(scene.states for scene in SMALL)
    assert number_of(whole[1]) <= sum(scene.states for scene in SCENES)
