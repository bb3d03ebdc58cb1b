"""Alembic migrations of the coordinator's database, run by `store` at start."""
