"""A task of inspect_ai: inspect eval inspect_task.py"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool
def add() -> Tool:
    async def execute(a: int, b: int) -> str:
        """Adds two whole numbers.

        Args:
            a: The first.
            b: The second.
        """
        return str(a + b)

    return execute


@task
def sums() -> Task:
    """One sum, two calls."""
    sample = Sample("What is 2 + 3? Use the tool.", target="It is 5.")
    return Task(dataset=[sample], solver=[use_tools(add()), generate()], scorer=includes())
