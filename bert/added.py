"""Tokens that a text holds as a whole, found before it is cut into words: special ones, and those that were added.

The rules are those of the tokenizers library, but for `lstrip` and `rstrip`. A token that is not `normalized` stands in
the text as it is written; one that is stands in the normalised text, in its own normalised form. A `single_word` has no
letter or digit beside it.

By `lstrip` and `rstrip` a token takes the spaces beside it. Here it never does: spaces are no tokens of a BERT, so only
offsets differ; and ids, where another added token begins or ends with a space.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

NOTHING = re.compile("(?!)")


class TokenFinder:
    """Finds tokens in a text: of those that begin at one place, the longest."""

    def __init__(self, tokens: Mapping[str, Mapping[str, Any]], ids: Mapping[str, int]):
        """tokens: by the form in which they are looked for. ids: by their content."""
        self.ids = {form: ids[token["content"]] for form, token in tokens.items()}
        self.single_words = {form for form, token in tokens.items() if token.get("single_word")}
        longest_first = sorted(tokens, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else NOTHING

    def parts(self, text: str) -> Iterator[tuple[str, int | None, int]]:
        """The tokens of a text and what stands between them: the part, its id if it is a token, and its place."""
        place = 0
        for match in self.pattern.finditer(text):
            start, end = match.span()
            beside = text[max(0, start - 1) : start] + text[end : end + 1]
            if match.group() in self.single_words and any(map(_is_of_word, beside)):
                continue  # as in the library, no other token is looked for within it
            if start > place:
                yield text[place:start], None, place
            yield match.group(), self.ids[match.group()], start
            place = end
        if place < len(text):
            yield text[place:], None, place


def _is_of_word(char: str) -> bool:
    """What Rust's regular expressions call \\w: letters, marks, digits, connecting punctuation, joiners."""
    kind = unicodedata.category(char)
    return char in "\u200c\u200d" or kind[0] in "LM" or kind in ("Nd", "Nl", "Pc")


def finders(
    tokens: Iterable[Mapping[str, Any]],
    ids: Mapping[str, int],
    normalize: Callable[[str], Iterable[tuple[str, int]]],
) -> tuple[TokenFinder, TokenFinder]:
    """What finds the tokens of a text as it is written, and those of a normalised one."""
    as_written = {token["content"]: token for token in tokens if not token.get("normalized")}
    folded = {
        "".join(char for char, _ in normalize(token["content"])): token for token in tokens if token.get("normalized")
    }
    return TokenFinder(as_written, ids), TokenFinder({form: token for form, token in folded.items() if form}, ids)
