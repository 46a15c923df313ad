"""Decisions in two steps: a rehearsal tells the consequences, and a confirmation carries the decision out, once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from outbox.dashboard import filters
from outbox.dashboard.access import RefusedError
from outbox.dashboard.filters import BadAddressError, Chosen
from outbox.dashboard.seen import Seen
from outbox.dashboard.visit import Page, Visit
from outbox.errors import SubscriptionError
from outbox.model.subscription import check_of
from outbox.runtime.text import counted

#: The right that each verb needs.
RIGHTS = {
    "replay": "replay",
    "discard": "discard",
    "pause": "pause",
    "resume": "pause",
    "commit": "decide",
    "rollback": "decide",
    "ask": "decide",
}
#: A decision on more messages is confirmed by typing their number.
MOST_UNTYPED = 100
#: At most so many messages are selected by hand.
_MOST_SELECTED = filters.PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A decision as in a form.

    Attributes:
        verb: one of `RIGHTS`; `ask`: have producers be asked again about a transaction that was given up.
        name: of the subscription; of messages None: all subscriptions.
        ids: the chosen messages, by subscription; empty: all of the choice.
        choice: as in the address of a list.
        rate: messages a second that a paused subscription hands over; None: none.
        transaction: of half messages.
        back: the page where the decision began.
    """

    verb: str
    name: str | None = None
    ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    choice: Mapping[str, str] = field(default_factory=dict)
    rate: float | None = None
    transaction: str | None = None
    back: str = ""

    @property
    def is_about_messages(self) -> bool:
        """Whether parked messages are decided on."""
        return self.verb in ("replay", "discard")

    def key(self, seen: Seen) -> str | None:
        """Return the key of a pause; a hidden key is found by the message `of`."""
        of = self.choice.get("of")
        return self.choice.get("key") if of is None else seen.trace(int(of)).key


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The consequences of an order.

    Attributes:
        number: of messages; None: the order is about none.
        state: compared again at the confirmation.
        facts: the consequences in sentences.
        workers: the processes to carry the decision out; empty: the dashboard does, at once.
    """

    number: int | None
    state: Any
    facts: Sequence[str]
    workers: Sequence[str] = ()


def order_of(visit: Visit) -> Order:
    """Return the order of a form, within the visitor's rights."""
    verb = visit.field("verb")
    if verb not in RIGHTS:
        raise BadAddressError(f"verb must be one of {', '.join(RIGHTS)}")
    require_right(visit, verb)
    given = {name: values[0] for name, values in visit.form.items()}
    chosen, transaction = Chosen.of(given), filters.text(given, "transaction")
    if verb in ("commit", "rollback", "ask"):
        if transaction is None:
            raise BadAddressError("transaction is missing")
        return Order(verb=verb, transaction=transaction, back=visit.field("back"))
    ids = _ids(visit.form.get("id", []), chosen.name) if verb in ("replay", "discard") else {}
    if verb in ("replay", "discard") and bool(ids) == bool(given.get("all")):
        raise BadAddressError("select messages, or all of the choice")
    if verb in ("pause", "resume") and chosen.name is None:
        raise BadAddressError("name is missing")
    for name in ids or [visit.seen.meant(chosen).name]:
        visit.seen.require(name)
    name = None if ids else visit.seen.meant(chosen).name
    choice = {} if ids else {key: value for key, value in chosen.query.items() if key != "name"}
    rate = _rate(filters.text(given, "rate")) if verb == "pause" else None
    if verb in ("pause", "resume") and (of := filters.text(given, "of")) is not None:
        choice["of"] = str(visit.seen.trace(filters.message_id(of)).id)
    return Order(verb=verb, name=name, ids=ids, choice=choice, rate=rate, back=visit.field("back"))


def require_right(visit: Visit, verb: str) -> None:
    """Raise unless the visitor may give orders of a verb.

    Raises:
        RefusedError: the right is missing.
    """
    right = RIGHTS[verb]
    if not visit.may(right):
        raise RefusedError(f"{visit.user} has not the right {right}; the dashboard's access function gives rights")


def _ids(values: Sequence[str], name: str | None) -> dict[str, list[int]]:
    """Return selected messages by subscription; each value is an id, with the subscription behind a blank."""
    if len(values) > _MOST_SELECTED:
        raise BadAddressError(f"at most {_MOST_SELECTED} messages can be selected")
    found = defaultdict[str, list[int]](list)
    for value in values:
        id, _, of = (filters.text({"id": value}, "id") or "").partition(" ")
        number, subscription = filters.message_id(id), of or name
        if not isinstance(number, int) or subscription is None:
            raise BadAddressError("id must be a number of the log and a subscription")
        found[subscription].append(number)
    return dict(found)


def _rate(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise BadAddressError("rate must be a number of messages a second, above 0")
    return rate


def decide(visit: Visit) -> Page:
    """The first step: tell the consequences, and ask."""
    return asked(visit, order_of(visit), reason=visit.field("reason"))


def asked(visit: Visit, order: Order, *, reason: str = "", notice: str | None = None, error: str | None = None) -> Page:
    """Return the page of a rehearsal."""
    rehearsal = rehearse(visit.seen, order)
    if rehearsal.number == 0:
        return Page("nothing.html", {"order": order}, 409)
    values = {
        "order": order,
        "rehearsal": rehearsal,
        "token": visit.seen.tokens.of_rehearsal(
            visit.user, {"order": asdict(order), "state": rehearsal.state, "database": visit.database}
        ),
        "reason": reason,
        "needs_number": (rehearsal.number or 0) > MOST_UNTYPED,
        "notice": notice,
        "error": error,
    }
    return Page("rehearsal.html", values, 200 if error is None and notice is None else 409)


def confirm(visit: Visit) -> Page:
    """The second step: carry a rehearsed order out, if the consequences are still the same."""
    token, reason = visit.field("token"), visit.field("reason").strip()
    rehearsed = visit.seen.tokens.rehearsed(token, visit.user)
    order = Order(**rehearsed["order"])
    require_right(visit, order.verb)
    if rehearsed["database"] != visit.database:
        raise BadAddressError("the decision was prepared for another database")
    for name in [order.name, *order.ids] if order.transaction is None else []:
        if name is not None:
            visit.seen.require(name)
    rehearsal = rehearse(visit.seen, order)
    if rehearsal.state != rehearsed["state"]:
        return asked(visit, order, reason=reason, notice="The messages have changed meanwhile. Look again.")
    if order.verb == "discard" and not reason:
        return asked(visit, order, error="A discard needs a reason.")
    if (rehearsal.number or 0) > MOST_UNTYPED and visit.field("typed").strip() != str(rehearsal.number):
        return asked(visit, order, reason=reason, error=f"Type the number of messages, {rehearsal.number}.")
    visit.seen.tokens.use(token)
    return Page("done.html", {"order": order, "facts": _carried_out(visit.seen, order, reason or None)})


def rehearse(seen: Seen, order: Order) -> Rehearsal:
    """Return the consequences of an order."""
    if order.is_about_messages:
        return _rehearsed_messages(seen, order)
    if order.transaction is not None:
        return _rehearsed_transaction(seen, order)
    return _rehearsed_pause(seen, order)


def _rehearsed_messages(seen: Seen, order: Order) -> Rehearsal:
    decided = [each for decide in _calls(seen, order) for each in decide(rehearsal=True)]
    number = sum(each.messages for each in decided)
    workers = sorted({worker.name for each in decided for worker in seen.admin.workers(each.name) if worker.partitions})
    facts = [f"{each.name}: {counted(each.messages, 'message')}" for each in decided]
    if behind := sum(each.behind for each in decided):
        facts.append(f"{counted(behind, 'message', ('goes', 'go'))} on behind them.")
    return Rehearsal(
        number=number, state=[[each.name, each.messages] for each in decided], facts=facts, workers=workers
    )


def _calls(seen: Seen, order: Order) -> list[Any]:
    """Return the calls of `outbox.admin` for an order on messages, by subscription."""
    admin = seen.admin
    call: Callable[..., Any] = admin.replay if order.verb == "replay" else partial(admin.discard, reason="")
    if order.ids:
        return [partial(call, *ids, name=name) for name, ids in order.ids.items()]
    return [partial(call, all=True, **seen.choice(replace(Chosen.of(order.choice), name=order.name)))]


def _rehearsed_transaction(seen: Seen, order: Order) -> Rehearsal:
    found = seen.half_transaction(str(order.transaction))
    if order.verb == "ask":
        facts = ["The producers are asked again, with questions counted from 0."]
    else:
        messages = counted(len(found.messages), "message", ("is", "are"))
        become = "delivered" if order.verb == "commit" else "dropped"
        facts = [f"{messages} {become}. The first verdict stands for ever."]
    if found.op is not None:
        facts.append(f"The verdict {found.op} stands already.")
    given_up = found.transaction is not None and found.transaction.given_up
    return Rehearsal(number=None, state=[found.op, given_up, len(found.messages)], facts=facts)


def _rehearsed_pause(seen: Seen, order: Order) -> Rehearsal:
    statuses, key = seen.admin.statuses(order.name), order.key(seen)
    pauses = [each for status in statuses for each in status.pauses if each.key == key]
    facts = [f"{each.name}: {counted(each.unsent, 'message', ('waits', 'wait'))} now." for each in statuses]
    facts += [f"Now {seen.without_key(each.in_words(), key)}." for each in pauses]
    if order.verb == "pause" and key is not None:
        facts.append("The messages of the key are held back; all others go on.")
    elif order.verb == "pause" and order.rate is None:
        facts.append("No message is handed over until somebody resumes.")
    elif order.verb == "pause":
        facts.append(f"At most {order.rate:g} messages a second are handed over.")
    return Rehearsal(number=None, state=[[each.since.isoformat(), each.by] for each in pauses], facts=facts)


def _carried_out(seen: Seen, order: Order, reason: str | None) -> list[str]:
    """Carry out an order; return the results in sentences."""
    admin, by = seen.admin, seen.access.user
    if order.is_about_messages:
        decided = [each for decide in _calls(seen, order) for each in decide(reason=reason, by=by)]
        return [_done(each) for each in decided]
    if order.verb == "pause":
        admin.pause(str(order.name), key=order.key(seen), rate=order.rate, reason=reason, by=by)
        return [f"{order.name} is {'slowed down' if order.rate else 'paused'}; all workers follow within a poll."]
    if order.verb == "resume":
        key = order.key(seen)
        try:
            admin.resume(str(order.name), key=key, by=by)
        except SubscriptionError as error:
            raise SubscriptionError(seen.without_key(str(error), key)) from error
        return [f"{order.name} goes on."]
    id = str(order.transaction)
    if order.verb == "ask":
        resumed = admin.half_resume(id, by=by, reason=reason)
        return [f"The producers of {check_of(resumed.group)} are asked again about transaction {id}."]
    verdict = (admin.half_commit if order.verb == "commit" else admin.half_rollback)(id, by=by)
    changed = "" if verdict.is_new else ", as before; nothing changed"
    return [f"Transaction {id}: {verdict.op} by {verdict.decided_by}{changed}."]


def _done(decided: Any) -> str:
    said = f"{decided.name}: {counted(decided.messages, 'message')}"
    if decided.worker is not None:
        return f"{said}; worker {decided.worker} carries the decision out."
    return f"{said}; carried out."
