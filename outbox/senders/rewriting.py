"""A destination that gets its messages under other topics, or in an envelope, whoever sends them there."""

from __future__ import annotations

from collections.abc import Mapping

from outbox.senders.envelopes import EnvelopeName
from outbox.senders.form import Form
from outbox.senders.opening import Destination, OpenedSender, open_sender


class RewritingSender(OpenedSender):
    """Sends messages by another sender, each with its id, its key and its place in the order.

    Args:
        destination: a URL, a sender or a function, as `Relay` takes it.
        rename, prefix, envelope: see `outbox.senders.form`.

    Raises:
        SenderError: no topic can be made so, there is no such envelope, or the sender makes events of messages itself.
    """

    def __init__(
        self,
        destination: Destination,
        *,
        rename: Mapping[str, str] | None = None,
        prefix: str | None = None,
        envelope: EnvelopeName = "raw",
    ) -> None:
        form = Form(rename=rename, prefix=prefix, envelope=envelope)
        opened = open_sender(destination)
        super().__init__(opened, opened.destination, form=form)
