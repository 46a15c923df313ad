"""Documents of JSON: one line for programs, of frozen values by their fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

#: The version of the JSON that docs/json.md describes. A new field does not change the number; a field that goes, or
#: means something else, does.
JSON_VERSION = 1


def json_text(value: Mapping[str, object], *, more: bool = False) -> str:
    """Return one line of JSON, ASCII only: an object with its version, and `more`: whether there is more.

    Frozen values are printed by field.
    """
    document = {"version": JSON_VERSION, "more": more, **value}
    return json.dumps(document, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)
