"""Templates: all values are escaped, and a missing value is an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outbox.dashboard.filters import group_of
from outbox.dashboard.redaction import clean
from outbox.dashboard.values import in_words, moment, plain, visible
from outbox.dashboard.visit import Page, Visit, address, base_of
from outbox.runtime.text import age, counted

_TEMPLATES = Path(__file__).parent / "templates"


@cache
def _environment() -> Environment:
    """Return the templates, which are compiled once a process."""
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["group_of"] = group_of
    made.filters.update({each.__name__: each for each in (age, counted, in_words, moment, plain, visible)})
    made.filters.update(clean=_cleaned, part=_part)
    return made


class Renderer:
    """Renders the pages of one dashboard. `title`: of all pages; `databases`: the names, if there are several."""

    def __init__(self, title: str, databases: Iterable[str]) -> None:
        self._title, self._databases = title, [*databases]

    def page(self, path: str, page: Page, visit: Visit | None) -> str:
        """Return a page as HTML. `path`: below the root of the dashboard; `visit`: None for strangers."""
        context = self._context(path, visit) | {"is_live": page.live, "here": page.template}
        return _environment().get_template(page.template).render(context | dict(page.values))

    def section(self, path: str, name: str, visit: Visit, values: Mapping[str, Any]) -> str:
        """Return the inside of a live section as HTML."""
        template = _environment().get_template(f"live/{name}.html")
        return template.render(self._context(path, visit) | {"back": path.lstrip("/")} | dict(values))

    def _context(self, path: str, visit: Visit | None) -> dict[str, Any]:
        base, database = base_of(path), None if visit is None else visit.database

        def to(path: str, **query: object) -> str:
            return address(base, database, path, query)

        return {
            "title": self._title,
            "databases": self._databases,
            "base": base,
            "to": to,
            "database": database,
            "visit": visit,
            "user": None if visit is None else visit.user,
            "log_out": None if visit is None else getattr(visit.seen.access, "log_out", None),
            "may": _nothing if visit is None else visit.may,
            "form_token": "" if visit is None else visit.seen.tokens.of_form(visit.user),
            "back": "" if visit is None else _back(path, visit),
        }


def _back(path: str, visit: Visit) -> str:
    """Return the way to this page from the root of the dashboard."""
    query = visit.request.url.query
    return f"{quote(path.lstrip('/'), safe='/%')}{'?' if query else ''}{query}"


def _nothing(_: str) -> bool:
    return False


def _cleaned(text: object) -> Markup:
    """Return a text of an error or a destination, without what looks like a secret."""
    return visible(clean(str(text)))


def _part(text: object) -> str:
    """Return a text as a part of a path."""
    return quote(str(text), safe="")
