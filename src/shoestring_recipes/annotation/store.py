"""The store of a labelling project in SQLite or PostgreSQL: crawled pages, tasks, raters and labels."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoestring.core.errors import ConfigError, DataError, nearest
from shoestring_recipes.annotation.tables import (
    SKIPPED,
    STORED,
    WAITING,
    Address,
    Cursor,
    Item,
    ItemText,
    LabelProject,
    LabelTask,
    Rater,
    RaterLabel,
)

try:
    import sqlalchemy as sql
    from alembic import command
    from alembic.config import Config
    from sqlalchemy.dialects import postgresql, sqlite
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.event import listen
    from sqlalchemy.exc import ArgumentError, IntegrityError
except ImportError as error:
    raise ConfigError("the store needs SQLAlchemy and alembic", hint='pip install "shoestring[annotation]"') from error

from shoestring.tune.database import engine_options, masked, usable, write_ahead

MIGRATIONS = Path(__file__).with_name("migrations")
ROWCOUNT = {"preserve_rowcount": True}
"""Execution option without which SQLAlchemy does not count inserted rows in PostgreSQL."""
FORMS = "sqlite:///PATH, or postgresql+psycopg://USER@HOST/NAME"

# -- named queries -----------------------------------------------------------------------------------------------------

QUERIES: Mapping[str, Callable[..., sql.Select[Any]]] = {
    "item_of_url": lambda url: sql.select(Item).where(Item.url == url),
    "newest_of_host": lambda host, limit=50: (
        sql.select(Item).where(Item.host == host).order_by(Item.fetched.desc(), Item.id.desc()).limit(limit)
    ),
    "items_of_source": lambda source, after=0, limit=500: (
        sql.select(Item).where(Item.source == source, Item.id > after).order_by(Item.id).limit(limit)
    ),
    "same_text": lambda digest, limit=50: sql.select(Item).where(Item.digest == digest).limit(limit),
    "next_task": lambda project, rater, wanted: (
        sql.select(LabelTask)
        .where(LabelTask.project_id == project, LabelTask.labelled < wanted)
        .where(
            ~sql.exists().where(RaterLabel.task_id == LabelTask.id, RaterLabel.rater_id == rater).correlate(LabelTask)
        )
        .order_by(LabelTask.labelled, LabelTask.id)
        .limit(1)
    ),
    "newest_labels": lambda rater, limit=50: (
        sql.select(RaterLabel)
        .where(RaterLabel.rater_id == rater)
        .order_by(RaterLabel.made.desc(), RaterLabel.id.desc())
        .limit(limit)
    ),
}
"""The queries that must stay fast in a store of millions of items; each goes through indexes.

- `item_of_url`: the item with an address.
- `newest_of_host`: the items of a host that were fetched last.
- `items_of_source`: the items of a source whose numbers are above `after`.
- `same_text`: items with the same text, by its digest.
- `next_task`: of a project's unfinished tasks that a rater has not answered or skipped, the one with the fewest labels.
- `newest_labels`: the last labels of a rater.
"""


def plan(connection: Connection, query: sql.Select[Any]) -> list[str]:
    """Return the lines of the database's plan for a query."""
    text = query.compile(connection, compile_kwargs={"literal_binds": True})
    explain = "EXPLAIN QUERY PLAN" if connection.dialect.name == "sqlite" else "EXPLAIN"
    return [str(row[-1]) for row in connection.exec_driver_sql(f"{explain} {str(text).replace('%', '%%')}")]


def scans(lines: Iterable[str]) -> list[str]:
    """Return the lines of a plan that read a whole table."""
    return [line for line in lines if "Seq Scan" in line or (line.startswith("SCAN") and "INDEX" not in line)]


# -- opening -----------------------------------------------------------------------------------------------------------


def open_store(url: str) -> AnnotationStore:
    """Open a store, and migrate its tables to the newest version; creates an SQLite file if it is missing.

    Args:
        url: `sqlite:///PATH`, or the address of a PostgreSQL database.

    Raises:
        ConfigError: the address is not that of a database, or the database cannot be used.
    """
    try:
        engine = sql.create_engine(url, **engine_options(url))
    except (ArgumentError, ImportError, ValueError) as error:
        reason = str(error) if isinstance(error, ImportError) else "it is no address of a database"
        raise ConfigError(f"cannot use the store `{masked(url)}`: {reason}", hint=FORMS) from None
    if engine.dialect.name == "sqlite":
        listen(engine, "connect", _prepare_sqlite)
        # a transaction that writes takes the lock at once, so that none fails at its first write
        writes = lambda connection: connection.get_execution_options().get("writes")  # noqa: E731
        listen(engine, "begin", lambda one: one.exec_driver_sql("BEGIN IMMEDIATE" if writes(one) else "BEGIN"))
    with usable(engine):
        with engine.connect():  # fails if the file is not a database
            pass
        write_ahead(engine)
        with engine.connect().execution_options(writes=True) as connection, connection.begin():
            config = Config()
            config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
            config.set_main_option("path_separator", "os")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    return AnnotationStore(engine)


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # the listener in `open_store` begins transactions
    connection.execute("PRAGMA synchronous=NORMAL")  # a power cut may lose the last pages, which a crawl repeats
    connection.execute("PRAGMA foreign_keys=ON")


def text_digest(text: str) -> str:
    """Hash a text so that texts that differ only in white space and letter case have the same digest."""
    return hashlib.blake2b(" ".join(text.split()).casefold().encode(), digest_size=16).hexdigest()


def now() -> datetime:
    """Return the time in UTC, without a time zone, as the store holds times."""
    return datetime.now(UTC).replace(tzinfo=None)


class AnnotationStore:
    """An open store; each method that writes is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Context of a transaction that writes."""
        with usable(self.engine), self.engine.connect().execution_options(writes=True) as one, one.begin():
            yield one

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Context of a transaction that reads."""
        with usable(self.engine), self.engine.begin() as one:
            yield one

    def rows(self, query: Any) -> list[Any]:
        """Return the rows of a query."""
        with self.reading() as connection:
            return list(connection.execute(query))

    def _insert(self, table: Any) -> Any:
        return (sqlite.insert if self.engine.dialect.name == "sqlite" else postgresql.insert)(table)

    def _insert_new(self, connection: Connection, table: Any, rows: Sequence[Mapping[str, Any]]) -> int:
        """Insert rows, leaving out those that the table already has, and return the number of new rows."""
        statement = self._insert(table).on_conflict_do_nothing()
        return sum(connection.execute(statement, row, execution_options=ROWCOUNT).rowcount for row in rows)

    # -- items ---------------------------------------------------------------------------------------------------------

    def add_item(self, source: str, url: str, title: str, text: str, connection: Connection | None = None) -> bool:
        """Add an item with its text, unless the store has an item with this address; return whether it is new."""
        if connection is None:
            with self.writing() as opened:
                return self.add_item(source, url, title, text, opened)
        title, text = (part.replace("\0", "").encode("utf-8", "replace").decode() for part in (title, text))
        row = {
            "url": url,
            "source": source,
            "host": urlsplit(url).netloc[:300],
            "title": title,
            "size": len(text.encode()),
            "digest": text_digest(text),
            "fetched": now(),
        }
        if not self._insert_new(connection, Item, [row]):
            return False
        number = connection.scalar(sql.select(Item.id).where(Item.url == url))
        connection.execute(sql.insert(ItemText).values(item_id=number, text=text))
        return True

    def item(self, url: str) -> Any | None:
        """Return the item with an address, or None."""
        with self.reading() as connection:
            return connection.execute(QUERIES["item_of_url"](url)).first()

    # -- the crawl -----------------------------------------------------------------------------------------------------

    def add_addresses(self, site: str, urls: Iterable[str], depth: int = 0) -> int:
        """Record addresses to crawl, and return how many are new."""
        with self.writing() as connection:
            return self._note_addresses(connection, site, urls, depth)

    def _note_addresses(self, connection: Connection, site: str, urls: Iterable[str], depth: int) -> int:
        rows = [{"url": url, "site": site, "depth": depth, "state": WAITING, "reason": ""} for url in urls]
        return self._insert_new(connection, Address, rows)

    def waiting(self, site: str, after: int, limit: int) -> list[tuple[int, str, int]]:
        """Return the number, the address and the depth of the next addresses of a site that are to be crawled."""
        query = sql.select(Address.id, Address.url, Address.depth)
        query = query.where(Address.site == site, Address.state == WAITING, Address.id > after)
        return [tuple(row) for row in self.rows(query.order_by(Address.id).limit(limit))]

    def settle(self, url: str, state: str, reason: str = "") -> None:
        """Record the state of an address that yields no page for the store, and the reason."""
        with self.writing() as connection:
            self._settle(connection, url, state, reason)

    def _settle(self, connection: Connection, url: str, state: str, reason: str) -> None:
        connection.execute(sql.update(Address).where(Address.url == url).values(state=state, reason=reason[:500]))

    def store_page(self, site: str, url: str, title: str, text: str, links: Iterable[str], depth: int) -> None:
        """Store a crawled page and the addresses that it links to, in one transaction; of a page without text, only the
        links are stored."""
        with self.writing() as connection:
            self._note_addresses(connection, site, links, depth + 1)
            if text:
                self.add_item(f"crawl {site}", url, title, text, connection)
                self._settle(connection, url, STORED, "")
            else:
                self._settle(connection, url, SKIPPED, "no text")

    def retry_failed(self, site: str, state: str) -> int:
        """Change the addresses of a site in one state to waiting, and return their number."""
        change = sql.update(Address).where(Address.site == site, Address.state == state)
        with self.writing() as connection:
            return connection.execute(change.values(state=WAITING, reason="")).rowcount

    def states(self, site: str) -> dict[tuple[str, str], int]:
        """Count the addresses of a site by state and reason."""
        query = sql.select(Address.state, Address.reason, sql.func.count()).where(Address.site == site)
        return {(row[0], row[1]): row[2] for row in self.rows(query.group_by(Address.state, Address.reason))}

    # -- paged interfaces ----------------------------------------------------------------------------------------------

    def cursor(self, source: str) -> tuple[str, bool]:
        """Return the position from which a paged interface is to be read, and whether it was read to its end."""
        matches = self.rows(sql.select(Cursor.position, Cursor.done).where(Cursor.source == source))
        return (matches[0][0], bool(matches[0][1])) if matches else ("", False)

    def store_records(self, source: str, records: Iterable[tuple[str, str, str]], position: str, *, done: bool) -> int:
        """Store the records (address, title, text) of a page of an interface together with the next position.

        Returns:
            The number of new items.
        """
        with self.writing() as connection:
            added = sum(self.add_item(source, *record, connection) for record in records)
            self._insert_new(connection, Cursor, [{"source": source, "position": "", "done": 0}])
            change = sql.update(Cursor).where(Cursor.source == source).values(position=position, done=int(done))
            connection.execute(change)
            return added

    # -- projects and tasks --------------------------------------------------------------------------------------------

    def add_project(self, name: str, question: str, choices: Sequence[str], wanted: int = 3) -> None:
        """Add a project.

        Args:
            choices: the answers to choose from, two or more.
            wanted: number of raters who are to label each task.

        Raises:
            ConfigError: the project exists, or its choices or the number of raters make no sense.
        """
        if len(set(choices)) != len(choices) or len(choices) < 2 or not all(choice.strip() for choice in choices):
            raise ConfigError(f"the choices {list(choices)} are no two or more different answers")
        if wanted < 1:
            raise ConfigError(f"{wanted} raters are to label each task", hint="one or more")
        try:
            with self.writing() as connection:
                row = {"name": name, "question": question, "choices": list(choices), "wanted": wanted}
                connection.execute(sql.insert(LabelProject).values(**row))
        except IntegrityError:
            raise ConfigError(f"there is a project `{name}` already", hint="choose another name") from None

    def project(self, name: str) -> Any:
        """Return a project.

        Raises:
            ConfigError: there is no project with this name.
        """
        names = {row.name: row for row in self.rows(sql.select(LabelProject.__table__))}
        if name not in names:
            raise ConfigError(f"there is no project `{name}`", hint=nearest(name, names) if names else "add one")
        return names[name]

    def add_tasks(self, project: str, *, source: str = "", limit: int = 2**31) -> int:
        """Create one task for each different text among the items, and return how many are new.

        Args:
            source: only items of this source; empty for all.
            limit: maximum number of items.
        """
        number = self.project(project).id
        first = sql.select(sql.func.min(Item.id)).group_by(Item.digest)
        chosen = sql.select(sql.literal(number), Item.id, sql.literal(0))
        chosen = chosen.where(Item.id.in_(first.where(Item.source == source) if source else first))
        insert = self._insert(LabelTask).from_select(
            ["project_id", "item_id", "labelled"], chosen.order_by(Item.id).limit(limit)
        )
        with self.writing() as connection:
            return connection.execute(insert.on_conflict_do_nothing(), execution_options=ROWCOUNT).rowcount

    # -- raters and labels ---------------------------------------------------------------------------------------------

    def add_rater(self, name: str) -> str:
        """Add a rater and return the token that lets the rater label; the store has only a hash of it.

        Raises:
            ConfigError: there is a rater with this name.
        """
        token = secrets.token_urlsafe(24)
        try:
            with self.writing() as connection:
                connection.execute(sql.insert(Rater).values(name=name, token=_hashed(token)))
        except IntegrityError:
            raise ConfigError(f"there is a rater `{name}` already", hint="choose another name") from None
        return token

    def rater_of_token(self, token: str) -> Any | None:
        """Return the rater whom a token belongs to, or None."""
        matches = self.rows(sql.select(Rater.id, Rater.name).where(Rater.token == _hashed(token)))
        return matches[0] if matches else None

    def raters(self) -> dict[str, int]:
        """Map the names of all raters to their numbers."""
        return {row.name: row.id for row in self.rows(sql.select(Rater.name, Rater.id).order_by(Rater.id))}

    def next_task(self, project: Any, rater: int) -> dict[str, Any] | None:
        """Return the next task of a project for a rater, with its text; None if there is none."""
        with self.reading() as connection:
            task = connection.execute(QUERIES["next_task"](project.id, rater, project.wanted)).first()
            if task is None:
                return None
            query = sql.select(Item.url, Item.title, ItemText.text).join(ItemText, ItemText.item_id == Item.id)
            item = connection.execute(query.where(Item.id == task.item_id)).one()
            return {"task": task.id, "url": item.url, "title": item.title, "text": item.text}

    def add_label(
        self, project: Any, task: int, rater: int, choice: int | None, seconds: float = 0.0, *, replace: bool = True
    ) -> None:
        """Store the answer of a rater to a task, in place of an earlier answer.

        Args:
            choice: number of the choice; None skips the task.
            replace: whether a different earlier answer is replaced; otherwise it is an error.

        Raises:
            DataError: the project has no such task or choice, there is no such rater, or another answer is stored.
        """
        if choice is not None and not 0 <= choice < len(project.choices):
            raise DataError(f"the project `{project.name}` has no choice {choice}")
        with self.writing() as connection:
            known = sql.select(LabelTask.id).where(LabelTask.id == task, LabelTask.project_id == project.id)
            if connection.scalar(known) is None:
                raise DataError(f"the project `{project.name}` has no task {task}")
            if connection.scalar(sql.select(Rater.id).where(Rater.id == rater)) is None:
                raise DataError(f"there is no rater {rater}")
            row = {"task_id": task, "rater_id": rater, "choice": choice, "seconds": seconds, "made": now()}
            if self._insert_new(connection, RaterLabel, [row]):
                self._count(connection, task, 1)
                return
            own = sql.and_(RaterLabel.task_id == task, RaterLabel.rater_id == rater)
            former = connection.scalar(sql.select(RaterLabel.choice).where(own))
            if former != choice and not replace:
                raise DataError(f"rater {rater} has given task {task} another answer before")
            connection.execute(sql.update(RaterLabel).where(own).values(choice=choice, seconds=seconds, made=now()))

    def undo(self, project: Any, rater: int) -> bool:
        """Remove the last label of a rater in a project; return whether there was one."""
        query = sql.select(RaterLabel.id, RaterLabel.task_id).join(LabelTask, LabelTask.id == RaterLabel.task_id)
        query = query.where(RaterLabel.rater_id == rater, LabelTask.project_id == project.id)
        with self.writing() as connection:
            last = connection.execute(query.order_by(RaterLabel.made.desc(), RaterLabel.id.desc()).limit(1)).first()
            if last is None:
                return False
            connection.execute(sql.delete(RaterLabel).where(RaterLabel.id == last.id))
            self._count(connection, last.task_id, -1)
            return True

    def _count(self, connection: Connection, task: int, change: int) -> None:
        number = LabelTask.labelled + change
        connection.execute(sql.update(LabelTask).where(LabelTask.id == task).values(labelled=number))

    def task_count(self, project: Any) -> int:
        """Return the number of tasks of a project."""
        query = sql.select(sql.func.count()).select_from(LabelTask).where(LabelTask.project_id == project.id)
        return self.rows(query)[0][0]

    def labelled_by(self, project: Any, rater: int) -> int:
        """Return how many tasks of a project a rater has answered or skipped."""
        query = sql.select(sql.func.count()).select_from(RaterLabel)
        query = query.join(LabelTask, LabelTask.id == RaterLabel.task_id)
        return self.rows(query.where(RaterLabel.rater_id == rater, LabelTask.project_id == project.id))[0][0]

    def labels(self, project: Any) -> Iterator[Any]:
        """Yield all labels of a project: `task`, `url`, `rater`, `name`, `choice`, `seconds` and `made`."""
        columns = (
            LabelTask.id.label("task"),
            Item.url,
            Rater.id.label("rater"),
            Rater.name,
            RaterLabel.choice,
            RaterLabel.seconds,
            RaterLabel.made,
        )
        query = sql.select(*columns).join(RaterLabel, RaterLabel.task_id == LabelTask.id)
        query = query.join(Item, Item.id == LabelTask.item_id).join(Rater, Rater.id == RaterLabel.rater_id)
        query = query.where(LabelTask.project_id == project.id).order_by(LabelTask.id, Rater.id)
        with self.reading() as connection:
            yield from connection.execution_options(yield_per=2000).execute(query)

    def tasks(self, project: Any) -> Iterator[Any]:
        """Yield all tasks of a project, with `task`, `url`, `title` and `text`."""
        query = sql.select(LabelTask.id.label("task"), Item.url, Item.title, ItemText.text)
        query = query.join(Item, Item.id == LabelTask.item_id).join(ItemText, ItemText.item_id == Item.id)
        query = query.where(LabelTask.project_id == project.id).order_by(LabelTask.id)
        with self.reading() as connection:
            yield from connection.execution_options(yield_per=2000).execute(query)


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
