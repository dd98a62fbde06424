"""Emoji that can be replies: their pictures, tags and texts, which are read from installed packages and never
shipped.

Pictures and tags are those of npm's `emoji-datasource`: Twitter's pictures (CC-BY 4.0) and Google's (Apache 2.0);
Apple's and Facebook's in the same package are not read. Texts are the descriptions of PyPI's `vaderSentiment` and the
keywords of npm's `emojilib` (MIT).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError, DataError
from shoestring.data.pictures import read_picture
from shoestring.storage import foreign
from shoestring_recipes.retrieval.words import terms

NPM = "npm install emoji-datasource@16.0.0 emojilib@4.0.3"
PIP = 'pip install "shoestring[reply]"'
GLOBAL = (Path("/usr/local/lib/node_modules"), Path("/usr/lib/node_modules"))
"""Folders to which `npm install --global` installs, on Debian and elsewhere."""
ARTS = ("twitter", "google")
"""Sets of pictures, by their names in emoji-datasource. Evaluation uses the first; training alternates between both."""
SIDE = 32
"""Height and width of a picture in pixels."""
PHRASES = 3
"""Number of keywords that are joined into one text."""
_LIMIT = 64 << 20


class PinnedFile(NamedTuple):
    """A file of a package, pinned to one version by its digest."""

    package: str
    path: str
    digest: str
    """SHA-256 of the file's content."""


DATA = PinnedFile("emoji-datasource", "emoji.json", "1d602e65be88772bf8cc368ce16b855d719eeddbafe128d471b80203f494d29f")
SHEETS = {
    "twitter": PinnedFile(
        "emoji-datasource",
        "img/twitter/sheets/32.png",
        "2767ef2e87cbfb6cc12ac46596c339549afaf0ae8771cf51100c8853f6bde632",
    ),
    "google": PinnedFile(
        "emoji-datasource",
        "img/google/sheets/32.png",
        "b417e9f6cd4bbc10656bbfd5e13b6e9a2545b55e6a4cf7312d75be1faaa34952",
    ),
}
KEYWORDS = PinnedFile(
    "emojilib", "dist/emoji-en-US.json", "7974e9162e1505aa1b02d07a04e4eefa5c51864d6c32e477121c635201e2eca2"
)
DESCRIPTIONS = PinnedFile(
    "vaderSentiment", "emoji_utf8_lexicon.txt", "b8d54223ae1ce22a3e12c1f745316b71678c328eb5f5d3063a842f37cfbe2823"
)


class Emoji(NamedTuple):
    """An emoji that can be a reply."""

    character: str
    name: str
    tags: str
    """Words that describe the picture: names and the subcategory, without repetitions."""
    texts: tuple[str, ...]
    """Texts that the emoji answers; no two of them have a stem in common."""
    place: tuple[int, int]
    """Column and row in the sheets of pictures."""


def open_pinned(file: PinnedFile, modules: str = "") -> Path:
    """Return the path of a package's file, after checking its digest.

    Args:
        modules: folder with npm's packages; by default the nearest `node_modules` at or above the current folder, or
            one of `GLOBAL`.

    Raises:
        ConfigError: the package is not installed, or the file cannot be read or belongs to another version.
    """
    if file is DESCRIPTIONS:
        spec, install = find_spec(file.package), PIP
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    else:
        here, install = Path.cwd(), NPM
        near = [Path(modules)] if modules else [folder / "node_modules" for folder in (here, *here.parents)]
        folders = [folder / file.package for folder in (*near, *(() if modules else GLOBAL))]
    path = next((folder / file.path for folder in folders if (folder / file.path).is_file()), None)
    if path is None:
        raise ConfigError(f"`{file.package}` is not installed; the recipe `reply` learns from its data", hint=install)
    try:
        digest = hashlib.sha256(foreign.read_bytes(path, _LIMIT)).hexdigest()
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read: {error.strerror}", hint=install) from error
    if digest != file.digest:
        raise ConfigError(f"`{path}` is not the file of the version that the recipe `reply` needs", hint=install)
    return path


@cache
def emoji(modules: str = "") -> tuple[Emoji, ...]:
    """Return the emoji that have pictures of all `ARTS` and at least one text, in the order of their categories;
    variants with skin tones are left out."""
    listed = foreign.read_json(open_pinned(DATA, modules), _LIMIT)
    keywords = {_plain(key): words for key, words in foreign.read_json(open_pinned(KEYWORDS, modules), _LIMIT).items()}
    lines = foreign.read_text(open_pinned(DESCRIPTIONS)).splitlines()
    described = {_plain(key): text for key, _, text in (line.partition("\t") for line in lines)}
    every = []
    for entry in sorted(listed, key=lambda entry: entry["sort_order"]):
        character = "".join(chr(int(code, 16)) for code in entry["unified"].split("-"))
        key = _plain(character)
        words = keywords.get(key, [])
        texts = texts_of([described.get(key) or next(iter(words), ""), *words])
        if texts and all(entry[f"has_img_{art}"] for art in ARTS):
            name = str(entry["name"] or entry["short_name"]).lower()
            place = entry["sheet_x"], entry["sheet_y"]
            every.append(Emoji(character, name, tags_of(entry), texts, place))
    return tuple(every)


def _plain(character: str) -> str:
    """Remove joiners and variation selectors, which not all packages write."""
    return character.replace("\ufe0f", "").replace("\u200d", "")


def tags_of(entry: dict[str, Any]) -> str:
    """Return the words of an entry's names and subcategory, without repetitions."""
    names = [entry["name"] or "", *entry["short_names"], entry["subcategory"]]
    words = " ".join(names).lower().replace("_", " ").replace("-", " ").split()
    return " ".join(dict.fromkeys(words))


def texts_of(phrases: Sequence[str]) -> tuple[str, ...]:
    """Build texts from phrases: the first phrase, a description, is one text; the others, keywords, are joined,
    `PHRASES` to a text.

    A phrase that shares a stem with an earlier one is left out, so that no text reveals another.
    """
    known: set[str] = set()
    chosen = []
    for number, phrase in enumerate(phrases):
        phrase = phrase.replace("_", " ")
        stems = set(terms(phrase))
        if stems and not stems & known:
            known |= stems
            chosen.append((number == 0, phrase))
    words = [phrase for first, phrase in chosen if not first]
    groups = [" ".join(words[start : start + PHRASES]) for start in range(0, len(words), PHRASES)]
    return (*(phrase for first, phrase in chosen if first), *groups)


@cache
def pictures(art: str, modules: str = "") -> Tensor:
    """Return the pictures of all `emoji` on white, uint8 (emoji, 3, SIDE, SIDE)."""
    sheet, size = read_picture(open_pinned(SHEETS[art], modules)), SIDE + 2  # each picture has a border of a pixel
    every = emoji(modules)
    right, bottom = (size * (1 + max(one.place[axis] for one in every)) for axis in range(2))
    if sheet.shape[1] < bottom or sheet.shape[2] < right:
        raise DataError(f"the sheet of {art}'s pictures has the shape {tuple(sheet.shape)}, which is too small")
    corners = [(size * one.place[1] + 1, size * one.place[0] + 1) for one in every]
    return torch.stack([sheet[:, top : top + SIDE, left : left + SIDE] for top, left in corners])
