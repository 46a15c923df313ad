"""`outbox dashboard`: the dashboard with a server of its own."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.options import NAMES, Target, about_databases, as_value, option
from outbox.cli.output import say, warn
from outbox.cli.probes import Address
from outbox.runtime.signals import stopping_on_signals

if TYPE_CHECKING:
    from outbox.admin.admin import Admin
    from outbox.dashboard.logins import Door, UserFile

#: Open streams would keep a stop waiting.
_STOP_SECONDS = 2


class Network(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """An address or a network: `10.0.0.7`, `10.0.0.0/8`."""

    name = "network"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> IPv4Network | IPv6Network:
        """Return a network."""
        try:
            return value if isinstance(value, IPv4Network | IPv6Network) else ip_network(value)
        except ValueError:
            self.fail(f"{value!r} is no address and no network such as 10.0.0.0/8", param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logins:
    """The options for people: a file of users, or a proxy."""

    user_file: Path | None
    add_user: str | None
    may: tuple[str, ...]
    trust_header: str | None
    trust_from: Sequence[IPv4Network | IPv6Network]

    def users(self) -> UserFile | None:
        """Return the file of users, if there is one."""
        from outbox.dashboard.logins import UserFile

        return None if self.user_file is None else UserFile(self.user_file)

    def add(self) -> None:
        """Ask for the password of a user, and write the user into the file."""
        users, name = self.users(), self.add_user or ""
        if users is None:
            raise click.UsageError("--add-user needs --user-file PATH, where the user is written")
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        with _usage():
            users.add(name, self.may, password)
        say(f"{name} may {', '.join(self.may)}")

    def door(self, title: str) -> Door:
        """Return the way in."""
        from outbox.dashboard.logins import Door, Proxy

        if (self.trust_header is None) != (not self.trust_from):
            raise click.UsageError("--trust-header and --trust-from need each other: anybody could send the header")
        users = self.users()
        with _usage():
            if users is not None:
                users.access("")  # a mistake in the file is told at once
            proxy = None if self.trust_header is None else Proxy(self.trust_header, self.trust_from, self.may)
        return Door(users=users, proxy=proxy, title=title)


@contextmanager
def _usage() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None


@click.command()
@option("--listen", type=Address(), default="127.0.0.1:8025", help="Where to listen; port 0 takes a free port.")
@option("--read-only", is_flag=True, show_default=False, help="Without any decision.")
@option("--user-file", type=click.Path(path_type=Path), metavar="PATH", help="Users with passwords and rights.")
@option("--add-user", metavar="NAME", help="Ask for a password, write the user into the file, and end.")
@option("--may", type=NAMES, default="see", help="Rights of --add-user, or of all users of --trust-header.")
@option("--trust-header", metavar="NAME", help="A header with the user, set by a proxy that logs people in.")
@option("--trust-from", type=Network(), multiple=True, help="Where the proxy is. May be given several times.")
@option("--keys", type=click.Choice(["shown", "hashed"]), default="shown", help="Show the keys of messages, or hide.")
@option("--title", default="Outbox", help="Of all pages.")
@partial(about_databases, unless="add_user")
@as_value("logins", Logins)
def dashboard(
    *, targets: Sequence[Target], listen: tuple[str, int], read_only: bool, logins: Logins, keys: Any, title: str
) -> None:
    """Show findings, parked messages and decisions in a browser, until a signal ends the command.

    Without users the command prints an address that lets a browser in, once, with every right. With --user-file people
    log in by name and password; with --trust-header a proxy in front has done so.
    """
    from outbox.dashboard.logins import behind
    from outbox.dashboard.site import app

    if logins.add_user is not None:
        logins.add()
        return
    door = logins.door(title)
    with _admins(targets) as admins:
        shown = admins if len(admins) > 1 else next(iter(admins.values()))
        inner = app(shown, access=door.access, machines=door.known, read_only=read_only, keys=keys, title=title)
        _serve(behind(door, inner), listen, door)


@contextmanager
def _admins(targets: Sequence[Target]) -> Iterator[Mapping[str, Admin]]:
    """Yield the admins of the databases by a name for addresses."""
    from outbox.admin.admin import Admin
    from outbox.cli.connection import open_database

    with ExitStack() as open:
        found = dict[str, Admin]()
        for each in targets:
            database = open.enter_context(open_database(each.url, each.commands))
            name = re.sub(r"[^\w-]+", "-", database.label).strip("-")
            found[name if name not in found else f"{name}-{len(found)}"] = Admin(database)
        yield found


def _serve(app: Any, listen: tuple[str, int], door: Door) -> None:
    import uvicorn

    host, port = listen
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family)
    except OSError as error:
        raise click.UsageError(
            f"--listen {host}:{port}: {error.strerror}; give an address of this machine and a free port"
        ) from None
    at = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}/"
    if not _is_loopback(host):
        warn("the dashboard speaks plain HTTP: put a proxy with TLS in front, or listen at 127.0.0.1")
    say(f"open {at}{'' if door.one_time is None else f'login?once={door.one_time}'}")
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    server = uvicorn.Server(config)
    # The server handles the signal itself, and sends it on when it has stopped.
    with stopping_on_signals(lambda: None):
        server.run(sockets=[bound])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
