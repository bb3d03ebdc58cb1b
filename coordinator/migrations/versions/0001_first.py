"""The journal, its projections, and the registry of sites, tokens and people."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "evaluations",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("site", sa.String(length=255), nullable=False),
        sa.Column("role", sa.Text(), server_default="site", nullable=False),
        sa.Column("examples", sa.Float(), server_default="0", nullable=False),
        sa.Column("metrics", sa.Text(), server_default="{}", nullable=False),
        sa.Column("at", sa.Float(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("job", "version", "site", name=op.f("pk_evaluations")),
    )
    op.create_table(
        "job_sites",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("site", sa.String(length=255), nullable=False),
        sa.Column("role", sa.Text(), server_default="site", nullable=False),
        sa.Column("active", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("clock", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("train_examples", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("eval_examples", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("joined_at_version", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("note", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("job", "site", name=op.f("pk_job_sites")),
    )
    op.create_table(
        "jobs",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("task", sa.Text(), server_default="", nullable=False),
        sa.Column("by", sa.Text(), server_default="", nullable=False),
        sa.Column("spec", sa.Text(), server_default="", nullable=False),
        sa.Column("state", sa.Text(), server_default="", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("version", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("round", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("model_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("dense_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("checkpoint", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("created_at", sa.Float(), server_default="0", nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_jobs")),
    )
    op.create_table(
        "join_tokens",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("secret_hash", sa.Text(), server_default="", nullable=False),
        sa.Column("site", sa.Text(), server_default="", nullable=False),
        sa.Column("role", sa.Text(), server_default="site", nullable=False),
        sa.Column("created_by", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.Float(), server_default="0", nullable=False),
        sa.Column("expires_at", sa.Float(), server_default="0", nullable=False),
        sa.Column("used_at", sa.Float(), nullable=True),
        sa.Column("used_by", sa.Text(), server_default="", nullable=False),
        sa.Column("revoked", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_join_tokens")),
    )
    op.create_table(
        "journal",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("now", sa.Float(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_journal")),
    )
    op.create_index("ix_journal_job", "journal", ["job", "seq"], unique=False)
    op.create_table(
        "ledger",
        sa.Column("site", sa.String(length=255), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("up", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("down", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("site", "job", name=op.f("pk_ledger")),
    )
    op.create_table(
        "people",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("role", sa.Text(), server_default="viewer", nullable=False),
        sa.Column("secret_hash", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.Float(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_people")),
    )
    op.create_table(
        "sites",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("role", sa.Text(), server_default="site", nullable=False),
        sa.Column("state", sa.Text(), server_default="active", nullable=False),
        sa.Column("secret_hash", sa.Text(), server_default="", nullable=False),
        sa.Column("public_key", sa.Text(), server_default="", nullable=False),
        sa.Column("software", sa.Text(), server_default="", nullable=False),
        sa.Column("tasks", sa.Text(), server_default="[]", nullable=False),
        sa.Column("joined_at", sa.Float(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_sites")),
    )
    op.create_index("ix_sites_secret_hash", "sites", ["secret_hash"], unique=True)
    op.create_table(
        "updates",
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("site", sa.String(length=255), nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("clock", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("verdict", sa.Text(), server_default="", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("spool", sa.Text(), server_default="", nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("wire_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("examples", sa.Float(), server_default="0", nullable=False),
        sa.Column("steps", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("norm", sa.Float(), server_default="0", nullable=False),
        sa.Column("train_seconds", sa.Float(), server_default="0", nullable=False),
        sa.Column("metrics", sa.Text(), server_default="{}", nullable=False),
        sa.Column("settled_at", sa.Float(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_updates")),
        sa.UniqueConstraint("job", "site", "epoch", "clock", name=op.f("uq_updates_job")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_updates_version", "updates", ["job", "version"], unique=False)
    op.create_table(
        "versions",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("round", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cohort", sa.Text(), server_default="[]", nullable=False),
        sa.Column("missing", sa.Text(), server_default="{}", nullable=False),
        sa.Column("active_sites", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("digest", sa.Text(), server_default="", nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("update_norm", sa.Float(), server_default="0", nullable=False),
        sa.Column("model_norm", sa.Float(), server_default="0", nullable=False),
        sa.Column("fold_seconds", sa.Float(), server_default="0", nullable=False),
        sa.Column("by", sa.Text(), server_default="", nullable=False),
        sa.Column("made_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("job", "version", name=op.f("pk_versions")),
    )


def downgrade() -> None:
    op.drop_table("versions")
    op.drop_table("updates")
    op.drop_table("sites")
    op.drop_table("people")
    op.drop_table("ledger")
    op.drop_table("journal")
    op.drop_table("join_tokens")
    op.drop_table("jobs")
    op.drop_table("job_sites")
    op.drop_table("evaluations")
