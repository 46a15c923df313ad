"""`outbox rocketmq topics` and `outbox rocketmq groups`: topics and consumer groups, which all fronts share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import Target, about_a_database, as_json, option
from outbox.cli.output import say, show_json, show_table, tell

if TYPE_CHECKING:
    from outbox.rocketmq.front.declaring import Declarations

_TYPES = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")
#: A front looks at once for a topic that it does not know, and reads topics and groups again so often.
_AT_ONCE = "running fronts know it at the next call"
_WITHIN = "running fronts know it within 5 s"


@click.group(cls=Group, no_args_is_help=True)
def topics() -> None:
    """List, add and drop the topics of fronts."""


@topics.command("list")
@about_a_database
@as_json
def list_topics(*, target: Target, json: bool) -> None:
    """List the topics with their types."""
    with _declarations(target) as declarations:
        found = declarations.topics()
    if json:
        show_json({"topics": [{"name": name, "type": type_} for name, type_ in found.items()]})
    elif found:
        show_table(("NAME", "TYPE"), found.items())
    else:
        say(f"no topics; to add one, run: {target.commands.line('rocketmq', 'topics', 'add', 'NAME')}")


@topics.command("add")
@about_a_database
@click.argument("name")
@option(
    "--type",
    "type_",
    type=click.Choice(_TYPES),
    default="NORMAL",
    envvar="OUTBOX_ROCKETMQ_TOPICS_ADD_TYPE",
    help="The messages of the topic.",
)
@as_json
def add_topic(*, target: Target, name: str, type_: str, json: bool) -> None:
    """Add a topic; harmless if it is there.

    FIFO: messages with a message group. DELAY: with a delivery time. TRANSACTION: half messages. NORMAL: without any.
    """
    with _declarations(target) as declarations:
        made = declarations.add_topic(name, type_)
    told = f"topic {name} is added, of type {type_}; {_AT_ONCE}" if made else f"topic {name} is there, of type {type_}"
    tell(told, {"topic": {"name": name, "type": type_}, "added": made}, json=json)


@topics.command("drop")
@about_a_database
@click.argument("name")
@as_json
def drop_topic(*, target: Target, name: str, json: bool) -> None:
    """Drop a topic: fronts take no messages for it any more. What is in the log stays.

    Refused while transactions are open. Subscriptions of its consumer groups, and that of its check-back, stay until
    outbox subscriptions drop.
    """
    with _declarations(target) as declarations:
        declarations.drop_topic(name)
    tell(f"topic {name} is dropped; {_WITHIN}", {"dropped": name}, json=json)


@click.group(cls=Group, no_args_is_help=True)
def groups() -> None:
    """List, add and drop consumer groups of fronts that are in order, or have another number of retries."""


@groups.command("list")
@about_a_database
@as_json
def list_groups(*, target: Target, json: bool) -> None:
    """List the groups that were added. A group that was not is out of order, and has 16 retries."""
    with _declarations(target) as declarations:
        found = [
            {"name": each.name, "fifo": each.ordered, "retries": each.attempts - 1}
            for each in declarations.groups().values()
        ]
    if json:
        show_json({"groups": found})
    elif found:
        rows = [(each["name"], "yes" if each["fifo"] else "no", each["retries"]) for each in found]
        show_table(("NAME", "FIFO", "RETRIES"), rows, numbers=("RETRIES",))
    else:
        add = target.commands.line("rocketmq", "groups", "add", "NAME")
        say(f"no groups were added; to add one, run: {add}")
        say(f"groups that receive are listed by: {target.commands.line('subscriptions', 'list')}")


@groups.command("add")
@about_a_database
@click.argument("name")
@option("--fifo", is_flag=True, help="Messages of a message group are received in order.")
@option("--retries", type=click.IntRange(0, 1000), help="The most after the first attempt.  [as before, at first 16]")
@as_json
def add_group(*, target: Target, name: str, fifo: bool, retries: int | None, json: bool) -> None:
    """Add a consumer group, or change it. A group that receives keeps its order.

    A group that was not added is made at its first receive, unless fronts run with --strict-groups.
    """
    with _declarations(target) as declarations:
        group = declarations.add_group(name, ordered=fifo, retries=retries)
    order = "in order" if fifo else "out of order"
    told = f"group {name} receives {order}, with {group.attempts - 1} retries; {_WITHIN}"
    tell(told, {"group": {"name": name, "fifo": fifo, "retries": group.attempts - 1}}, json=json)


@groups.command("drop")
@about_a_database
@click.argument("name")
@as_json
def drop_group(*, target: Target, name: str, json: bool) -> None:
    """Drop what was added of a consumer group. Its positions are subscriptions, and stay.

    Refused while a group in order has subscriptions: outbox subscriptions alter --no-ordered is first.
    """
    with _declarations(target) as declarations:
        declarations.drop_group(name)
    tell(f"group {name} is dropped", {"dropped": name}, json=json)


@contextmanager
def _declarations(target: Target) -> Iterator[Declarations]:
    """Yield the topics and groups of an outbox; what they refuse is a usage error."""
    from outbox.errors import MQClientError
    from outbox.rocketmq.front.declaring import Declarations

    with target.open_outbox() as channel, channel.database.explained():
        try:
            yield Declarations(channel)
        except MQClientError as error:
            raise click.UsageError(str(error)) from None
