"""Users of NATS who log in by a seed: with an nkey, or with a JWT that the account of an operator signs."""

import base64
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nkeys

_LIMITS: dict[str, Any] = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
#: Of an account that has JetStream; the account of the system has none.
_STORAGE = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)


class Pair:
    """A new pair of keys: `seed` is secret, `name` is public."""

    def __init__(self, prefix: int = nkeys.PREFIX_BYTE_USER) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), prefix).decode()
        self._keys = nkeys.from_seed(self.seed.encode())
        self.name = self._keys.public_key.decode()

    def signed(self, about: str, **claims: Any) -> str:
        """Return a JWT about the holder of a public key."""
        body = {"iss": self.name, "sub": about, "name": "test", "iat": int(time.time()), **claims}
        body["jti"] = base64.b32encode(hashlib.sha256(_packed(body)).digest()).decode().rstrip("=")
        text = ".".join(_encoded(part) for part in (_packed({"typ": "JWT", "alg": "ed25519-nkey"}), _packed(body)))
        return f"{text}.{_encoded(self._keys.sign(text.encode()))}"


class Operator:
    """An operator with one account for users; `settings` are those of a server."""

    def __init__(self) -> None:
        operator, self._account, system = (
            Pair(prefix)
            for prefix in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_ACCOUNT)
        )
        accounts = {
            pair.name: operator.signed(pair.name, nats={"type": "account", "version": 2, "limits": limits})
            for pair, limits in ((self._account, _LIMITS | _STORAGE), (system, _LIMITS))
        }
        self.settings: Mapping[str, str] = {
            "operator": operator.signed(operator.name, nats={"type": "operator", "version": 2}),
            "system_account": system.name,
            "resolver": "MEMORY",
            "resolver_preload": f"{{ {', '.join(f'{name}: {jwt}' for name, jwt in accounts.items())} }}",
        }

    def admit(self, file: Path, *, seconds: float = 3600) -> Pair:
        """Write the credentials file of a new user, which is good for so long."""
        user = Pair()
        claims = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}
        jwt = self._account.signed(user.name, nats=claims, exp=int(time.time() + seconds))
        file.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            "************************* IMPORTANT *************************\n"
            "NKEY Seed printed below can be used to sign and prove identity.\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )
        return user


def _packed(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _encoded(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")
