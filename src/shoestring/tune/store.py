"""Stores a study's trials and their leases in the database that also contains Optuna's tables of the study.

The tables of this package are authoritative; workers copy ended trials to Optuna's tables (`publish`), repeatedly if
necessary. A lease has an owner, an epoch that increases with each new owner, and an expiry time. Every write of an
owner is a compare-and-set on the epoch, so a worker that stalled until it lost its lease cannot write. Times are those
of the database's clock, so workers need no common clock. If the database's clock jumps, leases may expire early, but
nothing else happens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import IntegrityError

from shoestring.core.errors import ConfigError
from shoestring.tune.database import connect as connect
from shoestring.tune.database import masked as masked
from shoestring.tune.database import sqlite_file, usable, write_ahead
from shoestring.tune.rows import ENDED as ENDED
from shoestring.tune.rows import LEASES, REPORTS, STUDIES, TABLES, family, read_lease, read_object, read_report
from shoestring.tune.rows import TrialLease as TrialLease

VERSION = 2


class Store:
    """Reads and writes the trials and leases of one study; every method is one transaction. Threads may share a store.

    Args:
        clock: function that returns an SQL expression for the time in seconds; defaults to the database's clock.
    """

    def __init__(self, engine: Engine, study: str, clock: Callable[[], Any] | None = None) -> None:
        self.engine, self.study = engine, study
        is_sqlite = engine.dialect.name == "sqlite"
        # both expressions count seconds since 1970; julianday counts days since noon of 24 November 4714 BC
        seconds = "((julianday('now') - 2440587.5) * 86400.0)" if is_sqlite else "extract(epoch from clock_timestamp())"
        self._now = clock or (lambda: sql.literal_column(seconds, sql.Float))
        self._text = ""  # the study's document, as of when the store was opened
        self._file: tuple[int, int] | None = None  # device and inode of an SQLite file

    # -- the study ----------------------------------------------------------------------------------------------------

    def create(self, document: Mapping[str, Any], *, shared: bool = False) -> None:
        """Create the tables and the study if they are missing.

        Args:
            shared: whether the tables may be added to a database with another program's tables.

        Raises:
            ConfigError: the store cannot be written, has another version, contains a different study with this name, or
                contains another program's tables.
        """
        text = json.dumps(document, sort_keys=True)
        with usable(self.engine):
            with self.transaction() as connection:
                tables = sql.inspect(connection).get_table_names()
            if tables and STUDIES.name not in tables and not shared:
                raise ConfigError(
                    f"the database `{masked(self.engine.url)}` has tables of another program: {', '.join(tables[:3])}",
                    hint="choose another `tune.store`, or set `tune.shared_store = true` to add the study's tables",
                )
            write_ahead(self.engine)
            TABLES.create_all(self.engine)
            try:
                with self.transaction() as connection:
                    connection.execute(STUDIES.insert().values(name=self.study, version=VERSION, document=text))
                    self._text = text
            except IntegrityError:
                if self.document() != json.loads(text):
                    raise ConfigError(
                        f"the store already has a study `{self.study}` with other settings",
                        hint="choose another tune.name, or another tune.store",
                    ) from None

    def document(self) -> dict[str, Any]:
        """Read the document with which the study was created.

        Raises:
            ConfigError: the study is missing, damaged, or written by another version.
        """
        with self.transaction(must_exist=True) as connection:
            if not sql.inspect(connection).has_table(STUDIES.name):
                raise ConfigError(_NO_STUDY, hint=_START)
            by_name = {row.name: row for row in connection.execute(STUDIES.select())}
        if self.study not in by_name:
            raise ConfigError(
                f"the store holds no study `{self.study}`", hint=f"studies in the store: {', '.join(by_name)}"
            )
        row = by_name[self.study]
        if row.version != VERSION:
            raise ConfigError(f"the store has version {row.version}, this shoestring reads version {VERSION}")
        self._text = row.document
        return read_object(row.document, f"the study `{self.study}`")

    def names(self) -> list[str]:
        with self.transaction(must_exist=True) as connection:
            exists = sql.inspect(connection).has_table(STUDIES.name)
            return list(connection.scalars(sql.select(STUDIES.c.name))) if exists else []

    @contextmanager
    def transaction(self, *, must_exist: bool = False) -> Iterator[Connection]:
        """Context that runs a transaction, and turns database errors into one-line errors.

        Args:
            must_exist: whether to raise an error if an SQLite file is missing, instead of creating the file.

        Raises:
            StoreOutageError: the same request may succeed later.
            ConfigError: the database refuses the transaction, or its file was deleted or replaced since this store
                opened it.
        """
        path = sqlite_file(self.engine)
        if path is not None and not path.exists() and (must_exist or self._file is not None):
            raise self._gone("was deleted") if self._file else ConfigError(_NO_STUDY, hint=_START)
        with usable(self.engine), self.engine.begin() as connection:
            if path is not None:
                # If the file was deleted or replaced, SQLite would still write to the old file.
                status = path.stat() if path.exists() else None
                now = (status.st_dev, status.st_ino) if status else None
                if now is None or self._file not in (None, now):
                    raise self._gone("was deleted" if now is None else "was replaced by another file")
                self._file = now
            yield connection

    def _same_study(self, connection: Connection) -> None:
        """Raise an error if the study was removed or was replaced by another study with the same name."""
        if self._text:
            chosen = sql.select(STUDIES.c.document).where(STUDIES.c.name == self.study)
            if (text := connection.scalar(chosen)) != self._text:
                what = "was removed" if text is None else "was replaced by another study of its name"
                raise self._gone(what, f"the study `{self.study}`")

    def _gone(self, what: str, which: str = "it") -> ConfigError:
        where = f"the store `{masked(self.engine.url)}`"
        message = f"{where} {what}" if which == "it" else f"{which} {what} in {where}"
        return ConfigError(f"{message} while it was in use", hint="results since then are in the folders of the trials")

    # -- leases -------------------------------------------------------------------------------------------------------

    def add(self, trial: int, number: int, parameters: Mapping[str, Any], budget: int) -> bool:
        """Add an Optuna trial in the state `ready`; False if the budget is used up or the trial has been given up."""
        row = {"trial": trial, "number": number, "study": self.study, "parameters": json.dumps(dict(parameters))}
        with self.transaction() as connection:
            locked = sql.select(STUDIES.c.name).where(STUDIES.c.name == self.study).with_for_update()
            connection.execute(locked)  # lock the study, so that only one worker takes the budget's last trial
            count = sql.select(sql.func.count()).select_from(LEASES)
            used = connection.scalar(count.where(LEASES.c.study == self.study, LEASES.c.note != _ABANDONED)) or 0
            known = connection.scalar(sql.select(LEASES.c.trial).where(LEASES.c.trial == trial))
            if used >= budget or known is not None:
                return False
            connection.execute(LEASES.insert().values(state="ready", **row))
        return True

    def fork(
        self, ended: TrialLease, parent: TrialLease, trial: int, number: int, parameters: Mapping[str, Any]
    ) -> bool:
        """Replace a paused trial by a fork: end the paused trial, and add an Optuna trial that begins from the
        checkpoint of `parent` at the same rung. False if the paused trial has changed since it was read."""
        same = (LEASES.c.trial == ended.trial, LEASES.c.epoch == ended.epoch, LEASES.c.state == "paused")
        row = {"trial": trial, "number": number, "study": self.study, "parameters": json.dumps(dict(parameters))}
        row |= {"parent": parent.number, "rung": ended.rung + 1, "forked": ended.rung + 1, "state": "ready"}
        change = LEASES.update().where(*same).values(state="pruned", note=f"replaced by trial {number}")
        with self.transaction() as connection:
            if connection.execute(change).rowcount != 1:
                return False
            connection.execute(LEASES.insert().values(**row))
        return True

    def abandon(self, trial: int, number: int) -> None:
        """Give up an Optuna trial whose proposer died before `add`; does nothing if the trial was added."""
        row = {"trial": trial, "number": number, "study": self.study, "parameters": "{}"}
        try:
            with self.transaction() as connection:
                connection.execute(LEASES.insert().values(state="failed", note=_ABANDONED, **row))
        except IntegrityError:
            return

    def take(self, owner: str, seconds: float) -> TrialLease | None:
        """Lease a trial that is ready or whose lease has expired; None if there is no such trial."""
        free = (LEASES.c.state == "ready") | ((LEASES.c.state == "held") & (LEASES.c.expires_at < self._now()))
        chosen = (
            sql.select(LEASES.c.trial, LEASES.c.epoch, LEASES.c.state)
            .where(LEASES.c.study == self.study, free)
            .order_by(LEASES.c.number)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        with self.transaction() as connection:
            self._same_study(connection)
            row = connection.execute(chosen).first()
            return self._hold(connection, row, owner, seconds) if row else None

    def promote(self, paused: TrialLease, owner: str, seconds: float) -> TrialLease | None:
        """Lease a paused trial for its next rung; None if another worker has already leased the trial."""
        with self.transaction() as connection:
            self._same_study(connection)
            return self._hold(connection, paused, owner, seconds, {"rung": paused.rung + 1})

    def _hold(
        self, connection: Connection, seen: Any, owner: str, seconds: float, promoted: Mapping[str, int] | None = None
    ) -> TrialLease | None:
        """Lease a trial with its next epoch; None if the trial has changed since it was read as `seen`."""
        same = (LEASES.c.trial == seen.trial, LEASES.c.epoch == seen.epoch, LEASES.c.state == seen.state)
        values = {"state": "held", "owner": owner, "epoch": seen.epoch + 1, **(promoted or {})}
        change = LEASES.update().where(*same).values(**values, expires_at=self._now() + seconds)
        if connection.execute(change).rowcount != 1:
            return None
        return read_lease(connection.execute(LEASES.select().where(LEASES.c.trial == seen.trial)).one())

    def renew(
        self, lease: TrialLease, seconds: float, *, step: int = 0, reports: Mapping[int, float] | None = None,
        worked: float = 0.0, tokens: float = 0.0, place: str = "",
    ) -> bool:  # fmt: skip
        """Extend a lease, and write the progress and reported values of the trial; False if the lease is lost."""
        values: dict[str, Any] = {"expires_at": self._now() + seconds, "seconds": LEASES.c.seconds + worked}
        values |= {"tokens": LEASES.c.tokens + tokens} if tokens else {}
        values |= {"step": step} if step else {}
        values |= {"place": place} if place else {}
        with self.transaction() as connection:
            if not self._write(connection, lease, values):
                return False
            if reports:
                reported = sql.select(REPORTS.c.step).where(REPORTS.c.trial == lease.trial)
                known = set(connection.scalars(reported))
                rows = [
                    {"trial": lease.trial, "step": reached, "value": None if math.isnan(value) else value}
                    for reached, value in reports.items()
                    if reached not in known
                ]
                if rows:
                    connection.execute(REPORTS.insert(), rows)
        return True

    def give_back(self, lease: TrialLease, *, state: str = "ready", failed: bool = False, note: str = "") -> bool:
        """End a lease, not its trial, which becomes `ready` (for any worker) or `paused`; False if the lease is
        lost."""
        values = {"state": state, "expires_at": 0.0, "attempts": LEASES.c.attempts + int(failed), "note": note}
        with self.transaction() as connection:
            return self._write(connection, lease, values)

    def finish(self, lease: TrialLease, state: str, value: float | None = None, note: str = "") -> bool:
        """End a trial and write its result; False if the lease is lost. Repeating the request changes nothing."""
        assert state in ENDED
        own = (LEASES.c.trial == lease.trial, LEASES.c.epoch == lease.epoch, LEASES.c.owner == lease.owner)
        with self.transaction() as connection:
            if self._write(connection, lease, {"state": state, "value": value, "note": note}):
                return True
            ended = sql.select(LEASES.c.state).where(*own, LEASES.c.state.in_(ENDED))
            return connection.scalar(ended) is not None  # True if an earlier request succeeded but its reply was lost

    def prune(self, paused: TrialLease) -> bool:
        """End a paused trial that will not continue."""
        same = (LEASES.c.trial == paused.trial, LEASES.c.epoch == paused.epoch, LEASES.c.state == "paused")
        with self.transaction() as connection:
            return connection.execute(LEASES.update().where(*same).values(state="pruned")).rowcount == 1

    def _write(self, connection: Connection, lease: TrialLease, values: Mapping[str, Any]) -> bool:
        """Write columns of a leased trial; False if the lease is lost."""
        own = (LEASES.c.trial == lease.trial, LEASES.c.epoch == lease.epoch, LEASES.c.owner == lease.owner)
        change = LEASES.update().where(*own, LEASES.c.state == "held").values(**values)
        if connection.execute(change).rowcount == 1:
            return True
        self._same_study(connection)
        return False

    # -- reading ------------------------------------------------------------------------------------------------------

    def trials(self) -> list[TrialLease]:
        """Read all trials of the study, ordered by number, without trials that were given up before they began."""
        of_study = LEASES.select().where(LEASES.c.study == self.study, LEASES.c.note != _ABANDONED)
        with self.transaction() as connection:
            return family([read_lease(row) for row in connection.execute(of_study.order_by(LEASES.c.number))])

    def reports(self, trial: int) -> dict[int, float]:
        """Read the reported values of a trial's objective, by step."""
        chosen = sql.select(REPORTS.c.step, REPORTS.c.value).where(REPORTS.c.trial == trial)
        with self.transaction() as connection:
            rows = connection.execute(chosen.order_by(REPORTS.c.step)).all()
        return dict(read_report(row.step, row.value, trial) for row in rows)

    def all_reports(self) -> dict[int, dict[int, float]]:
        """Read the reported values of all trials of the study, by the trial's id and by step."""
        of_study = sql.select(LEASES.c.trial, REPORTS.c.step, REPORTS.c.value).where(LEASES.c.study == self.study)
        joined = of_study.outerjoin_from(LEASES, REPORTS, LEASES.c.trial == REPORTS.c.trial)
        by_trial: dict[int, dict[int, float]] = {}
        with self.transaction() as connection:
            for trial, step, value in connection.execute(joined.order_by(LEASES.c.trial, REPORTS.c.step)):
                values = by_trial.setdefault(trial, {})
                if step is not None:
                    values |= [read_report(step, value, trial)]
        return by_trial

    def known(self) -> set[int]:
        """Ids of all trials of the study that have a row in the table of leases."""
        with self.transaction() as connection:
            return set(connection.scalars(sql.select(LEASES.c.trial).where(LEASES.c.study == self.study)))

    def unpublished(self, *, abandoned: bool = False) -> list[TrialLease]:
        """List ended trials that may not have been copied to Optuna's tables.

        Args:
            abandoned: whether to list only trials whose lease ended before their worker published them.
        """
        chosen = LEASES.select().where(LEASES.c.study == self.study, LEASES.c.published.is_(False))
        chosen = chosen.where(LEASES.c.state.in_(ENDED))
        if abandoned:
            chosen = chosen.where(LEASES.c.expires_at < self._now())
        with self.transaction() as connection:
            return [read_lease(row) for row in connection.execute(chosen)]

    def mark_published(self, trial: int) -> None:
        with self.transaction() as connection:
            connection.execute(LEASES.update().where(LEASES.c.trial == trial).values(published=True))


_ABANDONED = "given up before it began"
_NO_STUDY = "the store holds no study"
_START = "start one with `shoestring tune tune.toml`"
