"""A request as pages read requests, and a page as the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import anyio
from starlette.requests import Request

from outbox.dashboard.filters import BadAddressError, text
from outbox.dashboard.numbers import Numbers
from outbox.dashboard.seen import Seen

#: A form is at most so long, and has at most so many fields.
_MOST_BYTES, _MOST_FIELDS = 64 * 1024, 100
#: A form that trickles in holds a connection of the server.
_MOST_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A request with access.

    Attributes:
        request: of the server.
        seen: the outbox of the visitor.
        database: the name of the outbox; None: the dashboard has no other.
        form: the fields of a form, each with all values.
        read_only: without decisions.
        numbers: of the overview of the database.
    """

    request: Request
    seen: Seen
    database: str | None
    form: Mapping[str, list[str]]
    read_only: bool
    numbers: Numbers

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters of the address."""
        return self.request.query_params

    @property
    def user(self) -> str:
        """The name of the visitor."""
        return self.seen.access.user

    def part(self, name: str) -> str:
        """Return a part of the path.

        Raises:
            BadAddressError: the part has a NUL, or is too long.
        """
        return text(self.request.path_params, name) or ""

    def field(self, name: str) -> str:
        """Return a field of the form; empty: not given."""
        return self.form.get(name, [""])[0]

    def may(self, right: str) -> bool:
        """Return whether the visitor has a right here; a read-only dashboard shows bodies."""
        return self.seen.access.allows(right) and (right in ("see", "bodies") or not self.read_only)


@dataclass(frozen=True, slots=True)
class Page:
    """A template with values. `live`: the page follows the numbers."""

    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    live: bool = False


def path_of(request: Request) -> str:
    """Return the path below the root of the dashboard; a server may hand over the path with the root, or without."""
    path, root = str(request.scope["path"]), str(request.scope.get("root_path", ""))
    below = path.removeprefix(root)
    return below if below == "" or below.startswith("/") else path


def own_path(request: Request) -> str:
    """Return the path as in the browser, where a name with a slash is a single part."""
    path = path_of(request)
    for name in ("name", "id"):
        value = str(request.path_params.get(name, ""))
        path = path.replace(value, value.replace("/", "%2F")) if "/" in value else path
    return path


def base_of(path: str) -> str:
    """Return the way from a page to the root of the dashboard, wherever the root is mounted."""
    return "../" * (path.count("/") - 1) or "./"


def address(base: str, database: str | None, path: str, query: Mapping[str, object | None]) -> str:
    """Return a relative address of a page; parameters that are None are left out."""
    given = {name: str(value) for name, value in query.items() if value is not None}
    place = "" if database is None else f"db/{quote(database, safe='')}/"
    return f"{base}{place}{path}{'?' if given else ''}{urlencode(given)}"


async def form_of(request: Request) -> Mapping[str, list[str]]:
    """Return the fields of a form of at most 64 KiB, which has to come within `_MOST_SECONDS`."""
    body = b""
    try:
        with anyio.fail_after(_MOST_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > _MOST_BYTES:
                    raise BadAddressError(f"the form is longer than {_MOST_BYTES} bytes")
    except TimeoutError:
        raise BadAddressError(f"the form was not complete after {_MOST_SECONDS:.0f} seconds; send it again") from None
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise BadAddressError(f"the form has more than {_MOST_FIELDS} fields, or is no text") from None
