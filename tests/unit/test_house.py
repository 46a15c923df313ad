"""The house: no circles, no private doors between files, and short ways down."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

import outbox
from outbox.store.dialects.kinds import KINDS

PACKAGE = Path(outbox.__file__).parent
#: SQL that not every database speaks.
SPECIAL = re.compile(
    r"\bRETURNING\b|\bON CONFLICT\b|\bON DUPLICATE\b|\b(?:json_each|unnest|strftime|julianday)\(|\bpg_\w+\("
    r"|\bDISTINCT ON\b|\bLATERAL\b|::[a-z]|\bAS (?:text|bigint|integer|uuid)\)|\b(?:postgresql|sqlite)_where\b"
)
#: Files about one kind of database: a destination's, whatever that of the outbox is, and the servers of tests.
OF_ONE_DATABASE = ("store/dialects/", "senders/", "testing/servers/")
#: Files on the longest way down. It may become shorter.
LONGEST = 12


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


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Everything that is written in the package, with its file."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE), node) for path in files for node in ast.walk(ast.parse(path.read_text()))]


def private_imports() -> Iterator[str]:
    """Names that a file takes from another, although they begin with an underscore."""
    for path, node in nodes():
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outbox"):
            names = (each.name for each in node.names if each.name.startswith("_"))
            yield from (f"{path} takes {name} from {node.module}" for name in names)


def compares_a_kind(node: ast.AST) -> bool:
    """Whether something is compared with the name of a kind of database."""
    if not isinstance(node, ast.Compare):
        return False
    return any(isinstance(each, ast.Constant) and each.value in KINDS for each in ast.walk(node))


def special(node: ast.AST) -> Iterator[str]:
    """Words of SQL that not every database speaks, in the texts of a file; docstrings are no such texts."""
    docstrings = {each.value for each in ast.walk(node) if isinstance(each, ast.Expr)}
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each not in docstrings:
            yield from SPECIAL.findall(each.value)
        elif isinstance(each, ast.keyword) and each.arg is not None:
            yield from SPECIAL.findall(each.arg)


def takes_both(node: ast.AST) -> bool:
    """Whether a function takes a database and a channel, which knows its database."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    return {"database", "channel"} <= {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}


def test_no_file_imports_itself_by_way_of_others(imports):
    assert circles(imports) == []


def test_a_circle_would_be_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_the_longest_way_down_does_not_grow(imports, capsys):
    way = longest_way(imports)
    with capsys.disabled():
        print(f"\n{len(imports)} files, the longest way down has {len(way)}: {' > '.join(way)}")

    assert len(way) <= LONGEST


@pytest.mark.smoke("parses every file of the package")
def test_no_file_takes_what_is_private_to_another():
    assert list(private_imports()) == []


def test_only_dialects_compare_the_name_of_a_database():
    where = (f"{path}:{getattr(node, 'lineno', 0)}" for path, node in nodes() if compares_a_kind(node))

    assert [each for each in where if not each.startswith("store/dialects/")] == []


def test_only_dialects_speak_what_not_every_database_speaks():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    files |= {f"migrations/{path.name}": path for path in (PACKAGE.parent / "migrations").rglob("*.py")}

    found = {name: list(special(ast.parse(path.read_text()))) for name, path in files.items()}

    assert {name: words for name, words in found.items() if words and not name.startswith(OF_ONE_DATABASE)} == {}


@pytest.mark.parametrize(("source", "words"), [
    ("_DELETE = 'DELETE FROM {dedup} RETURNING key'", ["RETURNING"]),
    ("sql = f'{insert} ON CONFLICT DO NOTHING'", ["ON CONFLICT"]),
    ("Index('name', postgresql_where=condition)", ["postgresql_where"]),
    ("sql = 'SELECT pg_sleep(1) FROM unnest(CAST(:n AS bigint))'", ["pg_sleep(", "unnest(", "AS bigint)"]),
    ("text = 'run pg_upgrade; nothing is returned: on conflict'", []),
    ("def f():\n    'Returns as RETURNING does.'", []),
])  # fmt: skip
def test_such_sql_would_be_seen(source, words):
    assert list(special(ast.parse(source))) == words


def test_a_function_takes_a_channel_or_a_database():
    """A channel and the database of another one would not be noticed."""
    assert [f"{path}:{getattr(node, 'lineno', 0)}" for path, node in nodes() if takes_both(node)] == []


@pytest.mark.parametrize(("source", "seen"), [
    ("engine.dialect.name == 'sqlite'", True),
    ("'postgresql' != name", True),
    ("name in ('mysql', 'sqlite')", True),
    ("'sqlite:' in url", False),
])  # fmt: skip
def test_a_comparison_would_be_seen(source, seen):
    assert any(map(compares_a_kind, ast.walk(ast.parse(source)))) == seen


def test_a_function_that_takes_both_would_be_seen():
    sources = ("def f(database, channel): ...", "def f(channel, *, database): ...", "def f(channel, name): ...")

    assert [any(map(takes_both, ast.walk(ast.parse(source)))) for source in sources] == [True, True, False]


#: The commands that texts advise, up to the end of the sentence or of its part.
ADVISED = re.compile(
    r"outbox (?:relay|check|half|parked|subscriptions|extract|report|purge|erase|db|restore)\b(?:\{[^}]*\}|[^;.,{])*"
)
#: Values that a shell takes as they are: numbers, plain identifiers, options of our own.
PLAIN = {"id", "schema", "verb", "where", "self._only", "grace.total_seconds()", "state"}


def unquoted() -> Iterator[str]:
    """Values in commands that a text advises, as nobody has quoted them: names hold `*`, blanks and quotes."""
    for path, node in nodes():
        if isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else f"{{{unparsed(each)}}}" for each in node.values)
            for command in ADVISED.findall("".join(map(str, parts))):
                values = re.findall(r"\{([^}]*)\}", command)
                yield from (
                    f"{path}: {each} in {command}"
                    for each in values
                    if each not in PLAIN and "quote(" not in each and "option" not in each
                )


def unparsed(value: ast.expr) -> str:
    return ast.unparse(value.value) if isinstance(value, ast.FormattedValue) else ast.unparse(value)


def test_a_command_that_a_text_advises_can_be_pasted_into_a_shell():
    assert list(unquoted()) == []
