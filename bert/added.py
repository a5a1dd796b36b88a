"""Tokens that a text holds as a whole, found before it is cut into words: special ones, and those that were added.

The rules are those of the tokenizers library. A token that is not `normalized` stands in the text as it is written; one
that is stands in the normalised text, in its own normalised form. A `single_word` has no letter or digit beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

NOTHING = re.compile(r"((?!))")


class TokenFinder:
    """Finds tokens in a text: of those that begin at one place, the longest."""

    def __init__(self, tokens: Mapping[str, Mapping[str, Any]], ids: Mapping[str, int]):
        """tokens: by the form in which they are looked for. ids: by their content."""
        self.ids = {form: ids[token["content"]] for form, token in tokens.items()}
        longest_first = sorted(tokens, key=len, reverse=True)
        found = [
            rf"(?<!\w){re.escape(form)}(?!\w)" if tokens[form].get("single_word") else re.escape(form)
            for form in longest_first
        ]
        self.pattern = re.compile(f"({'|'.join(found)})") if found else NOTHING

    def parts(self, text: str) -> Iterator[tuple[str, int | None, int]]:
        """The tokens of a text and what stands between them: the part, its id if it is a token, and its place."""
        place = 0
        for number, part in enumerate(self.pattern.split(text)):
            if part:
                yield part, self.ids[part] if number % 2 else None, place
            place += len(part)


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
