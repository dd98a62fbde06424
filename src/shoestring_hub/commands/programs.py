"""Arguments of `shoestring hub login`, `push`, `pull` and `clip`."""

from __future__ import annotations

import getpass
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from shoestring.commands.printing import say, say_lines
from shoestring.commands.shared import RunPath


@dataclass(frozen=True)
class ChosenProject:
    """The project on the hub that a command applies to."""

    project: str = ""
    """Name of the project, as printed by `shoestring hub login`; defaults to the project of the last login."""


@dataclass(frozen=True)
class LogIn:
    """Arguments of `shoestring hub login`, which asks for the token, or reads it from standard input."""

    address: Positional[str]
    """Address of the hub, such as https://hub.example.org."""

    def __call__(self) -> int:
        from shoestring_hub.client.logins import log_in

        token = getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline(1000)
        say(log_in(self.address, token.strip()))
        return 0


@dataclass(frozen=True, kw_only=True)
class Push(ChosenProject):
    """Arguments of `shoestring hub push`."""

    folder: RunPath
    """Folder of the run to send, such as runs/quickstart."""
    checkpoints: bool = False
    """Whether to send checkpoints as well, so that training can resume from them after `shoestring hub pull`."""

    def __call__(self) -> int:
        from shoestring_hub.client.push import push

        outcome = push(self.folder, project=self.project, checkpoints=self.checkpoints)
        say_lines(outcome.lines)
        return 1 if outcome.left_out else 0


@dataclass(frozen=True, kw_only=True)
class Pull(ChosenProject):
    """Arguments of `shoestring hub pull`."""

    run: Positional[int]
    """Number of the run, as its page on the hub shows it."""
    folder: Annotated[Path | None, arg(metavar="PATH")] = None
    """Folder to write; defaults to a folder with the run's name in `runs/`. An interrupted pull continues in it."""

    def __call__(self) -> int:
        from shoestring_hub.client.pull import pull

        say_lines(pull(self.run, self.folder, project=self.project))
        return 0


@dataclass(frozen=True, kw_only=True)
class SendClip(ChosenProject):
    """Arguments of `shoestring hub clip`."""

    file: Positional[Path]
    """Video file to send: MP4, MOV, WebM, Matroska, AVI or GIF."""
    run: Annotated[Path | None, arg(metavar="PATH")] = None
    """Folder of the run that the clip belongs to, such as runs/quickstart; the run must be on the hub. Without it the
    clip belongs to the project."""
    title: str = ""
    """Name of the clip on the hub; defaults to the name of the file."""

    def __call__(self) -> int:
        from shoestring_hub.client.clip import send_clip

        say(send_clip(self.file, run=self.run, project=self.project, title=self.title))
        return 0
