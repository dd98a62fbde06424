"""Connects to a study's database, masks the database's URL in messages, and distinguishes outages from other errors.

A user may have put a password anywhere in a URL, so masking does not rely on a pattern. Messages show a URL assembled
from the parts that SQLAlchemy parses, and only if no part can be a fragment of a password that was split at the wrong
character. A driver's message is shown only if it does not contain a secret from the URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import sqlalchemy as sql
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.event import listen
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from shoestring.core.errors import ConfigError

BUSY = 20.0
"""Maximum seconds that a request waits while another worker writes to an SQLite file."""
HIDDEN = "***"
"""Text shown instead of a URL that may reveal a password."""

_FORMS = "sqlite:///PATH, or postgresql+psycopg://USER@HOST/NAME with `pip install shoestring[postgresql]`"
_ENCODED = "in a URL, `@`, `:` and `/` of a name or password are written %40, %3A and %2F"
_PLAIN = re.compile(r"[\w.+-]*")
_HOST = re.compile(r"[\w.-]*|[0-9a-fA-F:.]+")
_PUBLIC = frozenset({"sslmode", "connect_timeout", "application_name", "host", "port", "user", "dbname", "mode", "uri"})
"""Query parameters of a URL whose values are not secret."""
_SQLITE_OUTAGES = frozenset({5, 6, 7, 9, 10, 13, 14, 15, 22})
"""SQLite's result codes of temporary errors (SQLITE_BUSY, LOCKED, NOMEM, INTERRUPT, IOERR, FULL, CANTOPEN, PROTOCOL and
NOLFS); see https://sqlite.org/rescode.html. Other codes, such as 1 for a missing column, mean permanent errors."""
_OUTAGE_STATES = ("08", "40", "53", "55P03", "57", "58", "25006", "XX000")
"""Prefixes of PostgreSQL's SQLSTATEs of temporary errors: lost connections, rollbacks, missing resources, unavailable
locks, operator intervention, system errors, and a standby that becomes the primary; see
https://www.postgresql.org/docs/current/errcodes-appendix.html."""


class StoreOutageError(ConfigError):
    """The store does not respond or is busy; the same request may succeed later."""


def connect(url: str) -> Engine:
    """Create an engine without connecting; SQLite transactions of this engine take the write lock when they begin.

    Raises:
        ConfigError: the URL or its driver is unusable.
    """
    try:
        engine = sql.create_engine(url, **engine_options(url))
    except (ArgumentError, ImportError, ValueError, TypeError) as error:
        reason = str(error) if isinstance(error, ImportError) else "it is no URL of a database"
        message = f"`tune.store`: cannot use `{masked(url)}`: {reason}"
    else:
        if engine.dialect.name == "sqlite":

            def prepare(connection: Any, _: object) -> None:
                # keep the driver from beginning transactions: the "begin" listener below begins them with the write
                # lock, so that no transaction fails at its first write
                connection.isolation_level = None
                connection.execute("PRAGMA synchronous=FULL")

            listen(engine, "connect", prepare)
            listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    raise ConfigError(
        message, hint=_ENCODED if masked(url) == HIDDEN else _FORMS
    )  # no `from error`, because `error` contains the URL


def engine_options(url: str) -> dict[str, Any]:
    """Arguments of `create_engine` with which this store and Optuna's storage detect a dead server within seconds."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": BUSY}}
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": 5}}


def write_ahead(engine: Engine) -> None:
    """Let processes read an SQLite file while another writes; called only once, because the file stores this mode."""
    if engine.dialect.name == "sqlite":
        connection = engine.raw_connection()
        try:
            connection.cursor().execute("PRAGMA journal_mode=WAL")
        finally:
            connection.close()


def sqlite_file(engine: Engine) -> Path | None:
    """The file of an SQLite database; None for a server or a database in memory."""
    name = engine.url.database or ""
    plain = engine.dialect.name == "sqlite" and name not in ("", ":memory:") and not name.startswith("file:")
    return Path(name) if plain else None


# -- what may be shown ------------------------------------------------------------------------------------------------


def masked(url: str | URL) -> str:
    """Format a URL for messages: without password and query, or `***` if it is unclear which part is the password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return HIDDEN
    bare = parsed.set(query={})
    if parsed.get_backend_name() == "sqlite" and not (parsed.username or parsed.password or parsed.host):
        return f"{parsed.drivername}://{f'/{parsed.database}' if parsed.database else ''}"
    plain = all(_PLAIN.fullmatch(part or "") for part in (parsed.username, parsed.database))
    if not plain or not _HOST.fullmatch(parsed.host or ""):
        return HIDDEN
    return bare.render_as_string(hide_password=True)


def _secrets(url: URL) -> set[str]:
    """The password and query values, plain and URL-encoded, that no message may contain."""
    values = [url.password] if url.password else []
    for name, value in url.query.items():
        values += () if name in _PUBLIC else (value,) if isinstance(value, str) else value
    return {spelled for value in values for spelled in (str(value), quote(str(value), ""), quote_plus(str(value)))} - {
        ""
    }


# -- what errors mean -------------------------------------------------------------------------------------------------


@contextmanager
def usable(engine: Engine) -> Iterator[None]:
    """Context that turns database errors, including errors of Optuna's requests, into one-line errors.

    Raises:
        StoreOutageError: the same request may succeed later.
        ConfigError: the same request would fail again.
        IntegrityError: a row already exists or refers to a missing row; passed on for the caller to handle.
    """
    try:
        yield
    except IntegrityError:
        raise
    except Exception as error:
        failure = explain(engine, error)
        if failure is None:
            raise
        shown = not _secrets(engine.url) and masked(engine.url) != HIDDEN
        raise failure from (error if shown else None)  # a chained error would show the driver's message


def explain(engine: Engine, error: BaseException) -> ConfigError | None:
    """Make the error to raise for an error of SQLAlchemy or Optuna about the store; None for any other error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, SQLAlchemyError):
        cause = cause.__cause__ or cause.__context__ if type(cause).__module__.startswith("optuna.") else None
    if cause is None:
        return None
    driver_error = getattr(cause, "orig", None) or cause
    reason = str(driver_error).strip().partition("\n")[0] or type(driver_error).__name__
    if masked(engine.url) == HIDDEN or any(secret in reason for secret in _secrets(engine.url)):
        reason = "the driver's message is not shown, as it may repeat a password"
    kind = StoreOutageError if _is_outage(cause) else ConfigError
    hint = _ENCODED if masked(engine.url) == HIDDEN else ""
    return kind(f"cannot use the store `{masked(engine.url)}`: {reason}", hint=hint)


def _is_outage(error: SQLAlchemyError) -> bool:
    """Whether an error is temporary rather than caused by the database's content or by the request."""
    if isinstance(error, PoolTimeoutError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _SQLITE_OUTAGES
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return state.startswith(_OUTAGE_STATES)
    # Errors without a code: psycopg could not connect (an outage), or sqlite3 cannot decode a value (not an outage).
    return type(error.orig).__name__ in ("OperationalError", "InterfaceError") and "decode" not in str(error.orig)
