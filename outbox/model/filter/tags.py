"""Tag expressions: `TagA || TagB`, as RocketMQ's consumers subscribe to tags."""

from __future__ import annotations

from collections.abc import Sequence

from outbox.errors import FilterError, InvalidMessageError
from outbox.model.limits import checked_tags

_EVERY, _OR = "*", "||"


def chosen_tags(expression: str | None) -> tuple[str, ...] | None:
    """Return the tags of an expression, sorted; None: messages with any tags, and those without.

    None, an empty text and `*` mean all messages. Elsewhere `*` is a tag like any other.

    Raises:
        FilterError: the expression names no tag, or what no message can have as its tags.
    """
    if expression is None or expression in ("", _EVERY):
        return None
    if not isinstance(expression, str):
        raise FilterError(f"tags: must be a text such as 'TagA || TagB', not {type(expression).__name__}")
    found = {part.strip() for part in expression.split(_OR)} - {""}
    if not found:
        # RocketMQ refuses only separators without blanks between; with blanks its subscription would get nothing.
        raise FilterError(f"tags: subString split error; {expression!r:.80} names no tag, write 'TagA || TagB'")
    try:
        return tuple(sorted({checked_tags(tag) for tag in found}))
    except InvalidMessageError as error:
        raise FilterError(f"tags: each {error.limit}; write 'TagA || TagB'") from None


def tag_expression(tags: Sequence[str] | None) -> str:
    """Return the expression of chosen tags; the opposite of `chosen_tags`."""
    return _EVERY if tags is None else f" {_OR} ".join(tags)
