"""The claim of dedup keys in one statement, for databases with RETURNING."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from uuid import UUID

from outbox.store.dialects.dialect import Claim
from outbox.store.dialects.statements import Parameters, Script, Statement

#: Waits for a transaction that has claimed the same key and is still open; the key is free only if that one rolls back.
#: The keys are inserted in their order, so that two writers cannot wait for each other.
_CLAIM = """
    INSERT INTO {dedup} AS known (dedup_key, message_id, expires_at)
    SELECT name, id, {later} FROM {pairs} WHERE true ORDER BY name
    ON CONFLICT (dedup_key) DO UPDATE SET message_id = excluded.message_id, expires_at = excluded.expires_at
    WHERE known.expires_at <= {now}
    RETURNING dedup_key
"""


def claiming(pairs: str, bind: Callable[[Sequence[tuple[str, UUID]]], Parameters]) -> Claim:
    """Return the claim of keys. `pairs`: a table with the columns `name` and `id`, of the parameters of `bind`."""

    @lru_cache
    def statement(dedup: str, now: str, later: str) -> str:
        return _CLAIM.format(dedup=dedup, now=now, later=later, pairs=pairs)

    def claim(names: Mapping[str, str], keys: Sequence[tuple[str, UUID]], seconds: float) -> Script[set[str]]:
        sql = statement(names["dedup"], names["now"], names["later"])
        return {key for (key,) in (yield Statement(sql, {**bind(keys), "seconds": seconds}, returns=True))}

    return claim
