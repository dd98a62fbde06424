"""Starts the hub's web server, and prepares its database and static files."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.storage.whole import write_atomic
from shoestring_hub.server.configure import CLIPS, FAST, LOOPBACK, STATIC, ClipService, Opening, Place, configure
from shoestring_hub.server.sandbox import fault

log = logging.getLogger("shoestring")
KEPT_OPEN = 30
"""Seconds for which an idle connection stays open, so that the next page that a reader opens needs no new one."""
BUNDLES = {
    "pages.css": ("uplot/uPlot.min.css", "page.css", "hub/hub.css"),
    "charts.js": ("uplot/uPlot.iife.min.js", "curves.js", "chart.js", "controls.js", "hub/live.js"),
}
"""Maps each bundle to the files joined in it; fewer files load faster, because browsers fetch six at a time."""


@dataclass(frozen=True)
class Listening:
    """Address that the hub listens on, its TLS certificate, and its numbers of processes and threads."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 2
    threads: int = 4
    certificate: Path | None = None
    key: Path | None = None


def serve(place: Place, listening: Listening, opening: Opening = FAST, clips: ClipService = CLIPS) -> int:
    """Migrate the database, and serve and convert clips until a signal stops the server.

    Raises:
        ConfigError: other machines would reach the hub without TLS, or the host name is missing.
        ShoestringError: the database cannot be migrated.
    """
    tls = bool(listening.certificate and listening.key)
    if listening.host not in [name.strip("[]") for name in LOOPBACK] and not tls:
        hint = "add --certificate and --key, or listen on 127.0.0.1 behind a proxy that has them, with --name"
        raise ConfigError(f"the hub listens without TLS on loopback only, not on `{listening.host}`", hint=hint)
    if tls and not place.name:
        raise ConfigError("--name is missing: the host name in the certificate", hint="add --name hub.example.org")
    clips = replace(clips, off=_fault_of_clips(clips))
    configure(place, opening, clips)
    prepare()
    from gunicorn.app.base import BaseApplication

    from shoestring_hub.server.texts import texts

    texts()  # compiles the templates once, for all workers
    if clips.off:
        print(f"clips are off: {clips.off}", flush=True)
    else:
        from shoestring_hub.server.clip_worker import start

        start(clips.workers)

    def print_address(server: Any) -> None:
        listener = server.LISTENERS[0].getsockname()
        shown = f"https://{place.name}:{listener[1]}" if tls else f"http://{listener[0]}:{listener[1]}"
        behind = f" (reached as https://{place.name})" if place.name and not tls else ""
        print(f"hub: {shown}{behind}", flush=True)

    class Hub(BaseApplication):
        """The web server of the Django project configured in this process; workers are forked from this process."""

        def load_config(self) -> None:
            options: dict[str, Any] = {
                "bind": f"{listening.host}:{listening.port}",
                "workers": listening.workers,
                "threads": listening.threads,
                "worker_class": "gthread",
                "timeout": 120,
                "keepalive": KEPT_OPEN,
                "limit_request_line": 8190,
                "graceful_timeout": 10,
                "certfile": str(listening.certificate) if tls else None,
                "keyfile": str(listening.key) if tls else None,
                "when_ready": print_address,
                "loglevel": "warning",
            }
            for name, value in options.items():
                self.cfg.set(name, value)

        def load(self) -> Any:
            from django.core.wsgi import get_wsgi_application

            return get_wsgi_application()

    Hub().run()
    return 0


def _fault_of_clips(clips: ClipService) -> str:
    if clips.quota <= 0:
        raise ConfigError("--clip-quota must be positive", hint="--clip-workers 0 switches clips off")
    if clips.accel and not (clips.accel.startswith("/") and clips.accel.endswith("/")):
        raise ConfigError(f"--clip-accel `{clips.accel}` must begin and end with a slash", hint="--clip-accel /sent/")
    return "the hub was started with --clip-workers 0" if clips.workers < 1 else fault()


def prepare() -> None:
    """Migrate the database to this version, and collect scripts and styles.

    Raises:
        ShoestringError: the database cannot be reached or migrated.
    """
    from django.conf import settings
    from django.core.management import call_command
    from django.db import Error, connection, transaction

    try:
        # One transaction for all migrations: by default, Django records some migrations only after committing them,
        # and a kill in between would leave tables that the next start could not create. SQLite can change tables
        # inside a transaction only while foreign keys are not checked.
        with connection.constraint_checks_disabled(), transaction.atomic():
            call_command("migrate", verbosity=0, interactive=False)
    except Error as error:
        reason = str(error).strip().splitlines()[0]
        raise ShoestringError(f"cannot prepare the hub's database: {reason}", hint="see --database") from error
    for name, parts in BUNDLES.items():
        paths = [next(path for root in STATIC if (path := root / part).exists()) for part in parts]
        texts = [path.read_text() for path in paths]  # own file: part of this package
        first = '"use strict";\n' if name.endswith(".js") else ""  # has an effect only as the first statement
        path, joined = settings.HUB.bundles / name, (first + "\n".join(texts)).encode()
        if not path.exists() or path.read_bytes() != joined:  # own file: an earlier start wrote it
            write_atomic(path, joined)
    call_command("collectstatic", verbosity=0, interactive=False)
