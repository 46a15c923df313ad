"""The order to delete the messages of a person: from the log, and their dead letters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from uuid import UUID

from outbox.admin.commands import carry_out_without_worker
from outbox.model.parking import States
from outbox.store import identity
from outbox.store.database import Channel
from outbox.store.operations.erasure import Erased, Erasure
from outbox.store.subscriptions.decisions import ERASED, forget, note
from outbox.store.subscriptions.parked_messages import ParkedFilter, ParkedMessages
from outbox.store.subscriptions.subscriptions import Subscriptions


def erase(
    channel: Channel,
    *,
    keys: Sequence[str] = (),
    message_ids: Sequence[UUID] = (),
    by: str,
    rehearsal: bool = False,
) -> Erased:
    """Delete the messages with these keys or ids that every subscription has passed, and discard their dead letters.

    A message that a subscription has still to deliver stays, in the log or parked, and so does a dead letter whose
    discard a live worker has still to carry out: call again later. A rehearsal changes nothing.

    Raises:
        SubscriptionError: there is no subscription, so nobody can tell which messages are still needed.
    """
    identity.verify(channel)
    erasure = Erasure(channel, keys=keys, message_ids=message_ids)
    if not rehearsal:
        with channel.transaction():
            # Not whose messages: the decision is kept longer than the messages.
            note(channel, "erase", by=by, choice={"keys": len(keys), "messages": len(message_ids)})
    # A check-back's dead letter is a transaction without a verdict, and nobody but a verdict ends it.
    checks = {each.name for each in Subscriptions(channel).all() if each.kind == "check"}
    dead: dict[str, list[int]] = defaultdict(list)
    for name, id, state in erasure.parked():
        if state == States.DEAD and name not in checks:
            dead[name].append(id)
    letters = sum(map(len, dead.values()))
    if not rehearsal:
        letters = 0
        for name, ids in dead.items():
            chosen = ParkedFilter(ids=tuple(ids), states=(States.DEAD,))
            # Fewer than were found, if a worker has replayed a letter meanwhile.
            write = partial(ParkedMessages(channel, name).decide, chosen, "discard", by, ERASED)
            letters += carry_out_without_worker(channel, name, write)[0]
    waiting: dict[str, set[int]] = defaultdict(set)

    def note_copies() -> None:
        for name, id, _ in erasure.parked():
            if not rehearsal or id not in dead[name]:
                waiting[name].add(id)

    note_copies()
    rows, undecided, repeated = erasure.run(waiting, rehearsal=rehearsal)
    note_copies()  # of messages that a worker has parked meanwhile
    if not rehearsal:
        parked = {id for ids in (*dead.values(), *waiting.values()) for id in ids}
        with channel.transaction():
            forget(channel, keys, message_ids, parked | erasure.found)
    return Erased(
        rows=rows,
        dead_letters=letters,
        waiting={name: len(ids) for name, ids in sorted(waiting.items())},
        undecided=undecided,
        repeated=repeated,
    )
