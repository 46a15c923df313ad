"""What a call says when it refuses: one text for the kind of its error and for its words."""

from collections.abc import Callable
from typing import Any


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str | None:
    """Return the error that the call raises, as `ValueError: text`; None if the call was taken."""
    try:
        call(*arguments, **options)
    except Exception as error:  # any kind of error is an answer, and is compared
        return f"{type(error).__name__}: {error}"
    return None


def answer(call: Callable[..., object], *arguments: Any, **options: Any) -> object:
    """Return what the call returns, or the error that it raises, as text: one of many that raises hides no other."""
    found: list[object] = []
    return refusal(lambda: found.append(call(*arguments, **options))) or found[0]
