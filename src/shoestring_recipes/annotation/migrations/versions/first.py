"""The first tables: items and their texts, addresses, cursors, projects, tasks, raters and labels."""

import sqlalchemy as sa
from alembic import op

revision = "first"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables and their indexes."""
    op.create_table(
        "items",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("url", sa.Text(), nullable=False, unique=True),
        sa.Column("source", sa.String(100), nullable=False),
        sa.Column("host", sa.String(300), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("fetched", sa.DateTime(), nullable=False),
    )
    op.create_index("items_host_fetched", "items", ["host", "fetched", "id"])
    op.create_index("items_source_id", "items", ["source", "id"])
    op.create_index("items_digest", "items", ["digest"])
    op.create_table(
        "contents",
        sa.Column("item_id", sa.Integer(), sa.ForeignKey("items.id"), primary_key=True),
        sa.Column("text", sa.Text(), nullable=False),
    )
    op.create_table(
        "addresses",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("url", sa.Text(), nullable=False, unique=True),
        sa.Column("site", sa.String(300), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )
    op.create_index("addresses_site_state", "addresses", ["site", "state", "id"])
    op.create_table(
        "cursors",
        sa.Column("source", sa.String(100), primary_key=True),
        sa.Column("position", sa.Text(), nullable=False),
        sa.Column("done", sa.Integer(), nullable=False),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False, unique=True),
        sa.Column("question", sa.Text(), nullable=False),
        sa.Column("choices", sa.JSON(), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("project_id", sa.Integer(), sa.ForeignKey("projects.id"), nullable=False),
        sa.Column("item_id", sa.Integer(), sa.ForeignKey("items.id"), nullable=False),
        sa.Column("labelled", sa.Integer(), nullable=False),
        sa.UniqueConstraint("project_id", "item_id"),
    )
    op.create_index("tasks_project_labelled", "tasks", ["project_id", "labelled", "id"])
    op.create_table(
        "raters",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, unique=True),
        sa.Column("token", sa.String(64), nullable=False, unique=True),
    )
    op.create_table(
        "labels",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("task_id", sa.Integer(), sa.ForeignKey("tasks.id"), nullable=False),
        sa.Column("rater_id", sa.Integer(), sa.ForeignKey("raters.id"), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("made", sa.DateTime(), nullable=False),
        sa.UniqueConstraint("task_id", "rater_id"),
    )
    op.create_index("labels_rater_made", "labels", ["rater_id", "made", "id"])


def downgrade() -> None:
    """Drop all tables."""
    for table in ("labels", "raters", "tasks", "projects", "cursors", "addresses", "contents", "items"):
        op.drop_table(table)
