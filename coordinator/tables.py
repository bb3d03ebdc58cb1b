"""The tables: the journal, its projections, and the registry of sites, tokens and people.

Projections (columns as in `projections`) can be rebuilt from the journal; the registry and the
ledger cannot, they are truth themselves. `REVISION` is the newest migration: a database that is
new or up to date needs no look at the migrations, nor the memory to load them.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

REVISION: Final = "0001"

metadata: Final = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

_Id = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER counts up by itself there
_NAME = String(255)
_ID = String(64)


def _text(name: str, default: str = "") -> Column[str]:
    return Column(name, Text, nullable=False, server_default=default)


def _int(name: str, default: int = 0) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=str(default))


def _float(name: str) -> Column[float]:
    return Column(name, Float, nullable=False, server_default="0")


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False, server_default=false())


journal: Final = Table(
    "journal",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("now", Float, nullable=False),  # job time
    Column("at", Float, nullable=False),  # Unix time, for people
    Column("version", Integer, nullable=False),  # journal.SCHEMA when it was written
    Column("job", _ID, nullable=False),
    Column("kind", _ID, nullable=False),
    Column("event", Text, nullable=False),
    Index("ix_journal_job", "job", "seq"),
)

jobs: Final = Table(
    "jobs",
    metadata,
    Column("job", _ID, primary_key=True),
    _text("name"),
    _text("task"),
    _text("by"),
    _text("spec"),
    _text("state"),
    _text("reason"),
    _int("version", -1),
    _int("round"),
    _int("model_bytes"),
    _int("dense_bytes"),
    _int("checkpoint", -1),
    _float("created_at"),
    Column("ended_at", Float),
)

job_sites: Final = Table(
    "job_sites",
    metadata,
    Column("job", _ID, primary_key=True),
    Column("site", _NAME, primary_key=True),
    _text("role", "site"),
    _flag("active"),
    _int("epoch"),
    _int("clock"),
    _int("train_examples"),
    _int("eval_examples"),
    _int("joined_at_version"),
    _text("note"),
)

versions: Final = Table(
    "versions",
    metadata,
    Column("job", _ID, primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    _int("round"),
    _text("cohort", "[]"),
    _text("missing", "{}"),
    _int("active_sites"),
    _text("digest"),
    _int("bytes"),
    _float("update_norm"),
    _float("model_norm"),
    _float("fold_seconds"),
    _text("by"),
    Column("made_at", Float),
)

updates: Final = Table(
    "updates",
    metadata,
    Column("number", _Id, primary_key=True, autoincrement=True),  # the order of settling
    Column("job", _ID, nullable=False),
    Column("site", _NAME, nullable=False),
    _int("epoch"),
    _int("clock"),
    _int("attempt"),
    _text("verdict"),
    _text("reason"),
    _text("spool"),
    Column("version", BigInteger),
    _int("wire_bytes"),
    _float("examples"),
    _int("steps"),
    _float("norm"),
    _float("train_seconds"),
    _text("metrics", "{}"),
    _float("settled_at"),
    UniqueConstraint("job", "site", "epoch", "clock"),
    Index("ix_updates_version", "job", "version"),
    sqlite_autoincrement=True,
)

evaluations: Final = Table(
    "evaluations",
    metadata,
    Column("job", _ID, primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("site", _NAME, primary_key=True),
    _text("role", "site"),
    _float("examples"),
    _text("metrics", "{}"),
    _float("at"),
)

PROJECTIONS: Final[dict[str, Table]] = {
    table.name: table for table in (jobs, job_sites, versions, updates, evaluations)
}

sites: Final = Table(
    "sites",
    metadata,
    Column("name", _NAME, primary_key=True),
    _text("role", "site"),
    _text("state", "active"),
    _text("secret_hash"),
    _text("public_key"),
    _text("software"),
    _text("tasks", "[]"),
    _float("joined_at"),
    Index("ix_sites_secret_hash", "secret_hash", unique=True),
)

join_tokens: Final = Table(
    "join_tokens",
    metadata,
    Column("id", _ID, primary_key=True),
    _text("secret_hash"),
    _text("site"),
    _text("role", "site"),
    _text("created_by"),
    _float("created_at"),
    _float("expires_at"),
    Column("used_at", Float),
    _text("used_by"),
    _flag("revoked"),
)

people: Final = Table(
    "people",
    metadata,
    Column("name", _NAME, primary_key=True),
    _text("role", "viewer"),
    _text("secret_hash"),
    _float("created_at"),
)

ledger: Final = Table(
    "ledger",
    metadata,
    Column("site", _NAME, primary_key=True),
    Column("job", _ID, primary_key=True),
    _int("up"),
    _int("down"),
)

# Alembic's own table, which says what a database was brought to.
revisions: Final = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
