"""The ways to log in to NATS: user and password, a token, a credentials file (`creds`), or the seed of an nkey."""

from __future__ import annotations

import base64
import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import nkeys
from nats.aio.client import RawCredentials

from outbox.runtime.text import in_utc
from outbox.senders.address import Address
from outbox.senders.tls import contents

#: Each is the path of a file, so that no seed stands in a URL.
LOGIN_OPTIONS = ("creds", "nkey")

_JWT = re.compile(rb"(?<![\w.-])eyJ[\w-]+\.[\w-]+\.[\w-]+(?![\w.-])")
_SEED = re.compile(rb"(?<![A-Z0-9])SU[A-D][A-Z2-7]{55}(?![A-Z0-9])")


class Login:
    """Logs in as an address says. A file is read for each connection, so that a renewed file is used.

    `hint`: the reason for which the server will not accept the login, if the file tells.
    """

    def __init__(self, address: Address) -> None:
        self.hint = ""
        self._user, self._password = address.user, address.password
        self._creds, self._nkey = map(address.secret_file, LOGIN_OPTIONS)
        if sum(each is not None for each in (self._user, self._creds, self._nkey)) > 1:
            address.refuse("there is one way to log in: user and password, a token, creds or nkey")
        try:
            self.arguments()
        except ConnectionError as error:
            address.refuse(str(error))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the driver; raise `ConnectionError` if a file cannot be used."""
        if self._creds is not None:
            file = contents("creds", self._creds)
            jwt, seed = _JWT.search(file), _seed_in("creds", file)
            if jwt is None:
                raise ConnectionError("creds: the file holds no JWT of a user")
            self.hint = _expiry_of(jwt[0])
            # Of a file without these lines the driver would look for the first line for ever.
            lines = ("-----BEGIN NATS USER JWT-----", jwt[0].decode(), "-----BEGIN USER NKEY SEED-----", seed, "")
            return {"user_credentials": RawCredentials("\n".join(lines))}
        if self._nkey is not None:
            return {"nkeys_seed_str": _seed_in("nkey", contents("nkey", self._nkey))}
        if self._password is None:
            return {"token": self._user}
        return {"user": self._user, "password": self._password}


def _expiry_of(jwt: bytes) -> str:
    """Return in words that a JWT has expired; an empty text if not."""
    part = jwt.split(b".")[1]
    # The server will say that the JWT is malformed.
    with suppress(ValueError, LookupError, TypeError, OverflowError, OSError, RecursionError):
        claims = json.loads(base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4)))
        expiry = datetime.fromtimestamp(claims["exp"], UTC)
        if expiry <= datetime.now(UTC):
            return f"the JWT of creds expired at {in_utc(expiry)}"
    return ""


def _seed_in(option: str, file: bytes) -> str:
    """Return the seed in the contents of a file; raise `ConnectionError`, which shows nothing of the file."""
    seed = _SEED.search(file)
    if seed is None:
        raise ConnectionError(f"{option}: the file holds no seed of a user, which begins with SU")
    if nkeys.encode_seed(nkeys.decode_seed(seed[0])[1], nkeys.PREFIX_BYTE_USER) != seed[0]:
        raise ConnectionError(f"{option}: the checksum of the seed is wrong")
    return seed[0].decode()
