"""Signatures of Standard Webhooks, by which an endpoint knows the sender of an unaltered request.

A secret is `whsec_` and base64. A signature is `v1,` and the base64 of an HMAC-SHA256 over id, time and body, with dots
in between. Several secrets give several signatures, so that a secret can be replaced while both sides work:
https://www.standardwebhooks.com. No driver is used.
"""

from __future__ import annotations

import base64
import hmac
from pathlib import Path

from outbox.runtime.secret import secret_text

ID = "webhook-id"
TIMESTAMP = "webhook-timestamp"
SIGNATURE = "webhook-signature"

#: The variable that holds the secrets where no file is named.
SECRET_VARIABLE = "OUTBOX_WEBHOOK_SECRET"  # noqa: S105 - the name of the variable, no secret

_PREFIX = "whsec_"


def keys_of(secrets: str) -> tuple[bytes, ...]:
    """Return the keys of secrets, one in a line; empty lines do not count.

    Raises:
        ValueError: there is no secret, or a line is none. The text shows no line.
    """
    lines = [line.strip() for line in secrets.splitlines()]
    keys = tuple(_key_of(line, number) for number, line in enumerate(lines, 1) if line)
    if not keys:
        raise ValueError("no secret there; write whsec_ and base64, one secret in a line")
    return keys


def signature_of(key: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a request."""
    content = b"%b.%b.%b" % (message_id.encode(errors="replace"), timestamp.encode(errors="replace"), body)
    return f"v1,{base64.b64encode(hmac.digest(key, content, 'sha256')).decode()}"


class Secrets:
    """The secrets of a sender, from a file or from the environment. Both are read anew at each call of `keys`."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def keys(self) -> tuple[bytes, ...]:
        """Return the keys to sign with; none without file and variable. An error says where, without the secrets."""
        secrets = secret_text("secret-file", self._file, SECRET_VARIABLE)
        try:
            return () if secrets is None else keys_of(secrets)
        except ValueError as error:
            source = SECRET_VARIABLE if self._file is None else f"secret-file {self._file}"
            raise ValueError(f"{source}: {error}") from None


def _key_of(line: str, number: int) -> bytes:
    encoded = line.removeprefix(_PREFIX)
    try:
        # Some issuers leave the padding out.
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        key = b""
    if not key or encoded == line:
        raise ValueError(f"line {number} is no secret; write whsec_ and base64")
    return key
