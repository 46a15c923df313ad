"""The page about benchmarks has each of them once, from one run of one machine, and no figures beside that run."""

import re
from datetime import date
from pathlib import Path

from benchmarks import report
from benchmarks.__main__ import what_is_compared
from benchmarks.measure import Measurement, at_most
from tests.support.pages import TOP

_FIGURES = r"[\d.]+ \| [≤≥] [\d.]+ \| (?:yes|\*\*no\*\*) \| [\d,.]+ [\w/]+ \| [\d,.]+ [\w/]+"
_ROW = re.compile(rf"\| `(\w+)` \| (?:not measured(?: \|){{5}}|{_FIGURES} \|) (.+) \|")
#: A day, a ratio, or how much of something there is in a second.
_OF_A_RUN = re.compile(r"\d{4}-\d\d-\d\d|\d\.\d\d|\d (?:\w*row|msg|tx|settles)/s|^\|.*", re.MULTILINE)


def parts(page: str) -> tuple[str, str, str]:
    """What stands before the run, the run, and what stands behind it."""
    before, rest = page.split(report.BEGIN)
    run, after = rest.split(report.END)
    return before, run, after


def test_every_benchmark_is_on_the_page_once_with_its_figures_or_the_word_that_it_was_not_measured():
    _, run, _ = parts((TOP / "docs" / "benchmarks.md").read_text())

    rows = [each for each in run.splitlines() if each.startswith("| `")]

    assert [found and found.groups() for found in map(_ROW.fullmatch, rows)] == list(what_is_compared().items())


def test_the_page_is_of_one_run_on_one_machine():
    _, run, _ = parts((TOP / "docs" / "benchmarks.md").read_text())

    assert re.findall(r"^(One run of .*) on \d{4}-\d\d-\d\d, with:$", run, re.MULTILINE) == ["One run of `make bench`"]
    assert len(re.findall(r"^- \d+ cores of .*\n(?:- .*\n)+$", run, re.MULTILINE)) == 1
    assert re.findall(r"\(img/.*\)", run) == [f"({report.PICTURE})"]


def test_what_is_written_by_hand_has_no_figures_of_a_run():
    before, _, after = parts((TOP / "docs" / "benchmarks.md").read_text())

    assert _OF_A_RUN.findall(before + after) == []


def test_a_run_replaces_what_stands_between_its_two_marks(tmp_path: Path):
    page = tmp_path / "benchmarks.md"
    page.write_text(f"# Benchmarks\n\n{report.BEGIN}of yesterday\n{report.END}\nBy hand.\n")
    write = Measurement(name="write", goal=at_most(1.1), unit="µs", ours=[1200, 1100], other=[1000, 1000])
    run = report.Run(
        on=date(2026, 1, 31),
        machine=["2 cores of a kind", "Linux"],
        what={"write": "Microseconds.", "import": "Milliseconds."},
        measured={"write": write},
    )

    report.renew(page, run)

    assert page.read_text() == (
        "# Benchmarks\n\n"
        "<!-- a run begins -->\n\n"
        "One run of `make bench` on 2026-01-31, with:\n\n"
        "- 2 cores of a kind\n- Linux\n\n"
        "![All ratios, their rounds and their goals](img/benchmarks.png)\n\n"
        "| benchmark | ratio | goal | met | ours | the other | what is compared |\n"
        "|---|---|---|---|---|---|---|\n"
        "| `write` | 1.15 | ≤ 1.10 | **no** | 1,150 µs | 1,000 µs | Microseconds. |\n"
        "| `import` | not measured | | | | | Milliseconds. |\n\n"
        "<!-- a run ends -->\n\nBy hand.\n"
    )
