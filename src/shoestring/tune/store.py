"""Trials and their leases in one database, beside Optuna's tables of the same study.

The tables here decide; Optuna's are brought up to date from them (`publish`), by anyone and as often as it takes. A
trial is held under a lease: an owner, an epoch that grows with each owner, and a time at which it expires. Every write
of an owner is a compare-and-set on that epoch, so a worker that was stalled past its lease can write nothing. Times are
the database's own, so workers need no common clock; a clock that jumps can only let leases expire early.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.event import listen
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError

from shoestring.core.errors import ConfigError

VERSION = 2
BUSY = 20.0
"""Seconds that a request waits while another worker writes to an SQLite file."""

_tables = sql.MetaData()
_studies = sql.Table(
    "shoestring_studies",
    _tables,
    sql.Column("name", sql.String(200), primary_key=True),
    sql.Column("version", sql.Integer, nullable=False),
    sql.Column("document", sql.Text, nullable=False),
)
_leases = sql.Table(
    "shoestring_leases",
    _tables,
    sql.Column("trial", sql.Integer, primary_key=True, autoincrement=False),  # the trial's id in Optuna's tables
    sql.Column("study", sql.String(200), nullable=False, index=True),
    sql.Column("number", sql.Integer, nullable=False),
    sql.Column("state", sql.String(12), nullable=False),  # ready, held, paused; done, failed, pruned
    sql.Column("owner", sql.String(200), nullable=False, default=""),
    sql.Column("epoch", sql.Integer, nullable=False, default=0),
    sql.Column("expires_at", sql.Float(53), nullable=False, default=0.0),
    sql.Column("place", sql.String(200), nullable=False, default=""),
    sql.Column("parameters", sql.Text, nullable=False),
    sql.Column("step", sql.Integer, nullable=False, default=0),
    sql.Column("rung", sql.Integer, nullable=False, default=0),
    sql.Column("attempts", sql.Integer, nullable=False, default=0),
    sql.Column("seconds", sql.Float(53), nullable=False, default=0.0),
    sql.Column("tokens", sql.Float(53), nullable=False, default=0.0),
    sql.Column("parent", sql.Integer, nullable=False, default=-1),  # number of the trial that it is a fork of
    sql.Column(
        "forked", sql.Integer, nullable=False, default=0
    ),  # its first rung; its parent's checkpoint is of the one before
    sql.Column("value", sql.Float(53)),
    sql.Column("note", sql.Text, nullable=False, default=""),
    sql.Column("published", sql.Boolean, nullable=False, default=False),
)
_reports = sql.Table(
    "shoestring_reports",
    _tables,
    sql.Column("trial", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("step", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("value", sql.Float(53)),  # NULL where it is no number, which SQLite cannot store
)
ENDED = ("done", "failed", "pruned")


@dataclass(frozen=True)
class TrialLease:
    """The right to work on one trial, as its holder knows it, or a trial as the store has it."""

    trial: int
    number: int
    epoch: int
    owner: str
    state: str
    parameters: Mapping[str, Any] = field(compare=False)
    place: str = ""
    step: int = 0
    rung: int = 0
    attempts: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    parent: int = -1
    forked: int = 0
    value: float | None = None
    note: str = ""
    published: bool = False


def connect(url: str) -> Engine:
    """An engine whose transactions write at once or wait.

    Raises:
        ConfigError: the URL or its driver is unusable.
    """
    try:
        engine = sql.create_engine(url, **engine_options(url))
    except (ArgumentError, ImportError) as error:
        hint = "sqlite:///PATH, or postgresql+psycopg://USER@HOST/NAME with `pip install shoestring[postgresql]`"
        raise ConfigError(f"`tune.store`: cannot use `{masked(url)}`: {_reason(error)}", hint=hint) from error
    if engine.dialect.name == "sqlite":
        listen(engine, "connect", _prepare_sqlite)
        listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def masked(url: str) -> str:
    """A URL without its password, for messages."""
    return re.sub(r"(//[^:/@]*):[^@]*@", r"\1:***@", url)


def _reason(error: Exception) -> str:
    """What SQLAlchemy says of a URL, without the URL."""
    return str(error) if isinstance(error, ImportError) else "it is no URL of a database"


def engine_options(url: str) -> dict[str, Any]:
    """Arguments of create_engine, for this store and for Optuna's: a dead server fails within seconds."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": BUSY}}
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": 5}}


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin with the write lock, so none fails at its first write
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


class Store:
    """The leases of one study; every method is one transaction. Safe to share between threads.

    Args:
        clock: seconds as an SQL expression; defaults to the database's clock.
    """

    def __init__(self, engine: Engine, study: str, clock: Callable[[], Any] | None = None) -> None:
        self.engine, self.study = engine, study
        self._now = clock or (lambda: _database_time(engine.dialect.name))

    # -- the study ----------------------------------------------------------------------------------------------------

    def create(self, document: Mapping[str, Any]) -> None:
        """Make the tables and the study where they are missing.

        Raises:
            ConfigError: the store cannot be written, has another version, or holds another study of that name.
        """
        text = json.dumps(document, sort_keys=True)
        with self.usable():
            _tables.create_all(self.engine)
            try:
                with self.engine.begin() as connection:
                    connection.execute(_studies.insert().values(name=self.study, version=VERSION, document=text))
            except IntegrityError:
                if self.document() != json.loads(text):
                    raise ConfigError(
                        f"the store holds another study `{self.study}`, with other settings",
                        hint="choose another tune.name, or another tune.store",
                    ) from None

    def document(self) -> dict[str, Any]:
        """The document that the study was created with.

        Raises:
            ConfigError: there is no such study, or it was written by another version.
        """
        with self.usable(), self.engine.begin() as connection:
            if not sql.inspect(connection).has_table(_studies.name):
                raise ConfigError("the store holds no study", hint="start one with `shoestring tune tune.toml`")
            found = connection.execute(_studies.select()).all()
        by_name = {row.name: row for row in found}
        if self.study not in by_name:
            raise ConfigError(f"the store holds no study `{self.study}`", hint=f"it holds: {', '.join(by_name)}")
        row = by_name[self.study]
        if row.version != VERSION:
            raise ConfigError(f"the store has version {row.version}, this shoestring reads version {VERSION}")
        return json.loads(row.document)

    def names(self) -> list[str]:
        with self.usable(), self.engine.begin() as connection:
            exists = sql.inspect(connection).has_table(_studies.name)
            return list(connection.scalars(sql.select(_studies.c.name))) if exists else []

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Errors of the database within the block are one clear line."""
        try:
            yield
        except DBAPIError as error:
            reason = str(error.orig).strip().partition("\n")[0]
            where = self.engine.url.render_as_string(hide_password=True)
            raise ConfigError(f"cannot use the store `{where}`: {reason}") from error

    # -- leases -------------------------------------------------------------------------------------------------------

    def add(self, trial: int, number: int, parameters: Mapping[str, Any], budget: int) -> bool:
        """Make a trial of Optuna's ready to be leased; False where the budget is used up or it was given up before."""
        row = {"trial": trial, "number": number, "study": self.study, "parameters": json.dumps(dict(parameters))}
        with self.engine.begin() as connection:
            locked = sql.select(_studies.c.name).where(_studies.c.name == self.study).with_for_update()
            connection.execute(locked)  # so that two workers do not both take the last of the budget
            used = connection.scalar(self._count().where(_leases.c.note != _ABANDONED)) or 0
            known = connection.scalar(sql.select(_leases.c.trial).where(_leases.c.trial == trial))
            if used >= budget or known is not None:
                return False
            connection.execute(_leases.insert().values(state="ready", **row))
        return True

    def fork(
        self, ended: TrialLease, parent: TrialLease, trial: int, number: int, parameters: Mapping[str, Any]
    ) -> bool:
        """End a paused trial and make a trial of Optuna's ready that begins from another one's checkpoint of the same
        rung; False where the paused one is no longer as it was seen."""
        same = (_leases.c.trial == ended.trial, _leases.c.epoch == ended.epoch, _leases.c.state == "paused")
        row = {"trial": trial, "number": number, "study": self.study, "parameters": json.dumps(dict(parameters))}
        row |= {"parent": parent.number, "rung": ended.rung + 1, "forked": ended.rung + 1, "state": "ready"}
        change = _leases.update().where(*same).values(state="pruned", note=f"replaced by trial {number}")
        with self.engine.begin() as connection:
            if connection.execute(change).rowcount != 1:
                return False
            connection.execute(_leases.insert().values(**row))
        return True

    def abandon(self, trial: int, number: int) -> None:
        """Give up a trial of Optuna's whose proposer died before it was added; does nothing if it was added."""
        row = {"trial": trial, "number": number, "study": self.study, "parameters": "{}"}
        try:
            with self.engine.begin() as connection:
                connection.execute(_leases.insert().values(state="failed", note=_ABANDONED, **row))
        except IntegrityError:
            return

    def take(self, owner: str, seconds: float) -> TrialLease | None:
        """Lease a trial that is ready, or whose lease has expired; None where there is none."""
        free = (_leases.c.state == "ready") | ((_leases.c.state == "held") & (_leases.c.expires_at < self._now()))
        chosen = (
            sql.select(_leases.c.trial, _leases.c.epoch, _leases.c.state)
            .where(_leases.c.study == self.study, free)
            .order_by(_leases.c.number)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        with self.engine.begin() as connection:
            row = connection.execute(chosen).first()
            return self._hold(connection, row, owner, seconds) if row else None

    def promote(self, paused: TrialLease, owner: str, seconds: float) -> TrialLease | None:
        """Lease a paused trial for its next rung; None where another worker was first."""
        with self.engine.begin() as connection:
            return self._hold(connection, paused, owner, seconds, {"rung": paused.rung + 1})

    def _hold(
        self, connection: Connection, seen: Any, owner: str, seconds: float, promoted: Mapping[str, int] | None = None
    ) -> TrialLease | None:
        """Begin the next epoch of a trial, unless it is no longer as it was `seen`."""
        same = (_leases.c.trial == seen.trial, _leases.c.epoch == seen.epoch, _leases.c.state == seen.state)
        values = {"state": "held", "owner": owner, "epoch": seen.epoch + 1, **(promoted or {})}
        change = _leases.update().where(*same).values(**values, expires_at=self._now() + seconds)
        if connection.execute(change).rowcount != 1:
            return None
        return _lease(connection.execute(_leases.select().where(_leases.c.trial == seen.trial)).one())

    def renew(
        self, lease: TrialLease, seconds: float, *, step: int = 0, reports: Mapping[int, float] | None = None,
        worked: float = 0.0, tokens: float = 0.0, place: str = "",
    ) -> bool:  # fmt: skip
        """Extend a lease and write what its trial has reported, by step; False where the lease is lost."""
        values: dict[str, Any] = {"expires_at": self._now() + seconds, "seconds": _leases.c.seconds + worked}
        values |= {"tokens": _leases.c.tokens + tokens} if tokens else {}
        values |= {"step": step} if step else {}
        values |= {"place": place} if place else {}
        with self.engine.begin() as connection:
            if not self._write(connection, lease, values):
                return False
            self._report(connection, lease.trial, reports or {})
        return True

    def give_back(self, lease: TrialLease, *, state: str = "ready", failed: bool = False, note: str = "") -> bool:
        """End a lease and keep the trial: `ready` for any worker, or `paused` at a rung; False where it is lost."""
        values = {"state": state, "expires_at": 0.0, "attempts": _leases.c.attempts + int(failed), "note": note}
        with self.engine.begin() as connection:
            return self._write(connection, lease, values)

    def finish(self, lease: TrialLease, state: str, value: float | None = None, note: str = "") -> bool:
        """Write the one result of a trial; False where the lease is lost. A repeated request changes nothing."""
        assert state in ENDED
        own = (_leases.c.trial == lease.trial, _leases.c.epoch == lease.epoch, _leases.c.owner == lease.owner)
        with self.engine.begin() as connection:
            if self._write(connection, lease, {"state": state, "value": value, "note": note}):
                return True
            ended = sql.select(_leases.c.state).where(*own, _leases.c.state.in_(ENDED))
            return connection.scalar(ended) is not None  # the reply to the first request was lost

    def prune(self, paused: TrialLease) -> bool:
        """End a paused trial that will not be promoted."""
        same = (_leases.c.trial == paused.trial, _leases.c.epoch == paused.epoch, _leases.c.state == "paused")
        with self.engine.begin() as connection:
            return connection.execute(_leases.update().where(*same).values(state="pruned")).rowcount == 1

    def _write(self, connection: Connection, lease: TrialLease, values: Mapping[str, Any]) -> bool:
        own = (_leases.c.trial == lease.trial, _leases.c.epoch == lease.epoch, _leases.c.state == "held")
        return connection.execute(_leases.update().where(*own).values(**values)).rowcount == 1

    @staticmethod
    def _report(connection: Connection, trial: int, reports: Mapping[int, float]) -> None:
        if not reports:
            return
        known = set(connection.scalars(sql.select(_reports.c.step).where(_reports.c.trial == trial)))
        new = {step: None if math.isnan(value) else value for step, value in reports.items() if step not in known}
        rows = [{"trial": trial, "step": step, "value": value} for step, value in new.items()]
        if rows:
            connection.execute(_reports.insert(), rows)

    # -- reading ------------------------------------------------------------------------------------------------------

    def trials(self) -> list[TrialLease]:
        """All trials of the study, by number; without those that were given up before they began."""
        of_study = _leases.select().where(_leases.c.study == self.study, _leases.c.note != _ABANDONED)
        with self.engine.begin() as connection:
            return [_lease(row) for row in connection.execute(of_study.order_by(_leases.c.number))]

    def reports(self, trial: int) -> dict[int, float]:
        """What a trial has reported, by step."""
        chosen = sql.select(_reports.c.step, _reports.c.value).where(_reports.c.trial == trial)
        with self.engine.begin() as connection:
            rows = connection.execute(chosen.order_by(_reports.c.step)).all()
        return {row.step: math.nan if row.value is None else row.value for row in rows}

    def all_reports(self) -> dict[int, dict[int, float]]:
        """What each trial of the study has reported, by its id and by step."""
        of_study = sql.select(_leases.c.trial, _reports.c.step, _reports.c.value).where(_leases.c.study == self.study)
        joined = of_study.outerjoin_from(_leases, _reports, _leases.c.trial == _reports.c.trial)
        found: dict[int, dict[int, float]] = {}
        with self.engine.begin() as connection:
            for trial, step, value in connection.execute(joined.order_by(_leases.c.trial, _reports.c.step)):
                values = found.setdefault(trial, {})
                if step is not None:
                    values[step] = math.nan if value is None else value
        return found

    def known(self) -> set[int]:
        """Ids of all trials of the study that have a row."""
        with self.engine.begin() as connection:
            return set(connection.scalars(sql.select(_leases.c.trial).where(_leases.c.study == self.study)))

    def unpublished(self, *, abandoned: bool = False) -> list[TrialLease]:
        """Trials that have ended, and that Optuna's tables may not show as ended.

        Args:
            abandoned: only those whose lease would have expired by now, which their worker did not publish.
        """
        chosen = _leases.select().where(_leases.c.study == self.study, _leases.c.published.is_(False))
        chosen = chosen.where(_leases.c.state.in_(ENDED))
        if abandoned:
            chosen = chosen.where(_leases.c.expires_at < self._now())
        with self.engine.begin() as connection:
            return [_lease(row) for row in connection.execute(chosen)]

    def mark_published(self, trial: int) -> None:
        with self.engine.begin() as connection:
            connection.execute(_leases.update().where(_leases.c.trial == trial).values(published=True))

    def _count(self) -> sql.Select[Any]:
        return sql.select(sql.func.count()).select_from(_leases).where(_leases.c.study == self.study)


_ABANDONED = "given up before it began"


def _lease(row: Any) -> TrialLease:
    values = {name: getattr(row, name) for name in TrialLease.__dataclass_fields__ if name != "parameters"}
    return TrialLease(parameters=json.loads(row.parameters), **values)


def _database_time(dialect: str) -> Any:
    if dialect == "sqlite":
        return sql.literal_column("((julianday('now') - 2440587.5) * 86400.0)", sql.Float)
    return sql.literal_column("extract(epoch from clock_timestamp())", sql.Float)
