"""The first tables: items and their texts, addresses, cursors, projects, tasks, raters and labels."""

import sqlalchemy as sa
from alembic import op

revision = "first"
down_revision = None
branch_labels = None
depends_on = None


TABLES = {
    "items": (
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("url", sa.Text(), nullable=False, unique=True),
        sa.Column("source", sa.String(100), nullable=False),
        sa.Column("host", sa.String(300), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("fetched", sa.DateTime(), nullable=False),
    ),
    "contents": (
        sa.Column("item_id", sa.Integer(), sa.ForeignKey("items.id"), primary_key=True),
        sa.Column("text", sa.Text(), nullable=False),
    ),
    "addresses": (
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("url", sa.Text(), nullable=False, unique=True),
        sa.Column("site", sa.String(300), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    ),
    "cursors": (
        sa.Column("source", sa.String(100), primary_key=True),
        sa.Column("position", sa.Text(), nullable=False),
        sa.Column("done", sa.Integer(), nullable=False),
    ),
    "projects": (
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False, unique=True),
        sa.Column("question", sa.Text(), nullable=False),
        sa.Column("choices", sa.JSON(), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
    ),
    "tasks": (
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("project_id", sa.Integer(), sa.ForeignKey("projects.id"), nullable=False),
        sa.Column("item_id", sa.Integer(), sa.ForeignKey("items.id"), nullable=False),
        sa.Column("labelled", sa.Integer(), nullable=False),
        sa.UniqueConstraint("project_id", "item_id"),
    ),
    "raters": (
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, unique=True),
        sa.Column("token", sa.String(64), nullable=False, unique=True),
    ),
    "labels": (
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("task_id", sa.Integer(), sa.ForeignKey("tasks.id"), nullable=False),
        sa.Column("rater_id", sa.Integer(), sa.ForeignKey("raters.id"), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("made", sa.DateTime(), nullable=False),
        sa.UniqueConstraint("task_id", "rater_id"),
    ),
}
"""Maps each table to its columns and constraints, in the order in which the tables are created."""
INDEXES = {
    "items_host_fetched": ("items", ["host", "fetched", "id"]),
    "items_source_id": ("items", ["source", "id"]),
    "items_digest": ("items", ["digest"]),
    "addresses_site_state": ("addresses", ["site", "state", "id"]),
    "tasks_project_labelled": ("tasks", ["project_id", "labelled", "id"]),
    "labels_rater_made": ("labels", ["rater_id", "made", "id"]),
}
"""Maps each index to its table and columns."""


def upgrade() -> None:
    """Create the tables and their indexes."""
    for table, columns in TABLES.items():
        op.create_table(table, *columns)
    for index, (table, names) in INDEXES.items():
        op.create_index(index, table, names)


def downgrade() -> None:
    """Drop all tables."""
    for table in reversed(TABLES):
        op.drop_table(table)
