"""What users read is plain: no sentence has more than 30 words."""

import re
from collections.abc import Iterator

import click
import pytest

from outbox.cli import main
from tests.support.pages import TOP

MOST_WORDS = 30
PAGES = sorted(
    str(path.relative_to(TOP)) for path in [*TOP.glob("*.md"), *TOP.glob("docs/*.md"), *TOP.glob("examples/**/*.md")]
)

_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.)\s)")
_MARK = re.compile(r"^(?:[-*>]|\d+\.)\s+")
#: A colon or a semicolon ends a sentence as well, where a list or another sentence follows.
_END = re.compile(r"(?<=[.!?])[)*_]*\s+|(?<=[:;])\s+(?=[A-Z*(`])")
_WORD = re.compile(r"[\w'%/-]+")


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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_long_sentence(page):
    assert too_long((TOP / page).read_text()) == []


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
