"""The pages: each page asks `outbox.admin`, and names a template."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from outbox.admin.results import Finding, HeldKey, Kind
from outbox.dashboard import filters
from outbox.dashboard.access import NotSeenError
from outbox.dashboard.bodies import shown
from outbox.dashboard.filters import PAGE, BadAddressError, Chosen
from outbox.dashboard.numbers import Answer
from outbox.dashboard.pictures import sparkline, timeline
from outbox.dashboard.visit import Page, Visit
from outbox.model.parking import STATES, States
from outbox.model.status import INFLIGHT, History, TroubleStatus
from outbox.model.subscription import Reader, check_of

#: The live sections of the overview.
SECTIONS = ("findings", "subscriptions", "log", "workers")
#: What parked messages are counted by.
_COUNTED = (*STATES, INFLIGHT)
#: So many held keys of a subscription are shown.
_TOP = 10
#: The page about a finding: the words that lead there, the path, and parameters beside the subscription.
_PLACES: Mapping[Kind, tuple[str, str, Mapping[str, object]]] = {
    "waiting": ("See the messages", "parked", {"state": States.WAITING}),
    "failing": ("See the messages", "parked", {"state": States.RETRY}),
    "dead": ("See the messages", "parked", {"state": States.DEAD}),
    "behind_head": ("See the messages", "parked", {"state": States.BEHIND}),
    "undone": ("See the decisions", "decisions", {}),
}


def overview(visit: Visit) -> Page:
    """Findings first, then subscriptions, log and workers."""
    values = numbers(visit, visit.numbers.ask(visit.seen.admin))
    return Page("overview.html", values | {"stale": None}, live=True)


def last_overview(visit: Visit, error: Page) -> Page:
    """Return the last overview with an error, or the error alone."""
    if visit.numbers.last is None or error.status not in (503, 504):
        return error
    values = numbers(visit, visit.numbers.last)
    return Page("overview.html", values | {"stale": error.values["text"]}, error.status, live=True)


def numbers(visit: Visit, given: Answer) -> dict[str, Any]:
    """Return the values of the live sections of the overview."""
    answer = given.of(visit.seen.access)
    return {
        "look": answer.look,
        "lags": {
            name: sparkline(points, title=f"Lag of {name} in the log", unit="s") for name, points in answer.lags.items()
        },
        "findings": [(each, _offers(visit, each), _place_of(each)) for each in answer.look.findings],
        "workers": answer.workers,
        "states": STATES,
        "counted": _COUNTED,
        "purge": visit.seen.admin.commands.line("purge", "--older-than", "7d"),
    }


def _place_of(finding: Finding) -> tuple[str, str, Mapping[str, object]] | None:
    """Return the page about a finding: words, path and parameters; None: the page of the subscription tells all."""
    name = finding.subscription
    if finding.kind == "given_up" and name is not None:
        return "See the transactions", "half", {"group": name.removeprefix(check_of("")), "given_up": 1}
    place = _PLACES.get(finding.kind)
    return place and (place[0], place[1], {"name": name, **place[2]})


def _offers(visit: Visit, finding: Finding) -> list[tuple[str, dict[str, object]]]:
    """Return the decisions of a finding within the visitor's rights: the verb, and the fields of a form."""
    offers = list[tuple[str, dict[str, object]]]()
    for each in finding.decisions:
        fields = {name: "1" if value is True else value for name, value in each.arguments.items()}
        if visit.may(each.verb):
            offers.append((each.verb, fields))
    return offers


def subscription(visit: Visit) -> Page:
    """A subscription: properties, partitions, history, dead letters by error, held keys."""
    name, hours = visit.part("name"), filters.hours(visit.query)
    visit.seen.require(name)
    admin = visit.seen.admin
    statuses = admin.statuses(name)
    details = {each.name: each for each in admin.subscriptions()}
    history = admin.history(statuses[0].name, since=timedelta(hours=hours), step=filters.STEPS[hours])
    is_check = statuses[0].kind == "check"
    dead = None if is_check else visit.seen.parked_count(Chosen(name=name, state=States.DEAD))
    values = {
        "name": name,
        "statuses": [(each, details.get(each.name)) for each in statuses],
        "hours": hours,
        "choices": list(filters.STEPS),
        "pictures": pictures(history, hours),
        "dead": dead,
        "groups": [] if dead is None else [(each, _share(each, dead.messages)) for each in dead.errors],
        "held": [] if is_check else admin.held(top=_TOP, name=name),
        "seen": visit.seen,
        "states": STATES,
        "counted": _COUNTED,
        "can_pause": _can_pause(statuses[0]),
        "commands": _commands_of(visit, name, statuses[0].kind),
    }
    return Page("subscription.html", values)


def pictures(history: History, hours: int) -> dict[str, Any]:
    """Return the pictures of a history, by subject."""
    over = "the last hour" if hours == 1 else f"the last {hours} hours"
    steps = history.steps
    return {
        "lag": sparkline(
            [(each.at, each.lag_seconds) for each in steps], title=f"Lag in the log over {over}", unit="s"
        ),
        "throughput": sparkline([(each.at, each.per_second) for each in steps], title=f"Messages a second over {over}"),
        "parked": sparkline(
            [(each.at, float(sum(each.parked.values()))) for each in steps],
            title=f"Messages parked now that were parked by then, over {over}",
        ),
    }


def _share(trouble: TroubleStatus, total: int) -> int:
    return round(100 * trouble.messages / total) if total else 0


def _can_pause(reader: Reader) -> bool:
    """Return whether a person can pause a subscription by its name: an extract is started later instead."""
    return reader.kind != "extract" and reader.follows is None


def _commands_of(visit: Visit, name: str, kind: str) -> list[str]:
    """Return the commands for orders without a button."""
    commands = visit.seen.admin.commands
    alter, reset = [("alter", name), ("alter", name, "--partitions", "N")], ("reset", name, "--to", "latest")
    verbs = [("drop", name)] if kind == "check" else [*alter, reset, ("drop", name)]
    return [commands.line("subscriptions", *words) for words in verbs]


def parked(visit: Visit) -> Page:
    """Parked messages of a choice, with number and errors."""
    seen = visit.seen
    chosen = seen.meant(Chosen.of(visit.query))
    found, is_more = seen.parked(chosen, filters.after(visit.query))
    count = seen.parked_count(chosen)
    last = found[-1] if found and is_more else None
    values = {
        "chosen": chosen,
        "found": found,
        "count": count,
        "groups": [(each, _share(each, count.messages)) for each in count.errors],
        "next": None if last is None else f"{last.id} {last.subscription}",
        "names": seen.names(),
        "states": STATES,
        # Transactions that were given up wait for a verdict, and are neither replayed nor discarded.
        "check": check_of(""),
        "seen": seen,
        "size": PAGE,
    }
    return Page("parked.html", values)


def message(visit: Visit) -> Page:
    """A message: fields, headers, and the way through each subscription."""
    seen = visit.seen
    trace = seen.trace(filters.message_id(visit.request.path_params.get("id") or visit.query.get("id", "")))
    found = seen.contents(trace)
    values = {
        "trace": trace,
        "picture": timeline(seen.shown(trace)),
        "headers": {} if found is None else seen.headers(found),
        "content_type": None if found is None else found.content_type,
        "size": None if found is None else len(found.body),
        "is_tombstone": found is not None and found.is_tombstone,
        "copies": [each.copy for each in trace.subscriptions if each.copy is not None],
        "seen": seen,
    }
    return Page("message.html", values)


def body(visit: Visit) -> Page:
    """The body of a message; the reading is kept as a decision."""
    id = filters.message_id(visit.part("id"))
    found, contents = visit.seen.body(id, visit.field("name") or None)
    return Page("body.html", {"id": found.id, "body": shown(contents, found.content_type, found.headers)})


def key(visit: Visit) -> Page:
    """A key: the head in each subscription, and the messages behind."""
    seen, name = visit.seen, filters.text(visit.query, "name")
    wanted = _key_of(visit)
    if name is not None:
        seen.require(name)
    found = seen.own(seen.admin.key(wanted, name=name, limit=PAGE))

    def key_fields(each: HeldKey | None, of: str | None = None) -> dict[str, object]:
        """Return the fields of a form for the key; a hidden key is named by a message."""
        name, message = of if each is None else each.subscription, filters.text(visit.query, "of")
        return {"name": name, "of": message} if message is not None else {"name": name, "key": wanted}

    values = {
        "key": wanted,
        "found": found,
        "seen": seen,
        "names": [each.name for each in seen.subscriptions() if _can_pause(each) and each.kind != "check"],
        "key_fields": key_fields,
        "erase": seen.admin.commands.line("erase", "--key", wanted) if seen.keys == "shown" else None,
    }
    return Page("key.html", values)


def _key_of(visit: Visit) -> str:
    """Return the key of the address, or of a message where keys are hidden."""
    given = visit.request.path_params.get("key") or filters.text(visit.query, "key")
    if given is None and (of := filters.text(visit.query, "of")) is not None:
        given = visit.seen.trace(filters.message_id(of)).key
        if given is None:
            raise NotSeenError(f"message {of} has no key")
    if given is None:
        raise BadAddressError("key is missing; append ?key=…")
    return str(given)


def half(visit: Visit) -> Page:
    """Transactions of half messages without a verdict."""
    group, given_up = filters.text(visit.query, "group"), "given_up" in visit.query
    found, following = visit.seen.half_transactions(group, given_up=given_up, after=filters.text(visit.query, "after"))
    values = {"found": found, "group": group, "given_up": given_up, "next": following, "size": PAGE}
    return Page("half.html", values | {"counts": visit.seen.half_counts(group)})


def transaction(visit: Visit) -> Page:
    """A transaction with half messages, and the verdict."""
    found = visit.seen.half_transaction(visit.part("id"))
    return Page("transaction.html", {"found": found, "seen": visit.seen})


def workers(visit: Visit) -> Page:
    """The processes at work for subscriptions."""
    return Page("workers.html", {"workers": visit.seen.own(visit.seen.admin.workers())})


def decisions(visit: Visit) -> Page:
    """The decisions of people, the newest first."""
    name, since = filters.text(visit.query, "name"), filters.text(visit.query, "since")
    moment, after = None if since is None else filters.moment(since, "since"), filters.number(visit.query, "after")
    found = visit.seen.decisions(name, moment, after)
    following = found[PAGE - 1].id if len(found) > PAGE else None
    values = {"found": found[:PAGE], "next": following, "name": name, "since": since, "size": PAGE}
    return Page("decisions.html", values)


def doctor(visit: Visit) -> Page:
    """The defects of tables and server, asked for when the page is opened."""
    visit.seen.require(None)
    return Page(
        "doctor.html", {"defects": visit.seen.admin.check(), "command": visit.seen.admin.commands.line("doctor")}
    )
