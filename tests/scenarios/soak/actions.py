"""What the actions of a plan do to the world."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from tests.scenarios.soak.plan import PARTITIONS, Action
from tests.scenarios.soak.world import World, noted
from tests.support.pausing import paused
from tests.support.servers.postgresql import backend_pids, postmaster_pid
from tests.support.supervised import Supervised
from tests.support.waiting import eventually

#: Seconds for what has to happen in the end, on a machine that is busy.
_PATIENCE = 300.0
#: Seconds for a relay that is to die at its worst moment; one that stands by never comes to that moment.
_WORST_PATIENCE = 5.0
_DISCARDED = 2
_DEAD = "SELECT subscription, id, convert_from(body, 'UTF8') FROM outbox_parked WHERE state = 'dead' ORDER BY id"


class Actions:
    """Does what a plan says."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: The messages that a person gave up.
        self.discarded: set[str] = set()
        self._altered = 0
        self._kinds: dict[tuple[str, str], Callable[[Action], None]] = {
            ("relays", "kill"): self._kill_relay,
            ("relays", "worst"): self._kill_at_worst,
            ("relays", "stop"): self._stop_relay,
            ("relays", "end"): lambda action: self._end(world.relays[action.number]),
            ("writers", "kill"): lambda action: world.writers[action.number].send(signal.SIGKILL),
            ("writers", "stop"): self._stop_writer,
            ("postgresql", "fast"): lambda _: self._restart(world.postgresql.stop),
            ("postgresql", "immediate"): lambda _: self._restart(self._end_at_once),
            ("postgresql", "backend"): self._kill_backend,
            ("postgresql", "stop"): self._stop_postgresql,
            ("commands", "purge"): lambda _: self._command("purge", "--older-than", "2s"),
            ("commands", "grace"): self._alter,
            ("commands", "dead"): self._dead,
            ("commands", "partitions"): lambda action: self._repartition(action.number),
            ("commands", "split"): self._split,
            ("commands", "move"): self._move,
        }
        for lane in ("nats", "kafka"):
            self._kinds |= {
                (lane, "kill"): self._outage(self._kill_destination),
                (lane, "stop"): self._outage(self._stop_destination),
                (lane, "refuse"): self._outage(self._refuse),
                (lane, "silence"): self._outage(self._silence),
                (lane, "cut"): self._outage(lambda action: world.proxies[action.lane].cut_after(0, "to_client")),
            }

    def do(self, action: Action) -> None:
        """Do it, and undo it when its time is over."""
        self._kinds[action.lane, action.kind](action)

    def begin(self) -> None:
        """Give every subscription its partitions, when relays have declared them all."""
        assert eventually(lambda: len(self._subscriptions()) == len(self._world.routes), _PATIENCE)
        for name in self._subscriptions():
            self._command("subscriptions", "alter", name, "--partitions", str(PARTITIONS))

    def replay(self) -> None:
        """Have all dead letters sent again."""
        self._command("parked", "replay", "--all", "--yes")

    # Relays and writers

    def _kill_relay(self, action: Action) -> None:
        relay = self._world.relays[action.number]
        with noted(self._world.troubles), _another_comes(relay):
            relay.send(signal.SIGKILL)

    def _kill_at_worst(self, action: Action) -> None:
        relay = self._world.relays[action.number]
        with noted(self._world.troubles), _another_comes(relay):
            pid = relay.pid
            relay.send(signal.SIGUSR1)
            if not eventually(lambda: relay.pid != pid, _WORST_PATIENCE):
                relay.send(signal.SIGKILL)

    def _stop_relay(self, action: Action) -> None:
        with noted(self._world.troubles):
            _stop(self._world.relays[action.number], action.seconds)

    def _stop_writer(self, action: Action) -> None:
        _stop(self._world.writers[action.number], action.seconds)

    def _end(self, relay: Supervised) -> None:
        """End a relay as a deployment does; it excuses nothing."""
        with _another_comes(relay):
            relay.send(signal.SIGTERM)

    # PostgreSQL

    def _restart(self, end: Callable[[], None]) -> None:
        with noted(self._world.troubles):
            end()
            self._world.postgresql.start()

    def _end_at_once(self) -> None:
        server = self._world.postgresql
        os.kill(postmaster_pid(server), signal.SIGQUIT)
        server.stop()

    def _kill_backend(self, _action: Action) -> None:
        """The server takes it for a crash, ends all others and recovers."""
        with noted(self._world.troubles):
            found = backend_pids(self._world.postgresql, "shop")
            if found:
                with suppress(ProcessLookupError):  # it has ended by itself meanwhile
                    os.kill(random.choice(found), signal.SIGKILL)
                self._world.rows_at_last("SELECT 1")

    def _stop_postgresql(self, action: Action) -> None:
        with noted(self._world.troubles), paused(self._world.postgresql):
            time.sleep(action.seconds)

    # Destinations

    def _outage(self, act: Callable[[Action], None]) -> Callable[[Action], None]:
        def noting(action: Action) -> None:
            with noted(self._world.outages):
                act(action)

        return noting

    def _kill_destination(self, action: Action) -> None:
        server = self._world.destinations[action.lane].server
        server.kill()
        time.sleep(action.seconds)
        server.start()

    def _stop_destination(self, action: Action) -> None:
        with paused(self._world.destinations[action.lane].server):
            time.sleep(action.seconds)

    def _refuse(self, action: Action) -> None:
        self._world.proxies[action.lane].refuse()
        self._pass_through(action)

    def _silence(self, action: Action) -> None:
        self._world.proxies[action.lane].black_hole()
        self._pass_through(action)

    def _pass_through(self, action: Action) -> None:
        time.sleep(action.seconds)
        self._world.proxies[action.lane].pass_through()

    # Commands

    def _command(self, *arguments: str, is_done: Callable[[], bool] = bool) -> None:
        """`is_done` tells whether a command that failed has done its work all the same."""
        self._world.command(*arguments, is_done=is_done, until=time.monotonic() + _PATIENCE)

    def _repartition(self, number: int) -> None:
        """Each subscription gets another number in its turn."""
        names = self._subscriptions()
        name = names[self._altered % len(names)]
        self._altered += 1
        self._command("subscriptions", "alter", name, "--partitions", str(number))

    def _alter(self, action: Action) -> None:
        self._command("subscriptions", "alter", "relay", "--grace", "0.5s" if action.number else "0s")

    def _dead(self, action: Action) -> None:
        self._world.refusing.touch()
        time.sleep(action.seconds)
        self._world.refusing.unlink()
        self._discard()
        self.replay()

    def _discard(self) -> None:
        for subscription, id, name in self._dead_letters()[:_DISCARDED]:
            # Noted before, because a command whose answer is lost may have done its work.
            self.discarded.add(name)
            chosen = (id, "--name", subscription, "--reason", "soak", "--yes")
            self._command("parked", "discard", *chosen, is_done=partial(self._is_gone, id))

    def _is_gone(self, id: str) -> bool:
        return id not in {each for _, each, _ in self._dead_letters()}

    def _dead_letters(self) -> list[tuple[str, str, str]]:
        rows = self._world.rows_at_last(_DEAD)
        return [(str(subscription), str(id), str(name)) for subscription, id, name in rows]

    def _split(self, action: Action) -> None:
        routes = {"mails": "kafka", **self._world.routes}
        to = self._world.url_of("kafka")
        command = ("subscriptions", "split", "relay", "--topics", "mails", "--to", to)
        self._deploy(action, routes, lambda: self._command(*command, is_done=self._is_split))

    def _is_split(self) -> bool:
        return "relay:mails" in self._subscriptions()

    def _subscriptions(self) -> list[str]:
        rows = self._world.rows_at_last("SELECT name FROM outbox_subscription ORDER BY name")
        return [str(name) for (name,) in rows]

    def _move(self, action: Action) -> None:
        to = "nats" if self._world.routes["stock"] == "kafka" else "kafka"
        command = ("subscriptions", "alter", "relay:stock", "--to", self._world.url_of(to))
        self._deploy(action, {**self._world.routes, "stock": to}, lambda: self._command(*command))

    def _deploy(self, action: Action, routes: dict[str, str], command: Callable[[], object]) -> None:
        """Restart the relays with other routes, after the command or before it."""
        steps = [command, lambda: self._restart_relays(routes)]
        for step in reversed(steps) if action.number else steps:
            step()

    def _restart_relays(self, routes: dict[str, str]) -> None:
        self._world.routes = routes
        self._world.write_routes()
        with ExitStack() as ending:
            for relay in self._world.relays:
                ending.enter_context(_another_comes(relay))
                relay.send(signal.SIGTERM)


@contextmanager
def _another_comes(process: Supervised) -> Iterator[None]:
    """Wait until the process that runs now has ended, and another one runs in its place."""
    pid = process.pid
    yield
    assert eventually(lambda: process.pid != pid, _PATIENCE), f"process {pid} does not end"


def _stop(process: Supervised, seconds: float) -> None:
    process.send(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        process.send(signal.SIGCONT)
