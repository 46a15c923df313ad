"""The names of subscriptions that clients of RocketMQ's protocol receive by."""

from __future__ import annotations

from urllib.parse import quote


def subscription_name(group: str, topic: str) -> str:
    """Return the name of the subscription of a consumer group to a topic; each has a position of its own.

    Groups and topics may have a `|`, so that of a group is written as in a URL: no two pairs have one name.
    """
    return f"{quote(group, safe='')}|{topic}"
