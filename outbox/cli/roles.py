"""Options for the roles of processes, with the tasks of each."""

from __future__ import annotations

import functools
from typing import Any

import click

from outbox.cli.options import F, option, together

#: Roles with longer names would be cut, and so be others.
_LONGEST = 63
#: By its option each kind of process, with the options for what else the process does.
_TASKS = {
    "writer": ("dedup", "withdraw", "transactions"),
    "relay": ("purge", "inbox"),
    "front": (),
    "reader": ("register",),
    "dashboard": ("decide",),
}


class _Role(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """The name of a role, as it stands in PostgreSQL's catalogue, without quotes."""

    name = "role"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a name that PostgreSQL would not cut."""
        if not 0 < len(value.encode()) <= _LONGEST:
            self.fail(f"the name of a role has 1 to {_LONGEST} bytes, not {len(value.encode())}", param, ctx)
        return str(value)


def by_roles(function: F) -> F:
    """Give a command the options for roles; hand over each role with its tasks as `roles`."""

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> Any:
        roles: list[tuple[str, tuple[str, ...]]] = []
        for kind, more in _TASKS.items():
            role, chosen = given.pop(kind), tuple(task for task in more if given.pop(task))
            if chosen and role is None:
                raise click.UsageError(f"--{chosen[0]} is a task of the {kind}: give --{kind} ROLE, too")
            if role is not None:
                roles.append((role, (kind, *chosen)))
        return function(*args, roles=roles, **given)

    return together(
        option("--writer", type=_Role(), help="The role of applications, which send."),
        option("--dedup", is_flag=True, help="The writer gives dedup keys."),
        option("--withdraw", is_flag=True, help="The writer takes delayed messages back, or replaces them."),
        option("--transactions", is_flag=True, help="The writer is a TransactionMQProducer."),
        option("--relay", type=_Role(), help="The role of relays, and of consumers over the log."),
        option("--purge", is_flag=True, help="The relay deletes old messages."),
        option("--inbox", is_flag=True, help="The relay is a consumer with an inbox."),
        option("--front", type=_Role(), help="The role of outbox rocketmq serve."),
        option("--reader", type=_Role(), help="The role of Spark, and of outbox extract."),
        option("--register", is_flag=True, help="The reader registers, so that a purge waits for the reader."),
        option("--dashboard", type=_Role(), help="The role of a page or a bot that only looks."),
        option("--decide", is_flag=True, help="The dashboard also decides: replay, discard, pause, verdicts."),
    )(command)  # type: ignore[return-value]
