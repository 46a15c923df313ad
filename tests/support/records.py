"""A file of records that several processes append to, one write a record, so that a kill cuts at most the last one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class RecordFile:
    """Appends records, which are lists of what JSON has, and reads them back in the order of their writes."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o644)

    def append(self, record: Sequence[object]) -> None:
        """Add a record. The newline comes first: what a killed process left unfinished stays on its own line."""
        os.write(self._descriptor, b"\n" + json.dumps(record).encode())

    def read(self) -> list[list[Any]]:
        """Everything so far. A record that was cut is not there: nobody was told that it is."""
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        return [record for line in data.split(b"\n") if (record := _parsed(line)) is not None]

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)


def _parsed(line: bytes) -> list[Any] | None:
    try:
        record: list[Any] = json.loads(line)
    except ValueError:
        return None
    return record
