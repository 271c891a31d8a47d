"""What makes a request one that no backend can serve."""

from __future__ import annotations

from swarm_engine.protocol import Generate, Rejected


def refusal_of(request: Generate, vocab_size: int, max_context: int) -> Rejected | None:
    """Why a request is refused before anything is computed, with what it gave, the limit and the way out; None where
    it can be served. What only some backends take, such as a script or a grammar, they look at themselves."""
    for param, ids in (("prompt", request.prompt_ids), ("script", request.script or ())):
        if (strange := next((token for token in ids if not 0 <= token < vocab_size), None)) is not None:
            why = f"token id {strange} is outside the vocabulary of {vocab_size}"
            return Rejected(request.request_id, why, param)
    biased = request.params.processors.logit_bias if request.params.processors is not None else ()
    if (strange := next((token for token, _ in biased if not 0 <= token < vocab_size), None)) is not None:
        why = f"token id {strange} is outside the vocabulary of {vocab_size}"
        return Rejected(request.request_id, why, "logit_bias")
    problem = _problem(request, vocab_size, max_context)
    return None if problem is None else Rejected(request.request_id, problem)


def _problem(request: Generate, vocab_size: int, max_context: int) -> str | None:
    prompt, params = request.prompt_ids, request.params
    if not prompt:
        return "the prompt is empty; give at least one token"
    if len(prompt) >= max_context:
        return (
            f"the prompt has {len(prompt)} tokens, the context of policy {request.policy!r} holds {max_context}, reply "
            "included; shorten the conversation"
        )
    if params.max_tokens < 1:
        return f"max_tokens is {params.max_tokens}; it must be at least 1"
    if not 0 <= params.temperature < float("inf"):
        return f"temperature is {params.temperature}; it must be finite and at least 0"
    if not 0 <= params.top_logprobs <= vocab_size:
        return f"top_logprobs is {params.top_logprobs}; it must be from 0 to the vocabulary's {vocab_size}"
    return None
