"""Alembic's entry: runs on the connection that `app.store.schema` hands over."""

from alembic import context

from app.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
