"""The house: no circles, no private doors between files, and short ways down."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

import outbox

PACKAGE = Path(outbox.__file__).parent
#: Files on the longest way down. It may become shorter.
LONGEST = 16


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each file imports, for types alone as well."""
    graph = grimp.build_graph("outbox", exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Files that import themselves, by way of others."""
    below = {module: set(found) for module, found in imports.items()}
    for through in imports:
        for module, found in below.items():
            if through in found:
                below[module] = found | below[through]
    return sorted(module for module, found in below.items() if module in found)


def longest_way(imports: dict[str, set[str]]) -> tuple[str, ...]:
    """The most files that import each other in a row."""

    @cache
    def way(module: str) -> tuple[str, ...]:
        return (module, *max((way(each) for each in imports[module]), key=len, default=()))

    return max(map(way, imports), key=len)


def private_imports() -> Iterator[str]:
    """Names that a file takes from another, although they begin with an underscore."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outbox"):
                names = (each.name for each in node.names if each.name.startswith("_"))
                yield from (f"{path.relative_to(PACKAGE)} takes {name} from {node.module}" for name in names)


def test_no_file_imports_itself_by_way_of_others(imports):
    assert circles(imports) == []


def test_a_circle_would_be_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_the_longest_way_down_does_not_grow(imports, capsys):
    way = longest_way(imports)
    with capsys.disabled():
        print(f"\n{len(imports)} files, the longest way down has {len(way)}: {' > '.join(way)}")

    assert len(way) <= LONGEST


def test_no_file_takes_what_is_private_to_another():
    assert list(private_imports()) == []
