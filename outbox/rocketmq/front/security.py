"""Security of a front: who may call, and how calls travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outbox.rocketmq.front.authentication import Authentication
from outbox.rocketmq.front.routing import Place
from outbox.rocketmq.front.tls import Certificate


@dataclass(frozen=True, slots=True)
class Port:
    """A place to listen at. `advertised`: for clients that come by it; None: the place itself.

    `certificate`: for TLS; None: without.
    """

    listen: Place
    advertised: Place | None
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Who may call a front, and how calls travel.

    Args:
        auth_file: the access keys of clients, a line each: `access_key:secret`, or `access_key:secret:topic,topic`.
            None: every client may call.
        tls_cert: the file of the front's certificate with its chain, in PEM. None: without TLS.
        tls_key: the file of the certificate's private key.
        tls_listen: a second place to listen at, with TLS, beside `listen` without. None: `listen` is with TLS.
        tls_advertise: the place for clients that come by `tls_listen`; None: `tls_listen`.
    """

    auth_file: str | Path | None = None
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    tls_listen: str | None = None
    tls_advertise: str | None = None

    def authentication(self) -> Authentication | None:
        """Return the check of each call.

        Raises:
            ValueError: the file cannot be read, or a line has a mistake.
        """
        return None if self.auth_file is None else Authentication(Path(self.auth_file))

    def ports(self, listen: str, advertise: str | None) -> Sequence[Port]:
        """Return the ports of a front.

        Raises:
            ValueError: a place is none, or a file cannot be used.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS wants both, a certificate and its private key: one of the files is not given")
        if self.tls_advertise is not None and self.tls_listen is None:
            raise ValueError("a place for clients with TLS is given, but no second place to listen at with TLS")
        if self.tls_cert is None or self.tls_key is None:
            if self.tls_listen is not None:
                raise ValueError("a second place with TLS wants a certificate and its private key")
            return [_port(listen, advertise)]
        certificate = Certificate(Path(self.tls_cert), Path(self.tls_key))
        if self.tls_listen is None:
            return [_port(listen, advertise, certificate)]
        return [_port(listen, advertise), _port(self.tls_listen, self.tls_advertise, certificate, "tls_")]


def _port(listen: str, advertise: str | None, certificate: Certificate | None = None, prefix: str = "") -> Port:
    place, advertised = Place.of(listen), None if advertise is None else Place.of(advertise)
    if advertised is None and place.is_everywhere:
        name = f"{prefix}advertise"
        raise ValueError(
            f"no client can connect to {place}: say by which host and port, with --{name.replace('_', '-')}"
            f" (in Python {name}=)"
        )
    return Port(place, advertised, certificate)
