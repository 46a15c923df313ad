"""SQLite's part of an extraction."""

from __future__ import annotations

from datetime import UTC, datetime

from outbox.store.dialects.speech import Speech
from outbox.store.dialects.sqlite.filtering import FILTERING


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def stored_moment(moment: datetime) -> str:
    """Return a moment as text, as SQLite writes moments: to the millisecond where that is exact.

    The texts `.123` and `.123000` would compare as two moments.
    """
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f").removesuffix("000")


SPEECH = Speech(
    show={
        "uuid": "substr({c}, 1, 8) || '-' || substr({c}, 9, 4) || '-' || substr({c}, 13, 4) || '-'"
        " || substr({c}, 17, 4) || '-' || substr({c}, 21)",
        # Microseconds since 1970; zeros are added to a moment that is stored to the millisecond.
        "timestamp": "CAST(strftime('%s', {c}) AS integer) * 1000000"
        " + CAST(substr(substr({c}, 21) || '000000', 1, 6) AS integer)",
    },
    replaced={"xact_id": "r.id", "highest_id": "CAST(NULL AS integer)"},
    text=_quoted,
    uuid=lambda value: f"'{value.hex}'",
    moment=lambda moment: f"'{stored_moment(moment)}'",
    filtering=FILTERING,
    number="r.id",
    late="",
    server="SELECT NULL AS system, NULL AS timeline",
    settings=(),
    patience=None,
    replayed="SELECT TRUE AS replayed",
)
