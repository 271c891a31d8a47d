"""Grammars inside vLLM: our own constraint takes tokens from the row of its request, as in the embedded sampler.

vLLM's structured outputs are not used, for they know one end token and another set of control tokens. Imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from swarm_engine.errors import BadRequestError
from swarm_engine.sampler.grammar import Constraint

KEY = "constrained_request"
"""Of `SamplingParams.extra_args`; its value is the request's id."""


class Follower:
    """Follows one reply through its grammar."""

    def __init__(self, constraint: Constraint) -> None:
        self.problem: str | None = None
        """Why the reply can't go on; None while it can. An error raised inside vLLM would end every request."""
        self._constraint = constraint
        self._num_taken = 0

    def __call__(self, output_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        """The logits of the next token, minus infinity where the grammar allows none."""
        try:
            for token in output_ids[self._num_taken :]:
                self._constraint.take(token)
            self._num_taken = len(output_ids)
            is_allowed_V = torch.from_numpy(self._constraint.allowed())
        except BadRequestError as error:
            self.problem = str(error)
            return logits_V
        return logits_V.masked_fill_(~is_allowed_V.to(logits_V.device), float("-inf"))

    def close(self) -> None:
        """The reply is over."""
        self._constraint.close()


def processor_for(followers: Mapping[str, Follower]) -> type[AdapterLogitsProcessor]:
    """The class that vLLM makes its logits processor of; it finds a request's follower by `KEY`."""

    class GrammarProcessor(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
            return followers.get((params.extra_args or {}).get(KEY, ""))

    return GrammarProcessor
