"""Starts the hub's web server, and prepares its database and static files."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.core.errors import ConfigError, ShoestringError
from shoestring_hub.server.configure import LOOPBACK, Place, configure

log = logging.getLogger("shoestring")


@dataclass(frozen=True)
class Listening:
    """Address that the hub listens on, its TLS certificate, and its numbers of processes and threads."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 2
    threads: int = 4
    certificate: Path | None = None
    key: Path | None = None


def serve(place: Place, listening: Listening) -> int:
    """Migrate the database, and serve until a signal stops the server.

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
    configure(place)
    prepare()
    from gunicorn.app.base import BaseApplication

    class Hub(BaseApplication):
        """The web server of the Django project configured in this process; workers are forked from this process."""

        def load_config(self) -> None:
            options: dict[str, Any] = {
                "bind": f"{listening.host}:{listening.port}",
                "workers": listening.workers,
                "threads": listening.threads,
                "worker_class": "gthread",
                "timeout": 120,
                "limit_request_line": 8190,
                "graceful_timeout": 10,
                "certfile": str(listening.certificate) if tls else None,
                "keyfile": str(listening.key) if tls else None,
                "when_ready": lambda server: _say_address(server, tls, place.name),
                "loglevel": "warning",
            }
            for name, value in options.items():
                self.cfg.set(name, value)

        def load(self) -> Any:
            from django.core.wsgi import get_wsgi_application

            return get_wsgi_application()

    Hub().run()
    return 0


def _say_address(server: Any, tls: bool, name: str) -> None:
    listener = server.LISTENERS[0].getsockname()
    shown = f"https://{name}:{listener[1]}" if tls else f"http://{listener[0]}:{listener[1]}"
    print(f"hub: {shown}" + (f" (reached as https://{name})" if name and not tls else ""), flush=True)


def prepare() -> None:
    """Migrate the database to this version, and collect scripts and styles.

    Raises:
        ShoestringError: the database cannot be reached or migrated.
    """
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
    call_command("collectstatic", verbosity=0, interactive=False)
