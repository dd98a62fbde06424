"""Alembic's environment: runs the migrations on the connection that `open_store` passes."""

from alembic import context

from shoestring_recipes.annotation.tables import StoredTables

context.configure(
    connection=context.config.attributes["connection"], target_metadata=StoredTables.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
