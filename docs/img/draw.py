"""Draws the pictures of the reports in docs/: the reports' own drawing, of made-up figures, the same at each run.

python docs/img/draw.py
"""

import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from outbox.spark.reports import plots

FOLDER = Path(__file__).parent
MIDNIGHT = datetime(2026, 3, 2, tzinfo=UTC)
HOUR = timedelta(hours=1)

Row = Mapping[str, Any]


def draw(folder: Path) -> None:
    """Write all of them."""
    dice = random.Random(7)
    _delivery(folder, dice)
    _transactions(folder)
    _order(folder, dice)
    _archive(folder, dice)


def _delivery(folder: Path, dice: random.Random) -> None:
    sizes = {"orders": 5200, "payments": 3100, "mail": 1900, "stock": 800, "invoices": 420, "audit": 90, "search": 60}
    per_hour = [
        {
            "topic": topic,
            "hour": MIDNIGHT + hour * HOUR,
            "messages": round(size * _busy(hour) * dice.uniform(0.85, 1.15)),
        }
        for hour in range(24)
        for topic, size in sizes.items()
    ]
    parked = [
        _aside("relay", "retry", "< 1 min", 12), _aside("relay", "retry", "< 1 h", 31),
        _aside("relay", "behind", "< 1 h", 84), _aside("relay", "dead", "< 1 d", 7),
        _aside("relay", "dead", "< 7 d", 22), _aside("billing", "delayed", "< 1 h", 140),
        _aside("billing", "delayed", "< 1 d", 61), _aside("billing", "dead", "7 d and more", 3),
    ]  # fmt: skip
    backlog = {"relay": 213, "billing": 1840, "check:shop": 4}
    plots.delivery(folder / "delivery.png", per_hour=per_hour, parked=parked, backlog=backlog)


def _transactions(folder: Path) -> None:
    names = ("producer_group", "topic", "committed", "rolled_back", "open", "parked", "contradictions")
    rows = [
        ("shop", "orders", 48_211, 2_907, 64, 3, 0), ("shop", "payments", 21_380, 4_112, 31, 12, 2),
        ("depot", "stock", 9_805, 611, 8, 0, 0), ("billing", "invoices", 6_120, 84, 2, 1, 0),
    ]  # fmt: skip
    plots.transactions(folder / "transactions.png", [dict(zip(names, row, strict=True)) for row in rows])


def _order(folder: Path, dice: random.Random) -> None:
    keys = [f"order-{number}" for number in dice.sample(range(1000, 9999), 9)]
    breaks = []
    for _ in range(46):
        key = dice.choice(keys[: 1 + dice.randrange(len(keys))])
        previous = dice.randint(5, 30)
        problem = "repeated" if dice.random() < 0.4 else "fell"
        version = previous if problem == "repeated" else previous - dice.choice((1, 1, 1, 2, 3))
        at = MIDNIGHT + timedelta(minutes=dice.gauss(870, 90))
        breaks.append({"key": key, "version": version, "previous": previous, "problem": problem, "created_at": at})
    counts = {name: sum(each["problem"] == name for each in breaks) for name in ("fell", "repeated")}
    broken = len({each["key"] for each in breaks})
    summary = [{"messages": 212_480, "keys": 18_033, "broken_keys": broken, **counts}]
    plots.order(folder / "order.png", summary=summary, breaks=breaks)


def _archive(folder: Path, dice: random.Random) -> None:
    ranges = []
    for at in range(12):
        rows = dice.randint(97_000, 100_000) if at else 41_250
        archived = rows - 1_204 if at == 8 else rows
        ranges.append(
            {
                "first_id": at * 100_000,
                "last_id": at * 100_000 + 99_999,
                "rows": rows,
                "archived": archived,
                "same": at != 8,
            }
        )
    plots.archive(folder / "archive.png", ranges)


def _busy(hour: int) -> float:
    """How much there is to do: little at night, most around noon."""
    return 0.08 + float(max(0.0, 1 - abs(hour - 13) / 9) ** 0.8)


def _aside(subscription: str, state: str, age: str, messages: int) -> Row:
    return {"subscription": subscription, "state": state, "age": age, "messages": messages}


if __name__ == "__main__":
    draw(FOLDER)
