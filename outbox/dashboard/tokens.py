"""Signed tokens: a form belongs to a user, and a decision is carried out once, as rehearsed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

#: For so many seconds a form and a rehearsal count.
FORM_SECONDS, REHEARSAL_SECONDS = 12 * 3_600, 600


class TokenError(Exception):
    """Raised for an invalid token; the text says why."""


class Tokens:
    """Makes and checks tokens. `secret`: the same in all processes behind an address; None: a new secret."""

    def __init__(self, secret: str | bytes | None = None) -> None:
        given = secrets.token_bytes(32) if secret is None else secret.encode() if isinstance(secret, str) else secret
        if len(given) < 16:
            raise ValueError("secret must be at least 16 bytes; for a new secret run: python -c 'import secrets;"
                             " print(secrets.token_urlsafe())'")  # fmt: skip
        self._secret = given
        #: Used tokens of rehearsals and sessions, with their ends.
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    def of_form(self, user: str) -> str:
        """Return a token for the forms of a page."""
        return self._sign({"form": user, "until": time.time() + FORM_SECONDS})

    def require_form(self, token: str, user: str) -> None:
        """Raise unless a form was made for the user.

        Raises:
            TokenError: the token is forged, too old, or of somebody else.
        """
        if self._read(token).get("form") != user:
            raise TokenError("the form was made for somebody else; load the page again")

    def of_session(self, user: str) -> str:
        """Return a token that keeps a user logged in until the token is used."""
        return self._sign({"session": user, "once": secrets.token_hex(8), "until": time.time() + FORM_SECONDS})

    def session(self, token: str) -> str | None:
        """Return the user of a session; None: the session has ended, or is none."""
        try:
            read = self._read(token)
        except TokenError:
            return None
        user: str | None = read.get("session")
        return None if read.get("once") in self._used else user

    def of_rehearsal(self, user: str, values: Mapping[str, Any]) -> str:
        """Return a token for a rehearsed decision, to be carried out once."""
        until = time.time() + REHEARSAL_SECONDS
        return self._sign({"user": user, "once": secrets.token_hex(8), "until": until, "values": values})

    def rehearsed(self, token: str, user: str) -> dict[str, Any]:
        """Return the rehearsed values.

        Raises:
            TokenError: the token is forged, too old, of somebody else, or used.
        """
        read = self._read(token)
        if read.get("user") != user:
            raise TokenError("the decision was prepared by somebody else; begin it again")
        if read["once"] in self._used:
            raise TokenError("the decision was carried out already; look at the decisions")
        values: dict[str, Any] = read["values"]
        return values

    def use(self, token: str) -> None:
        """Mark the token of a rehearsal or of a session as used.

        Raises:
            TokenError: the token is used already.
        """
        read = self._read(token)
        with self._lock:
            now = time.time()
            self._used = {once: until for once, until in self._used.items() if until > now}
            if read["once"] in self._used:
                raise TokenError("the decision was carried out already; look at the decisions")
            self._used[read["once"]] = read["until"]

    def short(self, text: str) -> str:
        """Return a short name for a text, by the secret."""
        return hmac.new(self._secret, b"name:" + text.encode(), hashlib.sha256).hexdigest()[:12]

    def _sign(self, values: Mapping[str, Any]) -> str:
        payload = base64.urlsafe_b64encode(json.dumps(values).encode())
        return f"{payload.decode()}.{self._signature(payload)}"

    def _signature(self, payload: bytes) -> str:
        return hmac.new(self._secret, b"token:" + payload, hashlib.sha256).hexdigest()

    def _read(self, token: str) -> dict[str, Any]:
        payload, _, signature = token.partition(".")
        if not token.isascii() or not hmac.compare_digest(self._signature(payload.encode()), signature):
            raise TokenError("the form has no valid token; load the page again")
        values: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload))
        if values["until"] < time.time():
            raise TokenError("the form is too old; load the page again")
        return values
