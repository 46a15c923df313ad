"""The URL of a webhook: what is called, with which credentials, and the options that are ours.

Every other parameter of the query belongs to the endpoint, and stays in the URL that is called. An endpoint's own
parameter that has the name of an option is written percent-encoded, as `%6Dost=5`: it is then not taken for ours.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urlunsplit

from outbox.errors import SenderError
from outbox.runtime.secret import HOST, Secret, forms_of, redacted, secrets_of
from outbox.senders.address import Address
from outbox.senders.tls import Tls
from outbox.senders.urls import split_url
from outbox.senders.webhook_oauth import Grant

_OAUTH = ("oauth-url", "oauth-client", "oauth-secret-file", "oauth-scope", "oauth-audience")
OPTIONS = ("secret-file", "timeout", "most", "per-connection", "proxy", *_OAUTH, "ca", "cert", "as")

_FORM = "https://host/path"
_PORTS = {"http": 80, "https": 443}
_MOST = 32
_MOST_ALLOWED = 1000
#: So many messages, at the most, are answered for another one after an answer too many on a connection.
_PER_CONNECTION = 100
#: From so much likeness on, as `difflib` measures it, a parameter is a mistyped option.
_MISTYPED = 0.85
#: Every other character of a path or a query is percent-encoded.
_AS_THEY_ARE = "%/:?#[]@!$&'()*+,;=~"


class Proxy(NamedTuple):
    """The URL of a proxy without its credentials, and these: a user and a password."""

    url: str
    auth: tuple[bytes, bytes] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An endpoint, and how to send to it.

    `shown`: the URL for people, without credentials and query. `path`: with the endpoint's query. `netloc`: for the
    header Host. `authorization`: the header of that name. `hidden`: what no text may show.
    """

    shown: str
    scheme: str
    host: str
    port: int | None
    netloc: str
    path: str = field(repr=False)
    authorization: str | None = field(repr=False)
    proxy: Proxy | None = field(repr=False)
    hidden: tuple[str, ...] = field(repr=False)
    seconds: float
    most: int
    per_connection: int
    secret_file: Path | None
    oauth: Grant | None
    tls: Tls | None

    @classmethod
    def of(cls, url: str, *, timeout: timedelta) -> Target:
        """Take a URL apart; raise `SenderError`, without a secret, if the URL or an option is malformed."""
        parts = split_url(url)
        given = parts.query.split("&") if parts.query else []
        options = _options_of(parts.query)
        ours = [each for each in given if each.partition("=")[0] in options]
        theirs = "&".join(each for each in given if each not in ours)
        address = Address.of(urlunsplit(parts._replace(query="&".join(ours))), form=_FORM, options=options)
        _refuse_mistyped(address, [each.partition("=")[0] for each in theirs.split("&")])
        if parts.fragment:
            address.refuse("leave out the # and what follows, which is never sent")
        if not (parts.path + theirs).isprintable():
            address.refuse("percent-encode control characters")
        default = _PORTS[address.scheme]
        host, port = address.only_host(default)
        if not 0 < port < 65_536:
            address.refuse("the port must be a number from 1 to 65535")
        authorization = _authorization(address)
        token = (authorization or "").removeprefix("Basic ")
        path = f"{parts.path or '/'}?{theirs}" if theirs else parts.path or "/"
        return cls(
            shown=address.shown,
            scheme=address.scheme,
            host=host.lower(),
            port=None if port == default else port,
            netloc=address.hosts[0].lower().removesuffix(f":{default}"),
            path=quote(path, safe=_AS_THEY_ARE),
            authorization=authorization,
            proxy=_proxy(address),
            hidden=forms_of([*secrets_of_endpoint(url), Secret(token)]),
            seconds=address.timeout(timeout),
            most=_number(address, "most", _MOST),
            per_connection=_number(address, "per-connection", _PER_CONNECTION),
            secret_file=_secret_file(address, "secret-file"),
            oauth=_oauth(address),
            tls=address.tls("https"),
        )


def secrets_of_endpoint(url: str) -> list[Secret]:
    """Return the secrets of a webhook's URL: every parameter that is no option of ours may be one."""
    return secrets_of(url, token=True, options=_options_of(url.partition("?")[2]))


def _options_of(query: str) -> tuple[str, ...]:
    """Return the options that are ours. `key` belongs to the endpoint unless `cert` is there, too.

    Many endpoints have a secret of this name.
    """
    return (*OPTIONS, "key") if any(each.partition("=")[0] == "cert" for each in query.split("&")) else OPTIONS


def _refuse_mistyped(address: Address, names: Sequence[str]) -> None:
    """Refuse a parameter of the endpoint that is nearly an option: without `secret-file` nothing would be signed."""
    for name in names:
        meant = get_close_matches(name.lower(), OPTIONS, n=1, cutoff=_MISTYPED)
        if meant and "%" not in name:
            address.refuse(
                f"did you mean the option {meant[0]}? A parameter of the endpoint with the name {name!r} is written"
                f" %{ord(name[0]):02X}{name[1:]}"
            )


def _authorization(address: Address) -> str | None:
    if address.user is None:
        return None
    credentials = f"{address.user}:{address.password or ''}"
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


def _number(address: Address, option: str, default: int) -> int:
    text = address.options.get(option, str(default))
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= _MOST_ALLOWED:
        address.refuse(f"{option} must be a number of requests from 1 to {_MOST_ALLOWED}")
    return int(text)


def _secret_file(address: Address, option: str) -> Path | None:
    text = address.options.get(option)
    if text is not None and (not text.startswith("/") or "\0" in text):
        address.refuse(f"{option} must be the absolute path of a file")
    path = address.secret_file(option)
    return None if path is None else Path(path)


def _oauth(address: Address) -> Grant | None:
    given = [option for option in _OAUTH if option in address.options]
    if not given:
        return None
    url, client = address.options.get("oauth-url"), address.options.get("oauth-client")
    if not url or not client:
        address.refuse(f"{given[0]} belongs to a client; give both oauth-url and oauth-client")
    if address.user is not None:
        address.refuse("leave out the user before the @, or the options of OAuth: a request has one of both")
    try:
        parts = split_url(url)
        is_endpoint = parts.scheme in _PORTS and HOST.fullmatch(parts.netloc) and parts.port != 0 and not parts.fragment
    except (SenderError, ValueError):
        is_endpoint = False
    if not (is_endpoint and url.isascii() and url.isprintable()):
        address.refuse("oauth-url must be https://host/path, percent-encoded and without a user")
    return Grant(
        url=url,
        shown=redacted(url),
        client=client,
        secret_file=_secret_file(address, "oauth-secret-file"),
        scope=address.options.get("oauth-scope"),
        audience=address.options.get("oauth-audience"),
    )


def _proxy(address: Address) -> Proxy | None:
    written = address.options.get("proxy")
    if written is None:
        return None
    try:
        parts = split_url(written)
        is_proxy = parts.scheme in ("http", "https") and bool(parts.port) and "," not in parts.netloc
    except (SenderError, ValueError):
        is_proxy = False
    if not is_proxy:
        address.refuse("proxy must be http://host:port or https://host:port")
    credentials, at, host = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    auth = (unquote(user).encode(), unquote(password).encode()) if at else None
    return Proxy(f"{parts.scheme}://{host}", auth)
