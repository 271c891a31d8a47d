"""Puts a report on disk: report.md with its charts, report.html, report.json. The same rows give the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from a3r.prereg.check import Checked, check
from a3r.report import html, markdown, write
from a3r.report.bundle import Bundle
from a3r.report.document import Document, Figure
from a3r.report.slots import Source, filled


def files_of(bundle: Bundle, title: str) -> dict[str, str]:
    """Every file of the report, by name. Pure.

    Args:
        title: the game's, for people.
    Raises:
        ReportError: the report would state what no row says.
    """
    checked = check(bundle.plan)
    document = write.compose(bundle, checked)
    source = write.slots_of(bundle, title, checked)
    charts = {
        f"{block.name}.svg": block.svg
        for section in document.sections
        for block in section.blocks
        if isinstance(block, Figure)
    }
    data = as_data(bundle, document, source, checked)
    return {
        "report.md": markdown.render(document, source),
        "report.html": html.render(document, source),
        "report.json": json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n",
        **charts,
    }


def as_data(bundle: Bundle, document: Document, source: Source, checked: Checked) -> dict[str, Any]:
    """The report for programs: the verdicts, the claims with their numbers, every estimate."""
    quoted = document.estimates()
    return {
        "format": "a3r-report-1",
        "study": bundle.study.id,
        "question": bundle.study.question,
        "plan_sha256": bundle.prereg.sha256,
        "plan": bundle.plan.model_dump(mode="json"),
        "verdicts": [{"arm": arm, "leaf": leaf.value} for arm, leaf in write.verdicts(bundle)],
        "claims": [
            {
                "key": claim.key,
                "form": claim.form.value,
                "strength": claim.strength.value,
                "text": filled(claim.text_template, source),
                "caveats": [filled(caveat, source) for caveat in claim.caveats],
                "estimates": dict(claim.slots),
            }
            for claim in bundle.claims
        ],
        "estimates": {
            key: {
                "estimand": number.estimand,
                "method": number.method,
                "value": number.value,
                "unit": number.unit,
                "ci_low": number.bounds[0],
                "ci_high": number.bounds[1],
                "level": number.level,
                "n_seeds": number.n_seeds,
                "n_items": number.n_items,
                "p": number.p,
                "p_adjusted": number.p_adj,
                "inputs_sha256": number.inputs_sha,
                "is_quoted": key in quoted,
            }
            for key, number in sorted(bundle.numbers.items())
        },
        "runs": [
            {
                "id": run.experiment_id,
                "arm": run.arm,
                "seed": run.seed,
                "status": run.status.value,
                "failure": record.failure,
                "attempts": run.attempt,
                "seconds": round(run.seconds, 3),
                "curve": [[each.episodes, each.mean] for each in record.measurements],
                "warnings": [asdict(warned) for warned in warnings],
                "left_out": dict(left_out),
            }
            for run, record, warnings, left_out in zip(
                bundle.runs, bundle.records, bundle.warnings, bundle.left_out, strict=True
            )
        ],
        "decisions": write.trace_rows(bundle),
        "simulated": {
            world.value: {leaf.value: share for leaf, share in outcome.shares.items()}
            for world, outcome in checked.simulated.items()
        },
    }


def save(files: Mapping[str, str], folder: Path) -> dict[Path, str]:
    """Write the files, each whole or not at all; returns their hashes by path."""
    folder.mkdir(parents=True, exist_ok=True)
    hashes: dict[Path, str] = {}
    for name, content in files.items():
        draft = folder / f".{name}.{os.getpid()}"
        draft.write_text(content, encoding="utf-8", newline="\n")
        draft.replace(folder / name)
        hashes[folder / name] = hashlib.sha256(content.encode()).hexdigest()
    return hashes
