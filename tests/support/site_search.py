"""The search of the built site, as its script in the browser finds and sorts pages; objects and index entries apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The scores of `searchtools.js`: the word in the text, in a title, and as a part of a word there.
_TERM, _TITLE, _PART_OF_TERM, _PART_OF_TITLE = 5, 15, 2, 7


class SiteSearch:
    """Searches the pages of a site."""

    def __init__(self, site: Path) -> None:
        from sphinx.search.en import SearchEnglish

        script = (site / "searchindex.js").read_text()
        self._index: dict[str, Any] = json.loads(script.removeprefix("Search.setIndex(").removesuffix(")"))
        self._language = SearchEnglish({})

    def pages(self, query: str) -> list[str]:
        """Return the pages with all words of a query, the best first; pages that are as good come by title."""
        words = {
            self._language.stem(word)
            for word in re.split(r"\W+", query.lower())
            if word and self._language.word_filter(word)
        }
        scores: dict[int, dict[str, int]] = {}
        for word in words:
            for page, score in self._matches(word):
                scores.setdefault(page, {})[word] = score
        best = {page: max(found.values()) for page, found in scores.items() if len(found) == len(words)}
        for title, places in self._index["alltitles"].items():
            if query.lower() in title.lower() and len(query) * 2 >= len(title):
                for page, anchor in places:
                    score = round(_TITLE * len(query) / len(title)) + (anchor is None)
                    best[page] = max(best.get(page, 0), score)
        order = sorted(best, key=lambda page: (-best[page], self._index["titles"][page].lower()))
        return [self._index["docnames"][page] for page in order]

    def _matches(self, word: str) -> Iterator[tuple[int, int]]:
        """Yield pages with a word, each with a score; a later score replaces an earlier one."""
        for kind, score in (("terms", _TERM), ("titleterms", _TITLE)):
            yield from ((page, score) for page in self._of(kind, word))
        for kind, score in (("terms", _PART_OF_TERM), ("titleterms", _PART_OF_TITLE)):
            if word not in self._index[kind]:
                terms = [term for term in self._index[kind] if word in term]
                yield from ((page, score) for term in terms for page in self._of(kind, term))

    def _of(self, kind: str, term: str) -> list[int]:
        found = self._index[kind].get(term, [])
        return found if isinstance(found, list) else [found]
