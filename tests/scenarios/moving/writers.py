"""Writers of keyed messages."""

from __future__ import annotations

import random
import threading
import time
from typing import Self

from sqlalchemy import Engine

from outbox import Outbox


def many(engine: Engine, *, full: bool) -> int:
    """Return how many messages a phase waits for: at full scale as many as these writers write in a minute or two."""
    if not full:
        return 200
    return 10_000 if engine.dialect.name == "postgresql" else 3_000


class Writers:
    """Threads that commit numbered messages of keys, each of its own ones, until they are stopped."""

    def __init__(self, engine: Engine, count: int, *, keys: int, pause: float) -> None:
        self._outbox = Outbox(engine)
        self._stopping = threading.Event()
        self._keys, self._pause = keys, pause
        self._written: list[list[tuple[str, int]]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._write, args=(number,)) for number in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> list[tuple[str, int]]:
        """End them, and return what was committed."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        return [each for written in self._written for each in written]

    def _write(self, writer: int) -> None:
        numbers = dict.fromkeys((f"w{writer}-{key}" for key in range(self._keys)), 0)
        while not self._stopping.is_set():
            chosen = random.choices(sorted(numbers), k=random.randint(1, 4))
            committed: list[tuple[str, int]] = []
            with self._outbox.begin() as session:
                for key in chosen:
                    self._outbox.send(session, "orders", str(numbers[key]), key=key)
                    committed.append((key, numbers[key]))
                    numbers[key] += 1
            self._written[writer] += committed
            time.sleep(self._pause)
