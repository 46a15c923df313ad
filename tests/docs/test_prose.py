"""What users read is plain: short sentences, short pages, and nouns where pronouns could stand."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest

import outbox
from outbox.cli import main
from tests.support.pages import TOP

MOST_WORDS = 30
MOST_LINES = 300
PAGES = sorted(
    str(path.relative_to(TOP)) for path in [*TOP.glob("*.md"), *TOP.glob("docs/*.md"), *TOP.glob("examples/**/*.md")]
)

_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.)\s)")
_MARK = re.compile(r"^(?:[-*>]|\d+\.)\s+")
#: A colon or a semicolon ends a sentence as well, where a list or another sentence follows.
_END = re.compile(r"(?<=[.!?])[)*_]*\s+|(?<=[:;])\s+(?=[A-Z*(`])")
_WORD = re.compile(r"[\w'%/-]+")

PRONOUNS = {
    "it", "its", "itself", "this", "that", "these", "those", "one", "ones", "what", "which", "such", "they", "them",
    "their", "theirs", "he", "him", "his", "she", "her", "who", "whom", "whose", "something", "anything",
    "everything", "nothing", "someone", "anyone", "everyone", "nobody", "somebody", "everybody", "others",
}  # fmt: skip
#: Pronouns in 100 words of a page, or of a room's docstrings, error texts, log lines and help.
MOST_PRONOUNS = 7.0
#: Fewer in a page of so many words, and its nouns are repeated where a reader knows what is meant.
FEWEST_PRONOUNS, WORDS_OF_A_LONG_PAGE = 5.0, 300


def sentences(text: str) -> Iterator[str]:
    """The sentences of a Markdown text, without its code, its tables and its headings."""
    prose = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    for block in map(str.strip, _BLOCK.split(prose)):
        if block and block[0] not in "|#":
            plain = re.sub(r"`[^`]*`", "code", _MARK.sub("", block))
            yield from _END.split(" ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain).split()))


def too_long(text: str) -> list[str]:
    """The sentences with too many words."""
    return [sentence for sentence in sentences(text) if len(_WORD.findall(sentence)) > MOST_WORDS]


def helps(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """Each command and option below this one, with what `--help` says of it."""
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from helps(found, f"{name} {each}")


def texts(source: str) -> Iterator[str]:
    """The docstrings and other texts of a Python file that have four words or more."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 4:
            yield node.value


def words(texts: Iterable[str]) -> list[str]:
    """The words of texts, in lower case."""
    return [word.lower() for text in texts for word in re.findall(r"[A-Za-z']+", text)]


def pronouns(texts: Iterable[str]) -> float:
    """How many of 100 words are pronouns."""
    all_words = words(texts)
    return 100 * sum(word in PRONOUNS for word in all_words) / max(1, len(all_words))


def rooms() -> dict[str, list[Path]]:
    """The files of each folder of the package; those beside the folders are the room `outbox`."""
    package = Path(outbox.__file__).parent
    found: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        found.setdefault(parts[0] if len(parts) > 1 else "outbox", []).append(path)
    return found


def test_no_page_has_a_long_sentence():
    assert {page: long for page in PAGES if (long := too_long((TOP / page).read_text()))} == {}


def test_no_page_is_longer_than_a_reader_s_patience():
    lines = {page: len((TOP / page).read_text().splitlines()) for page in PAGES}

    assert {page: number for page, number in lines.items() if number > MOST_LINES} == {}


def test_a_page_says_nouns_instead_of_pronouns():
    share = {page: pronouns(sentences((TOP / page).read_text())) for page in PAGES}

    assert {page: each for page, each in share.items() if each > MOST_PRONOUNS} == {}


def test_a_long_page_repeats_no_noun_for_the_sake_of_the_count():
    said = {page: [*sentences((TOP / page).read_text())] for page in PAGES}

    long = {page: pronouns(each) for page, each in said.items() if len(words(each)) >= WORDS_OF_A_LONG_PAGE}
    assert len(long) > 30
    assert {page: share for page, share in long.items() if share < FEWEST_PRONOUNS} == {}


def test_no_help_has_a_long_sentence():
    found = {name: too_long(text) for name, text in helps(main, "outbox")}

    assert len(found) > 100
    assert {name: long for name, long in found.items() if long} == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("word " * 30, 0),
        ("word " * 31, 1),
        ("word " * 20 + "end. Another " + "word " * 20, 0),
        ("word " * 20 + "\nword " * 20, 1),
        ("- word " + "word " * 20 + "\n- word " + "word " * 20, 0),
        ("```\n" + "word " * 40 + "\n```", 0),
        ("`" + "word " * 40 + "`", 0),
        ("| " + "word " * 40 + "|", 0),
    ],
)
def test_a_long_sentence_would_be_seen(text, number):
    assert len(too_long(text)) == number


@pytest.mark.smoke("reads every text of the package")
def test_a_room_says_nouns_instead_of_pronouns():
    found = {
        room: pronouns(text for path in paths for text in texts(path.read_text())) for room, paths in rooms().items()
    }

    assert len(found) > 10
    assert {room: rate for room, rate in found.items() if rate > MOST_PRONOUNS} == {}


def test_pronouns_are_counted_in_texts_of_four_words_or_more():
    """Comments, names and short texts are left out; so is everything that only contains the letters of a pronoun."""
    source = '''
"""Wait until those are done that `it` names."""
it = "that is it"  # it is not what they want
raise ValueError("One of the sites splits: " f"{it} itself gives its own item away")
'''

    assert sorted(texts(source)) == [
        " itself gives its own item away",
        "One of the sites splits: ",
        "Wait until those are done that `it` names.",
    ]
    assert pronouns(texts(source)) == 100 * 6 / 19
