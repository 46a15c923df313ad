"""What is shown of a run: a line for each row, a page, a picture, and a file for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks.measure import Measurement

#: What stands between these two on a page is written by a run, all else by hand.
BEGIN, END = "<!-- a run begins -->\n", "<!-- a run ends -->\n"
PICTURE = "img/benchmarks.png"

#: Of the picture, side by side.
_PANELS = 6
_COLUMNS = "{:<24}{:>8}  {:<8}{:<6}{:>12}{:>12}  {:<10}{}"
HEADINGS = _COLUMNS.format("benchmark", "ratio", "goal", "met", "ours", "other", "unit", "rounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that one machine measures on one day, and what each benchmark compares, by name."""

    on: date
    machine: Sequence[str]
    what: Mapping[str, str]
    measured: dict[str, Measurement] = field(default_factory=dict)


def line(measurement: Measurement) -> str:
    """One line for a terminal."""
    met = "yes" if measurement.met else "NO"
    ours, other = _medians(measurement)
    rounds = " ".join(f"{ratio:.2f}" for ratio in measurement.rounds)
    remark = f"   ({measurement.remark})" if measurement.remark else ""
    figures = f"{measurement.value:.2f}", str(measurement.goal), met, ours, other, measurement.unit
    return _COLUMNS.format(measurement.name, *figures, rounds + remark)


def _medians(measurement: Measurement) -> tuple[str, str]:
    """Return the figures of both sides, ours first."""
    form = ",.2f" if measurement.unit in ("ms", "s", "1/ms") else ",.0f"
    return format(median(measurement.ours), form), format(median(measurement.other), form)


def section(run: Run) -> str:
    """Return what a page shows of a run: when and where, a picture, and a row for each benchmark there is."""
    lines = [
        f"One run of `make bench` on {run.on}, with:",
        "",
        *(f"- {each}" for each in run.machine),
        "",
        f"![All ratios, their rounds and their goals]({PICTURE})",
        "",
        "| benchmark | ratio | goal | met | ours | the other | what is compared |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, run.measured.get(name), what) for name, what in run.what.items()),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, measurement: Measurement | None, what: str) -> str:
    if measurement is None:
        return f"| `{name}` | not measured | | | | | {what} |"
    ours, other = (f"{figure} {measurement.unit}" for figure in _medians(measurement))
    met = "yes" if measurement.met else "**no**"
    goal = str(measurement.goal).replace("<=", "≤").replace(">=", "≥")
    return f"| `{name}` | {measurement.value:.2f} | {goal} | {met} | {ours} | {other} | {what} |"


def results(run: Run) -> dict[str, dict[str, object]]:
    """The figures by name, for programs."""
    return {
        name: {
            "value": round(each.value, 4),
            "goal": str(each.goal),
            "met": each.met,
            "rounds": [round(ratio, 4) for ratio in each.rounds],
        }
        for name, each in run.measured.items()
    }


def save(run: Run, folder: Path) -> None:
    """Write `results.json`, and `results.md` with the section of a page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(section(run))
    (folder / "results.json").write_text(json.dumps(results(run), indent=2) + "\n")


def renew(page: Path, run: Run) -> None:
    """Replace the section of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no lines {BEGIN.strip()} and {END.strip()}")
    page.write_text(f"{before}{BEGIN}\n{section(run)}\n{end}{after}")


def draw(run: Run, path: Path) -> None:
    """One panel a row: its rounds, their median, and on which side of the goal they should be."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    measurements = list(run.measured.values())
    height = max(1, -(-len(measurements) // _PANELS))
    size = (2.2 * _PANELS, 2.3 * height)
    figure, grid = plt.subplots(height, _PANELS, figsize=size, squeeze=False, layout="constrained")
    for panel in grid.flat[len(measurements) :]:
        panel.set_axis_off()
    for panel, each in zip(grid.flat, measurements, strict=False):
        colour = "tab:green" if each.met else "tab:red"
        top = 1.25 * max(*each.rounds, each.goal.bound)
        good = (0, each.goal.bound) if each.goal.at_most else (each.goal.bound, top)
        panel.axhspan(*good, color="tab:green", alpha=0.1)
        panel.axhline(each.goal.bound, color="grey", linestyle="--", linewidth=1)
        panel.bar([0], [each.value], width=0.5, color=colour, alpha=0.6)
        panel.plot([0.4] * len(each.rounds), each.rounds, "o", color="black", markersize=3)
        panel.set(xlim=(-0.7, 0.9), ylim=(0, top), xticks=[])
        panel.set_title(f"{each.name}\n{each.value:.2f}, goal {each.goal}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
