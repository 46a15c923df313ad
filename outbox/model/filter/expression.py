"""The expressions of a filter: few kinds of frozen values, made by the parser, and their values for one message."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar
from typing import Literal as OneOf

#: The form of a number, in a filter and in the text of a property. Numbers are compared as decimals, exactly. The
#: bounds of length and exponent keep a comparison cheap, and leave every database room for the number.
NUMBER = "[+-]?(?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:[eE][+-]?[0-9][0-9]?[0-9]?)?"
LONGEST_NUMBER = 100
_NUMBER = re.compile(NUMBER)

#: The value of an expression for one message. None: unknown.
Value = str | Decimal | bool | None
#: Returns a property of the message by its name; None: it has no such property.
Properties = Callable[[str], str | None]
#: Kinds of values. `unknown`: without any other value.
Kind = OneOf["text", "number", "condition", "unknown"]

Sign = OneOf["<", "<=", ">", ">="]
Search = OneOf["CONTAINS", "STARTSWITH", "ENDSWITH"]

_ORDERS: Mapping[str, Callable[[Decimal, Decimal], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SEARCHES: Mapping[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


class Expression:
    """An expression: it has a value for each message."""

    __slots__ = ()

    #: The kind of the known values, which is the same for every message.
    kind: ClassVar[Kind] = "condition"

    def value(self, properties: Properties) -> Value:
        """Return the value for the message with these properties."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Literal(Expression):
    """A text, a number, TRUE, FALSE or NULL."""

    constant: Value

    @property
    def kind(self) -> Kind:  # type: ignore[override]  # that of the constant
        if isinstance(self.constant, str):
            return "text"
        if isinstance(self.constant, Decimal):
            return "number"
        return "unknown" if self.constant is None else "condition"

    def value(self, properties: Properties) -> Value:
        return self.constant


@dataclass(frozen=True, slots=True)
class Property(Expression):
    """A header or a system property; unknown where a message has none of this name."""

    name: str
    kind: ClassVar[Kind] = "text"

    def value(self, properties: Properties) -> str | None:
        return properties(self.name)


@dataclass(frozen=True, slots=True)
class Negative(Expression):
    """A minus before an expression that is no number: unknown for every message."""

    kind: ClassVar[Kind] = "unknown"

    def value(self, properties: Properties) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Truth(Expression):
    """A property as a condition. Properties are texts, and a text is never true: false, or unknown without it."""

    property: Property

    def value(self, properties: Properties) -> bool | None:
        return None if self.property.value(properties) is None else False


@dataclass(frozen=True, slots=True)
class Not(Expression):
    """The opposite of a condition; unknown stays unknown."""

    operand: Expression

    def value(self, properties: Properties) -> bool | None:
        found = self.operand.value(properties)
        return None if found is None else not found


@dataclass(frozen=True, slots=True)
class Logic(Expression):
    """Several conditions joined by AND (`every`) or by OR: a single false or true operand decides, else an unknown."""

    every: bool
    operands: tuple[Expression, ...]

    def value(self, properties: Properties) -> bool | None:
        unknown = False
        for operand in self.operands:
            found = operand.value(properties)
            if found is not None and found is not self.every:
                return not self.every
            unknown = unknown or found is None
        return None if unknown else self.every


@dataclass(frozen=True, slots=True)
class Equal(Expression):
    """A comparison of any two values; of different kinds, a text is read as the other kind.

    As in RocketMQ two unknown values are equal, a known left one never equals an unknown one, and the opposite is
    unknown.
    """

    left: Expression
    right: Expression

    def value(self, properties: Properties) -> bool | None:
        left, right = self.left.value(properties), self.right.value(properties)
        if left is None or right is None:
            return None if right is not None else left is None
        if isinstance(left, str) and isinstance(right, str):
            return left == right
        if isinstance(left, bool) or isinstance(right, bool):
            return _condition(left) is _condition(right)
        one, other = _number(left), _number(right)
        return None if one is None or other is None else one == other


@dataclass(frozen=True, slots=True)
class Order(Expression):
    """A comparison of two numbers; unknown if one side is no number."""

    sign: Sign
    left: Expression
    right: Expression

    def value(self, properties: Properties) -> bool | None:
        left, right = _number(self.left.value(properties)), _number(self.right.value(properties))
        return None if left is None or right is None else _ORDERS[self.sign](left, right)


@dataclass(frozen=True, slots=True)
class IsNull(Expression):
    """An expression is unknown; the answer never is."""

    operand: Expression

    def value(self, properties: Properties) -> bool:
        return self.operand.value(properties) is None


@dataclass(frozen=True, slots=True)
class Among(Expression):
    """A property is one of several texts."""

    property: Property
    texts: tuple[str, ...]

    def value(self, properties: Properties) -> bool | None:
        found = self.property.value(properties)
        return None if found is None else found in self.texts


@dataclass(frozen=True, slots=True)
class Holds(Expression):
    """A text contains, begins or ends with another one; or not, if `negated`.

    Both forms are false where there is no text, and for an empty `text`.
    """

    operand: Expression
    text: str
    search: Search
    negated: bool = False

    def value(self, properties: Properties) -> bool:
        found = self.operand.value(properties)
        return (
            isinstance(found, str) and self.text != "" and _SEARCHES[self.search](found, self.text) is not self.negated
        )


def number_of(text: str) -> Decimal | None:
    """Return the number that a text is; None: it is no number."""
    return Decimal(text) if len(text) <= LONGEST_NUMBER and _NUMBER.fullmatch(text) else None


def _number(value: Value) -> Decimal | None:
    if isinstance(value, str):
        return number_of(value)
    return value if isinstance(value, Decimal) else None


def _condition(value: Value) -> bool | Decimal | None:
    """Return a text as Java's `Boolean.valueOf` reads it, and every other value as it is."""
    return value.lower() == "true" if isinstance(value, str) else value
