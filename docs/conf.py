"""The site: Sphinx, MyST and Furo over the pages of this folder; `make docs` builds it into `build/site`.

A comment such as `<!-- commands -->` in a page stands for text that is made here: from the command line, from
docstrings, from the fields of results, or from the changelog. Beside each page the site has its Markdown, with the
pictures and the examples that the Markdown links to, and `llms.txt` lists all pages.
"""

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import reference  # noqa: E402  # a file of this folder

_PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
#: The text for each comment, made when a page asks.
_MADE = {
    "<!-- commands -->": reference.commands,
    "<!-- names -->": reference.names,
    "<!-- results -->": reference.results,
    "<!-- changelog -->": lambda: (HERE.parent / "CHANGELOG.md").read_text().partition("\n")[2],
}

project = "outbox"
author = copyright = "the authors of outbox"
release = version = _PROJECT["version"]
extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4
exclude_patterns = ["img"]
html_theme = "furo"
html_title = f"outbox {release}"
html_baseurl = _PROJECT["urls"]["Documentation"]
html_copy_source = False
pygments_style = "default"


def _complete(_app: Any, _name: str, source: list[str]) -> None:
    """Put the made texts into a page."""
    source[0] = _with_made_texts(source[0])


def _with_made_texts(page: str) -> str:
    for comment, make in _MADE.items():
        if comment in page:
            page = page.replace(comment, make())
    return page


def _write_markdown(app: Any, failure: Exception | None) -> None:
    """Write the Markdown beside each page, and `llms.txt`: each page with its first sentence, in the index's order."""
    if failure is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    shutil.copytree(HERE / "img", out / "img", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py"))
    made = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE.parent / "examples", out / "examples", dirs_exist_ok=True, ignore=made)
    lines = [f"# {project}", "", f"> {_PROJECT['description']}", ""]
    for name in _in_order(app.env):
        page = _with_made_texts((HERE / f"{name}.md").read_text())
        (out / f"{name}.md").write_text(page.replace("](../examples/", "](examples/"))
        lines.append(f"- [{_title(page)}]({html_baseurl}{name}.md): {_first_sentence(page)}")
    (out / "llms.txt").write_text("\n".join(lines) + "\n")


def _in_order(env: Any) -> list[str]:
    """Return the names of all pages, in the order of the index."""
    return ["index", *env.toctree_includes["index"]]


def _title(page: str) -> str:
    return re.search(r"^# (.*)$", page, re.MULTILINE)[1]  # type: ignore[index]


def _first_sentence(page: str) -> str:
    """Return the first sentence, without links; before the sentence there may be code."""
    prose = re.sub(r"^```.*?^```$", "", page.partition("\n")[2], flags=re.MULTILINE | re.DOTALL).lstrip()
    sentence = re.split(r"(?<=[.!?])\s", " ".join(prose.partition("\n\n")[0].split()), maxsplit=1)[0]
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence).replace("**", "")


def setup(app: Any) -> None:
    """Have both called by Sphinx."""
    app.connect("source-read", _complete)
    app.connect("build-finished", _write_markdown)
