"""What is shown of the measurements: a table, a picture, and a file for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks.machine import machine
from benchmarks.measure import Measurement

#: Of the picture, side by side.
_PANELS = 6
_COLUMNS = "{:<24}{:>8}  {:<8}{:<6}{:>12}{:>12}  {:<10}{}"


def table(measurements: Sequence[Measurement]) -> str:
    """One line a benchmark."""
    lines = [_COLUMNS.format("benchmark", "ratio", "goal", "met", "ours", "other", "unit", "rounds")]
    for each in measurements:
        met = "yes" if each.met else "NO"
        ours, other = _medians(each)
        rounds = " ".join(f"{ratio:.2f}" for ratio in each.rounds) + (f"   ({each.remark})" if each.remark else "")
        ratio, goal = f"{each.value:.2f}", str(each.goal)
        lines.append(_COLUMNS.format(each.name, ratio, goal, met, ours, other, each.unit, rounds))
    return "\n".join(lines)


def _medians(measurement: Measurement) -> tuple[str, str]:
    """Return the figures of both sides, ours first."""
    form = ",.2f" if measurement.unit in ("ms", "1/ms") else ",.0f"
    return format(median(measurement.ours), form), format(median(measurement.other), form)


def page(measurements: Sequence[Measurement], what: Mapping[str, str], on: str) -> str:
    """A page of Markdown for people. `what`: what is measured, by name; `on`: the machine."""
    lines = [
        "# Benchmarks",
        "",
        f"The figures of `make bench` on {datetime.now(UTC):%Y-%m-%d}, with:",
        "",
        *(f"- {each}" for each in on.split(", ")),
        "",
        "Each figure is a ratio of ours to the other side. Both are measured in turn within one run; the ratio is the",
        "median of its rounds. Each side's figure is a median, too, so that the quotient of two may differ from it.",
        "The goal says on which side of a bound the ratio should be.",
        "",
        "![All ratios, their rounds and their goals](img/benchmarks.png)",
        "",
        "| benchmark | ratio | goal | met | ours | the other | what is compared |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in measurements:
        ours, other = _medians(each)
        met = "yes" if each.met else "**no**"
        units = f"{ours} {each.unit} | {other} {each.unit}"
        goal = str(each.goal).replace("<=", "≤").replace(">=", "≥")
        lines.append(f"| `{each.name}` | {each.value:.2f} | {goal} | {met} | {units} | {what[each.name]} |")
    return "\n".join(lines) + "\n"


def results(measurements: Sequence[Measurement]) -> dict[str, dict[str, object]]:
    """The figures by name, for programs."""
    return {
        each.name: {
            "value": round(each.value, 4),
            "goal": str(each.goal),
            "met": each.met,
            "rounds": [round(ratio, 4) for ratio in each.rounds],
        }
        for each in measurements
    }


def save(measurements: Sequence[Measurement], folder: Path, what: Mapping[str, str]) -> None:
    """Write `results.json`, `results.png`, and `results.md`, a page for `docs/`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(page(measurements, what, machine()))
    (folder / "results.json").write_text(json.dumps(results(measurements), indent=2) + "\n")
    _picture(measurements, folder / "results.png")


def _picture(measurements: Sequence[Measurement], path: Path) -> None:
    """One panel a benchmark: its rounds, their median, and on which side of the goal they should be."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    height = -(-len(measurements) // _PANELS)
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
