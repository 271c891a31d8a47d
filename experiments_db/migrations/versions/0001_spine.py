"""The spine: from a study to its claims, with the rules of the log that SQL can keep as triggers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001_spine"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.String(26)
SHA256 = sa.String(64)
JSON = sa.Text()
"""Canonical JSON."""
MOMENT = sa.DateTime(timezone=True)
"""UTC."""

ENDS = "('SUCCEEDED', 'FAILED_CODE', 'FAILED_OOM', 'FAILED_NAN', 'TIMEOUT', 'PREEMPTED', 'CANCELLED', 'LOST')"
CONFIRMED_CLAIM = """
    NEW.strength = 'confirmed' AND (
        NOT EXISTS (
            SELECT 1 FROM claim_evidence JOIN estimate ON estimate.id = claim_evidence.estimate_id
            WHERE claim_evidence.claim_id = NEW.id AND claim_evidence.relation = 'supports'
            AND estimate.role = 'confirm'
        )
        OR EXISTS (
            SELECT 1 FROM audit_finding WHERE severity = 'high' AND resolved_by IS NULL
            AND (target_id = NEW.id OR target_id = NEW.study_id OR target_id IN (
                SELECT estimate_id FROM claim_evidence WHERE claim_id = NEW.id
                UNION SELECT experiment_id FROM claim_evidence WHERE claim_id = NEW.id
                UNION SELECT estimate_input.experiment_id FROM estimate_input
                JOIN claim_evidence ON claim_evidence.estimate_id = estimate_input.estimate_id
                WHERE claim_evidence.claim_id = NEW.id
            ))
        )
    )"""
MIXED_INPUT = """
    EXISTS (SELECT 1 FROM estimate WHERE id = NEW.estimate_id AND role = 'confirm')
    AND EXISTS (SELECT 1 FROM experiment WHERE id = NEW.experiment_id AND role = 'select')"""
MIXED_ESTIMATE = """
    NEW.role = 'confirm' AND EXISTS (
        SELECT 1 FROM estimate_input JOIN experiment ON experiment.id = estimate_input.experiment_id
        WHERE estimate_input.estimate_id = NEW.id AND experiment.role = 'select'
    )"""
MIXED_EXPERIMENT = """
    NEW.role = 'select' AND EXISTS (
        SELECT 1 FROM estimate_input JOIN estimate ON estimate.id = estimate_input.estimate_id
        WHERE estimate_input.experiment_id = NEW.id AND estimate.role = 'confirm'
    )"""

RULES = (
    # table, moment, condition (always where None), message
    ("prereg", "UPDATE", None, "a locked plan can not be changed; amend it"),
    ("prereg", "DELETE", None, "a locked plan can not be deleted"),
    ("amendment", "UPDATE", None, "an amendment can not be changed"),
    ("amendment", "DELETE", None, "an amendment can not be deleted"),
    ("job_event", "UPDATE", None, "events of a job are only added"),
    ("job_event", "DELETE", None, "events of a job are only added"),
    ("engine_event", "UPDATE", None, "events of an engine are only added"),
    (
        "job",
        "UPDATE",
        f"OLD.state IN {ENDS} AND NEW.state <> OLD.state",
        "the end of a job is written once; begin another attempt",
    ),
    (
        "estimate_input",
        "INSERT",
        MIXED_INPUT,
        "an estimate that confirms can not rest on a run that was used to select",
    ),
    (
        "estimate_input",
        "UPDATE",
        MIXED_INPUT,
        "an estimate that confirms can not rest on a run that was used to select",
    ),
    ("estimate", "UPDATE", MIXED_ESTIMATE, "an estimate that confirms can not rest on a run that was used to select"),
    ("experiment", "UPDATE", MIXED_EXPERIMENT, "a run behind an estimate that confirms can not be used to select"),
    ("claim", "INSERT", CONFIRMED_CLAIM, "a confirmed claim needs an estimate that confirms and no open high finding"),
    ("claim", "UPDATE", CONFIRMED_CLAIM, "a confirmed claim needs an estimate that confirms and no open high finding"),
)


def closed(name: str, *values: str) -> sa.Enum:
    """Text that is one of some values."""
    return sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=32)


def upgrade() -> None:
    create_tables()
    create_rules()


def create_rules() -> None:
    """The triggers; on both databases a broken rule is an integrity error with its message."""
    is_postgres = op.get_bind().dialect.name == "postgresql"
    for table, moment, condition, message in RULES:
        name = f"tr_{table}_{moment.lower()}"
        if is_postgres:
            reply = "OLD" if moment == "DELETE" else "NEW"
            raises = f"RAISE EXCEPTION '{message}' USING ERRCODE = 'integrity_constraint_violation';"
            body = raises if condition is None else f"IF {condition} THEN {raises} END IF;"
            op.execute(
                f"CREATE FUNCTION {name}() RETURNS trigger AS $$ BEGIN {body} RETURN {reply}; END $$ LANGUAGE plpgsql"
            )
            op.execute(f"CREATE TRIGGER {name} BEFORE {moment} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()")
        else:
            when = "" if condition is None else f"WHEN {condition}"
            op.execute(
                f"CREATE TRIGGER {name} BEFORE {moment} ON {table} {when} BEGIN SELECT RAISE(ABORT, '{message}'); END"
            )


def create_tables() -> None:
    op.create_table(
        "artifact",
        sa.Column("id", ID, nullable=False),
        sa.Column(
            "owner_type",
            closed(
                "owner_type",
                "study",
                "prereg",
                "stage",
                "blueprint",
                "experiment",
                "job",
                "eval_run",
                "estimate",
                "decision",
                "claim",
            ),
            nullable=False,
        ),
        sa.Column("owner_id", ID, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("sha256", SHA256, nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifact")),
        sa.UniqueConstraint(
            "owner_type", "owner_id", "kind", "path", name=op.f("uq_artifact_owner_type_owner_id_kind_path")
        ),
    )
    op.create_table(
        "note",
        sa.Column("id", ID, nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("evidence", JSON, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_note")),
    )
    op.create_table(
        "split",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", closed("split_role", "train", "val", "test_screen", "test_sealed"), nullable=False),
        sa.Column("content_sha", SHA256, nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("opened_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_split")),
        sa.UniqueConstraint("name", "content_sha", name=op.f("uq_split_name_content_sha")),
    )
    op.create_table(
        "study",
        sa.Column("id", ID, nullable=False),
        sa.Column("kind", closed("study_kind", "research", "vibe"), nullable=False),
        sa.Column("question", sa.Text(), nullable=False),
        sa.Column(
            "status",
            closed("study_status", "draft", "locked", "running", "paused", "done", "failed", "abandoned"),
            nullable=False,
        ),
        sa.Column("status_reason", sa.Text(), nullable=True),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("budget", JSON, nullable=False),
        sa.Column("code_sha", sa.String(), nullable=True),
        sa.Column("env_fingerprint", JSON, nullable=False),
        sa.Column("graph_version", sa.String(), nullable=True),
        sa.Column("key", sa.String(), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("finished_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_study")),
        sa.UniqueConstraint("key", name=op.f("uq_study_key")),
    )
    op.create_table(
        "assumption",
        sa.Column("id", ID, nullable=False),
        sa.Column("study_id", ID, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("source", closed("assumption_source", "user", "llm", "default"), nullable=False),
        sa.Column("confirmed_by", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_assumption")),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_assumption_study_id")),
    )
    op.create_index(op.f("ix_assumption_study_id"), "assumption", ["study_id"])
    op.create_table(
        "audit_finding",
        sa.Column("id", ID, nullable=False),
        sa.Column(
            "target_type",
            closed(
                "owner_type",
                "study",
                "prereg",
                "stage",
                "blueprint",
                "experiment",
                "job",
                "eval_run",
                "estimate",
                "decision",
                "claim",
            ),
            nullable=False,
        ),
        sa.Column("target_id", ID, nullable=False),
        sa.Column("detector", sa.String(), nullable=False),
        sa.Column("severity", closed("severity", "low", "medium", "high"), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("evidence_artifact_id", ID, nullable=True),
        sa.Column("resolved_by", sa.String(), nullable=True),
        sa.Column("resolved_at", MOMENT, nullable=True),
        sa.Column("at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_finding")),
        sa.ForeignKeyConstraint(
            ["evidence_artifact_id"], ["artifact.id"], name=op.f("fk_audit_finding_evidence_artifact_id")
        ),
    )
    op.create_index(op.f("ix_audit_finding_evidence_artifact_id"), "audit_finding", ["evidence_artifact_id"])
    op.create_index(op.f("ix_audit_finding_target_id"), "audit_finding", ["target_id"])
    op.create_table(
        "budget_entry",
        sa.Column("id", ID, nullable=False),
        sa.Column("study_id", ID, nullable=False),
        sa.Column("kind", closed("budget_kind", "usd", "tokens", "gpu_s", "wall_s", "jobs"), nullable=False),
        sa.Column("amount", sa.Double(), nullable=False),
        sa.Column("state", closed("budget_state", "reserved", "spent", "released"), nullable=False),
        sa.Column("ref", sa.String(), nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budget_entry")),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_budget_entry_study_id")),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_budget_entry_amount")),
        sa.UniqueConstraint("study_id", "kind", "ref", name=op.f("uq_budget_entry_study_id_kind_ref")),
    )
    op.create_table(
        "llm_call",
        sa.Column("id", ID, nullable=False),
        sa.Column("study_id", ID, nullable=True),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("prompt_sha", SHA256, nullable=False),
        sa.Column("response_artifact_id", ID, nullable=True),
        sa.Column("tokens_in", sa.BigInteger(), nullable=False),
        sa.Column("tokens_out", sa.BigInteger(), nullable=False),
        sa.Column("usd", sa.Double(), nullable=True),
        sa.Column("cache_hit", sa.Boolean(), nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_llm_call")),
        sa.ForeignKeyConstraint(
            ["response_artifact_id"], ["artifact.id"], name=op.f("fk_llm_call_response_artifact_id")
        ),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_llm_call_study_id")),
    )
    op.create_index(op.f("ix_llm_call_response_artifact_id"), "llm_call", ["response_artifact_id"])
    op.create_index(op.f("ix_llm_call_study_id"), "llm_call", ["study_id"])
    op.create_table(
        "prereg",
        sa.Column("id", ID, nullable=False),
        sa.Column("study_id", ID, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("canonical_json", sa.Text(), nullable=False),
        sa.Column("sha256", SHA256, nullable=False),
        sa.Column("locked_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prereg")),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_prereg_study_id")),
        sa.CheckConstraint("length(sha256) = 64", name=op.f("ck_prereg_sha256")),
        sa.CheckConstraint("version >= 1", name=op.f("ck_prereg_version")),
        sa.UniqueConstraint("study_id", "version", name=op.f("uq_prereg_study_id_version")),
    )
    op.create_table(
        "amendment",
        sa.Column("id", ID, nullable=False),
        sa.Column("prereg_id", ID, nullable=False),
        sa.Column("before_sha", SHA256, nullable=False),
        sa.Column("after_sha", SHA256, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("data_seen", sa.Boolean(), nullable=False),
        sa.Column("approved_by", sa.String(), nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_amendment")),
        sa.ForeignKeyConstraint(["prereg_id"], ["prereg.id"], name=op.f("fk_amendment_prereg_id")),
        sa.UniqueConstraint("prereg_id", "after_sha", name=op.f("uq_amendment_prereg_id_after_sha")),
    )
    op.create_table(
        "factor",
        sa.Column("id", ID, nullable=False),
        sa.Column("prereg_id", ID, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("levels", JSON, nullable=False),
        sa.Column("kind", closed("factor_kind", "ordinal", "categorical", "continuous"), nullable=False),
        sa.Column("unit", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_factor")),
        sa.ForeignKeyConstraint(["prereg_id"], ["prereg.id"], name=op.f("fk_factor_prereg_id")),
        sa.UniqueConstraint("prereg_id", "name", name=op.f("uq_factor_prereg_id_name")),
    )
    op.create_table(
        "hypothesis",
        sa.Column("id", ID, nullable=False),
        sa.Column("prereg_id", ID, nullable=False),
        sa.Column("code", sa.String(), nullable=False),
        sa.Column("arm_key", sa.String(), nullable=True),
        sa.Column("statement", sa.Text(), nullable=False),
        sa.Column("estimand", sa.String(), nullable=False),
        sa.Column("direction", closed("direction", "better", "worse", "different", "equivalent"), nullable=False),
        sa.Column("delta_min", sa.Double(), nullable=True),
        sa.Column("delta_equiv", sa.Double(), nullable=True),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("role", closed("hypothesis_role", "primary", "secondary", "exploratory"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_hypothesis")),
        sa.ForeignKeyConstraint(["prereg_id"], ["prereg.id"], name=op.f("fk_hypothesis_prereg_id")),
        sa.UniqueConstraint("prereg_id", "code", name=op.f("uq_hypothesis_prereg_id_code")),
    )
    op.create_table(
        "stage",
        sa.Column("id", ID, nullable=False),
        sa.Column("prereg_id", ID, nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column(
            "kind",
            closed("stage_kind", "noise_floor", "screen", "compare", "refine", "confirm", "diagnostic", "single"),
            nullable=False,
        ),
        sa.Column("rungs", JSON, nullable=False),
        sa.Column("seeds_policy", JSON, nullable=False),
        sa.Column("eval_split_id", ID, nullable=True),
        sa.Column("max_jobs", sa.Integer(), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stage")),
        sa.ForeignKeyConstraint(["eval_split_id"], ["split.id"], name=op.f("fk_stage_eval_split_id")),
        sa.ForeignKeyConstraint(["prereg_id"], ["prereg.id"], name=op.f("fk_stage_prereg_id")),
        sa.UniqueConstraint("prereg_id", "n", name=op.f("uq_stage_prereg_id_n")),
    )
    op.create_index(op.f("ix_stage_eval_split_id"), "stage", ["eval_split_id"])
    op.create_table(
        "blueprint",
        sa.Column("id", ID, nullable=False),
        sa.Column("stage_id", ID, nullable=False),
        sa.Column("arm_key", sa.String(), nullable=False),
        sa.Column("objective", sa.Text(), nullable=False),
        sa.Column("hypothesis_id", ID, nullable=True),
        sa.Column("expected", JSON, nullable=False),
        sa.Column("template_id", sa.String(), nullable=False),
        sa.Column("template_version", sa.String(), nullable=True),
        sa.Column("template_sha", sa.String(), nullable=True),
        sa.Column("params", JSON, nullable=False),
        sa.Column("controls", JSON, nullable=False),
        sa.Column("environment", JSON, nullable=False),
        sa.Column("command", JSON, nullable=False),
        sa.Column("outputs", JSON, nullable=False),
        sa.Column("resource", JSON, nullable=False),
        sa.Column("time_limit_s", sa.Double(), nullable=True),
        sa.Column("metrics", JSON, nullable=False),
        sa.Column("notes", sa.Text(), nullable=True),
        sa.Column("sha256", SHA256, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_blueprint")),
        sa.ForeignKeyConstraint(["hypothesis_id"], ["hypothesis.id"], name=op.f("fk_blueprint_hypothesis_id")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_blueprint_stage_id")),
        sa.CheckConstraint("length(sha256) = 64", name=op.f("ck_blueprint_sha256")),
        sa.UniqueConstraint("stage_id", "arm_key", name=op.f("uq_blueprint_stage_id_arm_key")),
    )
    op.create_index(op.f("ix_blueprint_hypothesis_id"), "blueprint", ["hypothesis_id"])
    op.create_table(
        "claim",
        sa.Column("id", ID, nullable=False),
        sa.Column("study_id", ID, nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("hypothesis_id", ID, nullable=True),
        sa.Column(
            "form",
            closed(
                "claim_form", "superior", "inferior", "equivalent", "inconclusive", "threshold", "trend", "descriptive"
            ),
            nullable=False,
        ),
        sa.Column("text_template", sa.Text(), nullable=False),
        sa.Column("slots", JSON, nullable=False),
        sa.Column(
            "strength", closed("claim_strength", "descriptive", "exploratory", "supported", "confirmed"), nullable=False
        ),
        sa.Column("caveats", JSON, nullable=False),
        sa.Column("status", closed("claim_status", "draft", "verified", "withdrawn"), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_claim")),
        sa.ForeignKeyConstraint(["hypothesis_id"], ["hypothesis.id"], name=op.f("fk_claim_hypothesis_id")),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_claim_study_id")),
        sa.UniqueConstraint("study_id", "key", name=op.f("uq_claim_study_id_key")),
    )
    op.create_index(op.f("ix_claim_hypothesis_id"), "claim", ["hypothesis_id"])
    op.create_table(
        "decision",
        sa.Column("id", ID, nullable=False),
        sa.Column("stage_id", ID, nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("predicate_trace", JSON, nullable=False),
        sa.Column("branch", sa.String(), nullable=False),
        sa.Column("auto", sa.Boolean(), nullable=False),
        sa.Column("overridden_by", sa.String(), nullable=True),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decision")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_decision_stage_id")),
        sa.UniqueConstraint("stage_id", "n", name=op.f("uq_decision_stage_id_n")),
    )
    op.create_table(
        "estimate",
        sa.Column("id", ID, nullable=False),
        sa.Column("study_id", ID, nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("stage_id", ID, nullable=True),
        sa.Column("hypothesis_id", ID, nullable=True),
        sa.Column("role", closed("run_role", "select", "confirm"), nullable=False),
        sa.Column("estimand", sa.String(), nullable=False),
        sa.Column("query_sql", sa.Text(), nullable=False),
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("params", JSON, nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("unit", sa.String(), nullable=False),
        sa.Column("ci_lo", sa.Double(), nullable=True),
        sa.Column("ci_hi", sa.Double(), nullable=True),
        sa.Column("level", sa.Double(), nullable=False),
        sa.Column("se_seed", sa.Double(), nullable=True),
        sa.Column("se_eval", sa.Double(), nullable=True),
        sa.Column("n_seeds", sa.Integer(), nullable=False),
        sa.Column("n_items", sa.Integer(), nullable=False),
        sa.Column("p", sa.Double(), nullable=True),
        sa.Column("p_adj", sa.Double(), nullable=True),
        sa.Column("family", sa.String(), nullable=True),
        sa.Column("analysis_sha", sa.String(), nullable=True),
        sa.Column("inputs_sha", SHA256, nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_estimate")),
        sa.ForeignKeyConstraint(["hypothesis_id"], ["hypothesis.id"], name=op.f("fk_estimate_hypothesis_id")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_estimate_stage_id")),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_estimate_study_id")),
        sa.CheckConstraint("level > 0 AND level < 1", name=op.f("ck_estimate_level")),
        sa.UniqueConstraint("study_id", "key", name=op.f("uq_estimate_study_id_key")),
    )
    op.create_index(op.f("ix_estimate_hypothesis_id"), "estimate", ["hypothesis_id"])
    op.create_index(op.f("ix_estimate_stage_id"), "estimate", ["stage_id"])
    op.create_table(
        "decision_estimate",
        sa.Column("decision_id", ID, nullable=False),
        sa.Column("estimate_id", ID, nullable=False),
        sa.PrimaryKeyConstraint("decision_id", "estimate_id", name=op.f("pk_decision_estimate")),
        sa.ForeignKeyConstraint(["decision_id"], ["decision.id"], name=op.f("fk_decision_estimate_decision_id")),
        sa.ForeignKeyConstraint(["estimate_id"], ["estimate.id"], name=op.f("fk_decision_estimate_estimate_id")),
    )
    op.create_table(
        "experiment",
        sa.Column("id", ID, nullable=False),
        sa.Column("blueprint_id", ID, nullable=False),
        sa.Column("seed_train", sa.BigInteger(), nullable=False),
        sa.Column("seed_env", sa.BigInteger(), nullable=True),
        sa.Column("seed_eval", sa.BigInteger(), nullable=True),
        sa.Column("rung", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("role", closed("run_role", "select", "confirm"), nullable=False),
        sa.Column(
            "status",
            closed(
                "experiment_status", "planned", "running", "interrupted", "done", "failed", "cancelled", "quarantined"
            ),
            nullable=False,
        ),
        sa.Column("quarantine_reason", sa.Text(), nullable=True),
        sa.Column("run_dir", sa.Text(), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("finished_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiment")),
        sa.ForeignKeyConstraint(["blueprint_id"], ["blueprint.id"], name=op.f("fk_experiment_blueprint_id")),
        sa.UniqueConstraint("key", name=op.f("uq_experiment_key")),
    )
    op.create_index(op.f("ix_experiment_blueprint_id"), "experiment", ["blueprint_id"])
    op.create_table(
        "claim_evidence",
        sa.Column("id", ID, nullable=False),
        sa.Column("claim_id", ID, nullable=False),
        sa.Column("relation", closed("relation", "supports", "contradicts", "context"), nullable=False),
        sa.Column("estimate_id", ID, nullable=True),
        sa.Column("experiment_id", ID, nullable=True),
        sa.Column("artifact_id", ID, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_claim_evidence")),
        sa.ForeignKeyConstraint(["artifact_id"], ["artifact.id"], name=op.f("fk_claim_evidence_artifact_id")),
        sa.ForeignKeyConstraint(["claim_id"], ["claim.id"], name=op.f("fk_claim_evidence_claim_id")),
        sa.ForeignKeyConstraint(["estimate_id"], ["estimate.id"], name=op.f("fk_claim_evidence_estimate_id")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiment.id"], name=op.f("fk_claim_evidence_experiment_id")),
        sa.CheckConstraint(
            "CASE WHEN estimate_id IS NULL THEN 0 ELSE 1 END + CASE WHEN experiment_id IS NULL THEN 0 ELSE 1 END"
            " + CASE WHEN artifact_id IS NULL THEN 0 ELSE 1 END = 1",
            name=op.f("ck_claim_evidence_one_target"),
        ),
        sa.UniqueConstraint("claim_id", "artifact_id", name=op.f("uq_claim_evidence_claim_id_artifact_id")),
        sa.UniqueConstraint("claim_id", "estimate_id", name=op.f("uq_claim_evidence_claim_id_estimate_id")),
        sa.UniqueConstraint("claim_id", "experiment_id", name=op.f("uq_claim_evidence_claim_id_experiment_id")),
    )
    op.create_index(op.f("ix_claim_evidence_artifact_id"), "claim_evidence", ["artifact_id"])
    op.create_index(op.f("ix_claim_evidence_estimate_id"), "claim_evidence", ["estimate_id"])
    op.create_index(op.f("ix_claim_evidence_experiment_id"), "claim_evidence", ["experiment_id"])
    op.create_table(
        "engine_event",
        sa.Column("server_id", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("experiment_id", ID, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("payload", JSON, nullable=False),
        sa.PrimaryKeyConstraint("server_id", "seq", name=op.f("pk_engine_event")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiment.id"], name=op.f("fk_engine_event_experiment_id")),
        sa.CheckConstraint("seq >= 1", name=op.f("ck_engine_event_seq")),
    )
    op.create_index(op.f("ix_engine_event_experiment_id"), "engine_event", ["experiment_id"])
    op.create_table(
        "episode",
        sa.Column("id", ID, nullable=False),
        sa.Column("experiment_id", ID, nullable=False),
        sa.Column("episode_id", sa.String(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("group_id", sa.String(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("mode", sa.String(), nullable=False),
        sa.Column("tags", JSON, nullable=False),
        sa.Column("claimed_at", MOMENT, nullable=True),
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("rewards", JSON, nullable=False),
        sa.Column("metrics", JSON, nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=True),
        sa.Column("num_calls", sa.Integer(), nullable=True),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=True),
        sa.Column("num_sampled_tokens", sa.BigInteger(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("trained_step", sa.BigInteger(), nullable=True),
        sa.Column("drop_reason", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_episode")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiment.id"], name=op.f("fk_episode_experiment_id")),
        sa.UniqueConstraint("experiment_id", "episode_id", name=op.f("uq_episode_experiment_id_episode_id")),
    )
    op.create_table(
        "estimate_input",
        sa.Column("estimate_id", ID, nullable=False),
        sa.Column("experiment_id", ID, nullable=False),
        sa.PrimaryKeyConstraint("estimate_id", "experiment_id", name=op.f("pk_estimate_input")),
        sa.ForeignKeyConstraint(["estimate_id"], ["estimate.id"], name=op.f("fk_estimate_input_estimate_id")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiment.id"], name=op.f("fk_estimate_input_experiment_id")),
    )
    op.create_table(
        "eval_run",
        sa.Column("id", ID, nullable=False),
        sa.Column("experiment_id", ID, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("split_name", sa.String(), nullable=False),
        sa.Column("split_id", ID, nullable=True),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("n_attempted", sa.Integer(), nullable=False),
        sa.Column("n_valid", sa.Integer(), nullable=False),
        sa.Column("n_policy_fault", sa.Integer(), nullable=False),
        sa.Column("n_env_fault", sa.Integer(), nullable=False),
        sa.Column("checkpoint_sha", SHA256, nullable=True),
        sa.Column("started_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_eval_run")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiment.id"], name=op.f("fk_eval_run_experiment_id")),
        sa.ForeignKeyConstraint(["split_id"], ["split.id"], name=op.f("fk_eval_run_split_id")),
        sa.CheckConstraint("n_attempted = n_valid + n_policy_fault + n_env_fault", name=op.f("ck_eval_run_counts")),
        sa.CheckConstraint(
            "n_valid >= 0 AND n_policy_fault >= 0 AND n_env_fault >= 0", name=op.f("ck_eval_run_not_negative")
        ),
        sa.UniqueConstraint(
            "experiment_id",
            "step",
            "split_name",
            "temperature",
            "label",
            name=op.f("uq_eval_run_experiment_id_step_split_name_temperature_label"),
        ),
    )
    op.create_index(op.f("ix_eval_run_split_id"), "eval_run", ["split_id"])
    op.create_table(
        "job",
        sa.Column("id", ID, nullable=False),
        sa.Column("experiment_id", ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("backend_id", sa.String(), nullable=True),
        sa.Column(
            "state",
            closed(
                "job_state",
                "INTENT",
                "SUBMITTED",
                "QUEUED",
                "RUNNING",
                "SUCCEEDED",
                "FAILED_CODE",
                "FAILED_OOM",
                "FAILED_NAN",
                "TIMEOUT",
                "PREEMPTED",
                "CANCELLED",
                "LOST",
            ),
            nullable=False,
        ),
        sa.Column("state_cause", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("signal", sa.Integer(), nullable=True),
        sa.Column("host", sa.String(), nullable=True),
        sa.Column("gpus", JSON, nullable=False),
        sa.Column("submitted_at", MOMENT, nullable=True),
        sa.Column("started_at", MOMENT, nullable=True),
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.Column("heartbeat_at", MOMENT, nullable=True),
        sa.Column("log_path", sa.Text(), nullable=True),
        sa.Column("cost_gpu_s", sa.Double(), nullable=False),
        sa.Column("fencing", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiment.id"], name=op.f("fk_job_experiment_id")),
        sa.CheckConstraint("attempt >= 1", name=op.f("ck_job_attempt")),
        sa.CheckConstraint("fencing >= 0", name=op.f("ck_job_fencing")),
        sa.UniqueConstraint("experiment_id", "attempt", name=op.f("uq_job_experiment_id_attempt")),
        sa.UniqueConstraint("key", name=op.f("uq_job_key")),
    )
    op.create_table(
        "metric_point",
        sa.Column("id", ID, nullable=False),
        sa.Column("experiment_id", ID, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("wall_s", sa.Double(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("mark", closed("value_mark", "finite", "nan", "inf", "-inf", "-0", "absent"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metric_point")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiment.id"], name=op.f("fk_metric_point_experiment_id")),
        sa.CheckConstraint("(value IS NOT NULL) = (mark IN ('finite', '-0'))", name=op.f("ck_metric_point_value")),
        sa.UniqueConstraint(
            "experiment_id", "name", "segment", "step", name=op.f("uq_metric_point_experiment_id_name_segment_step")
        ),
    )
    op.create_table(
        "eval_item",
        sa.Column("id", ID, nullable=False),
        sa.Column("eval_run_id", ID, nullable=False),
        sa.Column("item_id", sa.String(), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("fault", closed("fault", "none", "policy", "env"), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("episode_row_id", ID, nullable=True),
        sa.Column("trace_artifact_id", ID, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_eval_item")),
        sa.ForeignKeyConstraint(["episode_row_id"], ["episode.id"], name=op.f("fk_eval_item_episode_row_id")),
        sa.ForeignKeyConstraint(["eval_run_id"], ["eval_run.id"], name=op.f("fk_eval_item_eval_run_id")),
        sa.ForeignKeyConstraint(["trace_artifact_id"], ["artifact.id"], name=op.f("fk_eval_item_trace_artifact_id")),
        sa.UniqueConstraint("eval_run_id", "item_id", "sample", name=op.f("uq_eval_item_eval_run_id_item_id_sample")),
    )
    op.create_index(op.f("ix_eval_item_episode_row_id"), "eval_item", ["episode_row_id"])
    op.create_index(op.f("ix_eval_item_trace_artifact_id"), "eval_item", ["trace_artifact_id"])
    op.create_table(
        "job_event",
        sa.Column("id", ID, nullable=False),
        sa.Column("job_id", ID, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("payload", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_event")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_job_event_job_id")),
    )
    op.create_index(op.f("ix_job_event_job_id"), "job_event", ["job_id"])


def downgrade() -> None:
    is_postgres = op.get_bind().dialect.name == "postgresql"
    for table, moment, _, _ in RULES:
        name = f"tr_{table}_{moment.lower()}"
        op.execute(f"DROP FUNCTION {name}() CASCADE" if is_postgres else f"DROP TRIGGER {name}")
    for table in (
        "job_event",
        "eval_item",
        "metric_point",
        "job",
        "eval_run",
        "estimate_input",
        "episode",
        "engine_event",
        "claim_evidence",
        "experiment",
        "decision_estimate",
        "estimate",
        "decision",
        "claim",
        "blueprint",
        "stage",
        "hypothesis",
        "factor",
        "amendment",
        "prereg",
        "llm_call",
        "budget_entry",
        "audit_finding",
        "assumption",
        "study",
        "split",
        "note",
        "artifact",
    ):
        op.drop_table(table)
