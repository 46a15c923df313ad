"""The URL of a webhook: what is called, with which credentials, and the options that are ours.

Every other parameter of the query belongs to the endpoint, and stays in the URL that is called. An endpoint's own
parameter that has the name of an option is written percent-encoded, as `%66ormat=json`: it is then not taken for ours.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlunsplit

from outbox.errors import SenderError
from outbox.runtime.secret import Secret, forms_of, secrets_of, without
from outbox.senders.address import Address
from outbox.senders.urls import split_url
from outbox.senders.webhook_format import Format, format_named

OPTIONS = ("secret-file", "format", "source", "timeout", "most", "per-connection", "ca", "proxy", "as")

_FORM = "https://host/path"
_MOST = 32
_MOST_ALLOWED = 1000
#: So many messages, at the most, are answered for another one after an answer too many on a connection.
_PER_CONNECTION = 100
_SOURCE = "/outbox"
#: From so much likeness on, as `difflib` measures it, a parameter is a mistyped option.
_MISTYPED = 0.85
_URI_REFERENCE = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An endpoint, and how to send to it.

    `shown`: the URL for people, without credentials and query. `url`: what is called, without credentials.
    `authorization`: the header of that name. `hidden`: what no text may show.
    `sends_events`: the format is one of CloudEvents.
    """

    shown: str
    url: str = field(repr=False)
    authorization: str | None = field(repr=False)
    proxy: str | None = field(repr=False)
    hidden: tuple[str, ...] = field(repr=False)
    seconds: float
    most: int
    per_connection: int
    format: Format
    sends_events: bool
    secret_file: Path | None
    ca: Path | None

    @classmethod
    def of(cls, url: str, *, timeout: timedelta) -> Target:
        """Take a URL apart.

        Raises:
            SenderError: it is malformed, or an option is. No text shows a secret.
        """
        parts = split_url(url)
        given = parts.query.split("&") if parts.query else []
        ours = [each for each in given if each.partition("=")[0] in OPTIONS]
        theirs = "&".join(each for each in given if each not in ours)
        address = Address.of(urlunsplit(parts._replace(query="&".join(ours))), form=_FORM, options=OPTIONS)
        _refuse_mistyped(address, [each.partition("=")[0] for each in theirs.split("&")])
        if parts.fragment:
            address.refuse("leave out the # and what follows, which is never sent")
        if not 0 < address.only_host(443)[1] < 65_536:
            address.refuse("the port must be a number from 1 to 65535")
        hosts = parts.netloc.rpartition("@")[2]
        authorization = _authorization(address)
        token = (authorization or "").removeprefix("Basic ")
        return cls(
            shown=address.shown,
            url=urlunsplit((parts.scheme, hosts, parts.path or "/", theirs, "")),
            authorization=authorization,
            proxy=_proxy(address),
            hidden=forms_of([*secrets_of_endpoint(url), Secret(token)]),
            seconds=address.timeout(timeout),
            most=_number(address, "most", _MOST),
            per_connection=_number(address, "per-connection", _PER_CONNECTION),
            format=_format(address),
            sends_events=address.options.get("format", "raw") != "raw",
            secret_file=_file(address, "secret-file"),
            ca=_ca(address),
        )

    def without_secrets(self, text: str) -> str:
        """Return a text of the endpoint, which may repeat what it was sent, without what must not be shown."""
        return without(text, self.hidden)


def secrets_of_endpoint(url: str) -> list[Secret]:
    """Return the secrets of a webhook's URL: every parameter that is no option of ours may be one."""
    return secrets_of(url, token=True, options=OPTIONS)


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


def _format(address: Address) -> Format:
    name, source = address.options.get("format", "raw"), address.options.get("source", _SOURCE)
    found = format_named(name, source)
    if found is None:
        address.refuse(
            "format must be raw, cloudevents or cloudevents-structured; a parameter of the endpoint that has this name"
            " is written %66ormat"
        )
    if "source" in address.options and name == "raw":
        address.refuse("source belongs to the formats of CloudEvents; one of the endpoint is written %73ource")
    if not _URI_REFERENCE.fullmatch(source):
        address.refuse("source must be a URI, such as /shop or https://shop.example.org")
    return found


def _file(address: Address, option: str) -> Path | None:
    text = address.options.get(option)
    if text is None:
        return None
    if not text.startswith("/") or "\0" in text:
        address.refuse(f"{option} must be the absolute path of a file")
    return Path(text)


def _ca(address: Address) -> Path | None:
    ca = _file(address, "ca")
    if ca is not None and address.scheme != "https":
        address.refuse("ca is for https")
    return ca


def _proxy(address: Address) -> str | None:
    proxy = address.options.get("proxy")
    if proxy is None:
        return None
    try:
        parts = split_url(proxy)
        is_proxy = parts.scheme in ("http", "https") and bool(parts.port) and "," not in parts.netloc
    except (SenderError, ValueError):
        is_proxy = False
    if not is_proxy:
        address.refuse("proxy must be http://host:port or https://host:port")
    return proxy
