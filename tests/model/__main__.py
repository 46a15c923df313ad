"""Visit all worlds, refute all twins, and print what came of it: `python -m tests.model [--full]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.model.explorer import Explored, World, explore
from tests.model.worlds import SCENES, TWINS

_WIDE = max(map(len, [each.name for each in SCENES] + [each.name for each in TWINS]))


def main() -> int:
    """Print a table of worlds and one of twins; return 1 if a world is wrong, or a twin is not refuted."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--full", action="store_true", help="visit the large worlds, too: many minutes")
    parser.add_argument("--traces", action="store_true", help="print the way to the fault of each twin")
    options = parser.parse_args()
    print(f"{'world':<{_WIDE}}  {'states':>9}  {'steps':>9}  seconds")
    wrong, states, seconds = 0, 0, 0.0
    for scene in SCENES:
        if scene.full and not options.full:
            continue
        explored, took = _timed(scene.world, scene.most)
        states, seconds = states + explored.states, seconds + took
        print(f"{scene.name:<{_WIDE}}  {explored.states:>9,}  {explored.steps:>9,}  {took:7.1f}", flush=True)
        if explored.wrong is not None:
            wrong += 1
            print(explored)
    print(f"{'all':<{_WIDE}}  {states:>9,}  {'':>9}  {seconds:7.1f}\n")
    print(f"{'twin':<{_WIDE}}  {'steps':>9}  refuted by")
    for twin in TWINS:
        explored, _ = _timed(twin.world, 10_000_000)
        print(
            f"{twin.name:<{_WIDE}}  {len(explored.trace):>9}  {explored.wrong or 'nothing: it is not refuted'}",
            flush=True,
        )
        wrong += explored.wrong is None
        if options.traces:
            print("\n".join(f"    {step}" for step in explored.trace))
    return int(wrong > 0)


def _timed(world: Callable[[], World[Any]], most: int) -> tuple[Explored, float]:
    began = time.process_time()
    return explore(world(), most=most), time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
