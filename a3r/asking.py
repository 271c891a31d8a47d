"""The first look at a question, before anything slow is imported and before anything is written."""

from __future__ import annotations

import sys

from a3r.errors import UsageError
from a3r.planner.builtin import builtin_catalogue
from a3r.planner.offline import Reading, read


def understand(question: str, *, yes: bool, dry_run: bool, as_json: bool) -> Reading:
    """What the question asks, where somebody is there to approve the plan.

    Raises:
        QuestionError: it can't be read; the message says what can.
        UsageError: the plan would wait for a yes that nobody can give.
    """
    reading = read(question, builtin_catalogue())
    if not yes and not dry_run and (as_json or not sys.stdin.isatty()):
        raise UsageError(
            "the plan needs a yes, and nobody is here to give it: add --yes to run it, or --dry-run to see it"
        )
    return reading
