"""Filters in RocketMQ's SQL92: their grammar, in which NOT binds tighter than a comparison, and what they match.

condition  := all { OR all }
all        := equality { AND equality }
equality   := comparison { '=' comparison | '<>' comparison | IS [NOT] NULL }
comparison := signed { ('>' | '>=' | '<' | '<=') signed | [NOT] BETWEEN signed AND signed
              | [NOT] (CONTAINS | STARTSWITH | ENDSWITH) text | [NOT] IN '(' text {',' text} ')' }
signed     := '+' signed | '-' signed | NOT signed | primary
primary    := text | number | TRUE | FALSE | NULL | property | '(' condition ')'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple, NoReturn, Protocol, cast

from outbox.errors import FilterError
from outbox.model.filter.expression import (
    LONGEST_NUMBER,
    Among,
    Equal,
    Expression,
    Holds,
    IsNull,
    Literal,
    Logic,
    Negative,
    Not,
    Order,
    Property,
    Search,
    Sign,
    Truth,
    number_of,
)

#: Limits of one filter: characters, levels of brackets and signs, and comparisons of conditions with each other. Within
#: them no filter is too large for SQLite, whose parser has a stack of 100 places.
MAX_LENGTH = 4_000
MAX_DEPTH = 16
MAX_COMPARED = 2

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\n\r\f]+|--[^\n\r]*|/\*.*?\*/)
      | (?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+|(?:0|[1-9][0-9]*)[lL]?)
      | (?P<text>'(?:''|[^'])*')
      | (?P<word>[A-Za-z_$][A-Za-z0-9_$]*)
      | (?P<sign><>|<=|>=|[=<>(),+-])""",
    re.VERBOSE | re.DOTALL,
)
#: No message holds any, and not every database takes them.
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_LITERALS = {"TRUE": True, "FALSE": False, "NULL": None}
_SEARCHES = ("CONTAINS", "STARTSWITH", "ENDSWITH")
_WORDS = {*_LITERALS, *_SEARCHES, "NOT", "AND", "OR", "BETWEEN", "IN", "IS"}
_NOT_THERE = "there are no !=, LIKE, arithmetic and functions"
_ORDERS = ("<", "<=", ">", ">=")


class _Token(NamedTuple):
    """A part of the text. `what`: the sign or the word in upper case, or `number`, `text`, `property`, `end`."""

    what: str
    shown: str
    at: int


#: Properties that are no headers, as RocketMQ calls them (which has no TOPIC), and their columns.
SYSTEM_PROPERTIES = {"TAGS": "tags", "KEYS": "key", "TOPIC": "topic"}
#: The one that a header of the same name comes before: words for a search beside the key, as RocketMQ's clients send.
KEYS = "KEYS"


class Filterable(Protocol):
    """The parts of a message that a filter may name."""

    topic: str
    key: str | None
    tags: str | None

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of a message."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition on messages in RocketMQ's SQL92."""

    text: str
    expression: Expression

    @classmethod
    def of(cls, text: str) -> Filter:
        """Return the filter of a text.

        Raises:
            FilterError: the text is no condition, or too long or too deep; the error shows the place.
        """
        return _compiled(text)

    def matches(self, message: Filterable) -> bool:
        """Return True if the condition is true for the message, and not false or unknown."""
        headers: Mapping[str, object] | None = None

        def properties(name: str) -> str | None:
            nonlocal headers
            found: object = None
            if name not in SYSTEM_PROPERTIES or name == KEYS:
                # Decoded once, and not for a filter of tags and topics.
                headers = _headers_of(message) if headers is None else headers
                found = headers.get(name)
            if not isinstance(found, str) and name in SYSTEM_PROPERTIES:
                found = getattr(message, SYSTEM_PROPERTIES[name])
            return found if isinstance(found, str) else None

        return self.expression.value(properties) is True


@lru_cache(maxsize=128)
def _compiled(text: str) -> Filter:
    return Filter(text, parse(text))


def chosen_filter(text: str | None) -> str | None:
    """Return a filter as stored. None and `TRUE` mean every message."""
    return None if text is None or Filter.of(text).expression == Literal(True) else text.strip()


def _headers_of(message: Filterable) -> Mapping[str, object]:
    """Return the headers; none where a row of another hand holds no JSON object."""
    try:
        headers: object = message.headers
    except ValueError:
        return {}
    return headers if isinstance(headers, Mapping) else {}


def parse(text: str) -> Expression:
    """Return the condition of a text."""
    if not isinstance(text, str) or not text.strip():
        raise FilterError("filter: Expression can't be null! SQL92; write a condition such as region = 'eu'")
    if len(text) > MAX_LENGTH:
        raise FilterError(f"filter: at most {MAX_LENGTH} characters, not {len(text)}; filter by a header of its own")
    return _Parser(text).filter()


def _tokens(text: str) -> list[_Token]:
    found, at = [], 0
    if odd := _NO_TEXT.search(text):
        raise FilterError(f"filter: Lexical error: {odd[0]!a} is no text; leave it out", text, odd.start())
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise FilterError(
                f"filter: Lexical error: {text[at]!r} begins nothing; texts are in single quotes, a quote in a text is"
                f" '', and {_NOT_THERE}",
                text,
                at,
            )
        what, shown = cast("str", match.lastgroup), match[0]
        if what == "word":
            what = shown.upper() if shown.upper() in _WORDS else "property"
        if what != "blank":
            found.append(_Token(shown if what == "sign" else what, shown, at))
        at = match.end()
    return [*found, _Token("end", "", len(text))]


class _Parser:
    """Goes through the tokens of one text once; a method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0
        self._compared = 0

    def filter(self) -> Expression:
        """Return the condition of the whole text."""
        found = self._condition()
        if self._peek() != "end":
            self._refuse(
                f"unexpected {self._token.shown!r} after a complete expression; join conditions by AND or OR;"
                f" {_NOT_THERE}"
            )
        return self._truth(found, 0)

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _peek(self, further: int = 0) -> str:
        return self._tokens[min(self._next + further, len(self._tokens) - 1)].what

    def _take(self, what: str) -> bool:
        """Go past the next token if it is of this kind."""
        taken = self._peek() == what
        self._next += taken
        return taken

    def _require(self, what: str, named: str) -> _Token:
        token = self._token
        if not self._take(what):
            self._refuse(f"expected {named}, not {token.shown!r}" if token.shown else f"expected {named} here")
        return token

    def _refuse(self, problem: str, at: int | None = None) -> NoReturn:
        raise FilterError(f"filter: {problem}", self._text, self._token.at if at is None else at)

    def _shown(self, at: int) -> str:
        """Return the text of the expression that begins at `at` and ends before the next token."""
        last = self._tokens[self._next - 1]
        return self._text[at : last.at + len(last.shown)]

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._refuse(
                f"at most {MAX_DEPTH} levels of brackets, signs and comparisons inside each other; simplify it"
            )

    def _condition(self) -> Expression:
        return self._joined("OR", lambda: self._joined("AND", self._equality))

    def _joined(self, word: str, part: Callable[[], Expression]) -> Expression:
        at = self._token.at
        found = part()
        if self._peek() != word:
            return found
        operands = [self._truth(found, at)]
        while self._take(word):
            at = self._token.at
            operands.append(self._truth(part(), at))
        return Logic(word == "AND", tuple(operands))

    def _equality(self) -> Expression:
        at, depth = self._token.at, self._depth
        left = self._comparison()
        while self._peek() in ("=", "<>", "IS"):
            self._deeper()
            if self._take("IS"):
                negated = self._take("NOT")
                self._require("NULL", "NULL or NOT NULL")
                left = Not(IsNull(left)) if negated else IsNull(left)
            else:
                negated = self._peek() == "<>"
                found = self._equal(left, at)
                left = Not(found) if negated else found
        self._depth = depth
        return left

    def _equal(self, left: Expression, at: int) -> Expression:
        self._require_known(left, at)
        shown = self._shown(at)
        self._next += 1
        at = self._token.at
        right = self._comparison()
        self._require_known(right, at)
        is_constant = isinstance(left, Literal) and isinstance(right, Literal)
        if is_constant and _is_condition(left) and not _is_condition(right):
            self._refuse(f"'{shown}' cannot be compared with '{self._shown(at)}'", at)
        if not isinstance(right, Literal):
            self._compared += "condition" in (left.kind, right.kind)
        if self._compared > MAX_COMPARED:
            self._refuse(
                f"at most {MAX_COMPARED} comparisons of conditions by = and <>; join conditions by AND or OR", at
            )
        return Equal(left, right)

    def _comparison(self) -> Expression:
        at, depth = self._token.at, self._depth
        left = self._signed()
        while True:
            negated = self._peek() == "NOT"
            what = self._peek(1) if negated else self._peek()
            if what not in (*_SEARCHES, "BETWEEN", "IN") and (negated or what not in _ORDERS):
                self._depth = depth
                return left
            self._deeper()
            if what == "IN" and not isinstance(left, Property):
                self._refuse(f"Expected a property for In expression, got: {self._shown(at)}", at)
            if what in (*_ORDERS, "BETWEEN"):
                self._require_number(left, at)
            self._next += 2 if negated else 1
            if what in _SEARCHES:
                # Not the opposite of the form without NOT: both are false where there is no text.
                left = Holds(left, self._string(), cast("Search", what), negated)
                continue
            if isinstance(left, Property) and what == "IN":
                found: Expression = Among(left, self._list())
            elif what == "BETWEEN":
                found = self._between(left)
            else:
                found = self._order(cast("Sign", what), left)
            left = Not(found) if negated else found

    def _order(self, sign: Sign, left: Expression) -> Order:
        at = self._token.at
        right = self._signed()
        self._require_number(right, at)
        return Order(sign, left, right)

    def _between(self, left: Expression) -> Expression:
        at = self._token.at
        low = self._order(">=", left)
        self._require("AND", "AND between the two bounds")
        high = self._order("<=", left)
        least, most = _number_in(low.right), _number_in(high.right)
        if least is not None and most is not None and least > most:
            self._refuse(
                f"Illegal values of between, left value({least}) must less than or equal to right value({most});"
                " exchange them",
                at,
            )
        return Logic(True, (low, high))

    def _list(self) -> tuple[str, ...]:
        self._require("(", "a list such as ('a', 'b')")
        texts = [self._string()]
        while self._take(","):
            texts.append(self._string())
        self._require(")", "a comma or the end of the list")
        return tuple(texts)

    def _signed(self) -> Expression:
        depth = self._depth
        self._deeper()
        if self._take("+"):
            found = self._signed()
        elif self._take("-"):
            number = _number_in(self._signed())
            # `-number` would round to 28 digits.
            found = Negative() if number is None else Literal(number.copy_negate())
        elif self._take("NOT"):
            at = self._token.at
            found = Not(self._truth(self._signed(), at))
        else:
            found = self._primary()
        self._depth = depth
        return found

    def _primary(self) -> Expression:
        token = self._token
        self._next += 1
        if token.what in _LITERALS:
            return Literal(_LITERALS[token.what])
        if token.what == "property":
            return Property(token.shown)
        if token.what == "number":
            return Literal(self._number(token))
        if token.what == "text":
            return Literal(_unquoted(token.shown))
        self._next -= 1
        self._require("(", "a property, a text, a number or a bracket")
        found = self._condition()
        self._require(")", "a closing bracket")
        return found

    def _number(self, token: _Token) -> Decimal:
        number = number_of(token.shown.rstrip("lL"))
        if number is None:
            self._refuse(f"a number has at most {LONGEST_NUMBER} characters, and an exponent of 3 digits", token.at)
        return number

    def _string(self) -> str:
        return _unquoted(self._require("text", "a text in single quotes").shown)

    def _truth(self, found: Expression, at: int) -> Expression:
        if isinstance(found, Property):
            return Truth(found)
        if not _is_condition(found):
            self._refuse(f"Expression will not result in a boolean value: {self._shown(at)}; compare it", at)
        return found

    def _require_known(self, found: Expression, at: int) -> None:
        if found == Literal(None):
            self._refuse("'NULL' cannot be compared; write IS NULL or IS NOT NULL", at)

    def _require_number(self, found: Expression, at: int) -> None:
        if isinstance(found, Property | Negative) or _number_in(found) is not None:
            return
        self._refuse(f"Value '{self._shown(at)}' cannot be compared; only numbers have an order", at)


def _unquoted(shown: str) -> str:
    return shown[1:-1].replace("''", "'")


def _number_in(found: Expression) -> Decimal | None:
    return found.constant if isinstance(found, Literal) and isinstance(found.constant, Decimal) else None


def _is_condition(found: Expression) -> bool:
    return found.kind == "condition" or found == Literal(None)
