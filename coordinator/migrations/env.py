"""Alembic's entry: runs on the connection that `store` hands over, in its transaction."""

from alembic import context

from coordinator.tables import metadata

connection = context.config.attributes["connection"]
# SQLite's DDL is transactional too, as long as the transaction was begun before it.
context.configure(
    connection=connection, target_metadata=metadata, render_as_batch=True, transactional_ddl=True
)
context.run_migrations()
