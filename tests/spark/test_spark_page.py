"""What `docs/spark.md` says is so; its names and links are tested with those of the README."""

import re
import shlex
from pathlib import Path

from outbox import create_engine, migrate
from tests.support.command_line import outbox
from tests.support.pages import TOP, commands, run

PAGE = (TOP / "docs" / "spark.md").read_text()


def test_the_page_runs_from_top_to_bottom_and_then_its_commands(tmp_path, monkeypatch, capsys, spark):
    """In the session of this run, on SQLite, in a folder with nothing in it but the tables of `outbox db upgrade`."""
    monkeypatch.chdir(tmp_path)
    migrate.upgrade(create_engine("sqlite:///shop.db"))

    page = run(PAGE, "docs/spark.md")

    page["outbox"].close()
    assert capsys.readouterr().out.splitlines() == [
        "[Row(topic='mail', count=1), Row(topic='orders', count=2)]",
        "3 1",
        "3",
        "4",
        "1 4",
        "4",
        "Row(key='order-2', customer='bob', total=7)",
        "4",
        "[Row(topic='mail', messages=1), Row(topic='orders', messages=3)]",
        "0",
    ]
    for line in commands(PAGE):
        arguments = shlex.split(line)
        if arguments[0] == "outbox" and "--master" not in arguments:
            ended = outbox("sqlite:///shop.db", *arguments[1:])
            assert ended.code == 0, (line, ended.err)
    assert Path("delivery.png").stat().st_size > 10_000


def test_the_pictures_are_those_that_the_script_draws(tmp_path):
    """Their sizes in pixels; whoever changes a report draws them anew."""
    import runpy

    from matplotlib.image import imread

    folder = TOP / "docs" / "img"
    runpy.run_path(str(folder / "draw.py"))["draw"](tmp_path)

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(re.findall(r"img/([a-z]+\.png)", PAGE))
    assert [imread(tmp_path / name).shape for name in names] == [imread(folder / name).shape for name in names]
