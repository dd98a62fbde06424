"""Arguments of `shoestring hub serve` and of what administrators do on the hub's machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from shoestring.commands.printing import say, say_lines


@dataclass(frozen=True)
class HubPlace:
    """Place of a hub: its folder, its database and its name."""

    folder: Positional[Path] = Path("hub")
    """Folder of the hub, which `serve` makes: files of runs, the key that signs sessions, and the database unless
    another one is named."""
    database: str = ""
    """URL of a PostgreSQL database, such as postgresql://hub@/hub?host=/run/postgresql. Defaults to SQLite in the
    folder, which is enough for a few people who write at once."""
    name: str = ""
    """Name of the host under which browsers reach the hub by TLS, such as hub.example.org. Without a name the hub
    answers on this machine only."""


@dataclass(frozen=True)
class ListeningOptions:
    """Address of the hub and the processes that answer there."""

    host: str = "127.0.0.1"
    """Address to listen on. Other addresses than those of this machine need a certificate."""
    port: int = 8000
    """Port to listen on; 0 takes a free one, which is printed."""
    workers: int = 2
    """Number of processes that answer. More serve more people at once, and take about 80 MiB each."""
    threads: int = 4
    """Number of threads of each process, so that a slow download does not keep others waiting."""
    certificate: Annotated[Path | None, arg(metavar="PATH")] = None
    """File of the certificate for TLS, in PEM. Without one, TLS is the work of a proxy before the hub."""
    key: Annotated[Path | None, arg(metavar="PATH")] = None
    """File of the certificate's key, in PEM."""


@dataclass(frozen=True)
class ServeHub:
    """Arguments of `shoestring hub serve`."""

    place: HubPlace = field(default_factory=HubPlace)
    """Place of the hub: its folder, its database and its name."""
    listening: ListeningOptions = field(default_factory=ListeningOptions)
    """Address of the hub and the processes that answer there."""

    def __call__(self) -> int:
        from shoestring_hub.server.configure import Place
        from shoestring_hub.server.serve import Listening, serve

        return serve(Place(**vars(self.place)), Listening(**vars(self.listening)))


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
