"""The tables of the store: what was crawled, what is to be labelled, who labels, and the labels."""

from __future__ import annotations

from datetime import datetime

from shoestring.core.errors import ConfigError

try:
    from sqlalchemy import JSON, DateTime, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint
    from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
except ImportError as error:
    raise ConfigError("the store needs SQLAlchemy and alembic", hint='pip install "shoestring[annotation]"') from error

WAITING, STORED, FAILED, REFUSED, SKIPPED = "waiting", "stored", "failed", "refused", "skipped"
"""States of an address: not requested yet; page stored; request failed; not allowed (by robots.txt, or because it leads
to another host); and no page to store (a redirect, not HTML, or without text)."""


class StoredTables(DeclarativeBase):
    """The base of all tables."""


class Item(StoredTables):
    """Metadata of a page or of another piece of text; the text itself is in `ItemText`."""

    __tablename__ = "items"
    __table_args__ = (
        Index("items_host_fetched", "host", "fetched", "id"),
        Index("items_source_id", "source", "id"),
        Index("items_digest", "digest"),
    )
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    url: Mapped[str] = mapped_column(Text, unique=True)
    source: Mapped[str] = mapped_column(String(100))
    host: Mapped[str] = mapped_column(String(300))
    title: Mapped[str] = mapped_column(Text, default="")
    size: Mapped[int] = mapped_column(Integer, default=0)
    digest: Mapped[str] = mapped_column(String(32))
    fetched: Mapped[datetime] = mapped_column(DateTime)


class ItemText(StoredTables):
    """The text of an item."""

    __tablename__ = "contents"
    item_id: Mapped[int] = mapped_column(ForeignKey("items.id"), primary_key=True)
    text: Mapped[str] = mapped_column(Text)


class Address(StoredTables):
    """An address that a crawl has found, and its state."""

    __tablename__ = "addresses"
    __table_args__ = (Index("addresses_site_state", "site", "state", "id"),)
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    url: Mapped[str] = mapped_column(Text, unique=True)
    site: Mapped[str] = mapped_column(String(300))
    depth: Mapped[int] = mapped_column(Integer, default=0)
    state: Mapped[str] = mapped_column(String(10), default=WAITING)
    reason: Mapped[str] = mapped_column(Text, default="")


class Cursor(StoredTables):
    """The position in a paged interface from which the next call continues; `done` is 1 after the last page."""

    __tablename__ = "cursors"
    source: Mapped[str] = mapped_column(String(100), primary_key=True)
    position: Mapped[str] = mapped_column(Text, default="")
    done: Mapped[int] = mapped_column(Integer, default=0)


class LabelProject(StoredTables):
    """A question about items, with the answers to choose from."""

    __tablename__ = "projects"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    question: Mapped[str] = mapped_column(Text)
    choices: Mapped[list[str]] = mapped_column(JSON)
    wanted: Mapped[int] = mapped_column(Integer)


class LabelTask(StoredTables):
    """An item to be labelled in a project; `labelled` is the number of raters who have answered or skipped it."""

    __tablename__ = "tasks"
    __table_args__ = (
        UniqueConstraint("project_id", "item_id"),
        Index("tasks_project_labelled", "project_id", "labelled", "id"),
    )
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    project_id: Mapped[int] = mapped_column(ForeignKey("projects.id"))
    item_id: Mapped[int] = mapped_column(ForeignKey("items.id"))
    labelled: Mapped[int] = mapped_column(Integer, default=0)


class Rater(StoredTables):
    """Somebody who labels; the store holds only a hash of the rater's token."""

    __tablename__ = "raters"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(200), unique=True)
    token: Mapped[str] = mapped_column(String(64), unique=True)


class RaterLabel(StoredTables):
    """The answer of a rater to a task: the number of the choice, or None if the rater has skipped the task."""

    __tablename__ = "labels"
    __table_args__ = (
        UniqueConstraint("task_id", "rater_id"),
        Index("labels_rater_made", "rater_id", "made", "id"),
    )
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    task_id: Mapped[int] = mapped_column(ForeignKey("tasks.id"))
    rater_id: Mapped[int] = mapped_column(ForeignKey("raters.id"))
    choice: Mapped[int | None] = mapped_column(Integer)
    seconds: Mapped[float] = mapped_column(Float, default=0.0)
    made: Mapped[datetime] = mapped_column(DateTime)
