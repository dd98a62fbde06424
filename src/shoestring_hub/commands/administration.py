"""Arguments of `shoestring hub serve` and of the commands for administrators on the hub's machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from shoestring.commands.printing import say, say_lines


@dataclass(frozen=True)
class HubPlace:
    """Location of a hub: its folder, its database and its host name."""

    folder: Positional[Path] = Path("hub")
    """Folder of the hub, which `serve` creates. It holds the files of runs, the key that signs sessions and, unless
    another database is named, the database."""
    database: str = ""
    """URL of a PostgreSQL database, such as postgresql://hub@/hub?host=/run/postgresql. Defaults to an SQLite database
    in the folder, which is enough while only a few people write at the same time."""
    name: str = ""
    """Host name under which browsers reach the hub over TLS, such as hub.example.org. Without a host name, the hub
    answers on this machine only."""


@dataclass(frozen=True)
class ListeningOptions:
    """Address to listen on, TLS certificate, and numbers of processes and threads."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address but a loopback address needs a certificate."""
    port: int = 8000
    """Port to listen on; 0 takes a free one, which is printed."""
    workers: int = 2
    """Number of server processes. More processes serve more people at the same time; each takes about 80 MiB."""
    threads: int = 4
    """Number of threads in each process; with several threads, a slow download does not block other requests."""
    certificate: Annotated[Path | None, arg(metavar="PATH")] = None
    """File of the TLS certificate, in PEM format. Without it, a proxy in front of the hub must provide TLS."""
    key: Annotated[Path | None, arg(metavar="PATH")] = None
    """File of the certificate's private key, in PEM format."""


@dataclass(frozen=True)
class OpeningOptions:
    """Measures that make pages open fast; each can be switched off alone, to find out what it brings."""

    keep_templates: bool = True
    """Whether browsers store the fixed texts of pages, so that only the data of a page are sent."""
    send_differences: bool = True
    """Whether a browser that has an earlier state of a page is sent only what has changed since."""
    fetch_ahead: bool = True
    """Whether browsers fetch the page that the pointer is about to open, which takes requests that may be in vain."""


@dataclass(frozen=True)
class ClipOptions:
    """Conversion and storage of clips."""

    clip_workers: int = 1
    """Number of processes that convert clips with ffmpeg; each uses about two cores while it works. 0 switches clips
    off."""
    clip_quota: float = 20.0
    """Maximum size of all clips of a project together, in gigabytes."""
    clip_accel: str = ""
    """Path below which nginx, as a proxy in front of the hub, sends the folder of clips, such as /sent/: an internal
    location of nginx's configuration. Without it the hub sends clips itself."""


@dataclass(frozen=True)
class ServeHub:
    """Arguments of `shoestring hub serve`."""

    place: HubPlace = field(default_factory=HubPlace)
    """Location of the hub: its folder, its database and its host name."""
    listening: ListeningOptions = field(default_factory=ListeningOptions)
    """Address to listen on, TLS certificate, and numbers of processes and threads."""
    opening: OpeningOptions = field(default_factory=OpeningOptions)
    """Measures that make pages open fast; each can be switched off alone."""
    clips: ClipOptions = field(default_factory=ClipOptions)
    """Conversion and storage of clips."""

    def __call__(self) -> int:
        from shoestring_hub.server.configure import ClipService, Opening, Place
        from shoestring_hub.server.serve import Listening, serve

        clips = ClipService(self.clips.clip_workers, self.clips.clip_quota, self.clips.clip_accel)
        place, listening = Place(**vars(self.place)), Listening(**vars(self.listening))
        return serve(place, listening, Opening(**vars(self.opening)), clips)


@dataclass(frozen=True, kw_only=True)
class AddPerson(HubPlace):
    """Arguments of `shoestring hub person`."""

    person: str
    """Name with which the person signs in."""

    def __call__(self) -> int:
        from shoestring_hub.server.administration import add_person
        from shoestring_hub.server.configure import Place

        say_lines(add_person(Place(self.folder, self.database, self.name), self.person))
        return 0


@dataclass(frozen=True, kw_only=True)
class Deactivate(HubPlace):
    """Arguments of `shoestring hub deactivate`."""

    person: str
    """Name of the person whose access ends."""

    def __call__(self) -> int:
        from shoestring_hub.server.administration import deactivate
        from shoestring_hub.server.configure import Place

        say(deactivate(Place(self.folder, self.database, self.name), self.person))
        return 0


@dataclass(frozen=True)
class Clean(HubPlace):
    """Arguments of `shoestring hub clean`."""

    def __call__(self) -> int:
        from shoestring_hub.server.administration import clean
        from shoestring_hub.server.configure import Place

        say(clean(Place(self.folder, self.database, self.name)))
        return 0


@dataclass(frozen=True)
class HubFigures(HubPlace):
    """Arguments of `shoestring hub figures`."""

    def __call__(self) -> int:
        from shoestring_hub.server.administration import figures
        from shoestring_hub.server.configure import Place

        say_lines(figures(Place(self.folder, self.database, self.name)))
        return 0


@dataclass(frozen=True)
class CheckHub(HubPlace):
    """Arguments of `shoestring hub check`."""

    def __call__(self) -> int:
        from shoestring_hub.server.administration import check
        from shoestring_hub.server.configure import Place

        lines = check(Place(self.folder, self.database, self.name))
        say_lines(lines or ["nothing to object"])
        return 1 if lines else 0


@dataclass(frozen=True, kw_only=True)
class BackUp(HubPlace):
    """Arguments of `shoestring hub backup`."""

    to: Path
    """Folder of the backup; a later backup to the same folder copies only what is new."""

    def __call__(self) -> int:
        from shoestring_hub.server.backup import back_up
        from shoestring_hub.server.configure import Place

        say(back_up(Place(self.folder, self.database, self.name), self.to))
        return 0


@dataclass(frozen=True, kw_only=True)
class Restore(HubPlace):
    """Arguments of `shoestring hub restore`."""

    backup: Path
    """Folder of the backup, as `shoestring hub backup` wrote it."""

    def __call__(self) -> int:
        from shoestring_hub.server.backup import restore
        from shoestring_hub.server.configure import Place

        say(restore(self.backup, Place(self.folder, self.database, self.name)))
        return 0
