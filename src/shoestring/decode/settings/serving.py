"""Settings of the server: slots, address, access and limits for clients; does not import torch."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from tyro.conf import Suppress, UseAppendAction

from shoestring.core.errors import ConfigError
from shoestring.storage import foreign


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Server of one model: its slots, its address, who may use it, and the limits on what clients may ask for.

    Raises:
        ConfigError: a value is out of range, or other machines can connect and no API key is set.
    """

    slots: int = 4
    """Number of texts that are generated at the same time; more take more memory and make each text slower."""
    context: int = 0
    """Largest number of tokens of a prompt and its text together; each slot reserves memory for as many. Defaults to
    the model's own context, at most 8192."""
    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback address needs --api-key-file."""
    port: int = 8000
    """Port to listen on; 0 takes a free port."""
    name: str = ""
    """Name that clients send in the field `model`; defaults to the name of the model's folder."""
    api_key_file: Path | None = None
    """File with API keys, one per line; every client must send one of the keys. By default no key is needed."""
    api_keys: Annotated[tuple[str, ...], Suppress] = ()
    """Further API keys, in addition to the keys in the file. The command line has no flag for them, because `ps` shows
    flags to everybody."""
    adapter: Annotated[tuple[str, ...], UseAppendAction] = ()
    """Low-rank adapter (LoRA) to serve beside the model, as NAME=FOLDER: a request whose field `model` is the name gets
    its text from the model with this adapter. May be given several times; texts with different adapters share passes
    of the model."""
    adapters_folder: Path | None = None
    """Folder below which administrators may load further adapters while the server runs; by default they may load
    none. Needs --admin-key-file."""
    max_adapters: int = 32
    """Largest number of adapters in memory."""
    admin_key_file: Path | None = None
    """File with the keys of administrators, one per line, who may load and remove adapters; by default nobody may. An
    administrator's key does not count as an API key."""
    admin_keys: Annotated[tuple[str, ...], Suppress] = ()
    """Further keys of administrators, in addition to the keys in the file; like `api_keys`, they have no flag."""
    share_prefixes: bool = False
    """Share cached prompts among API keys. Fewer tokens are then read, but `cached_tokens` and the time of an answer
    tell a client whether its prompt begins like another client's prompt."""
    allow_origin: tuple[str, ...] = ()
    """Origins of web pages, such as https://example.org, whose scripts may use the server (CORS); by default only the
    server's own page may."""
    max_tokens: int = 0
    """Largest number of tokens that a client may ask for in one text; 0 allows as many as the context has room for."""
    queue: int = 256
    """Largest number of texts that wait for a slot; requests for more are refused with status 429. If there are several
    API keys, one key can fill at most half of the queue."""
    requests_per_minute: int = 0
    """Largest number of requests for text that each API key may send per minute; requests beyond this limit are refused
    with status 429. 0 is no limit. Without API keys, the limit holds for all clients together."""
    tokens_per_minute: int = 0
    """Largest number of tokens, of prompts and texts together, that each API key may use per minute; requests that need
    more are refused with status 429. 0 is no limit. Without API keys, the limit holds for all clients together."""
    pass_seconds: float = 0.05
    """Longest time in seconds that a pass of the model over prompts should take; long prompts are divided into as many
    passes as necessary. With a longer time, reading long prompts takes less work, but short requests and running texts
    wait longer for each pass."""
    clients: int = 512
    """Largest number of open connections; further ones are refused with status 503."""
    body: int = 4 << 20
    """Largest size of a request's body, in bytes; a larger one is refused with status 413."""
    timeout: float = 600.0
    """Time limit of one request in seconds, including the wait for a slot."""
    preparation: float = 10.0
    """Seconds that rendering and encoding the prompts of one request may take. A request that takes longer, for example
    because its chat template never ends, is refused with status 400."""
    patience: float = 20.0
    """Seconds that a client may take to send a request, or to read what the server has sent, before it is
    disconnected."""
    grace: float = 30.0
    """Seconds that running texts get to finish once the server is told to stop, by SIGTERM or Ctrl+C."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}", hint="give a number from 0 to 65535")
        if self.max_tokens < 0:
            raise ConfigError(f"max_tokens is {self.max_tokens}", hint="give 0 to use the whole context")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give 0 for no limit")
        positive = ("queue", "clients", "max_adapters", "body", "timeout", "preparation", "patience", "grace")
        for name in (*positive, "pass_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give a positive number")
        if not self.keys and not self.loopback:
            raise ConfigError(
                f"other machines can connect to {self.host}, and no API key is set",
                hint="give --api-key-file, or listen on 127.0.0.1",
            )
        if len(self.adapters) > self.max_adapters:
            raise ConfigError(f"{len(self.adapters)} adapters exceed max_adapters = {self.max_adapters}")
        if self.adapters_folder is not None and not self.administrators:
            raise ConfigError("nobody may load adapters from --adapters-folder", hint="give --admin-key-file")
        if self.adapters_folder is not None and not self.adapters_folder.is_dir():
            raise ConfigError(f"--adapters-folder: `{self.adapters_folder}` is no folder")
        if set(self.administrators) & set(self.keys):
            raise ConfigError(
                "a key is both an API key and an administrator's", hint="give administrators a key of their own"
            )

    @cached_property
    def adapters(self) -> Mapping[str, Path]:
        """The folders of the adapters that are loaded at the start, by name.

        Raises:
            ConfigError: an entry of `adapter` is not of the form NAME=FOLDER, or a name occurs twice.
        """
        folders: dict[str, Path] = {}
        for entry in self.adapter:
            name, equals, folder = entry.partition("=")
            if not (equals and folder and is_adapter_name(name)):
                raise ConfigError(
                    f"--adapter {entry}: expected NAME=FOLDER, with a name of letters, digits and ._:/@+-",
                    hint="for example --adapter sql=runs/sql/model/adapter",
                )
            if name in folders or name == self.name:
                raise ConfigError(f"--adapter {entry}: the name `{name}` is taken", hint="choose another name")
            folders[name] = Path(folder)
        return folders

    @property
    def adaptable(self) -> bool:
        """Whether requests may choose adapters."""
        return bool(self.adapters) or self.adapters_folder is not None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """All API keys. A client must send one of the keys as a bearer token; if there are none, everybody who can
        connect may use the server."""
        return (*self.api_keys, *(read_keys(self.api_key_file) if self.api_key_file is not None else ()))

    @cached_property
    def administrators(self) -> tuple[str, ...]:
        """All keys of administrators, who may load and remove adapters; if there are none, nobody may."""
        return (*self.admin_keys, *(read_keys(self.admin_key_file) if self.admin_key_file is not None else ()))

    def find_key(self, key: str) -> int | None:
        """The index of an API key in `keys`; None if the key is unknown, and 0 for any key if no keys are set."""
        return _index(key, self.keys) if self.keys else 0

    def is_administrator(self, key: str) -> bool:
        """Whether this is the key of an administrator."""
        return _index(key, self.administrators) is not None


def _index(key: str, keys: Sequence[str]) -> int | None:
    """The index of a key; None if it is unknown.

    Checking a wrong key takes as long as checking a right one, so that the response time reveals nothing.
    """
    matches = [hmac.compare_digest(key.encode(errors="replace"), known.encode()) for known in keys]
    return matches.index(True) if any(matches) else None


def is_adapter_name(name: str) -> bool:
    """Whether a name is valid for an adapter."""
    return re.fullmatch(r"[A-Za-z0-9._:/@+-]{1,128}", name) is not None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address, to which only this machine can connect."""
    host = host.lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_keys(path: Path) -> tuple[str, ...]:
    """Read API keys from a file with one key per line.

    Raises:
        ConfigError: the file cannot be read, has no keys, or has a key that is too short or not printable ASCII.
    """
    try:
        lines = foreign.read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"cannot read the API keys in `{path}`: {reason}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys or not all(len(key) >= 16 and key.isascii() and key.isprintable() for key in keys):
        raise ConfigError(
            f"`{path}` holds no API key of at least 16 printable ASCII characters a line",
            hint="python -c 'import secrets; print(secrets.token_urlsafe(32))' prints one",
        )
    return keys
