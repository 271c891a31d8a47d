"""The workloads of trainer_samplers.py in vLLM, for an interpreter that has it and nothing of ours.

Reads {model, size, num_repetitions, workloads} as JSON from the standard input; the last line of the output is JSON:
vLLM's version, and by workload the CPU seconds of each repetition. A first one, which is not measured, warms up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# In this process, so that its CPU time is all there is; and on one thread, as the others are.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
MAX_MODEL_LEN = 2048


def play(llm: Any, workload: dict[str, Any]) -> float:
    """Sample a workload; returns its CPU seconds."""
    from vllm import SamplingParams

    start = time.process_time()
    histories = [[] for _ in workload["waves"][0]]
    for wave in workload["waves"]:
        prompts = [history + added for history, (added, _) in zip(histories, wave, strict=True)]
        params = [
            SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False)
            for _, count in wave
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        if workload["has_history"]:
            replies = [list(output.outputs[0].token_ids) for output in outputs]
            histories = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    return time.process_time() - start


def main() -> int:
    """Read, measure, write."""
    asked = json.load(sys.stdin)
    import torch
    import vllm

    torch.set_num_threads(1)
    llm = vllm.LLM(
        asked["model"],
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=asked["size"],
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
    )
    found: dict[str, Any] = {"version": vllm.__version__, "cpu_s": {}}
    for workload in asked["workloads"]:
        times = []
        for _ in range(asked["num_repetitions"] + 1):
            llm.reset_prefix_cache()
            times.append(play(llm, workload))
        found["cpu_s"][workload["name"]] = times[1:]
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
