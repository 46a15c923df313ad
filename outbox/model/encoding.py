"""Bodies: a Python value becomes the bytes of a message, exactly or not at all; a handler reads the bytes.

bytes, bytearray, memoryview   the same bytes, no content type
str                            UTF-8, text/plain
dict, list                     compact JSON, application/json
Tombstone()                    no bytes, and a content type that says so
an object                      the same, by `__json__()`, by `model_dump(mode="json")` as of pydantic's models, or as a
                               dataclass; asked in this order

The same holds inside dicts, lists and objects. As in web frameworks, a UUID and a Decimal become text there, a date, a
time and a datetime become text in ISO 8601, and an Enum becomes its value. Names are text, numbers are finite, and
nothing else is converted silently. An outbox takes another serializer by `Outbox(dumps=…)`.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import math
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any, NoReturn

from outbox.errors import InvalidMessageError

MAX_BODY_BYTES = 4 * 1024 * 1024
#: The content type of a tombstone. There is no content, and the type tells a tombstone from an empty body.
TOMBSTONE_TYPE = "application/x-tombstone"

_CHARSET = re.compile(r';\s*charset\s*=\s*"?([^\s";]+)', re.IGNORECASE)
_ACCEPTED = "bytes, str, dict, list, a dataclass or an object with __json__() or model_dump()"
_MAX_PATH = 150

#: Types that JSON cannot express, each with the fix in the error.
_FIXES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (timedelta, "pass its total_seconds()"),
    (PurePath, "pass its text: str(path)"),
    ((set, frozenset), "pass a list, sorted if the bytes should always be the same"),
    (tuple, "pass a list"),
    ((bytes, bytearray, memoryview), "decode the bytes, or pass base64 text"),
)
_CONVERT = "pass plain values, or give the class a __json__() with plain values"

#: Types that JSON cannot express, but whose usual form is text or a plain value, each with the function to it.
_TEXTS: tuple[tuple[type | tuple[type, ...], Callable[[Any], object]], ...] = (
    ((uuid.UUID, Decimal), str),
    ((date, time), lambda value: value.isoformat()),
    (Enum, lambda value: value.value),
)


@dataclasses.dataclass(frozen=True)
class Tombstone:
    """A body that says: what the key of the message stands for is gone. On Kafka the value is null."""


def encode_body(body: object) -> tuple[bytes, str | None]:
    """Return the bytes of a body, and the content type that follows from its Python type."""
    content_type: str | None = None
    if isinstance(body, (bytes, bytearray, memoryview)):
        data = bytes(body)
    elif isinstance(body, Tombstone):
        data, content_type = b"", TOMBSTONE_TYPE
    elif isinstance(body, str):
        data, content_type = _utf8(body), "text/plain"
    else:
        data, content_type = _json(body), "application/json"
    if len(data) > MAX_BODY_BYTES:
        limit = f"must be at most {MAX_BODY_BYTES} bytes, not {len(data)}"
        raise InvalidMessageError("body", limit, "store it elsewhere, send a link")
    return data, content_type


def dumped(dumps: Callable[[Any], str | bytes], body: object) -> bytes:
    """Return the bytes of a body by an application's own serializer."""
    try:
        data = dumps(body)
    except (TypeError, ValueError, RecursionError) as error:
        limit = f"is refused by dumps: {type(error).__name__}: {error!s:.200}"
        raise InvalidMessageError("body", limit, "pass a value that dumps can write") from error
    if isinstance(data, str):
        return _utf8(data)
    if not isinstance(data, bytes):
        raise InvalidMessageError("body", f"dumps returned {type(data).__name__:.40}", "return str or bytes")
    return data


def checked_charset(body: object, content_type: str) -> str:
    """Return the content type, unless it contradicts the encoding of the body: text and JSON become UTF-8."""
    named = _CHARSET.search(content_type)
    if named is not None and not isinstance(body, bytes | bytearray | memoryview) and not _is_utf8(named[1]):
        limit = f"says charset {named[1]:.40}, but a {type(body).__name__} becomes UTF-8"
        raise InvalidMessageError("content_type", limit, "leave the charset out, or pass bytes in that charset")
    return content_type


def decode_text(data: bytes, content_type: str | None, message_id: uuid.UUID) -> str:
    """Return the bytes as text, by the charset of the content type, else by UTF-8."""
    named = None if content_type is None else _CHARSET.search(content_type)
    charset = "UTF-8" if named is None else named[1]
    try:
        return data.decode(charset)
    except (LookupError, ValueError) as error:
        _unreadable(f"{charset:.40} text", error, content_type, message_id)


def decode_json(data: bytes, content_type: str | None, message_id: uuid.UUID) -> Any:
    """Return the JSON value of the bytes; JSON is UTF-8 whatever the content type says (RFC 8259, 8.1)."""
    try:
        return json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _unreadable("JSON", error, content_type, message_id)


def _unreadable(what: str, error: Exception, content_type: str | None, message_id: uuid.UUID) -> NoReturn:
    declared = "without a content type" if content_type is None else f"of content type {content_type:.80}"
    limit = f"of message {message_id}, {declared}, is not {what}: {error!s:.120}"
    raise InvalidMessageError("body", limit, "read its bytes from `body`") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _is_utf8(charset: str) -> bool:
    try:
        return codecs.lookup(charset).name == "utf-8"
    except (LookupError, ValueError):
        return False


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessageError(
            "body", "holds a lone surrogate, which is not text", "decode the original bytes properly"
        ) from error


def _json(body: object) -> bytes:
    # Only containers are accepted, so that a forgotten `json.dumps` is noticed. A single text, number or date is none.
    is_scalar = body is None or isinstance(body, int | float) or _text_of(body) is not None
    if not isinstance(body, dict | list) and (
        _dump_of(body) is None or (is_scalar and not hasattr(type(body), "__json__"))
    ):
        fix = "put the value into a dict or a list" if is_scalar else _fix_for(body)
        raise InvalidMessageError("body", f"must be {_ACCEPTED}, not {type(body).__name__:.40}", fix)
    try:
        _check_names(body)
        return _ENCODER.encode(body).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _explained(body, error) from error


def _plain(value: object) -> object:
    """Convert an object to JSON values, one level deep: the encoder calls again for inner objects."""
    dump = _dump_of(value)
    if dump is None:
        raise TypeError(f"a {type(value).__name__} is not JSON")
    plain = dump()
    _check_names(plain)
    return plain


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


def _dump_of(value: object) -> Callable[[], object] | None:
    """Return the function to an object's JSON form; None if the object has no JSON form.

    Methods are looked up on the type, because a mock has attributes of any name, and a class has methods of its values.
    """
    kind = type(value)
    if hasattr(kind, "__json__"):
        return lambda: kind.__json__(value)
    if (text := _text_of(value)) is not None:
        return text
    if hasattr(kind, "model_dump"):
        return lambda: kind.model_dump(value, mode="json")
    if dataclasses.is_dataclass(kind):
        return lambda: {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}
    return None


def _text_of(value: object) -> Callable[[], object] | None:
    return next((partial(write, value) for kinds, write in _TEXTS if isinstance(value, kinds)), None)


def _check_names(value: object) -> None:
    """Refuse names that are not text, because the encoder would turn 1, True and None into text silently."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise TypeError("a JSON name must be a str")
            _check_names(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_names(inner)


# All below runs only after the encoding has failed, to find the reason.


def _explained(body: object, error: Exception) -> InvalidMessageError:
    """Return the error that refuses `body`, with the place of the fault."""
    try:
        found = next(_faults(body, "", ()), None)
    except Exception:
        found = None  # an object raises: then the error tells only its exception
    if found is not None:
        path, limit, fix = found
        return InvalidMessageError(f"body{path if len(path) <= _MAX_PATH else f'{path[:_MAX_PATH]}…'}", limit, fix)
    reason = "nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.200}"
    reason = reason.encode("ascii", "backslashreplace").decode()
    return InvalidMessageError("body", f"is not JSON: {reason}", "pass bytes, or plain values only")


def _faults(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, str, str]]:
    """Yield each part of a value that is not JSON: path, limit and fix. `above`: the containers around the value."""
    if isinstance(value, str):
        if not _is_text(value):
            yield path, "holds a lone surrogate, which is not text", "decode the original bytes properly"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield path, f"is {value}, which JSON has no word for", "pass None, or text"
    elif value is None or isinstance(value, int):
        return
    elif id(value) in above:
        yield path, "contains itself", "pass a value without circles"
    elif isinstance(value, dict | list | tuple):
        yield from _faults_inside(value, path, (*above, id(value)))
    elif (dump := _dump_of(value)) is not None:
        yield from _faults(dump(), path, (*above, id(value)))
    else:
        yield path, f"is of type {type(value).__name__:.40}, which JSON has no word for", _fix_for(value)


def _faults_inside(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, str, str]]:
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict) and not isinstance(name, str):
            yield path, f"the JSON name {name!r:.80} must be a str", "convert the dict's keys"
        elif isinstance(name, str) and not _is_text(name):
            yield path, f"the JSON name {name!a:.80} holds a lone surrogate, which is not text", "decode it properly"
        yield from _faults(inner, f"{path}[{name!a:.40}]", above)


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _fix_for(value: object) -> str:
    return next((fix for kinds, fix in _FIXES if isinstance(value, kinds)), _CONVERT)
