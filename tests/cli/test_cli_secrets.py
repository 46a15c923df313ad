"""No secret is taken as an argument, and none is ever shown."""

import pytest

from tests.support.command_line import outbox

CANARY = "c4nary/Sesame"
ENCODED = "c4nary%2FSesame"
#: A password stands in a URL encoded, in an error of a driver as it is.
TRACES = ("c4nary", "Sesame")


def shows(ended) -> bool:
    return any(trace in ended.out + ended.err for trace in TRACES)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--database", f"postgresql://ann:{ENCODED}@localhost:1/shop"],
        ["status", f"--database=postgresql://ann:{CANARY}@localhost:1/shop"],
        ["status", "--database", f"postgresql://ann@localhost:1/shop?password={ENCODED}"],
        ["status", "--database", f"postgresql://ann@localhost:1/shop?sslpassword={ENCODED}"],
        ["status", "--database", f"host=localhost password={CANARY}"],
        ["db", "upgrade", "--database", f"postgresql://ann:{CANARY}@localhost:1/shop"],
    ],
)
def test_a_database_password_as_an_argument_is_refused(arguments):
    ended = outbox(None, *arguments)

    fixes = "OUTBOX_DATABASE" in ended.err and "--database-file" in ended.err
    assert (ended.code, fixes, shows(ended)) == (2, True, False)


@pytest.mark.parametrize(
    ("command", "variable"), [(["relay"], "OUTBOX_RELAY_TO"), (["subscriptions", "alter", "relay"], "_ALTER_TO")]
)
@pytest.mark.parametrize("url", [f"nats://ann:{ENCODED}@localhost:1", f"nats://{CANARY}@localhost:1"])
def test_a_destination_password_as_an_argument_is_refused(command, variable, url):
    """A single name before the @ is a token."""
    ended = outbox("postgresql://localhost:1/shop", *command, "--to", url)

    fixes = variable in ended.err and "--to-file" in ended.err
    assert (ended.code, fixes, shows(ended)) == (2, True, False)


@pytest.mark.parametrize(("option", "is_secret"), [("secret-file", False), ("secret", True), ("secret-files", True)])
def test_the_path_of_a_file_that_holds_a_secret_is_none(sqlite_engine, option, is_secret):
    ended = outbox(sqlite_engine, "relay", "--to", f"nowhere://localhost/hook?{option}=/etc/hook")

    told = "holds a password" if is_secret else "there is no sender for nowhere: URLs"
    assert (ended.code, told in ended.err) == (2, True)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ann:{ENCODED}@localhost:1/shop",
        f"postgresql://ann:{CANARY}@localhost:1/shop",
        f"postgresql://ann:{CANARY}@x@localhost:1/shop",
        f"postgresql://ann:{CANARY}@localhost:port/shop",
        f"postgresql://ann@localhost:1/shop?password={ENCODED}",
        f"postgresql://ann@localhost:1/shop?password={ENCODED}&{CANARY}=1",
        f"postgresql+asyncpg://ann:{CANARY}@localhost:1/shop",
        f"mysql://ann:{CANARY}@localhost:1/shop",
        f"nonsense://ann:{CANARY}@localhost:1/shop",
        f"ann:{CANARY}@localhost",
        f"sqlite:////nonexistent/x.db?password={ENCODED}",
        f"host=localhost password={CANARY}",
    ],
)
def test_a_password_from_the_environment_is_never_shown(url):
    ended = [
        outbox(url, *arguments, "-vv") for arguments in (["status"], ["db", "upgrade"], ["relay", "--to", "stdout:"])
    ]

    assert [(each.code in (1, 2, 3), shows(each)) for each in ended] == [(True, False)] * 3


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_destination_password_is_never_shown(sqlite_engine, form, tmp_path):
    """Nor logged, at any level, while the destination refuses."""
    to = tmp_path / "destination"
    to.write_text(f"nats://ann:{ENCODED}@localhost:1/\n")

    ended = outbox(
        sqlite_engine,
        "relay",
        "--to-file",
        str(to),
        "--until-empty",
        "--give-up-after",
        "1s",
        "-vv",
        "--log-format",
        form,
    )
    listed = outbox(sqlite_engine, "subscriptions", "list", "--json")

    assert (shows(ended), shows(listed), listed.json["subscriptions"][0]["destination"]) == (
        False,
        False,
        "nats://localhost:1",
    )


def test_the_text_of_a_mistake_shows_no_password_either():
    """Whatever is taken for an argument is echoed by the parser."""
    ended = outbox(None, "status", f"postgresql://ann:{ENCODED}@localhost:1/shop")

    assert (ended.code, shows(ended)) == (2, False)


def test_a_file_gives_the_database(sqlite_engine, tmp_path):
    file = tmp_path / "url"
    file.write_text(sqlite_engine.url.render_as_string(hide_password=False) + "\n")

    from_file = outbox(None, "status", "--database-file", str(file), "--json")
    named = outbox(None, "status", "--json", OUTBOX_DATABASE_FILE=str(file))
    preferred = outbox("postgresql://localhost:1/x", "status", "--database-file", str(file), "--json")

    assert [len(each.json["subscriptions"]) for each in (from_file, named, preferred)] == [1, 1, 1]


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe"])
def test_a_file_that_holds_something_else_is_refused(tmp_path, content):
    file = tmp_path / "url"
    file.write_bytes(content)

    assert outbox(None, "status", "--database-file", str(file)).code == 2


def test_a_url_and_a_file_of_the_same_rank_are_refused(tmp_path):
    ended = outbox("sqlite:///x.db", "status", OUTBOX_DATABASE_FILE=str(tmp_path / "url"))

    assert (ended.code, "give one of them" in ended.err) == (2, True)
