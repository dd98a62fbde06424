"""Pairs of texts about the same thing: entries of one headword in two dictionaries, with the headword blanked.

WordNet (Debian's package `dict-wn`) and GCIDE, which is Webster's dictionary of 1913 with additions (`dict-gcide`,
GPL), are read where they are installed, and never shipped. Their format is that of dictd: a compressed text, and an
index of headwords with offsets and lengths in base 64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shoestring.core.errors import ConfigError, DataError
from shoestring.storage import foreign

FOLDER = Path("/usr/share/dictd")
PACKAGES = {"wn": "dict-wn", "gcide": "dict-gcide"}
"""Maps the name of a dictionary's files to Debian's package."""
LONGEST, SHORTEST = 600, 20
"""Length to which a text is cut, and length up to which a text is left out, in characters."""
_LIMIT = 256 << 20
_DIGITS = {ord(digit): value for value, digit in enumerate(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
)}  # fmt: skip
_HEADWORD = re.compile(rb"[a-zA-Z]{3,}")
_NOTES = re.compile(r"\[[^\]]*\]|[{}]|\\[^\\]*\\")
"""Matches text that is not a definition: sources, synonyms and etymologies in brackets, and pronunciations."""
_WORD = re.compile(r"[^\W\d_]+")
_OTHER = re.compile(r"[^A-Za-z0-9 ,.;'-]+")
_SPACE = re.compile(r"\s+")


class Pair(NamedTuple):
    """Two texts about the same thing: the entries of a headword in two dictionaries."""

    headword: str
    query: str
    """WordNet's entry."""
    document: str
    """GCIDE's entry."""


def entries(name: str, folder: Path = FOLDER) -> dict[str, list[str]]:
    """Map headwords of a dictionary, in lower case, to their entries; only single words of at least three letters.

    Raises:
        ConfigError: the dictionary is not installed.
        DataError: the dictionary's files cannot be read or are damaged.
    """
    text, index = folder / f"{name}.dict.dz", folder / f"{name}.index"
    if not (text.is_file() and index.is_file()):
        package = PACKAGES.get(name, name)
        raise ConfigError(f"`{package}` is not installed: `{text}` is missing", hint=f"apt install {package}")
    try:
        raw, lines = foreign.read_gzip(text, _LIMIT), foreign.read_bytes(index, _LIMIT).splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"`{text}` cannot be read: {error}") from error
    by_word: dict[str, list[str]] = {}
    for line in lines:
        word, *places = line.split(b"\t")
        if _HEADWORD.fullmatch(word):
            try:
                start, length = map(_number, places[:2])
            except (KeyError, ValueError) as error:
                raise DataError(f"`{index}` is damaged at `{foreign.one_line(word.decode())}`") from error
            by_word.setdefault(word.decode().lower(), []).append(raw[start : start + length].decode(errors="replace"))
    return by_word


def _number(digits: bytes) -> int:
    value = 0
    for digit in digits:
        value = 64 * value + _DIGITS[digit]
    return value


def blanked(headword: str, text: str) -> str:
    """Return a text without notes and without the words that begin with the headword or its stem."""
    headword = headword.lower()
    stem = headword[: max(4, len(headword) - 2)]
    text = _WORD.sub(lambda word: " " if word[0].lower().startswith(stem) else word[0], _NOTES.sub(" ", text))
    return _SPACE.sub(" ", _OTHER.sub(" ", text)).strip()[:LONGEST]


@cache
def pairs(limit: int = 0) -> tuple[Pair, ...]:
    """Return the pairs of the two dictionaries in the order of their headwords.

    Entries that GCIDE took from WordNet are left out.

    Args:
        limit: number of headwords to look at, spread evenly over all of them; 0 looks at all.
    """
    first, second = entries("wn"), entries("gcide")
    headwords = sorted(first.keys() & second.keys())
    return paired(first, second, headwords[:: max(1, len(headwords) // limit)] if limit else headwords)


def paired(first: Mapping[str, list[str]], second: Mapping[str, list[str]], headwords: list[str]) -> tuple[Pair, ...]:
    """Return the pairs of some headwords, without pairs with a text of at most `SHORTEST` characters."""
    chosen = []
    for headword in headwords:
        own = [text for text in second[headword] if "WordNet" not in text]
        pair = Pair(headword, *(blanked(headword, " ".join(texts)) for texts in (first[headword], own)))
        if min(len(pair.query), len(pair.document)) > SHORTEST:
            chosen.append(pair)
    return tuple(chosen)
