"""Probes: how a supervisor of processes learns whether a command works. By HTTP, by a file, and by systemd's socket."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.options import as_given, as_value, option, together
from outbox.cli.output import printable, scrubbed
from outbox.runtime.named import named

if TYPE_CHECKING:
    from outbox.admin.results import Look
    from outbox.relay.supervisor import Supervisor

logger = logging.getLogger("outbox")

#: While a command is not ready, systemd is asked to wait for so many microseconds more.
_EXTEND = 60_000_000
#: After so many looks, about one a second, at which a work was stuck, only a new process helps. Looks and no clock,
#: because a process that was suspended has not stood still by itself.
_HOPELESS = 240
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]/\s]+)):(?P<port>\d{1,5})", re.ASCII)
_LAST_PORT = 65_535


class Address(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """An address to listen at: `127.0.0.1:8080`, `[::1]:8080`."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return host and port."""
        if isinstance(value, tuple):
            return value
        found = _ADDRESS.fullmatch(value)
        if found is None or int(found["port"]) > _LAST_PORT:
            form = "write 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080"
            self.fail(f"{value!r} is no address with a port up to {_LAST_PORT}; {form}", param, ctx)
        return found["ipv6"] or found["host"], int(found["port"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """The options for probes."""

    http: tuple[str, int] | None
    heartbeat_file: Path | None

    def require_none(self, beside: str) -> None:
        """Refuse probes of a command that ends by itself."""
        for name in ("http", "heartbeat_file"):
            if getattr(self, name) is not None:
                raise click.UsageError(f"{as_given(name)} and {beside} exclude each other: nobody watches a short run")


probed = together(
    option(
        "--http",
        type=Address(),
        metavar="HOST:PORT",
        help="Answer /livez, /readyz, /metrics and /status there.",
    ),
    option(
        "--heartbeat-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="PATH",
        help="Touch this file every second while the command is alive.",
    ),
    as_value("probes", Probes),
)


def run_probed(supervisor: Supervisor, probes: Probes, looks: Mapping[str, Callable[[], Look]]) -> bool:
    """Run works until stopped, as `Supervisor.run` does, and answer probes meanwhile.

    `looks`: at the databases of the works, by label. Return False if a stuck work was given up, for which all were
    stopped.
    """
    from outbox.admin.gauges import Looks
    from outbox.runtime.signals import stopping_on_signals
    from outbox.telemetry.events import EVERYWHERE

    pulse = Pulse(supervisor, probes.heartbeat_file, os.environ)
    seen = Looks(looks)
    if "opentelemetry.trace" in sys.modules:
        # By opentelemetry-instrument, or by the module of a consumer.
        from outbox.telemetry.opentelemetry import export

        export(seen.samples)
    with ExitStack() as open:
        EVERYWHERE.listen(supervisor.told)
        open.callback(EVERYWHERE.unlisten, supervisor.told)
        if probes.http is not None:
            from outbox.cli.http import serving

            open.enter_context(serving(*probes.http, supervisor, seen))
        open.enter_context(stopping_on_signals(supervisor.stop))
        for _ in supervisor.running():
            pulse.beat()
            if pulse.hopeless:
                supervisor.stop()
    return not pulse.hopeless


class Pulse:
    """Shows that a supervisor lives: touches a file, and tells systemd; the log says which work is stuck."""

    def __init__(self, supervisor: Supervisor, file: Path | None, environment: Mapping[str, str]) -> None:
        self._supervisor = supervisor
        self._file = file
        address = environment.get("NOTIFY_SOCKET", "")
        # A name that begins with @ is no file.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._ready = False
        self._stuck = frozenset[str]()
        #: At how many looks in a row a work was stuck, by its name.
        self._looks: Mapping[str, int] = {}
        #: True once a work has been stuck for so long that it is given up.
        self.hopeless = False
        self._touch()

    def beat(self) -> None:
        """Touch the file and feed systemd's watchdog, unless a work is stuck; tell systemd when all work."""
        from outbox.relay.supervisor import STUCK_SECONDS

        health = self._supervisor.health
        if all(each.ended for each in health):
            # The command ends with the reason.
            return
        before, self._stuck = self._stuck, frozenset(each.name for each in health if each.stuck)
        ended = {each.name: each.trouble for each in health if each.ended}
        for name in sorted(self._stuck - before):
            about = named("stuck", work=name, seconds=STUCK_SECONDS)
            if name in ended:
                logger.error("%s has ended: %s; start the process again", name, ended[name], extra=about)
            else:
                text = "%s is stuck: its thread has shown no sign of life for %g s; start the process again"
                logger.error(text, name, STUCK_SECONDS, extra=about)
        for name in sorted(before - self._stuck):
            logger.info("%s goes on", name, extra=named("goes_on", work=name))
        self._give_up()
        if self._stuck:
            return
        if self._file is not None:
            # A file that is not touched is what its reader looks for.
            with suppress(OSError):
                self._file.touch()
        if self._address:
            troubles = [f"{each.name}: {each.trouble}" for each in health if each.trouble is not None]
            self._ready = self._ready or not troubles
            state = "READY=1" if self._ready else f"EXTEND_TIMEOUT_USEC={_EXTEND}"
            status = printable(scrubbed("; ".join(troubles) or "working, or standing by"))
            self._notify(f"{state}\nWATCHDOG=1\nSTATUS={status}")

    def _give_up(self) -> None:
        """Count the looks; say once that a work is given up."""
        self._looks = {name: self._looks.get(name, 0) + 1 for name in self._stuck}
        given_up = [name for name, looks in sorted(self._looks.items()) if looks > _HOPELESS]
        if given_up and not self.hopeless:
            self.hopeless = True
            text = "%s is still stuck and is given up: this process stops, and ends with code 4"
            logger.error(text, ", ".join(given_up), extra=named("given_up", works=given_up))

    def _notify(self, text: str) -> None:
        """Send a datagram to systemd; lost if nobody reads."""
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.setblocking(False)
            notify.sendto(text.encode(), self._address)

    def _touch(self) -> None:
        if self._file is not None:
            try:
                self._file.touch()
            except OSError as error:
                fix = "make the folder, and let the user of this process write there"
                raise click.UsageError(f"--heartbeat-file {self._file}: {error.strerror}; {fix}") from None
