"""The condition of a filter as SQL, for the same messages as `Filter.matches`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from outbox.model.filter.expression import (
    Among,
    Equal,
    Expression,
    Holds,
    IsNull,
    Literal,
    Logic,
    Not,
    Order,
    Property,
    Truth,
)
from outbox.model.filter.sql92 import KEYS, SYSTEM_PROPERTIES, Filter
from outbox.store.dialects.filtering import Filtering

#: Conditions on the text `{value}`, which holds the text `{text}` there. LIKE would take marks of its own for patterns.
_SEARCHES = {
    "CONTAINS": "replace({value}, {text}, '') <> {value}",
    "STARTSWITH": "substr({value}, 1, length({text})) = {text}",
    "ENDSWITH": "substr({value}, length({value}) - length({text}) + 1) = {text}",
}


#: Looking for more texts costs as much as reading the property.
_MOST_NEEDED = 4


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a row of the log, and its parameters."""

    sql: str
    parameters: Mapping[str, Any]


@lru_cache(maxsize=128)
def condition_of(text: str, filtering: Filtering) -> Condition:
    """Return the condition of a filter; texts of the filter are parameters, named `f0`, `f1`, …."""
    parameters: dict[str, str] = {}

    def bind(value: str) -> str:
        name = f"f{len(parameters)}"
        parameters[name] = value
        return f":{name}"

    return Condition(condition(text, filtering, bind), parameters)


def condition(text: str, filtering: Filtering, bind: Callable[[str], str]) -> str:
    """Return the condition of a filter as SQL, true for the selected messages; `bind` returns the SQL of a text."""
    whole, needed = value(text, filtering, bind), _needed(Filter.of(text).expression)
    if needed is None:
        return whole
    # Nearly every row fails here, for a fraction of what it takes to read a property.
    some = " OR ".join(filtering.holds.format(text=bind(each)) for each in needed)
    return f"(({some} OR {filtering.escaped}) AND {whole})"


def value(text: str, filtering: Filtering, bind: Callable[[str], str]) -> str:
    """Return the value of a filter as SQL: true, false or null; `bind` returns the SQL of a text of the filter."""
    writing = _Writing(filtering, bind)
    found = writing.sql(Filter.of(text).expression)
    # Each property is read once, whatever the filter does with it.
    columns = ", ".join(f"{writing.column(name)} AS {alias}" for name, alias in writing.aliases.items())
    if not columns:
        return found
    return f"(SELECT {found} FROM (SELECT {columns}{filtering.fence}) AS p)"


def _needed(found: Expression) -> tuple[str, ...] | None:
    """Return texts of which the headers of each selected message hold one, as they are; None where nothing is known.

    JSON may write any character as an escape, so a text surely stands there as it is only without a backslash. A whole
    value is looked for with its quotes: fewer other headers hold that, and a longer text is found in less time.
    """
    match found:
        case Equal(Property(name), Literal(str(text))) | Equal(Literal(str(text)), Property(name)):
            needed: tuple[str, ...] = (f'"{text}"',)
        case Among(Property(name), texts):
            needed = tuple(f'"{text}"' for text in texts)
        case Holds(Property(name), text, negated=False):
            needed = (text,)
        case Logic(every, operands):
            known = [_needed(operand) for operand in operands]
            if every:
                return min((each for each in known if each is not None), key=len, default=None)
            return None if None in known else tuple(text for each in known for text in each or ())
        case _:
            return None
    return None if name in SYSTEM_PROPERTIES or len(needed) > _MOST_NEEDED else needed


class _Writing:
    """Writes the expressions of one filter; `aliases` are the columns of its properties."""

    def __init__(self, filtering: Filtering, bind: Callable[[str], str]) -> None:
        self._filtering = filtering
        self._bound = bind
        self.aliases: dict[str, str] = {}
        self._writers: dict[type[Expression], Callable[[Any], str]] = {
            Literal: self._literal,
            Property: self._property,
            Truth: lambda found: f"CASE WHEN {self.sql(found.property)} IS NOT NULL THEN FALSE END",
            Not: lambda found: f"(NOT {self.sql(found.operand)})",
            Logic: lambda found: _joined(
                " AND " if found.every else " OR ", [self.sql(each) for each in found.operands]
            ),
            Equal: self._equal,
            Order: lambda found: self._compared(found.sign, self._number(found.left), self._number(found.right)),
            IsNull: lambda found: f"({self.sql(found.operand)} IS NULL)",
            Among: lambda found: f"({self.sql(found.property)} IN ({', '.join(map(self._bind, found.texts))}))",
            Holds: self._holds,
        }

    def sql(self, found: Expression) -> str:
        """Return an expression as SQL; what is always unknown is NULL."""
        return "NULL" if found.kind == "unknown" else self._writers[type(found)](found)

    def column(self, name: str) -> str:
        """Return the SQL that reads a property."""
        if name in SYSTEM_PROPERTIES and name != KEYS:
            return SYSTEM_PROPERTIES[name]
        # A text of its own, because a plan that was made for all parameters would join the marks for each row.
        header = self._filtering.header.format(name=self._bind(name), begin=self._bind(f'"{name}":"'))
        return f"coalesce({header}, {SYSTEM_PROPERTIES[name]})" if name == KEYS else header

    def _bind(self, text: str) -> str:
        return self._filtering.text.format(text=self._bound(text))

    def _property(self, found: Property) -> str:
        return self.aliases.setdefault(found.name, f"p{len(self.aliases)}")

    def _literal(self, found: Literal) -> str:
        if isinstance(found.constant, str):
            return self._bind(found.constant)
        if isinstance(found.constant, Decimal):
            return self._filtering.literal.format(text=self._bind(str(found.constant)))
        return "TRUE" if found.constant else "FALSE"

    def _number(self, found: Expression) -> str:
        written = self.sql(found)
        return self._filtering.number.format(text=written) if found.kind == "text" else written

    def _compared(self, sign: str, left: str, right: str) -> str:
        return self._filtering.compare.format(left=left, sign=sign, right=right)

    def _equal(self, found: Equal) -> str:
        if isinstance(found.right, Literal):
            # Never null, so an unknown left side makes the result unknown in SQL, too.
            return self._same(found, self.sql(found.left), self.sql(found.right))
        sides = f"(SELECT {self.sql(found.left)} AS l, {self.sql(found.right)} AS r{self._filtering.fence}) AS e"
        return f"(SELECT CASE WHEN r IS NULL THEN l IS NULL ELSE {self._same(found, 'l', 'r')} END FROM {sides})"

    def _same(self, found: Equal, left: str, right: str) -> str:
        """Return the condition that two known values are the same; null if one is a text that is no number."""
        kinds = (found.left.kind, found.right.kind)
        if "unknown" in kinds:
            return "NULL"
        if "condition" in kinds:
            if "number" in kinds:
                return f"CASE WHEN {left} IS NOT NULL THEN FALSE END"
            one, other = (
                f"(lower({side}) = 'true')" if kind == "text" else side
                for side, kind in zip((left, right), kinds, strict=True)
            )
            return f"({one} = {other})"
        if kinds == ("text", "text"):
            return f"({left} = {right})"
        numbers = (
            self._filtering.number.format(text=side) if kind == "text" else side
            for side, kind in zip((left, right), kinds, strict=True)
        )
        return self._compared("=", *numbers)

    def _holds(self, found: Holds) -> str:
        if found.operand.kind != "text" or not found.text:
            return "FALSE"
        search = _SEARCHES[found.search].format(value=self.sql(found.operand), text=self._bind(found.text))
        return f"coalesce({'NOT ' if found.negated else ''}({search}), FALSE)"


def _joined(word: str, conditions: list[str]) -> str:
    """Join conditions in pairs, because SQLite limits the depth of an expression, which a plain list would reach."""
    if len(conditions) == 1:
        return conditions[0]
    half = len(conditions) // 2
    return f"({_joined(word, conditions[:half])}{word}{_joined(word, conditions[half:])})"
