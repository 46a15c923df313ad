"""What it takes to import this library, against the two that it stands on."""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from benchmarks.measure import Measurement, Turns, at_most
from benchmarks.site import Site

#: With what is loaded only when it is asked for: all that a writer of messages needs.
_OURS = "from outbox import Message, Outbox, create_engine"
_OTHER = "import sqlalchemy.orm, psycopg"
_TIMED = "import time; started = time.perf_counter(); {}; print((time.perf_counter() - started) * 1e3)"


def importing(site: Site) -> list[Measurement]:
    """Milliseconds to import what a writer needs, against SQLAlchemy and psycopg; without the interpreter's start."""
    for statement in (_OURS, _OTHER):
        _milliseconds(statement)
    turns = Turns("import")
    for _ in range(site.scale.rounds):
        pairs = [(_milliseconds(_OURS), _milliseconds(_OTHER)) for _ in range(site.scale.imports)]
        turns.add(median(ours for ours, _ in pairs), median(other for _, other in pairs))
    return [Measurement(name="import", goal=at_most(1.3), unit="ms", ours=turns.ours, other=turns.other)]


def _milliseconds(statement: str) -> float:
    command = [sys.executable, "-c", _TIMED.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
