"""The settings of the server: where it listens, who may use it, and what a client may ask for; free of torch."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from shoestring.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where the server listens, who may use it, and the limits on what is asked of it.

    Raises:
        ConfigError: a value out of range, or no API key where other machines can connect.
    """

    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback address needs an API key."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_keys: tuple[str, ...] = ()
    """Keys, one of which a client must send as a bearer token; without any, everybody who can connect may use it."""
    origins: tuple[str, ...] = ()
    """Origins of web pages, such as https://example.org, whose scripts may use the server (CORS); by default none."""
    max_tokens: int = 0
    """Largest number of tokens that a client may ask for in one text; 0 is what the context has room for."""
    queue: int = 256
    """Largest number of texts that wait for a slot; further ones are refused with status 429."""
    clients: int = 512
    """Largest number of open connections; further ones are refused with status 503."""
    body: int = 4 << 20
    """Largest size of a request's body, in bytes; a larger one is refused with status 413."""
    timeout: float = 600.0
    """Seconds that one request may take, waiting included."""
    patience: float = 20.0
    """Seconds that a client may take to send a request, or to take in what was sent, before it is disconnected."""
    grace: float = 30.0
    """Seconds that running texts have left to end once the server is told to stop."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}", hint="give a number from 0 to 65535")
        if self.max_tokens < 0:
            raise ConfigError(f"max_tokens is {self.max_tokens}", hint="give 0 for what the context has room for")
        for name in ("queue", "clients", "body", "timeout", "patience", "grace"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give a positive number")
        if not self.loopback and not self.api_keys:
            raise ConfigError(
                f"on {self.host} other machines can connect, and no API key is asked for",
                hint="give --api-key-file, or listen on 127.0.0.1",
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def admits(self, key: str) -> bool:
        """Whether it is one of the API keys; takes as long for a wrong one as for a right one."""
        matches = [hmac.compare_digest(key.encode(errors="replace"), known.encode()) for known in self.api_keys]
        return any(matches) or not self.api_keys


def is_loopback(host: str) -> bool:
    """Whether a host's name or address leads to this machine alone."""
    host = host.lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_keys(path: Path) -> tuple[str, ...]:
    """The API keys in a file, one a line.

    Raises:
        ConfigError: the file cannot be read, or holds no key that a client could send.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
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
