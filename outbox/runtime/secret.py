"""Secrets in URLs, texts and files: the only notion of a secret, for arguments, errors, logs and plans."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote, unquote_plus

#: Shorter texts are hardly secrets, and would be hidden wherever they happen to stand.
_SHORTEST = 4
#: The path of a file that holds a secret is none itself.
_NAME = re.compile(r"(?i)(password|passwd|pwd|secret|token)(?!.*-file$)")
#: The parameters of a URL, of a connection string of libpq, and of Spark Connect.
_PARAMETER = re.compile(r"(?:^|[?&;\s])([^=?&;\s]+?)\s*=\s*([^&;\s]*)")
#: The begin of the credentials in a URL. `user:password@` is kept, because errors tell people to write that.
_CREDENTIALS = re.compile(r"//(?!user:password@)")
#: Each pattern begins at the begin of a run alone: hostile text must not be searched once for each of its characters.
_RUN = re.compile(r"[^\s'\"]+")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
#: A host of a URL, perhaps with a port.
HOST = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%]+\])(:[0-9]*)?")
_ASSIGNED = re.compile(
    r"(?i)(?<![\w.-])(?=[\w.-]+=)"
    r"([\w.-]*(?:password|passwd|pwd|secret|token)(?![\w.-]*-file\b)[\w.-]*)=[^\s&'\"]*"
)


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret as written in a URL.

    `parameter`: the name of its parameter; empty for a token in place of a parameter; None before the host.
    """

    text: str = field(repr=False)
    parameter: str | None = None

    @property
    def forms(self) -> set[str]:
        """The secret as it is written, decoded, and encoded in the usual ways."""
        plain = {self.text, unquote(self.text), unquote_plus(self.text)}
        return plain | {encoded(each) for each in plain for encoded in (_quoted, quote_plus)}


def is_secret_name(name: str) -> bool:
    """Return whether the value of a parameter with this name is a secret."""
    return bool(_NAME.search(name))


def secrets_of(url: str, *, token: bool = False, options: Collection[str] | None = None) -> list[Secret]:
    """Return the secrets of a URL: its password, and the values of parameters that are secret by their names.

    The URL may be malformed, or a connection string of libpq. Too much is taken for a secret rather than too little.

    Args:
        url: the URL.
        token: whether a user without a password is a secret.
        options: the parameters that are ours. If given, every other parameter is a secret, and so is a password in the
            value of one of ours, which may be a URL.
    """
    _, scheme, rest = url.partition("://")
    userinfo, at, _ = (rest if scheme else url).rpartition("@")
    user, colon, password = userinfo.partition(":")
    found = [Secret(password)] if at and colon else [Secret(user)] if at and token else []
    if options is None:
        found += [Secret(value, name) for name, value in _PARAMETER.findall(url) if is_secret_name(name)]
    else:
        found += _of_query(rest.partition("?")[2], options)
    return [each for each in found if each.text]


def _of_query(query: str, options: Collection[str]) -> Iterator[Secret]:
    for each in query.split("&"):
        name, _, value = each.partition("=")
        if name in options:
            yield from (Secret(inner.text, name) for inner in secrets_of(unquote(value)))
        elif value.strip("="):
            yield Secret(value, name)
        else:
            # A parameter without a value is a token.
            yield Secret(each, "")


def forms_of(secrets: Iterable[Secret]) -> tuple[str, ...]:
    """Return the texts that no output may show, in all forms of the secrets."""
    return tuple(sorted({form for each in secrets for form in each.forms}))


def redacted(url: str) -> str:
    """Return a URL for people. Of a malformed one too little is shown rather than a secret."""
    scheme, separator, rest = url.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        found = _SCHEME.match(url)
        return f"{found[0]}:…" if found and url.startswith(":", found.end()) else "…"
    # A password may hold an unencoded / or ?, so the last @ of the whole text ends the credentials.
    hosts, slash, path = re.split(r"[?#]", rest.rpartition("@")[2])[0].partition("/")
    # Without an @ at all, what stands in the place of a port may be a password.
    shown = ",".join(host if not host or HOST.fullmatch(host) else "…" for host in hosts.split(","))
    return f"{scheme}://{shown}{slash}{path}"


def without(text: str, secrets: Iterable[str]) -> str:
    """Return a text without the secrets, in just the given forms."""
    for each in sorted((each for each in secrets if len(each) >= _SHORTEST), key=len, reverse=True):
        text = text.replace(each, "…")
    return text


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """Return a text without the secrets, and without texts that look like a secret."""
    return _ASSIGNED.sub(r"\1=…", _RUN.sub(_without_credentials, without(text, secrets)))


def _without_credentials(run: re.Match[str]) -> str:
    text, begin = run[0], _CREDENTIALS.search(run[0])
    end = text.rfind("@")
    return text if begin is None or end < begin.end() else f"{text[: begin.end()]}…{text[end:]}"


def secret_text(option: str, file: Path | None, variable: str) -> str | None:
    """Return the text of the file that an option names, or else of a variable of the environment; None without both.

    Raises:
        ValueError: the file cannot be read. The text shows nothing of the contents.
    """
    try:
        return os.environ.get(variable) if file is None else file.read_text()
    except OSError as error:
        raise ValueError(f"{option} {file}: {(error.strerror or 'cannot be read').lower()}") from None
    except UnicodeDecodeError:  # its text would show some bytes of the secret
        raise ValueError(f"{option} {file}: it is no text") from None


def warning_of(file: Path) -> str | None:
    """Return a warning if everybody may read a file with a secret; None if not."""
    try:
        everybody = os.name == "posix" and bool(file.stat().st_mode & stat.S_IROTH)
    except OSError:
        return None
    if not everybody:
        return None
    path = shlex.quote(str(file))
    return f"{file} holds a secret, and everybody on this machine may read it; run: chmod o-r {path}"


def _quoted(text: str) -> str:
    return quote(text, safe="")
