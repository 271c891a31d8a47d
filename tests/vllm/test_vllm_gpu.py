"""What of vLLM only a GPU shows; `make test-heavy` leaves it out.

A3R_VLLM_PYTHON=… .venv/bin/pytest -m gpu tests/vllm
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driven_sampler import Driven, ask, num_ended
from tiny_model import build_tiny_model

from swarm_engine.config import SamplerBackend, SamplerConfig
from swarm_engine.models.loading import load_policy

pytestmark = pytest.mark.gpu

GIB = 1 << 30


def test_who_sleeps_gives_the_card_back_and_wakes_with_the_weights(tmp_path: Path) -> None:
    config = SamplerConfig(backend=SamplerBackend.VLLM, max_running=8, vllm_kv_gib=2.0, vllm_sleep_mode=True)
    driven = Driven(load_policy(build_tiny_model(tmp_path / "tiny")), config)
    for version in (1, 2):
        awake, _ = torch.cuda.mem_get_info()
        driven.sampler.begin_sleep()
        driven.sampler.wait_asleep()
        asleep, _ = torch.cuda.mem_get_info()
        assert asleep - awake > 1.9 * GIB, "keys and values"
        driven.sampler.weights_changed(version)  # whose probe says that the weights are back
    assert num_ended(driven.run(ask("a"))) == 1
    driven.sampler.close()
