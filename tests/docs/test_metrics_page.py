"""What the page about metrics says is so: it has every metric with its names, kind, labels and text."""

from outbox.telemetry import metrics
from tests.support.pages import TOP

PAGE = (TOP / "docs" / "metrics.md").read_text()


def test_every_metric_is_there():
    rows = [line for line in PAGE.splitlines() if line.startswith(("| `messaging", "| `outbox", "| `rocketmq"))]

    assert rows == [
        f"| `{each.name}` | `{each.prometheus_name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)}"
        f" | {each.about} |"
        for each in (*metrics.OF_EVENTS, *metrics.OF_STATE)
    ]
