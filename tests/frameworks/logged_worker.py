"""The real worker, which also writes down what its sampler was given and what it returned.

python logged_worker.py --log FILE --socket ADDRESS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from swarm_engine import hosted, worker
from swarm_engine.protocol import Generate, Sampled
from swarm_engine.sampler import Reply
from swarm_engine.sampler.slots import SlotSampler


class LoggedSampler(SlotSampler):
    """Writes one line a request and one a piece of reply."""

    log: Path

    def submit(self, request: Generate) -> list[Reply]:
        """Write the prompt down and pass it on."""
        self._write(request.request_id, prompt_ids=request.prompt_ids)
        return super().submit(request)

    def step(self) -> list[Reply]:
        """Pass on, and write the tokens down."""
        replies = super().step()
        for reply in replies:
            if isinstance(reply, Sampled):
                self._write(reply.request_id, token_ids=reply.token_ids, logprobs=reply.logprobs)
        return replies

    def _write(self, request_id: str, **fields: object) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"request_id": request_id, **fields}) + "\n")


if __name__ == "__main__":
    LoggedSampler.log = Path(sys.argv[sys.argv.index("--log") + 1])
    hosted.SlotSampler = LoggedSampler  # type: ignore[misc, attr-defined]
    del sys.argv[1:3]
    worker.main()
