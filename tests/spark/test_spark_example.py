"""The nightly extract of `examples/spark` runs as its README says, and a second night finds what is new."""

import re
import runpy
from pathlib import Path

import pytest

from tests.support.command_line import outbox as typed
from tests.support.examples import EXAMPLES
from tests.support.pages import commands

pytestmark = pytest.mark.jvm

FOLDER = EXAMPLES / "spark"


@pytest.fixture
def shop(folder, monkeypatch):
    """The shop's own functions, on a database of this test."""
    monkeypatch.setenv("OUTBOX_DATABASE", f"sqlite:///{folder}/shop.db")
    assert typed(f"sqlite:///{folder}/shop.db", "db", "upgrade").code == 0
    found = runpy.run_path(str(FOLDER / "shop.py"), run_name="shop")
    yield found
    found["outbox"].close()


def test_two_nights(shop, folder, spark, capsys):
    """In the session of this run, whose processes were started before there was a variable with this database."""
    url, archive = f"sqlite:///{folder}/shop.db", folder / "archive"
    nightly = runpy.run_path(str(FOLDER / "nightly.py"), run_name="nightly")
    shop["trade"](20)
    nightly["night"](spark, archive, url)
    shop["trade"](5, seed=2)
    nightly["night"](spark, archive, url)
    said = capsys.readouterr().out
    assert typed(url, "relay", "--to", f"file://{folder}/sent.jsonl", "--until-empty").code == 0

    purged = typed(url, "purge", "--older-than", "0s", "--archive", str(archive), "--json").json

    with shop["engine"].connect() as connection:
        sums = "SELECT customer, sum(total), sum(version) FROM orders GROUP BY 1 ORDER BY 1"
        known = connection.exec_driver_sql(sums).all()
    number = sum(versions for _, _, versions in known)
    windows = [int(rows) for rows in re.findall(r"window \d: (\d+) messages", said)]
    assert (len(windows), sum(windows), purged["rows"]) == (2, number, number)
    assert said.endswith(
        f"{number} messages of keys, 0 with a version that does not rise\n"
        + "".join(f"{customer}: {total}\n" for customer, total, _ in known)
    )
    assert sorted(path.name for path in (folder / "reports").iterdir()) == ["order.png", "written.png"]


def test_the_readme_names_what_there_is():
    """Its commands are those that the test above runs, but for the first and the numbers."""
    text = (FOLDER / "README.md").read_text()
    lines = commands(text)

    programs = [Path(line.split()[1]).name for line in lines if line.startswith("python ")]
    assert programs == ["shop.py", "nightly.py"]
    assert [line.split()[1] for line in lines if line.startswith("outbox ")] == ["db", "relay", "purge"]
