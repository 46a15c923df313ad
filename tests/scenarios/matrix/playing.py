"""One case of the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outbox import Outbox
from tests.scenarios.matrix.held import play
from tests.scenarios.matrix.homes import Home, Kind
from tests.scenarios.matrix.table import Scenario


def left_by(scenario: Scenario, kind: Kind, home: Home, make_outbox: Callable[[Any], Outbox]) -> dict[str, list[str]]:
    """What both tables hold after a scenario was played."""
    home.empty()

    async def played(_: object) -> None:
        async with kind.open(home, scenario.setting, make_outbox) as held:
            await scenario.play(held)

    play(played, None, awaited=kind.awaited)
    return home.rows()
