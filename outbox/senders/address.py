"""The address of a destination: a URL taken apart, with the credentials kept out of every text."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qsl, unquote

from outbox.errors import SenderError
from outbox.runtime.secret import redacted, warning_of
from outbox.senders.tls import TLS_OPTIONS, Tls
from outbox.senders.urls import NAME_OPTION, split_url

logger = logging.getLogger("outbox")

_LONGEST_TIMEOUT = 3600.0
_OPTION = re.compile(r"[A-Za-z._-]{1,40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The parts of a URL. `user` and `password` are decoded, and not for texts.

    `shown`: the URL for people, without secrets. `hosts`: each as written, `host` or `host:port`. `path`: the names
    between the slashes. `options`: the part behind the question mark.
    """

    shown: str
    scheme: str
    hosts: tuple[str, ...]
    path: tuple[str, ...]
    options: Mapping[str, str] = field(repr=False)
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)

    @classmethod
    def of(cls, url: str, *, form: str, options: tuple[str, ...] = ()) -> Address:
        """Take a URL apart.

        Args:
            url: the URL of the user.
            form: an example for errors, as `nats://host:port`.
            options: the names allowed behind the question mark; `as` is always allowed.

        Raises:
            SenderError: the host is missing, or an option is unknown or given twice.
        """
        parts = split_url(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        if not hosts:
            raise SenderError(f"{redacted(url)}: write {form}")
        user, colon, password = credentials.partition(":")
        given = parse_qsl(parts.query, keep_blank_values=True)
        taken = options if NAME_OPTION in options else (*options, NAME_OPTION)
        for name, value in given:
            if name not in taken or sum(each == name for each, _ in given) > 1:
                # Without a value it may be a token that somebody has put there.
                wrong = repr(name) if value and _OPTION.fullmatch(name) else "one"
                problem = f"{wrong} is {'given twice' if name in taken else 'none of them'}"
                raise SenderError(f"{redacted(url)}: its options are {', '.join(taken)}, each once; {problem}")
        return cls(
            shown=redacted(url),
            scheme=parts.scheme,
            hosts=tuple(hosts.split(",")),
            path=tuple(unquote(name) for name in parts.path.split("/") if name),
            options=dict(given),
            user=unquote(user) if credentials else None,
            password=unquote(password) if colon else None,
        )

    @property
    def servers(self) -> tuple[str, ...]:
        """The hosts, each with the scheme before it, for texts."""
        return tuple(f"{self.scheme}://{host}" for host in self.hosts)

    def refuse(self, fix: str) -> NoReturn:
        """Raise an error with the URL and with the advice."""
        raise SenderError(f"{self.shown}: {fix}")

    def timeout(self, default: timedelta) -> float:
        """Return the seconds of a call: the option `timeout`, or else the default."""
        text = self.options.get("timeout")
        if text is None:
            return default.total_seconds()
        seconds = _number(text)
        if not 0 < seconds < _LONGEST_TIMEOUT:
            self.refuse("timeout must be a number of seconds")
        return seconds

    def choice(self, option: str, choices: Mapping[str, str]) -> str:
        """Return the driver's name for the value of an option; the first choice is the default."""
        name = self.options.get(option, next(iter(choices))).lower()
        if name not in choices:
            self.refuse(f"{option} must be one of {', '.join(choices)}")
        return choices[name]

    def tls(self, scheme: str) -> Tls | None:
        """Return the files of a connection with TLS; None for another scheme than `scheme`, which is without TLS.

        Refuse a file that cannot be used, and the options of TLS with another scheme.
        """
        if self.scheme != scheme:
            for option in TLS_OPTIONS:
                if option in self.options:
                    self.refuse(f"{option} is an option of {scheme}://")
            return None
        ca, key = self.file("ca"), self.secret_file("key")
        tls = Tls(ca, self.secret_file("cert") if key is None else self.file("cert"), key)
        if tls.key is not None and tls.cert is None:
            self.refuse("key belongs to cert; give the path of the certificate's file as cert, too")
        try:
            tls.context()
        except ConnectionError as error:
            self.refuse(str(error))
        return tls

    def file(self, option: str) -> str | None:
        """Return the path that an option has; None without the option."""
        path = self.options.get(option)
        if path is not None and (not path or "\0" in path):
            self.refuse(f"{option} must be the path of a file")
        return path

    def secret_file(self, option: str) -> str | None:
        """Return what `file` does; warn of a file that everybody may read."""
        path = self.file(option)
        if path is not None and (warning := warning_of(Path(path))):
            logger.warning("%s", warning)
        return path

    def only_host(self, port: int) -> tuple[str, int]:
        """Return host and port; `port` is the default. Refuse several hosts."""
        if len(self.hosts) > 1:
            self.refuse("write one host")
        return host_and_port(self.hosts[0], port)


def host_and_port(written: str, port: int) -> tuple[str, int]:
    """Return a host of an address and the port, by default `port`."""
    host, colon, given = written.rpartition(":")
    if not colon or given.endswith("]"):
        return written.strip("[]"), port
    return host.strip("[]"), int(given or port)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
