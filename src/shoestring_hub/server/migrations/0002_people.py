"""Tables for comments, mentions and follows, and the indexes of the full-text search.

Triggers keep the indexes up to date, so no way of writing a row can forget them. SQLite drops the triggers of a table
that a migration remakes: a later migration that alters one of `INDEXED` must call `index_tables` afterwards.
"""

import string
from collections.abc import Mapping, Sequence
from typing import Any

import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

INDEXED = {"hub_project": ("slug", "notes"), "hub_hubrun": ("name", "notes"), "hub_comment": ("text",)}
"""Columns of each table that the search looks at."""
SQLITE = (
    "DROP TABLE IF EXISTS {table}_words",
    "CREATE VIRTUAL TABLE {table}_words USING fts5({columns}, content='{table}', content_rowid='id', "
    "tokenize='unicode61 remove_diacritics 0')",
    "INSERT INTO {table}_words({table}_words) VALUES ('rebuild')",
    "CREATE TRIGGER {table}_words_insert AFTER INSERT ON {table} BEGIN "
    "INSERT INTO {table}_words(rowid, {columns}) VALUES (new.id, {new}); END",
    "CREATE TRIGGER {table}_words_delete AFTER DELETE ON {table} BEGIN "
    "INSERT INTO {table}_words({table}_words, rowid, {columns}) VALUES ('delete', old.id, {old}); END",
    "CREATE TRIGGER {table}_words_update AFTER UPDATE OF {columns} ON {table} WHEN ({old}) IS NOT ({new}) BEGIN "
    "INSERT INTO {table}_words({table}_words, rowid, {columns}) VALUES ('delete', old.id, {old}); "
    "INSERT INTO {table}_words(rowid, {columns}) VALUES (new.id, {new}); END",
)
# PostgreSQL's parser takes `optim.adamw.lr` for a host name and `a/b` for a path, so punctuation is removed first.
WORDS_OF = f"""
CREATE OR REPLACE FUNCTION hub_words_of(written text) RETURNS tsvector LANGUAGE sql IMMUTABLE AS $$
SELECT to_tsvector('pg_catalog.simple', translate(written, '{string.punctuation.replace("'", "''")}', '{" " * 32}'))
$$"""
POSTGRESQL = (
    "CREATE TABLE {table}_words (id bigint PRIMARY KEY REFERENCES {table}(id) ON DELETE CASCADE, "
    "words tsvector NOT NULL)",
    "INSERT INTO {table}_words SELECT id, hub_words_of({joined}) FROM {table}",
    "CREATE INDEX {table}_words_gin ON {table}_words USING gin (words)",
    "CREATE FUNCTION {table}_words_store() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "INSERT INTO {table}_words (id, words) VALUES (new.id, hub_words_of({new_joined})) "
    "ON CONFLICT (id) DO UPDATE SET words = excluded.words; RETURN NULL; END $$",
    "CREATE TRIGGER {table}_words_insert AFTER INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {table}_words_store()",
    "CREATE TRIGGER {table}_words_update AFTER UPDATE OF {columns} ON {table} FOR EACH ROW "
    "WHEN (({old}) IS DISTINCT FROM ({new})) EXECUTE FUNCTION {table}_words_store()",
)


def create_indexes(apps: Any, schema_editor: Any) -> None:
    """Create the index of each table in `INDEXED`, including the rows that the table already has."""
    index_tables(schema_editor, INDEXED)


def index_tables(schema_editor: Any, tables: Mapping[str, Sequence[str]]) -> None:
    """Create the index of some tables, over these columns. SQLite replaces an index that has lost its triggers."""
    vendor = schema_editor.connection.vendor
    if vendor == "postgresql":
        schema_editor.execute(WORDS_OF, params=None)
    for table, columns in tables.items():
        names = {
            "table": table,
            "columns": ", ".join(columns),
            "new": ", ".join(f"new.{column}" for column in columns),
            "old": ", ".join(f"old.{column}" for column in columns),
            "joined": " || ' ' || ".join(columns),
            "new_joined": " || ' ' || ".join(f"new.{column}" for column in columns),
        }
        for statement in SQLITE if vendor == "sqlite" else POSTGRESQL:
            schema_editor.execute(statement.format(**names), params=None)


class Migration(migrations.Migration):
    dependencies = [
        ("hub", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="Comment",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.PositiveIntegerField()),
                ("text", models.TextField(max_length=5000)),
                ("created", models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ("edited", models.DateTimeField(null=True)),
                ("hidden", models.DateTimeField(null=True)),
                ("deleted", models.DateTimeField(null=True)),
                (
                    "person",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="comments",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="comments", to="hub.hubrun"
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("run", "number"), name="one_comment_per_number")],
            },
        ),
        migrations.CreateModel(
            name="Follow",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("created", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "follower",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="follows",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "person",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="followed_by",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="followed_by",
                        to="hub.project",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("follower", "person"), name="one_follow_per_person"),
                    models.UniqueConstraint(fields=("follower", "project"), name="one_follow_per_project"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Mention",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "comment",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="mentions", to="hub.comment"
                    ),
                ),
                (
                    "person",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="mentions",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("comment", "person"), name="one_mention_per_person")],
            },
        ),
        migrations.RunPython(create_indexes, migrations.RunPython.noop),
    ]
