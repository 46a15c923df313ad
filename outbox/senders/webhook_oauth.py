"""OAuth 2 client credentials (RFC 6749, section 4.4): the token that the requests of a webhook carry.

The token endpoint gets a client's id and secret as HTTP basic authentication. No driver is used.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus, urlencode

from outbox.runtime.secret import Secret, forms_of, secret_text

#: The variable that holds the client's secret where no file is named.
SECRET_VARIABLE = "OUTBOX_WEBHOOK_OAUTH_SECRET"  # noqa: S105 - the name of the variable, no secret

#: A token is renewed after this share of its life, but at most so many seconds before the end.
_SHARE_OF_LIFE, _MOST_SECONDS_BEFORE = 0.8, 60.0
#: A late answer may still repeat an earlier token.
_MOST_REMEMBERED = 12
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The token endpoint, and what a client asks there for. `shown`: the endpoint for people."""

    url: str = field(repr=False)
    shown: str
    client: str
    secret_file: Path | None
    scope: str | None
    audience: str | None


class Tokens:
    """The token of a client, kept until shortly before its end. The client's secret is read anew for each token."""

    def __init__(self, grant: Grant, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.grant = grant
        self._clock = clock
        self._token: str | None = None
        self._until = float("-inf")
        self._secrets: deque[str] = deque(maxlen=_MOST_REMEMBERED)
        #: The last secrets and tokens in all forms, which no text may show.
        self.hidden: tuple[str, ...] = ()

    @property
    def token(self) -> str | None:
        """The token for a request now; None: ask the endpoint for a token."""
        return self._token if self._clock() < self._until else None

    def request(self) -> tuple[dict[str, str], bytes]:
        """Return headers and body of the request for a token; raise `ValueError` without a secret."""
        grant = self.grant
        secret = secret_text("oauth-secret-file", grant.secret_file, SECRET_VARIABLE)
        if not (secret and secret.strip()):
            raise ValueError(f"the client's secret is missing; set {SECRET_VARIABLE}, or give oauth-secret-file")
        login = f"{quote_plus(grant.client)}:{quote_plus(secret.strip())}"
        credentials = base64.b64encode(login.encode()).decode()
        self._hide(secret.strip(), credentials)
        form = {"grant_type": "client_credentials", "scope": grant.scope, "audience": grant.audience}
        headers = {
            "Authorization": f"Basic {credentials}",
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        return headers, urlencode({name: value for name, value in form.items() if value is not None}).encode()

    def take(self, status: int, body: bytes) -> str:
        """Keep the token of an answer, and return the token.

        Raises:
            ValueError: the answer holds no token. The text says why, with the error code of the answer.
        """
        try:
            answer: Any = json.loads(body)
        except ValueError:
            answer = None
        known: dict[str, Any] = answer if isinstance(answer, dict) else {}
        if status != 200:
            code = f", {known['error']}" if isinstance(known.get("error"), str) else ""
            raise ValueError(f"HTTP {status}{code}; check oauth-client, its secret and oauth-scope")
        token, kind = known.get("access_token"), known.get("token_type")
        if not (isinstance(token, str) and _TOKEN.fullmatch(token)):
            raise ValueError("the answer holds no access_token")
        if not (isinstance(kind, str) and kind.lower() == "bearer"):
            raise ValueError("the token is not of the type Bearer")
        self._hide(token)
        self._token, self._until = token, self._clock() + _seconds_of(known.get("expires_in"))
        return token

    def drop(self, token: str) -> None:
        """Forget a token that the webhook refuses, unless there is another token by now."""
        if self._token == token:
            self._token = None

    def _hide(self, *secrets: str) -> None:
        self._secrets += secrets
        self.hidden = forms_of(map(Secret, self._secrets))


def _seconds_of(expires_in: object) -> float:
    """Return the seconds for which a token is used. Without a lifetime, until the webhook refuses the token."""
    try:
        life = float(str(expires_in))
    except ValueError:
        return float("inf")
    return max(life * _SHARE_OF_LIFE, life - _MOST_SECONDS_BEFORE)
