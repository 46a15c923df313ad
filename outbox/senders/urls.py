"""URLs of destinations, taken apart."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from outbox.errors import SenderError
from outbox.runtime.secret import HOST, redacted

_HOST_AND_PORT = re.compile(r"(localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+):[0-9]{2,5}")
#: What others call the schemes of our senders.
_OTHER_SCHEMES = {
    "postgres": "postgresql",
    "postgresql+psycopg": "postgresql",
    "rabbitmq": "amqp",
    "rabbitmqs": "amqps",
    "valkey": "redis",
    "valkeys": "rediss",
}
#: The option that names a destination, whatever its hosts are.
NAME_OPTION = "as"
#: The options that decide where messages go, by scheme; each with the values that mean the same as no option.
_PLACING: dict[str, dict[str, tuple[str, ...]]] = {
    "amqp": {"exchange": ("",)},
    "amqps": {"exchange": ("",)},
    "sqs": {"endpoint": ("",), "fifo": ("", "0")},
    "sns": {"endpoint": ("",), "fifo": ("", "0")},
    "postgresql": {"schema": ("",)},
}
_LONGEST_NAME = 255


def destination_of_url(url: str) -> str:
    """Return a URL as a subscription stores it, without credentials.

    The URL keeps scheme, hosts (sorted), path, the options that decide where messages go, and the option `as`.
    """
    parts = split_url(url)
    placing, given = _PLACING.get(parts.scheme, {}), dict(parse_qsl(parts.query))
    kept = [(name, given[name]) for name, default in placing.items() if given.get(name, default[0]) not in default]
    name = _name_of(url, parts)
    kept += [] if name is None else [(NAME_OPTION, name)]
    # The value of an endpoint is a URL, too.
    shown = ((each, redacted(value) if "://" in value else value) for each, value in kept)
    option = "?" + "&".join(f"{each}={quote(value, safe='')}" for each, value in shown) if kept else ""
    hosts = ",".join(sorted(parts.netloc.rpartition("@")[2].lower().split(",")))
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{hosts}{path}{option}" if "://" in url else f"{parts.scheme}:{path}{option}"


def _name_of(url: str, parts: SplitResult) -> str | None:
    """Return the value of the option `as`, if the URL has one."""
    given = [each for each in parts.query.split("&") if each.partition("=")[0] == NAME_OPTION]
    if not given:
        return None
    name = dict(parse_qsl(given[0], keep_blank_values=True)).get(NAME_OPTION, "")
    if not (name.isprintable() and 1 <= len(name) <= _LONGEST_NAME):
        raise SenderError(f"{redacted(url)}: as must be 1 to {_LONGEST_NAME} printable characters")
    return name


def split_url(url: str) -> SplitResult:
    """Return the parts of a URL; refuse a malformed URL, and an @ outside of the credentials."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise SenderError(f"{redacted(url)} is not a URL") from None  # the cause quotes the credentials
    if not parts.scheme:
        text = "a destination is a URL with a scheme, such as nats://localhost:4222 or stdout:"
        raise SenderError(f"{text}{perhaps_meant(url)}")
    credentials, _, hosts = parts.netloc.rpartition("@")
    if "@" in credentials + parts.path + parts.query + parts.fragment:
        fix = "only one @ may stand in it, before the first host; percent-encode @ / ? and # in a password or a path"
        raise SenderError(f"{redacted(url)}: {fix}")
    if hosts and not all(HOST.fullmatch(host) for host in hosts.split(",")):
        raise SenderError(f"{redacted(url)}: the hosts are malformed; write host:port,host:port")
    return parts


def perhaps_meant(url: str) -> str:
    """Return a hint for a URL with a foreign scheme, or without any; else an empty text."""
    scheme = url.partition("://")[0]
    if scheme in _OTHER_SCHEMES:
        return f"; did you mean {_OTHER_SCHEMES[scheme]}://?"
    return f"; did you mean nats://{url}?" if _HOST_AND_PORT.fullmatch(url) else ""
