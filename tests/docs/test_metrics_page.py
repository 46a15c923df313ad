"""What the page about metrics says is so: it has every metric with its names, kind, labels and text."""

import re

from outbox.telemetry import metrics
from tests.support.pages import TOP

ALL = (*metrics.OF_EVENTS, *metrics.OF_STATE)
PAGE = (TOP / "docs" / "metrics.md").read_text()


def test_every_metric_is_there():
    rows = [line for line in PAGE.splitlines() if line.startswith(("| `messaging", "| `outbox", "| `rocketmq"))]

    assert rows == [
        f"| `{each.name}` | `{each.prometheus_name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)}"
        f" | {each.about} |"
        for each in ALL
    ]


def test_the_alerts_name_metrics_with_their_labels_and_compare_what_can_be_compared():
    """Two metrics of several processes have no labels in common: both sides need the same `sum by`."""
    rows = re.findall(r"^\| .* \| `(.*)` \| \d+[mh] \|$", (TOP / "docs" / "monitoring.md").read_text(), re.MULTILINE)
    labels = {each.prometheus_name: {*(name.replace(".", "_") for name in each.labels), "le"} for each in ALL}
    for row in rows:
        named = [name.removesuffix("_bucket") for name in re.findall(r"\b(?:outbox|messaging)_\w+", row)]
        grouped = [set(group.split(", ")) for group in re.findall(r" by \(([^)]*)\)", row)]

        assert named, row
        assert all(group <= labels[name] for group in grouped for name in named), row
        assert " * " not in row or "86400" in row or (len(named), len(grouped), grouped[0]) == (2, 2, grouped[1]), row

    assert len(rows) == 10
