"""Parked messages and subscriptions from the command line: looked at, decided on, and never changed under a worker."""

import json
import os
import pty
import subprocess
import sys
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import Done, Outbox, Reject, Relay
from outbox.model.lease import Partition
from outbox.store.subscriptions.leases import Leases
from tests.support.command_line import outbox
from tests.support.parked import decisions
from tests.support.waiting import eventually

#: For what does not depend on the database: one kind is enough.
ONE_DATABASE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
ESCAPE = "\x1b[2J\x07 \u202e no"


class Destination:
    """Rejects everything until it is well."""

    destination = "callable:test"

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.well = False

    def send(self, messages):
        """Keep the bodies, or reject."""
        if self.well:
            self.bodies += [message.body for message in messages]
        return [Done() if self.well else Reject(ESCAPE)] * len(messages)

    def close(self):
        """Nothing is open."""


@pytest.fixture
def destination() -> Destination:
    return Destination()


@pytest.fixture
def dead(engine, destination) -> list[int]:
    """Four dead letters of `relay`, of two topics and with three keys; the first has one behind it."""
    sender = Outbox(engine)
    with sender.begin() as session:
        for topic, key in (("orders", "a"), ("orders", "b"), ("mail", "c"), ("mail", None), ("orders", "a")):
            sender.send(session, topic, f"{topic} {key}".encode(), key=key, headers={"X-Trace": "7"})
    Relay(sender, destination).until_empty()
    return [each["id"] for each in letters(engine)]


def letters(engine, *options: str):
    """The dead letters."""
    return outbox(engine, "parked", "list", "--state", "dead", "--json", *options).json["parked"]


def resume(engine, destination):
    """What the destination gets once it is well."""
    destination.well = True
    Relay(Outbox(engine), destination).until_empty()
    return destination.bodies


def hold(engine, name="relay"):
    database = Outbox(engine).database
    with closing(database.open()) as channel:
        assert Leases(channel).acquire(Partition(name), "w0rker", timedelta(minutes=5))


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_moments_are_shown_in_utc_whatever_the_zone_of_the_session(engine, dead):
    """A person who compares them with a log, or with --json, would be hours off."""
    tokyo = {"PGTZ": "Asia/Tokyo"}
    since = outbox(engine, "parked", "list", "--state", "dead", "--json", **tokyo).json["parked"][0]["parked_at"]
    created = outbox(engine, "subscriptions", "list", "--json", **tokyo).json["subscriptions"][0]["created_at"]
    parked_at, created_at = (moment[:19].replace("T", " ") for moment in (since, created))

    listed, shown, subscriptions, purged = (
        outbox(engine, *command, **tokyo)
        for command in (
            ["parked", "list", "--state", "dead"],
            ["parked", "show", str(dead[0])],
            ["subscriptions", "list"],
            ["purge", "--older-than", "0s", "--dry-run"],
        )
    )

    assert "SINCE (UTC)" in listed.out and parked_at in listed.out
    assert f"parked at    {parked_at} UTC\n" in shown.out
    assert "CREATED (UTC)" in subscriptions.out and created_at in subscriptions.out
    assert purged.err.splitlines()[0].endswith(" UTC would go")


@ONE_DATABASE
def test_they_are_listed_with_what_happened(engine, dead):
    listed = letters(engine)

    shown = [(each["subscription"], each["topic"], each["key"], each["attempts"], each["error"]) for each in listed]
    assert shown == [
        ("relay", "orders", "a", 1, ESCAPE),
        ("relay", "orders", "b", 1, ESCAPE),
        ("relay", "mail", "c", 1, ESCAPE),
        ("relay", "mail", None, 1, ESCAPE),
    ]


@ONE_DATABASE
def test_a_pipe_gets_the_whole_error(engine):
    """Its reader looks for the words at the end, too."""
    error = " ".join(str(number) for number in range(100))
    with (shop := Outbox(engine)).begin() as session:
        shop.send(session, "orders", b"1")
    Relay(shop, lambda _message: Reject(error)).until_empty()

    line = outbox(engine, "parked", "list", "--state", "dead").out.splitlines()[-1]

    assert line.endswith(f"  {error}")


@pytest.mark.parametrize(
    ("options", "places"),
    [
        (["--topic", "mail"], [2, 3]),
        (["--key", "b"], [1]),
        (["--limit", "2"], [0, 1]),
        (["--name", "relay"], [0, 1, 2, 3]),
    ],
)
@ONE_DATABASE
def test_a_part_of_them_is_listed(engine, dead, options, places):
    listed = outbox(engine, "parked", "list", "--state", "dead", "--json", *options).json["parked"]

    assert [each["id"] for each in listed] == [dead[place] for place in places]


@ONE_DATABASE
def test_nothing_of_a_message_reaches_the_terminal_unescaped(engine, dead):
    told = [outbox(engine, "parked", "list", "--state", "dead"), outbox(engine, "parked", "show", str(dead[0]))]

    assert [("\\x1b[2J\\x07 \\u202e no" in each.out, each.out.replace("\n", "").isprintable()) for each in told] == [
        (True, True)
    ] * 2


def test_one_is_shown_with_all_that_it_carries(engine, dead):
    shown = outbox(engine, "parked", "show", str(dead[0]), "--json").json

    assert (shown["body"], shown["headers"], shown["state"]) == ("orders a", {"X-Trace": "7"}, "dead")


@ONE_DATABASE
def test_one_that_is_not_there_is_told(engine, dead):
    assert (outbox(engine, "parked", "show", "999").code, outbox(engine, "parked", "list", "--name", "no").code) == (
        2,
        2,
    )


def test_a_replay_delivers_it_and_what_waits_behind_it(engine, dead, destination):
    ended = outbox(engine, "parked", "replay", str(dead[0]))

    assert (ended.code, resume(engine, destination)) == (0, [b"orders a", b"orders a"])


def test_a_discard_lets_go_on_what_waits_behind_it(engine, dead, destination):
    ended = outbox(engine, "parked", "discard", str(dead[0]), "--reason", "test order")

    left = [each["id"] for each in letters(engine)]
    assert (ended.code, left, resume(engine, destination)) == (0, dead[1:], [b"orders a"])


@ONE_DATABASE
def test_all_of_them_need_a_yes_and_their_number_is_told(engine, dead, destination):
    asked = outbox(engine, "parked", "replay", "--all", "--topic", "mail")
    done = outbox(engine, "parked", "replay", "--all", "--topic", "mail", "--yes")

    assert (asked.code, "replay 2 messages of relay?" in asked.err) == (2, True)
    assert (done.code, resume(engine, destination)) == (0, [b"mail c", b"mail None"])


@ONE_DATABASE
def test_ids_that_are_no_dead_letters_stop_everything(engine, dead):
    """A mistyped id is not half a decision."""
    ended = outbox(engine, "parked", "discard", str(dead[0]), "999", "--reason", "x")

    assert (
        ended.code,
        "999" in ended.err,
        len(letters(engine)),
    ) == (
        2,
        True,
        4,
    )


def test_a_worker_carries_the_decision_out_itself(engine, dead, destination):
    """Its lease is live: the command writes the decision, and touches no parked message."""
    hold(engine)

    ended = outbox(engine, "parked", "discard", str(dead[0]), "--reason", "why not", "--by", "ann")

    assert (ended.code, "worker w0rker carries it out" in ended.err) == (0, True)
    assert decisions(engine) == [("ann", "discard", "relay", "why not", [dead[0]], None, False)]


def test_a_running_worker_sees_the_decision(engine, dead, destination):
    """It knows at once that the key is free: nothing of it waits for a restart."""
    destination.well = True
    sender = Outbox(engine)
    with sender.running(destination):
        assert eventually(lambda: outbox(engine, "status", "--json").json["subscriptions"][0]["live"])
        outbox(engine, "parked", "replay", str(dead[0]))
        assert eventually(lambda: len(destination.bodies) >= 2)

    assert destination.bodies == [b"orders a", b"orders a"]


@ONE_DATABASE
def test_a_name_is_asked_for_when_several_have_the_message(engine, dead, destination):
    Relay(Outbox(engine), Destination(), name="other").until_empty()

    unclear = outbox(engine, "parked", "replay", str(dead[0]))
    clear = outbox(engine, "parked", "replay", str(dead[0]), "--name", "relay")

    assert (unclear.code, "other, relay" in unclear.err, clear.code) == (2, True, 0)
    assert len(outbox(engine, "parked", "list", "--state", "dead", "--name", "other", "--json").json["parked"]) == 4


@ONE_DATABASE
def test_without_a_name_those_of_all_subscriptions_are_meant(engine, dead, destination):
    Relay(Outbox(engine), Destination(), name="other").until_empty()

    asked = outbox(engine, "parked", "discard", "--all", "--key", "b", "--reason", "x")
    done = outbox(engine, "parked", "discard", "--all", "--key", "b", "--reason", "x", "--yes")

    left = [(each["subscription"], each["key"]) for each in letters(engine)]
    assert (asked.code, "discard 1 message of other and 1 message of relay?" in asked.err) == (2, True)
    assert (done.code, len(left), ("other", "b") in left, ("relay", "b") in left) == (0, 6, False, False)


@ONE_DATABASE
def test_an_id_that_is_nobodys_is_told_with_all_that_were_searched(engine, dead):
    Relay(Outbox(engine), Destination(), name="other").until_empty()

    ended = outbox(engine, "parked", "replay", "4711")

    told = "no dead messages of other, relay: 4711; nothing was done; to see its state, run: outbox parked show 4711"
    assert (ended.code, ended.err) == (2, f"Error: {told}\n")


@ONE_DATABASE
def test_nobody_is_let_down_after_all_was_given(engine, dead):
    """Ids and reason are asked for before the database is."""
    without_ids = outbox("postgresql://localhost:1/x", "parked", "discard")
    without_reason = outbox("postgresql://localhost:1/x", "parked", "discard", "1")

    assert (without_ids.code, "give ids, or --all" in without_ids.err) == (2, True)
    assert (without_reason.code, "say why these messages are given up: --reason" in without_reason.err) == (2, True)


@ONE_DATABASE
def test_at_a_terminal_a_reason_is_asked_for(engine, dead):
    hold(engine)
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"typed\n")

    subprocess.run(
        [sys.executable, "-c", "from outbox.cli import main; main()", "parked", "discard", str(dead[0])],
        env={**os.environ, "OUTBOX_DATABASE": engine.url.render_as_string()},
        stdin=terminal,
        check=True,
    )
    os.close(terminal)
    os.close(keyboard)

    assert [each[3] for each in decisions(engine)] == ["typed"]


def test_a_reason_is_one_harmless_line_of_the_applications_log(engine, dead, destination, caplog):
    """The worker logs what it carries out; who asked may have written anything."""
    hold(engine)
    reason = "line\none \x1b[2J" + "x" * 1_900
    outbox(engine, "parked", "discard", str(dead[0]), "--reason", reason, "--by", "ann\nbob")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET lease_until = NULL, owner = NULL"))
    with caplog.at_level("INFO", "outbox"):
        resume(engine, destination)

    (line,) = [each.message for each in caplog.records if "discard" in each.message]
    assert line.startswith(f"parked message {dead[0]}: discard by ann bob (line one \ufffd[2Jxxx")
    assert (line.isprintable(), len(line) < 1000) == (True, True)


# JSON


@ONE_DATABASE
def test_a_list_that_is_cut_says_so(engine, dead):
    cut, whole = (
        outbox(engine, "parked", "list", "--state", "dead", "--json", "--limit", each).json for each in ("3", "4")
    )

    assert [(each["version"], each["more"], len(each["parked"])) for each in (cut, whole)] == [
        (1, True, 3), (1, False, 4),
    ]  # fmt: skip


def test_a_decision_is_told_to_programs(engine, dead):
    done = outbox(engine, "parked", "discard", str(dead[0]), "--reason", "x", "--json")
    hold(engine)
    asked = outbox(engine, "parked", "replay", "--all", "--yes", "--json")
    nothing = outbox(engine, "parked", "replay", "--all", "--topic", "none", "--yes", "--json")

    head = {"version": 1, "more": False, "unread": {}}
    here = {"name": "relay", "messages": 1, "behind": 1, "worker": None, "unread": 0}
    there = {"name": "relay", "messages": 3, "behind": 0, "worker": "w0rker", "unread": 0}
    assert [each.json for each in (done, asked, nothing)] == [
        {**head, "decision": "discard", "subscriptions": [here]},
        {**head, "decision": "replay", "subscriptions": [there]},
        {**head, "decision": "replay", "subscriptions": []},
    ]
    assert (done.err, asked.err) == ("", "")


# Subscriptions


@ONE_DATABASE
def test_subscriptions_are_listed(engine, dead):
    (listed,) = outbox(engine, "subscriptions", "list", "--json").json["subscriptions"]

    assert {key: listed[key] for key in ("name", "topics", "destination", "on_dead", "live")} == {
        "name": "relay", "topics": None, "destination": "callable:test", "on_dead": "block", "live": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (["--topics", "b,a"], {"topics": ["a", "b"]}),
        (["--topics", "*"], {"topics": None}),
        (["--to", "nats://h:4222/x"], {"destination": "nats://h:4222/x"}),
        (["--on-dead", "continue"], {"on_dead": "continue"}),
    ],
)
@ONE_DATABASE
def test_what_belongs_to_a_subscription_is_altered(engine, dead, options, changed):
    (before,) = outbox(engine, "subscriptions", "list", "--json").json["subscriptions"]

    ended = outbox(engine, "subscriptions", "alter", "relay", *options)

    assert (ended.code, outbox(engine, "subscriptions", "list", "--json").json["subscriptions"]) == (
        0,
        [{**before, **changed}],
    )


def test_what_waits_behind_dead_letters_goes_on_when_they_are_to_hold_nothing_back(engine, dead, destination):
    outbox(engine, "subscriptions", "alter", "relay", "--on-dead", "continue")

    assert resume(engine, destination) == [b"orders a"]
    assert [each["id"] for each in letters(engine)] == dead


@pytest.mark.parametrize("command", [["alter", "relay"], ["split", "relay", "--topics", "orders"]], ids=" ".join)
@pytest.mark.parametrize(
    ("to", "error"),
    [
        ("redis:/x", "redis:…: write redis://"),
        ("reddist://foo/x", "there is no sender for reddist: URLs"),
        ("kafka://h/mv?acks=1", "kafka://h/mv: its options are"),
    ],
)
@ONE_DATABASE
def test_a_destination_that_no_relay_takes_is_not_stored(engine, dead, command, to, error):
    before = outbox(engine, "subscriptions", "list").out

    ended = outbox(engine, "subscriptions", *command, "--to", to)

    assert (ended.code, error in ended.err, outbox(engine, "subscriptions", "list").out) == (2, True, before), ended.err


@pytest.mark.parametrize("to", ["sender:shop.Destination", "callable:shop.publish"])
@ONE_DATABASE
def test_a_sender_of_an_application_is_stored_as_it_is(engine, dead, to):
    assert outbox(engine, "subscriptions", "alter", "relay", "--to", to).code == 0
    assert outbox(engine, "subscriptions", "list", "--json").json["subscriptions"][0]["destination"] == to


@pytest.mark.parametrize("command", [["alter", "relay", "--topics", "*", "--wait", "0s"], ["drop", "relay", "--yes"]])
@ONE_DATABASE
def test_a_subscription_is_not_changed_under_its_worker(engine, dead, command):
    hold(engine)

    ended = outbox(engine, "subscriptions", *command)

    assert (ended.code, "worker w0rker holds the lease of relay" in ended.err) == (2, True)
    assert len(outbox(engine, "subscriptions", "list", "--json").json["subscriptions"]) == 1


@ONE_DATABASE
def test_one_that_no_worker_has_declared_is_not_altered_in_part(engine):
    """Its first worker would declare the rest, and overwrite this."""
    ended = outbox(engine, "subscriptions", "alter", "relay", "--topics", "a")

    assert (ended.code, "--to" in ended.err) == (2, True)


def test_dropping_needs_a_yes_and_tells_what_goes(engine, dead):
    asked = outbox(engine, "subscriptions", "drop", "relay")
    done = outbox(engine, "subscriptions", "drop", "relay", "--yes")

    assert (asked.code, "4 dead, 1 behind" in asked.err) == (2, True)
    assert (done.code, outbox(engine, "subscriptions", "list", "--json").json["subscriptions"]) == (0, [])
    with engine.connect() as connection:
        tables = ("parked", "progress", "lease")
        left = [connection.execute(text(f"SELECT count(*) FROM outbox_{table}")).scalar_one() for table in tables]
    assert left == [0, 0, 0]


@ONE_DATABASE
def test_an_unknown_one_is_told_with_those_that_there_are(engine):
    ended = outbox(engine, "subscriptions", "alter", "nope", "--topics", "*")

    assert (ended.code, "there are: relay" in ended.err) == (2, True)


@ONE_DATABASE
def test_a_name_from_the_database_is_escaped(engine):
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_subscription SET name = :name"), {"name": "a\x1b[2Jb"})

    told = [outbox(engine, "subscriptions", "list"), outbox(engine, "status")]

    assert [("a\\x1b[2Jb" in each.out, "\x1b" in each.out + each.err) for each in told] == [(True, False)] * 2


@ONE_DATABASE
def test_json_is_one_line_of_ascii(engine, dead):
    told = outbox(engine, "parked", "list", "--state", "dead", "--json").out

    assert (told.isascii(), told.count("\n"), len(json.loads(told)["parked"])) == (True, 1, 4)


def test_a_discard_of_messages_that_nobody_has_read_says_how_many_are_delivered_later(engine, dead):
    """Two of the key lie in the log, and one of another key."""
    sender = Outbox(engine)
    with sender.begin() as session:
        for key in ("b", "new", "new"):
            sender.send(session, "orders", b"later", key=key)
    discard = ("parked", "discard", "--all", "--reason", "cancelled", "--yes")

    ended = outbox(engine, *discard, "--key", "new")
    both = outbox(engine, *discard, "--key", "b", "--json")

    told = "not discarded, because unread in the log, and to be delivered later: 2 messages for relay"
    told += "; to discard them when they are read, add --unread"
    assert (ended.code, ended.err) == (1, f"no dead messages of any subscription match\nError: {told}\n")
    assert (both.code, both.json["subscriptions"][0]["messages"], both.json["unread"]) == (1, 1, {"relay": 1})


def test_unread_messages_are_set_aside_or_discarded_when_they_are_read(engine, destination):
    sender = Outbox(engine)
    with sender.begin() as session:
        poison, *_ = [sender.send(session, "mail", body, key="new") for body in (b"poison", b"1", b"2")]
        sender.send(session, "orders", b"gone")

    aside = outbox(engine, "parked", "set-aside", str(poison), "--reason", "kills", "--by", "ann")
    gone = outbox(engine, "parked", "discard", "--all", "--topic", "orders", "--unread", "--reason", "x", "--yes")
    sent = resume(engine, destination)
    parked = outbox(engine, "parked", "list", "--json").json["parked"]

    asked = "set aside of 1 unread message of relay asked for; carried out when a worker reads them\n"
    assert (aside.code, aside.err, gone.code, sent) == (0, asked, 0, [])
    assert [(each["state"], each["error"]) for each in parked] == [
        ("dead", "set aside by ann: kills"),
        ("behind", None),
        ("behind", None),
    ]


@ONE_DATABASE
def test_a_choice_of_parked_messages_alone_has_no_unread_ones(engine, dead):
    outbox(engine, "send", "orders", "later", "--key", "new")

    ended = outbox(engine, "parked", "discard", "--all", "--key", "new", "--state", "dead", "--reason", "x", "--yes")

    assert (ended.code, ended.err) == (0, "no dead messages of any subscription match\n")


def test_a_message_is_meant_by_the_id_that_send_returned(engine, dead):
    """In each command that takes the id of a message."""
    id = letters(engine)[0]["message_id"]

    ended = [
        outbox(engine, "parked", "show", id, "--json").json["id"],
        outbox(engine, "log", "show", id, "--json").json["id"],
        outbox(engine, "parked", "replay", id).code,
        outbox(engine, "parked", "discard", id, "--reason", "x", "--name", "relay", "--state", "retry,dead").code,
    ]

    assert ended == [dead[0], dead[0], 0, 0]


def test_ids_of_an_unread_message_and_of_none_are_told_apart(engine, dead):
    with Outbox(engine).begin() as session:
        unread = Outbox(engine).send(session, "orders", b"later")
    discard = ("parked", "discard", "--reason", "x")

    found, none = (
        outbox(engine, *discard, str(unread)),
        outbox(engine, *discard, "0" * 8 + "-0000-0000-0000-" + "0" * 12),
    )

    assert (found.code, "unread in the log, to be delivered later: 1 message for relay" in found.err) == (2, True)
    assert (none.code, "is parked or in the log" in none.err) == (2, True)


@ONE_DATABASE
def test_unread_messages_of_a_key_are_given_up_when_a_worker_reads_them(engine, destination):
    destination.well = True
    outbox(engine, "subscriptions", "create", "relay", "--to", "callable:test")
    for body, key in (("cancelled", "order-7"), ("other", "order-8")):
        outbox(engine, "send", "orders", body, "--key", key)

    ended = outbox(engine, "parked", "discard", "--all", "--key", "order-7", "--unread", "--reason", "x", "--yes")

    assert (ended.code, resume(engine, destination)) == (0, [b"other"])
