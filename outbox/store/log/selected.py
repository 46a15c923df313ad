"""A selection as a condition on rows of the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outbox.model.limits import HALF_TOPIC
from outbox.model.subscription import Selection
from outbox.model.topics import Topics
from outbox.store.dialects.dialect import OF_SLOTS, Values
from outbox.store.log.filtering import Condition, condition_of


def selected(values: Values, selection: Selection, slots: Mapping[str, int] | None = None) -> Condition:
    """Return the condition of a selection, of nothing but what the selection asks for: each part costs time per row.

    `slots`: as of `slots_of`; None: all slots.
    """
    topics, parts = Topics.of(selection.topics), list[str]()
    parameters: dict[str, Any] = {"hidden": HALF_TOPIC, "skips": selection.skips, "only": selection.only}
    if not topics.halves:
        parts.append("topic <> :hidden")
    if not topics.everything:
        parts.append(f"({values.of_topics})")
        parameters.update(values.bind_topics(topics))
    if selection.tags is not None:
        parts.append(values.among_texts.format(value="tags", list=":tags"))
        parameters["tags"] = values.bind_list(selection.tags)
    if selection.skips is not None:
        parts.append("(direct IS NULL OR direct <> :skips)")
    if selection.only is not None:
        parts.append("direct = :only")
    if slots:
        parts.append(OF_SLOTS)
        parameters.update(slots)
    if selection.filter is not None:
        filtered = condition_of(selection.filter, values.filtering)
        parts.append(filtered.sql)
        parameters.update(filtered.parameters)
    return Condition(" AND ".join(parts) or "TRUE", parameters)
