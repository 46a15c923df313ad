"""Bodies and values in a page: nothing is hidden, nothing is rounded, and little is shown of what is large."""

import json

import pytest

from outbox.dashboard.bodies import MOST_BYTES, ShownBody, shown
from outbox.dashboard.values import plain, visible

JSON = "application/json"


def as_read(body: ShownBody) -> str:
    """The text of a body as a browser shows it."""
    return body.text.unescape()


@pytest.mark.parametrize(("body", "content_type", "kind", "text"), [
    (b"", None, "empty", ""),
    (b"42", "text/plain", "text", "42"),
    (b'{"id": 9223372036854775809, "sum": 1.10, "big": 1e400}', JSON, "json",
     '{\n  "id": 9223372036854775809,\n  "sum": 1.10,\n  "big": 1e400\n}'),
    (b'[{}, [], {"a":[1,{"b":null}]}]', None, "json",
     '[\n  {},\n  [],\n  {\n    "a": [\n      1,\n      {\n        "b": null\n      }\n    ]\n  }\n]'),
    (b'{"a": 1, "a": 2}', "application/vnd.shop+json", "json", '{\n  "a": 1,\n  "a": 2\n}'),
    (rb'{"a": "x, {y}: \"[z]\" \u202e"}', JSON, "json", '{\n  "a": "x, {y}: \\"[z]\\" \\u202e"\n}'),
    (b"[1,]", JSON, "text", "[1,]"),
    (b'{"a": 1}', "text/plain", "text", '{"a": 1}'),
    (b"[" * 60_000, JSON, "text", "[" * 60_000),
    ("Grüße".encode("latin-1"), "text/plain; charset=ISO-8859-1", "text", "Grüße"),
    (b"abc", "text/plain; charset=punycode", "text", "abc"),
    (b"\x00\x01\xff", JSON, "hex", f"00000000  {'00 01 ff':47}  ..."),
    (b"\x00\x01\x02\x03", "text/plain", "hex", f"00000000  {'00 01 02 03':47}  ...."),
])  # fmt: skip
def test_a_body_is_shown_as_what_it_is(body, content_type, kind, text):
    found = shown(body, content_type)

    assert (found.kind, as_read(found), found.size, found.cut) == (kind, text, len(body), False)


def test_a_body_that_is_packed_stays_packed():
    found = shown(b"[1, 2]", JSON, {"Content-Encoding": "gzip"})

    assert (found.kind, found.note) == ("hex", "bytes, packed with gzip, 6 bytes")


@pytest.mark.parametrize(("body", "kind"), [
    (b'["' + b"x" * 4 * 1024**2 + b'"]', "json"),
    (b"[" + b"123456789, " * 400_000 + b"1]", "json"),
    (b"[" * 4 * 1024**2, "json"),
    (b"[see here] " * 400_000, "text"),
    ("é".encode() * 2 * 1024**2, "text"),
    (b"\xff" * 4 * 1024**2, "hex"),
    (b"\xc2\x80" * 2 * 1024**2, "text"),
])  # fmt: skip
def test_of_four_megabytes_the_first_64_kib_are_shown(body, kind):
    found = shown(body)

    assert (found.kind, found.cut, found.size) == (kind, True, len(body))
    assert found.note.endswith(", the first 64 KiB of 4 MiB" if len(body) == 4 * 1024**2 else " MiB")
    assert len(found.text) < 48 * MOST_BYTES


def test_what_is_cut_is_the_beginning_to_the_last_letter():
    numbers = ", ".join(str(2**63 + n) for n in range(10_000))

    found = as_read(shown(f"[{numbers}]".encode(), JSON))

    assert "".join(found.split()) == "".join(f"[{numbers}]"[:MOST_BYTES].split())


def test_json_keeps_every_letter_between_its_blanks():
    body = json.dumps({"a\n": [1.5, {"b": ["\t ,:{}[]\\", True]}], "c": {}})

    found = as_read(shown(body.encode(), JSON))

    assert (json.loads(found), "".join(found.split())) == (json.loads(body), "".join(body.split()))


@pytest.mark.parametrize(("text", "html", "attribute"), [
    ("order-7", "order-7", "order-7"),
    ("<script>", "&lt;script&gt;", "<script>"),
    ("a\u202etxt", 'a<span class="control">\\u202e</span>txt', "a\\u202etxt"),
    ("a\x00\n", 'a<span class="control">\\x00</span><span class="control">\\x0a</span>', "a\\x00\\x0a"),
    ("\ud800", '<span class="control">\\ud800</span>', "\\ud800"),
    ("שלום 東京 🎉", "שלום 東京 🎉", "שלום 東京 🎉"),
])  # fmt: skip
def test_nothing_in_a_value_is_hidden(text, html, attribute):
    assert (visible(text), plain(text)) == (f"<bdi>{html}</bdi>", attribute)


def test_line_ends_and_tabs_of_a_body_stay():
    assert str(shown(b"a\n\tb\r\nc\x00d" + b"e" * 90).text)[:74] == (
        'a\n\tb<span class="control">\\x0d</span>\nc<span class="control">\\x00</span>de'
    )
