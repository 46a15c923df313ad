"""Pages for people to read, whose code, names and links are tested."""

import re
from collections.abc import Iterable
from functools import cache, cached_property
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import outbox
from outbox.telemetry import metrics

TOP = Path(__file__).parents[2]


@cache
def reference() -> ModuleType:
    """The module that makes texts of pages for the site, each in the place of a comment."""
    spec = spec_from_file_location("reference", TOP / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page_of_json() -> str:
    """The page about `--json`, with the results that the site has in the place of a comment."""
    return (TOP / "docs" / "json.md").read_text().replace("<!-- results -->", reference().results())


def blocks(page: str, language: str) -> list[str]:
    """The code of a page in one language, block by block."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """What a page says to type."""
    return [line for block in blocks(page, "sh") for line in block.splitlines()]


def run(page: str, name: str) -> dict[str, Any]:
    """Run the Python of a page from top to bottom; return what it defines.

    A block that ends with a main program is a file of its own, and sees nothing of the others.
    """
    namespace: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks(page, "python"), 1):
        own = {"__name__": "page"} if 'if __name__ == "__main__":' in block else namespace
        exec(compile(block, f"{name}, block {number}", "exec"), own)
        namespace |= own
    return namespace


def names(page: str) -> Iterable[str]:
    """What a page names with its module, or as an attribute of an `Outbox`; neither a file nor a topic of Debezium."""
    return sorted(set(re.findall(r"`?\b(outbox(?!\.(?:toml|event|py)\b)(?:\.[a-z_]+)+)\b(?!/)", page)))


def resolve(name: str) -> None:
    """Find a name: of a metric, of the module, or of an `Outbox`, which the pages call by the same name."""
    if name in {each.name for each in vars(metrics).values() if isinstance(each, metrics.Metric)}:
        return
    first, *rest = name.split(".")[1:]
    found: Any = getattr(outbox.Outbox, first, None) or getattr(outbox, first, None)
    if isinstance(found, cached_property) and rest:
        # Its class has its name; a folder of the package may have the name as well.
        found = getattr(outbox, first.title())
        found = found if hasattr(found, rest[0]) else None
    found = found or import_module(f"outbox.{first}")
    for attribute in rest:
        found = getattr(found, attribute, None) or import_module(f"{found.__name__}.{attribute}")


def broken_links(file: Path) -> list[str]:
    """The links of a page to files that are not there, or to headings that they do not have."""
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", file.read_text())
    return [target for target in targets if not _exists(file, target)]


def _exists(file: Path, target: str) -> bool:
    path, _, heading = target.partition("#")
    found = file.parent / path if path else file
    return found.exists() and (not heading or heading in _anchors(_whole(found)))


def _whole(page: Path) -> str:
    return page_of_json() if page.samefile(TOP / "docs" / "json.md") else page.read_text()


def _anchors(page: str) -> list[str]:
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
