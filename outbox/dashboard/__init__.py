"""The dashboard: pages about an outbox for people without a shell, as an ASGI application.

Raises:
    MissingExtraError: Starlette or Jinja2 is not installed.
"""

from __future__ import annotations

from outbox.errors import MissingExtraError

try:
    import jinja2  # noqa: F401
    import starlette  # noqa: F401
except ImportError as error:
    raise MissingExtraError("the dashboard needs an extra: pip install 'outbox-log[dashboard]'") from error

from outbox.dashboard.access import LOCAL, Access
from outbox.dashboard.redaction import scrub
from outbox.dashboard.site import app

__all__ = ["LOCAL", "Access", "app", "scrub"]
