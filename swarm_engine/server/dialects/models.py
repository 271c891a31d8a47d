"""The lists of models, as either vendor writes them: the policies of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from swarm_engine.protocol import PolicyReady


def openai(policy: PolicyReady, created: datetime) -> Mapping[str, Any]:
    """A policy as OpenAI describes a model."""
    return {
        "id": policy.name,
        "object": "model",
        "created": int(created.timestamp()),
        "owned_by": "swarm",
        "max_model_len": policy.max_context,
    }


def openai_list(models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """All models."""
    return {"object": "list", "data": models}


def anthropic(policy: PolicyReady, created: datetime) -> Mapping[str, Any]:
    """A policy as Anthropic describes a model."""
    return {
        "type": "model",
        "id": policy.name,
        "display_name": policy.name,
        "created_at": created.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": policy.max_context,
    }


def anthropic_list(models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The only page of all models."""
    return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
