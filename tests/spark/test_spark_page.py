"""What the pages about Spark say is so; their names and links are tested with those of the README."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import outbox
from tests.support.pages import TOP

pytestmark = pytest.mark.jvm

PAGES = {name: (TOP / "docs" / f"{name}.md").read_text() for name in ("spark", "archive")}
ALL = "".join(PAGES.values())
#: What a step of the pages prints, in their order: Python, and a command that shows something.
PRINTED = [
    "[Row(topic='mail', count=1), Row(topic='orders', count=2)]",
    "[Row(key='order-1', customer='ann', total=42), Row(key='order-2', customer='bob', total=7)]",
    "3 1",
    "3",
    "4",
    "1 4",
    "4",
    "Row(key='order-2', customer='bob', total=7, version=1)",
    "[('ann', 82), ('bob', 7)]",
    "{'mail': 1, 'orders': 3}",
    "compared 4 messages in 1 range of ids: archive has the same",
    "4 messages from before TIME deleted",
    "0 messages deleted",
    "1 3",
    "[Row(topic='mail', messages=1), Row(topic='orders', messages=2)]",
    "0",
]


def test_the_pages_run_from_top_to_bottom_with_their_commands(tmp_path, monkeypatch, capsys, spark):
    """In the session of this run, on SQLite, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/shop.db"
    monkeypatch.setenv("OUTBOX_DATABASE", url)
    namespace: dict[str, Any] = {"__name__": "page"}
    said = []

    for name, page in PAGES.items():
        for language, block in re.findall(r"^```(python|sh)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
            if language == "python":
                exec(compile(block, f"docs/{name}.md", "exec"), namespace)
                said += capsys.readouterr().out.splitlines()
                continue
            for arguments in map(shlex.split, block.splitlines()):
                if arguments[0] == "outbox":
                    ended = outbox(url, *arguments[1:])
                    assert ended.code == 0, (arguments, ended.err)
                    if arguments[1] in ("purge", "erase"):
                        said += ended.err.splitlines()

    namespace["outbox"].close()
    assert [re.sub(r"\d{4}-\d\d-\d\d [\d:]{8} UTC", "TIME", line) for line in said] == PRINTED
    assert Path("delivery.png").stat().st_size > 10_000


def test_the_pictures_are_those_that_the_script_draws(tmp_path):
    """Their sizes in pixels; whoever changes a report draws them anew."""
    import runpy

    from matplotlib.image import imread

    folder = TOP / "docs" / "img"
    runpy.run_path(str(folder / "draw.py"))["draw"](tmp_path)

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(re.findall(r"img/([a-z]+\.png)", ALL))
    assert [imread(tmp_path / name).shape for name in names] == [imread(folder / name).shape for name in names]
