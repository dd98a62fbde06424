"""The hubs that this user has logged in to: addresses and tokens, in a file that only this user can read."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.storage import foreign
from shoestring.storage.guarded import read_regular, state_folder
from shoestring.storage.records import record
from shoestring.storage.whole import write_atomic

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LIMIT = 1 << 20


@dataclass(frozen=True)
class Login:
    """A token for one project of a hub."""

    address: str
    token: str
    project: str = ""


def log_in(address: str, token: str) -> str:
    """Ask a hub which project a token belongs to, and store the login; returns a message for the user.

    Raises:
        ConfigError: the address is malformed, or would send the token without TLS to another machine.
        ShoestringError: the hub refuses the token, or cannot be reached.
    """
    from shoestring_hub.client.connection import Connection

    login = Login(address if "://" in address else f"https://{address}", token)
    facts = Connection(login, patience=5.0).ask("GET", "whoami")
    login = Login(login.address, token, str(facts.get("project", "")))
    others = [one for one in logins() if (one.address, one.project) != (login.address, login.project)]
    path = _file(make=True)
    write_atomic(path, json.dumps([asdict(one) for one in (login, *others)], indent=2).encode())
    path.chmod(0o600)  # the folder already denies access to other users
    only = ", which only writes" if facts.get("write_only") else ""
    return f"logged in to the project {login.project} as {facts.get('person')} ({facts.get('role')}){only}"


def logins() -> list[Login]:
    """The remembered logins, newest first."""
    with suppress(OSError, ValueError, TypeError):
        entries = foreign.parse_json(read_regular(_file(make=False), _LIMIT, private=True))
        return [record(Login, entry) for entry in entries]
    return []


def login_for(project: str = "") -> Login:
    """The newest login, or the newest login for `project` if a project is named.

    Raises:
        ConfigError: there is no such login.
    """
    known = logins()
    login = next((one for one in known if project in ("", one.project)), None)
    if login is None:
        names = f"; logged in to {', '.join(one.project for one in known)}" if known else ""
        which = f" for the project `{project}`" if project else ""
        raise ConfigError(f"there is no login to a hub{which}{names}", hint="shoestring hub login ADDRESS")
    return login


def _file(*, make: bool) -> Path:
    return state_folder("hub", make=make) / "logins.json"
