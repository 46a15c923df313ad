"""The files of a connection with TLS, which the options `ca`, `cert` and `key` of a destination's URL name."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from outbox.runtime.text import one_line

#: The options of each sender with TLS. No other name stands for such a file.
TLS_OPTIONS = ("ca", "cert", "key")


@dataclass(frozen=True, slots=True)
class Tls:
    """The paths of the files.

    `ca`: the certificates to trust; None: those of the system. `cert`: the certificate that the sender shows, with its
    chain. `key`: the private key of `cert`; None: the key stands in the file of `cert`.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files, and return the means of a connection. Renewed files count from the next connection on.

        Raises:
            ConnectionError: a file cannot be used. The text names the option, and shows no contents.
        """
        if self.ca is not None:
            _require_text("ca", self.ca, b"CERTIFICATE-----", "certificates")
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (ssl.SSLError, OSError):
            raise ConnectionError("ca: the certificates are malformed") from None
        if self.cert is not None:
            self._show_certificate(context, self.cert)
        return context

    def _show_certificate(self, context: ssl.SSLContext, cert: str) -> None:
        _require_text("cert", cert, b"CERTIFICATE-----", "certificate")
        option, fix = ("key", "") if self.key else ("cert", "; give the path of the key's file as key")
        _require_text(option, self.key or cert, b"PRIVATE KEY-----", f"private key{fix}")
        try:
            context.load_cert_chain(cert, self.key, password=lambda: _refuse_passphrase(option))
        except ssl.SSLError as error:
            is_others = error.reason == "KEY_VALUES_MISMATCH"
            wrong = "is of another certificate than cert" if is_others else "or cert is malformed"
            raise ConnectionError(f"{option}: the private key {wrong}") from None


def contents(option: str, path: str) -> bytes:
    """Return the contents of a file that an option names; raise `ConnectionError` if the file cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or "the file cannot be read").lower()
        raise ConnectionError(f"{option}: {one_line(path)}: {reason}") from None


def _require_text(option: str, path: str, text: bytes, what: str) -> None:
    if text not in contents(option, path):
        raise ConnectionError(f"{option}: the file holds no {what}")


def _refuse_passphrase(option: str) -> NoReturn:
    # Without an answer here, OpenSSL would ask the person at the terminal.
    raise ConnectionError(f"{option}: the private key has a passphrase; write the key to the file without passphrase")
