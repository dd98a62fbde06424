"""Writes a page with replies to messages, chosen from emoji or from the user's own clips.

python -m shoestring_recipes.reply RUN MESSAGES [--clips FOLDER] [--out replies.html] [--count 5]

MESSAGES is a text file with a message on each line. `--clips` is a folder of GIF, WebP and MP4 files, whose names
serve as tags; files that cannot be read are reported and left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import ConfigError, DataError, ShoestringError
from shoestring.models.loading import load_model
from shoestring.storage import foreign
from shoestring_recipes.reply.clips import animated, corners, format_of, gif, read_clip
from shoestring_recipes.reply.files import words_of
from shoestring_recipes.reply.inventory import ARTS, emoji, pictures
from shoestring_recipes.reply.matching import best, of_clips, of_texts, read_by, taught, vocabulary
from shoestring_recipes.reply.page import Reply, save_page

CREDIT = "Pictures of emoji: Twitter, Inc. and other contributors, CC BY 4.0, animated here."
LARGEST, MESSAGES = 1 << 20, 500
"""Maximum size in bytes of a file of messages, and of a clip that is not converted; and maximum number of messages."""


class OwnClips(NamedTuple):
    """Clips that can be replies."""

    names: list[str]
    tags: list[str]
    frames: Tensor
    """Frames that represent the clips, uint8 (clips, QUARTERS, 3, SIDE, SIDE)."""
    paths: list[Path]
    """Files of the clips; empty for emoji."""

    def shown(self, number: int) -> bytes:
        """Return a clip as a GIF or WebP file for a browser."""
        if not self.paths:
            return gif(animated(pictures(ARTS[0])[number]))
        if self.paths[number].stat().st_size <= LARGEST:
            content = foreign.read_bytes(self.paths[number], LARGEST)
            if format_of(content[:16]) in ("gif", "webp"):
                return content
        return gif(self.frames[number], milliseconds=400)


def of_emoji() -> OwnClips:
    """Return the clips of all emoji."""
    every = emoji()
    return OwnClips([one.name for one in every], [one.tags for one in every], corners(pictures(ARTS[0])), [])


def of_folder(folder: Path, errors: list[str]) -> OwnClips:
    """Return the clips of a folder and its subfolders.

    Args:
        errors: list to which a line is added for each file that cannot be read.

    Raises:
        DataError: no file can be read.
    """
    frames, paths = [], []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."):
        try:
            frames.append(read_clip(path))
            paths.append(path)
        except ShoestringError as error:
            errors.append(f"left out: {foreign.one_line(str(error.args[0]))}")
    if not paths:
        raise DataError(f"`{folder}` has no clip that can be read", hint=next(iter(errors), "name another folder"))
    names = [foreign.one_line(str(path.relative_to(folder))) for path in paths]
    return OwnClips(names, [words_of(path) for path in paths], torch.stack(frames), paths)


def messages_of(path: Path) -> list[str]:
    """Return the lines of a text file that have words.

    Raises:
        DataError: the file cannot be read, is no text, has no words, or has more than `MESSAGES` messages.
    """
    try:
        text = foreign.read_text(path, LARGEST)
    except (OSError, ValueError) as error:
        raise DataError(f"`{path}` cannot be read as text: {foreign.one_line(str(error))[:200]}") from error
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    if not lines:
        raise DataError(f"`{path}` has no words", hint="write a message on each line")
    if len(lines) > MESSAGES:
        raise DataError(f"`{path}` has {len(lines):,} messages; a page shows {MESSAGES}", hint="split the file")
    return lines


def replies(options: argparse.Namespace) -> Iterator[str]:
    """Choose the replies and write the page; yields lines to print."""
    if options.count < 1:
        raise ConfigError(f"--count is {options.count}", hint="ask for 1 reply or more")
    messages, errors = messages_of(options.messages), list[str]()
    model, _ = load_model(options.run)
    clips = of_folder(options.clips, errors) if options.clips else of_emoji()
    yield from errors
    known = taught() | vocabulary(clips.tags)
    texts = of_texts(model, [read_by(model, message, known) for message in messages])
    matches = best(texts, of_clips(model, clips.tags, clips.frames), options.count)
    shown = {number: clips.shown(number) for row in matches for number, _ in row}
    rows = [[Reply(clips.names[number], shown[number], score) for number, score in row] for row in matches]
    save_page(options.out, messages, rows, "" if options.clips else CREDIT)
    yield f"{len(messages)} messages, {len(clips.names):,} clips: {options.out}"


def main(argv: Sequence[str]) -> int:
    """Run the command line, which the module's docstring describes; returns the exit code."""
    flags = argparse.ArgumentParser(prog="python -m shoestring_recipes.reply", description="Find replies to messages.")
    flags.add_argument("run", help="Folder of a run of this recipe.")
    flags.add_argument("messages", type=Path, help="Text file with a message on each line.")
    flags.add_argument("--clips", type=Path, help="Folder of GIF, WebP and MP4 files; emoji by default.")
    flags.add_argument("--out", type=Path, default=Path("replies.html"), help="The page's file.")
    flags.add_argument("--count", type=int, default=5, help="Number of replies to a message.")
    try:
        for line in replies(flags.parse_args(argv)):
            print(line)
    except ShoestringError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
