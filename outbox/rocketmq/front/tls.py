"""TLS: the certificate of a front, which is read again when it has been renewed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from outbox.runtime.reloaded import Reloaded
from outbox.runtime.secret import warning_of
from outbox.senders.tls import Tls, contents

logger = logging.getLogger("outbox")


@dataclass(frozen=True, slots=True)
class Pair:
    """A private key, and its certificate with the chain, both in PEM."""

    key: bytes = field(repr=False)
    chain: bytes


class Certificate:
    """The certificate of a front; a renewed one counts for the connections a second later."""

    def __init__(self, cert: Path, key: Path) -> None:
        """`cert`: the file of the certificate with its chain. `key`: the file of the private key.

        Raises:
            ValueError: a file cannot be used, or the key is of another certificate.
        """
        if warning := warning_of(key):
            logger.warning("front: %s", warning)
        self._cert, self._key = cert, key
        self._pair = Reloaded([cert, key], self._read)

    def pair(self) -> Pair:
        """Return the key with its certificate; the same value until one of the files changes."""
        return self._pair.value()

    def _read(self) -> Pair:
        cert, key = str(self._cert), str(self._key)
        try:
            Tls(cert=cert, key=key).context()
            return Pair(contents("key", key), contents("cert", cert))
        except ConnectionError as error:
            raise ValueError(f"TLS: {error}") from error
