"""A writer that goes on where its file ends, until SIGTERM. Arguments: the database, the file, its name.

The file has a line for each committed message: its key and number.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

from outbox import Outbox, create_engine

KEYS = 5
PAUSE_SECONDS = 0.02


def written(path: Path) -> list[tuple[str, int]]:
    """What was committed."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(key, int(number)) for key, number in map(str.split, lines)]


if __name__ == "__main__":
    url, file, name = sys.argv[1:]
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    outbox, path = Outbox(create_engine(url)), Path(file)
    numbers = Counter(key for key, _ in written(path))
    with path.open("a", buffering=1) as committed:
        while not stopping.is_set():
            chosen = [f"{name}-{key}" for key in random.choices(range(KEYS), k=random.randint(1, 4))]
            lines = []
            with outbox.begin() as session:
                for key in chosen:
                    outbox.send(session, "orders", str(numbers[key]), key=key)
                    lines.append(f"{key} {numbers[key]}\n")
                    numbers[key] += 1
            committed.writelines(lines)
            stopping.wait(PAUSE_SECONDS)
